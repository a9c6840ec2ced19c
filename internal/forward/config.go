package forward

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A DetectMode names the way to tell packets of pods from others. The values are those of detectLocalMode in the
// KubeProxyConfiguration; the empty one means ClusterCIDR, and an unknown one means that pods cannot be told.
type DetectMode string

// The ways to detect pods.
const (
	DetectClusterCIDR         DetectMode = "ClusterCIDR"
	DetectNodeCIDR            DetectMode = "NodeCIDR"
	DetectBridgeInterface     DetectMode = "BridgeInterface"
	DetectInterfaceNamePrefix DetectMode = "InterfaceNamePrefix"
)

// A Config is what the operator decided for one IP family. The zero value of every field but Family is upstream's
// default.
type Config struct {
	Family model.Family
	// NodeName is this node's name: endpoints that carry it are local. With an empty name nothing is local.
	NodeName string
	// Detect chooses which of the following three fields is used, or the Node's PodCIDRs. Of several prefixes only the
	// first of the family counts.
	Detect              DetectMode
	ClusterCIDRs        []netip.Prefix
	BridgeInterface     string
	InterfaceNamePrefix string
	// MasqueradeAll replaces the client's address of everything that is sent to a cluster IP.
	MasqueradeAll bool
	// NodePortAddresses say on which addresses NodePorts answer: "primary" (the Node's first address of the family),
	// "localhost", "all", or CIDRs. A list with nothing for the family, the empty one included, means all.
	NodePortAddresses []string
	// LocalhostNodePorts lets NodePorts answer on 127.0.0.0/8, if NodePortAddresses include it.
	LocalhostNodePorts bool
	// IgnoreExternalIPs leaves spec.externalIPs unserved.
	IgnoreExternalIPs bool
}

// A Host holds the addresses of this machine's interfaces, loopback included, in any order and of both families.
// Addresses that a data plane itself has put on an interface (for the IPVS mode) do not belong here.
type Host struct {
	Addrs []netip.Addr
}

// newContext derives what is the same for every Service. The Node may be nil.
func newContext(cfg *Config, node *model.Node, host Host) (Context, []model.Finding) {
	c := Context{
		Family:    cfg.Family,
		NodeName:  cfg.NodeName,
		Detector:  newDetector(cfg, node),
		HostAddrs: make([]netip.Addr, 0, len(host.Addrs)),
	}
	if node != nil {
		c.Zone = node.Zone
	}
	for _, a := range host.Addrs {
		if a.IsValid() && model.FamilyOf(a) == cfg.Family {
			c.HostAddrs = append(c.HostAddrs, a.Unmap().WithZone(""))
		}
	}
	slices.SortFunc(c.HostAddrs, netip.Addr.Compare)
	c.HostAddrs = slices.Compact(c.HostAddrs)
	var found []model.Finding
	c.NodePorts, found = newScope(cfg, node, c.HostAddrs)
	return c, found
}

func newDetector(cfg *Config, node *model.Node) Detector {
	switch cfg.Detect {
	case DetectClusterCIDR, "":
		return Detector{CIDR: firstOf(cfg.Family, cfg.ClusterCIDRs)}
	case DetectNodeCIDR:
		if node != nil {
			return Detector{CIDR: firstOf(cfg.Family, node.PodCIDRs)}
		}
	case DetectBridgeInterface:
		return Detector{Interface: cfg.BridgeInterface}
	case DetectInterfaceNamePrefix:
		return Detector{InterfacePrefix: cfg.InterfaceNamePrefix}
	}
	return Detector{}
}

// firstOf gives the first prefix of a family, or the zero prefix.
func firstOf(family model.Family, prefixes []netip.Prefix) netip.Prefix {
	for _, p := range prefixes {
		if p = unmapPrefix(p); p.IsValid() && model.FamilyOf(p.Addr()) == family {
			return p
		}
	}
	return netip.Prefix{}
}

