package route

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// facts are what the kernel does about an address that was made local in some way.
type facts struct {
	// Listed: programs find it among the machine's addresses.
	Listed bool
	// Answers: the machine answers others that ask on a network which of them has it: ARP, neighbour discovery. Strict:
	// also with the parameters that upstream's option strictARP sets.
	Answers, Strict bool
	// Open: a server that listens on all addresses is reached by it. Ping: it is answered for.
	Open, Ping bool
	// Bind: a program may take it for its own.
	Bind bool
	// Source is the address that connections of this machine to it come from: "node", "itself".
	Source string
	// Pretends: a packet of another machine's that bears it as its source is let in.
	Pretends bool
}

// A way makes an address local; source is the machine's address.
type way struct {
	name string
	// four and six are the facts of each family.
	four, six facts
	use       func(t testing.TB, a, source netip.Addr)
}

// ownTable is the number of a routing table that nobody else uses.
const ownTable = 84

func ways() []way {
	// Neighbour discovery answers for addresses of the very interface, so what ARP does and can be told not to do has no
	// counterpart.
	return []way{
		{
			name: "not at all",
			four: facts{Source: "node", Pretends: true},
			six:  facts{Source: "node", Pretends: true},
			use:  func(testing.TB, netip.Addr, netip.Addr) {},
		},
		{
			name: "route",
			four: facts{Answers: true, Open: true, Ping: true, Bind: true, Source: "node"},
			six:  facts{Open: true, Ping: true, Source: "node", Pretends: true},
			use: func(t testing.TB, a, source netip.Addr) {
				t.Helper()
				do(t, Kernel{}, Op{Add, Local{a, source}})
			},
		},
		{
			name: "route in a table of its own",
			four: facts{Answers: true, Open: true, Source: "node"},
			six:  facts{Open: true, Ping: true, Source: "node", Pretends: true},
			use: func(t testing.TB, a, source netip.Addr) {
				t.Helper()
				addRule(t, a)
				must(t, netlink.RouteAdd(&netlink.Route{
					Dst: hostNet(a), LinkIndex: loopback, Table: ownTable, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
					Src: source.AsSlice(),
				}))
			},
		},
		{
			name: "one route for the whole range",
			four: facts{Answers: true, Open: true, Ping: true, Bind: true, Source: "node"},
			six:  facts{Open: true, Ping: true, Source: "node", Pretends: true},
			use: func(t testing.TB, a, source netip.Addr) {
				t.Helper()
				const bits = 16
				whole := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}
				whole.IP = whole.IP.Mask(whole.Mask)
				must(t, netlink.RouteAdd(&netlink.Route{
					Dst: whole, LinkIndex: loopback, Table: localTable, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
					Src: source.AsSlice(),
				}))
			},
		},
		{
			name: "device",
			four: facts{Listed: true, Answers: true, Open: true, Ping: true, Bind: true, Source: "itself"},
			six:  facts{Listed: true, Open: true, Ping: true, Bind: true, Source: "itself", Pretends: true},
			use: func(t testing.TB, a, _ netip.Addr) {
				t.Helper()
				d := Dummy{UpstreamDevice}
				ensure(t, d)
				do(t, d, Op{Add, Local{Addr: a}})
				awaitLocal(t, a)
			},
		},
	}
}

// awaitLocal waits until an address on an interface is local: for IPv6 the kernel sees to it a little later.
func awaitLocal(t testing.TB, a netip.Addr) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); len(routesTo(t, a.String())) == 0; {
		if time.Now().After(end) {
			t.Fatalf("%s on an interface does not become local", a)
		}
	}
}

// awaitUp waits until interfaces send what they are given: the kernel sees to it a little later.
func awaitUp(t testing.TB, indexes ...int) {
	t.Helper()
	for _, index := range indexes {
		for end := time.Now().Add(10 * time.Second); ; {
			l, err := netlink.LinkByIndex(index)
			must(t, err)
			if l.Attrs().OperState == netlink.OperUp {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("interface %s does not come up", l.Attrs().Name)
			}
		}
	}
}

