package loop

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/health"
	"github.com/turnout-proxy/turnout/internal/model"
)

func testPacket() forward.Packet {
	return forward.Packet{
		Src: netip.MustParseAddrPort("10.244.0.5:40000"), Dst: netip.MustParseAddrPort("10.96.0.1:80"), Proto: model.TCP,
	}
}

// A fakeCleaner has a list of flows and deletes the stale ones.
type fakeCleaner struct {
	mu    sync.Mutex
	began time.Time
	flows []flow.Flow
	takes time.Duration
	fail  error
	calls []time.Duration
}

func (c *fakeCleaner) set(fn func(c *fakeCleaner)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fn(c)
}

func (c *fakeCleaner) times() []time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.calls)
}

func (c *fakeCleaner) count() int { return len(c.times()) }

func (c *fakeCleaner) left() []flow.Flow {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.flows)
}

func (c *fakeCleaner) Clean(ctx context.Context, ix *flow.Index) (int, error) {
	var takes time.Duration
	c.set(func(c *fakeCleaner) {
		c.calls = append(c.calls, time.Since(c.began))
		takes = c.takes
	})
	if err := pause(ctx, takes); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return 0, c.fail
	}
	var kept []flow.Flow
	for _, f := range c.flows {
		if !ix.Stale(f) {
			kept = append(kept, f)
		}
	}
	n := len(c.flows) - len(kept)
	c.flows = kept
	return n, nil
}

// dns is a UDP Service, dnsAt its slice.
func dns() model.Event {
	e := service("dns", "10.96.0.53")
	e.Service.Ports[0].Protocol, e.Service.Ports[0].Port = model.UDP, 53
	return e
}

func dnsAt(addrs ...string) model.Event {
	e := slice("dns", addrs...)
	e.Slice.Ports[0].Protocol, e.Slice.Ports[0].Port = model.UDP, 53
	return e
}

// flowTo is a client's flow through the DNS Service.
func flowTo(endpoint string) flow.Flow {
	client := netip.MustParseAddrPort("10.244.7.7:5353")
	return flow.Flow{
		Proto: model.UDP, OrigSrc: client, OrigDst: netip.MustParseAddrPort("10.96.0.53:53"),
		ReplySrc: netip.AddrPortFrom(netip.MustParseAddr(endpoint), 53), ReplyDst: client,
	}
}

func startWithCleaner(t *testing.T) (*rig, *fakeCleaner) {
	t.Helper()
	c := &fakeCleaner{began: time.Now()}
	return start(t, func(cfg *Config) { cfg.Families[0].Cleaner = c }), c
}

func TestFlowsToAnEndpointThatIsGoneAreDeletedAfterTheRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := startWithCleaner(t)
		r.sync(dns(), dnsAt("10.244.0.1", "10.244.0.2"))
		r.settle()
		c.set(func(c *fakeCleaner) { c.flows = []flow.Flow{flowTo("10.244.0.1"), flowTo("10.244.0.2")} })
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = 100 * time.Millisecond })
		calls := c.count()
		began := time.Now()
		r.sink(dnsAt("10.244.0.2"))
		after(50 * time.Millisecond)
		if got := c.count() - calls; got != 0 {
			t.Errorf("got %d clean-ups before the rules were in, want none", got)
		}
		after(time.Second)
		if diff := cmp.Diff([]flow.Flow{flowTo("10.244.0.2")}, c.left(), compareAddrs()); diff != "" {
			t.Errorf("flows %s after the change (-want +got):\n%s", time.Since(began), diff)
		}
		r.wantMetric("turnout_flows_deleted_total", 1)
		r.stop()
	})
}

func compareAddrs() cmp.Option {
	return cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })
}

