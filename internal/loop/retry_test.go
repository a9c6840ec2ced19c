package loop

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestAFailedSyncIsTriedAgainWithGrowingDelays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		var tries []time.Duration
		r.kernel().set(func(k *fakeKernel) { k.fail = errors.New("resource busy") })
		began := time.Now()
		r.sink(slice("web", "10.244.0.1"))
		last := r.kernel().count(applies)
		for time.Since(began) < 2*time.Minute {
			after(time.Millisecond)
			if n := r.kernel().count(applies); n != last {
				last = n
				tries = append(tries, time.Since(began).Round(100*time.Millisecond))
			}
		}
		const s = time.Second
		want := []time.Duration{
			0, s / 10, 3 * s / 10, 7 * s / 10, 15 * s / 10, 31 * s / 10, 63 * s / 10, 127 * s / 10, 255 * s / 10,
			511 * s / 10, 811 * s / 10, 1111 * s / 10,
		}
		if diff := cmp.Diff(want, tries); diff != "" {
			t.Errorf("times of the tries (-want +got):\n%s", diff)
		}
		if got := r.log.count("level=ERROR"); got != 1 {
			t.Errorf("got %d error lines, want 1 for the whole episode:\n%s", got, r.log)
		}
		v := r.look().Families[0]
		if v.State != Failing || v.Err != "resource busy" || v.Attempts != len(want) {
			t.Errorf("status: got %s, %q after %d attempts; want failing, \"resource busy\" after %d",
				v.State, v.Err, v.Attempts, len(want))
		}
		r.kernel().set(func(k *fakeKernel) { k.fail = nil })
		after(31 * s)
		if diff := cmp.Diff("base: always\n"+web+": 10.244.0.1:8080\n", r.kernel().text()); diff != "" {
			t.Errorf("kernel once it works again (-want +got):\n%s", diff)
		}
		if got := r.log.count("Sync works again"); got != 1 {
			t.Errorf("got %d lines about the recovery, want 1", got)
		}
		if got := r.log.count("Repaired"); got != 0 {
			t.Errorf("the retry was taken for drift:\n%s", r.log)
		}
		r.stop()
	})
}

func TestEachEpisodeOfFailureStartsWithAShortDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		for i := range 3 {
			r.settle()
			r.kernel().set(func(k *fakeKernel) { k.fail = errors.New("no") })
			r.sink(slice("web", fmt.Sprintf("10.244.0.%d", i+1)))
			after(time.Second)
			r.kernel().set(func(k *fakeKernel) { k.fail = nil })
			began := time.Now()
			after(time.Second)
			if got := r.since(began); len(got) != 1 {
				t.Errorf("episode %d: got writes %v within a second, want 1", i+1, got)
			}
		}
		if got := r.log.count("level=ERROR"); got != 3 {
			t.Errorf("got %d error lines, want one for each of 3 episodes", got)
		}
		r.stop()
	})
}

func TestARetryStartsWithReadingBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		before := r.kernel().count(observes)
		r.kernel().set(func(k *fakeKernel) { k.fail = errors.New("no") })
		r.sink(slice("web", "10.244.0.1"))
		after(50 * time.Millisecond)
		// The first try had an effect although it was reported to have none.
		r.kernel().set(func(k *fakeKernel) {
			k.fail = nil
			k.objects[web] = "10.244.0.1:8080"
		})
		began := time.Now()
		after(time.Second)
		if got := r.since(began); len(got) != 0 {
			t.Errorf("got writes %v, want none: the kernel was right already", got)
		}
		if got := r.kernel().count(observes) - before; got != 1 {
			t.Errorf("got %d read-backs, want 1", got)
		}
		r.stop()
	})
}

func TestNothingIsWrittenWhileTheKernelCannotBeReadBackAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.observeFail = errors.New("cannot read") })
		r.sync(service("web", "10.96.0.1"))
		after(time.Minute)
		if got := r.kernel().written(); len(got) != 0 {
			t.Errorf("got writes %v, want none", got)
		}
		r.kernel().set(func(k *fakeKernel) { k.observeFail = nil })
		after(time.Minute)
		if diff := cmp.Diff("base: always\n"+web+": \n", r.kernel().text()); diff != "" {
			t.Errorf("kernel (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestARefusedPortIsTriedAgainAloneAndTheRestGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.refuse = map[string]error{web: errors.New("invalid argument")} })
		r.sync(service("web", "10.96.0.1"), service("db", "10.96.0.2"))
		if diff := cmp.Diff("base: always\n"+db+": \n", r.kernel().text()); diff != "" {
			t.Errorf("kernel (-want +got):\n%s", diff)
		}
		var tries []time.Duration
		last, began := r.kernel().count(applies), time.Now()
		for time.Since(began) < 2*time.Minute {
			after(100 * time.Millisecond)
			if n := r.kernel().count(applies); n != last {
				last = n
				tries = append(tries, time.Since(began).Round(time.Second))
			}
		}
		const s = time.Second
		if diff := cmp.Diff([]time.Duration{s, 3 * s, 7 * s, 15 * s, 31 * s, 61 * s, 91 * s}, tries); diff != "" {
			t.Errorf("times of the tries (-want +got):\n%s", diff)
		}
		// A change of another Service goes through, and the refused port is told of still.
		r.sink(slice("db", "10.244.0.2"))
		after(s)
		if diff := cmp.Diff("base: always\n"+db+": 10.244.0.2:8080\n", r.kernel().text()); diff != "" {
			t.Errorf("kernel after a change (-want +got):\n%s", diff)
		}
		ports := r.look().Families[0].Ports
		if len(ports) != 1 || ports[0].Port.String() != web || ports[0].Err != "invalid argument" {
			t.Errorf("ports that do not work: got %+v, want %s alone with its error", ports, web)
		}
		if got := r.log.count("level=ERROR"); got != 1 {
			t.Errorf("got %d error lines, want 1 for the episode:\n%s", got, r.log)
		}
		if ok, partial := r.rounds("ok"), r.rounds("partial"); ok != 0 || partial < float64(len(tries)) {
			t.Errorf("rounds: got %v ok and %v partial, want all partial", ok, partial)
		}
		want := []string{"PortRefused default/web"}
		if diff := cmp.Diff(want, r.events.reasons()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		r.kernel().set(func(k *fakeKernel) { k.refuse = nil })
		after(31 * s)
		if got := r.log.count("Service port works again"); got != 1 {
			t.Errorf("got %d lines about the recovery, want 1", got)
		}
		if v := r.look().Families[0]; len(v.Ports) != 0 {
			t.Errorf("ports that do not work: got %v, want none", v.Ports)
		}
		r.stop()
	})
}