// addRule has the table of our own asked before that of local addresses.
func addRule(t testing.TB, a netip.Addr) {
	t.Helper()
	rule := netlink.NewRule()
	rule.Family, rule.Table, rule.Priority = int(addressFamily(model.FamilyOf(a))), ownTable, 0
	must(t, netlink.RuleAdd(rule))
}

// What each way of making an address local does besides. The decision for one of them rests on this.
func TestKernelFacts(t *testing.T) {
	for _, w := range ways() {
		for _, rpFilter := range []string{"0", "1"} {
			for family, want := range map[string]facts{"IPv4": w.four, "IPv6": w.six} {
				if family == "IPv6" && rpFilter != "0" {
					continue // it has no such parameter
				}
				t.Run(w.name+" "+family+" rp_filter="+rpFilter, func(t *testing.T) {
					l := newLab(t, family, rpFilter)
					w.use(t, l.vip, l.node)
					if diff := cmp.Diff(want, l.facts()); diff != "" {
						t.Errorf("facts (-want +got):\n%s", diff)
					}
				})
			}
		}
	}
}

// A lab is this machine with an interface "a", at the other end of which a test speaks for another machine.
type lab struct {
	t               *testing.T
	node, peer, vip netip.Addr
	nodeMAC, mac    []byte
	// raw sees and sends what is on the link; server listens on all addresses.
	raw    int
	server net.PacketConn
}

const serverPort = 2222

func newLab(t *testing.T, family, rpFilter string) *lab {
	t.Helper()
	l := &lab{t: t, node: addr("192.0.2.1"), peer: addr("192.0.2.77"), vip: addr("10.70.0.1")}
	bits := 24
	if family == "IPv6" {
		l.node, l.peer, l.vip, bits = addr("fd99::1"), addr("fd99::77"), addr("fd70::1"), 64
	}
	isolate(t)
	pin(t)
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}))
	set(t, "net/ipv4/conf/all/rp_filter", rpFilter)
	set(t, "net/ipv6/conf/b/disable_ipv6", "1")
	set(t, "net/ipv4/conf/a/route_localnet", "0")
	a, err := netlink.LinkByName("a")
	must(t, err)
	b, err := netlink.LinkByName("b")
	must(t, err)
	l.nodeMAC, l.mac = a.Attrs().HardwareAddr, b.Attrs().HardwareAddr
	address := hostAddr(t, l.node.String())
	address.Mask = net.CIDRMask(bits, l.node.BitLen())
	must(t, netlink.AddrAdd(a, address))
	must(t, netlink.LinkSetUp(b))
	must(t, netlink.LinkSetUp(a))
	awaitUp(t, a.Attrs().Index, b.Attrs().Index)
	awaitLocal(t, l.node)
	must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: a.Attrs().Index, Family: int(addressFamily(model.FamilyOf(l.peer))), State: netlink.NUD_PERMANENT,
		IP: l.peer.AsSlice(), HardwareAddr: l.mac,
	}))
	must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: a.Attrs().Index, Gw: l.peer.AsSlice()}))
	l.listen(b.Attrs().Index)
	return l
}

// pin keeps the calling thread on one processor, so that what it sends arrives in the order in which it is sent.
func pin(t testing.TB) {
	t.Helper()
	var have, one unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &have))
	for i := range 1024 {
		if have.IsSet(i) {
			one.Set(i)
			break
		}
	}
	must(t, unix.SchedSetaffinity(0, &one))
}

// set writes a kernel parameter of the namespace.
func set(t testing.TB, name, value string) {
	t.Helper()
	must(t, os.WriteFile("/proc/sys/"+name, []byte(value), 0))
}

func (l *lab) listen(index int) {
	t := l.t
	t.Helper()
	const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network byte order
	raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(raw) })
	must(t, unix.Bind(raw, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}))
	must(t, unix.SetsockoptTimeval(raw, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}))
	server, err := net.ListenPacket("udp", ":2222")
	must(t, err)
	t.Cleanup(func() { _ = server.Close() })
	must(t, server.SetDeadline(time.Now().Add(time.Minute)))
	l.raw, l.server = raw, server
}

