package conntrack

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The parts of ctnetlink that are used here. Source: linux/netfilter/nfnetlink_conntrack.h. CTA_FILTER is in the kernel
// since 5.8; its flags are in net/netfilter/nf_internals.h.
const (
	msgNew    = 0
	msgGet    = 1
	msgDelete = 2

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaTupleZone  = 3

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	ctaFilterOrigFlags = 1
	filterByProto      = 1 << 3
)

// Sizes and masks of netlink messages. Source: linux/netlink.h.
const (
	// genLen is the length of struct nfgenmsg, which follows the header.
	genLen   = 4
	typeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
)

func addressFamily(family model.Family) uint8 {
	if family == model.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// A writer appends netlink messages to a buffer.
type writer struct{ buf []byte }

// begin starts a message and gives the place that end wants.
func (w *writer) begin(kind uint16, flags uint16, seq uint32, family uint8) int {
	at := len(w.buf)
	w.buf = binary.NativeEndian.AppendUint32(w.buf, 0)
	w.buf = binary.NativeEndian.AppendUint16(w.buf, unix.NFNL_SUBSYS_CTNETLINK<<8|kind)
	w.buf = binary.NativeEndian.AppendUint16(w.buf, unix.NLM_F_REQUEST|flags)
	w.buf = binary.NativeEndian.AppendUint32(w.buf, seq)
	w.buf = binary.NativeEndian.AppendUint32(w.buf, 0)
	w.buf = append(w.buf, family, unix.NFNETLINK_V0, 0, 0)
	return at
}

func (w *writer) end(at int) {
	binary.NativeEndian.PutUint32(w.buf[at:], uint32(len(w.buf)-at))
}

// nest starts a nested attribute and gives the place that close wants.
func (w *writer) nest(kind uint16) int {
	at := len(w.buf)
	w.buf = append(w.buf, 0, 0, 0, 0)
	binary.NativeEndian.PutUint16(w.buf[at+2:], kind|unix.NLA_F_NESTED)
	return at
}

func (w *writer) close(at int) {
	binary.NativeEndian.PutUint16(w.buf[at:], uint16(len(w.buf)-at))
}

func (w *writer) attr(kind uint16, value []byte) {
	w.buf = binary.NativeEndian.AppendUint16(w.buf, uint16(4+len(value)))
	w.buf = binary.NativeEndian.AppendUint16(w.buf, kind)
	w.buf = append(w.buf, value...)
	for len(w.buf)%unix.NLMSG_ALIGNTO != 0 {
		w.buf = append(w.buf, 0)
	}
}

func (w *writer) attr16(kind, value uint16) {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], value)
	w.attr(kind, b[:])
}

// dump asks for all entries of a family; with a filter only for those of a protocol.
func (w *writer) dump(seq uint32, family model.Family, proto model.Protocol, filter bool) {
	at := w.begin(msgGet, unix.NLM_F_DUMP, seq, addressFamily(family))
	if filter {
		tuple := w.nest(ctaTupleOrig)
		p := w.nest(ctaTupleProto)
		w.attr(ctaProtoNum, []byte{byte(proto)})
		w.close(p)
		w.close(tuple)
		f := w.nest(ctaFilter)
		w.attr(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, filterByProto))
		w.close(f)
	}
	w.end(at)
}

// tuple writes one direction's addresses.
func (w *writer) tuple(kind uint16, proto model.Protocol, src, dst netip.AddrPort) {
	t := w.nest(kind)
	ip := w.nest(ctaTupleIP)
	if src.Addr().Is4() {
		s, d := src.Addr().As4(), dst.Addr().As4()
		w.attr(ctaIPv4Src, s[:])
		w.attr(ctaIPv4Dst, d[:])
	} else {
		s, d := src.Addr().As16(), dst.Addr().As16()
		w.attr(ctaIPv6Src, s[:])
		w.attr(ctaIPv6Dst, d[:])
	}
	w.close(ip)
	p := w.nest(ctaTupleProto)
	w.attr(ctaProtoNum, []byte{byte(proto)})
	w.attr16(ctaProtoSrcPort, src.Port())
	w.attr16(ctaProtoDstPort, dst.Port())
	w.close(p)
	w.close(t)
}