func TestChangesOfOthersDoNotPutOffARefusedPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.refuse = map[string]error{web: errors.New("no")} })
		r.sync(service("web", "10.96.0.1"), service("db", "10.96.0.2"))
		for i := range 10 {
			r.sink(slice("db", fmt.Sprintf("10.244.0.%d", i+1)))
			after(300 * time.Millisecond)
		}
		// Due were only the tries after 1 s and 3 s, so the next is 4 s after those.
		if next := time.Until(r.look().Families[0].Ports[0].NextRetry); next > 4*time.Second {
			t.Errorf("the next try is in %v, want at most 4 s", next)
		}
		r.stop()
	})
}

func TestARefusedPortThatIsDeletedIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.refuse = map[string]error{web: errors.New("no")} })
		r.sync(service("web", "10.96.0.1"))
		gone := service("web", "10.96.0.1")
		gone.Delete = true
		r.sink(gone)
		after(time.Second)
		if v := r.look().Families[0]; len(v.Ports) != 0 {
			t.Errorf("ports that do not work: got %v, want none", v.Ports)
		}
		before := r.kernel().count(applies)
		after(time.Minute)
		if got := r.kernel().count(applies) - before; got != 0 {
			t.Errorf("got %d tries after the Service was gone, want none", got)
		}
		r.stop()
	})
}

func TestAFamilyThatFailsDoesNotHoldTheOther(t *testing.T) {
	for name, misbehave := range map[string]func(*fakeKernel){
		"fails": func(k *fakeKernel) { k.fail = errors.New("no") },
		"hangs": func(k *fakeKernel) { k.applyTakes = time.Hour },
		"panics": func(k *fakeKernel) {
			k.panics = true
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, nil, model.IPv6, model.IPv4)
				r.sync(service("web", "10.96.0.1"))
				r.settle()
				r.kernels[model.IPv6].set(misbehave)
				six := service("six", "fd00::1")
				r.sink(six)
				after(5 * time.Second)
				for i := range 3 {
					began := time.Now()
					r.sink(slice("web", fmt.Sprintf("10.244.0.%d", i+1)))
					after(10 * time.Millisecond)
					want := fmt.Sprintf("base: always\n%s: 10.244.0.%d:8080\n", web, i+1)
					if diff := cmp.Diff(want, r.kernels[model.IPv4].text()); diff != "" {
						t.Errorf("IPv4 %s after the change (-want +got):\n%s", time.Since(began), diff)
					}
					after(5 * time.Second)
				}
				r.stop()
			})
		})
	}
}

func TestAPanicIsLoggedWithItsStackAndTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		r.kernel().set(func(k *fakeKernel) { k.panics = true })
		r.sink(slice("web", "10.244.0.1"))
		after(10 * time.Second)
		if got := r.log.count("compile went wrong"); got != 1 {
			t.Errorf("got %d lines about the panic, want 1", got)
		}
		if got := r.log.count("fakeBackend).Compile"); got != 1 {
			t.Errorf("got %d lines with the stack, want 1:\n%s", got, r.log)
		}
		r.kernel().set(func(k *fakeKernel) { k.panics = false })
		after(time.Minute)
		if diff := cmp.Diff("base: always\n"+web+": 10.244.0.1:8080\n", r.kernel().text()); diff != "" {
			t.Errorf("kernel afterwards (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestAPanicOfTheBuilderIsTriedAgainWithEverythingThatChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *panickyBuilder
		r := start(t, func(c *Config) {
			b = &panickyBuilder{Builder: c.Families[0].Builder}
			c.Families[0].Builder = b
		})
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		b.panics.Store(true)
		r.sink(slice("web", "10.244.0.1"))
		after(5 * time.Second)
		if got := r.log.count("level=ERROR"); got != 1 {
			t.Errorf("got %d error lines, want 1", got)
		}
		b.panics.Store(false)
		after(30 * time.Second)
		if diff := cmp.Diff("base: always\n"+web+": 10.244.0.1:8080\n", r.kernel().text()); diff != "" {
			t.Errorf("kernel afterwards (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

// rounds gives the number of rounds with a result.
func (r *rig) rounds(result string) float64 {
	families, err := r.metrics.Gatherer().Gather()
	if err != nil {
		r.t.Fatalf("gather: %v", err)
	}
	for _, f := range families {
		if f.GetName() != "turnout_rounds_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			if m.GetLabel()[1].GetValue() == result {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

type panickyBuilder struct {
	Builder
	panics atomic.Bool
}

func (b *panickyBuilder) Update(s *model.Snapshot, d model.Dirty, h forward.Host) forward.Delta {
	delta := b.Builder.Update(s, d, h)
	if b.panics.Load() {
		panic("update went wrong, with the table changed already")
	}
	return delta
}
