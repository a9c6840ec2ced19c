package gen

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Packet gives the first packet of a connection that could be seen on the table's node: mostly to one of the table's
// frontends, now and then past them. Where it comes from and in on fit together; a packet from or to a loopback address
// is the machine's own.
func Packet(seed uint64, t *forward.Table) forward.Packet {
	s := newSource(seed, saltPacket)
	p := forward.Packet{Proto: pick(s, model.TCP, model.UDP, model.SCTP)}
	p.Dst = netip.AddrPortFrom(outsideAddr(t.Context.Family, 77), 80)
	var endpoints []forward.Endpoint
	if names := t.Names(); len(names) > 0 {
		port := t.Port(pick(s, names...))
		endpoints = slices.Concat(port.Cluster, port.Local)
		if len(port.Frontends) > 0 {
			p.Proto, p.Dst = port.Name.Proto, s.destination(t, pick(s, port.Frontends...))
		}
	}
	if s.chance(5) {
		p.Proto = pick(s, model.TCP, model.UDP, model.SCTP)
	}
	if s.chance(5) {
		p.Dst = netip.AddrPortFrom(p.Dst.Addr(), pick(s, uint16(80), 443, 30080, 30081))
	}
	var src netip.Addr
	src, p.In = s.origin(t, p.Dst.Addr(), endpoints)
	p.Src = netip.AddrPortFrom(src, uint16(20000+s.IntN(10000)))
	return p
}

// destination gives an address that a frontend answers on, or for a node port one that it might.
func (s source) destination(t *forward.Table, f forward.Frontend) netip.AddrPort {
	if f.Kind != forward.NodePort {
		return netip.AddrPortFrom(f.Addr, f.Port)
	}
	a := hostAddr(t.Context.Family, 12)
	if hosts := t.Context.HostAddrs; len(hosts) > 0 && s.chance(95) {
		a = pick(s, hosts...)
	}
	return netip.AddrPortFrom(a, f.Port)
}

// origin gives a source address and the interface that its packets come in on.
func (s source) origin(t *forward.Table, dst netip.Addr, endpoints []forward.Endpoint) (netip.Addr, string) {
	family := t.Context.Family
	if dst.IsLoopback() {
		return dst, ""
	}
	switch s.IntN(6) {
	case 0:
		if len(endpoints) > 0 {
			return s.pod(t, pick(s, endpoints...).Addr())
		}
	case 1:
		return s.pod(t, podAddr(family, 1+s.IntN(3), 11+s.IntN(10)))
	case 2:
		for _, a := range t.Context.HostAddrs {
			if !a.IsLoopback() && s.chance(60) {
				return a, ""
			}
		}
	case 3:
		return hostAddr(family, 200), uplink
	}
	return outsideAddr(family, 1+s.IntN(20)), uplink
}

// pod tells how a pod's packets come in: through its own interface on this node, over the network from another, and
// not at all where the pod shares the machine's address.
func (s source) pod(t *forward.Table, a netip.Addr) (netip.Addr, string) {
	if slices.Contains(t.Context.HostAddrs, a) {
		return a, ""
	}
	here := podAddr(t.Context.Family, 1, 0)
	bits := 24
	if t.Context.Family == model.IPv6 {
		bits = 64
	}
	if !netip.PrefixFrom(here, bits).Masked().Contains(a) {
		return a, uplink
	}
	if strings.HasPrefix(t.Context.Detector.InterfacePrefix, vethPrefix) {
		return a, vethPrefix + "3f2a"
	}
	return a, bridge
}
