package conntrack

import (
	"net/netip"
	"testing"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// written gives an entry as the kernel sends it.
func written(f flow.Flow) []byte {
	var w writer
	w.create(1, f, 0)
	return w.buf[netlink.HeaderLen:]
}

func TestAnEntryIsReadAsItWasWritten(t *testing.T) {
	for _, f := range some() {
		got, ok := read(written(f), f.Proto)
		if !ok {
			t.Errorf("%v was not understood", f)
		}
		if d := diff([]flow.Flow{f}, []flow.Flow{got}); d != "" {
			t.Errorf("entry (-want +got):\n%s", d)
		}
	}
}

func TestAnEntryOfAnotherProtocolIsPassedOver(t *testing.T) {
	if f, ok := read(written(some()[4]), model.UDP); ok {
		t.Errorf("read %v", f)
	}
}

func TestAZoneOfTheOriginalDirectionIsTheEntrysZone(t *testing.T) {
	f := some()[0]
	var w writer
	w.buf = append(w.buf, 0, 0, 0, 0)
	orig := len(w.buf)
	w.tuple(ctaTupleOrig, f.Proto, f.OrigSrc, f.OrigDst)
	w.attr16(ctaTupleZone, 9)
	w.close(orig)
	reply := len(w.buf)
	w.tuple(ctaTupleReply, f.Proto, f.ReplySrc, f.ReplyDst)
	w.attr16(ctaTupleZone, 11)
	w.close(reply)
	if got, ok := read(w.buf, f.Proto); !ok || got.Zone != 9 {
		t.Errorf("zone %d, read %v; want 9", got.Zone, ok)
	}
}

func FuzzRead(f *testing.F) {
	for _, e := range some() {
		f.Add(written(e))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, ok := read(b, model.UDP)
		if !ok {
			return
		}
		for _, a := range []netip.AddrPort{e.OrigSrc, e.OrigDst, e.ReplySrc, e.ReplyDst} {
			if !a.IsValid() {
				t.Errorf("read %v, with an address that is none", e)
			}
		}
	})
}
