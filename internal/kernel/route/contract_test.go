package route

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/model"
)

// localTable is the number of the routing table that says what is this machine's: RT_TABLE_LOCAL of linux/rtnetlink.h.
const localTable = 255

// own are the machine's addresses in the tests.
func own() []string {
	return []string{"10.20.0.11/32", "10.20.0.12/32", "fd20::11/128", "fd20::12/128"}
}

// A machine is what a contract is tested on.
type machine struct {
	table Table
	// withdraw takes one of the machine's addresses away, down its loopback interface.
	withdraw func(addr string)
	down     func()
}

func TestFakeKeepsTheContract(t *testing.T) {
	testContract(t, func(*testing.T) machine {
		f := NewFake(func(a netip.Addr) bool {
			for _, text := range own() {
				if netip.MustParsePrefix(text).Addr() == a {
					return true
				}
			}
			return false
		})
		return machine{f, func(a string) { f.Withdraw(addr(a)) }, func() { f.SetDown(true) }}
	})
}

func TestKernelKeepsTheContract(t *testing.T) {
	testContract(t, func(t *testing.T) machine {
		t.Helper()
		lo := isolate(t)
		return machine{
			Kernel{},
			func(a string) { must(t, netlink.AddrDel(lo, hostAddr(t, a))) },
			func() { must(t, netlink.LinkSetDown(lo)) },
		}
	})
}

// isolate gives the loopback interface of a namespace of the test's own, with the machine's addresses on it.
func isolate(t testing.TB) netlink.Link {
	t.Helper()
	kerneltest.Isolate(t)
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	for _, text := range own() {
		must(t, netlink.AddrAdd(lo, hostAddr(t, netip.MustParsePrefix(text).Addr().String())))
	}
	return lo
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// hostNet gives the network of one address alone, in the library's form.
func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

func hostAddr(t testing.TB, s string) *netlink.Addr {
	t.Helper()
	const noDAD = 2 // IFA_F_NODAD: it is usable at once
	a := &netlink.Addr{IPNet: hostNet(addr(s))}
	if addr(s).Is6() {
		a.Flags = noDAD
	}
	return a
}

// do carries out what must not fail.
func do(t testing.TB, table Table, ops ...Op) {
	t.Helper()
	for i, err := range table.Apply(t.Context(), ops) {
		if err != nil {
			t.Fatalf("op %d: %v", i, err)
		}
	}
}

func expect(t *testing.T, table Table, family model.Family, want ...Local) {
	t.Helper()
	got, err := table.List(t.Context(), family)
	must(t, err)
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("%s addresses (-want +got):\n%s", family, diff)
	}
}

