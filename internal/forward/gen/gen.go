// Package gen makes clusters and packets at random, the same ones for the same seed: the input of fuzz tests that
// compare what different parts say about one forwarding table. Its few names, addresses and ports meet often, so that
// conflicts, hairpins, filters and duplicates all come up. It decides nothing about forwarding, and only tests may
// import it. Read Snapshot, then Packet.
package gen

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The small world that everything is drawn from. Pods of node na are in 10.60.1.0/24 and fd60:1::/64, those of nb in
// 10.60.2.0/24 and fd60:2::/64, and so on; outside clients are in 198.51.100.0/24 and fd99::/64.
const (
	nodeName = "na"
	zoneName = "z1"

	bridge       = "cni0"
	vethPrefix   = "veth"
	uplink       = "eth0"
	eventsInMind = 60
)

// A source draws from one seed.
type source struct{ *rand.Rand }

// newSource gives a source; salt keeps what is drawn for different ends from the same seed apart.
func newSource(seed, salt uint64) source { return source{rand.New(rand.NewPCG(seed, salt))} }

const (
	saltEvents = iota + 1
	saltConfig
	saltHost
	saltPacket
)

// chance is true in so many of a hundred cases.
func (s source) chance(percent int) bool { return s.IntN(100) < percent }

func pick[T any](s source, list ...T) T { return list[s.IntN(len(list))] }

// some gives up to most of a list's members, in random order, now and then one of them twice.
func some[T any](s source, most int, list ...T) []T {
	var out []T
	for range s.IntN(most + 1) {
		out = append(out, pick(s, list...))
	}
	return out
}

// addr gives an address of the family whose last part is host.
func addr(family model.Family, v4 string, v6 string, host int) netip.Addr {
	if family == model.IPv4 {
		return netip.MustParseAddr(fmt.Sprintf("%s.%d", v4, host))
	}
	return netip.MustParseAddr(fmt.Sprintf("%s::%x", v6, host))
}

// podAddr gives an address of a pod on node 1 (na), 2 or 3.
func podAddr(family model.Family, node, host int) netip.Addr {
	return addr(family, fmt.Sprintf("10.60.%d", node), fmt.Sprintf("fd60:%d", node), host)
}

func hostAddr(family model.Family, host int) netip.Addr { return addr(family, "10.20.0", "fd20", host) }

func outsideAddr(family model.Family, host int) netip.Addr {
	return addr(family, "198.51.100", "fd99", host)
}

