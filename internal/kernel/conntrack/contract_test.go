package conntrack

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A world is an empty table and a way to put entries into it. It belongs to the test that opened it.
type world struct {
	Table
	add func(tb testing.TB, flows ...flow.Flow)
}

func TestFakeKeepsTheContract(t *testing.T) {
	testContract(t, func(*testing.T) world {
		f := NewFake()
		return world{f, func(_ testing.TB, flows ...flow.Flow) { f.Add(flows...) }}
	})
}

func TestKernelKeepsTheContract(t *testing.T) {
	testContract(t, func(t *testing.T) world {
		t.Helper()
		kerneltest.Isolate(t)
		return world{Kernel{}, create}
	})
}

// create makes entries in the kernel, several to a system call.
func create(tb testing.TB, flows ...flow.Flow) {
	tb.Helper()
	s, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		tb.Fatal(err)
	}
	defer s.Close()
	const some = 200
	for part := range slices.Chunk(flows, some) {
		var w writer
		for i, f := range part {
			flags := uint16(unix.NLM_F_CREATE | unix.NLM_F_EXCL)
			if i == len(part)-1 {
				flags |= unix.NLM_F_ACK
			}
			w.create(uint32(i+1), f, flags)
		}
		if err := s.Send(w.buf); err != nil {
			tb.Fatalf("create %d entries: %v", len(part), err)
		}
		for done := false; !done; {
			done, err = s.Receive(func(m netlink.Message) (bool, error) { return int(m.Seq) == len(part), m.Failure() })
			if err != nil {
				tb.Fatalf("create %d entries: %v", len(part), err)
			}
		}
	}
}

// create asks for a new entry. Source of the numbers: linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h.
func (w *writer) create(seq uint32, f flow.Flow, flags uint16) {
	const (
		ctaStatus, ctaTimeout, ctaProtoinfo = 3, 7, 4
		assured, confirmed                  = 1 << 2, 1 << 3
	)
	at := w.begin(msgNew, flags, seq, addressFamily(model.FamilyOf(f.OrigSrc.Addr())))
	w.tuple(ctaTupleOrig, f.Proto, f.OrigSrc, f.OrigDst)
	w.tuple(ctaTupleReply, f.Proto, f.ReplySrc, f.ReplyDst)
	w.attr(ctaStatus, []byte{0, 0, 0, assured | confirmed})
	w.attr(ctaTimeout, []byte{0, 0, 2, 0})
	switch f.Proto {
	case model.TCP: // state established
		info, tcp := w.nest(ctaProtoinfo), 0
		tcp = w.nest(1)
		w.attr(1, []byte{3})
		w.close(tcp)
		w.close(info)
	case model.SCTP: // state established, and two verification tags
		info, sctp := w.nest(ctaProtoinfo), 0
		sctp = w.nest(3)
		w.attr(1, []byte{4})
		w.attr(2, []byte{0, 0, 0, 1})
		w.attr(3, []byte{0, 0, 0, 2})
		w.close(sctp)
		w.close(info)
	case model.UDP:
	}
	if f.Zone != 0 {
		w.attr16(ctaZone, f.Zone)
	}
	w.end(at)
}

// entry makes a translated entry: the client sent to dst and gets its answers from replies.
func entry(proto model.Protocol, client, dst, replies string) flow.Flow {
	c := netip.MustParseAddrPort(client)
	return flow.Flow{
		Proto: proto, OrigSrc: c, OrigDst: netip.MustParseAddrPort(dst), ReplySrc: netip.MustParseAddrPort(replies), ReplyDst: c,
	}
}

func inZone(zone uint16, f flow.Flow) flow.Flow {
	f.Zone = zone
	return f
}

// some entries of all protocols and both families.
func some() []flow.Flow {
	return []flow.Flow{
		entry(model.UDP, "10.60.5.5:4000", "10.70.0.53:53", "10.60.1.7:5353"),
		entry(model.UDP, "10.60.5.5:4001", "10.70.0.53:53", "10.60.1.8:5353"),
		entry(model.UDP, "10.60.5.6:4000", "8.8.8.8:53", "8.8.8.8:53"),
		inZone(7, entry(model.UDP, "10.60.5.5:4000", "10.70.0.53:53", "10.60.1.9:5353")),
		entry(model.TCP, "10.60.5.5:4000", "10.70.0.53:53", "10.60.1.7:5353"),
		entry(model.SCTP, "10.60.5.5:36412", "10.70.0.36:36412", "10.60.1.7:36412"),
		entry(model.UDP, "[fd00::5]:4000", "[fd00:70::35]:53", "[fd00::7]:5353"),
		entry(model.UDP, "[fd00::5]:4001", "[fd00:70::35]:53", "[fd00::8]:5353"),
	}
}

