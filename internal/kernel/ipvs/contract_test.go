package ipvs

import (
	"context"
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

// A subject is what the contract is about.
type subject interface {
	Table
	Engine
	Sent() int
}

func TestFakeKeepsTheContract(t *testing.T) {
	testContract(t, func(*testing.T) subject { return NewFake("rr", "wlc", "sh") })
}

func TestKernelKeepsTheContract(t *testing.T) {
	testContract(t, func(t *testing.T) subject {
		t.Helper()
		return openKernel(t)
	})
}

// openKernel gives the kernel's table in a network namespace of the test's own.
func openKernel(t *testing.T) *Kernel {
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
		{
			Key{Family: model.IPv4, Proto: model.SCTP, Addr: web().Addr},
			Properties{Scheduler: "sh", Flags: Scheduler1 | Scheduler2},
			nil,
		},
		{
			Key{Family: model.IPv4, Mark: 0x80001234},
			Properties{"rr", Persistent, 3 * time.Hour, 24},
			to("10.60.1.11:8080", "10.60.1.12:0"),
		},
		{
			Key{Family: model.IPv4, Proto: model.UDP, Addr: at("10.70.0.2:0")},
			Properties{"rr", Persistent | OnePacket, maxTimeout, 1},
			to("10.60.1.11:0"),
		},
		{
			Key{Family: model.IPv4, Proto: model.TCP, Addr: at("10.70.0.2:80")}, rr(), []Destination{
				{Addr: at("10.60.1.11:80"), Weight: 3, Method: Route, Upper: 1000, Lower: 900},
				{Addr: at("10.60.1.12:80"), Weight: 3, Upper: maxThreshold, Lower: 1},
				{Addr: at("[fd60:1::11]:80"), Weight: 65535, Method: Tunnel, Upper: 7},
			},
		},
		{
			Key{Family: model.IPv6, Proto: model.TCP, Addr: at("[fd70::1]:443")},
			Properties{Scheduler: "rr", Flags: Persistent, Timeout: time.Second, Prefix: 64},
			to("[fd60:1::11]:8443"),
		},
		{Key{Family: model.IPv6, Proto: model.UDP, Addr: at("[fd70::1]:443")}, rr(), []Destination{
			{Addr: at("10.60.1.11:443"), Weight: 1, Method: Tunnel},
		}},
		{Key{Family: model.IPv6, Mark: 0x80001234}, Properties{"rr", Persistent, time.Minute, 127}, to("[fd60:1::11]:8443")},
	}
}

func fill(t *testing.T, table subject, list []Server) {
	t.Helper()
	var ops []Op
	for _, s := range list {
		ops = append(ops, Op{Verb: AddServer, Key: s.Key, Properties: s.Properties})
		for _, d := range s.Destinations {
			ops = append(ops, Op{
				Verb: AddDestination, Key: s.Key, To: d.Addr, Weight: d.Weight, Method: d.Method, Upper: d.Upper, Lower: d.Lower,
			})
		}
	}
	do(t, table, ops...)
}

// do carries out what must not fail.
func do(t *testing.T, table subject, ops ...Op) {
	t.Helper()
	for i, err := range table.Apply(t.Context(), ops) {
		if err != nil {
			t.Fatalf("op %d: %v", i, err)
		}
	}
}

func expect(t *testing.T, table subject, want ...Server) {
	t.Helper()
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		var mine, bare []Server
		for _, s := range want {
			if s.Family == family {
				slices.SortFunc(s.Destinations, func(a, b Destination) int { return a.Addr.Compare(b.Addr) })
				mine, bare = append(mine, s), append(bare, Server{Key: s.Key, Properties: s.Properties})
			}
		}
		byKey := func(a, b Server) int { return a.Compare(b.Key) }
		slices.SortFunc(mine, byKey)
		slices.SortFunc(bare, byKey)
		opts := cmp.Options{cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })}
		got, err := table.List(t.Context(), family)
		if diff := cmp.Diff(mine, got, opts); diff != "" || err != nil {
			t.Errorf("%s servers: %v (-want +got):\n%s", family, err, diff)
		}
		got, err = table.Servers(t.Context(), family)
		if diff := cmp.Diff(bare, got, opts); diff != "" || err != nil {
			t.Errorf("%s servers without destinations: %v (-want +got):\n%s", family, err, diff)
		}
	}
}

