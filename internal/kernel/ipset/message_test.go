package ipset

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// written gives a content as the kernel lists it: the set's properties first, then each entry in a message of its own.
func written(c Content) [][]byte {
	w := writer{version: protocolMax}
	out := [][]byte{w.op(Op{Verb: Create, Set: c.Set}, 0).Data}
	for e, mark := range c.Entries {
		out = append(out, w.message(cmdList, 0, func() {
			w.text(attrSetName, c.Name)
			w.nest(attrADT, func() {
				o := Op{Verb: Add, Set: c.Set, Entry: e, Mark: mark}
				full := writer{version: protocolMax}
				full.entry(o)
				_ = attributes(full.buf, func(kind uint16, value []byte) error { // all but the name
					if kind == attrData {
						w.attr(kind|unix.NLA_F_NESTED, value...)
					}
					return nil
				})
			})
		}).Data)
	}
	return out
}

func TestASetIsReadAsItWasWritten(t *testing.T) {
	for _, want := range sets() {
		var got Content
		for _, m := range written(want) {
			if err := decode(m, &got); err != nil {
				t.Fatalf("%s: %v", want.Name, err)
			}
		}
		if diff := cmp.Diff(want, got, compareAll); diff != "" {
			t.Errorf("set (-want +got):\n%s", diff)
		}
	}
}

// Whatever a message says, what is taken from it are sets whose entries could be put in as they are.
func FuzzDecode(f *testing.F) {
	for _, c := range sets() {
		m := written(c)
		f.Add(m[0], m[len(m)-1])
	}
	f.Fuzz(func(t *testing.T, first, second []byte) {
		var c Content
		if decode(first, &c) != nil || decode(second, &c) != nil {
			return
		}
		for e := range c.Entries {
			if err := (Op{Verb: Remove, Set: Set{Name: "X", Type: c.Type, Family: c.Family}, Entry: e}).check(); err != nil {
				t.Errorf("%s: read entry %+v, but %v", c.Set, e, err)
			}
		}
		if _, known := c.Type.form(); !known && (!c.Foreign || len(c.Entries) != 0) {
			t.Errorf("of a type that is not known, read %v", c)
		}
	})
}

func TestAMalformedMessageIsRefused(t *testing.T) {
	w := writer{version: protocolMax}
	v4 := Set{Name: "X", Type: HashIP, Family: model.IPv4}
	entry := func(fill func()) []byte {
		return w.message(cmdList, 0, func() { w.nest(attrADT, func() { w.nest(attrData, fill) }) }).Data
	}
	for what, m := range map[string][]byte{
		"too short":                   {0, 0},
		"half an attribute":           {0, 0, 0, 0, 8, 0},
		"an attribute without room":   {0, 0, 0, 0, 8, 0, 1, 0},
		"an attribute without length": {0, 0, 0, 0, 0, 0, 1, 0},
		"no address":                  entry(func() {}),
		"another family's address":    entry(func() { w.addr(dataIP, addr("fd00::1")) }),
		"an address of three bytes":   entry(func() { w.nest(dataIP, func() { w.attr(addrIPv4, 1, 2, 3) }) }),
		"IPv4 that is IPv6":           entry(func() { w.nest(dataIP, func() { w.attr(addrIPv6, 1, 2, 3, 4) }) }),
	} {
		c := Content{Set: v4}
		if err := decode(m, &c); !errors.Is(err, errMalformed) || len(c.Entries) != 0 {
			t.Errorf("%s: error %v, read %v", what, err, c.Entries)
		}
	}
}

func TestTheNewestCommonVersionIsSpoken(t *testing.T) {
	tests := []struct{ oldest, newest, want uint8 }{
		{6, 7, 7}, {6, 6, 6}, {0, 6, 6}, {7, 7, 7}, {6, 9, 7}, {7, 9, 7}, {8, 9, 0}, {3, 5, 0},
	}
	for _, tc := range tests {
		got, err := agree(tc.oldest, tc.newest)
		if got != tc.want || (tc.want == 0) != errors.Is(err, kernel.ErrUnsupported) {
			t.Errorf("a kernel of %d to %d: version %d, error %v; want %d", tc.oldest, tc.newest, got, err, tc.want)
		}
	}
}

// The kernel takes all that is said in either version.
func TestTheOldestVersionSaysTheSame(t *testing.T) {
	kerneltest.Isolate(t)
	k, want := NewKernel(), sets()
	k.version = protocolMin
	fill(t, k, want)
	expect(t, k, names(want), want...)
	if got, err := k.List(t.Context(), nil); err != nil || len(got) != len(want) {
		t.Errorf("listed %v, error %v", got, err)
	}
}

func TestAMissingTypeIsToldFromTheRest(t *testing.T) {
	kerneltest.Isolate(t)
	k := NewKernel()
	s, err := k.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = k.revision(t.Context(), s, "hash:wonder")
	got := (Op{Verb: Create, Set: Set{Name: "X", Type: HashNet, Family: model.IPv4}}).refusal(err)
	f := NewFake()
	f.Lack(HashNet)
	fake := f.Apply(t.Context(), []Op{{Verb: Create, Set: Set{Name: "X", Type: HashNet, Family: model.IPv4}}})[0]
	if got.Error() != fake.Error() || !errors.Is(got, kernel.ErrUnsupported) || !strings.Contains(got.Error(), "load its module") {
		t.Errorf("the kernel says %v, the fake %v", got, fake)
	}
	support, err := f.Probe(t.Context())
	if missing := support.Missing(Types()...); err != nil || len(missing) != 1 || missing[0] != HashNet {
		t.Errorf("missing %v, error %v; want hash:net", missing, err)
	}
}