// unmapPrefix gives a prefix without host bits, and as an IPv4 one if it is IPv4 mapped into IPv6.
func unmapPrefix(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked()
}

// newScope says where NodePorts answer, given this machine's addresses of the family.
func newScope(cfg *Config, node *model.Node, host []netip.Addr) (NodePortScope, []model.Finding) {
	prefixes, found := scopePrefixes(cfg, node)
	var s NodePortScope
	if len(prefixes) == 0 {
		// Upstream opens every address when the list has nothing for the family. To do so is part of being a drop-in
		// replacement, but a list that was meant to close addresses and opens them is worth a word.
		s.All = true
		if len(cfg.NodePortAddresses) > 0 && slices.ContainsFunc(host, reachable) {
			found = append(found, cfg.finding(model.Warning, "NodePortAddressesUnmatched", fmt.Sprintf(
				"nodePortAddresses %q has no entry for %s, so NodePorts answer on every %s address; add one for this family",
				cfg.NodePortAddresses, cfg.Family, cfg.Family)))
		}
	}
	v4Loopback := netip.AddrFrom4([4]byte{127, 0, 0, 0})
	contains := s.All
	for _, p := range prefixes {
		s.All = s.All || p.Bits() == 0
		contains = contains || p.Addr().IsLoopback() || p.Contains(v4Loopback)
	}
	s.Loopback = cfg.Family == model.IPv4 && cfg.LocalhostNodePorts && contains
	if s.All {
		return s, found
	}
	for _, a := range host {
		in := func(p netip.Prefix) bool { return p.Contains(a) }
		if (s.Loopback || !a.IsLoopback()) && slices.ContainsFunc(prefixes, in) {
			s.Addrs = append(s.Addrs, a)
		}
	}
	return s, found
}

// reachable tells whether others can reach this machine at the address.
func reachable(a netip.Addr) bool { return !a.IsLoopback() && !a.IsLinkLocalUnicast() }

// scopePrefixes expands the entries of NodePortAddresses to prefixes of the family.
func scopePrefixes(cfg *Config, node *model.Node) ([]netip.Prefix, []model.Finding) {
	var prefixes []netip.Prefix
	var found []model.Finding
	for _, entry := range cfg.NodePortAddresses {
		switch entry {
		case "primary":
			if a := primaryAddr(cfg.Family, node); a.IsValid() && !a.IsLoopback() {
				prefixes = append(prefixes, netip.PrefixFrom(a, a.BitLen()))
			}
		case "localhost":
			prefixes = append(prefixes, loopbackPrefix(cfg.Family))
		case "all":
			prefixes = append(prefixes, zeroPrefix(cfg.Family))
		default:
			p, err := netip.ParsePrefix(entry)
			if err != nil {
				found = append(found, cfg.finding(model.Error, "InvalidNodePortAddress", fmt.Sprintf(
					"nodePortAddresses entry %q is neither a CIDR nor primary, localhost or all; it is ignored", entry)))
				continue
			}
			if p = unmapPrefix(p); model.FamilyOf(p.Addr()) == cfg.Family {
				prefixes = append(prefixes, p)
			}
		}
	}
	return prefixes, found
}

// finding makes a finding about this node.
func (cfg *Config) finding(severity model.Severity, reason, message string) model.Finding {
	return model.Finding{Severity: severity, Kind: "Node", Object: cfg.NodeName, Reason: reason, Message: message}
}

// primaryAddr gives the Node's first address of a family, or an invalid one.
func primaryAddr(family model.Family, node *model.Node) netip.Addr {
	if node == nil {
		return netip.Addr{}
	}
	for _, a := range node.Addresses {
		if a.IsValid() && model.FamilyOf(a) == family {
			return a.Unmap()
		}
	}
	return netip.Addr{}
}

func loopbackPrefix(family model.Family) netip.Prefix {
	if family == model.IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
	}
	return netip.PrefixFrom(netip.IPv6Loopback(), 128)
}

func zeroPrefix(family model.Family) netip.Prefix {
	if family == model.IPv4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}
