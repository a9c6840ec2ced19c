package forward

import (
	"net/netip"
	"testing"

	"github.com/turnout-proxy/turnout/internal/model"
)

// This test looks inside, as what a builder forgets to forget shows nowhere else.
func TestABuilderForgetsServicesThatAreGone(t *testing.T) {
	s := model.NewSnapshot()
	var d model.Dirty
	svc := func(n string) *model.Service {
		return &model.Service{
			Name: model.Name{Namespace: "shop", Name: n}, Type: model.LoadBalancer, ClusterIPs: addrs("10.70.1.1"), Ingress: addrs("192.0.2.1"),
			BadSourceRanges: 1, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
		}
	}
	b := NewBuilder(Config{Family: model.IPv4})
	for _, n := range []string{"a", "b", "c"} {
		s.Apply(model.Event{Service: svc(n)}, &d)
	}
	b.Update(s, d, Host{})
	d = model.Dirty{}
	part := &model.EndpointSlice{
		Name: model.Name{Namespace: "shop", Name: "a-1"}, Service: "a", Family: model.IPv4,
		Ports: []model.SlicePort{{Protocol: model.TCP, Port: 80}}, Endpoints: []model.Endpoint{{Addr: addrs("10.60.1.1")[0], Ready: true}},
	}
	s.Apply(model.Event{Slice: part}, &d)
	b.Update(s, d, Host{})
	if len(b.services) != 3 || len(b.contested) != 2 || len(b.filtered) != 3 || len(b.findings) != 3 || len(b.table.index) != 2 {
		t.Fatalf("builder is not as full as this test needs it: %+v", b)
	}
	for _, part := range b.parts[:cap(b.parts)] {
		if part != nil {
			t.Errorf("builder keeps slice %s alive", part.Name)
		}
	}
	for _, c := range b.selector.all[:cap(b.selector.all)] {
		if c.ep != nil {
			t.Errorf("builder keeps endpoint %s alive", c.addr)
		}
	}
	d = model.Dirty{}
	for _, n := range []string{"b", "a", "c"} {
		s.Apply(model.Event{Service: svc(n), Delete: true}, &d)
	}
	b.Update(s, d, Host{})
	if n := len(b.services) + len(b.contested) + len(b.filtered) + len(b.findings) + len(b.table.index) + len(b.table.ports); n != 0 {
		t.Errorf("builder remembers %+v", b)
	}
}

func addrs(s string) []netip.Addr { return []netip.Addr{netip.MustParseAddr(s)} }
