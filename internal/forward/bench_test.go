package forward_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// bigSnapshot has n Services with a cluster IP, a node port and m endpoints each, every second one with a load balancer
// address and every fourth with policy Local.
func bigSnapshot(n, m int) *model.Snapshot {
	s := model.NewSnapshot()
	var d model.Dirty
	for i := range n {
		svc := &model.Service{
			Name: model.Name{Namespace: "bench", Name: fmt.Sprintf("svc-%d", i)}, Created: time.Unix(int64(i), 0),
			Type:       model.NodePort,
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 70, byte(i >> 8), byte(i)})},
			Ports: []model.ServicePort{
				{Name: "http", Protocol: model.TCP, Port: 80, NodePort: uint16(20000 + i%30000)},
			},
		}
		if i%2 == 0 {
			svc.Type = model.LoadBalancer
			svc.Ingress = []netip.Addr{netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)})}
			svc.ExternalLocal = i%4 == 0
		}
		s.Apply(model.Event{Service: svc}, &d)
		s.Apply(model.Event{Slice: bigSlice(i, m, 0)}, &d)
	}
	return s
}

// bigSlice gives the endpoints of Service i; turn changes the last one.
func bigSlice(i, m, turn int) *model.EndpointSlice {
	part := &model.EndpointSlice{
		Name: model.Name{Namespace: "bench", Name: fmt.Sprintf("svc-%d-x", i)}, Service: fmt.Sprintf("svc-%d", i), Family: model.IPv4,
		Ports: []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
	}
	for j := range m {
		last := byte(1 + j%250)
		if j == m-1 {
			last = byte(251 + turn%2)
		}
		part.Endpoints = append(part.Endpoints, model.Endpoint{
			Addr:  netip.AddrFrom4([4]byte{10, byte(128 + j/250), byte(i >> 8), last}),
			Ready: true, Serving: true, Node: fmt.Sprintf("n%d", j%100),
		})
	}
	return part
}

func benchConfig() forward.Config {
	c := config()
	c.NodeName = "n0"
	return c
}

func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", n, n*10), func(b *testing.B) {
			s := bigSnapshot(n, 10)
			b.ReportAllocs()
			for b.Loop() {
				forward.Build(benchConfig(), s, host())
			}
		})
	}
}

// BenchmarkUpdateOneEndpoint replaces one of a Service's ten endpoints. Its figures must not grow with the table.
func BenchmarkUpdateOneEndpoint(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			s, builder := bigSnapshot(n, 10), forward.NewBuilder(benchConfig())
			builder.Update(s, model.Dirty{}, host())
			parts := []*model.EndpointSlice{bigSlice(n/2, 10, 1), bigSlice(n/2, 10, 0)}
			h := host()
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				var d model.Dirty
				s.Apply(model.Event{Slice: parts[i%2]}, &d)
				if got := builder.Update(s, d, h); len(got.Ports) != 1 {
					b.Fatalf("%d ports changed, want 1", len(got.Ports))
				}
			}
		})
	}
}

func BenchmarkUpdateOneOfManyEndpoints(b *testing.B) {
	s, builder := bigSnapshot(1, 5000), forward.NewBuilder(benchConfig())
	builder.Update(s, model.Dirty{}, host())
	parts := []*model.EndpointSlice{bigSlice(0, 5000, 1), bigSlice(0, 5000, 0)}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		var d model.Dirty
		s.Apply(model.Event{Slice: parts[i%2]}, &d)
		builder.Update(s, d, host())
	}
}

func BenchmarkLookup(b *testing.B) {
	t, _ := forward.Build(benchConfig(), bigSnapshot(10000, 10), host())
	p := packet("10.60.1.21 10.70.39.15:80")
	b.ReportAllocs()
	for b.Loop() {
		forward.Lookup(t, p)
	}
}