func loopback(family model.Family) netip.Addr {
	if family == model.IPv4 {
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}

// Config gives an operator's settings for one family.
func Config(seed uint64, family model.Family) forward.Config {
	s := newSource(seed, saltConfig)
	c := forward.Config{
		Family:   family,
		NodeName: nodeName,
		Detect: pick(s, forward.DetectClusterCIDR, forward.DetectClusterCIDR, forward.DetectNodeCIDR,
			forward.DetectBridgeInterface, forward.DetectInterfaceNamePrefix),
		BridgeInterface:     bridge,
		InterfaceNamePrefix: vethPrefix,
		MasqueradeAll:       s.chance(15),
		LocalhostNodePorts:  s.chance(60),
		IgnoreExternalIPs:   s.chance(10),
	}
	if s.chance(80) {
		c.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.60.0.0/16"), netip.MustParsePrefix("fd60::/16")}
	}
	if s.chance(50) {
		c.NodePortAddresses = some(s, 3, "primary", "localhost", "all", "10.20.0.0/24", "fd20::/64", "127.0.0.1/32",
			"172.31.0.0/16", "::1/128")
	}
	return c
}

// Host gives the addresses of this machine.
func Host(seed uint64) forward.Host {
	s := newSource(seed, saltHost)
	h := forward.Host{Addrs: []netip.Addr{
		loopback(model.IPv4), loopback(model.IPv6), hostAddr(model.IPv4, 11), hostAddr(model.IPv6, 0x11),
	}}
	if s.chance(40) {
		h.Addrs = append(h.Addrs, netip.MustParseAddr("172.31.9.5"))
	}
	if s.chance(40) {
		h.Addrs = append(h.Addrs, podAddr(model.IPv4, 1, 1), podAddr(model.IPv6, 1, 1))
	}
	return h
}

// Snapshot gives the cluster as it is after some random events.
func Snapshot(seed uint64) *model.Snapshot {
	snapshot := model.NewSnapshot()
	var dirty model.Dirty
	for _, e := range Events(seed, eventsInMind) {
		snapshot.Apply(e, &dirty)
	}
	return snapshot
}

// Table gives the table of the seed's snapshot, settings and host.
func Table(seed uint64, family model.Family) *forward.Table {
	t, _ := forward.Build(Config(seed, family), Snapshot(seed), Host(seed))
	return t
}

// Events gives n changes of Services, slices and the Node, deletions and repetitions among them.
func Events(seed uint64, n int) []model.Event {
	s := newSource(seed, saltEvents)
	list := make([]model.Event, 0, n)
	for range n {
		switch s.IntN(20) {
		case 0, 1, 2, 3, 4, 5, 6, 7, 8:
			list = append(list, model.Event{Service: s.service()})
		case 9, 10, 11, 12, 13, 14, 15:
			list = append(list, model.Event{Slice: s.slice()})
		case 16:
			list = append(list, model.Event{Service: &model.Service{Name: s.name()}, Delete: true})
		case 17:
			list = append(list, model.Event{Slice: &model.EndpointSlice{Name: s.sliceName()}, Delete: true})
		default:
			list = append(list, model.Event{Node: s.node(), Delete: s.chance(20)})
		}
	}
	return list
}

func (s source) name() model.Name {
	return pick(s,
		model.Name{Namespace: "shop", Name: "web"}, model.Name{Namespace: "shop", Name: "dns"},
		model.Name{Namespace: "shop", Name: "db"}, model.Name{Namespace: "ops", Name: "statsd"},
		model.Name{Namespace: "ops", Name: "agent"}, model.Name{Namespace: "ops", Name: "web"})
}

// A port's number and protocol say which name it has, so that slices and Services fit together often.
func portNamed(name string) (model.Protocol, uint16) {
	switch name {
	case "dns":
		return model.UDP, 53
	case "sctp":
		return model.SCTP, 80
	case "adm":
		return model.TCP, 81
	}
	return model.TCP, 80
}

func (s source) portNames() []string {
	return pick(s, []string{"web"}, []string{"web"}, []string{""}, []string{"web", "adm"}, []string{"dns", "web"},
		[]string{"dns"}, []string{"sctp", "web"})
}

func (s source) service() *model.Service {
	svc := &model.Service{
		Name:          s.name(),
		Created:       time.Unix(1700000000+int64(s.IntN(4)), 0),
		Type:          pick(s, model.ClusterIP, model.NodePort, model.LoadBalancer, model.LoadBalancer),
		ExternalLocal: s.chance(40),
		InternalLocal: s.chance(25),
	}
	if s.chance(3) {
		svc.Type = model.ExternalName
	}
	svc.Headless = s.chance(4)
	if !svc.Headless {
		svc.ClusterIPs = s.clusterIPs(svc.Name)
	}
	for _, name := range s.portNames() {
		proto, number := portNamed(name)
		p := model.ServicePort{Name: name, Protocol: proto, Port: number}
		if svc.Type != model.ClusterIP || s.chance(10) {
			p.NodePort = uint16(30080 + s.IntN(4))
		}
		svc.Ports = append(svc.Ports, p)
	}
	if s.chance(40) {
		svc.ExternalIPs = some(s, 2, s.outer("203.0.113", "fd77"), s.outer("203.0.113", "fd77"), s.outer("192.0.2", "fd88"))
	}
	if svc.Type == model.LoadBalancer {
		svc.Ingress = some(s, 3, s.outer("192.0.2", "fd88"), s.outer("192.0.2", "fd88"), hostAddr(s.family(), 11))
		if s.chance(40) {
			svc.SourceRanges = some(s, 3, sourceRanges()...)
			svc.BadSourceRanges = pick(s, 0, 0, 1)
		}
		if svc.ExternalLocal {
			// Node ports are from 30080, so that the two meet now and then.
			svc.HealthCheckNodePort = pick(s, uint16(31990), 31991, 30080)
		}
	}
	if s.chance(25) {
		svc.Affinity = pick(s, time.Second, time.Hour, 24*time.Hour)
	}
	return svc
}

func (s source) family() model.Family { return pick(s, model.IPv4, model.IPv6) }

// outer gives one of a few addresses outside the cluster.
func (s source) outer(v4, v6 string) netip.Addr { return addr(s.family(), v4, v6, 10+s.IntN(3)) }

func sourceRanges() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("fd99::/64"),
		netip.MustParsePrefix("198.51.100.8/29"), netip.MustParsePrefix("10.20.0.0/24"),
		netip.MustParsePrefix("fd20::/64"), netip.MustParsePrefix("10.60.2.0/24"),
		netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0"),
	}
}

