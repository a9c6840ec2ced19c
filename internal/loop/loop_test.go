package loop

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
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
