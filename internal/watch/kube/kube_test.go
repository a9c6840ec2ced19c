package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deadline is how long a test waits for what must come.
const deadline = 30 * time.Second

// A receiver keeps what Run sent, in one line per event.
type receiver struct {
	mu       sync.Mutex
	lines    []string
	statuses []string
	changed  chan struct{}
}

func newReceiver() *receiver { return &receiver{changed: make(chan struct{}, 1)} }

func (r *receiver) sink(events ...model.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range events {
		r.lines = append(r.lines, line(e))
	}
	r.wake()
}

func (r *receiver) status(resource string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	word := "ok"
	if err != nil {
		word = "failed"
	}
	r.statuses = append(r.statuses, resource+" "+word)
	r.wake()
}

func (r *receiver) wake() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func line(e model.Event) string {
	out := "put "
	if e.Delete {
		out = "delete "
	}
	switch {
	case e.Service != nil:
		out += fmt.Sprintf("service %s %v", e.Service.Name, e.Service.ClusterIPs)
	case e.Slice != nil:
		out += fmt.Sprintf("slice %s", e.Slice.Name)
		for _, ep := range e.Slice.Endpoints {
			out += " " + ep.Addr.String()
		}
	case e.Node != nil:
		out += "node " + e.Node.Name + " " + e.Node.Zone
	case e.ServiceCIDR != nil:
		out += fmt.Sprintf("ranges %s %v", e.ServiceCIDR.Name, e.ServiceCIDR.CIDRs)
	case e.Synced:
		return "synced"
	}
	for _, f := range e.Findings {
		out += " (" + f.Reason + ")"
	}
	return strings.TrimSpace(out)
}

// take waits until all wanted lines have come, and gives and forgets everything so far.
func (r *receiver) take(t *testing.T, want ...string) []string {
	t.Helper()
	var got []string
	r.wait(t, fmt.Sprintf("%q", want), func() bool {
		for _, w := range want {
			if !slices.Contains(r.lines, w) {
				return false
			}
		}
		got, r.lines = r.lines, nil
		return true
	})
	return got
}

// wait waits until the condition holds; it is asked under the lock.
func (r *receiver) wait(t *testing.T, what string, condition func() bool) {
	t.Helper()
	timeout := time.After(deadline)
	for {
		r.mu.Lock()
		ok := condition()
		lines, statuses := slices.Clone(r.lines), slices.Clone(r.statuses)
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-r.changed:
		case <-timeout:
			t.Fatalf("waited for %s in vain; received %q, statuses %q", what, lines, statuses)
		}
	}
}

// follow runs Run against a server until the test ends.
func follow(t *testing.T, addr string) *receiver {
	t.Helper()
	r := newReceiver()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- Run(ctx, Config{REST: &rest.Config{Host: "http://" + addr}, NodeName: "n1", OnStatus: r.status}, r.sink)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("run ended with %v", err)
			}
		case <-time.After(deadline):
			t.Error("run did not end")
		}
	})
	return r
}

func service(name, ip string) *corev1.Service {
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Port: 80}}},
	}
}

func endpointSlice(name string, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
		},
		AddressType: "IPv4",
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func node(zone string) *corev1.Node {
	return &corev1.Node{
		TypeMeta:   metav1.TypeMeta{Kind: "Node", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{corev1.LabelTopologyZone: zone}},
	}
}

func serviceCIDR(ranges ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		TypeMeta:   metav1.TypeMeta{Kind: "ServiceCIDR", APIVersion: "networking.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: ranges},
	}
}

func TestServiceRangesAreFollowed(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.put(cidrsResource, serviceCIDR("10.96.0.0/12", "fd70::/112"))
	r := follow(t, f.addr)
	r.take(t, "synced", "put ranges kubernetes [10.96.0.0/12 fd70::/112]")
	f.put(cidrsResource, serviceCIDR("10.96.0.0/12", "nonsense"))
	r.take(t, "put ranges kubernetes [10.96.0.0/12] (InvalidCIDR)")
	f.put(cidrsResource, serviceCIDR(), true)
	r.take(t, "delete ranges kubernetes []")
}

