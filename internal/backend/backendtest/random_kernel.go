package backendtest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// How many random tables the real kernel is given for each family, and how many packets it is asked about at most for
// each of them: 300 packets in all, a few of which the lab cannot send.
const (
	kernelSeeds   = 50
	kernelPackets = 6
	kernelEvents  = 150
)

// randomKernel gives the real kernel random tables, one after the other in place, and asks about random packets.
func (s *site) randomKernel(t *testing.T, m Mode, family model.Family, kernel Kernel) {
	t.Helper()
	l := newLane(t, m, kernel, "")
	l.enter = s.node.Do
	defer func() {
		if err := s.wipe(family, kernel, false); err != nil {
			t.Errorf("clean up: %v", err)
		}
		if err := s.restore(); err != nil {
			t.Errorf("clean up: %v", err)
		}
	}()
	asked := map[forward.Verdict]int{}
	for seed := range uint64(kernelSeeds) {
		r := &run{t: t, mode: m, family: family, script: &script{only: family}, lane: l}
		r.probe = &prober{site: s, conversations: map[string]*conversation{}}
		s.randomTable(r, seed, asked)
		if t.Failed() {
			t.Fatalf("seed %d, table:\n%s", seed, r.world.table)
		}
	}
	t.Logf("random packets sent, by outcome: %v", asked)
}

// randomTable gives the kernel one table, asks about packets and counts them.
func (s *site) randomTable(r *run, seed uint64, asked map[forward.Verdict]int) {
	r.t.Helper()
	cfg := gen.Config(seed, r.family)
	cfg.BridgeInterface, cfg.InterfaceNamePrefix = "pod-c1", netns.PodInterfacePrefix()
	r.world = newWorld(settings{cfg: cfg, host: gen.Host(seed)})
	if err := s.become(r.world.settings); err != nil {
		r.t.Fatalf("seed %d: %v", seed, err)
	}
	events := gen.Events(seed, kernelEvents)
	for i := range events {
		events[i] = settleInLab(events[i])
	}
	r.world.take(r.t, events)
	if err := r.probe.serve(r.world.table); err != nil {
		r.t.Fatalf("start the endpoints' servers: %v", err)
	}
	r.lane.reopen()
	r.lane.compile(r.world.builder.Table(), everything(r.world.table))
	r.lane.sync()
	r.lane.settled()
	// A table that replaces everything has nothing to do with the last one's connections, whose source ports come again.
	if err := s.forgetAll(r.family); err != nil {
		r.t.Fatalf("forget connections: %v", err)
	}
	draw := rand.New(rand.NewPCG(seed, 11))
	for n := range kernelPackets {
		p, ok := labPacket(draw, r.world.table)
		if !ok {
			break
		}
		want := forward.Lookup(r.world.table, p)
		r.lane.trace(r.world.table, p)
		name := command{line: n, name: fmt.Sprintf("seed %d: %s", seed, packetText(p))}
		r.probe.packet(r, name, p, want)
	}
	for _, q := range r.probe.asked {
		asked[q.want.Do]++
	}
	r.probe.flush(r)
}

// labPacket draws a packet from somebody in the lab to one of the table's frontends.
func labPacket(draw *rand.Rand, t *forward.Table) (forward.Packet, bool) {
	names := t.Names()
	if len(names) == 0 {
		return forward.Packet{}, false
	}
	port := t.Port(names[draw.IntN(len(names))])
	if len(port.Frontends) == 0 {
		return forward.Packet{}, false
	}
	f := port.Frontends[draw.IntN(len(port.Frontends))]
	is4 := t.Context.Family == model.IPv4
	clients := []string{"c1", "c1", "s1", "na", "out", "far", "c2", "nb"}
	src, err := clientAddr(clients[draw.IntN(len(clients))], is4)
	if err != nil {
		return forward.Packet{}, false
	}
	for _, ep := range slices.Concat(port.Cluster, port.Local) { // hairpin, now and then
		if node, _ := podNumbers(ep.Addr()); node == 1 && draw.IntN(6) == 0 {
			src = ep.Addr()
		}
	}
	dst := f.Addr
	if f.Kind == forward.NodePort {
		hosts := slices.DeleteFunc(slices.Clone(t.Context.HostAddrs), func(a netip.Addr) bool {
			return a.IsLoopback() || naturalInterface(src) == "eth0" && !slices.Contains(nodeAddrs(), a)
		})
		dst = hosts[draw.IntN(len(hosts))]
	}
	return forward.Packet{
		Src: netip.AddrPortFrom(src, clientPort), Dst: netip.AddrPortFrom(dst, f.Port), Proto: port.Name.Proto,
		In: naturalInterface(src),
	}, true
}

// settleInLab gives an event's addresses the places that they have in the lab: package gen counts IPv6 hosts in
// hexadecimal and has other ranges outside of the cluster.
func settleInLab(e model.Event) model.Event {
	if e.Service != nil {
		svc := *e.Service
		svc.ExternalIPs, svc.Ingress = inLab(svc.ExternalIPs), inLab(svc.Ingress)
		svc.SourceRanges = slices.Clone(svc.SourceRanges)
		for i, p := range svc.SourceRanges {
			if p == netip.MustParsePrefix("fd99::/64") {
				svc.SourceRanges[i] = netip.MustParsePrefix("2001:db8:100::/64")
			}
		}
		e.Service = &svc
	}
	if e.Slice != nil {
		part := *e.Slice
		part.Endpoints = slices.Clone(part.Endpoints)
		for i, ep := range part.Endpoints {
			part.Endpoints[i].Addr = inLab([]netip.Addr{ep.Addr})[0]
		}
		e.Slice = &part
	}
	return e
}

func inLab(list []netip.Addr) []netip.Addr {
	places := map[string]string{"fd77": "2001:db8:203::%d", "fd88": "2001:db8:2::%d", "fd20": "fd20::%d"}
	for node := 1; node <= labNodes; node++ {
		places[fmt.Sprintf("fd60:%d", node)] = fmt.Sprintf("fd60:%d::%%d", node)
	}
	out := slices.Clone(list)
	for i, a := range list {
		if !a.Is6() {
			continue
		}
		bytes := a.As16()
		host := int(bytes[15])
		bytes[15] = 0
		head := netip.AddrFrom16(bytes).String()
		if place, ok := places[head[:len(head)-len("::")]]; ok && host >= 10 && host < 16 {
			out[i] = netip.MustParseAddr(fmt.Sprintf(place, host))
		}
	}
	return out
}
