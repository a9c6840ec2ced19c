package ipset

import (
	"encoding/binary"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The versions of the protocol that are spoken here. Every kernel since 2.6.39 speaks 6, those since 5.0 also 7, which
// is the same for all that is used here. Source: IPSET_PROTOCOL and IPSET_PROTOCOL_MIN in linux/netfilter/ipset/ip_set.h.
const (
	protocolMin = 6
	protocolMax = 7
)

// The commands, attributes and flags that are used. Source: linux/netfilter/ipset/ip_set.h.
const (
	cmdProtocol = 1
	cmdCreate   = 2
	cmdDestroy  = 3
	cmdFlush    = 4
	cmdRename   = 5
	cmdSwap     = 6
	cmdList     = 7
	cmdAdd      = 9
	cmdDel      = 10
	cmdType     = 13

	attrProtocol = 1
	attrSetName  = 2
	attrTypeName = 3 // the second name in a swap or a renaming
	attrRevision = 4 // the newest one in the answer about a type
	attrFamily   = 5
	attrFlags    = 6
	attrData     = 7
	attrADT      = 8
	attrOldest   = 10 // the oldest version, or revision, that the kernel takes

	dataIP       = 1
	dataCIDR     = 3
	dataPort     = 4
	dataPortTo   = 5
	dataTimeout  = 6
	dataProto    = 7
	dataFlags    = 8
	dataMarkMask = 11
	dataBitmask  = 12
	dataHashSize = 18
	dataMaxElem  = 19 // in a set's properties
	dataNetmask  = 20 // in a set's properties
	dataElements = 24 // in a set's properties
	dataIP2      = 20 // in an entry
	dataCIDR2    = 21 // in an entry
	dataMark     = 27 // in an entry
	dataPriority = 28 // in an entry
	dataQueue    = 29 // in an entry

	addrIPv4 = 1
	addrIPv6 = 2

	flagHeaderOnly = 1 << 2 // of a command

	flagCounters = 1 << 3 // of a set
	flagComments = 1 << 4
	flagMarks    = 1 << 6
)

const (
	// genLen is the length of struct nfgenmsg, which all messages begin with.
	genLen   = 4
	maxPort  = 65535
	typeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
)

// wanted gives the oldest revision of a type that has all which is used here, the last of which is skbinfo. A newer one
// would gain nothing, and the program ipset refuses to list sets of a revision that is newer than the program: kernels
// get new ones, and other programs bring an older ipset along in their images.
//
// Source: net/netfilter/ipset of the kernel, IPSET_TYPE_REV_MAX of each type; skbinfo is in kernels since 3.18.
// Symptom: github.com/projectcalico/calico/issues/10676, github.com/kubeovn/kube-ovn/issues/4741.
func (t Type) wanted() uint8 {
	switch t {
	case HashIP:
		return 4
	case HashIPPort, HashIPPortIP:
		return 5
	case HashNet:
		return 6
	case HashIPPortNet:
		return 7
	case BitmapPort:
		return 3
	}
	return 0
}

// A writer appends the payloads of messages to a buffer.
type writer struct {
	buf []byte
	// version is that of the protocol.
	version uint8
}

// message makes a request; fill adds its attributes behind the protocol's version.
func (w *writer) message(cmd uint8, flags uint16, fill func()) netlink.Request {
	at := len(w.buf)
	w.buf = append(w.buf, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	w.put8(attrProtocol, w.version)
	fill()
	// Cut, so that nobody appends to it what belongs to the next one.
	data := w.buf[at:len(w.buf):len(w.buf)]
	return netlink.Request{Kind: unix.NFNL_SUBSYS_IPSET<<8 | uint16(cmd), Flags: flags, Data: data}
}

func (w *writer) attr(kind uint16, value ...byte) {
	w.buf = binary.NativeEndian.AppendUint16(w.buf, uint16(4+len(value)))
	w.buf = binary.NativeEndian.AppendUint16(w.buf, kind)
	w.buf = append(w.buf, value...)
	w.pad()
}

func (w *writer) pad() {
	for len(w.buf)%unix.NLMSG_ALIGNTO != 0 {
		w.buf = append(w.buf, 0)
	}
}

// nest writes an attribute that holds others.
func (w *writer) nest(kind uint16, fill func()) {
	at := len(w.buf)
	w.buf = append(w.buf, 0, 0, 0, 0)
	binary.NativeEndian.PutUint16(w.buf[at+2:], kind|unix.NLA_F_NESTED)
	fill()
	binary.NativeEndian.PutUint16(w.buf[at:], uint16(len(w.buf)-at))
}

func (w *writer) text(kind uint16, s string) {
	w.buf = binary.NativeEndian.AppendUint16(w.buf, uint16(4+len(s)+1))
	w.buf = binary.NativeEndian.AppendUint16(w.buf, kind)
	w.buf = append(append(w.buf, s...), 0)
	w.pad()
}

// Numbers stand in network byte order, and the kernel insists on the flag that says so.

func (w *writer) put8(kind uint16, v uint8) { w.attr(kind, v) }

func (w *writer) put16(kind, v uint16) {
	w.attr(kind|unix.NLA_F_NET_BYTEORDER, byte(v>>8), byte(v))
}

func (w *writer) put32(kind uint16, v uint32) {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	w.attr(kind|unix.NLA_F_NET_BYTEORDER, b[:]...)
}

func (w *writer) put64(kind uint16, v uint64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], v)
	w.attr(kind|unix.NLA_F_NET_BYTEORDER, b[:]...)
}

