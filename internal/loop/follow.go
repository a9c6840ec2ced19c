package loop

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/health"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Cleaner deletes the connection tracking entries of one IP family that the index says are stale, and no others. It
// runs aside from the loop, one at a time for a family. Clean gives the number of entries deleted, also beside an error.
type Cleaner interface {
	Clean(ctx context.Context, ix *flow.Index) (deleted int, err error)
}

// follow is what has to be done when a round has taken effect, derived from what is wanted. What a failed round could
// not do stays noted.
type follow struct {
	noLocal            map[forward.PortName]noLocal
	internal, external int

	// tracked are the ports whose flows can be stale, as the table last had them.
	tracked map[forward.PortName]*forward.Port
	// pending are those of them, present or gone, that changed and whose change is not in the kernel yet, each with what
	// it was before; nil for a new one. ready are those whose flows can be cleaned, with all that they were before.
	pending  map[forward.PortName]*forward.Port
	ready    map[forward.PortName][]*forward.Port
	cleaning bool
	cleanAt  time.Time
	retry    backoff

	scope     forward.NodePortScope
	checks    map[forward.PortName]health.Service
	published map[model.Name]health.Service
	recheck   bool
}

// noLocal tells of a port with which traffic policies it has endpoints, but none here.
type noLocal struct{ internal, external bool }

func newFollow(longest time.Duration) follow {
	return follow{
		noLocal: map[forward.PortName]noLocal{},
		tracked: map[forward.PortName]*forward.Port{},
		pending: map[forward.PortName]*forward.Port{}, ready: map[forward.PortName][]*forward.Port{},
		retry:  backoff{start: time.Second, max: longest},
		checks: map[forward.PortName]health.Service{}, recheck: true,
	}
}

// note takes over what an update changed in the table.
func (w *follow) note(t *forward.Table, d forward.Delta) {
	for _, n := range d.Ports {
		w.notePort(n, t.Port(n))
	}
	if !d.Context {
		return
	}
	w.scope, w.recheck = t.Context.NodePorts, true
	names := t.Names()
	names = slices.AppendSeq(names, maps.Keys(w.tracked))
	names = slices.AppendSeq(names, maps.Keys(w.noLocal))
	names = slices.AppendSeq(names, maps.Keys(w.checks))
	for _, n := range names {
		w.notePort(n, t.Port(n))
	}
}

func (w *follow) notePort(n forward.PortName, p *forward.Port) {
	now := noLocalOf(p)
	was := w.noLocal[n]
	w.internal += number(now.internal) - number(was.internal)
	w.external += number(now.external) - number(was.external)
	setOrDelete(w.noLocal, n, now, now != noLocal{})

	if slices.Contains(flow.Protocols(), n.Proto) {
		old := w.tracked[n]
		if stale(old, p) {
			if _, noted := w.pending[n]; !noted {
				w.pending[n] = old
			}
		}
		setOrDelete(w.tracked, n, p, p != nil)
	}

	var check health.Service
	if p != nil && p.HealthCheckNodePort != 0 {
		check = health.Service{Name: n.Name, Port: p.HealthCheckNodePort, LocalReady: p.LocalReady}
	}
	if w.checks[n] != check {
		w.recheck = true
		setOrDelete(w.checks, n, check, check != health.Service{})
	}
}

// noLocalOf looks for routes that drop because of traffic policy Local.
func noLocalOf(p *forward.Port) noLocal {
	var found noLocal
	if p == nil {
		return found
	}
	for _, f := range p.Frontends {
		for _, r := range f.Routes {
			if r.Reason != forward.NoLocalEndpoints {
				continue
			}
			if f.Kind == forward.ClusterIP {
				found.internal = true
			} else {
				found.external = true
			}
		}
	}
	return found
}

// stale tells whether a change may have left flows that go the wrong way: an endpoint stopped to answer, a frontend is
// new or gone, or the port had no endpoint before, so that packets went past it.
func stale(old, now *forward.Port) bool {
	switch {
	case old == now:
		return false
	case old == nil || now == nil || len(old.Serving) == 0:
		return true
	}
	same := func(a, b forward.Frontend) bool { return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port }
	if !slices.EqualFunc(old.Frontends, now.Frontends, same) {
		return true
	}
	answers := make(map[netip.AddrPort]struct{}, len(now.Serving))
	for _, e := range now.Serving {
		answers[e] = struct{}{}
	}
	return slices.ContainsFunc(old.Serving, func(e netip.AddrPort) bool {
		_, ok := answers[e]
		return !ok
	})
}

