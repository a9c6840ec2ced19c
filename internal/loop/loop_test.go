package loop

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// seeWrites lets write be compared, whose fields are not exported.
var seeWrites = cmp.AllowUnexported(write{})

// web and db are the names of the ports that the fakes give.
const (
	web = "default/web/tcp"
	db  = "default/db/tcp"
)

func TestNothingIsWrittenBeforeTheSourcesAreComplete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, func(c *Config) { c.Sources = 2 })
		r.sink(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
		r.sync()
		after(time.Hour)
		if got := r.kernel().written(); len(got) != 0 {
			t.Errorf("with one of two sources complete: got writes %v, want none", got)
		}
		r.sync()
		want := "base: always\ndefault/web/tcp: 10.244.0.1:8080\n"
		if diff := cmp.Diff(want, r.kernel().text()); diff != "" {
			t.Errorf("kernel after both sources are complete (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestAnEmptyClusterStillGetsTheFixedObjects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync()
		if diff := cmp.Diff("base: always\n", r.kernel().text()); diff != "" {
			t.Errorf("kernel (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestARestartAdoptsWhatIsRightAndReplacesWhatIsNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().change(func(o map[string]string) {
			o["base"], o[web], o[db], o["foreign"] = "always", "10.244.0.1:8080", "10.244.9.9:8080", "not ours"
		})
		r.sync(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
		want := []write{{at: 0, what: []string{db}}}
		if diff := cmp.Diff(want, r.kernel().written(), seeWrites); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		// What was adopted must not be written with the next change either.
		r.sink(service("db", "10.96.0.2"), slice("db", "10.244.0.2"))
		after(10 * time.Millisecond)
		want = append(want, write{at: 11 * time.Millisecond, what: []string{db}})
		if diff := cmp.Diff(want, r.kernel().written(), seeWrites); diff != "" {
			t.Errorf("writes after a change (-want +got):\n%s", diff)
		}
		if got := r.look().Families[0].Stats.DriftRepairs; got != 0 {
			t.Errorf("drift repairs: got %d, want 0: what was there before the start is no drift", got)
		}
		r.stop()
	})
}

func TestARestartThatFindsEverythingRightWritesNothing(t *testing.T) {
	for _, eager := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, nil)
			r.kernel().set(func(k *fakeKernel) {
				k.eager = eager
				k.objects["base"], k.objects[web] = "always", "10.244.0.1:8080"
			})
			r.sync(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
			if got := r.kernel().written(); len(got) != 0 {
				t.Errorf("got writes %v, want none", got)
			}
			r.settle()
			began := time.Now()
			r.sink(service("db", "10.96.0.2"))
			after(time.Second)
			want := []write{{at: time.Millisecond, what: []string{db}}}
			if diff := cmp.Diff(want, r.since(began), seeWrites); diff != "" {
				t.Errorf("writes for a change (-want +got):\n%s", diff)
			}
			r.stop()
		})
	}
}

func TestChangesAreAppliedAtOnceThenPaced(t *testing.T) {
	const ms = time.Millisecond
	tests := map[string]struct {
		changes []time.Duration
		want    []time.Duration
	}{
		"one change after a quiet time takes effect within 2 ms": {
			[]time.Duration{0}, []time.Duration{1 * ms},
		},
		"two changes use the burst": {
			[]time.Duration{0, 100 * ms}, []time.Duration{1 * ms, 101 * ms},
		},
		"the third waits until a second has earned it": {
			[]time.Duration{0, 100 * ms, 200 * ms}, []time.Duration{1 * ms, 101 * ms, 1001 * ms},
		},
		"changes that wait go together": {
			[]time.Duration{0, 100 * ms, 200 * ms, 300 * ms, 900 * ms},
			[]time.Duration{1 * ms, 101 * ms, 1001 * ms},
		},
		"steady changes get one round a second": {
			[]time.Duration{0, 100 * ms, 200 * ms, 1100 * ms, 2100 * ms, 3100 * ms},
			[]time.Duration{1 * ms, 101 * ms, 1001 * ms, 2001 * ms, 3001 * ms, 4001 * ms},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, nil)
				r.sync(service("web", "10.96.0.1"))
				r.settle()
				began := time.Now()
				for i, at := range tc.changes {
					time.Sleep(time.Until(began.Add(at)))
					r.sink(slice("web", fmt.Sprintf("10.244.0.%d", i+1)))
				}
				after(10 * time.Second)
				var got []time.Duration
				for _, w := range r.since(began) {
					got = append(got, w.at.Round(ms))
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Errorf("times of the rounds (-want +got):\n%s", diff)
				}
				r.stop()
			})
		})
	}
}