func (w *writer) addr(kind uint16, a netip.Addr) {
	w.nest(kind, func() {
		if a.Is4() {
			b := a.As4()
			w.attr(addrIPv4|unix.NLA_F_NET_BYTEORDER, b[:]...)
			return
		}
		b := a.As16()
		w.attr(addrIPv6|unix.NLA_F_NET_BYTEORDER, b[:]...)
	})
}

// op writes the message of an Op; revision is that of the set's type, for Create.
func (w *writer) op(o Op, revision uint8) netlink.Request {
	flags := uint16(0)
	if o.Strict {
		flags = unix.NLM_F_EXCL
	}
	switch o.Verb {
	case Create:
		return w.message(cmdCreate, flags|unix.NLM_F_CREATE, func() {
			w.text(attrSetName, o.Set.Name)
			w.text(attrTypeName, string(o.Set.Type))
			w.put8(attrRevision, revision)
			w.put8(attrFamily, addressFamily(o.Set.Family))
			w.nest(attrData, func() { w.properties(o) })
		})
	case Add:
		return w.message(cmdAdd, flags, func() { w.entry(o) })
	case Remove:
		return w.message(cmdDel, flags, func() { w.entry(o) })
	case Destroy:
		return w.message(cmdDestroy, flags, func() { w.text(attrSetName, o.Set.Name) })
	case Flush:
		return w.message(cmdFlush, 0, func() { w.text(attrSetName, o.Set.Name) })
	case Swap:
		return w.message(cmdSwap, 0, func() { w.names(o) })
	case Rename:
		return w.message(cmdRename, 0, func() { w.names(o) })
	}
	return netlink.Request{} // check lets no other verb pass
}

func (w *writer) names(o Op) {
	w.text(attrSetName, o.Set.Name)
	w.text(attrTypeName, o.With)
}

func (w *writer) properties(o Op) {
	s := o.Set
	if s.Type == BitmapPort {
		w.put16(dataPort, 0)
		w.put16(dataPortTo, maxPort)
	}
	if o.HashSize != 0 {
		w.put32(dataHashSize, o.HashSize)
	}
	if s.MaxElem != 0 {
		w.put32(dataMaxElem, s.MaxElem)
	}
	if s.Timeouts {
		w.put32(dataTimeout, uint32(s.Timeout/time.Second))
	}
	flags := uint32(0)
	for _, x := range []struct {
		has  bool
		flag uint32
	}{{s.Counters, flagCounters}, {s.Comments, flagComments}, {s.Marks, flagMarks}} {
		if x.has {
			flags |= x.flag
		}
	}
	if flags != 0 {
		w.put32(dataFlags, flags)
	}
}

func (w *writer) entry(o Op) {
	w.text(attrSetName, o.Set.Name)
	w.nest(attrData, func() {
		e := o.Entry
		has, _ := o.Set.Type.form()
		if has.addr {
			w.addr(dataIP, e.Addr)
		}
		if has.port {
			w.put16(dataPort, e.Port)
		}
		if has.proto {
			w.put8(dataProto, uint8(e.Proto))
		}
		address, bits := uint16(dataIP2), uint16(dataCIDR2)
		if !has.addr {
			address, bits = dataIP, dataCIDR
		}
		if has.net {
			w.addr(address, e.Net.Addr())
		}
		if has.net && !has.single {
			w.put8(bits, uint8(e.Net.Bits()))
		}
		if o.Verb == Add && o.Mark != 0 {
			w.put64(dataMark, uint64(o.Mark)<<32|0xffffffff)
		}
	})
}

func addressFamily(f model.Family) uint8 {
	switch f {
	case model.IPv4:
		return unix.AF_INET
	case model.IPv6:
		return unix.AF_INET6
	}
	return unix.AF_UNSPEC
}
