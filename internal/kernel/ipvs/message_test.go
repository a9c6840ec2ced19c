package ipvs

import (
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	attr "github.com/mdlayher/netlink"

	"github.com/turnout-proxy/turnout/internal/model"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Written down by hand from linux/ip_vs.h. The numbers are those of a little-endian machine.
func TestAMessageIsWhatTheHeaderSays(t *testing.T) {
	littleEndian(t)
	for what, tc := range map[string]struct {
		op   Op
		want string
	}{
		"add a server": {
			Op{Verb: AddServer, Key: web(), Properties: Properties{"wrr", Persistent | Scheduler1, time.Hour, 24}},
			`01 01 0000  5400 0180
			 0600 0100 0200 0000  0600 0200 0600 0000  1400 0300 0a460001 00000000 00000000 00000000  0600 0400 0050 0000
			 0800 0600 77727200  0c00 0700 09000000 ffffffff  0800 0800 100e0000  0800 0900 ffffff00`,
		},
		"remove a mark's server": {
			Op{Verb: RemoveServer, Key: Key{Family: model.IPv6, Mark: 0x80001234}},
			`03 01 0000  1400 0180  0600 0100 0a00 0000  0800 0500 34120080`,
		},
		"change a destination": {
			Op{Verb: EditDestination, Key: web(), To: at("[fd60::1]:8080"), Weight: 65535, Method: Tunnel, Upper: 9, Lower: 8},
			`06 01 0000  3000 0180
			 0600 0100 0200 0000  0600 0200 0600 0000  1400 0300 0a460001 00000000 00000000 00000000  0600 0400 0050 0000
			 4800 0280
			 1400 0100 fd600000 00000000 00000000 00000001  0600 0200 1f90 0000  0600 0b00 0a00 0000
			 0800 0300 02000000  0800 0400 ffff0000  0800 0500 09000000  0800 0600 08000000`,
		},
	} {
		r, err := encode(30, tc.op)
		if err != nil || r.Kind != 30 {
			t.Errorf("%s: kind %d, %v", what, r.Kind, err)
		}
		if diff := cmp.Diff(hex.Dump(unhex(t, tc.want)), hex.Dump(r.Data)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

// What Linux 6.1 said of a server, with the beginning of its counters, of itself and of its timeouts.
func TestAnswersOfAKernelAreRead(t *testing.T) {
	littleEndian(t)
	server, err := decodeServer(unhex(t, `01010000 68000100 06000100 02000000 06000200 06000000
		14000300 0a460001 00000000 00000000 00000000 06000400 00500000 07000600 72720000 0c000700 02000000 ffffffff
		08000800 00000000 08000900 ffffffff 14000a00 08000100 00000000 08000200 00000000`))
	if diff := cmp.Diff(Server{Key: web(), Properties: rr()}, server, same()); diff != "" || err != nil {
		t.Errorf("server: %v (-want +got):\n%s", err, diff)
	}
	info, err := decodeInfo(unhex(t, "0e010000 08000100 01020100 08000200 00100000"))
	if want := (Info{"1.2.1", 4096}); info != want || err != nil {
		t.Errorf("got %+v, %v; want %+v", info, err, want)
	}
	timeouts, err := decodeTimeouts(unhex(t, "0c010000 08000400 84030000 08000500 78000000 08000600 2c010000"))
	if want := (Timeouts{15 * time.Minute, 2 * time.Minute, 5 * time.Minute}); timeouts != want || err != nil {
		t.Errorf("got %+v, %v; want %+v", timeouts, err, want)
	}
}

func littleEndian(t *testing.T) {
	t.Helper()
	if data := mask(model.IPv6, 1); data[0] != 1 {
		t.Skip("the expected bytes are those of a little-endian machine")
	}
}

// pick gives one of a list.
func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// randomOp gives an Op that passes the check, over few servers and destinations, so that many are met again.
func randomOp(r *rand.Rand) Op {
	for {
		o := Op{Verb: Verb(r.IntN(7)), Weight: uint16(r.Uint32()), Method: pick(r, Masquerade, Route, Tunnel)}
		o.Key = pick(r, Key{Mark: pick(r, uint32(7), 0x80001234)}, Key{Proto: pick(r, model.TCP, model.UDP, model.SCTP)})
		o.Key.Family = pick(r, model.IPv4, model.IPv6)
		if o.Key.Proto != 0 {
			o.Key.Addr = pick(r, at("10.70.0.1:80"), at("10.70.0.1:0"), at("[fd70::1]:80"), at("[fd70::2]:65535"))
		}
		if o.Verb == AddServer || o.Verb == EditServer {
			o.Properties = Properties{
				Scheduler: pick(r, "rr", "wlc", "sh", "wonder"), Flags: Flags(r.Uint32()) & allFlags,
				Timeout: pick(r, 0, time.Second, time.Duration(r.IntN(int(maxTimeout/time.Second)))*time.Second),
				Prefix:  pick(r, 0, uint8(r.IntN(128))),
			}
		}
		if o.Verb >= AddDestination {
			o.To = pick(r, at("10.60.0.1:80"), at("10.60.0.2:0"), at("[fd60::1]:65535"), at("[fd60::2]:0"))
			o.Lower = pick(r, 0, uint32(r.IntN(5)))
			o.Upper = pick(r, o.Lower, maxThreshold)
		}
		if o.check() == nil {
			return o
		}
	}
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 5_000 {
		o := randomOp(r)
		m, err := encode(30, o)
		if err != nil {
			t.Fatalf("%s %s: %v", o.Verb, o.object(), err)
		}
		server, err := decodeServer(m.Data)
		want := Server{Key: o.Key, Properties: o.Properties}
		if diff := cmp.Diff(want, server, same()); diff != "" || err != nil {
			t.Fatalf("%s %s: %v (-want +got):\n%s", o.Verb, o.object(), err, diff)
		}
		if o.Verb != AddDestination && o.Verb != EditDestination {
			continue
		}
		d, err := decodeDestination(m.Data, o.Key.Family)
		wanted := Destination{Addr: o.To, Weight: o.Weight, Method: o.Method, Upper: o.Upper, Lower: o.Lower}
		if diff := cmp.Diff(wanted, d, same()); diff != "" || err != nil {
			t.Fatalf("%s %s: %v (-want +got):\n%s", o.Verb, o.object(), err, diff)
		}
	}
}

func TestMasksOfOthersAreNoPrefixes(t *testing.T) {
	for _, tc := range []struct {
		family model.Family
		mask   []byte
		want   uint8
	}{
		{model.IPv4, []byte{255, 255, 255, 255}, 0},
		{model.IPv4, []byte{255, 255, 255, 254}, 31},
		{model.IPv4, []byte{128, 0, 0, 0}, 1},
		{model.IPv4, []byte{0, 0, 0, 0}, OddPrefix},
		{model.IPv4, []byte{255, 0, 255, 0}, OddPrefix},
		{model.IPv4, []byte{0, 0, 0, 1}, OddPrefix},
		{model.IPv4, nil, OddPrefix},
		{model.IPv6, mask(model.IPv6, 127), 127},
		{model.IPv6, mask(model.IPv6, 0), 0},
		{model.IPv6, mask(model.IPv6, 200), OddPrefix},
		{model.IPv6, []byte{255, 255, 255, 255}, OddPrefix},
	} {
		if got := prefixOf(tc.family, tc.mask); got != tc.want {
			t.Errorf("%s mask %v: got %d, want %d", tc.family, tc.mask, got, tc.want)
		}
	}
}

// Servers of others can be such that we would not make them. They are listed all the same, and do not spoil the rest.
func TestServersOfOthersAreRead(t *testing.T) {
	for what, fill := range map[string]func(*attr.AttributeEncoder){
		"IPv4 in the form of IPv6": func(ae *attr.AttributeEncoder) {
			putKey(ae, Key{Family: model.IPv6, Proto: model.TCP, Addr: at("[::ffff:10.70.0.1]:80")})
		},
		"another protocol": func(ae *attr.AttributeEncoder) { putKey(ae, Key{Family: model.IPv4, Proto: 50, Addr: web().Addr}) },
		"a timeout and a mask for nothing": func(ae *attr.AttributeEncoder) {
			putKey(ae, web())
			putProperties(ae, model.IPv4, Properties{Scheduler: "rr", Timeout: time.Hour, Prefix: 24})
		},
		"an unknown attribute": func(ae *attr.AttributeEncoder) {
			putKey(ae, web())
			ae.Bytes(99, []byte("new"))
		},
	} {
		r, err := request(30, cmdNewServer, func(ae *attr.AttributeEncoder) { nested(ae, attrServer, fill) })
		if err != nil {
			t.Fatal(err)
		}
		s, err := decodeServer(r.Data)
		if err != nil || s.Addr.Port() != 80 || s.Timeout != 0 || s.Prefix != 0 {
			t.Errorf("%s: got %+v, %v; want port 80 and no persistence", what, s, err)
		}
	}
}

func TestAServerThatVanishesWhileListedIsLeftOut(t *testing.T) {
	all := []Server{{Key: web()}, {Key: Key{Family: model.IPv4, Mark: 1}}, {Key: Key{Family: model.IPv4, Mark: 2}}}
	listings := [][]Server{all, {all[0], all[2]}}
	calls := 0
	got, err := gather(func() ([]Server, error) {
		calls++
		return append([]Server(nil), listings[calls-1]...), nil
	}, func(k Key) ([]Destination, error) {
		if k == web() {
			return []Destination{{Addr: at("10.60.0.1:80")}}, nil
		}
		return nil, nil
	})
	want := []Server{{Key: web(), Destinations: []Destination{{Addr: at("10.60.0.1:80")}}}, all[2]}
	if diff := cmp.Diff(want, got, same()); diff != "" || err != nil || calls != 2 {
		t.Errorf("%d listings, %v (-want +got):\n%s", calls, err, diff)
	}
	broken := errors.New("broken")
	for failing := 1; failing <= 2; failing++ {
		calls = 0
		_, err := gather(func() ([]Server, error) {
			if calls++; calls == failing {
				return nil, broken
			}
			return append([]Server(nil), all...), nil
		}, func(Key) ([]Destination, error) { return nil, nil })
		if !errors.Is(err, broken) {
			t.Errorf("listing %d failed: got %v", failing, err)
		}
	}
}

// Whatever bytes come, nothing panics, and what is understood has addresses of its family.
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
	r, err := request(30, cmdSetConfig, func(ae *attr.AttributeEncoder) { putTimeouts(ae, Timeouts{TCP: time.Second}) })
	if err != nil {
		f.Fatal(err)
	}
	f.Add(r.Data)
	sized := func(a netip.Addr, family model.Family) bool { return a.IsValid() && a.BitLen() == bits(family) }
	f.Fuzz(func(t *testing.T, data []byte) {
		if s, err := decodeServer(data); err == nil && s.Mark == 0 && !sized(s.Addr.Addr(), s.Family) {
			t.Errorf("a server of %s at %s", s.Family, s.Addr)
		} else if err == nil && len(s.Scheduler) > len(data) {
			t.Errorf("a scheduler's name of %d bytes in %d", len(s.Scheduler), len(data))
		}
		if d, err := decodeDestination(data, model.IPv4); err == nil && !d.Addr.IsValid() {
			t.Errorf("a destination without an address")
		}
		if i, err := decodeInfo(data); err == nil && len(i.Version) > len("255.255.255") {
			t.Errorf("a version %q", i.Version)
		}
		if ts, err := decodeTimeouts(data); err == nil && (ts.TCP < 0 || ts.TCPFin < 0 || ts.UDP < 0) {
			t.Errorf("timeouts %+v", ts)
		}
	})
}
