package route

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestFakeDummyKeepsTheContract(t *testing.T) {
	testDeviceContract(t, func(*testing.T) (Device, func()) {
		f := NewFakeDummy()
		return f, func() { f.SetKind("veth") }
	})
}

func TestKernelKeepsTheContractOfDevices(t *testing.T) {
	testDeviceContract(t, func(t *testing.T) (Device, func()) {
		t.Helper()
		kerneltest.Isolate(t)
		return Dummy{UpstreamDevice}, func() {
			must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: UpstreamDevice}, PeerName: "other"}))
		}
	})
}

// ensure makes a device, or skips the test where the kernel has none of its kind.
func ensure(t testing.TB, d Device) {
	t.Helper()
	err := d.Ensure(t.Context())
	if errors.Is(err, kernel.ErrUnsupported) {
		t.Skipf("%v; make test-ipvs runs this in a virtual machine", err)
	}
	must(t, err)
}

func testDeviceContract(t *testing.T, open func(*testing.T) (d Device, other func())) {
	t.Helper()
	four, six := Local{Addr: addr("10.70.0.1")}, Local{Addr: addr("fd70::1")}
	t.Run("what was written is read back", func(t *testing.T) {
		d, _ := open(t)
		ensure(t, d)
		do(t, d, Op{Add, four}, Op{Add, six}, Op{Add, four}, Op{Change, six})
		expect(t, d, model.IPv4, four)
		expect(t, d, model.IPv6, six)
		ensure(t, d)
		expect(t, d, model.IPv4, four)
		// A source does not matter for a removal.
		do(t, d, Op{Remove, Local{four.Addr, addr("10.20.0.11")}}, Op{Remove, four}, Op{Remove, six}, Op{Remove, six})
		expect(t, d, model.IPv4)
		expect(t, d, model.IPv6)
	})
	t.Run("refusals", func(t *testing.T) {
		d, _ := open(t)
		ensure(t, d)
		for what, bad := range map[string]Local{
			"a source":                       {addr("10.70.0.2"), addr("10.20.0.11")},
			"an IPv4 address in IPv6's form": {Addr: addr("::ffff:10.70.0.3")},
			"no address":                     {},
		} {
			errs := d.Apply(t.Context(), []Op{{Add, four}, {Add, bad}, {Add, six}})
			if errs[0] != nil || errs[2] != nil || !isStep(errs[1], kernel.ErrInvalid) {
				t.Errorf("%s: got %v, want an error about the second alone", what, errs)
			}
		}
		expect(t, d, model.IPv4, four)
	})
	t.Run("addresses go with the device", func(t *testing.T) {
		d, _ := open(t)
		ensure(t, d)
		do(t, d, Op{Add, four})
		must(t, d.Delete(t.Context()))
		expect(t, d, model.IPv4)
		must(t, d.Delete(t.Context()))
		ensure(t, d)
		expect(t, d, model.IPv4)
	})
	t.Run("without a device there is nothing, and nothing can be added", func(t *testing.T) {
		d, _ := open(t)
		expect(t, d, model.IPv4)
		must(t, d.Delete(t.Context()))
		for i, err := range d.Apply(t.Context(), []Op{{Add, four}, {Add, six}}) {
			if !isStep(err, nil) {
				t.Errorf("op %d: error %v, want one that says why", i, err)
			}
		}
	})
	t.Run("a device of another kind is left alone", func(t *testing.T) {
		d, other := open(t)
		other()
		_, listing := d.List(t.Context(), model.IPv4)
		for what, err := range map[string]error{
			"ensure": d.Ensure(t.Context()), "delete": d.Delete(t.Context()), "list": listing,
			"apply": d.Apply(t.Context(), []Op{{Add, four}})[0],
		} {
			if !isStep(err, kernel.ErrConflict) {
				t.Errorf("%s: error %v, want a conflict", what, err)
			}
		}
	})
	t.Run("two thousand in one call", func(t *testing.T) {
		d, _ := open(t)
		ensure(t, d)
		for _, l := range []Local{four, six} {
			ops, want := many(2000, l)
			do(t, d, ops...)
			expect(t, d, model.FamilyOf(l.Addr), want...)
		}
	})
}

// Upstream's addresses are known for what they are, and taken over as they are; those that no Service has are nobody's.
func TestKernelAddressesOfUpstreamAreAdopted(t *testing.T) {
	kerneltest.Isolate(t)
	d := Dummy{UpstreamDevice}
	ensure(t, d)
	link, err := netlink.LinkByName(UpstreamDevice)
	must(t, err)
	for _, a := range []string{"10.70.0.1", "fd70::1", "fe80::1"} {
		must(t, netlink.AddrAdd(link, hostAddr(t, a)))
	}
	expect(t, d, model.IPv4, Local{Addr: addr("10.70.0.1")})
	expect(t, d, model.IPv6, Local{Addr: addr("fd70::1")})
	do(t, d, Op{Add, Local{Addr: addr("10.70.0.1")}}, Op{Remove, Local{Addr: addr("fd70::1")}})
	expect(t, d, model.IPv4, Local{Addr: addr("10.70.0.1")})
	expect(t, d, model.IPv6)
	// The same address may be on another interface, and stays there.
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.AddrAdd(lo, hostAddr(t, "10.70.0.1")))
	expect(t, d, model.IPv4, Local{Addr: addr("10.70.0.1")})
	do(t, d, Op{Remove, Local{Addr: addr("10.70.0.1")}})
	if n := len(routesTo(t, "10.70.0.1")); n != 1 {
		t.Errorf("%d local routes to the address of the machine's own, want 1", n)
	}
}

// A kernel without such devices says so, and failures can be had for the asking.
func TestFakeDummyFails(t *testing.T) {
	f := NewFakeDummy()
	f.SetAbsent(true)
	if err := f.Ensure(t.Context()); !isStep(err, kernel.ErrUnsupported) {
		t.Errorf("making a device: error %v, want that there are none", err)
	}
	f.SetAbsent(false)
	var asked []string
	f.Fail(func(op string) error { asked = append(asked, op); return errors.New("no") })
	for what, err := range map[string]error{
		"ensure": f.Ensure(t.Context()), "delete": f.Delete(t.Context()),
	} {
		if !isStepError(err) {
			t.Errorf("%s: error %v, want a *StepError", what, err)
		}
	}
	if len(asked) != 2 || f.Dump() != "" {
		t.Errorf("asked %q, dump %q; want two questions and no device", asked, f.Dump())
	}
	f.Fail(nil)
	must(t, f.Ensure(t.Context()))
	do(t, f, Op{Add, Local{Addr: addr("fd70::1")}}, Op{Add, Local{Addr: addr("10.70.0.1")}})
	if want := "device of kind dummy\nlocal 10.70.0.1\nlocal fd70::1\n"; f.Dump() != want {
		t.Errorf("dump %q, want %q", f.Dump(), want)
	}
}
