package loop

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
)

// A lateBackend has one more thing to do some time after each change.
type lateBackend struct {
	*fakeBackend
	delay time.Duration
	wake  time.Time
	// idle makes it ask for being woken without having anything to do.
	idle bool
}

func (b *lateBackend) Wake() time.Time { return b.wake }

func (b *lateBackend) Diff(have backend.Observed) backend.Plan {
	if !b.wake.IsZero() && !time.Now().Before(b.wake) && !b.idle {
		b.wanted["late"] = "done"
	}
	return b.fakeBackend.Diff(have)
}

func (b *lateBackend) Apply(ctx context.Context, p backend.Plan) backend.Report {
	if b.wanted["late"] == "done" {
		b.wake = time.Time{}
	} else if b.wake.IsZero() {
		b.wake = time.Now().Add(b.delay)
	}
	return b.fakeBackend.Apply(ctx, p)
}

func TestABackendIsWokenWhenItAsksForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var late *lateBackend
		r := start(t, func(c *Config) {
			late = &lateBackend{fakeBackend: c.Families[0].Backend.(*fakeBackend), delay: 10 * time.Second}
			c.Families[0].Backend = late
		})
		r.sync(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
		after(9 * time.Second)
		if text := r.kernel().text(); text != "base: always\n"+web+": 10.244.0.1:8080\n" {
			t.Errorf("before the time the kernel holds:\n%s", text)
		}
		after(2 * time.Second)
		if text := r.kernel().text(); text != "base: always\n"+web+": 10.244.0.1:8080\nlate: done\n" {
			t.Errorf("after the time the kernel holds:\n%s", text)
		}
		n := r.kernel().count(applies)
		after(time.Minute)
		if more := r.kernel().count(applies) - n; more != 0 {
			t.Errorf("%d more rounds in a minute with nothing to do", more)
		}
		r.stop()
	})
}

// A backend that always asks to be called at once does not take all the time.
func TestABackendInAHurryIsNotWokenAllTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var counted atomic.Int64
		r := start(t, func(c *Config) {
			c.Families[0].Backend = &countingBackend{
				lateBackend: lateBackend{fakeBackend: c.Families[0].Backend.(*fakeBackend), idle: true, wake: time.Now()},
				diffs:       &counted,
			}
		})
		r.sync(service("web", "10.96.0.1"))
		before := counted.Load()
		after(10 * time.Second)
		if n := counted.Load() - before; n < 5 || n > 25 {
			t.Errorf("asked for a plan %d times in 10 s, want about once a second", n)
		}
		r.stop()
	})
}

// A countingBackend counts how often it is asked for a plan.
type countingBackend struct {
	lateBackend
	diffs *atomic.Int64
}

func (b *countingBackend) Diff(have backend.Observed) backend.Plan {
	b.diffs.Add(1)
	return b.lateBackend.Diff(have)
}
