package loop

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/metric"
	"github.com/turnout-proxy/turnout/internal/model"
)

// work is what a lane is to do: bring the backend up to date with the table, compare with the kernel or not, and apply
// what differs.
type work struct {
	table   *forward.Table
	delta   forward.Delta
	compile bool
	// observe asks to start from what the kernel holds, not from what it acknowledged.
	observe bool
	// interrupt can end Observe early; nil if nothing may.
	interrupt *interrupt
	// verify tells that the work was started to find drift, drifted that it is known to be there.
	verify, drifted bool
	// ours tells that the kernel held what was wanted before, so that a difference can be drift.
	ours bool
	// pulse is the last known fingerprint, empty if unknown, and mark the place among our writes when it was taken.
	pulse string
	mark  int
}

// An outcome is what became of work.
type outcome struct {
	compiled bool
	problems []backend.Problem

	observed    bool
	observeTook time.Duration
	// interrupted tells that the read-back was ended early and nothing was done.
	interrupted bool
	// drift tells that the kernel lacked something that it had acknowledged; what says which, as far as it is short.
	drift bool
	what  string

	planned int
	applied bool
	report  backend.Report
	rules   *ruleCounts

	// pulse is the fingerprint after the work, empty if unknown, mark its place among our writes; foreign tells that
	// others changed something around it.
	pulse    string
	mark     int
	foreign  bool
	pulseErr error

	// wake is when the backend wants to be called though nothing changed; zero is never.
	wake time.Time

	start, end time.Time
	err        error
}

// An interrupt ends a read-back from outside.
type interrupt struct {
	mu     sync.Mutex
	fired  bool
	cancel context.CancelFunc
}

// bind says what to call; at once if it was fired already. It does nothing on a nil interrupt.
func (i *interrupt) bind(cancel context.CancelFunc) {
	if i == nil {
		return
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.cancel = cancel
	if i.fired {
		cancel()
	}
}

func (i *interrupt) fire() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.fired = true
	if i.cancel != nil {
		i.cancel()
	}
}

// A RuleCounter is a backend that can tell how many iptables rules it wants in the kernel and how many the last Apply
// wrote, by iptables table.
type RuleCounter interface {
	Rules() (total, last map[string]int)
}

type ruleCounts struct{ total, last map[string]int }

// startRound brings the table up to date and gives the lane what follows from it. If nothing follows the lane stays
// free.
func (l *Loop) startRound(f *family, now time.Time) {
	table, changed := f.Builder.Table(), f.changed
	delta, err := l.update(f, now)
	if err != nil {
		l.fail(f, outcome{start: now, end: l.clock.Now(), err: err}, work{})
		return
	}
	if !f.compiled {
		delta = everything(table)
	}
	f.follow.note(table, delta)
	delta = f.ports.retryWith(delta, now)
	woken := !f.wake.IsZero() && !f.wake.After(now)
	if delta.Empty() && f.started && !f.failing && !woken {
		l.inEffect(f, now)
		return
	}
	w := work{
		table: table, delta: delta, compile: !delta.Empty() || !f.compiled, observe: !f.started || f.failing,
		ours: f.started, drifted: f.watch.drifted, pulse: f.watch.pulse, mark: f.watch.mark,
	}
	if changed && !f.failing {
		f.bucket.take(now)
	}
	f.start(l.job(f, w))
}

// update runs the builder over what changed. If it panics, everything stays to be done.
func (l *Loop) update(f *family, now time.Time) (forward.Delta, error) {
	var delta forward.Delta
	if !f.changed && f.updated {
		return delta, nil
	}
	err := guard(func() error {
		delta = f.Builder.Update(l.snapshot, f.dirty, l.host)
		return nil
	})
	if err != nil {
		// The table may be half way; the next update must not trust that its delta says everything.
		f.compiled, f.changed = false, true
		return forward.Delta{}, fmt.Errorf("build the forwarding table: %w", err)
	}
	f.updated, f.changed, f.hostChanged, f.dirty = true, false, false, model.Dirty{}
	f.underway.merge(&f.changes)
	l.takeFindings(f, now)
	return delta, nil
}

// job wraps work for the lane.
func (l *Loop) job(f *family, w work) job {
	return func(ctx context.Context) func() {
		out := l.carryOut(ctx, f, w)
		return func() {
			f.free()
			if ctx.Err() == nil {
				l.finish(f, w, out)
			}
		}
	}
}