func testContract(t *testing.T, open func(*testing.T) machine) {
	t.Helper()
	four := Local{addr("10.70.0.1"), addr("10.20.0.11")}
	six := Local{addr("fd70::1"), addr("fd20::11")}
	t.Run("what was written is read back", func(t *testing.T) {
		bare, bareSix := Local{Addr: addr("10.70.0.2")}, Local{Addr: addr("fd70::2")}
		table := open(t).table
		do(t, table, Op{Add, four}, Op{Add, bareSix}, Op{Add, six}, Op{Add, bare}, Op{Add, four}, Op{Add, six})
		expect(t, table, model.IPv4, four, bare)
		expect(t, table, model.IPv6, six, bareSix)
		do(t, table, Op{Remove, four}, Op{Remove, six}, Op{Remove, six}, Op{Remove, four})
		expect(t, table, model.IPv4, bare)
		expect(t, table, model.IPv6, bareSix)
	})
	t.Run("another source", func(t *testing.T) {
		table := open(t).table
		nextFour, nextSix := Local{four.Addr, addr("10.20.0.12")}, Local{six.Addr, addr("fd20::12")}
		do(t, table, Op{Add, four}, Op{Change, nextFour}, Op{Change, six}, Op{Add, nextSix})
		expect(t, table, model.IPv4, nextFour)
		expect(t, table, model.IPv6, nextSix)
		// What it was does not matter for a removal.
		do(t, table, Op{Change, Local{Addr: four.Addr}}, Op{Remove, four}, Op{Remove, six})
		expect(t, table, model.IPv4)
		expect(t, table, model.IPv6)
	})
	t.Run("refusals", func(t *testing.T) {
		bare := Local{Addr: addr("10.70.0.2")}
		table := open(t).table
		for what, bad := range map[string]Local{
			"a source of somebody else's":       {four.Addr, addr("192.0.2.1")},
			"an IPv6 source of somebody else's": {six.Addr, addr("fd21::1")},
			"a source of another family":        {four.Addr, addr("fd20::11")},
			"an address of one interface only":  {Addr: addr("fe80::1%lo")},
			"an IPv4 address in IPv6's form":    {Addr: addr("::ffff:10.70.0.3")},
			"no address":                        {},
		} {
			errs := table.Apply(t.Context(), []Op{{Add, bare}, {Add, bad}, {Add, six}})
			if errs[0] != nil || errs[2] != nil || !isStep(errs[1], kernel.ErrInvalid) {
				t.Errorf("%s: got %v, want an error about the second alone", what, errs)
			}
		}
		expect(t, table, model.IPv4, bare)
		expect(t, table, model.IPv6, six)
	})
	t.Run("a source that goes stays that of IPv4 routes, and leaves IPv6 routes without one", func(t *testing.T) {
		m := open(t)
		stays := Local{addr("10.70.0.3"), addr("10.20.0.12")}
		do(t, m.table, Op{Add, four}, Op{Add, stays}, Op{Add, six})
		m.withdraw("10.20.0.11")
		m.withdraw("fd20::11")
		expect(t, m.table, model.IPv4, four, stays)
		expect(t, m.table, model.IPv6, Local{Addr: six.Addr})
		if errs := m.table.Apply(t.Context(), []Op{{Add, four}, {Change, six}}); !isStep(errs[0], kernel.ErrInvalid) ||
			!isStep(errs[1], kernel.ErrInvalid) {
			t.Errorf("adding with a source that went: %v", errs)
		}
	})
	t.Run("without the loopback interface there are no IPv6 routes", func(t *testing.T) {
		m := open(t)
		bare := Local{Addr: four.Addr}
		do(t, m.table, Op{Add, bare}, Op{Add, six})
		m.down()
		expect(t, m.table, model.IPv4, bare)
		expect(t, m.table, model.IPv6)
		errs := m.table.Apply(t.Context(), []Op{{Add, Local{Addr: six.Addr}}, {Add, bare}})
		if !isStep(errs[0], nil) || errs[1] != nil {
			t.Errorf("adding: got %v, want an error about IPv6 alone", errs)
		}
	})
	t.Run("ten thousand in one call", func(t *testing.T) {
		table := open(t).table
		for _, l := range []Local{four, six} {
			ops, want := many(10000, l)
			do(t, table, ops...)
			expect(t, table, model.FamilyOf(l.Addr), want...)
		}
	})
}

// many gives the ops that make n addresses local, and what is to be read back then.
func many(n int, like Local) (ops []Op, want []Local) {
	bytes := like.Addr.AsSlice()
	for i := range n {
		bytes[len(bytes)-3], bytes[len(bytes)-2], bytes[len(bytes)-1] = 100, byte(i>>8), byte(i)
		a, _ := netip.AddrFromSlice(bytes)
		l := Local{a, like.Source}
		ops, want = append(ops, Op{Add, l}), append(want, l)
	}
	return ops, want
}

// isStep tells whether an error is a *StepError of a class, or of none.
func isStep(err, class error) bool {
	step, ok := errors.AsType[*StepError](err)
	return ok && step.Class == class && step.Reason != "" //nolint:errorlint // the class itself is meant
}