// succeeded publishes what is wanted, as it is in the kernel now.
func (w *follow) succeeded(l *Loop, f *family) {
	l.cfg.Metrics.NoLocalEndpoints(f.Family.Family, w.internal, w.external)
	for n, old := range w.pending {
		if _, refused := f.ports.failed[n]; refused {
			continue
		}
		w.ready[n] = append(w.ready[n], old)
		delete(w.pending, n)
	}
	if !w.recheck {
		return
	}
	w.recheck = false
	w.published = make(map[model.Name]health.Service, len(w.checks))
	for _, c := range w.checks {
		w.published[c.Name] = c
	}
	w.publish(l, f)
}

// failed tells load balancers of endpoints that are gone, although the rules still go to them; new ones are not told of
// before they can be reached.
func (w *follow) failed(l *Loop, f *family) {
	if !w.recheck || w.published == nil {
		return
	}
	ready := make(map[model.Name]int, len(w.checks))
	for _, c := range w.checks {
		ready[c.Name] = c.LocalReady
	}
	lowered := false
	for n, c := range w.published {
		if ready[n] < c.LocalReady {
			c.LocalReady = ready[n]
			w.published[n] = c
			lowered = true
		}
	}
	if lowered {
		w.publish(l, f)
	}
}

func (w *follow) publish(l *Loop, f *family) {
	list := slices.SortedFunc(maps.Values(w.published), func(a, b health.Service) int { return a.Name.Compare(b.Name) })
	l.cfg.Health.SetServices(f.Family.Family, w.scope, list)
}

// dispatchCleaner starts the clean-up of flows that is due, and gives the time at which to look again.
func (l *Loop) dispatchCleaner(ctx context.Context, now time.Time, f *family) time.Time {
	w := &f.follow
	if f.Cleaner == nil || w.cleaning || len(w.ready) == 0 {
		return time.Time{}
	}
	if now.Before(w.cleanAt) {
		return w.cleanAt
	}
	// The cleaner runs while the table goes on changing: it gets the ports as they are now, which never change.
	changed, tracked, about := w.ready, slices.Collect(maps.Values(w.tracked)), f.Builder.Table().Context
	w.cleaning, w.ready = true, map[forward.PortName][]*forward.Port{}
	l.workers.Go(func() {
		began := l.clock.Now()
		deleted := 0
		err := guard(func() (err error) {
			ix := flow.IndexOf(&about, slices.Values(tracked))
			for _, n := range slices.SortedFunc(maps.Keys(changed), forward.PortName.Compare) {
				for _, old := range changed[n] {
					ix.Remove(old)
				}
			}
			deleted, err = f.Cleaner.Clean(ctx, ix)
			return err
		})
		took := l.clock.Now().Sub(began)
		l.deliver(ctx, func() { l.cleaned(f, changed, deleted, took, err) })
	})
	return time.Time{}
}

// cleanRest keeps clean-ups under a fifth of the time where there are very many flows: how long the next waits at least,
// in durations of the last.
const cleanRest = 4

// cleaned takes over the result of a clean-up. One that failed is tried again, for the same ports.
func (l *Loop) cleaned(
	f *family, changed map[forward.PortName][]*forward.Port, deleted int, took time.Duration, err error,
) {
	w := &f.follow
	w.cleaning = false
	l.cfg.Metrics.FlowsCleaned(f.Family.Family, took, deleted, err == nil)
	f.stats.FlowsDeleted += deleted
	if err == nil {
		if w.retry.tries > 0 {
			l.log.Info("Deleting stale flows works again", logkey.Family, f.name())
		}
		w.retry.reset()
		w.cleanAt = l.clock.Now().Add(cleanRest * took)
		return
	}
	if errors.Is(err, context.Canceled) {
		return
	}
	for n, old := range changed {
		w.ready[n] = append(old, w.ready[n]...)
	}
	first := w.retry.tries == 0
	w.cleanAt = l.clock.Now().Add(w.retry.fail(l.cfg.Jitter()))
	if first {
		l.log.Error("Could not delete stale flows, kept trying", logkey.Family, f.name(), logkey.Err, errText(err))
	}
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

func setOrDelete[K comparable, V any](m map[K]V, k K, v V, keep bool) {
	if keep {
		m[k] = v
	} else {
		delete(m, k)
	}
}
