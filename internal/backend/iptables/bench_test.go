package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// flatTables take everything and hold nothing.
type flatTables struct {
	xtables.Tables
	bytes int
}

func (t *flatTables) Save(_ context.Context, table string) ([]byte, error) {
	return []byte("*" + table + "\nCOMMIT\n"), nil
}

func (t *flatTables) Restore(_ context.Context, payload []byte) error {
	t.bytes = len(payload)
	return nil
}

// benchTable has n Services with a cluster IP and m endpoints each.
func benchTable(n, m int) *forward.Table {
	s := model.NewSnapshot()
	var d model.Dirty
	for i := range n {
		name := model.Name{Namespace: "bench", Name: fmt.Sprintf("svc-%d", i)}
		s.Apply(model.Event{Service: &model.Service{
			Name: name, Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 70, byte(i >> 8), byte(i)})},
			Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		}}, &d)
		part := &model.EndpointSlice{
			Name: name, Service: name.Name, Family: model.IPv4,
			Ports: []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		}
		for j := range m {
			part.Endpoints = append(part.Endpoints, model.Endpoint{
				Addr: netip.AddrFrom4([4]byte{10, byte(128 + j), byte(i >> 8), byte(i)}), Ready: true, Serving: true,
			})
		}
		s.Apply(model.Event{Slice: part}, &d)
	}
	c := forward.Config{
		Family: model.IPv4, NodeName: "na", Detect: forward.DetectClusterCIDR,
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")},
	}
	table, _ := forward.Build(c, s, forward.Host{})
	return table
}

// BenchmarkFirstSync measures all but what the tool and the kernel take of a first sync.
func BenchmarkFirstSync(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		table := benchTable(n, 10)
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				tables := &flatTables{}
				back := New(tables, Options{Family: model.IPv4, MasqueradeBit: 14, CompactAbove: -1})
				back.Compile(table, all(table))
				have, err := back.Observe(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				if r := back.Apply(b.Context(), back.Diff(have)); !r.OK() {
					b.Fatal(r.Err, r.Failed)
				}
				b.ReportMetric(float64(tables.bytes), "payload-bytes")
			}
		})
	}
}