// What others route to the same address is neither changed nor removed, whatever its metric, and an address of the
// machine stays its own. Neither does ours go with theirs.
func TestRoutesOfOthersAreLeftAlone(t *testing.T) {
	lo := isolate(t)
	table := Kernel{}
	foreign := func(a string, metric, protocol int) *netlink.Route {
		return &netlink.Route{
			Dst: hostNet(addr(a)), LinkIndex: lo.Attrs().Index, Table: localTable, Type: 2, Scope: netlink.SCOPE_HOST,
			Protocol: netlink.RouteProtocol(protocol), Priority: metric,
		}
	}
	const static = 4
	for _, r := range []*netlink.Route{
		foreign("10.70.0.9", 0, static), foreign("10.70.0.9", 7, static), foreign("10.70.0.9", 8, Protocol),
		foreign("fd70::9", 7, static), foreign("fd70::9", 8, Protocol),
	} {
		must(t, netlink.RouteAdd(r))
	}
	for a, sources := range map[string][2]string{
		"10.70.0.9": {"10.20.0.11", "10.20.0.12"}, "10.20.0.11": {"10.20.0.11", "10.20.0.12"},
		"fd70::9": {"fd20::11", "fd20::12"}, "fd20::11": {"fd20::11", "fd20::12"},
	} {
		family := model.FamilyOf(addr(a))
		before := routesTo(t, a)
		l := Local{addr(a), addr(sources[1])}
		do(t, table, Op{Add, l})
		expect(t, table, family, l)
		l.Source = addr(sources[0])
		do(t, table, Op{Change, l})
		expect(t, table, family, l)
		if diff := cmp.Diff(append(before, Metric), routesTo(t, a)); diff != "" {
			t.Errorf("%s, metrics of all routes (-want +got):\n%s", a, diff)
		}
		do(t, table, Op{Remove, l}, Op{Remove, l})
		if diff := cmp.Diff(before, routesTo(t, a)); diff != "" {
			t.Errorf("%s, metrics of others' routes after ours went (-want +got):\n%s", a, diff)
		}
	}
}

// routesTo gives the metrics of all local routes to an address, in the order in which they count.
func routesTo(t testing.TB, a string) []int {
	t.Helper()
	family := netlink.FAMILY_V4
	if addr(a).Is6() {
		family = netlink.FAMILY_V6
	}
	list, err := netlink.RouteListFiltered(family, &netlink.Route{Table: localTable}, netlink.RT_FILTER_TABLE)
	must(t, err)
	var out []int
	for _, r := range list {
		if r.Dst != nil && r.Dst.IP.String() == a {
			out = append(out, r.Priority)
		}
	}
	return out
}

// An address that becomes the machine's own, and ceases to be, is local by our route before and after, and meanwhile by
// its own.
func TestRoutesOfOursOutliveAnAddress(t *testing.T) {
	lo := isolate(t)
	table := Kernel{}
	for _, l := range []Local{{addr("10.70.0.1"), addr("10.20.0.11")}, {addr("fd70::1"), addr("fd20::11")}} {
		source := func(want netip.Addr) {
			t.Helper()
			var got netip.Addr
			// The kernel carries out what follows from an IPv6 address a little later.
			for end := time.Now().Add(10 * time.Second); got != want && time.Now().Before(end); {
				routes, err := netlink.RouteGet(l.Addr.AsSlice())
				must(t, err)
				got, _ = netip.AddrFromSlice(routes[0].Src)
				got = got.Unmap()
			}
			if got != want {
				t.Errorf("source of connections to %s: %s, want %s", l.Addr, got, want)
			}
		}
		do(t, table, Op{Add, l})
		source(l.Source)
		a := hostAddr(t, l.Addr.String())
		must(t, netlink.AddrAdd(lo, a))
		source(l.Addr)
		expect(t, table, model.FamilyOf(l.Addr), l)
		must(t, netlink.AddrDel(lo, a))
		source(l.Source)
		expect(t, table, model.FamilyOf(l.Addr), l)
	}
}

// A message says in words what is wrong.
func TestRefusalsAreWorded(t *testing.T) {
	f := NewFake(func(netip.Addr) bool { return false })
	err := f.Apply(t.Context(), []Op{{Add, Local{addr("10.70.0.1"), addr("10.20.0.11")}}})[0]
	const want = "add local address 10.70.0.1 from 10.20.0.11: the source is no address of this machine, " +
		"or the kernel still checks whether another machine has it"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	f.Fail(func(string) error { return os.ErrDeadlineExceeded })
	if _, err := f.List(t.Context(), model.IPv4); !errors.Is(err, os.ErrDeadlineExceeded) || !isStepError(err) {
		t.Errorf("listing: error %v, want a *StepError of the failure asked for", err)
	}
	for i, err := range f.Apply(t.Context(), []Op{{Remove, Local{Addr: addr("10.70.0.1")}}}) {
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("op %d: error %v, want the failure asked for", i, err)
		}
	}
}

func isStepError(err error) bool { _, ok := errors.AsType[*StepError](err); return ok }