// carryOut does the work. It runs in the lane and touches nothing of the family but the backend and the table.
func (l *Loop) carryOut(ctx context.Context, f *family, w work) outcome {
	b := f.Backend
	out := outcome{start: l.clock.Now(), pulse: w.pulse, mark: w.mark}
	out.err = guard(func() error {
		if w.compile {
			out.problems = b.Compile(w.table, w.delta)
			out.compiled = true
		}
		plan, err := l.plan(ctx, b, w, &out)
		switch {
		case err != nil || out.interrupted:
			return err
		case !plan.Empty():
			return l.apply(ctx, f, plan, &out)
		case out.observed:
			// Nothing is to be done, but so the backend learns that the kernel holds what is wanted.
			return b.Apply(ctx, plan).Err
		}
		return nil
	})
	out.end = l.clock.Now()
	if waiter, ok := b.(backend.Waiter); ok {
		out.wake = waiter.Wake()
	}
	return out
}

// plan finds the steps to be done.
func (l *Loop) plan(ctx context.Context, b backend.Backend, w work, out *outcome) (backend.Plan, error) {
	if !w.observe {
		plan := b.Diff(nil)
		out.planned = plan.Steps()
		return plan, nil
	}
	// The fingerprint is taken before reading back: what others change meanwhile then shows as a new one.
	out.pulse, out.mark, out.pulseErr = l.writes.sample(ctx, l.clock, b)
	out.foreign = out.pulseErr != nil
	began := l.clock.Now()
	readBack, cancel := context.WithCancel(ctx)
	defer cancel()
	w.interrupt.bind(cancel)
	have, err := b.Observe(readBack)
	out.observeTook = l.clock.Now().Sub(began)
	switch {
	case err != nil && readBack.Err() != nil && ctx.Err() == nil:
		out.interrupted = true
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read back what the kernel holds: %w", err)
	}
	out.observed = true
	// What the kernel has not acknowledged yet is no drift; what it lacks beyond that is. A backend may take the
	// observation for an acknowledgement, so the order of the two calls matters.
	unacknowledged := b.Diff(nil).Steps()
	plan := b.Diff(have)
	out.planned = plan.Steps()
	if w.ours && (w.drifted || out.planned > unacknowledged) {
		out.drift = true
		if out.planned <= shortPlan {
			out.what = plan.String()
		}
	}
	return plan, nil
}

// shortPlan is the number of steps up to which a repair is logged in full.
const shortPlan = 20

// apply carries a plan out and looks whether others were at work at the same time.
func (l *Loop) apply(ctx context.Context, f *family, plan backend.Plan, out *outcome) error {
	b := f.Backend
	leave := l.writes.enter(ctx, l.clock)
	defer leave()
	before, err := b.Pulse(ctx)
	out.foreign = out.foreign || err != nil || out.pulse != "" && !l.writes.explain(f, out.mark, out.pulse, before)
	out.applied = true
	out.report = b.Apply(ctx, plan)
	out.problems = append(out.problems, out.report.Problems...)
	if c, ok := b.(RuleCounter); ok {
		total, last := c.Rules()
		out.rules = &ruleCounts{total, last}
	}
	out.mark = l.writes.mark()
	out.pulse, out.pulseErr = b.Pulse(ctx)
	if err == nil && out.pulseErr == nil {
		l.writes.add(f, before, out.pulse)
	}
	out.foreign = out.foreign || out.pulseErr != nil
	return out.report.Err
}

// finish takes over what became of work.
func (l *Loop) finish(f *family, w work, out outcome) {
	now := l.clock.Now()
	if !w.verify {
		f.bucket.done(now)
	}
	if w.compile {
		f.compiled = out.compiled
	}
	f.wake = out.wake
	if !f.wake.IsZero() && !f.wake.After(now) {
		f.wake = now.Add(leastWake)
	}
	if out.compiled || len(out.problems) > 0 {
		l.takeProblems(f, w, out, now)
	}
	l.takeReadBack(f, w, out, now)
	switch {
	case out.interrupted:
	case out.err != nil:
		l.fail(f, out, w)
	default:
		l.succeed(f, w, out)
	}
	l.reportPending()
}

// leastWake keeps a backend that is always in a hurry from taking all the time.
const leastWake = time.Second

