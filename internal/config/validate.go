package config

import (
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

const (
	notNegative = "must be greater than or equal to 0"
	positive    = "must be greater than 0"
	bitRange    = "must be within the range [0, 31]"
)

// validate checks a defaulted configuration. All mistakes are told at once, under the paths and in the words that
// upstream uses, as scripts and operators look for them.
func validate(c *v1alpha1.KubeProxyConfiguration) error {
	if err := available(c.Mode); err != nil {
		return err
	}
	root := field.NewPath("KubeProxyConfiguration")
	var errs field.ErrorList
	errs = append(errs, checkIPTables(c, root)...)
	errs = append(errs, checkLinux(c, root.Child("KubeProxyLinuxConfiguration"))...)
	errs = append(errs, checkMode(c.Mode, root.Child("Mode"))...)
	errs = append(errs, checkIPVS(c, root.Child("KubeProxyIPVSConfiguration"))...)
	if c.ClientConnection.Burst < 0 {
		errs = append(errs, field.Invalid(root.Child("ClientConnection", "Burst"), int64(c.ClientConnection.Burst),
			notNegative))
	}
	errs = append(errs, checkPeriods(c, root)...)
	errs = append(errs, checkAddresses(c, root)...)
	errs = append(errs, checkNodePorts(c.NodePortAddresses, root.Child("NodePortAddresses"))...)
	errs = append(errs, checkLocal(c, root)...)
	errs = append(errs, checkLog(&c.Logging, root.Child("logging"))...)
	if err := errs.ToAggregate(); err != nil {
		return fmt.Errorf("invalid configuration: %w", err)
	}
	return nil
}

// available refuses the modes that are known and cannot be run by this version, before anything else is said.
func available(mode v1alpha1.ProxyMode) error {
	switch mode {
	case "nftables", "userspace":
		return fmt.Errorf("proxy mode %q is not available in this version; use iptables or ipvs", mode)
	}
	return nil
}

func checkIPTables(c *v1alpha1.KubeProxyConfiguration, root *field.Path) field.ErrorList {
	if bit := *c.IPTables.MasqueradeBit; bit < 0 || bit > 31 {
		path := root.Child("KubeProxyIPTablesConfiguration", "MasqueradeBit")
		return field.ErrorList{field.Invalid(path, bit, bitRange)}
	}
	return nil
}

// checkIPVS looks at what only IPVS mode uses, if that is the mode.
func checkIPVS(c *v1alpha1.KubeProxyConfiguration, path *field.Path) field.ErrorList {
	if Mode(c.Mode) != ModeIPVS {
		return nil
	}
	var errs field.ErrorList
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"TCPTimeout", c.IPVS.TCPTimeout.Duration},
		{"TCPFinTimeout", c.IPVS.TCPFinTimeout.Duration},
		{"UDPTimeout", c.IPVS.UDPTimeout.Duration},
	} {
		switch {
		case d.value < 0:
			errs = append(errs, field.Invalid(path.Child(d.name), d.value.String(), notNegative))
		case d.value%time.Second != 0 || d.value > maxIPVSTimeout:
			errs = append(errs, field.Invalid(path.Child(d.name), d.value.String(),
				"must be whole seconds, and at most "+maxIPVSTimeout.String()))
		}
	}
	for i, text := range c.IPVS.ExcludeCIDRs {
		if _, err := parsePrefix(text); err != nil {
			errs = append(errs, field.Invalid(path.Child("ExcludeCidrs").Index(i), text, "must be a valid CIDR"))
		}
	}
	return errs
}

// maxIPVSTimeout is what every kernel keeps.
const maxIPVSTimeout = math.MaxInt32 / 1000 * time.Second

func checkLinux(c *v1alpha1.KubeProxyConfiguration, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	ct := path.Child("KubeProxyConntrackConfiguration")
	for _, n := range []struct {
		name  string
		value int32
	}{{"MaxPerCore", *c.Conntrack.MaxPerCore}, {"Min", *c.Conntrack.Min}} {
		if n.value < 0 {
			errs = append(errs, field.Invalid(ct.Child(n.name), n.value, notNegative))
		}
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"TCPEstablishedTimeout", c.Conntrack.TCPEstablishedTimeout.Duration},
		{"TCPCloseWaitTimeout", c.Conntrack.TCPCloseWaitTimeout.Duration},
		{"UDPTimeout", c.Conntrack.UDPTimeout.Duration},
		{"UDPStreamTimeout", c.Conntrack.UDPStreamTimeout.Duration},
	} {
		if d.value < 0 {
			errs = append(errs, field.Invalid(ct.Child(d.name), d.value.String(), notNegative))
		}
	}
	if adj := *c.OOMScoreAdj; adj < -1000 || adj > 1000 {
		errs = append(errs, field.Invalid(path.Child("OOMScoreAdj"), adj, "must be within the range [-1000, 1000]"))
	}
	return errs
}

func checkMode(mode v1alpha1.ProxyMode, path *field.Path) field.ErrorList {
	switch mode {
	case "", v1alpha1.ProxyMode(ModeIPTables), v1alpha1.ProxyMode(ModeIPVS):
		return nil
	}
	const want = "must be iptables, ipvs, nftables or blank (blank means the best-available proxy [currently iptables])"
	return field.ErrorList{field.Invalid(path.Child("ProxyMode"), string(mode), want)}
}