func TestWhatAFailedSyncCouldNotDoTheNextGoodOneDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := startWithCleaner(t)
		r.sync(dns(), dnsAt("10.244.0.1"), local("lb", 30001), onNode(slice("lb", "10.244.0.9")))
		r.settle()
		c.set(func(c *fakeCleaner) { c.flows = []flow.Flow{flowTo("10.244.0.1")} })
		r.kernel().set(func(k *fakeKernel) { k.fail = errors.New("lock") })
		r.sink(dnsAt("10.244.0.2"), local("lb", 30002))
		after(50 * time.Millisecond)
		r.kernel().set(func(k *fakeKernel) { k.fail = nil })
		after(time.Second)
		if len(c.left()) != 0 {
			t.Errorf("flows: got %v, want none", c.left())
		}
		want := []health.Service{{Name: model.Name{Namespace: "default", Name: "lb"}, Port: 30002, LocalReady: 1}}
		if diff := cmp.Diff(want, r.health.list()); diff != "" {
			t.Errorf("health check ports (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

// local is a load balancer Service with policy Local and a health check port.
func local(name string, port uint16) model.Event {
	e := service(name, "10.96.0.9")
	e.Service.Type, e.Service.ExternalLocal, e.Service.HealthCheckNodePort = model.LoadBalancer, true, port
	e.Service.Ingress = []netip.Addr{netip.MustParseAddr("192.0.2.9")}
	return e
}

// onNode puts the endpoints of a slice on this node.
func onNode(e model.Event) model.Event {
	for i := range e.Slice.Endpoints {
		e.Slice.Endpoints[i].Node = "na"
	}
	return e
}

func TestCleanUpsThatFailAreTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := startWithCleaner(t)
		r.sync(dns(), dnsAt("10.244.0.1"))
		r.settle()
		c.set(func(c *fakeCleaner) {
			c.flows, c.fail, c.calls = []flow.Flow{flowTo("10.244.0.1")}, errors.New("interrupted"), nil
			c.began = time.Now()
		})
		gone := dns()
		gone.Delete = true
		r.sink(gone, dnsAt())
		after(10 * time.Second)
		var calls []time.Duration
		for _, at := range c.times() {
			calls = append(calls, at.Round(time.Second))
		}
		if diff := cmp.Diff([]time.Duration{0, time.Second, 3 * time.Second, 7 * time.Second}, calls); diff != "" {
			t.Errorf("times of the tries (-want +got):\n%s", diff)
		}
		if got := r.log.count("level=ERROR"); got != 1 {
			t.Errorf("got %d error lines, want 1", got)
		}
		c.set(func(c *fakeCleaner) { c.fail = nil })
		after(10 * time.Second)
		if len(c.left()) != 0 {
			t.Errorf("flows of the deleted Service: got %v, want none", c.left())
		}
		r.stop()
	})
}

func TestFlowsOfARefusedPortAreDeletedOnceItIsInEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := startWithCleaner(t)
		r.sync(dns(), dnsAt("10.244.0.1"))
		r.settle()
		c.set(func(c *fakeCleaner) { c.flows, c.calls = []flow.Flow{flowTo("10.244.0.1")}, nil })
		r.kernel().set(func(k *fakeKernel) { k.refuse = map[string]error{"default/dns/udp": errors.New("no")} })
		r.sink(dnsAt("10.244.0.2"))
		after(10 * time.Minute)
		if c.count() != 0 {
			t.Errorf("got %d clean-ups, want none: the old rules would make the same flows again", c.count())
		}
		r.wantMetric("turnout_failed_ports", 1)
		r.kernel().set(func(k *fakeKernel) { k.refuse = nil })
		after(time.Minute)
		if len(c.left()) != 0 {
			t.Errorf("flows: got %v, want none", c.left())
		}
		r.wantMetric("turnout_failed_ports", 0)
		r.stop()
	})
}

func TestACleanUpDoesNotDelayRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := startWithCleaner(t)
		r.sync(dns(), dnsAt("10.244.0.1"), service("web", "10.96.0.1"))
		r.settle()
		c.set(func(c *fakeCleaner) { c.takes = time.Hour })
		r.sink(dnsAt("10.244.0.2"))
		after(time.Second)
		began := time.Now()
		r.sink(slice("web", "10.244.0.3"))
		after(10 * time.Millisecond)
		if got := r.since(began); len(got) != 1 {
			t.Errorf("writes within 10 ms: got %v, want 1", got)
		}
		r.stop()
	})
}

func TestCleanUpsThatTakeLongAreSpaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := startWithCleaner(t)
		r.sync(dns(), dnsAt("10.244.0.1"))
		r.settle()
		c.set(func(c *fakeCleaner) { c.takes, c.calls = time.Second, nil })
		for i := range 60 {
			r.sink(dnsAt(fmt.Sprintf("10.244.0.%d", i+2)))
			after(time.Second)
		}
		if got := c.count(); got < 11 || got > 13 {
			t.Errorf("got %d clean-ups of 1 s in 60 s of changes, want 12", got)
		}
		r.stop()
	})
}

func TestChangesThatLeaveNoStaleFlowsAreNotFollowedByACleanUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := startWithCleaner(t)
		r.sync(dns(), dnsAt("10.244.0.1"), service("web", "10.96.0.1"), slice("web", "10.244.0.9"))
		r.settle()
		c.set(func(c *fakeCleaner) { c.calls = nil })
		r.sink(dnsAt("10.244.0.1", "10.244.0.2"), slice("web", "10.244.0.8"))
		after(time.Minute)
		if c.count() != 0 {
			t.Errorf("got %d clean-ups, want none: an endpoint was added and a TCP one replaced", c.count())
		}
		r.stop()
	})
}

func TestHealthPortsFollowTheEndpointsOnThisNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		name := model.Name{Namespace: "default", Name: "lb"}
		want := func(when string, services ...health.Service) {
			t.Helper()
			if diff := cmp.Diff(services, r.health.list()); diff != "" {
				t.Errorf("%s: health check ports (-want +got):\n%s", when, diff)
			}
		}
		r.sync(local("lb", 30001), onNode(slice("lb", "10.244.0.1", "10.244.0.2")))
		want("two endpoints here", health.Service{Name: name, Port: 30001, LocalReady: 2})

		r.settle()
		r.kernel().set(func(k *fakeKernel) { k.fail = errors.New("no") })
		r.sink(onNode(slice("lb", "10.244.0.1")))
		after(time.Second)
		want("one left, rules not in", health.Service{Name: name, Port: 30001, LocalReady: 1})
		r.sink(onNode(slice("lb", "10.244.0.1", "10.244.0.2", "10.244.0.3")))
		after(10 * time.Second)
		want("more came, rules not in", health.Service{Name: name, Port: 30001, LocalReady: 1})
		r.kernel().set(func(k *fakeKernel) { k.fail = nil })
		after(time.Minute)
		want("rules are in", health.Service{Name: name, Port: 30001, LocalReady: 3})

		r.sink(slice("lb", "10.244.0.1"))
		after(time.Second)
		want("moved to another node", health.Service{Name: name, Port: 30001, LocalReady: 0})
		gone := local("lb", 30001)
		gone.Delete = true
		r.sink(gone)
		after(2 * time.Second)
		if len(r.health.list()) != 0 {
			t.Errorf("health check ports of a deleted Service: got %v, want none", r.health.list())
		}
		r.stop()
	})
}

func TestHealthIsToldWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sink(service("web", "10.96.0.1"))
		after(time.Hour)
		if r.health.overdue(model.IPv4) {
			t.Error("something is overdue although the sources are not complete")
		}
		r.sync()
		r.settle()
		if r.health.overdue(model.IPv4) {
			t.Errorf("after a good round: something is overdue")
		}
		r.kernel().set(func(k *fakeKernel) { k.fail = errors.New("no") })
		began := time.Now()
		r.sink(slice("web", "10.244.0.1"))
		after(time.Minute)
		if got := r.health.since(model.IPv4); !got.Equal(began) {
			t.Errorf("queued since %v, want since the change at %v", got, began)
		}
		r.stop()
	})
}

func TestHealthCountsAChangeThatCameDuringASlowRoundFromItsArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"))
		r.settle()
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = 10 * time.Second })
		r.sink(slice("web", "10.244.0.1"))
		after(3 * time.Second)
		arrived := time.Now()
		r.sink(slice("web", "10.244.0.2"))
		after(8 * time.Second)
		if got := r.health.since(model.IPv4); !got.Equal(arrived) {
			t.Errorf("queued since %v, want %v", got, arrived)
		}
		r.stop()
	})
}