func listed(t *testing.T, table Table, family model.Family, proto model.Protocol) []flow.Flow {
	t.Helper()
	var out []flow.Flow
	err := table.List(t.Context(), family, proto, func(f flow.Flow) bool {
		out = append(out, f)
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(out, func(a, b flow.Flow) int {
		return cmp.Or(a.OrigSrc.Compare(b.OrigSrc), a.OrigDst.Compare(b.OrigDst), cmp.Compare(a.Zone, b.Zone))
	})
	return out
}

// diff compares without IDs, which the kernel chooses.
func diff(want, got []flow.Flow) string {
	return gocmp.Diff(want, got, cmpopts.EquateComparable(netip.AddrPort{}), cmpopts.IgnoreFields(flow.Flow{}, "ID"),
		cmpopts.EquateEmpty())
}

func testContract(t *testing.T, open func(*testing.T) world) {
	t.Helper()
	t.Run("an empty table lists nothing", func(t *testing.T) {
		if got := listed(t, open(t), model.IPv4, model.UDP); len(got) != 0 {
			t.Errorf("got %v", got)
		}
	})
	t.Run("a listing holds one family and protocol, translated addresses and zones", func(t *testing.T) { testList(t, open(t)) })
	t.Run("a listing ends when it is told to", func(t *testing.T) { testStop(t, open(t)) })
	t.Run("only what is named is deleted", func(t *testing.T) { testDelete(t, open(t)) })
	t.Run("an entry that came in place of another stays", func(t *testing.T) { testReplaced(t, open(t)) })
	t.Run("deleting nothing, or what is gone, is no error", func(t *testing.T) { testGone(t, open(t)) })
	t.Run("a bad entry is reported and the rest is deleted", func(t *testing.T) { testBad(t, open(t)) })
	t.Run("many are deleted", func(t *testing.T) { testMany(t, open(t)) })
	t.Run("what is stale is forgotten", func(t *testing.T) { testForget(t, open(t)) })
	t.Run("a stopped context stops the work", func(t *testing.T) { testStopped(t, open(t)) })
}

func testList(t *testing.T, w world) {
	t.Helper()
	all := some()
	w.add(t, all...)
	for _, tc := range []struct {
		family model.Family
		proto  model.Protocol
		want   []flow.Flow
	}{
		{model.IPv4, model.UDP, []flow.Flow{all[0], all[3], all[1], all[2]}},
		{model.IPv4, model.TCP, all[4:5]},
		{model.IPv4, model.SCTP, all[5:6]},
		{model.IPv6, model.UDP, all[6:8]},
		{model.IPv6, model.TCP, nil},
	} {
		got := listed(t, w, tc.family, tc.proto)
		if d := diff(tc.want, got); d != "" {
			t.Errorf("%s %s (-want +got):\n%s", tc.family, tc.proto, d)
		}
		for _, f := range got {
			if f.ID == 0 {
				t.Errorf("%v has no ID", f)
			}
		}
	}
}

func testStop(t *testing.T, w world) {
	t.Helper()
	w.add(t, some()...)
	calls := 0
	err := w.List(t.Context(), model.IPv4, model.UDP, func(flow.Flow) bool {
		calls++
		return calls < 2
	})
	if err != nil || calls != 2 {
		t.Errorf("%d calls and error %v, want 2 and none", calls, err)
	}
}

func testDelete(t *testing.T, w world) {
	t.Helper()
	all := some()
	w.add(t, all...)
	var gone []flow.Flow
	for _, f := range listed(t, w, model.IPv4, model.UDP) {
		if f.OrigSrc.Port() == 4000 && f.OrigDst.Addr() == all[0].OrigDst.Addr() {
			gone = append(gone, f) // one in the default zone, one in zone 7
		}
	}
	gone = append(gone, listed(t, w, model.IPv6, model.UDP)[0])
	if n, err := w.Delete(t.Context(), gone); err != nil || n != 3 {
		t.Fatalf("deleted %d, error %v; want 3 and none", n, err)
	}
	for _, tc := range []struct {
		family model.Family
		proto  model.Protocol
		want   []flow.Flow
	}{
		{model.IPv4, model.UDP, all[1:3]},
		{model.IPv4, model.TCP, all[4:5]},
		{model.IPv4, model.SCTP, all[5:6]},
		{model.IPv6, model.UDP, all[7:8]},
	} {
		if d := diff(tc.want, listed(t, w, tc.family, tc.proto)); d != "" {
			t.Errorf("%s %s left (-want +got):\n%s", tc.family, tc.proto, d)
		}
	}
}

func testReplaced(t *testing.T, w world) {
	t.Helper()
	w.add(t, some()[0])
	old := listed(t, w, model.IPv4, model.UDP)
	if n, err := w.Delete(t.Context(), old); err != nil || n != 1 {
		t.Fatalf("deleted %d, error %v; want 1 and none", n, err)
	}
	// Memory of the first may be used again for the next, and the ID with it; another entry in between prevents that.
	w.add(t, some()[1])
	w.add(t, some()[0])
	now := listed(t, w, model.IPv4, model.UDP)
	if now[0].ID == old[0].ID {
		t.Skip("the kernel gave both entries the same ID")
	}
	if n, err := w.Delete(t.Context(), old); err != nil || n != 0 {
		t.Errorf("deleted %d, error %v; want 0 and none", n, err)
	}
	if d := diff(some()[:2], listed(t, w, model.IPv4, model.UDP)); d != "" {
		t.Errorf("left (-want +got):\n%s", d)
	}
	old[0].ID = 0
	if n, err := w.Delete(t.Context(), old); err != nil || n != 1 {
		t.Errorf("without an ID: deleted %d, error %v; want 1 and none", n, err)
	}
}

func testGone(t *testing.T, w world) {
	t.Helper()
	if n, err := w.Delete(t.Context(), nil); err != nil || n != 0 {
		t.Errorf("of nothing: deleted %d, error %v; want 0 and none", n, err)
	}
	w.add(t, some()[1])
	if n, err := w.Delete(t.Context(), some()[:3]); err != nil || n != 1 {
		t.Errorf("deleted %d, error %v; want 1 and none", n, err)
	}
}

func testBad(t *testing.T, w world) {
	t.Helper()
	all := some()
	w.add(t, all...)
	bad := all[0]
	bad.OrigDst = netip.AddrPort{}
	n, err := w.Delete(t.Context(), []flow.Flow{all[1], bad, all[2]})
	if n != 2 {
		t.Errorf("deleted %d, want 2", n)
	}
	if _, ok := errors.AsType[*StepError](err); !ok || !errors.Is(err, kernel.ErrInvalid) {
		t.Errorf("got %v, want a *StepError of class %v", err, kernel.ErrInvalid)
	}
	if d := diff([]flow.Flow{all[0], all[3]}, listed(t, w, model.IPv4, model.UDP)); d != "" {
		t.Errorf("left (-want +got):\n%s", d)
	}
}

// lots gives n entries, of which every second leads to an endpoint on an odd address.
func lots(n int) []flow.Flow {
	out := make([]flow.Flow, 0, n)
	for i := range n {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 60, byte(i >> 16), byte(i >> 8)}), uint16(i%256)+1000)
		out = append(out, flow.Flow{
			Proto: model.UDP, OrigSrc: client, OrigDst: netip.MustParseAddrPort("10.70.0.53:53"),
			ReplySrc: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, 0, byte(i % 2)}), 5353), ReplyDst: client,
		})
	}
	return out
}

