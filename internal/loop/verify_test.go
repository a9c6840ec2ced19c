package loop

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
)

// flush is what somebody does who clears the tables.
func flush(objects map[string]string) { clear(objects) }

func TestAFlushIsRepairedWithinSecondsCountedAndLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
		r.settle()
		want := r.kernel().text()
		r.kernel().change(flush)
		began := time.Now()
		after(5 * time.Second)
		if diff := cmp.Diff(want, r.kernel().text()); diff != "" {
			t.Errorf("kernel after 5 s (-want +got):\n%s", diff)
		}
		writes := []write{{at: began.Sub(r.began), what: []string{"base", web}}}
		got := r.since(began)
		if len(got) != 1 || got[0].at > time.Second {
			t.Errorf("repairs: got %v, want one within 1 s like %v", got, writes)
		}
		after(time.Hour)
		if got := r.log.count("Repaired kernel objects"); got != 1 {
			t.Errorf("got %d lines, want 1:\n%s", got, r.log)
		}
		if got := r.log.count(`plan="base default/web/tcp"`); got != 1 {
			t.Errorf("the line does not say what was wrong:\n%s", r.log)
		}
		r.wantMetric("turnout_drift_repairs_total", 1)
		if got := r.look().Families[0].Stats.DriftRepairs; got != 1 {
			t.Errorf("drift repairs: got %d, want 1", got)
		}
		r.stop()
	})
}

// wantMetric checks the sum of a metric's series.
func (r *rig) wantMetric(name string, want float64) {
	r.t.Helper()
	families, err := r.metrics.Gatherer().Gather()
	if err != nil {
		r.t.Fatalf("gather: %v", err)
	}
	sum, found := 0.0, false
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		found = true
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	if !found || sum != want {
		r.t.Errorf("metric %s: got %v (found %v), want %v", name, sum, found, want)
	}
}

func TestChangesOfOthersThatDoNoHarmWriteNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		began, before := time.Now(), r.kernel().count(observes)
		for i := range 10 {
			r.kernel().change(func(o map[string]string) { o["foreign"] = fmt.Sprint(i) })
			after(10 * time.Second)
		}
		if got := r.since(began); len(got) != 0 {
			t.Errorf("got writes %v, want none", got)
		}
		if got := r.kernel().count(observes) - before; got != 10 {
			t.Errorf("got %d read-backs, want one for each change", got)
		}
		r.wantMetric("turnout_drift_repairs_total", 0)
		r.stop()
	})
}

func TestOwnWritesAreNotTakenForThoseOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		before := r.kernel().count(observes)
		for i := range 20 {
			r.sink(slice("web", fmt.Sprintf("10.244.0.%d", i+1)))
			after(3 * time.Second)
		}
		if got := r.kernel().count(observes) - before; got != 0 {
			t.Errorf("got %d read-backs, want none", got)
		}
		r.stop()
	})
}

func TestReadBacksStayUnderTwoPercentOfTheTime(t *testing.T) {
	tests := map[string]struct {
		takes time.Duration
		want  int
	}{
		// In 600 s, two more than the rate as the first three may follow each other.
		"cheap ones at most every 2 s":               {10 * time.Millisecond, 302},
		"dear ones at most every 50 times that long": {time.Second, 14},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, func(c *Config) { c.VerifyPeriod = 24 * time.Hour })
				r.sync(service("web", "10.96.0.1"))
				r.settle()
				r.kernel().set(func(k *fakeKernel) { k.observeTakes = tc.takes })
				before := r.kernel().count(observes)
				for i := range 600 {
					r.kernel().change(func(o map[string]string) { o["foreign"] = fmt.Sprint(i) })
					after(time.Second)
				}
				got := r.kernel().count(observes) - before
				if got > tc.want || got < tc.want*6/10 {
					t.Errorf("got %d read-backs in 600 s of constant changes, want %d or somewhat fewer", got, tc.want)
				}
				r.stop()
			})
		})
	}
}

