package ipset

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A world is a table with what the contract needs around it.
type world struct {
	Table
	// use lets something else use a set.
	use  func(t *testing.T, name string)
	sent func() int
}

func TestFakeKeepsTheContract(t *testing.T) {
	testContract(t, func(*testing.T) world { return fakeWorld() })
}

func TestKernelKeepsTheContract(t *testing.T) {
	testContract(t, kernelWorld)
}

func fakeWorld() world {
	f, used := NewFake(), map[string]bool{}
	f.Used(func(name string) bool { return used[name] })
	return world{Table: f, use: func(_ *testing.T, name string) { used[name] = true }, sent: f.Sent}
}

// kernelWorld is a namespace of its own. A set of sets uses others in it, which for the kernel is the same as a rule.
func kernelWorld(t *testing.T) world {
	t.Helper()
	kerneltest.Isolate(t)
	k := NewKernel()
	return world{Table: k, sent: k.Sent, use: func(t *testing.T, name string) {
		t.Helper()
		const user, dataName = "USER", 18 // IPSET_ATTR_NAME
		raw(t, cmdCreate, unix.NLM_F_CREATE, func(w *writer) {
			w.text(attrSetName, user)
			w.text(attrTypeName, "list:set")
			w.put8(attrRevision, 3)
			w.put8(attrFamily, unix.AF_UNSPEC)
			w.nest(attrData, func() {})
		})
		raw(t, cmdAdd, 0, func(w *writer) {
			w.text(attrSetName, user)
			w.nest(attrData, func() { w.text(dataName, name) })
		})
	}}
}

// raw sends a message that no Op makes.
func raw(t *testing.T, cmd uint8, flags uint16, fill func(*writer)) {
	t.Helper()
	s, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := writer{version: protocolMin}
	if err := s.Ask(t.Context(), w.message(cmd, flags, func() { fill(&w) }), func(netlink.Message) error { return nil }); err != nil {
		t.Fatalf("command %d: %v", cmd, err)
	}
}