func odd(f flow.Flow) bool { return f.ReplySrc.Addr().As4()[3] == 1 }

func testMany(t *testing.T, w world) {
	t.Helper()
	const n = 10*batch + 7
	w.add(t, lots(n)...)
	got := listed(t, w, model.IPv4, model.UDP)
	if len(got) != n {
		t.Fatalf("%d entries listed, want %d", len(got), n)
	}
	// The second half of what is to be deleted is gone before.
	half, err := w.Delete(t.Context(), got[n/2:])
	if err != nil || half != n-n/2 {
		t.Fatalf("deleted %d, error %v; want %d and none", half, err, n-n/2)
	}
	rest, err := w.Delete(t.Context(), got)
	if err != nil || rest != n/2 {
		t.Errorf("deleted %d, error %v; want %d and none", rest, err, n/2)
	}
	if left := listed(t, w, model.IPv4, model.UDP); len(left) != 0 {
		t.Errorf("%d entries left", len(left))
	}
}

func testForget(t *testing.T, w world) {
	t.Helper()
	w.add(t, lots(1001)...)
	w.add(t, some()[4:]...)
	stale := func(f flow.Flow) bool { return f.Proto == model.SCTP || odd(f) }
	n, err := forget(t.Context(), w, model.IPv4, flow.Protocols(), stale, 100) // exactly five portions of UDP
	if err != nil || n != 501 {
		t.Errorf("forgot %d, error %v; want 501 and none", n, err)
	}
	if n, err := Forget(t.Context(), w, model.IPv4, flow.Protocols(), stale); err != nil || n != 0 {
		t.Errorf("once more: forgot %d, error %v; want 0 and none", n, err)
	}
	for _, f := range listed(t, w, model.IPv4, model.UDP) {
		if stale(f) {
			t.Errorf("%v is still there", f)
		}
	}
	if d := diff(some()[4:5], listed(t, w, model.IPv4, model.TCP)); d != "" {
		t.Errorf("TCP left (-want +got):\n%s", d)
	}
	if d := diff(nil, listed(t, w, model.IPv4, model.SCTP)); d != "" {
		t.Errorf("SCTP left (-want +got):\n%s", d)
	}
}

func testStopped(t *testing.T, w world) {
	t.Helper()
	w.add(t, some()...)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := w.List(ctx, model.IPv4, model.UDP, func(flow.Flow) bool { return true })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("list: got %v, want context.Canceled", err)
	}
	if n, err := w.Delete(ctx, some()); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("delete: got %d, %v; want 0, context.Canceled", n, err)
	}
}