func TestHealthIsToldOfAFirstSyncThatNeverEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.applyTakes = time.Hour })
		began := time.Now()
		r.sync()
		if got := r.health.since(model.IPv4); !got.Equal(began) {
			t.Errorf("queued since %v, want since the sources were complete at %v", got, began)
		}
		r.stop()
	})
}

func TestTheEarliestTriggerOfASliceIsKeptUntilItIsInEffect(t *testing.T) {
	at := func(s int64) (objectKey, item) {
		e := slice("web", "10.244.0.1")
		return objectKey{sliceKind, e.Slice.Name}, item{event: e, trigger: time.Unix(s, 0)}
	}
	waiting, later := newChanges(), newChanges()
	for _, s := range []int64{3, 2, 4} {
		key, it := at(s)
		waiting.add(model.IPv4, key, it)
	}
	key, it := at(9)
	later.add(model.IPv4, key, it)
	waiting.merge(&later)
	if got := waiting.settle(nil); len(got) != 1 || !got[0].Equal(time.Unix(2, 0)) {
		t.Errorf("got triggers %v, want the one at 2 s", got)
	}
	if len(waiting.slices)+len(later.slices) != 0 {
		t.Error("changes stayed after they were in effect")
	}
}

func TestOfSeveralTriggersThatWaitTheEarliestCounts(t *testing.T) {
	b := newInbox()
	at := func(s int64) model.Event {
		e := slice("web", "10.244.0.1")
		e.Slice.Trigger = time.Unix(s, 0)
		return e
	}
	gone := at(0)
	gone.Delete = true
	for name, tc := range map[string]struct {
		events []model.Event
		want   time.Time
	}{
		"in order":            {[]model.Event{at(1), at(2), at(3)}, time.Unix(1, 0)},
		"out of order":        {[]model.Event{at(3), at(1), at(2)}, time.Unix(1, 0)},
		"without one":         {[]model.Event{at(2), slice("web", "10.244.0.2")}, time.Unix(2, 0)},
		"deleted":             {[]model.Event{at(1), gone}, time.Time{}},
		"deleted, then again": {[]model.Event{at(1), gone, at(4)}, time.Unix(4, 0)},
	} {
		b.put(tc.events...)
		got := b.take().items[objectKey{sliceKind, model.Name{Namespace: "default", Name: "web-1"}}]
		if !got.trigger.Equal(tc.want) {
			t.Errorf("%s: got %v, want %v", name, got.trigger, tc.want)
		}
	}
}

func TestTriggerTimesBecomeTheProgrammingLatency(t *testing.T) {
	const name = "kubeproxy_network_programming_duration_seconds"
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil, model.IPv4, model.IPv6)
		triggered := func(addr string, ago time.Duration) model.Event {
			e := slice("web", addr)
			e.Slice.Trigger = time.Now().Add(-ago)
			return e
		}
		r.sync(service("web", "10.96.0.1"), triggered("10.244.0.1", time.Hour))
		r.settle()
		r.wantMetric(name, 0) // from before the start
		r.sink(triggered("10.244.0.2", time.Second))
		after(time.Second)
		r.wantMetric(name, 1)
		r.sink(triggered("10.244.0.2", time.Second))
		after(time.Second)
		r.wantMetric(name, 1) // nothing changed
		r.kernel().set(func(k *fakeKernel) { k.refuse = map[string]error{web: errors.New("no")} })
		r.sink(triggered("10.244.0.3", time.Second))
		after(time.Second)
		r.wantMetric(name, 1) // not in effect
		r.wantMetric("kubeproxy_sync_proxy_rules_endpoint_changes_pending", 1)
		r.kernel().set(func(k *fakeKernel) { k.refuse = nil })
		after(time.Minute)
		r.wantMetric(name, 2)
		r.wantMetric("kubeproxy_sync_proxy_rules_endpoint_changes_pending", 0)
		r.stop()
	})
}

func TestPortsWithoutLocalEndpointsAreCounted(t *testing.T) {
	const name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(local("lb", 30001), slice("lb", "10.244.0.1"))
		r.wantMetric(name, 1)
		r.sink(onNode(slice("lb", "10.244.0.1")))
		after(time.Second)
		r.wantMetric(name, 0)
		r.stop()
	})
}