func (l *lab) facts() facts {
	f := facts{
		Listed: l.listed(), Answers: l.answers(), Ping: l.answered("echo", echo),
		Open:     l.reached(netip.AddrPortFrom(l.peer, 1), l.vip),
		Pretends: l.reached(netip.AddrPortFrom(l.vip, 1), l.node),
		Bind:     l.bind(), Source: l.source(),
	}
	if l.vip.Is4() {
		set(l.t, "net/ipv4/conf/all/arp_ignore", "1")
		set(l.t, "net/ipv4/conf/all/arp_announce", "2")
		f.Strict = l.answers()
	}
	return f
}

func (l *lab) listed() bool {
	l.t.Helper()
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	must(l.t, err)
	for _, a := range all {
		if got, _ := netip.AddrFromSlice(a.IP); got.Unmap() == l.vip {
			return true
		}
	}
	return false
}

func (l *lab) answers() bool {
	return l.answered("neighbour", func(_, mac []byte, from, who netip.Addr) []byte {
		if who.Is6() {
			return neighbourSolicitation(mac, from, who)
		}
		return arpRequest(mac, from, who)
	})
}

// answered asks something of the virtual address and then of the machine's own, and tells whether the virtual one
// answered before the other did.
func (l *lab) answered(what string, ask func(dst, src []byte, from, to netip.Addr) []byte) bool {
	l.t.Helper()
	l.send(ask(l.nodeMAC, l.mac, l.peer, l.vip))
	l.send(ask(l.nodeMAC, l.mac, l.peer, l.node))
	buf := make([]byte, 2000)
	for seen := false; ; {
		n, from, err := unix.Recvfrom(l.raw, buf, 0)
		if err != nil {
			l.t.Fatalf("%s does not answer for its own address: %v", what, err)
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); !ok || ll.Pkttype == unix.PACKET_OUTGOING {
			continue // of this test's
		}
		switch answer(buf[:n]) {
		case what + " " + l.vip.String():
			seen = true
		case what + " " + l.node.String():
			return seen
		}
	}
}

func (l *lab) send(frame []byte) {
	l.t.Helper()
	_, err := unix.Write(l.raw, frame)
	must(l.t, err)
}

// answer tells what a frame says: "neighbour" or "echo", and for which address.
func answer(b []byte) string {
	const link, ip4, ip6 = 14, 20, 40
	address := func(at, size int) string {
		a, _ := netip.AddrFromSlice(b[at : at+size])
		return a.String()
	}
	if len(b) < link+ip4+8 {
		return ""
	}
	switch kind := int(b[12])<<8 | int(b[13]); {
	case kind == etherARP && b[link+7] == 2:
		return "neighbour " + address(link+14, 4)
	case kind == etherIPv4 && b[link+9] == protoICMP && b[link+ip4] == 0:
		return "echo " + address(link+12, 4)
	case kind != etherIPv6 || len(b) < link+ip6+8 || b[link+6] != protoICMP6:
		return ""
	case b[link+ip6] == 136:
		return "neighbour " + address(link+ip6+8, 16)
	case b[link+ip6] == 129:
		return "echo " + address(link+8, 16)
	}
	return ""
}

// reached sends a datagram to the server, and then one that is sure to arrive, and tells whether the first did.
func (l *lab) reached(from netip.AddrPort, to netip.Addr) bool {
	l.t.Helper()
	l.send(datagram(l.nodeMAC, l.mac, from, netip.AddrPortFrom(to, serverPort), "first"))
	l.send(datagram(l.nodeMAC, l.mac, netip.AddrPortFrom(l.peer, 1), netip.AddrPortFrom(l.node, serverPort), "second"))
	var got []string
	buf := make([]byte, 100)
	for {
		n, _, err := l.server.ReadFrom(buf)
		must(l.t, err)
		got = append(got, string(buf[:n]))
		if got[len(got)-1] == "second" {
			return strings.Join(got, " ") == "first second"
		}
	}
}

func (l *lab) bind() bool {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(l.vip, 0)))
	if err != nil {
		return false
	}
	_ = c.Close()
	return true
}

func (l *lab) source() string {
	l.t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(l.vip, serverPort)))
	must(l.t, err)
	defer func() { _ = c.Close() }()
	switch a := netip.MustParseAddrPort(c.LocalAddr().String()).Addr(); a {
	case l.vip:
		return "itself"
	case l.node:
		return "node"
	default:
		return a.String()
	}
}