func TestWithoutTheRightEverythingIsRefused(t *testing.T) {
	kerneltest.Isolate(t)
	dropNetAdmin(t)
	k := NewKernel()
	_, read := k.Read(t.Context(), []string{"X"})
	_, list := k.List(t.Context(), nil)
	_, probe := k.Probe(t.Context())
	one := k.Apply(t.Context(), []Op{{Verb: Destroy, Set: Set{Name: "X"}}})
	for i, err := range append(one, read, list, probe) {
		if !errors.Is(err, kernel.ErrUnsupported) || !strings.Contains(err.Error(), "NET_ADMIN") {
			t.Errorf("call %d: error %v, want one that the right is missing", i, err)
		}
	}
}

// dropNetAdmin takes the capability from this thread, which ends with the test.
func dropNetAdmin(t *testing.T) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		t.Fatal(err)
	}
	sets[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &sets[0]); err != nil {
		t.Fatal(err)
	}
}

// An errno that a test lets the fake give is told as the kernel's.
func TestFailuresOfTheFakeAreToldAsTheKernels(t *testing.T) {
	for errno, want := range map[unix.Errno]struct {
		class error
		text  string
	}{
		unix.EINVAL:          {kernel.ErrUnsupported, "load the module ip_set"},
		unix.EPROTONOSUPPORT: {kernel.ErrUnsupported, "load the module nfnetlink"},
		unix.EPERM:           {kernel.ErrUnsupported, "NET_ADMIN"},
		unix.ENOBUFS:         {kernel.ErrBusy, "out of memory"},
		errProtocol:          {kernel.ErrUnsupported, "another version"},
		errMaxSets:           {nil, "max_sets"},
		4242:                 {nil, "error 4242"},
	} {
		f := NewFake()
		f.Fail(func(string) error { return errno })
		_, err := f.Probe(t.Context())
		if want.class != nil && !errors.Is(err, want.class) || !errors.Is(err, errno) || !strings.Contains(err.Error(), want.text) {
			t.Errorf("errno %d: %v; want class %v and %q", int(errno), err, want.class, want.text)
		}
	}
	f := NewFake()
	f.Fail(func(op string) error {
		if op == "add to set X: 10.0.0.1" {
			return unix.ENOMEM
		}
		return nil
	})
	s := Set{Name: "X", Type: HashIP, Family: model.IPv4}
	errs := f.Apply(t.Context(), []Op{{Verb: Create, Set: s}, {Verb: Add, Set: s, Entry: Entry{Addr: addr("10.0.0.1")}}})
	if errs[0] != nil || !errors.Is(errs[1], kernel.ErrBusy) {
		t.Errorf("errors %v, want the second to be busy", errs)
	}
	f.Spoil("X")
	if got := mustRead(t, f, "X"); !got[0].Foreign || len(got[0].Entries) != 0 {
		t.Errorf("read %v, want a foreign set without entries", got)
	}
}

// Others' sets cost no memory where all sets are listed, and nothing where some are read.
func TestForeignSetsCostNoMemory(t *testing.T) {
	kerneltest.Isolate(t)
	k := NewKernel()
	count := func(n int) float64 {
		ops := []Op{{Verb: Create, Set: big()}}
		for _, e := range lots(n) {
			ops = append(ops, Op{Verb: Add, Set: big(), Entry: e})
		}
		do(t, k, ops...)
		return testing.AllocsPerRun(5, func() {
			if got, err := k.List(t.Context(), func(name string) bool { return name == "KUBE" }); err != nil || len(got) != 0 {
				t.Errorf("listed %v, error %v", got, err)
			}
		})
	}
	few, many := count(0), count(5000)
	if many > few+5 {
		t.Errorf("%v allocations beside a set of 5000 entries, %v beside an empty one", many, few)
	}
	s, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := writer{version: protocolMax}
	bytes := 0
	err = s.Dump(t.Context(), w.message(cmdList, 0, func() { w.put32(attrFlags, flagHeaderOnly) }), func(m netlink.Message) error {
		bytes += len(m.Data)
		return nil
	})
	if err != nil || bytes > 500 {
		t.Errorf("the kernel sent %d bytes for one set without its entries, error %v", bytes, err)
	}
}

func TestNetworksOfEverythingAreHalved(t *testing.T) {
	for in, want := range map[string][]string{
		"0.0.0.0/0":    {"0.0.0.0/1", "128.0.0.0/1"},
		"::/0":         {"::/1", "8000::/1"},
		"192.0.2.7/24": {"192.0.2.0/24"},
	} {
		var got []string
		for _, p := range Networks(network(in)) {
			got = append(got, p.String())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", in, diff)
		}
	}
}