func testContract(t *testing.T, open func(*testing.T) subject) {
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
		kept := Destination{Addr: at("10.60.1.11:8080"), Weight: 65535, Method: Tunnel, Upper: 9, Lower: 9}
		do(t, table,
			Op{Verb: EditServer, Key: web(), Properties: sticky},
			Op{Verb: EditDestination, Key: web(), To: kept.Addr, Weight: 65535, Method: Tunnel, Upper: 9, Lower: 9},
			Op{Verb: RemoveDestination, Key: web(), To: at("10.60.1.12:8080")},
			Op{Verb: RemoveServer, Key: all[1].Key})
		all[0].Properties, all[0].Destinations = sticky, []Destination{kept}
		all = slices.Delete(all, 1, 2)
		expect(t, table, all...)
		do(t, table, // back to what is not set
			Op{Verb: EditServer, Key: web(), Properties: rr()},
			Op{Verb: EditDestination, Key: web(), To: kept.Addr})
		all[0].Properties, all[0].Destinations = rr(), []Destination{{Addr: kept.Addr}}
		expect(t, table, all...)
	})
	t.Run("everything can be removed again", func(t *testing.T) {
		table := open(t)
		all := servers()
		fill(t, table, all)
		for _, s := range all {
			for _, d := range s.Destinations {
				do(t, table, Op{Verb: RemoveDestination, Key: s.Key, To: d.Addr})
			}
			do(t, table, Op{Verb: RemoveServer, Key: s.Key})
		}
		expect(t, table)
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
		before := table.Sent()
		fill(t, table, want)
		if got := table.Sent() - before; got != 2000 {
			t.Errorf("%d messages for 2000 changes", got)
		}
		expect(t, table, want...)
	})
	t.Run("listings cost what they say", func(t *testing.T) {
		table := open(t)
		all := servers()
		fill(t, table, all)
		before := table.Sent()
		for _, f := range []model.Family{model.IPv4, model.IPv6} {
			if _, err := table.List(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}
		// Two listings of servers, one of destinations each, and one server of IPv4 has none.
		if got, want := table.Sent()-before, 2+len(all)+1; got != want {
			t.Errorf("two listings took %d messages, want %d", got, want)
		}
	})
	t.Run("schedulers", func(t *testing.T) { testSchedulers(t, open(t)) })
	t.Run("timeouts", func(t *testing.T) { testTimeouts(t, open(t)) })
	t.Run("nothing is done when there is no time", func(t *testing.T) {
		table := open(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := table.List(ctx, model.IPv4)
		_, err2 := table.Destinations(ctx, web())
		errs := append(table.Apply(ctx, []Op{{Verb: AddServer, Key: web(), Properties: rr()}}), err, err2,
			table.TryScheduler(ctx, "rr"), table.SetTimeouts(ctx, Timeouts{TCP: time.Minute}),
			table.Connections(ctx, func(Connection) bool { return true }))
		for i, err := range errs {
			var step *StepError
			if !errors.Is(err, context.Canceled) || !errors.As(err, &step) || step.Class != nil {
				t.Errorf("call %d: got %v, want the context's error without a class", i, err)
			}
		}
		expect(t, table)
	})
	t.Run("what there is", func(t *testing.T) {
		got, err := open(t).Info(t.Context())
		if err != nil || !strings.HasPrefix(got.Version, "1.2.") || got.Buckets < 256 || got.Buckets&(got.Buckets-1) != 0 {
			t.Errorf("got %+v, %v; want version 1.2.x and a power of two of buckets", got, err)
		}
	})
}

func testSchedulers(t *testing.T, table subject) {
	t.Helper()
	foreign := Server{Key{Family: model.IPv4, Proto: model.TCP, Addr: at("0.0.0.0:1")}, rr(), []Destination{{Addr: at("10.60.1.11:80")}}}
	fill(t, table, []Server{foreign})
	for name, want := range map[string]error{
		"rr": nil, "sh": nil, "wonder": ErrScheduler, "": kernel.ErrInvalid, "rr\x00": kernel.ErrInvalid, "../rr": kernel.ErrInvalid,
		"none": kernel.ErrInvalid, strings.Repeat("x", 15): ErrScheduler, strings.Repeat("x", 16): kernel.ErrInvalid,
	} {
		var step *StepError
		err := table.TryScheduler(t.Context(), name)
		if !errors.Is(err, want) || err != nil && (!errors.As(err, &step) || step.Op != "try") {
			t.Errorf("scheduler %q: got %v, want %v", name, err, want)
		}
		if errors.Is(err, ErrScheduler) && !errors.Is(err, kernel.ErrUnsupported) {
			t.Errorf("scheduler %q: %v is of another class than unsupported", name, err)
		}
	}
	expect(t, table, foreign)
	// Nothing of others' is taken, and it is said.
	for port := range uint16(trialPorts) {
		k := foreign.Key
		k.Addr = netip.AddrPortFrom(k.Addr.Addr(), port+1)
		if port > 0 {
			do(t, table, Op{Verb: AddServer, Key: k, Properties: rr()})
		}
	}
	if err := table.TryScheduler(t.Context(), "rr"); !errors.Is(err, kernel.ErrConflict) {
		t.Errorf("with servers of others at every key: got %v, want a conflict", err)
	}
	if got, err := table.Servers(t.Context(), model.IPv4); err != nil || len(got) != trialPorts {
		t.Errorf("%d servers of others are left, %v; want %d", len(got), err, trialPorts)
	}
}

func testTimeouts(t *testing.T, table subject) {
	t.Helper()
	read := func(want Timeouts) {
		t.Helper()
		if got, err := table.Timeouts(t.Context()); err != nil || got != want {
			t.Errorf("timeouts %+v, %v; want %+v", got, err, want)
		}
	}
	read(Timeouts{TCP: 15 * time.Minute, TCPFin: 2 * time.Minute, UDP: 5 * time.Minute})
	for _, set := range []Timeouts{{TCP: time.Second, UDP: 2 * time.Second}, {TCPFin: longestTimeout}, {}} {
		if err := table.SetTimeouts(t.Context(), set); err != nil {
			t.Error(err)
		}
	}
	want := Timeouts{TCP: time.Second, TCPFin: longestTimeout, UDP: 2 * time.Second}
	read(want)
	for _, bad := range []Timeouts{
		{TCP: -time.Second}, {UDP: 1500 * time.Millisecond}, {TCP: time.Minute, TCPFin: longestTimeout + time.Second},
	} {
		if err := table.SetTimeouts(t.Context(), bad); !errors.Is(err, kernel.ErrInvalid) {
			t.Errorf("%+v: got %v, want it refused as invalid", bad, err)
		}
	}
	read(want)
}

// testRefusals hands over one bad Op between two good ones each, which must take effect.
func testRefusals(t *testing.T, table subject) {
	t.Helper()
	none := Key{Family: model.IPv4, Proto: model.TCP, Addr: at("10.70.0.9:80")}
	six := Key{Family: model.IPv6, Proto: model.TCP, Addr: at("10.70.0.9:80")}
	portless := Key{Family: model.IPv4, Proto: model.TCP, Addr: at("10.70.0.9:0")}
	both := Key{Family: model.IPv4, Mark: 1, Addr: at("10.70.0.9:1")}
	edit := func(p Properties) Op { return Op{Verb: EditServer, Key: web(), Properties: p} }
	mapped := Key{Family: model.IPv4, Proto: model.TCP, Addr: at("[::ffff:10.70.0.9]:80")}
	zoned := Key{Family: model.IPv6, Proto: model.TCP, Addr: at("[fe80::1%lo]:80")}
	to := func(s string, m Method) Op { return Op{Verb: AddDestination, Key: web(), To: at(s), Method: m} }
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
		"all ports without persistence":       {Op{Verb: AddServer, Key: portless, Properties: rr()}, kernel.ErrInvalid},
		"a mark and an address":               {Op{Verb: RemoveServer, Key: both}, kernel.ErrInvalid},
		"persistence without a timeout":       {edit(Properties{Scheduler: "rr", Flags: Persistent}), kernel.ErrInvalid},
		"a long name for a scheduler":         {edit(Properties{Scheduler: strings.Repeat("x", 16)}), kernel.ErrInvalid},
		"a timeout that is not whole seconds": {edit(Properties{"rr", Persistent, 1500 * time.Millisecond, 0}), kernel.ErrInvalid},
		"a timeout that some kernels wrap":    {edit(Properties{"rr", Persistent, maxTimeout + time.Second, 0}), kernel.ErrInvalid},
		"a timeout without persistence":       {edit(Properties{"rr", 0, time.Minute, 0}), kernel.ErrInvalid},
		"a prefix without persistence":        {edit(Properties{"rr", 0, 0, 24}), kernel.ErrInvalid},
		"a prefix of all bits":                {edit(Properties{"rr", Persistent, time.Minute, 32}), kernel.ErrInvalid},
		"a mask that is no prefix":            {edit(Properties{"rr", Persistent, time.Minute, OddPrefix}), kernel.ErrInvalid},
		"flags that nobody knows":             {edit(Properties{"rr", 0x40, 0, 0}), kernel.ErrInvalid},
		"single packets of TCP":               {edit(Properties{"rr", OnePacket, 0, 0}), kernel.ErrInvalid},
		"the scheduler that chooses nothing":  {edit(Properties{Scheduler: "none"}), kernel.ErrInvalid},
		"no scheduler":                        {edit(Properties{}), kernel.ErrInvalid},
		"another protocol":                    {Op{Verb: RemoveServer, Key: Key{Family: model.IPv4, Proto: 50, Addr: none.Addr}}, kernel.ErrInvalid},
		"no family":                           {Op{Verb: RemoveServer, Key: Key{Proto: model.TCP, Addr: none.Addr}}, kernel.ErrInvalid},
		"no address":                          {Op{Verb: RemoveServer, Key: Key{Family: model.IPv6, Proto: model.TCP}}, kernel.ErrInvalid},
		"IPv4 in the form of IPv6":            {Op{Verb: AddServer, Key: mapped, Properties: rr()}, kernel.ErrInvalid},
		"an address with a zone":              {Op{Verb: AddServer, Key: zoned, Properties: rr()}, kernel.ErrInvalid},
		"a destination in the form of IPv6":   {to("[::ffff:10.60.1.13]:80", 0), kernel.ErrInvalid},
		"a destination with a zone":           {to("[fe80::1%lo]:80", Tunnel), kernel.ErrInvalid},
		"a destination that is link-local":    {to("[fe80::1]:80", Tunnel), kernel.ErrInvalid},
		"no destination":                      {Op{Verb: AddDestination, Key: web()}, kernel.ErrInvalid},
		"a destination that is nowhere":       {to("0.0.0.0:80", 0), kernel.ErrInvalid},
		"a destination that is many":          {to("224.0.0.1:80", 0), kernel.ErrInvalid},
		"a destination that is everybody":     {to("255.255.255.255:80", 0), kernel.ErrInvalid},
		"a destination without a port":        {to("10.60.1.13:0", 0), kernel.ErrInvalid},
		"a route to the other family":         {to("[fd60::1]:80", Route), kernel.ErrInvalid},
		"a method that cannot be asked for":   {to("10.60.1.13:80", LocalNode), kernel.ErrInvalid},
		"a method that is none":               {to("10.60.1.13:80", 5), kernel.ErrInvalid},
		"a lower threshold above the upper":   {Op{Verb: EditDestination, Key: web(), To: there, Weight: 5, Upper: 4, Lower: 5}, kernel.ErrInvalid},
		"a threshold that the kernel refuses": {Op{Verb: EditDestination, Key: web(), To: there, Upper: maxThreshold + 1}, kernel.ErrInvalid},
		"no verb":                             {Op{Key: web()}, kernel.ErrInvalid},
		"a verb that is none":                 {Op{Verb: 99, Key: web()}, kernel.ErrInvalid},
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
