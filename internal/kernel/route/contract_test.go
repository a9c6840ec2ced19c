package route

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/model"
)

// own are the machine's addresses in the tests.
func own() []string { return []string{"10.20.0.11/32", "10.20.0.12/32", "fd20::11/128"} }

func TestFakeKeepsTheContract(t *testing.T) {
	testContract(t, func(*testing.T) Table {
		return NewFake(func(a netip.Addr) bool {
			return a == addr("10.20.0.11") || a == addr("10.20.0.12") || a == addr("fd20::11")
		})
	})
}

func TestKernelKeepsTheContract(t *testing.T) {
	testContract(t, func(t *testing.T) Table {
		t.Helper()
		isolate(t)
		return Kernel{}
	})
}

func isolate(t *testing.T) {
	t.Helper()
	kerneltest.Isolate(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range own() {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.AddrAdd(lo, a); err != nil {
			t.Fatal(err)
		}
	}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// do carries out what must not fail.
func do(t *testing.T, table Table, ops ...Op) {
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
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("%s routes (-want +got):\n%s", family, diff)
	}
}

func testContract(t *testing.T, open func(*testing.T) Table) {
	t.Helper()
	four := Local{addr("10.70.0.1"), addr("10.20.0.11")}
	six := Local{addr("fd70::1"), addr("fd20::11")}
	bare := Local{Addr: addr("10.70.0.2")}
	t.Run("what was written is read back", func(t *testing.T) {
		table := open(t)
		do(t, table, Op{Add, four}, Op{Add, six}, Op{Add, bare}, Op{Add, four})
		expect(t, table, model.IPv4, four, bare)
		expect(t, table, model.IPv6, six)
		do(t, table, Op{Remove, four}, Op{Remove, six}, Op{Remove, six})
		expect(t, table, model.IPv4, bare)
		expect(t, table, model.IPv6)
	})
	t.Run("another source", func(t *testing.T) {
		table := open(t)
		next := Local{four.Addr, addr("10.20.0.12")}
		do(t, table, Op{Add, four}, Op{Change, next})
		expect(t, table, model.IPv4, next)
	})
	t.Run("refusals", func(t *testing.T) {
		table := open(t)
		for what, bad := range map[string]Local{
			"a source of somebody else's": {four.Addr, addr("192.0.2.1")},
			"a source of another family":  {four.Addr, addr("fd20::11")},
			"no address":                  {},
		} {
			errs := table.Apply(t.Context(), []Op{{Add, bare}, {Add, bad}, {Add, six}})
			var step *StepError
			if errs[0] != nil || errs[2] != nil || !errors.As(errs[1], &step) || !errors.Is(errs[1], kernel.ErrInvalid) {
				t.Errorf("%s: got %v, want an error about the second alone", what, errs)
			}
		}
		expect(t, table, model.IPv4, bare)
	})
	t.Run("ten thousand in one call", func(t *testing.T) {
		table := open(t)
		var ops []Op
		var want []Local
		for i := range 10000 {
			l := Local{netip.AddrFrom4([4]byte{10, 71, byte(i >> 8), byte(i)}), four.Source}
			ops, want = append(ops, Op{Add, l}), append(want, l)
		}
		do(t, table, ops...)
		expect(t, table, model.IPv4, want...)
	})
}

// What others route to the same address is neither changed nor removed, and an address of the machine stays its own.
func TestRoutesOfOthersAreLeftAlone(t *testing.T) {
	isolate(t)
	table := Kernel{}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	const localTable = 255
	foreign := &netlink.Route{
		Dst: &net.IPNet{IP: net.IPv4(10, 70, 0, 9), Mask: net.CIDRMask(32, 32)}, LinkIndex: lo.Attrs().Index, Table: localTable,
		Type: 2, Scope: netlink.SCOPE_HOST, Protocol: 4,
	}
	if err := netlink.RouteAdd(foreign); err != nil {
		t.Fatal(err)
	}
	count := func(a string) int {
		list, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: localTable}, netlink.RT_FILTER_TABLE)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, r := range list {
			if r.Dst != nil && r.Dst.IP.String() == a && r.Protocol != Protocol {
				n++
			}
		}
		return n
	}
	for _, a := range []string{"10.70.0.9", "10.20.0.11"} {
		l := Local{addr(a), addr("10.20.0.12")}
		do(t, table, Op{Add, l})
		expect(t, table, model.IPv4, l)
		l.Source = addr("10.20.0.11")
		do(t, table, Op{Change, l})
		expect(t, table, model.IPv4, l)
		do(t, table, Op{Remove, l}, Op{Remove, l})
		expect(t, table, model.IPv4)
		if count(a) != 1 {
			t.Errorf("%s: %d routes of others left, want 1", a, count(a))
		}
	}
}