func TestAServiceAndItsSliceThatComeOneAfterTheOtherAreOneRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync()
		r.settle()
		began := time.Now()
		r.sink(service("web", "10.96.0.1"))
		time.Sleep(500 * time.Microsecond)
		r.sink(slice("web", "10.244.0.1"))
		after(time.Second)
		want := []write{{at: time.Millisecond, what: []string{web}}}
		if diff := cmp.Diff(want, r.since(began), seeWrites); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestSlowRoundsLeaveAPauseBetweenThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = 5 * time.Second })
		began := time.Now()
		for i := range 60 {
			r.sink(slice("web", fmt.Sprintf("10.244.0.%d", i+1)))
			time.Sleep(500 * time.Millisecond)
		}
		var got []time.Duration
		for _, w := range r.since(began) {
			got = append(got, w.at.Round(100*time.Millisecond))
		}
		// Two rounds in a row, then each a second after the end of the one before.
		want := []time.Duration{5 * time.Second, 10 * time.Second, 16 * time.Second, 22 * time.Second, 28 * time.Second}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("ends of the rounds (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestAnEqualObjectIsNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
		r.settle()
		began, before := time.Now(), r.kernel().count(applies)
		for range 100 {
			r.sink(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
			after(time.Second)
		}
		if got := r.since(began); len(got) != 0 {
			t.Errorf("got writes %v, want none", got)
		}
		if got := r.kernel().count(applies) - before; got != 0 {
			t.Errorf("got %d applies, want none", got)
		}
		r.stop()
	})
}

func TestANewHostAddressIsTakenIntoTheTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		addr := netip.MustParseAddr("192.0.2.1")
		r.SetHost([]netip.Addr{addr})
		after(time.Second)
		err := r.Do(t.Context(), func(v View) {
			if diff := cmp.Diff([]netip.Addr{addr}, v.Families[0].Table.Context.HostAddrs,
				cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Errorf("host addresses (-want +got):\n%s", diff)
			}
		})
		if err != nil {
			t.Errorf("Do: %v", err)
		}
		r.stop()
	})
}

func TestShutdownLeavesTheKernelAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"), slice("web", "10.244.0.1"))
		before := r.kernel().text()
		r.stop()
		if diff := cmp.Diff(before, r.kernel().text()); diff != "" {
			t.Errorf("kernel after the end (-want +got):\n%s", diff)
		}
		if err := r.Do(t.Context(), func(View) {}); !errors.Is(err, errStopped) {
			t.Errorf("Do after the end: got %v, want %v", err, errStopped)
		}
		if err := r.Run(t.Context()); err == nil {
			t.Error("a second Run gave no error")
		}
	})
}

func TestShutdownIsPromptWhileABackendIsBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = time.Hour })
		r.sync(service("web", "10.96.0.1"))
		began := time.Now()
		r.stop()
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("the end took %v, want at most 3 s", took)
		}
		if got := r.log.count("level=ERROR"); got != 0 {
			t.Errorf("got %d error lines, want none at an ordinary end", got)
		}
	})
}

func TestAStormOfEventsKeepsOnlyTheLatestOfEachObject(t *testing.T) {
	const objects, events = 100, 100_000
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = time.Minute })
		r.sync()
		for i := range events {
			r.inbox.put(service(fmt.Sprint("s", i%objects), fmt.Sprintf("10.96.%d.%d", i/objects%256, i%objects+1)))
		}
		if got := r.inbox.size(); got > objects {
			t.Errorf("the inbox holds %d items, want at most %d", got, objects)
		}
		after(10 * time.Minute)
		if got := strings.Count(r.kernel().text(), "default/s"); got != objects {
			t.Errorf("got %d Services in the kernel, want %d", got, objects)
		}
		err := r.Do(t.Context(), func(v View) {
			last := (events - 1) / objects % 256
			name := forward.PortName{Name: model.Name{Namespace: "default", Name: "s7"}, Proto: model.TCP}
			want := netip.MustParseAddr(fmt.Sprintf("10.96.%d.8", last))
			if got := v.Families[0].Table.Port(name).Frontends[0].Addr; got != want {
				t.Errorf("cluster IP of s7: got %v, want the latest, %v", got, want)
			}
		})
		if err != nil {
			t.Errorf("Do: %v", err)
		}
		r.stop()
	})
}

func TestTheInboxDoesNotGrowWithTheNumberOfEvents(t *testing.T) {
	b := newInbox()
	fill := func(n int) uint64 {
		for i := range n {
			b.put(slice(fmt.Sprint("s", i%10), "10.244.0.1", fmt.Sprintf("10.244.1.%d", i%256)))
		}
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	small := fill(1000)
	if large := fill(100_000); large > small+1<<20 {
		t.Errorf("heap grew from %d to %d bytes, want less than 1 MiB more", small, large)
	}
	if got := len(b.take().items); got != 10 {
		t.Errorf("got %d items, want 10", got)
	}
}

func TestStartedIsToldOnceWhenEveryFamilyHasSynced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told atomic.Int32
		r := start(t, func(c *Config) { c.Started = func() { told.Add(1) } }, model.IPv4, model.IPv6)
		r.kernels[model.IPv6].set(func(k *fakeKernel) { k.applyTakes = 10 * time.Second })
		r.sync(service("web", "10.96.0.1"))
		after(5 * time.Second)
		if told.Load() != 0 {
			t.Error("told before the second family had synced")
		}
		after(10 * time.Second)
		r.sink(service("other", "10.96.0.2"))
		r.settle()
		if got := told.Load(); got != 1 {
			t.Errorf("told %d times, want once", got)
		}
		r.stop()
	})
}
