package cli

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/metric"
)

func TestAnOutageIsLoggedOnceUntilItsReasonChanges(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	now := time.Unix(0, 0)
	o := &outages{log: log, now: func() time.Time { return now }, seen: map[string]outage{}}
	refused, forbidden := errors.New("refused"), errors.New("forbidden")
	for _, step := range []struct {
		after    time.Duration
		resource string
		err      error
	}{
		{0, "nodes", nil}, // nothing was wrong
		{0, "services", refused},
		{time.Second, "services", refused},
		{0, "nodes", refused},
		{time.Second, "services", forbidden}, // too soon after the first line
		{2 * outageRepeat, "services", forbidden},
		{2 * outageRepeat, "services", forbidden},
		{0, "services", nil},
		{0, "services", nil},
		{time.Second, "services", refused},
	} {
		now = now.Add(step.after)
		o.report(step.resource, step.err)
	}
	const away = `level=ERROR msg="The API server did not answer, and what is known stays in force" kind=`
	want := []string{
		away + "services err=refused", away + "nodes err=refused", away + "services err=forbidden",
		`level=INFO msg="The API server answered again" kind=services`, away + "services err=refused",
	}
	if diff := cmp.Diff(want, strings.Split(strings.TrimSpace(out.String()), "\n")); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

func TestAnAddressInUseEndsTheDaemonOnlyIfAskedFor(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = busy.Close() })
	addr := netip.MustParseAddrPort(busy.Addr().String())
	t.Run("hard fail", func(t *testing.T) {
		d := &daemon{cfg: &config.Config{HardFail: true}, log: slog.New(slog.DiscardHandler)}
		err := d.serve(t.Context(), "metrics", addr, http.NotFoundHandler(), 0)
		if err == nil || !strings.HasPrefix(err.Error(), "metrics server: listen on "+addr.String()) {
			t.Errorf("got %v, which should name the server and its address", err)
		}
	})
	t.Run("by default", func(t *testing.T) {
		out := &lockedBuffer{}
		d := &daemon{cfg: &config.Config{}, log: slog.New(slog.NewTextHandler(out, nil))}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.serve(ctx, "metrics", addr, http.NotFoundHandler(), 0) }()
		deadline := time.Now().Add(patience)
		for !strings.Contains(out.String(), "is tried again") {
			if time.Now().After(deadline) {
				t.Fatalf("the failure was not logged: %s", out)
			}
			time.Sleep(time.Millisecond)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("after the end of its context: %v", err)
		}
	})
}

func TestProfilesAreServedOnlyWhenAskedFor(t *testing.T) {
	for profiling, want := range map[bool]int{false: 404, true: 200} {
		d := &daemon{cfg: &config.Config{Profiling: profiling}, metrics: metric.New(time.Unix(0, 0), "v0")}
		w := httptest.NewRecorder()
		d.metricsHandler().ServeHTTP(w, httptest.NewRequest("GET", "/debug/pprof/cmdline", nil))
		if w.Code != want {
			t.Errorf("with profiling %v the status is %d, want %d", profiling, w.Code, want)
		}
	}
}

func TestWithoutAServerToAskTheDaemonSaysWhatToGive(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, _, err := openSource(&config.Config{}, "v0", slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Errorf("got %v, which should name --kubeconfig", err)
	}
}