// A server before 1.33 does not have them, and a role made for an older proxy may not read them.
func TestAServerWithoutServiceRangesIsInOrder(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.forbidden[cidrsResource] = true
	r := follow(t, f.addr)
	r.take(t, "synced")
	f.put(servicesResource, service("web", "10.96.0.1"))
	r.take(t, "put service shop/web [10.96.0.1]")
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.statuses) > 0 {
		t.Errorf("statuses %q, want none", r.statuses)
	}
}

func TestTheFirstStateComesBeforeSynced(t *testing.T) {
	for name, streaming := range map[string]bool{"as a stream": true, "as a list": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFakeServer(t)
			f.streaming = streaming
			f.put(servicesResource, service("web", "10.96.0.1"))
			f.put(servicesResource, service("dns", "10.96.0.2"))
			f.put(slicesResource, endpointSlice("web-1", "10.0.0.1"))
			f.put(nodesResource, node("z1"))
			r := follow(t, f.addr)
			got := r.take(t, "synced")
			if last := got[len(got)-1]; last != "synced" {
				t.Errorf("last event %q, want synced", last)
			}
			slices.Sort(got)
			want := []string{
				"put node n1 z1", "put service shop/dns [10.96.0.2]", "put service shop/web [10.96.0.1]",
				"put slice shop/web-1 10.0.0.1", "synced",
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
			f.put(servicesResource, service("web", "10.96.0.9"))
			f.put(slicesResource, endpointSlice("web-1", "10.0.0.2"))
			f.put(nodesResource, node("z2"))
			f.put(servicesResource, service("dns", "10.96.0.2"), true)
			r.take(t, "put service shop/web [10.96.0.9]", "put slice shop/web-1 10.0.0.2", "put node n1 z2",
				"delete service shop/dns []")
		})
	}
}

func TestTheServerIsAskedForThisProxysObjectsOnly(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	r := follow(t, f.addr)
	r.take(t, "synced")
	got := map[string]string{}
	for _, resource := range []string{servicesResource, slicesResource, nodesResource} {
		q := f.query(resource)
		got[resource] = q.Get("labelSelector") + "|" + q.Get("fieldSelector")
	}
	want := map[string]string{
		servicesResource: "!service.kubernetes.io/service-proxy-name|spec.clusterIP!=None",
		slicesResource:   "!service.kubernetes.io/headless|",
		nodesResource:    "|metadata.name=n1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("selectors (-want +got):\n%s", diff)
	}
}

func TestWhatWentWhileTheServerWasAwayIsDeleted(t *testing.T) {
	for name, tc := range map[string]struct{ streaming, compact bool }{
		"stream, history forgotten": {true, true},
		"list, history forgotten":   {false, true},
		"history kept":              {true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFakeServer(t)
			f.streaming = tc.streaming
			f.put(servicesResource, service("web", "10.96.0.1"))
			f.put(servicesResource, service("dns", "10.96.0.2"))
			f.put(slicesResource, endpointSlice("web-1", "10.0.0.1"))
			f.put(slicesResource, endpointSlice("web-2", "10.0.0.2"))
			r := follow(t, f.addr)
			r.take(t, "synced")
			f.down()
			f.put(servicesResource, service("dns", "10.96.0.2"), true)
			f.put(slicesResource, endpointSlice("web-2"), true)
			f.put(slicesResource, endpointSlice("web-3", "10.0.0.3"))
			f.put(servicesResource, service("web", "10.96.0.9"))
			if tc.compact {
				f.compact()
			}
			r.wait(t, "failing requests", func() bool {
				return slices.Contains(r.statuses, "services failed") && slices.Contains(r.statuses, "endpointslices failed")
			})
			f.up()
			got := r.take(t, "delete service shop/dns []", "delete slice shop/web-2", "put slice shop/web-3 10.0.0.3",
				"put service shop/web [10.96.0.9]")
			if slices.Contains(got, "synced") {
				t.Error("synced came a second time")
			}
			r.wait(t, "recovery", func() bool {
				return slices.Contains(r.statuses, "services ok") && slices.Contains(r.statuses, "endpointslices ok")
			})
		})
	}
}