var compareAll = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func addr(s string) netip.Addr      { return netip.MustParseAddr(s) }
func network(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// sets are one of each type and family, and of each extension.
func sets() []Content {
	const many = 1 << 20
	web4, web6 := addr("10.0.0.1"), addr("fd00::1")
	return []Content{
		{Set{Name: "A4", Type: HashIP, Family: model.IPv4, MaxElem: many}, map[Entry]uint32{
			{Addr: web4}: 0, {Addr: addr("255.1.2.3")}: 0,
		}},
		{Set{Name: "A6", Type: HashIP, Family: model.IPv6, MaxElem: many}, map[Entry]uint32{
			{Addr: web6}: 0, {Addr: addr("::ffff:10.0.0.1")}: 0, {Addr: addr("::10.0.0.1")}: 0, {Addr: addr("::2")}: 0,
			{Addr: addr("1:0:2:0:0:3:0:4")}: 0,
		}},
		{Set{Name: "P4", Type: HashIPPort, Family: model.IPv4, MaxElem: 70000, Marks: true}, map[Entry]uint32{
			{Addr: web4, Proto: model.TCP, Port: 80}:     0x1234abcd,
			{Addr: web4, Proto: model.UDP, Port: 80}:     0,
			{Addr: web4, Proto: model.SCTP, Port: 65535}: 0xffffffff,
			{Addr: addr("10.0.0.2"), Proto: model.TCP}:   0, // port 0
		}},
		{Set{Name: "P6", Type: HashIPPort, Family: model.IPv6, MaxElem: 70000, Marks: true}, map[Entry]uint32{
			{Addr: web6, Proto: model.TCP, Port: 80}: 1 << 14,
		}},
		{Set{Name: "L4", Type: HashIPPortIP, Family: model.IPv4, MaxElem: 10}, map[Entry]uint32{
			{Addr: web4, Proto: model.UDP, Port: 53, Net: network("10.0.0.1/32")}: 0,
			{Addr: web4, Proto: model.UDP, Port: 53, Net: network("10.0.0.2/32")}: 0,
		}},
		{Set{Name: "L6", Type: HashIPPortIP, Family: model.IPv6, MaxElem: 10}, map[Entry]uint32{
			{Addr: web6, Proto: model.SCTP, Port: 9, Net: network("fd00::1/128")}: 0,
		}},
		{Set{Name: "N4", Type: HashIPPortNet, Family: model.IPv4, MaxElem: many}, map[Entry]uint32{
			{Addr: web4, Proto: model.TCP, Port: 80, Net: network("192.0.2.0/24")}:    0,
			{Addr: web4, Proto: model.TCP, Port: 80, Net: network("198.51.100.7/32")}: 0,
			{Addr: web4, Proto: model.TCP, Port: 80, Net: network("128.0.0.0/1")}:     0,
		}},
		{Set{Name: "N6", Type: HashIPPortNet, Family: model.IPv6, MaxElem: many}, map[Entry]uint32{
			{Addr: web6, Proto: model.TCP, Port: 80, Net: network("2001:db8::/32")}:   0,
			{Addr: web6, Proto: model.TCP, Port: 80, Net: network("2001:db8::7/128")}: 0,
		}},
		{Set{Name: "M4", Type: HashNet, Family: model.IPv4, MaxElem: DefaultMaxElem, Marks: true}, map[Entry]uint32{
			{Net: network("0.0.0.0/1")}: 0, {Net: network("128.0.0.0/1")}: 5, {Net: network("10.0.0.1/32")}: 0,
		}},
		{Set{Name: "M6", Type: HashNet, Family: model.IPv6, MaxElem: DefaultMaxElem}, map[Entry]uint32{
			{Net: network("::/1")}: 0, {Net: network("fd00::/8")}: 0, {Net: network("fd00::1/128")}: 0,
		}},
		{Set{Name: "B", Type: BitmapPort}, map[Entry]uint32{{Port: 0}: 0, {Port: 30080}: 0, {Port: 65535}: 0}},
		{Set{Name: "X4", Type: HashIP, Family: model.IPv4, MaxElem: 7, Counters: true, Comments: true, Marks: true}, map[Entry]uint32{
			{Addr: web4}: 1,
		}},
		{Set{Name: "XB", Type: BitmapPort, Counters: true, Comments: true, Marks: true, Timeouts: true}, map[Entry]uint32{
			{Port: 1}: 9,
		}},
		{
			Set{Name: "T6", Type: HashNet, Family: model.IPv6, MaxElem: 7, Timeouts: true, Timeout: MaxTimeout},
			map[Entry]uint32{{Net: network("fd00::/8")}: 0},
		},
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

// expect compares what is read of some sets.
func expect(t *testing.T, table Table, names []string, want ...Content) {
	t.Helper()
	if diff := cmp.Diff(want, mustRead(t, table, names...), compareAll); diff != "" {
		t.Errorf("sets (-want +got):\n%s", diff)
	}
}

func testContract(t *testing.T, open func(*testing.T) world) {
	t.Helper()
	for name, test := range map[string]func(*testing.T, world){
		"what was written is read back":                         testReadBack,
		"all sets are listed without their entries":             testList,
		"entries go and marks change":                           testEntries,
		"a set with other properties is replaced in one moment": testReplace,
		"a set is renamed and flushed":                          testRename,
		"what the kernel fills in is read":                      testDefaults,
		"what a set is used by keeps it":                        testInUse,
		"a message for each op":                                 testMessages,
		"refusals":                                              testRefusals,
		"strict refusals":                                       testStrict,
		"ten thousand entries in one call":                      testMany,
		"what is there can be told":                             testProbe,
		"a context that ended":                                  testEnded,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func testReadBack(t *testing.T, w world) {
	t.Helper()
	want := sets()
	fill(t, w, want)
	fill(t, w, want) // nothing minds that it is so already
	expect(t, w, append(names(want), "NONE"), want...)
	if got := mustRead(t, w); got != nil {
		t.Errorf("no name is asked for, but read %v", got)
	}
	if got, err := w.Read(t.Context(), []string{"A4", strings.Repeat("x", 32)}); !errors.Is(err, kernel.ErrInvalid) {
		t.Errorf("a name that no set can have: read %v, error %v", got, err)
	}
}

func testList(t *testing.T, w world) {
	t.Helper()
	got, err := w.List(t.Context(), nil)
	if err != nil || len(got) != 0 {
		t.Errorf("where there is no set: listed %v, error %v", got, err)
	}
	fill(t, w, sets())
	for what, keep := range map[string]func(string) bool{
		"all": nil, "some": func(name string) bool { return strings.HasPrefix(name, "N") },
		"none": func(string) bool { return false },
	} {
		var want []Set
		for _, c := range sets() {
			if keep == nil || keep(c.Name) {
				want = append(want, c.Set)
			}
		}
		slices.SortFunc(want, func(a, b Set) int { return strings.Compare(a.Name, b.Name) })
		got, err := w.List(t.Context(), keep)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

func testEntries(t *testing.T, w world) {
	t.Helper()
	all := sets()
	fill(t, w, all)
	p4 := all[2]
	gone := Entry{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 80}
	kept := Entry{Addr: addr("10.0.0.1"), Proto: model.UDP, Port: 80}
	do(t, w, Op{Verb: Remove, Set: p4.Set, Entry: gone}, Op{Verb: Remove, Set: p4.Set, Entry: gone},
		Op{Verb: Add, Set: p4.Set, Entry: kept, Mark: 7})
	delete(p4.Entries, gone)
	p4.Entries[kept] = 7
	expect(t, w, []string{"P4"}, p4)
	do(t, w, Op{Verb: Add, Set: p4.Set, Entry: kept}) // without a mark again
	p4.Entries[kept] = 0
	expect(t, w, []string{"P4"}, p4)
	var ops []Op
	for _, c := range all {
		for e := range c.Entries {
			ops = append(ops, Op{Verb: Remove, Set: c.Set, Entry: e})
		}
		clear(c.Entries)
	}
	do(t, w, ops...)
	expect(t, w, names(all), all...)
	do(t, w, Op{Verb: Destroy, Set: p4.Set}, Op{Verb: Destroy, Set: p4.Set})
	if got := mustRead(t, w, "P4"); len(got) != 0 {
		t.Errorf("a destroyed set is still there: %v", got)
	}
}

func testReplace(t *testing.T, w world) {
	t.Helper()
	old := Content{Set{Name: "X", Type: HashIP, Family: model.IPv4, MaxElem: 10}, map[Entry]uint32{{Addr: addr("10.0.0.1")}: 0}}
	next := Content{Set{Name: "X-NEW", Type: HashIP, Family: model.IPv4, MaxElem: 1000}, map[Entry]uint32{{Addr: addr("10.0.0.2")}: 0}}
	fill(t, w, []Content{old, next})
	w.use(t, "X")
	do(t, w, Op{Verb: Swap, Set: old.Set, With: "X-NEW"}, Op{Verb: Destroy, Set: next.Set})
	next.Name = "X"
	expect(t, w, []string{"X", "X-NEW"}, next)
}

func testRename(t *testing.T, w world) {
	t.Helper()
	c := Content{Set{Name: "X", Type: HashIP, Family: model.IPv4, MaxElem: 10}, map[Entry]uint32{{Addr: addr("10.0.0.1")}: 0}}
	fill(t, w, []Content{c})
	do(t, w, Op{Verb: Rename, Set: c.Set, With: "Y"})
	c.Name = "Y"
	expect(t, w, []string{"X", "Y"}, c)
	do(t, w, Op{Verb: Flush, Set: c.Set}, Op{Verb: Flush, Set: c.Set})
	clear(c.Entries)
	expect(t, w, []string{"X", "Y"}, c)
}

func testDefaults(t *testing.T, w world) {
	t.Helper()
	plain := Set{Name: "X", Type: HashIP, Family: model.IPv4}
	do(t, w, Op{Verb: Create, Set: plain, HashSize: 100}, Op{Verb: Create, Set: plain, HashSize: 3000})
	plain.MaxElem = DefaultMaxElem
	expect(t, w, []string{"X"}, Content{plain, map[Entry]uint32{}})
	do(t, w, Op{Verb: Create, Set: plain})
}

func testInUse(t *testing.T, w world) {
	t.Helper()
	c := Content{Set{Name: "X", Type: HashIP, Family: model.IPv4, MaxElem: 10}, map[Entry]uint32{{Addr: addr("10.0.0.1")}: 0}}
	fill(t, w, []Content{c})
	w.use(t, "X")
	for i, err := range w.Apply(t.Context(), []Op{
		{Verb: Destroy, Set: c.Set}, {Verb: Destroy, Set: c.Set, Strict: true}, {Verb: Rename, Set: c.Set, With: "Y"},
	}) {
		if !errors.Is(err, ErrInUse) || !errors.Is(err, kernel.ErrConflict) {
			t.Errorf("op %d: error %v, want one that the set is in use", i, err)
		}
	}
	expect(t, w, []string{"X", "Y"}, c)
	do(t, w, Op{Verb: Flush, Set: c.Set}, Op{Verb: Add, Set: c.Set, Entry: Entry{Addr: addr("10.0.0.9")}})
}

func testMessages(t *testing.T, w world) {
	t.Helper()
	c := Content{Set{Name: "X", Type: HashIP, Family: model.IPv4, MaxElem: 10}, map[Entry]uint32{}}
	counted := func(want int, what string, act func()) {
		t.Helper()
		before := w.sent()
		act()
		if got := w.sent() - before; got != want {
			t.Errorf("%s: %d messages, want %d", what, got, want)
		}
	}
	counted(3, "ops of which one is malformed", func() {
		w.Apply(t.Context(), []Op{
			{Verb: Create, Set: c.Set},
			{Verb: Add, Set: c.Set},
			{Verb: Add, Set: c.Set, Entry: Entry{Addr: addr("10.0.0.1")}},
			{Verb: Destroy, Set: Set{Name: "NONE"}},
		})
	})
	counted(2, "reading two sets", func() { mustRead(t, w, "X", "NONE") })
	counted(1, "listing", func() {
		if _, err := w.List(t.Context(), nil); err != nil {
			t.Error(err)
		}
	})
	counted(0, "nothing to do", func() { do(t, w); mustRead(t, w) })
	counted(0, "probing", func() {
		if _, err := w.Probe(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A refusal is an Op, and what must be said of it.
type refused struct {
	op    Op
	class error // a class, or what says more; nil for no class
	text  string
}

// testRefused hands over one bad Op between two good ones each, which must take effect.
func testRefused(t *testing.T, w world, tests map[string]refused) {
	t.Helper()
	good := Set{Name: "GOOD", Type: HashIPPort, Family: model.IPv4, MaxElem: 1000}
	do(t, w, Op{Verb: Create, Set: good})
	port := uint16(0)
	for what, tc := range tests {
		port++
		before := Entry{Addr: addr("10.0.1.1"), Proto: model.TCP, Port: port}
		after := Entry{Addr: addr("10.0.1.2"), Proto: model.TCP, Port: port}
		errs := w.Apply(t.Context(), []Op{{Verb: Add, Set: good, Entry: before}, tc.op, {Verb: Add, Set: good, Entry: after}})
		if errs[0] != nil || errs[2] != nil {
			t.Errorf("%s: those around it failed: %v, %v", what, errs[0], errs[2])
		}
		var step *StepError
		if !errors.As(errs[1], &step) || tc.class != nil && !errors.Is(errs[1], tc.class) || tc.class == nil && step.Class != nil ||
			!strings.Contains(fmt.Sprint(errs[1]), tc.text) {
			t.Errorf("%s: error %v, want class %v and %q", what, errs[1], tc.class, tc.text)
		}
		got := mustRead(t, w, "GOOD")
		for _, e := range []Entry{before, after} {
			if _, ok := got[0].Entries[e]; !ok {
				t.Errorf("%s: the Op around it for %v had no effect", what, e)
			}
		}
	}
}

func testRefusals(t *testing.T, w world) {
	t.Helper()
	hash := Set{Name: "H", Type: HashIPPort, Family: model.IPv4, MaxElem: 1000}
	full := Set{Name: "FULL", Type: HashIP, Family: model.IPv4, MaxElem: 1}
	ports := Set{Name: "PORTS", Type: BitmapPort}
	six := Set{Name: "SIX", Type: HashIP, Family: model.IPv6, MaxElem: 10}
	do(t, w, Op{Verb: Create, Set: hash}, Op{Verb: Create, Set: full}, Op{Verb: Create, Set: ports}, Op{Verb: Create, Set: six},
		Op{Verb: Add, Set: full, Entry: Entry{Addr: addr("10.0.0.1")}})
	entry := Entry{Addr: addr("10.0.0.1"), Proto: model.TCP, Port: 1}
	nets := Set{Name: "N", Type: HashIPPortNet, Family: model.IPv4, MaxElem: 1000}
	pairs := Set{Name: "L", Type: HashIPPortIP, Family: model.IPv4, MaxElem: 1000}
	none := Set{Name: "NONE", Type: HashIP, Family: model.IPv4}
	changed := func(change func(*Set)) Op {
		s := hash
		change(&s)
		return Op{Verb: Create, Set: s}
	}
	add := func(s Set, e Entry) Op { return Op{Verb: Add, Set: s, Entry: e} }
	long := strings.Repeat("x", 32)
	testRefused(t, w, map[string]refused{
		"another maxelem":          {changed(func(s *Set) { s.MaxElem = 2000 }), kernel.ErrConflict, "with other properties"},
		"marks besides":            {changed(func(s *Set) { s.Marks = true }), ErrExists, "with other properties"},
		"counters besides":         {changed(func(s *Set) { s.Counters = true }), ErrExists, "with other properties"},
		"comments besides":         {changed(func(s *Set) { s.Comments = true }), ErrExists, "with other properties"},
		"timeouts besides":         {changed(func(s *Set) { s.Timeouts = true }), ErrExists, "with other properties"},
		"another type's set":       {changed(func(s *Set) { s.Type = HashIP }), ErrExists, "with other properties"},
		"an unknown type":          {changed(func(s *Set) { s.Type = "hash:wonder" }), kernel.ErrInvalid, "type of set"},
		"unknown properties":       {changed(func(s *Set) { s.Foreign = true }), kernel.ErrInvalid, "not all of its properties"},
		"no family":                {changed(func(s *Set) { s.Family = 0 }), kernel.ErrInvalid, "needs a family"},
		"half a second":            {changed(func(s *Set) { s.Timeouts, s.Timeout = true, time.Second/2 }), kernel.ErrInvalid, "whole seconds"},
		"a timeout without any":    {changed(func(s *Set) { s.Timeout = time.Second }), kernel.ErrInvalid, "without timeouts"},
		"ports with a family":      {Op{Verb: Create, Set: Set{Name: "Q", Type: BitmapPort, Family: model.IPv4}}, kernel.ErrInvalid, "no family"},
		"a long name":              {Op{Verb: Create, Set: Set{Name: long, Type: HashIP, Family: model.IPv4}}, kernel.ErrInvalid, "31 bytes"},
		"no name to destroy":       {Op{Verb: Destroy}, kernel.ErrInvalid, "31 bytes"},
		"no name to flush":         {Op{Verb: Flush}, kernel.ErrInvalid, "31 bytes"},
		"no verb":                  {Op{Set: hash}, kernel.ErrInvalid, "no verb"},
		"adding to no set":         {add(none, Entry{Addr: addr("10.0.0.1")}), ErrMissing, "no such set: create it first"},
		"removing from no set":     {Op{Verb: Remove, Set: none, Entry: Entry{Addr: addr("10.0.0.1")}}, nil, "no such set"},
		"flushing no set":          {Op{Verb: Flush, Set: none}, ErrMissing, "no such set"},
		"renaming no set":          {Op{Verb: Rename, Set: none, With: "Q"}, ErrMissing, "no such set"},
		"renaming to another's":    {Op{Verb: Rename, Set: hash, With: "FULL"}, ErrExists, "new name is there"},
		"renaming to itself":       {Op{Verb: Rename, Set: hash, With: "H"}, ErrExists, "new name is there"},
		"renaming to a long name":  {Op{Verb: Rename, Set: hash, With: long}, kernel.ErrInvalid, "31 bytes"},
		"swapping no set":          {Op{Verb: Swap, Set: none, With: "H"}, ErrMissing, "no such set"},
		"swapping with no set":     {Op{Verb: Swap, Set: hash, With: "NONE"}, ErrMissing, "no set NONE"},
		"a swap of two types":      {Op{Verb: Swap, Set: hash, With: "FULL"}, kernel.ErrConflict, "different types"},
		"a swap of two families":   {Op{Verb: Swap, Set: full, With: "SIX"}, kernel.ErrConflict, "different types or families"},
		"a full set":               {add(full, Entry{Addr: addr("10.0.0.2")}), ErrFull, "full: it has maxelem entries"},
		"another family":           {add(hash, Entry{Addr: addr("fd00::1"), Proto: model.TCP, Port: 1}), kernel.ErrInvalid, "IPv4"},
		"IPv4 in IPv6's form":      {add(hash, Entry{Addr: addr("::ffff:1.2.3.4"), Proto: model.TCP, Port: 1}), kernel.ErrInvalid, "IPv4"},
		"a zone":                   {add(six, Entry{Addr: addr("fe80::1%lo")}), kernel.ErrInvalid, "IPv6"},
		"another form":             {add(hash, Entry{Addr: addr("10.0.0.1")}), kernel.ErrInvalid, "form"},
		"a port too many":          {add(full, Entry{Addr: addr("10.0.0.1"), Port: 1}), kernel.ErrInvalid, "form"},
		"nothing":                  {add(ports, Entry{Addr: addr("10.0.0.1")}), kernel.ErrInvalid, "form"},
		"a wrong idea of the set":  {add(Set{Name: "SIX", Type: HashIP, Family: model.IPv4}, Entry{Addr: addr("10.0.0.1")}), kernel.ErrConflict, "another type or family"},
		"a mark that is not kept":  {Op{Verb: Add, Set: hash, Entry: entry, Mark: 1}, kernel.ErrInvalid, "no marks"},
		"an address of zeros":      {add(full, Entry{Addr: addr("0.0.0.0")}), kernel.ErrInvalid, "zeros"},
		"zeros in IPv6":            {add(six, Entry{Addr: addr("::")}), kernel.ErrInvalid, "zeros"},
		"a network of everything":  {add(nets, Entry{entry.Addr, model.TCP, 1, network("0.0.0.0/0")}), kernel.ErrInvalid, "1 bit"},
		"a network with host bits": {add(nets, Entry{entry.Addr, model.TCP, 1, network("10.0.0.1/8")}), kernel.ErrInvalid, "host bits"},
		"a network for an address": {add(pairs, Entry{entry.Addr, model.TCP, 1, network("10.0.0.0/8")}), kernel.ErrInvalid, "second address"},
	})
}

func testStrict(t *testing.T, w world) {
	t.Helper()
	s := Set{Name: "S", Type: HashIP, Family: model.IPv4, MaxElem: 1}
	in, out := Entry{Addr: addr("10.0.0.1")}, Entry{Addr: addr("10.0.0.2")}
	do(t, w, Op{Verb: Create, Set: s, Strict: true}, Op{Verb: Add, Set: s, Entry: out, Strict: true},
		Op{Verb: Remove, Set: s, Entry: out, Strict: true}, Op{Verb: Add, Set: s, Entry: in, Strict: true})
	none := Set{Name: "NONE"}
	testRefused(t, w, map[string]refused{
		"a set that is there":          {Op{Verb: Create, Set: s, Strict: true}, ErrExists, "is there already"},
		"an entry that is there":       {Op{Verb: Add, Set: s, Entry: in, Strict: true}, ErrExists, "in the set already"},
		"an entry that is not there":   {Op{Verb: Remove, Set: s, Entry: out, Strict: true}, ErrMissing, "not in the set"},
		"destroying what is not there": {Op{Verb: Destroy, Set: none, Strict: true}, ErrMissing, "no such set"},
	})
	do(t, w, Op{Verb: Destroy, Set: s, Strict: true})
}

func testMany(t *testing.T, w world) {
	t.Helper()
	want := Content{big(), map[Entry]uint32{}}
	for _, e := range lots(10000) {
		want.Entries[e] = 0
	}
	fill(t, w, []Content{want})
	expect(t, w, []string{"BIG"}, want)
}

func big() Set { return Set{Name: "BIG", Type: HashIPPort, Family: model.IPv4, MaxElem: 1 << 20} }

// lots gives n entries for big.
func lots(n int) []Entry {
	out := make([]Entry, n)
	for i := range out {
		out[i] = Entry{Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), Proto: model.TCP, Port: 80}
	}
	return out
}

func testProbe(t *testing.T, w world) {
	t.Helper()
	got, err := w.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if missing := got.Missing(Types()...); missing != nil {
		t.Errorf("types %v are missing", missing)
	}
	want := Support{Protocol: 7, Types: map[Type]uint8{
		HashIP: 4, HashIPPort: 5, HashIPPortIP: 5, HashIPPortNet: 7, HashNet: 6, BitmapPort: 3,
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("support (-want +got):\n%s", diff)
	}
	if got := got.Missing(HashIP, "hash:wonder"); !slices.Equal(got, []Type{"hash:wonder"}) {
		t.Errorf("missing %v, want the unknown type", got)
	}
}

func testEnded(t *testing.T, w world) {
	t.Helper()
	fill(t, w, sets()[:1])
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, read := w.Read(ctx, []string{"A4"})
	_, list := w.List(ctx, nil)
	errs := w.Apply(ctx, []Op{{Verb: Destroy, Set: Set{Name: "A4"}}})
	for i, err := range append(errs, read, list) {
		var step *StepError
		if !errors.Is(err, context.Canceled) || !errors.As(err, &step) {
			t.Errorf("call %d: error %v, want the context's in a StepError", i, err)
		}
	}
	if got := mustRead(t, w, "A4"); len(got) != 1 {
		t.Error("the set is gone, although the context had ended")
	}
}
