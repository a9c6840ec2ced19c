package conntrack

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/model"
)

// BenchmarkForget lists a table of 500,000 UDP entries, of which every second is stale, and deletes those; fewer if
// nf_conntrack_max does not allow so many.
func BenchmarkForget(b *testing.B) {
	kerneltest.Isolate(b)
	n := 500000
	if text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max"); err == nil {
		if limit, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && limit > 0 {
			n = min(n, limit*9/10)
		}
	}
	flows := lots(n)
	b.ReportMetric(float64(n), "entries")
	for b.Loop() {
		b.StopTimer()
		create(b, flows...)
		b.StartTimer()
		start := time.Now()
		listed := 0
		err := Kernel{}.List(b.Context(), model.IPv4, model.UDP, func(flow.Flow) bool { listed++; return true })
		if err != nil || listed != n {
			b.Fatalf("%d entries listed, error %v; want %d", listed, err, n)
		}
		b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/list")
		deleted, err := Forget(b.Context(), Kernel{}, model.IPv4, flow.Protocols(), odd)
		if err != nil || deleted != n/2 {
			b.Fatalf("deleted %d, error %v; want %d", deleted, err, n/2)
		}
		b.ReportMetric(float64(deleted), "deleted")
		b.StopTimer()
		if _, err := (Kernel{}).Delete(b.Context(), flows); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// TestForeignEntriesCostNoMemory lists a table of entries that are all of another protocol.
func TestForeignEntriesCostNoMemory(t *testing.T) {
	kerneltest.Isolate(t)
	count := func(n int) float64 {
		flows := lots(n)
		for i := range flows {
			flows[i].Proto = model.TCP
		}
		create(t, flows...)
		return testing.AllocsPerRun(1, func() {
			// Without the kernel's own filter, as with kernels that have none.
			err := list(t.Context(), model.IPv4, model.UDP, false, func(flow.Flow) bool {
				t.Error("an entry of another protocol was handed over")
				return true
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	few, many := count(0), count(5000)
	if many > few+5 {
		t.Errorf("%v allocations for 5000 foreign entries, %v for none", many, few)
	}
}
