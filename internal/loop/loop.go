// Package loop is the one place of the daemon with state that changes: it takes events from the sources, lets package
// forward decide, hands what changed to the backends, and sees to it that the kernel stays as wanted. It decides when
// something is done, tried again, compared with the kernel, logged and counted; it decides nothing about traffic and
// must not import a backend, a source or Kubernetes types.
//
// One goroutine (Run) owns the snapshot, the tables and everything else. Each IP family has a lane, a goroutine that
// holds no state and carries out one job at a time for it (compile, apply, read back), so that a slow or failing family
// never holds the other and events are taken at any time. While a lane is busy the loop leaves the family's table and
// backend alone, except that both may read the table.
//
// Read loop.go, then family.go (what is due), round.go (a change), verify.go (drift).
package loop

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/health"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/metric"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Builder keeps a forwarding table up to date; *forward.Builder is the only one outside of tests. The loop calls
// Update from one goroutine, and never while another reads the table.
type Builder interface {
	Update(s *model.Snapshot, dirty model.Dirty, host forward.Host) forward.Delta
	Table() *forward.Table
	Findings() map[string][]model.Finding
}

// A Family is one IP family with what serves it.
type Family struct {
	Family  model.Family
	Builder Builder
	Backend backend.Backend
	// Cleaner deletes stale flows; nil for none.
	Cleaner Cleaner
}

// An EventSink publishes findings where users of the cluster look. Publish must not block.
type EventSink interface {
	Publish(f model.Finding)
}

// Health is told what health checks depend on; see package health. Its methods must not block.
type Health interface {
	// Queued tells that a family waits for a sync since then at the latest, Updated that one took effect.
	Queued(f model.Family, at time.Time)
	Updated(f model.Family, at time.Time)
	// SetNode hands over this machine's Node; nil while it is unknown.
	SetNode(n *model.Node)
	// SetServices replaces the Services of a family that have a health check port.
	SetServices(f model.Family, scope forward.NodePortScope, services []health.Service)
}

// A Config says what a Loop works with. Families is required; every other zero value stands for the default given.
type Config struct {
	Families []Family
	// Sources counts the sources that must report to be complete before anything is written. Default 1.
	Sources int
	// MinSyncPeriod is the least time from the end of a round to the start of the next when Burst rounds have followed
	// each other; 0 is no limit. Default of Burst: 2.
	MinSyncPeriod time.Duration
	Burst         int
	// Gather is how long the loop waits after the first change for those that come with it. Default 1 ms.
	Gather time.Duration
	// SyncPeriod is the longest time between tries for a Service port that the kernel refuses. Default 30 s.
	SyncPeriod time.Duration
	// VerifyPeriod is the least time between two comparisons of everything with the kernel when nothing suggests that
	// one is needed. Default 5 min.
	VerifyPeriod time.Duration
	// PulsePeriod is the time between two looks at the backend's fingerprint of the kernel. Default 1 s.
	PulsePeriod time.Duration
	// StopGrace is how long Run waits at its end for backends that do not heed their context. Default 2 s.
	StopGrace time.Duration

	// Started is called once, from Run's goroutine, when every family has synced for the first time. It must not block.
	// Default nothing.
	Started func()

	Clock   Clock
	Logger  *slog.Logger
	Metrics *metric.Metrics
	Health  Health
	Events  EventSink
	// Jitter gives numbers in 0..1 that spread retries. Default random.
	Jitter func() float64
}

// A Loop keeps the kernel as the sources want it. Make one with New and call Run once; all other methods may be called
// from any goroutine, also before Run.
type Loop struct {
	cfg   Config
	clock Clock
	log   *slog.Logger
	// discard takes what is not logged.
	discard *slog.Logger
	inbox   *inbox
	// requests are functions for the Run goroutine, from Do; results those from the lanes.
	requests, results chan func()
	running           atomic.Bool
	writes            *writes
	done              chan struct{}
	workers           sync.WaitGroup

	// What follows belongs to the Run goroutine.
	snapshot *model.Snapshot
	host     forward.Host
	// missing counts the sources that are not complete yet.
	missing  int
	families []*family
	findings findings
	lines    limiter
}

// errStopped answers queries when Run has returned.
var errStopped = errors.New("the daemon is stopping")

// logLines is how many lines about single objects are logged in a minute; the others are counted.
const logLines = 100

// New gives a loop. Nothing happens before Run.
func New(cfg Config) *Loop {
	cfg.setDefaults()
	l := &Loop{
		cfg: cfg, clock: cfg.Clock, log: cfg.Logger, discard: slog.New(slog.DiscardHandler),
		inbox: newInbox(), writes: newWrites(),
		requests: make(chan func()), results: make(chan func()), done: make(chan struct{}),
		snapshot: model.NewSnapshot(), missing: cfg.Sources, findings: newFindings(),
		lines: limiter{lines: logLines},
	}
	now := l.clock.Now()
	for _, f := range cfg.Families {
		l.families = append(l.families, newFamily(f, &l.cfg, now))
		cfg.Metrics.Families(f.Backend.Mode(), f.Family)
	}
	return l
}