func TestAnExpiredWatchIsFollowedByANewList(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.put(servicesResource, service("web", "10.96.0.1"))
	r := follow(t, f.addr)
	r.take(t, "synced")
	f.compact()
	f.expire(servicesResource)
	f.put(servicesResource, service("dns", "10.96.0.2"))
	r.take(t, "put service shop/dns [10.96.0.2]")
	if n := f.asked("stream services"); n != 2 {
		t.Errorf("the state was asked for %d times, want 2", n)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.statuses) > 0 {
		t.Errorf("statuses %q, want none: this is how the protocol works", r.statuses)
	}
}

func TestABookmarkSparesTheNextList(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.put(servicesResource, service("web", "10.96.0.1"))
	r := follow(t, f.addr)
	r.take(t, "synced")
	f.bookmark(servicesResource)
	f.put(servicesResource, service("dns", "10.96.0.2"), true) // shows that the bookmark before it has arrived
	r.take(t, "delete service shop/dns []")
	f.compact()
	f.down()
	f.up()
	f.put(servicesResource, service("late", "10.96.0.3"))
	r.take(t, "put service shop/late [10.96.0.3]")
	if n := f.asked("stream services"); n != 1 {
		t.Errorf("the state was asked for %d times, want 1", n)
	}
}

func TestARefusedNodeDoesNotHoldTheRestUp(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.forbidden[nodesResource] = true
	f.put(servicesResource, service("web", "10.96.0.1"))
	r := follow(t, f.addr)
	r.take(t, "put service shop/web [10.96.0.1]", "synced")
	r.wait(t, "the refusal", func() bool { return slices.Contains(r.statuses, "nodes failed") })
}