// fail notes that work as a whole took no effect. The next try starts with reading back.
func (l *Loop) fail(f *family, out outcome, w work) {
	now := l.clock.Now()
	delay := f.retry.fail(l.cfg.Jitter())
	first := !f.failing
	f.failing, f.retryAt, f.lastErr = true, now.Add(delay), out.err
	var caught *panicError
	isPanic := errors.As(out.err, &caught)
	if isPanic {
		l.cfg.Metrics.Panicked(f.Family.Family)
	}
	if first {
		f.since = now
		log := l.log
		if isPanic {
			log = log.With(logkey.Stack, caught.stack)
		}
		log.Error("Sync failed, kept trying", logkey.Family, f.name(), logkey.Backend, f.Backend.Mode(),
			logkey.Err, errText(out.err), logkey.Retry, delay)
	} else {
		l.log.Debug("Sync failed again", logkey.Family, f.name(), logkey.Err, errText(out.err),
			logkey.Attempt, f.retry.tries, logkey.Retry, delay)
	}
	f.stats.Failures++
	l.count(f, w, out, metric.Failed)
	l.cfg.Health.Queued(f.Family.Family, now)
	f.follow.failed(l, f)
}

// start notes a family's first sync, and tells when all families have had theirs.
func (l *Loop) start(f *family) {
	if f.started {
		return
	}
	f.started = true
	if !slices.ContainsFunc(l.families, func(f *family) bool { return !f.started }) {
		l.cfg.Started()
	}
}

// succeed notes that work took effect, perhaps but for some ports.
func (l *Loop) succeed(f *family, w work, out outcome) {
	now := l.clock.Now()
	if f.failing {
		l.log.Info("Sync works again", logkey.Family, f.name(), logkey.Attempt, f.retry.tries+1,
			logkey.Since, now.Sub(f.since))
	}
	if !f.started {
		l.log.Info("Synced for the first time", logkey.Family, f.name(), logkey.Backend, f.Backend.Mode(),
			logkey.Ports, f.Builder.Table().Len(), logkey.Steps, out.report.Steps,
			logkey.Duration, out.end.Sub(out.start))
	}
	l.start(f)
	f.failing, f.lastErr = false, nil
	f.retry.reset()
	l.takePorts(f, out.report.Failed, now)
	if !w.verify || out.applied {
		result := metric.OK
		if len(out.report.Failed) > 0 {
			result = metric.Partial
		}
		l.count(f, w, out, result)
		l.log.Debug("Synced", logkey.Family, f.name(), logkey.Steps, out.report.Steps,
			logkey.Bytes, out.report.Bytes, logkey.Duration, out.end.Sub(out.start))
	}
	if out.drift && out.applied {
		f.watch.repaired(l, f, out, now)
	}
	l.inEffect(f, now)
}

// count records a round.
func (l *Loop) count(f *family, w work, out outcome, result metric.Result) {
	f.stats.Rounds++
	if result != metric.Failed {
		f.stats.LastSync, f.stats.LastTook, f.stats.LastSteps = out.end, out.end.Sub(out.start), out.report.Steps
	}
	l.cfg.Metrics.Round(metric.Round{
		Family: f.Family.Family, Result: result, Full: w.observe, Took: out.end.Sub(out.start), End: out.end,
		Steps: out.report.Steps, Bytes: out.report.Bytes, Restore: out.applied && f.Backend.Mode() == "iptables",
	})
	if out.rules != nil {
		l.cfg.Metrics.Rules(f.Family.Family, out.rules.total, out.rules.last)
	}
}

// inEffect completes what follows from changes that are in the kernel now. It works from what is wanted, not from what
// changed, so that the first good round after bad ones completes what they could not.
func (l *Loop) inEffect(f *family, now time.Time) {
	for _, trigger := range f.underway.settle(f.ports.refused()) {
		l.cfg.Metrics.Programmed(f.Family.Family, trigger, now)
	}
	l.cfg.Health.Updated(f.Family.Family, now)
	if f.changed {
		// Changes that came in during the round still wait, since they came.
		l.cfg.Health.Queued(f.Family.Family, f.gathered.Add(-l.cfg.Gather))
	}
	f.follow.succeeded(l, f)
	l.reportPending()
}

// A panicError is a panic that was caught.
type panicError struct {
	value any
	stack string
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

// guard runs a function and turns a panic into an error.
func guard(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &panicError{v, string(debug.Stack())}
		}
	}()
	return fn()
}