// clusterIPs gives a Service's own addresses, and rarely those of another one.
func (s source) clusterIPs(name model.Name) []netip.Addr {
	host := 10
	for _, r := range name.Namespace + name.Name {
		host = (host*7 + int(r)) % 200
	}
	if s.chance(5) {
		host = 201
	}
	v4, v6 := addr(model.IPv4, "10.70.1", "", host), addr(model.IPv6, "", "fd70", host)
	return pick(s, []netip.Addr{v4, v6}, []netip.Addr{v4, v6}, []netip.Addr{v6, v4}, []netip.Addr{v4}, []netip.Addr{v6})
}

func (s source) sliceName() model.Name {
	return model.Name{Namespace: pick(s, "shop", "ops"), Name: fmt.Sprintf("slice-%d", s.IntN(12))}
}

func (s source) slice() *model.EndpointSlice {
	part := &model.EndpointSlice{Name: s.sliceName(), Family: s.family()}
	for part.Service == "" {
		if n := s.name(); n.Namespace == part.Namespace {
			part.Service = n.Name
		}
	}
	for _, name := range []string{"web", "adm", "dns", "sctp", ""} {
		if s.chance(60) {
			proto, number := portNamed(name)
			part.Ports = append(part.Ports, model.SlicePort{Name: name, Protocol: proto, Port: 8000 + number})
		}
	}
	hints := s.IntN(4)
	for range s.IntN(6) {
		part.Endpoints = append(part.Endpoints, s.endpoint(part.Family, hints))
	}
	return part
}

// endpoint gives one endpoint. Hints 1 hints at zones, 2 at nodes, 3 at both, mostly.
func (s source) endpoint(family model.Family, hints int) model.Endpoint {
	node := 1 + s.IntN(3)
	ep := model.Endpoint{Addr: podAddr(family, node, 11+s.IntN(3)), Node: fmt.Sprintf("n%c", 'a'+node-1)}
	switch s.IntN(10) {
	case 0:
		ep.Serving, ep.Terminating = true, true
	case 1:
		ep.Serving = true
	case 2:
		ep.Terminating = true
	default:
		ep.Ready, ep.Serving = true, true
	}
	if s.chance(3) {
		ep.Addr = loopback(family)
	}
	if s.chance(5) {
		ep.Addr = hostAddr(family, 11)
	}
	if hints&1 != 0 && s.chance(90) {
		ep.ZoneHints = []string{pick(s, zoneName, "z2")}
	}
	if hints&2 != 0 && s.chance(90) {
		ep.NodeHints = []string{pick(s, nodeName, "nb")}
	}
	return ep
}

func (s source) node() *model.Node {
	return &model.Node{
		Name: nodeName,
		Zone: pick(s, zoneName, zoneName, "z2", ""),
		Addresses: pick(s,
			[]netip.Addr{hostAddr(model.IPv4, 11), hostAddr(model.IPv6, 0x11)},
			[]netip.Addr{hostAddr(model.IPv4, 11)},
			nil),
		PodCIDRs: pick(s,
			[]netip.Prefix{netip.MustParsePrefix("10.60.1.0/24"), netip.MustParsePrefix("fd60:1::/64")},
			[]netip.Prefix{netip.MustParsePrefix("10.60.9.0/24")},
			nil),
		Deleting: s.chance(10),
	}
}
