package backendtest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/model"
)

// How much runRandom does: a seed takes some 0.1 s.
const (
	randomSeeds      = 12
	randomSeedsShort = 3
	randomEvents     = 40
	// randomPackets are asked about at each step.
	randomPackets = 12
)

// runRandom takes backends through random events, with what holds after every step of a script.
func runRandom(t *testing.T, m Mode) {
	t.Helper()
	seeds := uint64(randomSeeds)
	if testing.Short() {
		seeds = randomSeedsShort
	}
	for _, family := range m.Families {
		for seed := range seeds {
			t.Run(fmt.Sprintf("%s/seed %d", family, seed), func(t *testing.T) {
				t.Parallel()
				randomRun(t, m, family, seed)
			})
		}
	}
}

func randomRun(t *testing.T, m Mode, family model.Family, seed uint64) {
	t.Helper()
	draw := rand.New(rand.NewPCG(seed, 7))
	w := newWorld(settings{cfg: gen.Config(seed, family), host: gen.Host(seed)})
	l := newLane(t, m, m.Fake(t, family), fmt.Sprint("random", seed))
	events := gen.Events(seed, randomEvents)
	for step := uint64(0); len(events) > 0; step++ {
		before := w.table
		n := min(len(events), 1+draw.IntN(6))
		delta := w.take(t, events[:n])
		events = events[n:]
		if draw.IntN(8) == 0 {
			l.reopen()
			delta = everything(w.table)
		}
		l.compile(w.builder.Table(), delta)
		if before != nil && draw.IntN(4) == 0 {
			continue // the next plan carries both changes
		}
		l.sync()
		l.settled()
		packets := randomPacketsOf(seed+1000*step, before, w.table)
		for _, p := range packets {
			l.trace(w.table, p)
		}
		c := &change{mode: m, family: family, old: before, next: w.table, packets: packets}
		if diff := cmp.Diff(c.open(t, w.table).dump(), l.dump()); diff != "" {
			t.Errorf("kernel (-from scratch +step by step):\n%s", diff)
		}
		c.prefixes(t, 1)
		if t.Failed() {
			t.Fatalf("seed %d, step %d: see above", seed, step)
		}
	}
	l.sync()
	l.adopts(w.table)
	empty := m.Fake(t, family)
	want, err := empty.Dump()
	if err != nil {
		t.Fatalf("dump an empty kernel: %v", err)
	}
	l.compile(nil, forward.Delta{})
	l.sync()
	if diff := cmp.Diff(want, l.dump()); diff != "" {
		t.Errorf("kernel after the cleanup (-empty +got):\n%s", diff)
	}
}

// randomPacketsOf draws packets from both tables, so that frontends that come and those that go are asked about.
func randomPacketsOf(seed uint64, tables ...*forward.Table) []forward.Packet {
	var list []forward.Packet
	for i, t := range tables {
		if t == nil {
			continue
		}
		for n := range uint64(randomPackets) {
			list = append(list, gen.Packet(seed+n+100*uint64(i), t))
		}
	}
	return list
}