func TestFindingsAreLoggedWhenTheyAppearAndStandUntilTheyAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil, model.IPv4, model.IPv6)
		bad := service("web", "10.96.0.1")
		bad.Findings = []model.Finding{{
			Severity: model.Error, Kind: "Service", Object: "default/web", Reason: "InvalidPort", Message: "port 0",
		}}
		r.sync(bad, model.Event{File: "a.yaml", Findings: []model.Finding{{
			Severity: model.Error, Kind: "File", Object: "a.yaml", Reason: "InvalidYAML", Message: "line 3",
		}}})
		for range 10 {
			r.sink(bad)
			after(time.Second)
		}
		if got := r.log.count("Found a problem"); got != 2 {
			t.Errorf("got %d lines, want one for each finding:\n%s", got, r.log)
		}
		if got := len(r.look().Findings); got != 2 {
			t.Errorf("got %d findings, want 2", got)
		}
		r.sink(service("web", "10.96.0.1"), model.Event{File: "a.yaml"})
		after(time.Second)
		if got := r.look().Findings; len(got) != 0 {
			t.Errorf("got findings %v after they were put right, want none", got)
		}
		r.wantMetric("kubeproxy_sync_proxy_rules_service_changes_total", 12)
		r.stop()
	})
}

func TestWhatBothFamiliesFindIsToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, func(c *Config) {
			for i := range c.Families {
				c.Families[i].Builder = forward.NewBuilder(forward.Config{
					Family: c.Families[i].Family, NodeName: "na", NodePortAddresses: []string{"nonsense"},
				})
			}
		}, model.IPv4, model.IPv6)
		r.sync()
		if got := len(r.events.reasons()); got != 1 {
			t.Errorf("got events %v, want 1", r.events.reasons())
		}
		if got := r.look().Findings; len(got) != 1 {
			t.Errorf("got findings %v, want 1", got)
		}
		r.stop()
	})
}

func TestTwoServicesWithOneAddressAreReportedAndCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.sync(service("web", "10.96.0.1"), service("db", "10.96.0.1"))
		r.wantMetric("turnout_conflicting_frontends", 1)
		if diff := cmp.Diff([]string{"FrontendConflict default/web"}, r.events.reasons()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		r.stop()
	})
}

func TestTheLogIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		var events []model.Event
		for i := range 5000 {
			e := service(fmt.Sprint("s", i), "10.96.0.1")
			e.Findings = []model.Finding{{
				Severity: model.Warning, Kind: "Service", Object: e.Service.String(), Reason: "Odd", Message: "odd",
			}}
			events = append(events, e)
		}
		r.sync(events...)
		after(30 * time.Second)
		if got := r.log.count("Found a problem"); got != 100 {
			t.Errorf("got %d lines, want 100", got)
		}
		after(5 * time.Minute)
		if got := r.log.count("Left out log lines"); got != 1 {
			t.Errorf("got %d lines about what was left out, want 1", got)
		}
		r.wantMetric("turnout_suppressed_log_lines_total", 5000-100+4999)
		r.stop()
	})
}

func TestPortsThatTheModeCannotServeAreShownUntilTheyChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		r.kernel().set(func(k *fakeKernel) { k.unsupported = map[string]string{web: "NoSuchThing"} })
		r.sync(service("web", "10.96.0.1"), service("db", "10.96.0.2"))
		r.sink(slice("db", "10.244.0.2"))
		after(time.Minute)
		got := r.look().Families[0].Ports
		if len(got) != 1 || got[0].Port.String() != web || got[0].Unsupported != "NoSuchThing" {
			t.Errorf("ports that do not work: got %+v, want %s", got, web)
		}
		r.wantMetric("turnout_unsupported_ports", 1)
		r.kernel().set(func(k *fakeKernel) { k.unsupported = nil })
		r.sink(slice("web", "10.244.0.1"))
		after(time.Second)
		if got := r.look().Families[0].Ports; len(got) != 0 {
			t.Errorf("ports that do not work: got %+v, want none", got)
		}
		if got := r.log.count("level=ERROR"); got != 1 {
			t.Errorf("got %d error lines, want 1", got)
		}
		r.stop()
	})
}
