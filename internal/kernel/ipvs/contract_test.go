package ipvs

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestFakeKeepsTheContract(t *testing.T) {
	testContract(t, func(*testing.T) Table { return NewFake("rr", "wlc", "sh") })
}

func TestKernelKeepsTheContract(t *testing.T) {
	testContract(t, func(t *testing.T) Table {
		t.Helper()
		kerneltest.Isolate(t)
		k, err := Open(t.Context())
		if errors.Is(err, kernel.ErrUnsupported) && os.Getenv("TURNOUT_REQUIRE_IPVS") == "" {
			t.Skipf("this kernel has no IPVS; make test-ipvs runs it on one that has: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		return k
	})
}

func at(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func web() Key { return Key{Family: model.IPv4, Proto: model.TCP, Addr: at("10.70.0.1:80")} }

func rr() Properties { return Properties{Scheduler: "rr"} }

// servers are one of each kind.
func servers() []Server {
	to := func(list ...string) []Destination {
		var out []Destination
		for i, a := range list {
			out = append(out, Destination{Addr: at(a), Weight: uint16(i)})
		}
		return out
	}
	return []Server{
		{web(), rr(), to("10.60.1.11:8080", "10.60.1.12:8080")},
		{Key{Family: model.IPv4, Proto: model.UDP, Addr: web().Addr}, Properties{Scheduler: "wlc"}, to("10.60.1.11:53")},
		{Key{Family: model.IPv4, Proto: model.SCTP, Addr: web().Addr}, Properties{"sh", Scheduler1 | Scheduler2, 0}, nil},
		{Key{Family: model.IPv4, Mark: 0x80001234}, Properties{"rr", Persistent, 3 * time.Hour}, to("10.60.1.11:8080")},
		{
			Key{Family: model.IPv6, Proto: model.TCP, Addr: at("[fd70::1]:443")},
			Properties{Scheduler: "rr", Flags: Persistent, Timeout: time.Second},
			to("[fd60:1::11]:8443"),
		},
		{Key{Family: model.IPv6, Mark: 0x80001234}, rr(), to("[fd60:1::11]:8443")},
	}
}

func fill(t *testing.T, table Table, list []Server) {
	t.Helper()
	var ops []Op
	for _, s := range list {
		ops = append(ops, Op{Verb: AddServer, Key: s.Key, Properties: s.Properties})
		for _, d := range s.Destinations {
			ops = append(ops, Op{Verb: AddDestination, Key: s.Key, To: d.Addr, Weight: d.Weight})
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

func expect(t *testing.T, table Table, want ...Server) {
	t.Helper()
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		got, err := table.List(t.Context(), family)
		if err != nil {
			t.Fatal(err)
		}
		mine := slices.DeleteFunc(slices.Clone(want), func(s Server) bool { return s.Family != family })
		less := cmpopts.SortSlices(func(a, b Destination) bool { return a.Addr.Compare(b.Addr) < 0 })
		byKey := cmpopts.SortSlices(func(a, b Server) bool { return a.Compare(b.Key) < 0 })
		opts := cmp.Options{less, byKey, cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })}
		if diff := cmp.Diff(mine, got, opts); diff != "" {
			t.Errorf("%s servers (-want +got):\n%s", family, diff)
		}
	}
}

func testContract(t *testing.T, open func(*testing.T) Table) {
	t.Helper()
	t.Run("what was written is read back", func(t *testing.T) {
		table := open(t)
		fill(t, table, servers())
		expect(t, table, servers()...)
		got, err := table.Destinations(t.Context(), web())
		if err != nil || len(got) != 2 {
			t.Errorf("destinations of one server: %v, %v; want 2", got, err)
		}
		none := web()
		none.Proto = model.SCTP
		none.Addr = at("10.70.9.9:1")
		if got, err := table.Destinations(t.Context(), none); err != nil || len(got) != 0 {
			t.Errorf("destinations of no server: %v, %v; want none", got, err)
		}
	})
	t.Run("changes", func(t *testing.T) {
		table := open(t)
		all := servers()
		fill(t, table, all)
		sticky := Properties{Scheduler: "wlc", Flags: Persistent, Timeout: 10 * time.Minute}
		do(t, table,
			Op{Verb: EditServer, Key: web(), Properties: sticky},
			Op{Verb: EditDestination, Key: web(), To: at("10.60.1.11:8080"), Weight: 65535},
			Op{Verb: RemoveDestination, Key: web(), To: at("10.60.1.12:8080")},
			Op{Verb: RemoveServer, Key: all[1].Key})
		all[0].Properties, all[0].Destinations = sticky, []Destination{{Addr: at("10.60.1.11:8080"), Weight: 65535}}
		expect(t, table, slices.Delete(all, 1, 2)...)
	})
	t.Run("refusals", func(t *testing.T) { testRefusals(t, open(t)) })
	t.Run("a thousand servers in one call", func(t *testing.T) {
		table := open(t)
		var want []Server
		for i := range 1000 {
			vip := netip.AddrFrom4([4]byte{10, 71, byte(i >> 8), byte(i)})
			k := Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.AddrPortFrom(vip, 80)}
			want = append(want, Server{k, rr(), []Destination{{Addr: at("10.60.1.11:8080"), Weight: 1}}})
		}
		fill(t, table, want)
		expect(t, table, want...)
	})
}

// testRefusals hands over one bad Op between two good ones each, which must take effect.
func testRefusals(t *testing.T, table Table) {
	t.Helper()
	none := Key{Family: model.IPv4, Proto: model.TCP, Addr: at("10.70.0.9:80")}
	six := Key{Family: model.IPv6, Proto: model.TCP, Addr: at("10.70.0.9:80")}
	portless := Key{Family: model.IPv4, Proto: model.TCP, Addr: at("10.70.0.9:0")}
	both := Key{Family: model.IPv4, Mark: 1, Addr: at("10.70.0.9:1")}
	edit := func(p Properties) Op { return Op{Verb: EditServer, Key: web(), Properties: p} }
	there, away := at("10.60.1.11:8080"), at("10.60.1.12:8080")
	fill(t, table, []Server{{web(), rr(), []Destination{{Addr: there, Weight: 1}}}})
	tests := map[string]struct {
		op    Op
		class error
	}{
		"a server that is there":              {Op{Verb: AddServer, Key: web(), Properties: rr()}, ErrExists},
		"an unknown scheduler":                {Op{Verb: AddServer, Key: none, Properties: Properties{Scheduler: "wonder"}}, ErrScheduler},
		"another, unknown scheduler":          {edit(Properties{Scheduler: "wonder"}), ErrScheduler},
		"a change of no server":               {Op{Verb: EditServer, Key: none, Properties: rr()}, ErrMissing},
		"a removal of no server":              {Op{Verb: RemoveServer, Key: none}, ErrMissing},
		"a destination of no server":          {Op{Verb: AddDestination, Key: none, To: away}, ErrMissing},
		"a destination that is there":         {Op{Verb: AddDestination, Key: web(), To: there}, ErrExists},
		"a change of no destination":          {Op{Verb: EditDestination, Key: web(), To: away}, ErrMissing},
		"a removal of no destination":         {Op{Verb: RemoveDestination, Key: web(), To: away}, ErrMissing},
		"an address of another family":        {Op{Verb: AddServer, Key: six, Properties: rr()}, kernel.ErrInvalid},
		"a destination of another family":     {Op{Verb: AddDestination, Key: web(), To: at("[fd60::1]:80")}, kernel.ErrInvalid},
		"no port":                             {Op{Verb: AddServer, Key: portless, Properties: rr()}, kernel.ErrInvalid},
		"a mark and an address":               {Op{Verb: RemoveServer, Key: both}, kernel.ErrInvalid},
		"persistence without a timeout":       {edit(Properties{Scheduler: "rr", Flags: Persistent}), kernel.ErrInvalid},
		"a long name for a scheduler":         {edit(Properties{Scheduler: strings.Repeat("x", 16)}), kernel.ErrInvalid},
		"a timeout that is not whole seconds": {edit(Properties{"rr", Persistent, 1500 * time.Millisecond}), kernel.ErrInvalid},
	}
	for what, tc := range tests { // not as subtests, which have threads of their own, outside of the namespace
		errs := table.Apply(t.Context(), []Op{
			{Verb: EditDestination, Key: web(), To: there, Weight: 7},
			tc.op,
			{Verb: EditDestination, Key: web(), To: there, Weight: 1},
		})
		var step *StepError
		if errs[0] != nil || errs[2] != nil || !errors.As(errs[1], &step) || !errors.Is(errs[1], tc.class) {
			t.Errorf("%s: got %v, want %v for the second alone", what, errs, tc.class)
		}
	}
	expect(t, table, Server{web(), rr(), []Destination{{Addr: there, Weight: 1}}})
}

// Whatever bytes come, nothing panics and no address of another length appears.
func FuzzDecode(f *testing.F) {
	for _, s := range servers() {
		for _, v := range []Verb{AddServer, AddDestination} {
			r, err := encode(30, Op{Verb: v, Key: s.Key, Properties: s.Properties, To: at("10.60.1.11:80")})
			if err != nil {
				f.Fatal(err)
			}
			f.Add(r.Data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if s, err := decodeServer(data); err == nil && s.Mark == 0 && model.FamilyOf(s.Addr.Addr()) != s.Family {
			t.Errorf("a server of %s at %s", s.Family, s.Addr)
		}
		if d, err := decodeDestination(data, model.IPv4); err == nil && !d.Addr.IsValid() {
			t.Errorf("a destination without an address")
		}
	})
}