func (c *Config) setDefaults() {
	orDefault(&c.Sources, 1)
	orDefault(&c.Burst, 2)
	orDefault(&c.Gather, time.Millisecond)
	orDefault(&c.SyncPeriod, 30*time.Second)
	orDefault(&c.VerifyPeriod, 5*time.Minute)
	orDefault(&c.PulsePeriod, time.Second)
	orDefault(&c.StopGrace, 2*time.Second)
	if c.Started == nil {
		c.Started = func() {}
	}
	if c.Clock == nil {
		c.Clock = SystemClock()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Metrics == nil {
		c.Metrics = metric.New(c.Clock.Now(), "")
	}
	if c.Health == nil {
		c.Health = noHealth{}
	}
	if c.Jitter == nil {
		c.Jitter = rand.Float64
	}
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Sink gives the function to which sources send their events. Only the latest event about each object is kept until
// the loop takes it.
func (l *Loop) Sink() model.Sink {
	return func(events ...model.Event) {
		services, parts := 0, 0
		for i := range events {
			if events[i].Service != nil {
				services++
			}
			if events[i].Slice != nil {
				parts++
			}
		}
		l.cfg.Metrics.Seen(services, parts)
		l.inbox.put(events...)
	}
}

// SetHost replaces the addresses of this machine's interfaces, of both families, loopback included. Call it before Run
// and whenever they change.
func (l *Loop) SetHost(addrs []netip.Addr) { l.inbox.setHost(addrs) }

// Run works until the context ends and then returns nil, soon and without touching the kernel again: all rules stay
// and traffic goes on. It gives an error only if it was called before.
func (l *Loop) Run(ctx context.Context) error {
	if !l.running.CompareAndSwap(false, true) {
		return errors.New("the loop was started already: make a new one")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer close(l.done)
	defer l.stop(cancel)
	for _, f := range l.families {
		l.cfg.Metrics.Queued(f.Family.Family, l.clock.Now())
		l.workers.Go(func() { l.runLane(ctx, f) })
	}
	timer := l.clock.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		l.drain()
		now := l.clock.Now()
		// The timer also fires when nothing is due, at least once an hour, and then does no harm.
		next := earliest(l.dispatch(ctx, now), now.Add(time.Hour))
		timer.Reset(next.Sub(now))
		select {
		case <-ctx.Done():
			return nil
		case <-l.inbox.wake:
		case finish := <-l.results:
			finish()
		case request := <-l.requests:
			request()
		case <-timer.C():
		}
	}
}

// stop waits for jobs that are under way, but not for ever.
func (l *Loop) stop(cancel context.CancelFunc) {
	cancel()
	ended := make(chan struct{})
	go func() {
		l.workers.Wait()
		close(ended)
	}()
	timer := l.clock.NewTimer(l.cfg.StopGrace)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C():
		l.log.Warn("Stopped while a backend was still busy")
	}
}

// A job is carried out by a lane. It gives a function that takes over the result in the Run goroutine.
type job func(ctx context.Context) func()

// runLane carries out a family's jobs, one at a time.
func (l *Loop) runLane(ctx context.Context, f *family) {
	for {
		select {
		case <-ctx.Done():
			return
		case do := <-f.lane:
			l.deliver(ctx, do(ctx))
		}
	}
}

// deliver hands a result to the Run goroutine.
func (l *Loop) deliver(ctx context.Context, finish func()) {
	select {
	case l.results <- finish:
	case <-ctx.Done():
	}
}

// dispatch starts what is due and gives the time at which something else will be.
func (l *Loop) dispatch(ctx context.Context, now time.Time) time.Time {
	var next time.Time
	for _, f := range l.families {
		next = earliest(next, l.dispatchFamily(now, f))
		next = earliest(next, l.dispatchCleaner(ctx, now, f))
	}
	left, at := l.lines.rollover(now)
	if left > 0 {
		l.cfg.Metrics.Suppressed(left)
		l.log.Warn("Left out log lines about single objects", logkey.Count, left)
	}
	return earliest(next, at)
}

// drain takes what is in the inbox into the snapshot and marks what it changed in each family.
func (l *Loop) drain() {
	got := l.inbox.take()
	now := l.clock.Now()
	if got.hostSet && !slices.Equal(got.host, l.host.Addrs) {
		l.host = forward.Host{Addrs: got.host}
		for _, f := range l.families {
			f.hostChanged = true
			l.queue(f, now)
		}
	}
	for key, it := range got.items {
		l.findings.set(source{object: key}, it.event.Findings)
		l.applyEvent(key, it, now)
	}
	if l.missing > 0 && got.synced > 0 {
		l.missing = max(l.missing-got.synced, 0)
		if l.missing == 0 {
			l.log.Info("Received everything from the sources", logkey.Count, len(l.snapshot.Services))
			for _, f := range l.families {
				l.cfg.Health.Queued(f.Family.Family, now)
			}
		}
	}
	if len(got.items) > 0 {
		l.reportFindings(now)
		l.reportPending()
	}
}

func (l *Loop) applyEvent(key objectKey, it item, now time.Time) {
	var dirty model.Dirty
	l.snapshot.Apply(it.event, &dirty)
	if dirty.Empty() {
		return
	}
	if dirty.Node {
		l.cfg.Health.SetNode(l.snapshot.Node)
	}
	for _, f := range l.families {
		f.mark(dirty)
		f.changes.add(f.Family.Family, key, it)
		l.queue(f, now)
	}
}

// queue notes that a family has something to do.
func (l *Loop) queue(f *family, now time.Time) {
	if !f.changed {
		f.changed, f.gathered = true, now.Add(l.cfg.Gather)
	}
	l.cfg.Metrics.Queued(f.Family.Family, now)
	if l.missing == 0 {
		l.cfg.Health.Queued(f.Family.Family, now)
	}
}

// noHealth stands in when nobody asks for health.
type noHealth struct{}

func (noHealth) Queued(model.Family, time.Time)                                    {}
func (noHealth) Updated(model.Family, time.Time)                                   {}
func (noHealth) SetNode(*model.Node)                                               {}
func (noHealth) SetServices(model.Family, forward.NodePortScope, []health.Service) {}