func checkPeriods(c *v1alpha1.KubeProxyConfiguration, root *field.Path) field.ErrorList {
	var errs field.ErrorList
	sync, least := periods(c)
	if c.ConfigSyncPeriod.Duration <= 0 {
		errs = append(errs, field.Invalid(root.Child("ConfigSyncPeriod"), c.ConfigSyncPeriod.Duration.String(), positive))
	}
	if sync <= 0 {
		errs = append(errs, field.Invalid(root.Child("SyncPeriod"), sync.String(), positive))
	}
	if least < 0 {
		errs = append(errs, field.Invalid(root.Child("MinSyncPeriod"), least.String(), notNegative))
	}
	if least > sync {
		errs = append(errs, field.Invalid(root.Child("SyncPeriod"), least.String(),
			"must be greater than or equal to "+root.Child("MinSyncPeriod").String()))
	}
	return errs
}

func checkAddresses(c *v1alpha1.KubeProxyConfiguration, root *field.Path) field.ErrorList {
	var errs field.ErrorList
	if _, err := parseAddr(c.BindAddress); err != nil {
		errs = append(errs, field.Invalid(root.Child("BindAddress"), c.BindAddress,
			"not a valid textual representation of an IP address"))
	}
	if c.HealthzBindAddress != "" {
		errs = append(errs, checkHostPort(c.HealthzBindAddress, root.Child("HealthzBindAddress"))...)
	}
	return append(errs, checkHostPort(c.MetricsBindAddress, root.Child("MetricsBindAddress"))...)
}

func checkHostPort(s string, path *field.Path) field.ErrorList {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return field.ErrorList{field.Invalid(path, s, "must be IP:port")}
	}
	var errs field.ErrorList
	if _, err := parseAddr(host); err != nil {
		errs = append(errs, field.Invalid(path, host, "must be a valid IP"))
	}
	if p, err := strconv.Atoi(port); err != nil || p < 1 || p > math.MaxUint16 {
		errs = append(errs, field.Invalid(path, port, "must be a valid port"))
	}
	return errs
}

func checkNodePorts(list []string, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, a := range list {
		switch a {
		case NodePortPrimary, NodePortLocalhost, NodePortAll:
			if seen[a] {
				errs = append(errs, field.Duplicate(path.Index(i), a))
			}
			seen[a] = true
			continue
		}
		if _, err := parsePrefix(a); err != nil {
			errs = append(errs, field.Invalid(path.Index(i), a,
				"must be a valid CIDR or one of the keywords 'primary', 'localhost', 'all'"))
		}
	}
	return errs
}

func checkLocal(c *v1alpha1.KubeProxyConfiguration, root *field.Path) field.ErrorList {
	path := root.Child("DetectLocalConfiguration")
	const empty = "must not be empty"
	switch LocalMode(c.DetectLocalMode) {
	case "", LocalClusterCIDR:
		// Cluster CIDRs beside another mode are accepted whatever they say, as upstream does.
		return checkClusterCIDRs(clusterCIDRs(c), path.Child("ClusterCIDRs"))
	case LocalNodeCIDR:
	case LocalBridgeInterface:
		if c.DetectLocal.BridgeInterface == "" {
			return field.ErrorList{field.Invalid(path.Child("InterfaceName"), "", empty)}
		}
	case LocalInterfaceNamePrefix:
		if c.DetectLocal.InterfaceNamePrefix == "" {
			return field.ErrorList{field.Invalid(path.Child("InterfacePrefix"), "", empty)}
		}
	default:
		return field.ErrorList{field.NotSupported(root.Child("DetectLocalMode"), string(c.DetectLocalMode),
			[]string{
				string(LocalClusterCIDR), string(LocalNodeCIDR), string(LocalBridgeInterface),
				string(LocalInterfaceNamePrefix), "",
			})}
	}
	return nil
}

func checkClusterCIDRs(list []string, path *field.Path) field.ErrorList {
	const pair = "must be a either a single CIDR or dual-stack pair of CIDRs (e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]"
	if len(list) > 2 {
		return field.ErrorList{field.Invalid(path, list, pair)}
	}
	var errs field.ErrorList
	families := map[bool]bool{}
	for i, text := range list {
		p, err := parsePrefix(text)
		if err != nil {
			errs = append(errs, field.Invalid(path.Index(i), text,
				"must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"))
			continue
		}
		families[p.Addr().Is4()] = true
	}
	if len(list) == 2 && len(errs) == 0 && len(families) != 2 {
		errs = append(errs, field.Invalid(path, list, pair))
	}
	return errs
}

func checkLog(c *logsapi.LoggingConfiguration, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch c.Format {
	case "", logsapi.DefaultLogFormat:
	case logsapi.JSONLogFormat:
		if len(c.VModule) > 0 {
			errs = append(errs, field.Forbidden(path.Child("vmodule"), "Only supported for text log format"))
		}
	default:
		errs = append(errs, field.Invalid(path.Child("format"), c.Format, "Unsupported log format"))
	}
	if c.FlushFrequency.Duration.Duration <= 0 {
		errs = append(errs, field.Invalid(path.Child("flushFrequency"), c.FlushFrequency.Duration.Duration.String(),
			"Must be greater than zero"))
	}
	if c.Verbosity > math.MaxInt32 {
		errs = append(errs, field.Invalid(path.Child("verbosity"), c.Verbosity, fmt.Sprintf("Must be <= %d", math.MaxInt32)))
	}
	for i, item := range c.VModule {
		at := path.Child("vmodule").Index(i)
		switch {
		case item.FilePattern == "":
			errs = append(errs, field.Required(at, "File pattern must not be empty"))
		case strings.ContainsAny(item.FilePattern, "=,"):
			errs = append(errs, field.Invalid(at, item.FilePattern, "File pattern must not contain equal sign or comma"))
		}
		if item.Verbosity > math.MaxInt32 {
			errs = append(errs, field.Invalid(at, item.Verbosity, fmt.Sprintf("Must be <= %d", math.MaxInt32)))
		}
	}
	return errs
}