func TestRefusedServicesHoldEverythingUp(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.forbidden[servicesResource] = true
	f.put(slicesResource, endpointSlice("web-1", "10.0.0.1"))
	r := follow(t, f.addr)
	r.take(t, "put slice shop/web-1 10.0.0.1")
	r.wait(t, "a second refusal", func() bool {
		return len(slices.DeleteFunc(slices.Clone(r.statuses), func(s string) bool { return s != "services failed" })) > 2
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.Contains(r.lines, "synced") {
		t.Error("synced came without the Services")
	}
}

func TestAServerThatComesLateIsWaitedFor(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.down()
	f.put(servicesResource, service("web", "10.96.0.1"))
	r := follow(t, f.addr)
	r.wait(t, "a failing request", func() bool { return slices.Contains(r.statuses, "services failed") })
	f.up()
	r.take(t, "put service shop/web [10.96.0.1]", "synced")
}

func TestAnUnusableObjectCountsAsGoneWithItsFindings(t *testing.T) {
	t.Parallel()
	f := newFakeServer(t)
	f.put(slicesResource, endpointSlice("web-1", "10.0.0.1"))
	r := follow(t, f.addr)
	r.take(t, "synced")
	bad := endpointSlice("web-1", "10.0.0.1")
	bad.Labels = nil
	f.put(slicesResource, bad)
	r.take(t, "delete slice shop/web-1 (NoServiceName)")
	f.put(slicesResource, bad, true)
	r.take(t, "delete slice shop/web-1")
}

func TestObjectsThatASelectorShouldHaveLeftOutCountAsGone(t *testing.T) {
	s := service("web", "10.96.0.1")
	s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": ""}
	if got := line(serviceEvent(s)); got != "delete service shop/web []" {
		t.Errorf("a Service of another proxy gives %q", got)
	}
	e := endpointSlice("web-1", "10.0.0.1")
	e.Labels["service.kubernetes.io/headless"] = ""
	if got := line(sliceEvent(e)); got != "delete slice shop/web-1" {
		t.Errorf("a headless slice gives %q", got)
	}
}

func TestAListThatDiffersGivesTheDeletionsInOneCall(t *testing.T) {
	var calls [][]string
	listed := 0
	s := &store{convert: serviceEvent, gone: goneService, listed: func() { listed++ }, sink: func(events ...model.Event) {
		var lines []string
		for _, e := range events {
			lines = append(lines, line(e))
		}
		slices.Sort(lines)
		calls = append(calls, lines)
	}}
	steps := []func() error{
		func() error { return s.Replace([]any{service("a", "10.96.0.1"), service("b", "10.96.0.2")}, "1") },
		func() error { return s.Add(service("c", "10.96.0.3")) },
		func() error { return s.Delete(service("a", "10.96.0.1")) },
		func() error { return s.Replace([]any{service("b", "10.96.0.9")}, "2") },
		func() error { return s.Replace(nil, "3") },
		func() error { return s.Replace(nil, "4") },
		s.Resync,
	}
	for i, step := range steps {
		if err := step(); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	want := [][]string{
		{"put service shop/a [10.96.0.1]", "put service shop/b [10.96.0.2]"},
		{"put service shop/c [10.96.0.3]"},
		{"delete service shop/a []"},
		{"delete service shop/c []", "put service shop/b [10.96.0.9]"},
		{"delete service shop/b []"},
	}
	if diff := cmp.Diff(want, calls); diff != "" || listed != 4 {
		t.Errorf("listed %d times, want 4; calls (-want +got):\n%s", listed, diff)
	}
	if err := s.Add("no object"); err == nil {
		t.Error("a string was taken for an object")
	}
}

func TestANodeThatNeverComesIsWaitedForWithinBounds(t *testing.T) {
	r := newReceiver()
	g := &gate{
		sink: r.sink, nodeWait: time.Millisecond,
		waiting: map[string]bool{servicesResource: true, slicesResource: true, nodesResource: true},
	}
	g.in(slicesResource)
	g.in(servicesResource)
	r.take(t, "synced")
	g.in(nodesResource)
	g.in(servicesResource)
	g.close()
	if len(r.lines) > 0 {
		t.Errorf("more came: %q", r.lines)
	}
}

func TestTheOrdinaryEndOfAWatchIsNoTrouble(t *testing.T) {
	r := newReceiver()
	s := &status{resource: "services", report: r.status, refused: func() { t.Error("counted as refused") }}
	ctx, cancel := context.WithCancel(context.Background())
	for _, err := range []error{
		apierrors.NewResourceExpired("old"),
		&apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonGone}}, context.Canceled, nil,
	} {
		_ = s.note(ctx, "watch", err)
	}
	cancel()
	_ = s.note(ctx, "watch", errors.New("closed"))
	if len(r.statuses) > 0 {
		t.Errorf("statuses %q, want none", r.statuses)
	}
}

func TestStoppingDoesNotWaitForTheNextAttempt(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close() // nobody listens there now
	r := newReceiver()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- Run(ctx, Config{REST: &rest.Config{Host: "http://" + addr}, OnStatus: r.status}, r.sink)
	}()
	// After several failures the next attempt is seconds away.
	r.wait(t, "failures", func() bool { return len(r.statuses) >= 6 })
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(firstRetry):
		t.Error("run went on waiting")
	}
}

func TestAnUnusableConfigurationIsAnError(t *testing.T) {
	err := Run(context.Background(), Config{REST: &rest.Config{
		Host:            "http://127.0.0.1:1",
		TLSClientConfig: rest.TLSClientConfig{CAFile: "/nonexistent"},
	}}, nil)
	if err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("error %v, want one that names the file", err)
	}
}
