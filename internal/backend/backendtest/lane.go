package backendtest

import (
	"context"
	"errors"
	"hash/fnv"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
)

// errInjected is what an operation fails with on purpose.
var errInjected = errors.New("injected failure")

// A lane is one backend that follows a world on one kernel.
type lane struct {
	t      testing.TB
	mode   Mode
	kernel Kernel
	b      backend.Backend
	// enter runs a function where the kernel is: in the node's network namespace if it is a real one.
	enter func(func() error) error
	// faults draws which operations fail; nil lets all pass.
	faults *rand.Rand
	// synced tells that the backend's first sync is over.
	synced bool
	// seen is what was read back last, nil since somebody may have changed the kernel.
	seen backend.Observed
}

// faultShare is the part of the kernel's operations that fail, in percent.
const faultShare = 10

// newLane starts a backend on a kernel. The faults are the same for the same name.
func newLane(t testing.TB, m Mode, kernel Kernel, name string) *lane {
	t.Helper()
	l := &lane{t: t, mode: m, kernel: kernel, enter: func(f func() error) error { return f() }}
	if name != "" {
		h := fnv.New64a()
		_, _ = h.Write([]byte(name)) // a hash takes everything
		l.faults = rand.New(rand.NewPCG(h.Sum64(), 1))
	}
	l.b = kernel.Open()
	return l
}

// reopen replaces the backend by one of a new process. Its wanted state is empty until the next compile.
func (l *lane) reopen() {
	l.b, l.synced, l.seen = l.kernel.Open(), false, nil
}

// compile hands the backend a table. A mode that cannot express a port fails the test.
func (l *lane) compile(table *forward.Table, d forward.Delta) {
	l.t.Helper()
	for _, p := range l.b.Compile(table, d) {
		l.t.Errorf("%s cannot be expressed: %s: %v", p.Port, p.Reason, p.Err)
	}
}

// maxTries bounds how often an apply is tried: with one operation in ten failing, a plan of 30 operations has a chance of
// one in twenty.
const maxTries = 500

// sync applies what is wanted as the loop does: from what was acknowledged, and after a failure from what is read back.
func (l *lane) sync() {
	l.t.Helper()
	if l.faults != nil {
		l.kernel.Fail(func(string) error {
			if l.faults.IntN(100) < faultShare {
				return errInjected
			}
			return nil
		})
		defer l.kernel.Fail(nil)
	}
	var last error
	for try := range maxTries {
		var done bool
		done, last = l.attempt(try > 0)
		if done {
			return
		}
		if l.faults == nil {
			break
		}
	}
	l.t.Fatalf("what is wanted could not be applied: %v", last)
}

// attempt makes one try of a sync.
func (l *lane) attempt(again bool) (done bool, err error) {
	l.t.Helper()
	l.seen = nil
	ctx := context.Background()
	var report backend.Report
	err = l.enter(func() error {
		plan := l.b.Diff(nil)
		if again || !l.synced {
			have, err := l.b.Observe(ctx)
			if err != nil {
				return err // the caller prints it
			}
			plan = l.b.Diff(have)
		}
		report = l.b.Apply(ctx, plan)
		return report.Err
	})
	for name, failed := range report.Failed {
		l.t.Errorf("the kernel refused %s: %v", name, failed)
	}
	l.synced = l.synced || err == nil
	return err == nil, err
}

// observe reads back without faults.
func (l *lane) observe() backend.Observed {
	l.t.Helper()
	var have backend.Observed
	err := l.enter(func() (err error) {
		have, err = l.b.Observe(context.Background())
		return err // printed below
	})
	if err != nil {
		l.t.Fatalf("observe: %v", err)
	}
	return have
}

// pulse reads the kernel's fingerprint.
func (l *lane) pulse() string {
	l.t.Helper()
	var pulse string
	err := l.enter(func() (err error) {
		pulse, err = l.b.Pulse(context.Background())
		return err // printed below
	})
	if err != nil {
		l.t.Fatalf("pulse: %v", err)
	}
	return pulse
}

// dump prints the kernel's objects.
func (l *lane) dump() string {
	l.t.Helper()
	var text string
	err := l.enter(func() (err error) {
		text, err = l.kernel.Dump()
		return err // printed below
	})
	if err != nil {
		l.t.Fatalf("dump the kernel: %v", err)
	}
	return text
}

// settled checks that nothing is left to be done, by memory and by reading back.
func (l *lane) settled() {
	l.t.Helper()
	if plan := l.b.Diff(nil); plan.Steps() > 0 {
		l.t.Errorf("after everything was applied the next plan is not empty:\n%s", plan)
	}
	l.seen = l.observe()
	if plan := l.b.Diff(l.seen); plan.Steps() > 0 {
		l.t.Errorf("what was applied is not what is read back; the plan is:\n%s", plan)
	}
}

// adopts checks that a new process finds nothing to be done for a table, and that looking changes nothing.
func (l *lane) adopts(table *forward.Table) {
	l.t.Helper()
	before, pulse := l.dump(), l.pulse()
	l.reopen()
	l.compile(table, everything(table))
	if plan := l.b.Diff(l.observe()); plan.Steps() > 0 {
		l.t.Errorf("a restarted process does not take over what it finds; its plan is:\n%s", plan)
	}
	l.sync()
	if diff := cmp.Diff(before, l.dump()); diff != "" {
		l.t.Errorf("a restarted process changed the kernel (-before +after):\n%s", diff)
	}
	if now := l.pulse(); now != pulse {
		l.t.Errorf("a restarted process that had nothing to do changed the pulse from %q to %q", pulse, now)
	}
}
