package ipset

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestFakeKeepsTheContract(t *testing.T) {
	testContract(t, func(*testing.T) Table { return NewFake() })
}

func TestKernelKeepsTheContract(t *testing.T) {
	testContract(t, func(t *testing.T) Table {
		t.Helper()
		kerneltest.Isolate(t)
		return NewKernel()
	})
}

var compareAll = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func addr(s string) netip.Addr      { return netip.MustParseAddr(s) }
func network(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// sets are one of each type and family.
func sets() []Content {
	const many = 1 << 20
	return []Content{
		{Set{"A4", HashIP, model.IPv4, many, false}, map[Entry]uint32{{Addr: addr("10.0.0.1")}: 0, {Addr: addr("255.1.2.3")}: 0}},
		{Set{"A6", HashIP, model.IPv6, many, false}, map[Entry]uint32{{Addr: addr("fd00::1")}: 0}},
		{Set{"P4", HashIPPort, model.IPv4, 70000, true}, map[Entry]uint32{
			{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 80}:     0x1234abcd,
			{Addr: addr("10.0.0.1"), Proto: model.UDP, Port: 80}:     0,
			{Addr: addr("10.0.0.1"), Proto: model.SCTP, Port: 65535}: 0xffffffff,
		}},
		{Set{"P6", HashIPPort, model.IPv6, 70000, true}, map[Entry]uint32{
			{Addr: addr("fd00::1"), Proto: model.TCP, Port: 80}: 1 << 14,
		}},
		{Set{"N4", HashIPPortNet, model.IPv4, many, false}, map[Entry]uint32{
			{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 80, Net: network("192.0.2.0/24")}:    0,
			{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 80, Net: network("198.51.100.7/32")}: 0,
			{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 80, Net: network("128.0.0.0/1")}:     0,
		}},
		{Set{"N6", HashIPPortNet, model.IPv6, many, false}, map[Entry]uint32{
			{Addr: addr("fd00::1"), Proto: model.TCP, Port: 80, Net: network("2001:db8::/32")}:   0,
			{Addr: addr("fd00::1"), Proto: model.TCP, Port: 80, Net: network("2001:db8::7/128")}: 0,
		}},
		{Set{"B", BitmapPort, 0, 0, false}, map[Entry]uint32{{Port: 0}: 0, {Port: 30080}: 0, {Port: 65535}: 0}},
	}
}

func names(list []Content) []string {
	var out []string
	for _, c := range list {
		out = append(out, c.Name)
	}
	return out
}

// fill makes sets with their entries.
func fill(t *testing.T, table Table, list []Content) {
	t.Helper()
	var ops []Op
	for _, c := range list {
		ops = append(ops, Op{Verb: Create, Set: c.Set})
		for e, mark := range c.Entries {
			ops = append(ops, Op{Verb: Add, Set: c.Set, Entry: e, Mark: mark})
		}
	}
	do(t, table, ops...)
}

// do carries out what must not fail.
func do(t *testing.T, table Table, ops ...Op) {
	t.Helper()
	for i, err := range table.Apply(t.Context(), ops) {
		if err != nil {
			t.Fatalf("op %d: %v", i, err)
		}
	}
}

func mustRead(t *testing.T, table Table, names ...string) []Content {
	t.Helper()
	got, err := table.Read(t.Context(), names)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func testContract(t *testing.T, open func(*testing.T) Table) {
	t.Helper()
	t.Run("what was written is read back", func(t *testing.T) {
		table, want := open(t), sets()
		fill(t, table, want)
		fill(t, table, want) // nothing minds that it is so already
		got := mustRead(t, table, append(names(want), "NONE")...)
		if diff := cmp.Diff(want, got, compareAll); diff != "" {
			t.Errorf("sets (-want +got):\n%s", diff)
		}
	})
	t.Run("entries go and marks change", func(t *testing.T) {
		table, all := open(t), sets()
		fill(t, table, all)
		p4 := all[2]
		gone := Entry{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 80}
		kept := Entry{Addr: addr("10.0.0.1"), Proto: model.UDP, Port: 80}
		do(t, table, Op{Verb: Remove, Set: p4.Set, Entry: gone}, Op{Verb: Remove, Set: p4.Set, Entry: gone},
			Op{Verb: Add, Set: p4.Set, Entry: kept, Mark: 7})
		delete(p4.Entries, gone)
		p4.Entries[kept] = 7
		if diff := cmp.Diff([]Content{p4}, mustRead(t, table, "P4"), compareAll); diff != "" {
			t.Errorf("set (-want +got):\n%s", diff)
		}
		do(t, table, Op{Verb: Destroy, Set: p4.Set}, Op{Verb: Destroy, Set: p4.Set})
		if got := mustRead(t, table, "P4"); len(got) != 0 {
			t.Errorf("a destroyed set is still there: %v", got)
		}
	})
	t.Run("a set with other properties is replaced in one moment", func(t *testing.T) {
		table := open(t)
		old := Content{Set{"X", HashIP, model.IPv4, 10, false}, map[Entry]uint32{{Addr: addr("10.0.0.1")}: 0}}
		next := Content{Set{"X-NEW", HashIP, model.IPv4, 1000, false}, map[Entry]uint32{{Addr: addr("10.0.0.2")}: 0}}
		fill(t, table, []Content{old, next})
		do(t, table, Op{Verb: Swap, Set: old.Set, With: "X-NEW"}, Op{Verb: Destroy, Set: next.Set})
		next.Name = "X"
		if diff := cmp.Diff([]Content{next}, mustRead(t, table, "X", "X-NEW"), compareAll); diff != "" {
			t.Errorf("sets (-want +got):\n%s", diff)
		}
	})
	t.Run("refusals", func(t *testing.T) { testRefusals(t, open(t)) })
	t.Run("ten thousand entries in one call", func(t *testing.T) {
		table := open(t)
		want := Content{Set{"BIG", HashIPPort, model.IPv4, 1 << 20, false}, map[Entry]uint32{}}
		for i := range 10000 {
			e := Entry{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), Proto: model.TCP, Port: 80}
			want.Entries[e] = 0
		}
		fill(t, table, []Content{want})
		if diff := cmp.Diff([]Content{want}, mustRead(t, table, "BIG"), compareAll); diff != "" {
			t.Errorf("set (-want +got):\n%s", diff)
		}
	})
}

// testRefusals hands over one bad Op between two good ones each, which must take effect.
func testRefusals(t *testing.T, table Table) {
	t.Helper()
	hash, full := Set{"H", HashIPPort, model.IPv4, 1000, false}, Set{"FULL", HashIP, model.IPv4, 1, false}
	bits := Set{"BITS", BitmapPort, 0, 0, false}
	do(t, table, Op{Verb: Create, Set: hash}, Op{Verb: Create, Set: full}, Op{Verb: Create, Set: bits},
		Op{Verb: Add, Set: full, Entry: Entry{Addr: addr("10.0.0.1")}})
	other := hash
	other.MaxElem = 2000
	entry := Entry{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 1}
	netSet := Set{"H", HashIPPortNet, model.IPv4, 1000, false}
	tests := []struct {
		what  string
		op    Op
		class error
		text  string
	}{
		{"other properties", Op{Verb: Create, Set: other}, kernel.ErrConflict, "with other properties"},
		{"an unknown type", Op{Verb: Create, Set: Set{Name: "U", Type: "hash:wonder", Family: model.IPv4}}, kernel.ErrUnsupported, "type of set"},
		{"no such set", Op{Verb: Add, Set: Set{"NONE", HashIP, model.IPv4, 0, false}, Entry: Entry{Addr: addr("10.0.0.1")}}, nil, "no such set"},
		{"a full set", Op{Verb: Add, Set: full, Entry: Entry{Addr: addr("10.0.0.2")}}, kernel.ErrInvalid, "full"},
		{"another family", Op{Verb: Add, Set: hash, Entry: Entry{Addr: addr("fd00::1"), Proto: model.TCP, Port: 1}}, kernel.ErrInvalid, "IPv4"},
		{"another form", Op{Verb: Add, Set: hash, Entry: Entry{Addr: addr("10.0.0.1")}}, kernel.ErrInvalid, "form"},
		{"a mark that is not kept", Op{Verb: Add, Set: hash, Entry: entry, Mark: 1}, kernel.ErrInvalid, "no marks"},
		{"a network of everything", Op{Verb: Add, Set: netSet, Entry: Entry{entry.Addr, model.TCP, 1, network("0.0.0.0/0")}}, kernel.ErrInvalid, "1 bit"},
		{"a long name", Op{Verb: Create, Set: Set{Name: strings.Repeat("x", 32), Type: HashIP, Family: model.IPv4}}, kernel.ErrInvalid, "31 bytes"},
		{"a swap of two types", Op{Verb: Swap, Set: hash, With: "FULL"}, kernel.ErrConflict, "different types"},
	}
	for i, tc := range tests {
		before := Entry{Addr: addr("10.0.1.1"), Proto: model.TCP, Port: uint16(1 + i)}
		after := Entry{Addr: addr("10.0.1.2"), Proto: model.TCP, Port: uint16(1 + i)}
		errs := table.Apply(t.Context(), []Op{{Verb: Add, Set: hash, Entry: before}, tc.op, {Verb: Add, Set: hash, Entry: after}})
		if errs[0] != nil || errs[2] != nil {
			t.Errorf("%s: those around it failed: %v, %v", tc.what, errs[0], errs[2])
		}
		var step *StepError
		if !errors.As(errs[1], &step) || tc.class != nil && !errors.Is(errs[1], tc.class) || !strings.Contains(fmt.Sprint(errs[1]), tc.text) {
			t.Errorf("%s: error %v, want class %v and %q", tc.what, errs[1], tc.class, tc.text)
		}
		got := mustRead(t, table, "H")
		if _, ok := got[0].Entries[before]; !ok {
			t.Errorf("%s: the Op before it had no effect", tc.what)
		}
		if _, ok := got[0].Entries[after]; !ok {
			t.Errorf("%s: the Op after it had no effect", tc.what)
		}
	}
}

func TestNetworksOfEverythingAreHalved(t *testing.T) {
	for in, want := range map[string][]netip.Prefix{
		"0.0.0.0/0":    {network("0.0.0.0/1"), network("128.0.0.0/1")},
		"::/0":         {network("::/1"), network("8000::/1")},
		"192.0.2.7/24": {network("192.0.2.0/24")},
	} {
		if diff := cmp.Diff(want, Networks(network(in)), compareAll); diff != "" {
			t.Errorf("%s (-want +got):\n%s", in, diff)
		}
	}
}
