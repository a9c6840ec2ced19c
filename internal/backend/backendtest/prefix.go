package backendtest

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A change is a step from one table to the next; nil is no table at all.
type change struct {
	mode    Mode
	family  model.Family
	old     *forward.Table
	next    *forward.Table
	packets []forward.Packet
	// foreign tells that others have objects in the kernel.
	foreign bool
}

// open gives a fresh fake kernel with a backend that has applied a table, free of faults.
func (c *change) open(t testing.TB, table *forward.Table) *lane {
	t.Helper()
	kernel := c.mode.Fake(t, c.family)
	if c.foreign {
		if err := kernel.AddForeign(); err != nil {
			t.Fatalf("add foreign objects: %v", err)
		}
	}
	l := newLane(t, c.mode, kernel, "")
	if table != nil {
		l.compile(table, everything(table))
		l.sync()
	}
	return l
}

// Strides above hugeStride belong to tables of thousands of endpoints. A plan of few sections has come about half way at
// operation middle.
const (
	hugeStride = 20
	middle     = 4
	// gradualStride takes each so manieth place of a mode that changes one object at a time, in a short run.
	gradualStride = 7
)

// prefixes stops the change at each place where it can stop, first in the process that made the old table, then in one
// that was just started and finds the old table's objects. At each place packets must get what one of the two tables
// says, and from each place a new process must arrive at the next table. Stride > 1 takes only each so manieth place; where
// each try costs a second, only one place in the middle is taken.
func (c *change) prefixes(t testing.TB, stride int) {
	t.Helper()
	if c.mode.Gradual && testing.Short() { // such a mode's plans have many operations
		stride *= gradualStride
	}
	var want string
	for _, fresh := range []bool{false, true} {
		for at := max(1, min(stride, middle)); ; at += stride {
			l := c.open(t, c.old)
			stopped := l.stop(c, fresh, at)
			where := fmt.Sprintf("stopped at operation %d (new process: %v)", at, fresh)
			l.between(where, c.old, c.next, c.packets)
			l.reopen()
			l.compile(c.next, everything(c.next))
			l.sync()
			l.settled()
			if got := l.dump(); want == "" {
				want = got
			} else if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: a restarted process arrives elsewhere (-want +got):\n%s", where, diff)
			}
			if t.Failed() {
				return
			}
			if stride > hugeStride {
				return
			}
			if !stopped {
				break
			}
		}
	}
}

// stop takes the lane towards the next table and lets every kernel operation fail from the at-th on, as if the process
// had been killed there. It tells whether there was such an operation.
func (l *lane) stop(c *change, fresh bool, at int) (stopped bool) {
	l.t.Helper()
	if fresh {
		l.reopen()
		l.compile(c.next, everything(c.next))
	} else {
		l.compile(c.next, difference(c.old, c.next))
	}
	ctx := context.Background()
	n := 0
	l.kernel.Fail(func(string) error {
		if n++; n >= at {
			stopped = true
			return errInjected
		}
		return nil
	})
	defer l.kernel.Fail(nil)
	plan := l.b.Diff(nil)
	if fresh || !l.synced {
		have, err := l.b.Observe(ctx)
		if err != nil {
			return stopped
		}
		plan = l.b.Diff(have)
	}
	if report := l.b.Apply(ctx, plan); !stopped && !report.OK() {
		l.t.Errorf("apply without a failure: %v, %v", report.Err, report.Failed)
	}
	return stopped
}
