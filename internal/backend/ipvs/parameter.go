package ipvs

// A Parameter is a kernel parameter that this mode needs, by its path below /proc/sys.
type Parameter struct {
	Name, Value string
	// Without says what happens where the kernel refuses it.
	Without string
}

// The first versions of Linux whose IPVS handles a connection that comes again from the same port: since 4.1 there is a
// choice, since 5.9 the default is right. Source: Documentation/networking/ipvs-sysctl.rst.
const (
	reuseMajor, reuseMinor           = 4, 1
	reuseRightMajor, reuseRightMinor = 5, 9
)

// Parameters gives what a kernel of a version needs, and what an operator should know of how connections are handled
// that come again from the same port: "" if all is well.
func Parameters(major, minor int, strictARP bool) (list []Parameter, notice string) {
	list = []Parameter{
		{"net/ipv4/vs/conntrack", "1", "connections to Services are not masqueraded"},
		{"net/ipv4/vs/expire_nodest_conn", "1", "flows to an endpoint that is gone are lost until they time out"},
		{"net/ipv4/vs/expire_quiescent_template", "1", "clients with session affinity stay at an endpoint that is going"},
		{"net/ipv4/ip_forward", "1", "packets of pods and of other machines are not forwarded"},
	}
	reuse := Parameter{Name: "net/ipv4/vs/conn_reuse_mode"}
	switch {
	case older(major, minor, reuseMajor, reuseMinor):
		notice = "this kernel sends a client that uses a port again to the endpoint of its last connection, also one that is " +
			"going; Linux 5.9 does not"
	case older(major, minor, reuseRightMajor, reuseRightMinor):
		reuse.Value, reuse.Without = "0", "a client that uses a port again waits a second"
		list = append(list, reuse)
		notice = "conn_reuse_mode is 0, so that a client that uses a port again need not wait a second, but may be sent to an " +
			"endpoint that is going; Linux 5.9 has neither fault"
	default:
		reuse.Value, reuse.Without = "1", "a client that uses a port again may be sent to an endpoint that is going"
		list = append(list, reuse)
	}
	if strictARP {
		const without = "this machine answers ARP for the addresses of Services"
		list = append(list, Parameter{"net/ipv4/conf/all/arp_ignore", "1", without},
			Parameter{"net/ipv4/conf/all/arp_announce", "2", without})
	}
	return list, notice
}

func older(major, minor, thanMajor, thanMinor int) bool {
	return major < thanMajor || major == thanMajor && minor < thanMinor
}