func TestTheFirstReadBacksAfterAQuietTimeAreImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.observeTakes = time.Second })
		r.sync(service("web", "10.96.0.1"))
		after(10 * time.Minute)
		for i := range 3 {
			r.kernel().change(flush)
			began := time.Now()
			after(3 * time.Second)
			if got := r.since(began); len(got) != 1 {
				t.Errorf("flush %d: repairs within 3 s: got %v, want 1", i+1, got)
			}
		}
		r.stop()
	})
}

func TestFamiliesThatShareAFingerprintDoNotSuspectEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		six := func(addr string) model.Event {
			e := slice("six", addr)
			e.Slice.Name.Name = "six-1"
			return e
		}
		r := startShared(t)
		r.sync(service("web", "10.96.0.1"), service("six", "fd00::1"))
		r.settle()
		counts := func() int { return r.kernels[model.IPv4].count(observes) + r.kernels[model.IPv6].count(observes) }
		before := counts()
		for i := range 50 {
			r.sink(slice("web", fmt.Sprintf("10.244.0.%d", i+1)))
			if i%3 == 0 {
				r.sink(six(fmt.Sprintf("fd00:1::%d", i+1)))
			}
			after(1500 * time.Millisecond)
		}
		if got := counts() - before; got != 0 {
			t.Errorf("got %d read-backs, want none: all writes were our own", got)
		}
		// Somebody else's change between them is still seen, by both.
		r.sink(slice("web", "10.244.1.1"), six("fd00:2::1"))
		time.Sleep(500 * time.Millisecond)
		r.kernels[model.IPv6].change(flush)
		r.sink(slice("web", "10.244.1.2"))
		after(5 * time.Second)
		want := "base: always\ndefault/six/tcp: [fd00:2::1]:8080\n"
		if diff := cmp.Diff(want, r.kernels[model.IPv6].text()); diff != "" {
			t.Errorf("IPv6 (-want +got):\n%s", diff)
		}
		r.wantMetric("turnout_drift_repairs_total", 1)
		r.stop()
	})
}

func TestWhichFingerprintsOwnWritesExplain(t *testing.T) {
	four, six := &family{}, &family{}
	w := newWrites()
	w.add(six, "0", "1")
	mark := w.mark()
	w.add(six, "1", "2")
	w.add(four, "2", "3")
	w.add(six, "3", "4")
	w.add(six, "7", "8")
	for name, tc := range map[string]struct {
		mark     int
		from, to string
		want     bool
	}{
		"no change":                                {mark, "1", "1", true},
		"one write of another":                     {mark, "1", "2", true},
		"own writes are no excuse":                 {mark, "2", "3", false},
		"a write from before the fingerprint":      {mark, "0", "1", false},
		"a chain of another's writes":              {0, "0", "2", true},
		"somebody else's change after another's":   {mark, "1", "5", false},
		"somebody else's change between two":       {mark, "3", "8", false},
		"somebody else undid what another's wrote": {mark, "1", "0", false},
	} {
		if got := w.explain(four, tc.mark, tc.from, tc.to); got != tc.want {
			t.Errorf("%s: %s to %s: got %v, want %v", name, tc.from, tc.to, got, tc.want)
		}
	}
	for range 2 * keptWrites {
		w.add(six, "8", "9")
	}
	if got := len(w.list); got != keptWrites {
		t.Errorf("kept %d writes, want %d", got, keptWrites)
	}
	if w.explain(four, mark, "1", "9") {
		t.Error("forgotten writes explained a change")
	}
	if mark := w.mark(); w.explain(four, mark, "8", "9") || mark != 2*keptWrites+5 {
		t.Errorf("at mark %d an earlier write explained a change", mark)
	}
}

func TestAQueryHasItsTurnAmongEndlessRounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, func(c *Config) { c.MinSyncPeriod = 0 })
		r.sync(service("web", "10.96.0.1"))
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = time.Second })
		ctx, cancel := context.WithCancel(t.Context())
		storm := make(chan struct{})
		go func() {
			defer close(storm)
			for i := 0; ctx.Err() == nil; i++ {
				r.sink(slice("web", fmt.Sprintf("10.244.%d.%d", i/200%200, i%200+1)))
				time.Sleep(10 * time.Millisecond)
			}
		}()
		time.Sleep(5 * time.Second)
		began := time.Now()
		if _, err := r.Trace(t.Context(), model.IPv4, testPacket()); err != nil {
			t.Errorf("Trace: %v", err)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the answer took %v, want at most one round", took)
		}
		cancel()
		<-storm
		r.stop()
	})
}

func TestAQueryWhoseAskerHasGoneEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = time.Minute })
		r.sync(service("web", "10.96.0.1"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := r.Inspect(ctx, model.IPv4); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the end of the context", err)
		}
		r.stop()
		if _, err := r.Inspect(t.Context(), model.IPv4); !errors.Is(err, errStopped) {
			t.Errorf("after the end: got %v, want %v", err, errStopped)
		}
	})
}

// startShared starts a loop with two families whose kernels have one fingerprint.
func startShared(t *testing.T) *rig {
	t.Helper()
	var shared atomic.Int64
	return start(t, func(c *Config) {
		for _, f := range c.Families {
			f.Backend.(*fakeBackend).kernel.shared = &shared
		}
	}, model.IPv4, model.IPv6)
}

func TestSomebodyWhoFightsIsAnsweredButFillsNoLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		for range 100 {
			r.kernel().change(flush)
			after(5 * time.Second)
		}
		after(10 * time.Minute)
		r.wantMetric("turnout_drift_repairs_total", 100)
		if got := r.log.count("Repaired kernel objects"); got != 1 {
			t.Errorf("got %d lines for one episode, want 1", got)
		}
		if got := r.log.count("Others have stopped"); got != 1 {
			t.Errorf("got %d lines at the end of the episode, want 1", got)
		}
		r.kernel().change(flush)
		after(time.Minute)
		if got := r.log.count("Repaired kernel objects"); got != 2 {
			t.Errorf("got %d lines after a second episode, want 2", got)
		}
		r.stop()
	})
}

func TestDamageThatAChangeMeetsIsRepairedToo(t *testing.T) {
	tests := map[string]func(k *fakeKernel){
		"when the change goes through": func(*fakeKernel) {},
		"when the change fails by it":  func(k *fakeKernel) { k.fail = errors.New("no chain by that name") },
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, nil)
				r.sync(service("web", "10.96.0.1"), service("db", "10.96.0.2"))
				r.settle()
				r.kernel().change(flush)
				r.kernel().set(spoil)
				r.sink(slice("web", "10.244.0.1"))
				after(50 * time.Millisecond)
				r.kernel().set(func(k *fakeKernel) { k.fail = nil })
				after(5 * time.Second)
				want := "base: always\n" + db + ": \n" + web + ": 10.244.0.1:8080\n"
				if diff := cmp.Diff(want, r.kernel().text()); diff != "" {
					t.Errorf("kernel (-want +got):\n%s", diff)
				}
				r.wantMetric("turnout_drift_repairs_total", 1)
				r.stop()
			})
		})
	}
}

func TestAPortThatIsRefusedIsNoDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.refuse = map[string]error{web: errors.New("no")} })
		r.sync(service("web", "10.96.0.1"), service("db", "10.96.0.2"))
		r.kernel().change(func(o map[string]string) { o["foreign"] = "x" })
		after(10 * time.Minute)
		r.wantMetric("turnout_drift_repairs_total", 0)
		r.stop()
	})
}

func TestEverythingIsReadBackFromTimeToTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		before := r.kernel().count(observes)
		after(time.Hour)
		if got := r.kernel().count(observes) - before; got != 12 {
			t.Errorf("got %d read-backs in an hour, want one in 5 minutes", got)
		}
		// Damage that does not show in the fingerprint is found too.
		r.kernel().set(func(k *fakeKernel) { clear(k.objects) })
		after(6 * time.Minute)
		if diff := cmp.Diff("base: always\n"+web+": \n", r.kernel().text()); diff != "" {
			t.Errorf("kernel (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestAChangeDoesNotWaitForAReadBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		r.kernel().set(func(k *fakeKernel) { k.observeTakes = time.Minute })
		r.kernel().change(flush)
		after(2 * time.Second)
		for i := range 3 {
			began := time.Now()
			r.sink(slice("web", fmt.Sprintf("10.244.0.%d", i+1)))
			after(10 * time.Millisecond)
			if got := r.since(began); len(got) != 1 {
				t.Errorf("change %d: got writes %v within 10 ms, want 1", i, got)
			}
			after(10 * time.Second)
		}
		// Changes that never end must not keep the damage for ever.
		for i := range 20 {
			r.sink(slice("web", fmt.Sprintf("10.244.1.%d", i+1)))
			after(10 * time.Second)
		}
		r.wantMetric("turnout_drift_repairs_total", 1)
		if got := r.log.count("level=ERROR"); got != 0 {
			t.Errorf("an interrupted read-back was taken for a failure:\n%s", r.log)
		}
		r.stop()
	})
}

func TestWithoutAPulseEverythingIsReadBackInstead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.kernel().set(func(k *fakeKernel) { k.pulseFail = errors.New("not supported") })
		after(time.Minute)
		r.kernel().change(flush)
		after(5 * time.Second)
		if diff := cmp.Diff("base: always\n"+web+": \n", r.kernel().text()); diff != "" {
			t.Errorf("kernel (-want +got):\n%s", diff)
		}
		if got := r.log.count("level=WARN msg=\"Could not tell"); got != 1 {
			t.Errorf("got %d lines about it, want 1:\n%s", got, r.log)
		}
		r.stop()
	})
}

func TestARepairThatFailsIsTriedAgainAndCountedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		r.kernel().set(func(k *fakeKernel) { k.fail = errors.New("busy") })
		r.kernel().change(flush)
		after(3 * time.Second)
		r.wantMetric("turnout_drift_repairs_total", 0)
		r.kernel().set(func(k *fakeKernel) { k.fail = nil })
		after(10 * time.Second)
		r.wantMetric("turnout_drift_repairs_total", 1)
		r.stop()
	})
}

func TestDriftThatAQueryFindsIsShownThenRepairedAndCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, func(c *Config) { c.PulsePeriod = time.Hour })
		r.kernel().set(func(k *fakeKernel) { k.eager = true })
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		r.kernel().set(func(k *fakeKernel) { clear(k.objects) })
		got, err := r.Inspect(t.Context(), model.IPv4)
		if err != nil || got.Drift != 2 || got.Plan != "base "+web {
			t.Errorf("Inspect: got drift %d, plan %q, %v; want 2 steps for base and web", got.Drift, got.Plan, err)
		}
		after(time.Second)
		if diff := cmp.Diff("base: always\n"+web+": \n", r.kernel().text()); diff != "" {
			t.Errorf("kernel afterwards (-want +got):\n%s", diff)
		}
		r.wantMetric("turnout_drift_repairs_total", 1)
		r.stop()
	})
}

func TestQueries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		if _, err := r.Trace(t.Context(), model.IPv4, testPacket()); err == nil {
			t.Error("Trace before anything is known gave no error")
		}
		if got, err := r.Inspect(t.Context(), model.IPv4); err != nil || got.Drift != 0 {
			t.Errorf("Inspect before the sync: got drift %d, %v; want none", got.Drift, err)
		}
		r.sync(service("web", "10.96.0.1"))
		if got, err := r.Trace(t.Context(), model.IPv4, testPacket()); err != nil || len(got.Steps) != 1 {
			t.Errorf("Trace: got %v, %v; want what the backend says", got, err)
		}
		if _, err := r.Inspect(t.Context(), model.IPv6); err == nil {
			t.Error("Inspect of a family that is not served gave no error")
		}
		if err := r.Do(t.Context(), func(View) { panic("oops") }); err == nil {
			t.Error("a query that panics gave no error")
		}
		var v View
		if err := r.Do(t.Context(), func(got View) { v = got }); err != nil {
			t.Errorf("Do: %v", err)
		}
		if !v.Synced || v.Services != 1 || v.Families[0].State != Synced || v.Families[0].Mode != "fake" {
			t.Errorf("view: got %+v, want one Service, synced, mode fake", v)
		}
		r.stop()
	})
}
