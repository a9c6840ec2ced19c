package backendtest

import (
	"testing"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/model"
)

// fuzzPackets are asked about for each table.
const fuzzPackets = 8

// Fuzz draws tables and packets, and fails where a mode does with a packet what the oracle does not allow, or leaves one
// of its choices out, by what is wanted and by what the kernel holds. The name of the target that calls it is
// FuzzBackendsAgree.
func Fuzz(f *testing.F, modes ...Mode) {
	f.Helper()
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		for _, m := range modes {
			for _, family := range m.Families {
				agree(t, m, family, seed)
			}
		}
	})
}

func agree(t *testing.T, m Mode, family model.Family, seed uint64) {
	t.Helper()
	table := gen.Table(seed, family)
	c := &change{mode: m, family: family}
	l := c.open(t, table)
	observed, traces := l.observe().(ObservedTracer)
	for n := range uint64(fuzzPackets) {
		p := gen.Packet(seed+n<<32, table)
		want := forward.Lookup(table, p)
		got, err := l.b.Trace(p)
		l.compare(m.Name+", the wanted objects", table, p, want, got, err)
		if traces {
			got, err := observed.Trace(&table.Context, p)
			l.compare(m.Name+", the kernel's objects", table, p, want, got, err)
		}
	}
	if t.Failed() {
		t.Logf("seed %d, %s, table:\n%s", seed, family, table)
	}
}
