package loop

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A View shows the state of a Loop during one call of Do. What it holds may be read, not changed and not kept, apart
// from strings, findings and statuses.
type View struct {
	// Synced tells that all sources have been complete.
	Synced bool
	// Node is this machine's Node; nil while it is unknown.
	Node     *model.Node
	Families []FamilyView
	// Findings are what is wrong with objects now, sorted, from sources and builders.
	Findings []model.Finding
	// Services and Slices count what the sources gave.
	Services, Slices int
}

// A State says how a family stands.
type State string

// Waiting: nothing was written yet. Synced: what is wanted is in effect. Failing: the last round as a whole failed.
const (
	Waiting State = "waiting"
	Synced  State = "synced"
	Failing State = "failing"
)

// A FamilyView is one IP family in a View.
type FamilyView struct {
	Family model.Family
	Mode   string
	Table  *forward.Table
	State  State
	// Pending tells that changes are waiting or being applied.
	Pending bool
	// Err, FailingSince, Attempts and NextRetry are set in state Failing.
	Err          string
	FailingSince time.Time
	Attempts     int
	NextRetry    time.Time
	// Ports are those that do not work, sorted by name. All other ports of the table are in effect or Pending.
	Ports []PortStatus
	Stats Stats
}

// A PortStatus tells of one Service port that does not work.
type PortStatus struct {
	Port forward.PortName
	// Unsupported is the mode's reason why it cannot serve the port; empty for one that the kernel refuses.
	Unsupported string
	Err         string
	// Served tells of an unsupported port that it is served all the same, but not quite as asked.
	Served bool
	// Since, Attempts and NextRetry are set for a refused port.
	Since     time.Time
	Attempts  int
	NextRetry time.Time
}

// Stats are counters and times of one family.
type Stats struct {
	Started time.Time
	// LastSync is when a round last took effect, LastVerified when everything was last compared with the kernel, and
	// LastDrift when something was last repaired; zero for never.
	LastSync, LastVerified, LastDrift time.Time
	// LastTook and LastSteps are of the last round that took effect.
	LastTook  time.Duration
	LastSteps int
	// Rounds counts all, Failures those that as a whole failed.
	Rounds, Failures int
	DriftRepairs     int
	FlowsDeleted     int
}

// A ReadBack is a comparison of what is wanted with the kernel.
type ReadBack struct {
	Observed backend.Observed
	// Drift counts the steps that would make the kernel as wanted, and Plan prints them; both are empty while the loop
	// has not written anything yet.
	Drift int
	Plan  string
}

// Do runs a function with the loop's state at a moment when it does not change. The function must be quick. Do works
// while Run does; before that it waits, and after it gives an error.
func (l *Loop) Do(ctx context.Context, fn func(View)) error {
	done := make(chan error, 1)
	request := func() {
		done <- guard(func() error {
			fn(l.view())
			return nil
		})
	}
	if err := l.request(ctx, request); err != nil {
		return err
	}
	return <-done
}

// request hands a function to the Run goroutine.
func (l *Loop) request(ctx context.Context, fn func()) error {
	select {
	case l.requests <- fn:
		return nil
	case <-l.done:
		return errStopped
	case <-ctx.Done():
		return fmt.Errorf("wait for the daemon: %w", ctx.Err())
	}
}

// Inspect reads back what the kernel holds of a family, without changing anything. Drift that it finds is repaired by
// the loop soon after.
func (l *Loop) Inspect(ctx context.Context, family model.Family) (ReadBack, error) {
	var got ReadBack
	err := l.ask(ctx, family, func(ctx context.Context, b backend.Backend, wanted bool) (bool, error) {
		have, err := b.Observe(ctx)
		if err != nil {
			return false, fmt.Errorf("read back %s: %w", family, err)
		}
		got.Observed = have
		if !wanted {
			return false, nil
		}
		unacknowledged := b.Diff(nil).Steps()
		plan := b.Diff(have)
		got.Drift, got.Plan = plan.Steps(), plan.String()
		return got.Drift > unacknowledged, nil
	})
	if err != nil {
		return ReadBack{}, err
	}
	return got, nil
}

