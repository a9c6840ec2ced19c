package netlink

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
)

// route gives a request about the local route to an address of the loopback network, by its number.
func route(kind uint16, n uint32) Request {
	flags := uint16(0)
	if kind == unix.RTM_NEWROUTE {
		flags = unix.NLM_F_CREATE | unix.NLM_F_EXCL
	}
	const loopback = 1 // the interface's index in every namespace
	data := []byte{unix.AF_INET, 32, 0, 0, unix.RT_TABLE_LOCAL, unix.RTPROT_STATIC, unix.RT_SCOPE_HOST, unix.RTN_LOCAL, 0, 0, 0, 0}
	for _, a := range []struct {
		typ   uint16
		value []byte
	}{
		{unix.RTA_DST, binary.BigEndian.AppendUint32(nil, 0x0a000000+n)},
		{unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, loopback)},
	} {
		data = binary.NativeEndian.AppendUint16(data, uint16(4+len(a.value)))
		data = binary.NativeEndian.AppendUint16(data, a.typ)
		data = append(data, a.value...)
	}
	return Request{Kind: kind, Flags: flags, Data: data}
}

func dialRoute(t *testing.T) *Socket {
	t.Helper()
	kerneltest.Isolate(t)
	s, err := Dial(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// Each request of a long batch gets its own answer, wherever the batch is cut for the system calls.
func TestEachRequestOfABatchIsAnswered(t *testing.T) {
	s := dialRoute(t)
	var requests []Request
	var want []error
	for n := range uint32(3*batch + 7) {
		requests = append(requests, route(unix.RTM_NEWROUTE, n))
		want = append(want, nil)
		if n%7 == 0 { // again, which is refused
			requests = append(requests, route(unix.RTM_NEWROUTE, n))
			want = append(want, unix.EEXIST)
		}
	}
	got, err := s.Batch(t.Context(), requests)
	if err != nil {
		t.Fatal(err)
	}
	for i := range want {
		if !errors.Is(got[i], want[i]) {
			t.Fatalf("request %d: %v, want %v", i, got[i], want[i])
		}
	}
	if s.Sent() != len(requests) {
		t.Errorf("%d requests counted, want %d", s.Sent(), len(requests))
	}
	routes := 0
	err = s.Dump(t.Context(), Request{Kind: unix.RTM_GETROUTE, Data: make([]byte, unix.SizeofRtMsg)}, func(m Message) error {
		if m.Data[0] == unix.AF_INET && m.Data[7] == unix.RTN_LOCAL && m.Data[5] == unix.RTPROT_STATIC {
			routes++
		}
		return nil
	})
	if err != nil || routes != 3*batch+7 {
		t.Errorf("%d routes listed, want %d; %v", routes, 3*batch+7, err)
	}
}

func TestABatchThatIsBrokenOffSaysOfWhichRequestsNothingIsKnown(t *testing.T) {
	s := dialRoute(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	got, err := s.Batch(ctx, []Request{route(unix.RTM_NEWROUTE, 1)})
	if !errors.Is(err, context.Canceled) || len(got) != 1 || !errors.Is(got[0], context.Canceled) {
		t.Errorf("got %v, %v; want the context's error for both", got, err)
	}
}

func TestARefusalIsHandedOn(t *testing.T) {
	s := dialRoute(t)
	r := Request{Kind: unix.RTM_GETROUTE, Data: []byte{unix.AF_INET}} // too short for its header
	if err := s.Ask(t.Context(), r, func(Message) error { return nil }); !errors.Is(err, unix.EINVAL) {
		t.Errorf("asking: error %v, want EINVAL", err)
	}
	r.Kind = 0x7fff // no message of this protocol
	if err := s.Dump(t.Context(), r, func(Message) error { return nil }); err == nil {
		t.Error("listing what there is not: no error")
	}
}
