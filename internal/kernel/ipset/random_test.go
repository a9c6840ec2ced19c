package ipset

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
)

// TestFakeAndKernelAgreeOnRandomOps gives both the same changes and wants the same answers, word for word, and the same
// sets all along. Names, entries and room are so few that a good part is refused.
func TestFakeAndKernelAgreeOnRandomOps(t *testing.T) {
	for n, types := range [][2]Type{
		{HashIPPortNet, BitmapPort}, {HashIPPort, HashNet}, {HashIPPortIP, HashIPPortNet}, {HashNet, HashIPPortIP},
	} {
		t.Run(fmt.Sprint(types), func(t *testing.T) { testRandom(t, uint64(n), types) })
	}
}

func testRandom(t *testing.T, stream uint64, types [2]Type) {
	t.Helper()
	const batches, ops = 100, 25
	kernel, fake := kernelWorld(t), fakeWorld()
	used := fixture(t, kernel, fake)
	refusals := 0
	for seed := range uint64(batches) {
		g := generator{rand.New(rand.NewPCG(seed, stream)), used, types}
		batch := make([]Op, ops)
		for i := range batch {
			batch[i] = g.op()
		}
		got, want := kernel.Apply(t.Context(), batch), fake.Apply(t.Context(), batch)
		for i := range batch {
			if fmt.Sprint(got[i]) != fmt.Sprint(want[i]) {
				t.Fatalf("batch %d, op %d, %+v:\nthe kernel says %v\nthe fake says   %v", seed, i, batch[i], got[i], want[i])
			}
			if got[i] != nil {
				refusals++
			}
		}
		all := append(g.names(), used)
		if diff := cmp.Diff(mustRead(t, kernel, all...), mustRead(t, fake, all...), compareAll); diff != "" {
			t.Fatalf("batch %d, %+v\nsets (-kernel +fake):\n%s", seed, batch, diff)
		}
	}
	t.Logf("%d of %d ops were refused", refusals, batches*ops)
	if refusals < batches*ops/10 || refusals > batches*ops*9/10 {
		t.Errorf("%d of %d ops were refused, so the test says little", refusals, batches*ops)
	}
	if kernel.sent() != fake.sent() {
		t.Errorf("the kernel got %d messages, the fake counts %d", kernel.sent(), fake.sent())
	}
}

// fixture makes a set in both that something else uses, and gives its name.
func fixture(t *testing.T, worlds ...world) string {
	t.Helper()
	s := Set{Name: "USED", Type: HashIP, Family: model.IPv4, MaxElem: 3}
	for _, w := range worlds {
		do(t, w, Op{Verb: Create, Set: s})
		w.use(t, s.Name)
	}
	return s.Name
}

type generator struct {
	*rand.Rand
	used string
	// types are those of the sets C and D.
	types [2]Type
}

func (generator) names() []string { return []string{"A", "B", "C", "D"} }

func (g generator) name() string {
	if g.IntN(12) == 0 {
		return g.used
	}
	return g.names()[g.IntN(len(g.names()))]
}

func (g generator) op() Op {
	o := Op{Set: g.set(), Strict: g.IntN(3) == 0}
	switch n := g.IntN(20); {
	case n < 4:
		o.Verb = Create
		o.HashSize = uint32(g.IntN(3) * 100)
		if o.Set.Type == BitmapPort {
			o.HashSize = 0
		}
	case n < 11:
		o.Verb, o.Entry = Add, g.entry(o.Set)
		if g.IntN(4) == 0 {
			o.Mark = g.Uint32()
		}
	case n < 14:
		o.Verb, o.Entry = Remove, g.entry(o.Set)
	case n < 15:
		o.Verb = Flush
	case n < 17:
		o.Verb, o.With = Swap, g.name()
	case n < 18:
		o.Verb, o.With = Rename, o.Set.Name // which is taken, and a name of the same type may be free
		if o.Set.Type == HashIP {
			o.With = []string{"A", "B", g.used}[g.IntN(3)]
		}
	default:
		o.Verb = Destroy
	}
	return o
}

// set gives a set of which name and type go together. The kernel takes an entry of a set of another type if the fields of
// that include those which it needs; nothing relies on that, and the fake does not do it.
func (g generator) set() Set {
	s := Set{Name: g.name(), MaxElem: uint32(2 + g.IntN(2)), Family: model.IPv4, Marks: g.IntN(2) == 0}
	switch s.Name {
	case "A", "B", g.used:
		s.Type = HashIP
	case "C":
		s.Type, s.Family = g.types[0], model.IPv6
	case "D":
		s.Type = g.types[1]
	}
	if s.Type == BitmapPort {
		s.Family, s.MaxElem = 0, 0
	}
	s.Timeouts, s.Counters = g.IntN(8) == 0, g.IntN(8) == 0
	return s
}

// entry gives one of few entries, at times one that is malformed.
func (g generator) entry(s Set) Entry {
	if g.IntN(20) == 0 {
		s.Type = HashNet
	}
	has, _ := s.Type.form()
	e := Entry{}
	if has.addr {
		e.Addr = g.addr(s.Family)
	}
	if has.proto {
		e.Proto = []model.Protocol{model.TCP, model.UDP, model.SCTP}[g.IntN(3)]
	}
	if has.port {
		e.Port = []uint16{0, 80, 65535}[g.IntN(3)]
	}
	if has.net && s.Family != 0 {
		a := g.addr(s.Family)
		e.Net = netip.PrefixFrom(a, []int{0, 1, 8, a.BitLen()}[g.IntN(4)])
		if g.IntN(6) != 0 {
			e.Net = e.Net.Masked()
		}
	}
	return e
}

func (g generator) addr(f model.Family) netip.Addr {
	if f == model.IPv6 {
		return addr([]string{"::", "fd00::1", "::ffff:1.2.3.4", "8000::"}[g.IntN(4)])
	}
	return addr([]string{"0.0.0.0", "10.0.0.1", "10.0.0.2", "255.255.255.255", "127.0.0.1"}[g.IntN(5)])
}
