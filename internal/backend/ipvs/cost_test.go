package ipvs_test

import (
	"net/netip"
	"os"
	"testing"

	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	edge "github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/kernel/route"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// most is what a change of an endpoint may cost: add one, take the weight of another, count its connections, remove it.
const most = 4

// A fleet is a table of many Services with two endpoints each.
type fleet struct {
	builder *forward.Builder
	s       *model.Snapshot
	host    forward.Host
}

func newFleet(n int) *fleet {
	f := &fleet{
		builder: forward.NewBuilder(forward.Config{Family: model.IPv4, NodeName: "na"}), s: model.NewSnapshot(),
		host: forward.Host{Addrs: []netip.Addr{netip.MustParseAddr("10.20.0.11")}},
	}
	var d model.Dirty
	for i := range n {
		part := f.slice(i, 2)
		f.s.Apply(model.Event{Service: &model.Service{
			Name: part.Name, Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 70, byte(i >> 8), byte(i)})},
			Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
		}}, &d)
		f.s.Apply(model.Event{Slice: part}, &d)
	}
	f.builder.Update(f.s, model.Dirty{Node: true}, f.host)
	return f
}

// slice gives the endpoints of a Service, the second one by its last number.
func (f *fleet) slice(i int, last byte) *model.EndpointSlice {
	name := model.Name{Namespace: "bench", Name: "svc-" + netip.AddrFrom4([4]byte{0, 0, byte(i >> 8), byte(i)}).String()}
	return &model.EndpointSlice{
		Name: name, Service: name.Name, Family: model.IPv4, Ports: []model.SlicePort{{Protocol: model.TCP, Port: 8080}},
		Endpoints: []model.Endpoint{
			{Addr: netip.AddrFrom4([4]byte{10, 60, 1, 1}), Ready: true, Serving: true},
			{Addr: netip.AddrFrom4([4]byte{10, 60, 1, last}), Ready: true, Serving: true},
		},
	}
}

// start puts the whole table into the kernel, change one other endpoint.
func (f *fleet) start(t *testing.T, b *ipvs.Backend) {
	t.Helper()
	table := f.builder.Table()
	b.Compile(table, forward.Delta{Ports: table.Names(), Context: true})
	have, err := b.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if r := b.Apply(t.Context(), b.Diff(have)); !r.OK() {
		t.Fatal(r.Err, r.Failed)
	}
}

func (f *fleet) change(t *testing.T, b *ipvs.Backend, i int) {
	t.Helper()
	var d model.Dirty
	f.s.Apply(model.Event{Slice: f.slice(i, 3)}, &d)
	b.Compile(f.builder.Table(), f.builder.Update(f.s, d, f.host))
	if r := b.Apply(t.Context(), b.Diff(nil)); !r.OK() {
		t.Fatal(r.Err, r.Failed)
	}
}

// A change of an endpoint costs the same number of messages with any number of Services.
func TestAChangeCostsTheSameAtAnySize(t *testing.T) {
	costs := map[int]int{}
	for _, n := range []int{10, 1000, 10000} {
		l, f := newDrainLab(t), newFleet(n)
		f.start(t, l.b)
		before := l.servers.Sent() + l.sets.Sent() + l.routes.Sent()
		restores := l.rules.Counts().Restores
		f.change(t, l.b, n/2)
		costs[n] = l.servers.Sent() + l.sets.Sent() + l.routes.Sent() - before
		if now := l.rules.Counts().Restores; now != restores {
			t.Errorf("%d Services: a change of an endpoint wrote rules", n)
		}
	}
	if costs[10] > most || costs[1000] != costs[10] || costs[10000] != costs[10] {
		t.Errorf("messages for a change, by the number of Services: %v, want the same and at most %d", costs, most)
	}
}

// The same with the kernel itself, at 1,000 Services.
func TestKernelAChangeCostsTheSame(t *testing.T) {
	servers, err := edge.Open(t.Context())
	if err != nil {
		if os.Getenv("TURNOUT_REQUIRE_IPVS") == "1" {
			t.Fatal(err)
		}
		t.Skipf("runs in a virtual machine, see make test-ipvs: %v", err)
	}
	kerneltest.Isolate(t)
	rules, err := xtables.Open(model.IPv4, xtables.Legacy)
	if err != nil {
		t.Fatal(err)
	}
	sets := ipset.NewKernel()
	b := ipvs.New(ipvs.Kernel{Rules: rules, Sets: sets, Servers: servers, Routes: route.Kernel{}}, ipvs.Options{
		Family: model.IPv4, Masquerading: ruleset.Masquerading{Bit: 14},
	})
	const n = 1000
	f := newFleet(n)
	f.host = forward.Host{} // the namespace has no address that could be a source
	f.builder.Update(f.s, model.Dirty{Node: true}, f.host)
	f.start(t, b)
	for i := range 5 {
		before := servers.Sent() + sets.Sent()
		f.change(t, b, i*n/5)
		if cost := servers.Sent() + sets.Sent() - before; cost > most {
			t.Errorf("change %d among %d Services cost %d messages, want at most %d", i+1, n, cost, most)
		}
	}
}
