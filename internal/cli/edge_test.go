package cli

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http/httptest"
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
	_, err := openSource(&config.Config{}, "v0", slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Errorf("got %v, which should name --kubeconfig", err)
	}
}
