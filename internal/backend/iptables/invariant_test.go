package iptables

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// all is the delta of a first compile.
func all(t *forward.Table) forward.Delta { return forward.Delta{Ports: t.Names(), Context: true} }

// apply brings the kernel to what is wanted, starting with a look at it.
func apply(t *testing.T, b *Backend) {
	t.Helper()
	have, err := b.Observe(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if r := b.Apply(context.Background(), b.Diff(have)); !r.OK() {
		t.Fatalf("apply: %v, failed %v", r.Err, r.Failed)
	}
}

func save(t *testing.T, k xtables.Tables) string {
	t.Helper()
	out := ""
	for _, table := range []string{"filter", "nat", "mangle"} {
		data, err := k.Save(context.Background(), table)
		if err != nil {
			t.Fatal(err)
		}
		out += string(data)
	}
	return out
}

func TestStepByStepIsTheSameAsFromScratch(t *testing.T) {
	for seed := range uint64(15) {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			// Layouts change on the way where the threshold is low.
			for _, opt := range []Options{
				{Family: family, MasqueradeBit: 14, CompactAbove: 6}, {Family: family, MasqueradeBit: 3, NoBPF: true},
			} {
				stepByStep(t, seed, family, opt)
			}
		}
	}
}

func stepByStep(t *testing.T, seed uint64, family model.Family, opt Options) {
	t.Helper()
	kernel := xtables.NewFake(family, xtables.Legacy)
	b := New(kernel, opt)
	builder := forward.NewBuilder(gen.Config(seed, family))
	snapshot := model.NewSnapshot()
	host := gen.Host(seed)
	draw := rand.New(rand.NewPCG(seed, 9))
	first := true
	for _, e := range gen.Events(seed, 60) {
		var dirty model.Dirty
		snapshot.Apply(e, &dirty)
		delta := builder.Update(snapshot, dirty, host)
		if first {
			delta = all(builder.Table())
		}
		if problems := b.Compile(builder.Table(), delta); len(problems) > 0 {
			t.Fatalf("seed %d: problems %v", seed, problems)
		}
		if first || draw.IntN(5) == 0 {
			first = false
			apply(t, b)
		} else if draw.IntN(3) > 0 { // else the next plan carries both changes
			if r := b.Apply(context.Background(), b.Diff(nil)); !r.OK() {
				t.Fatalf("seed %d: %v %v", seed, r.Err, r.Failed)
			}
		}
		fresh := opt // the layout may be that of a moment ago
		fresh.CompactAbove = 1 << 30
		if b.c.compact {
			fresh.CompactAbove = -1
		}
		want := newCompiler(fresh)
		want.update(builder.Table(), all(builder.Table()))
		if diff := cmp.Diff(want.want.String(), b.Program().String()); diff != "" {
			t.Fatalf("seed %d %s: program (-from scratch +step by step):\n%s", seed, family, diff)
		}
	}
	if r := b.Apply(context.Background(), b.Diff(nil)); !r.OK() {
		t.Fatalf("seed %d: %v %v", seed, r.Err, r.Failed)
	}
	have, err := b.Observe(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if p := b.Diff(have); !p.Empty() {
		t.Fatalf("seed %d %s: what was written is not what is read back; plan:\n%s", seed, family, p)
	}
}

func TestCleanupLeavesNothingOfOursAndAllOfOthers(t *testing.T) {
	const foreign = `*filter
:KUBE-FIREWALL - [0:0]
:MY-CHAIN - [0:0]
-A INPUT -j KUBE-FIREWALL
-A INPUT -s 192.0.2.0/24 -j DROP
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
-A MY-CHAIN -j RETURN
COMMIT
*nat
:CNI-MASQ - [0:0]
-A POSTROUTING -j CNI-MASQ
-A CNI-MASQ -j RETURN
COMMIT
*mangle
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
`
	for seed := range uint64(15) {
		kernel := xtables.NewFake(model.IPv4, xtables.NFT)
		if err := kernel.Restore(context.Background(), []byte(foreign)); err != nil {
			t.Fatal(err)
		}
		before := save(t, kernel)
		b := New(kernel, Options{Family: model.IPv4, MasqueradeBit: 14, CompactAbove: 8, SectionChains: 3})
		table := gen.Table(seed, model.IPv4)
		b.Compile(table, all(table))
		apply(t, b)
		b.Compile(nil, forward.Delta{})
		apply(t, b)
		if diff := cmp.Diff(before, save(t, kernel)); diff != "" {
			t.Fatalf("seed %d: tables (-before +after):\n%s", seed, diff)
		}
		apply(t, b) // a second time is fine
	}
}

func TestCleanupEmptiesWhatOthersStillReferTo(t *testing.T) {
	kernel := xtables.NewFake(model.IPv4, xtables.NFT)
	b := New(kernel, Options{Family: model.IPv4, MasqueradeBit: 14})
	table := gen.Table(1, model.IPv4)
	b.Compile(table, all(table))
	apply(t, b)
	foreign := "*nat\n:CNI-X - [0:0]\n-A CNI-X -j KUBE-MARK-MASQ\nCOMMIT\n"
	if err := kernel.Restore(context.Background(), []byte(foreign)); err != nil {
		t.Fatal(err)
	}
	b.Compile(nil, forward.Delta{})
	apply(t, b)
	left := save(t, kernel)
	if !strings.Contains(left, ":KUBE-MARK-MASQ") || strings.Contains(left, "-A KUBE-MARK-MASQ") ||
		strings.Contains(left, "KUBE-SERVICES") {
		t.Errorf("left:\n%s", left)
	}
}

func TestRestartAdoptsWhatIsThere(t *testing.T) {
	for seed := range uint64(15) {
		kernel := xtables.NewFake(model.IPv6, xtables.NFT)
		table := gen.Table(seed, model.IPv6)
		b := New(kernel, Options{Family: model.IPv6, MasqueradeBit: 14})
		b.Compile(table, all(table))
		apply(t, b)
		again := New(kernel, Options{Family: model.IPv6, MasqueradeBit: 14})
		again.Compile(table, all(table))
		have, err := again.Observe(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if p := again.Diff(have); !p.Empty() {
			t.Fatalf("seed %d: a restart would write:\n%s", seed, p)
		}
	}
}

// Every moment in which a packet may meet the kernel must give it the old or the new answer (invariants 4 and 8).
func TestNoPrefixOfAPlanAnswersOtherThanBeforeOrAfter(t *testing.T) {
	for seed := range uint64(40) {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			for _, opt := range layouts(family) {
				opt.SectionChains = 2
				prefixes(t, seed, family, opt)
			}
		}
	}
}

func prefixes(t *testing.T, seed uint64, family model.Family, opt Options) {
	t.Helper()
	config, host := gen.Config(seed, family), gen.Host(seed)
	snapshot := model.NewSnapshot()
	var dirty model.Dirty
	events := gen.Events(seed, 40)
	for _, e := range events[:30] {
		snapshot.Apply(e, &dirty)
	}
	before, _ := forward.Build(config, snapshot, host)
	for _, e := range events[30:] {
		if e.Node == nil { // a new Node changes what counts as a pod: both answers would have to be computed anew
			snapshot.Apply(e, &dirty)
		}
	}
	after, _ := forward.Build(config, snapshot, host)
	kernel := xtables.NewFake(family, xtables.Legacy)
	b := New(kernel, opt)
	b.Compile(before, all(before))
	apply(t, b)
	b.Compile(after, forward.Delta{Ports: union2(before, after)})

	watch := func() {
		o, err := observe(context.Background(), saved(t, kernel), opt, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range uint64(6) {
			for _, table := range []*forward.Table{before, after} {
				p := gen.Packet(seed*100+i, table)
				got, err := o.Trace(&after.Context, p)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				old, next := forward.Lookup(before, p), forward.Lookup(after, p)
				got.Outcome.Reason = forward.NoReason
				if got.Outcome.Do == forward.Drop && old.Do != next.Do {
					// Where the answer changes, a client may meet silence for a moment: its next attempt gets the new answer.
					continue
				}
				if !old.Allows(got.Outcome) && !next.Allows(got.Outcome) {
					t.Fatalf("seed %d %s: packet %v gets %v in the middle; before %v, after %v\n%s", seed, family, p, got.Outcome, old, next, stepText(got.Steps))
				}
			}
		}
	}
	commits := 0
	stop := errors.New("power cut")
	for cut := 1; ; cut++ {
		n := 0
		kernel.Fail(func(op string, _ int) error {
			if op == "commit" {
				if n++; n > cut {
					return stop
				}
			}
			return nil
		})
		plan := b.Diff(nil)
		r := b.Apply(context.Background(), plan)
		kernel.Fail(nil)
		watch()
		commits = n
		if r.OK() {
			break
		}
		have, err := b.Observe(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		_ = b.Diff(have)
		if cut > 200 {
			t.Fatalf("seed %d: no end after %d commits", seed, commits)
		}
	}
}

// saved reads through a kernel without its faults.
func saved(t *testing.T, k *xtables.Fake) xtables.Tables {
	t.Helper()
	return k
}

func union2(a, b *forward.Table) []forward.PortName {
	names := map[forward.PortName]bool{}
	for _, t := range []*forward.Table{a, b} {
		for _, n := range t.Names() {
			names[n] = true
		}
	}
	return slices.SortedFunc(maps.Keys(names), forward.PortName.Compare)
}

func TestAPortThatTheKernelRefusesLeavesTheRestWorking(t *testing.T) {
	kernel := xtables.NewFake(model.IPv4, xtables.Legacy)
	kernel.Lack("recent")
	seed := uint64(0)
	for ; ; seed++ { // a table in which some ports have session affinity and some do not
		table := gen.Table(seed, model.IPv4)
		with, without := 0, 0
		for _, n := range table.Names() {
			if p := table.Port(n); p.Affinity > 0 && p.Uses(forward.ClusterPool) {
				with++
			} else if p.Uses(forward.ClusterPool) {
				without++
			}
		}
		if with == 1 && without >= 2 {
			break
		}
	}
	table := gen.Table(seed, model.IPv4)
	b := New(kernel, Options{Family: model.IPv4, MasqueradeBit: 14})
	b.Compile(table, all(table))
	have, err := b.Observe(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	r := b.Apply(context.Background(), b.Diff(have))
	if r.Err != nil || len(r.Failed) != 1 {
		t.Fatalf("apply: %v, failed %v", r.Err, r.Failed)
	}
	for n := range r.Failed {
		if table.Port(n).Affinity == 0 {
			t.Errorf("%s was blamed, which has no session affinity", n)
		}
	}
	if !strings.Contains(save(t, kernel), "-j DNAT") {
		t.Error("the other ports are not served")
	}
	have, err = b.Observe(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if p := b.Diff(have); !p.Empty() {
		t.Errorf("the refused port stands in the next plan, though nothing changed:\n%s", p)
	}
}

var _ backend.Observed = (*Observation)(nil)

func TestATableThatHoversAroundTheBoundKeepsItsLayout(t *testing.T) {
	c := newCompiler(Options{Family: model.IPv4, CompactAbove: 100})
	for _, step := range []struct {
		endpoints int
		want      bool
	}{{100, false}, {101, true}, {100, true}, {76, true}, {75, false}, {100, false}, {101, true}} {
		c.endpoints = step.endpoints
		c.compact = c.layout()
		if c.compact != step.want {
			t.Errorf("%d endpoints: compact %v, want %v", step.endpoints, c.compact, step.want)
		}
	}
}
