package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestMain(m *testing.M) {
	// The standard library lingers half a second over a connection whose request it refused.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

func TestHealthAndLiveness(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	type event func(h *Health)
	queued := func(f model.Family, s int) event { return func(h *Health) { h.Queued(f, at(s)) } }
	updated := func(f model.Family, s int) event { return func(h *Health) { h.Updated(f, at(s)) } }
	node := func(n *model.Node) event { return func(h *Health) { h.SetNode(n) } }
	here := node(&model.Node{Name: "na"})
	tests := map[string]struct {
		events         []event
		optional       bool
		now            int
		healthz, livez int
	}{
		"nothing is overdue before the first sync": {
			[]event{here}, false, 3600, 200, 200,
		},
		"a sync that waits for less than the timeout is no fault": {
			[]event{here, queued(model.IPv4, 0)}, false, 59, 200, 200,
		},
		"a sync that waits for the timeout is": {
			[]event{here, queued(model.IPv4, 0)}, false, 60, 503, 503,
		},
		"the first of several changes counts": {
			[]event{here, queued(model.IPv4, 0), queued(model.IPv4, 50)}, false, 60, 503, 503,
		},
		"an idle proxy is healthy": {
			[]event{here, queued(model.IPv4, 0), updated(model.IPv4, 1)}, false, 36000, 200, 200,
		},
		"one late family is enough": {
			[]event{here, updated(model.IPv4, 0), queued(model.IPv6, 0)}, false, 61, 503, 503,
		},
		"it recovers": {
			[]event{here, queued(model.IPv4, 0), updated(model.IPv4, 100)}, false, 101, 200, 200,
		},
		"an unknown node takes no traffic but lives": {
			nil, false, 0, 503, 200,
		},
		"an unknown node takes traffic where nobody knows Nodes": {
			nil, true, 0, 200, 200,
		},
		"a node that is about to be removed takes no traffic but lives": {
			[]event{node(&model.Node{Name: "na", Deleting: true})}, true, 0, 503, 200,
		},
		"a node that was deleted takes no traffic": {
			[]event{here, node(nil)}, false, 0, 503, 200,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			answered := map[string]int{}
			h := New(Config{
				NodeOptional: tc.optional, Now: func() time.Time { return at(tc.now) },
				Answered: func(path string, status int) { answered[path] = status },
			})
			for _, e := range tc.events {
				e(h)
			}
			for path, want := range map[string]int{"/healthz": tc.healthz, "/livez": tc.livez, "/": 404, "/healthz/x": 404} {
				w := httptest.NewRecorder()
				h.Handler().ServeHTTP(w, httptest.NewRequest("GET", path, nil))
				if w.Code != want {
					t.Errorf("%s: got %d, want %d; body %s", path, w.Code, want, w.Body)
				}
			}
			if diff := cmp.Diff(map[string]int{"/healthz": tc.healthz, "/livez": tc.livez}, answered); diff != "" {
				t.Errorf("answers counted (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTheBodyIsThatOfKubeProxy(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	h := New(Config{Now: func() time.Time { return now }})
	h.SetNode(&model.Node{Name: "na"})
	h.Updated(model.IPv4, now.Add(-time.Hour))
	h.Updated(model.IPv6, now.Add(-2*time.Hour))
	h.Queued(model.IPv6, now.Add(-time.Hour))
	tests := map[string]string{
		"/healthz": `{"lastUpdated":"2026-01-02T02:04:05.000000006Z","currentTime":"2026-01-02T03:04:05.000000006Z",` +
			`"nodeEligible":true,"healthy":false,"status":{` +
			`"IPv4":{"lastUpdated":"2026-01-02T02:04:05.000000006Z","healthy":true},` +
			`"IPv6":{"lastUpdated":"2026-01-02T01:04:05.000000006Z","healthy":false}}}`,
		"/livez": `{"lastUpdated":"2026-01-02T02:04:05.000000006Z","currentTime":"2026-01-02T03:04:05.000000006Z",` +
			`"healthy":false,"status":{` +
			`"IPv4":{"lastUpdated":"2026-01-02T02:04:05.000000006Z","healthy":true},` +
			`"IPv6":{"lastUpdated":"2026-01-02T01:04:05.000000006Z","healthy":false}}}`,
	}
	for path, want := range tests {
		w := httptest.NewRecorder()
		h.Handler().ServeHTTP(w, httptest.NewRequest("POST", path, nil))
		if diff := cmp.Diff(want, w.Body.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
		if w.Header().Get("Content-Type") != "application/json" || w.Header().Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: got headers %v", path, w.Header())
		}
	}
	w := httptest.NewRecorder()
	New(Config{Now: func() time.Time { return now }}).Handler().ServeHTTP(w, httptest.NewRequest("GET", "/livez", nil))
	want := `{"lastUpdated":"2026-01-02T03:04:05.000000006Z","currentTime":"2026-01-02T03:04:05.000000006Z","healthy":true}`
	if diff := cmp.Diff(want, w.Body.String()); diff != "" {
		t.Errorf("/livez of an idle proxy (-want +got):\n%s", diff)
	}
}

// A desk takes what is reported about ports.
type desk struct {
	mu      sync.Mutex
	reports []string
	counts  [2]int
}

func (d *desk) report(s Service, f model.Family, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reports = append(d.reports, fmt.Sprintf("%s %s: %v", s.Name, f, err != nil))
}

func (d *desk) opened(open, failed int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts = [2]int{open, failed}
}

func (d *desk) state() ([2]int, []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts, append([]string(nil), d.reports...)
}

// startPorts runs the servers of Services until the end of the test.
func startPorts(t *testing.T) (*Health, *desk) {
	t.Helper()
	d := &desk{}
	h := New(Config{Report: d.report, Opened: d.opened})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return h, d
}

// freePort gives a port that nothing listens on.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func get(addr string) (int, http.Header, string, error) {
	resp, err := http.Get("http://" + addr + "/any/path")
	if err != nil {
		return 0, nil, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, string(body), err
}

var (
	web   = model.Name{Namespace: "shop", Name: "web"}
	other = model.Name{Namespace: "shop", Name: "api"}
	all   = forward.NodePortScope{All: true}
)

func TestAServicePortAnswersWithTheEndpointsOnThisNode(t *testing.T) {
	h, _ := startPorts(t)
	port := freePort(t)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	h.SetServices(model.IPv4, all, []Service{{web, port, 2}})
	eventually(t, "port open", func() bool { _, _, _, err := get(addr); return err == nil })

	status, header, body, err := get(addr)
	if err != nil {
		t.Fatal(err)
	}
	want := "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n" +
		"\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}"
	if diff := cmp.Diff(want, body); diff != "" || status != 200 {
		t.Errorf("status %d, want 200; body (-want +got):\n%s", status, diff)
	}
	if got := header.Get("X-Load-Balancing-Endpoint-Weight"); got != "2" {
		t.Errorf("weight: got %q, want 2", got)
	}

	h.SetServices(model.IPv4, all, []Service{{web, port, 0}})
	if status, header, _, _ := get(addr); status != 503 || header.Get("X-Load-Balancing-Endpoint-Weight") != "0" {
		t.Errorf("after the last endpoint left: got status %d, weight %q; want 503, 0", status,
			header.Get("X-Load-Balancing-Endpoint-Weight"))
	}

	h.SetServices(model.IPv4, all, []Service{{web, port, 1}})
	h.SetNode(&model.Node{Deleting: true})
	if status, _, _, _ := get(addr); status != 200 {
		t.Errorf("on a node that is about to be removed: got %d, want 200", status)
	}
	h.Queued(model.IPv6, time.Now().Add(-time.Hour))
	if status, _, body, _ := get(addr); status != 503 || !strings.Contains(body, `"serviceProxyHealthy": false`) {
		t.Errorf("with a proxy that is late: got %d, %s; want 503", status, body)
	}
}

func TestAServicePortMovesAndCloses(t *testing.T) {
	h, d := startPorts(t)
	first, second := freePort(t), freePort(t)
	h.SetServices(model.IPv4, all, []Service{{web, first, 1}})
	eventually(t, "one open", func() bool { c, _ := d.state(); return c == [2]int{1, 0} })
	// The port goes to another Service, and the first gets a new one.
	h.SetServices(model.IPv4, all, []Service{{other, first, 1}, {web, second, 1}})
	eventually(t, "both answer", func() bool {
		_, _, one, _ := get(fmt.Sprintf("127.0.0.1:%d", first))
		_, _, two, _ := get(fmt.Sprintf("127.0.0.1:%d", second))
		return strings.Contains(one, `"api"`) && strings.Contains(two, `"web"`)
	})
	h.SetServices(model.IPv4, all, nil)
	eventually(t, "both closed", func() bool {
		_, _, _, one := get(fmt.Sprintf("127.0.0.1:%d", first))
		_, _, _, two := get(fmt.Sprintf("127.0.0.1:%d", second))
		return one != nil && two != nil
	})
	if _, reports := d.state(); len(reports) != 0 {
		t.Errorf("got reports %v, want none", reports)
	}
}

func TestAServicePortListensOnNodePortAddressesOnly(t *testing.T) {
	h, d := startPorts(t)
	port := freePort(t)
	scope := func(addrs ...string) forward.NodePortScope {
		var s forward.NodePortScope
		for _, a := range addrs {
			s.Addrs = append(s.Addrs, netip.MustParseAddr(a))
		}
		return s
	}
	h.SetServices(model.IPv4, scope("127.0.0.2", "127.0.0.3"), []Service{{web, port, 1}})
	eventually(t, "two open", func() bool { c, _ := d.state(); return c == [2]int{2, 0} })
	answers := func(addr string) bool { _, _, _, err := get(fmt.Sprintf("%s:%d", addr, port)); return err == nil }
	for addr, want := range map[string]bool{"127.0.0.1": false, "127.0.0.2": true, "127.0.0.3": true} {
		if got := answers(addr); got != want {
			t.Errorf("%s answers: got %v, want %v", addr, got, want)
		}
	}
	h.SetServices(model.IPv4, scope("127.0.0.3", "127.0.0.4"), []Service{{web, port, 1}})
	eventually(t, "address changed", func() bool { return answers("127.0.0.4") && !answers("127.0.0.2") })
	if !answers("127.0.0.3") {
		t.Error("the address that stayed does not answer")
	}
	h.SetServices(model.IPv4, scope(), []Service{{web, port, 1}})
	eventually(t, "no address", func() bool { c, _ := d.state(); return c == [2]int{0, 0} })
}

func TestAPortThatIsTakenIsReportedOnceAndTriedAgain(t *testing.T) {
	h, d := startPorts(t)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken, free := netip.MustParseAddrPort(l.Addr().String()).Port(), freePort(t)
	h.SetServices(model.IPv4, all, []Service{{web, taken, 1}, {other, free, 1}})
	eventually(t, "one open, one failed", func() bool { c, _ := d.state(); return c == [2]int{1, 1} })
	for range 5 {
		h.SetServices(model.IPv4, all, []Service{{web, taken, 1}, {other, free, 2}})
	}
	l.Close()
	eventually(t, "both open", func() bool {
		h.SetServices(model.IPv4, all, []Service{{web, taken, 1}, {other, free, 2}})
		c, _ := d.state()
		return c == [2]int{2, 0}
	})
	_, reports := d.state()
	if diff := cmp.Diff([]string{"shop/web IPv4: true", "shop/web IPv4: false"}, reports); diff != "" {
		t.Errorf("reports (-want +got):\n%s", diff)
	}
}

func TestFamiliesHaveTheirOwnCounts(t *testing.T) {
	h, d := startPorts(t)
	port := freePort(t)
	h.SetServices(model.IPv4, all, []Service{{web, port, 1}})
	h.SetServices(model.IPv6, all, []Service{{web, port, 3}})
	eventually(t, "both open", func() bool { c, _ := d.state(); return c[0] == 2 || c[1] > 0 })
	if c, _ := d.state(); c[1] > 0 {
		t.Skip("this machine has no IPv6")
	}
	for addr, want := range map[string]int{"127.0.0.1": 1, "[::1]": 3} {
		_, _, body, err := get(fmt.Sprintf("%s:%d", addr, port))
		if err != nil {
			t.Errorf("%s: %v", addr, err)
			continue
		}
		var got portReport
		if err := json.Unmarshal([]byte(body), &got); err != nil || got.LocalEndpoints != want {
			t.Errorf("%s: got %d endpoints, %v; want %d", addr, got.LocalEndpoints, err, want)
		}
	}
}

func TestLongHeadersAreRefused(t *testing.T) {
	h, d := startPorts(t)
	port := freePort(t)
	h.SetServices(model.IPv4, all, []Service{{web, port, 1}})
	eventually(t, "open", func() bool { c, _ := d.state(); return c[0] == 1 })
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/", port), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Long", strings.Repeat("x", 64<<10))
	resp, err := http.DefaultClient.Do(req)
	if err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("got status %d, want 431", resp.StatusCode)
		}
	}
}

func TestAServerAnswersUntilItsContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ready := make(chan net.Addr, 1)
	s := &Server{Addr: "127.0.0.1:0", Handler: New(Config{}).Handler(), Ready: func(a net.Addr) { ready <- a }}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	addr := (<-ready).String()
	resp, err := http.Get("http://" + addr + "/livez")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("got %d, want 200", resp.StatusCode)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: got %v, want nil", err)
	}
	http.DefaultClient.CloseIdleConnections()
	if _, err := net.Dial("tcp", addr); err == nil {
		t.Error("the address still answers after the end")
	}
}

func TestAServerWhoseAddressIsTakenTriesAgainOrGivesUp(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	strict := &Server{Addr: l.Addr().String(), Strict: true}
	if err := strict.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "listen on "+l.Addr().String()) {
		t.Errorf("strict: got %v, want an error that names the address", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	reports := make(chan error, 10)
	patient := &Server{Addr: l.Addr().String(), Report: func(err error) { reports <- err }}
	ended := make(chan error, 1)
	go func() { ended <- patient.Run(ctx) }()
	if err := <-reports; err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("report: got %v, want the reason", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: got %v, want nil", err)
	}
}
