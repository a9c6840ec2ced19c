package event

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A fakeServer takes Events, and answers as it is told.
type fakeServer struct {
	mu     sync.Mutex
	events []eventsv1.Event
	// answers are the statuses of the next posts; none is 201.
	answers []int
	posts   int
	took    chan struct{}
}

func (s *fakeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.Method == http.MethodGet {
		_, _ = fmt.Fprint(w, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","items":[{"metadata":{"uid":"u-1"}}]}`)
		return
	}
	var e eventsv1.Event
	if err := json.NewDecoder(r.Body).Decode(&e); err != nil || !strings.HasSuffix(r.URL.Path, "/namespaces/"+e.Namespace+"/events") {
		http.Error(w, "bad", http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.posts++
	status := http.StatusCreated
	if len(s.answers) > 0 {
		status, s.answers = s.answers[0], s.answers[1:]
	}
	w.WriteHeader(status)
	if status != http.StatusCreated {
		_, _ = fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"no","code":%d}`, status)
	} else {
		s.events = append(s.events, e)
		_ = json.NewEncoder(w).Encode(e)
	}
	s.took <- struct{}{}
}

// A rig is a publisher with a server and a clock that is set by hand.
type rig struct {
	*Publisher
	t      *testing.T
	server *fakeServer
	clock  *testclock.FakeClock

	mu      sync.Mutex
	results map[Result]int
	reports []string
}

func newRig(t *testing.T, answers ...int) *rig {
	t.Helper()
	r := &rig{
		t: t, server: &fakeServer{took: make(chan struct{}, 100), answers: answers},
		clock: testclock.NewFakeClock(time.Date(2026, time.March, 1, 0, 0, 0, 0, time.UTC)), results: map[Result]int{},
	}
	ts := httptest.NewServer(r.server)
	t.Cleanup(ts.Close)
	var err error
	r.Publisher, err = New(Config{
		REST: &rest.Config{Host: ts.URL}, NodeName: "na", Clock: r.clock,
		Count:  func(x Result) { r.mu.Lock(); r.results[x]++; r.mu.Unlock() },
		Report: func(err error) { r.mu.Lock(); r.reports = append(r.reports, err.Error()); r.mu.Unlock() },
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// run runs the publisher until the test ends.
func (r *rig) run() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.Run(ctx)
	}()
	r.t.Cleanup(func() { cancel(); <-done })
}

// posted waits for so many requests.
func (r *rig) posted(n int) {
	r.t.Helper()
	for range n {
		select {
		case <-r.server.took:
		case <-time.After(20 * time.Second):
			r.t.Fatal("no request came")
		}
	}
}

// counted waits until so many results were counted.
func (r *rig) counted(what Result, n int) {
	r.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		r.mu.Lock()
		got := r.results[what]
		r.mu.Unlock()
		if got == n {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%d Events counted as %s, want %d", got, what, n)
		}
		time.Sleep(time.Millisecond)
	}
}

func finding(object, message string) model.Finding {
	return model.Finding{Severity: model.Error, Kind: "Service", Object: object, Reason: "PortRefused", Message: message}
}

func TestAFindingBecomesAnEventAboutItsObject(t *testing.T) {
	r := newRig(t)
	r.run()
	r.Publish(finding("shop/web", "port 80 is not in effect"))
	r.Publish(model.Finding{Kind: "File", Object: "x.yaml", Reason: "Unreadable"})
	r.Node("Starting", "", false)
	r.posted(2)
	r.server.mu.Lock()
	defer r.server.mu.Unlock()
	var got []string
	for _, e := range r.server.events {
		got = append(got, strings.Join([]string{
			e.Namespace, e.Type, e.Reason, e.Action, e.Note, e.Regarding.Kind, e.Regarding.Namespace, e.Regarding.Name,
			string(e.Regarding.UID), e.ReportingController, e.ReportingInstance,
		}, "|"))
	}
	want := []string{
		"shop|Warning|PortRefused|Program|port 80 is not in effect|Service|shop|web|u-1|kube-proxy|na",
		"default|Normal|Starting|StartKubeProxy||Node||na|na|kube-proxy|na",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestTheSameIsToldOnceInTenMinutes(t *testing.T) {
	r := newRig(t)
	r.run()
	for range 3 {
		r.Publish(finding("shop/web", "a"))
	}
	r.Publish(finding("shop/web", "b"))
	r.posted(2)
	r.clock.Step(9 * time.Minute)
	r.Publish(finding("shop/web", "a"))
	r.clock.Step(2 * time.Minute)
	r.Publish(finding("shop/web", "a"))
	r.posted(1)
	r.counted(Posted, 3)
}

func TestTooManyAtOnceAreDroppedAndCounted(t *testing.T) {
	r := newRig(t)
	for i := range queueLength + 10 {
		r.Publish(finding(fmt.Sprintf("shop/s%d", i), "x")) // nobody runs, and nothing blocks
	}
	r.counted(Dropped, 10)
}

func TestAServerThatIsBusyIsAskedAgain(t *testing.T) {
	r := newRig(t, http.StatusServiceUnavailable, http.StatusTooManyRequests)
	r.run()
	r.Publish(finding("shop/web", "x"))
	for range 2 {
		r.posted(1)
		for !r.clock.HasWaiters() {
			time.Sleep(time.Millisecond)
		}
		r.clock.Step(lastRetry)
	}
	r.posted(1)
	r.counted(Posted, 1)
}

func TestAMissingPermissionIsToldOnceAndMayBeGrantedLater(t *testing.T) {
	r := newRig(t, http.StatusForbidden, http.StatusForbidden)
	r.run()
	r.Publish(finding("shop/a", "x"))
	r.Publish(finding("shop/b", "x"))
	r.posted(2)
	r.counted(Failed, 2)
	r.mu.Lock()
	reports := r.reports
	r.mu.Unlock()
	if len(reports) != 1 || !strings.Contains(reports[0], "allow the daemon's user to create events") {
		t.Errorf("reports %q, want one with the remedy", reports)
	}
	r.Publish(finding("shop/a", "x"))
	r.posted(1)
	r.counted(Posted, 1)
}

func TestWithoutAPublisherNothingHappens(*testing.T) {
	var p *Publisher
	p.Publish(finding("shop/web", "x"))
	p.Node("Starting", "", false)
}

func TestLongTextsAreCutAtACharacter(t *testing.T) {
	for _, tc := range []struct {
		text string
		most int
		want string
	}{{"short", 10, "short"}, {"ääääää", 9, "äää..."}, {"a\xffb", 9, "a?b"}} {
		if got := clip(tc.text, tc.most); got != tc.want {
			t.Errorf("clip(%q, %d) = %q, want %q", tc.text, tc.most, got, tc.want)
		}
	}
}