// Trace follows a packet through what is wanted of a family's kernel objects.
func (l *Loop) Trace(ctx context.Context, family model.Family, p forward.Packet) (backend.Trace, error) {
	var got backend.Trace
	err := l.ask(ctx, family, func(_ context.Context, b backend.Backend, wanted bool) (drift bool, err error) {
		if !wanted {
			return false, fmt.Errorf("nothing is known about %s yet: the sources are not complete", family)
		}
		got, err = b.Trace(p)
		return false, err
	})
	if err != nil {
		return backend.Trace{}, err
	}
	return got, nil
}

// ask runs a function in a family's lane, between other jobs, and waits for it. Wanted tells the function that the
// backend has compiled a table; it gives whether it found drift. What it writes must not be used if ask gives an error.
func (l *Loop) ask(
	ctx context.Context, family model.Family,
	fn func(ctx context.Context, b backend.Backend, wanted bool) (drift bool, err error),
) error {
	answer := make(chan error, 1)
	err := l.request(ctx, func() {
		f := l.family(family)
		if f == nil {
			answer <- fmt.Errorf("%s is not served on this node", family)
			return
		}
		f.queries = append(f.queries, func(laneCtx context.Context) func() {
			drift := false
			err := ctx.Err()
			if err == nil {
				err = guard(func() (err error) {
					drift, err = fn(laneCtx, f.Backend, f.compiled)
					return err
				})
			}
			return func() {
				f.free()
				f.watch.suspect = f.watch.suspect || drift
				f.watch.drifted = f.watch.drifted || drift
				answer <- err
			}
		})
	})
	if err != nil {
		return err
	}
	select {
	case err := <-answer:
		return err
	case <-l.done:
		return errStopped
	case <-ctx.Done():
		return fmt.Errorf("wait for the daemon: %w", ctx.Err())
	}
}

func (l *Loop) family(family model.Family) *family {
	for _, f := range l.families {
		if f.Family.Family == family {
			return f
		}
	}
	return nil
}

func (l *Loop) view() View {
	v := View{
		Synced: l.missing == 0, Node: l.snapshot.Node, Findings: l.findings.all(), Services: len(l.snapshot.Services),
	}
	for _, parts := range l.snapshot.Slices {
		v.Slices += len(parts)
	}
	for _, f := range l.families {
		v.Families = append(v.Families, f.view())
	}
	return v
}

func (f *family) view() FamilyView {
	v := FamilyView{
		Family: f.Family.Family, Mode: f.Backend.Mode(), Table: f.Builder.Table(), State: Waiting,
		Pending: f.changed || len(f.underway.services)+len(f.underway.slices) > 0, Stats: f.stats,
	}
	switch {
	case f.failing:
		v.State, v.Err, v.FailingSince = Failing, f.lastErr.Error(), f.since
		v.Attempts, v.NextRetry = f.retry.tries, f.retryAt
	case f.started:
		v.State = Synced
	}
	for n, p := range f.ports.failed {
		v.Ports = append(v.Ports, PortStatus{
			Port: n, Err: p.err.Error(), Since: p.since, Attempts: p.tries, NextRetry: p.next,
		})
	}
	for n, p := range f.ports.unsupported {
		v.Ports = append(v.Ports, PortStatus{Port: n, Unsupported: p.Reason, Err: errText(p.Err), Served: p.Served})
	}
	slices.SortFunc(v.Ports, func(a, b PortStatus) int {
		return cmp.Or(a.Port.Compare(b.Port), cmp.Compare(a.Unsupported, b.Unsupported))
	})
	return v
}

func compareFindings(a, b model.Finding) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Object, b.Object), cmp.Compare(a.Reason, b.Reason),
		cmp.Compare(a.Message, b.Message), cmp.Compare(a.Severity, b.Severity))
}