// remove asks for the deletion of one entry. The kernel answers only if it fails, unless flags ask for more.
func (w *writer) remove(seq uint32, f flow.Flow, flags uint16) {
	at := w.begin(msgDelete, flags, seq, addressFamily(model.FamilyOf(f.OrigSrc.Addr())))
	w.tuple(ctaTupleOrig, f.Proto, f.OrigSrc, f.OrigDst)
	if f.ID != 0 {
		w.attr(ctaID, binary.BigEndian.AppendUint32(nil, f.ID))
	}
	if f.Zone != 0 {
		w.attr16(ctaZone, f.Zone)
	}
	w.end(at)
}

// attrs walks over attributes: it gives the first one and the rest. ok is false at the end, and where the text is
// malformed.
func attrs(b []byte) (kind uint16, value, rest []byte, ok bool) {
	if len(b) < 4 {
		return 0, nil, nil, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < 4 || n > len(b) {
		return 0, nil, nil, false
	}
	return binary.NativeEndian.Uint16(b[2:]) & typeMask, b[4:n], b[min(netlink.Align(n), len(b)):], true
}

// read takes an entry from the payload of a message, which starts with struct nfgenmsg. ok is false if the entry is of
// another protocol or has no ports; that is found out before the rest is looked at.
func read(b []byte, proto model.Protocol) (f flow.Flow, ok bool) {
	if len(b) < genLen {
		return f, false
	}
	f.Proto = proto
	for b = b[genLen:]; ; {
		kind, value, rest, more := attrs(b)
		if !more {
			return f, f.OrigSrc.IsValid() && f.ReplySrc.IsValid()
		}
		switch kind {
		case ctaTupleOrig:
			var zone uint16
			if f.OrigSrc, f.OrigDst, zone, ok = readTuple(value, proto); !ok {
				return f, false
			}
			f.Zone = max(f.Zone, zone)
		case ctaTupleReply:
			if f.ReplySrc, f.ReplyDst, _, ok = readTuple(value, proto); !ok {
				return f, false
			}
		case ctaID:
			if len(value) == 4 {
				f.ID = binary.BigEndian.Uint32(value)
			}
		case ctaZone:
			if len(value) == 2 {
				f.Zone = binary.BigEndian.Uint16(value)
			}
		}
		b = rest
	}
}

// readTuple reads one direction. ok is false if it is of another protocol, or not complete.
func readTuple(b []byte, proto model.Protocol) (src, dst netip.AddrPort, zone uint16, ok bool) {
	var from, to netip.Addr
	var sport, dport uint16
	for {
		kind, value, rest, more := attrs(b)
		if !more {
			break
		}
		switch kind {
		case ctaTupleIP:
			from, to = readAddrs(value)
		case ctaTupleProto:
			var is bool
			if sport, dport, is = readPorts(value, proto); !is {
				return src, dst, 0, false
			}
			ok = true
		case ctaTupleZone:
			if len(value) == 2 {
				zone = binary.BigEndian.Uint16(value)
			}
		}
		b = rest
	}
	if !from.IsValid() || !to.IsValid() {
		return src, dst, 0, false
	}
	return netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport), zone, ok
}

func readAddrs(b []byte) (src, dst netip.Addr) {
	for {
		kind, value, rest, more := attrs(b)
		if !more {
			return src, dst
		}
		switch a, ok := netip.AddrFromSlice(value); {
		case !ok:
		case kind == ctaIPv4Src, kind == ctaIPv6Src:
			src = a
		case kind == ctaIPv4Dst, kind == ctaIPv6Dst:
			dst = a
		}
		b = rest
	}
}

func readPorts(b []byte, proto model.Protocol) (src, dst uint16, ok bool) {
	for {
		kind, value, rest, more := attrs(b)
		if !more {
			return src, dst, ok
		}
		switch {
		case kind == ctaProtoNum && len(value) == 1:
			if model.Protocol(value[0]) != proto {
				return 0, 0, false
			}
			ok = true
		case kind == ctaProtoSrcPort && len(value) == 2:
			src = binary.BigEndian.Uint16(value)
		case kind == ctaProtoDstPort && len(value) == 2:
			dst = binary.BigEndian.Uint16(value)
		}
		b = rest
	}
}
