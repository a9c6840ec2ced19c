package loop

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A nullBackend takes everything at once and tells when.
type nullBackend struct {
	applied chan struct{}
	changed int
}

type nullPlan int

func (p nullPlan) Empty() bool    { return p == 0 }
func (p nullPlan) Steps() int     { return int(p) }
func (p nullPlan) String() string { return "" }

func (b *nullBackend) Mode() string { return "null" }

func (b *nullBackend) Compile(_ *forward.Table, d forward.Delta) []backend.Problem {
	b.changed = len(d.Ports)
	return nil
}

func (b *nullBackend) Observe(context.Context) (backend.Observed, error) { return fakeObserved{}, nil }

func (b *nullBackend) Diff(backend.Observed) backend.Plan    { return nullPlan(b.changed) }
func (b *nullBackend) Pulse(context.Context) (string, error) { return "", nil }

func (b *nullBackend) Apply(context.Context, backend.Plan) backend.Report {
	b.changed = 0
	b.applied <- struct{}{}
	return backend.Report{Steps: 1}
}

func (b *nullBackend) Trace(forward.Packet) (backend.Trace, error) { return backend.Trace{}, nil }

type nullCleaner struct{}

func (nullCleaner) Clean(context.Context, *flow.Index) (int, error) { return 0, nil }

// BenchmarkChange measures what the loop itself takes from an event to Apply, which must not depend on how much there
// is besides. A tenth of the Services is UDP.
func BenchmarkChange(b *testing.B) {
	for _, proto := range []model.Protocol{model.TCP, model.UDP} {
		for _, n := range []int{100, 10000} {
			b.Run(fmt.Sprintf("proto=%s/services=%d", proto, n), func(b *testing.B) { benchmarkChange(b, proto, n) })
		}
	}
}

func benchmarkChange(b *testing.B, proto model.Protocol, n int) {
	b.Helper()
	back := &nullBackend{applied: make(chan struct{})}
	l := New(Config{
		Families: []Family{{
			Family: model.IPv4, Builder: forward.NewBuilder(forward.Config{Family: model.IPv4}), Backend: back,
			Cleaner: nullCleaner{},
		}},
		Gather: 1, PulsePeriod: time.Hour,
	})
	sink := l.Sink()
	for i := range n {
		svc, part := service(fmt.Sprint("s", i), fmt.Sprintf("10.%d.%d.1", 96+i/250, i%250)), slice(fmt.Sprint("s", i))
		if i%10 == 0 {
			svc.Service.Ports[0].Protocol = model.UDP
		}
		sink(svc, part)
	}
	event := func(i int) model.Event {
		e := slice("s1", fmt.Sprintf("10.244.%d.%d", i/250%250, i%250+1))
		if proto == model.UDP {
			e = slice("s0", fmt.Sprintf("10.244.%d.%d", i/250%250, i%250+1))
			e.Slice.Ports[0].Protocol = model.UDP
		}
		return e
	}
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	sink(model.Event{Synced: true})
	<-back.applied
	i := 0
	for b.Loop() {
		i++
		sink(event(i))
		<-back.applied
	}
	cancel()
	if err := <-ended; err != nil {
		b.Error(err)
	}
}
