package route

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	attr "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

const (
	// attempts is how often a listing is started anew when the kernel says that it was disturbed.
	attempts = 5
	// loopback is the loopback interface's index, the same in every namespace.
	loopback = 1
)

// Kernel is the kernel's table. It has no state and may be used by several goroutines. Its methods act in the network
// namespace of the calling thread.
type Kernel struct{}

var _ Table = Kernel{}

// List implements Table.
func (Kernel) List(ctx context.Context, family model.Family) ([]Local, error) {
	s, err := netlink.Dial(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, refusal("list", "local routes", err)
	}
	defer s.Close()
	// The kernel sorts out others' routes if it can; it is asked again by itself where it cannot.
	strict := s.Strict() == nil
	out, err := settledList(func() ([]Local, error) { return list(ctx, s, family, strict) })
	if err != nil {
		return nil, refusal("list", family.String()+" local routes", err)
	}
	return out, nil
}

// settledList lists until nothing was disturbed. What changes all the time is better known in part than not at all.
func settledList(list func() ([]Local, error)) ([]Local, error) {
	for n := 1; ; n++ {
		out, err := list()
		switch {
		case errors.Is(err, netlink.ErrDisturbed) && n < attempts:
		case errors.Is(err, netlink.ErrDisturbed):
			return out, nil
		default:
			return out, err
		}
	}
}

func list(ctx context.Context, s *netlink.Socket, family model.Family, strict bool) ([]Local, error) {
	header := rtmsg{family: addressFamily(family)}
	if strict {
		header.table, header.protocol, header.kind = unix.RT_TABLE_LOCAL, Protocol, unix.RTN_LOCAL
	}
	var out []Local
	r := netlink.Request{Kind: unix.RTM_GETROUTE, Data: header.bytes()}
	err := s.Dump(ctx, r, func(m netlink.Message) error {
		if l, ours := decode(m.Data); ours && model.FamilyOf(l.Addr) == family {
			out = append(out, l)
		}
		return nil
	})
	slices.SortFunc(out, Local.Compare)
	return slices.Compact(out), err
}

// Apply implements Table.
func (Kernel) Apply(ctx context.Context, ops []Op) []error {
	return apply(ctx, ops, func(*netlink.Socket) (encoder, error) { return encode, nil })
}

// An encoder gives the message of an Op that passed its check.
type encoder func(Op) (netlink.Request, error)

// apply sends ops that are well-formed in one batch. Open gives their encoder; its failure is that of all.
func apply(ctx context.Context, ops []Op, open func(*netlink.Socket) (encoder, error)) []error {
	out := make([]error, len(ops))
	if len(ops) == 0 {
		return out
	}
	s, err := netlink.Dial(unix.NETLINK_ROUTE)
	if err != nil {
		return failAll(out, ops, err)
	}
	defer s.Close()
	encode, err := open(s)
	if err != nil {
		return failAll(out, ops, err)
	}
	var requests []netlink.Request
	var of []int // the op that each request is for
	for i, o := range ops {
		if err := o.check(); err != nil {
			out[i] = invalid(o, err)
			continue
		}
		r, err := encode(o)
		if err != nil {
			out[i] = invalid(o, err)
			continue
		}
		requests, of = append(requests, r), append(of, i)
	}
	outcome, _ := s.Batch(ctx, requests) // whatever ended it stands in the outcomes, too
	for n, err := range outcome {
		if o := ops[of[n]]; err != nil && !settled(requests[n].Kind, err) {
			out[of[n]] = refusal(o.Verb.String(), o.object(), err)
		}
	}
	return out
}

func failAll(out []error, ops []Op, err error) []error {
	for i, o := range ops {
		out[i] = refusal(o.Verb.String(), o.object(), err)
	}
	return out
}

// settled tells whether the answer to a message of a kind says that it is so already.
func settled(kind uint16, err error) bool {
	switch kind {
	case unix.RTM_DELROUTE:
		return errors.Is(err, unix.ESRCH)
	case unix.RTM_NEWADDR:
		return errors.Is(err, unix.EEXIST)
	case unix.RTM_DELADDR:
		return errors.Is(err, unix.EADDRNOTAVAIL)
	default:
		return false
	}
}

// rtmsg is the header of a message about a route: struct rtmsg of linux/rtnetlink.h.
type rtmsg struct {
	family, bits, table, protocol, scope, kind uint8
}

func (m rtmsg) bytes() []byte {
	return []byte{m.family, m.bits, 0, 0, m.table, m.protocol, m.scope, m.kind, 0, 0, 0, 0}
}

// encode gives the message of an Op on a route. A route that is there is replaced in one step, as it has a metric that
// nobody else's has.
func encode(o Op) (netlink.Request, error) {
	header := rtmsg{
		family: addressFamily(model.FamilyOf(o.Addr)), bits: uint8(o.Addr.BitLen()), table: unix.RT_TABLE_LOCAL,
		protocol: Protocol, scope: unix.RT_SCOPE_HOST, kind: unix.RTN_LOCAL,
	}
	data := putAddr(header.bytes(), unix.RTA_DST, o.Addr)
	data = putUint32(data, unix.RTA_OIF, loopback)
	data = putUint32(data, unix.RTA_PRIORITY, Metric)
	if o.Verb == Remove {
		return netlink.Request{Kind: unix.RTM_DELROUTE, Data: data}, nil
	}
	if o.Source.IsValid() {
		data = putAddr(data, unix.RTA_PREFSRC, o.Source)
	}
	return netlink.Request{Kind: unix.RTM_NEWROUTE, Flags: unix.NLM_F_CREATE | unix.NLM_F_REPLACE, Data: data}, nil
}

func putUint32(b []byte, typ uint16, n uint32) []byte {
	return put(b, typ, binary.NativeEndian.AppendUint32(nil, n))
}

func putAddr(b []byte, typ uint16, a netip.Addr) []byte { return put(b, typ, a.AsSlice()) }

// put appends an attribute whose length needs no padding.
func put(b []byte, typ uint16, value []byte) []byte {
	const header = 4
	b = binary.NativeEndian.AppendUint16(b, uint16(header+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	return append(b, value...)
}

// decode gives the local route that a message is about, and whether it is one of ours.
func decode(b []byte) (Local, bool) {
	if len(b) < unix.SizeofRtMsg || b[4] != unix.RT_TABLE_LOCAL || b[5] != Protocol || b[7] != unix.RTN_LOCAL {
		return Local{}, false
	}
	ad, err := attr.NewAttributeDecoder(b[unix.SizeofRtMsg:])
	if err != nil {
		return Local{}, false
	}
	var l Local
	var metric uint32
	for ad.Next() {
		switch ad.Type() {
		case unix.RTA_PRIORITY:
			metric = ad.Uint32()
		case unix.RTA_DST:
			l.Addr, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.RTA_PREFSRC:
			l.Source, _ = netip.AddrFromSlice(ad.Bytes())
		}
	}
	return l, ad.Err() == nil && metric == Metric && l.Addr.IsValid() && int(b[1]) == l.Addr.BitLen()
}

func addressFamily(f model.Family) uint8 {
	if f == model.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func invalid(o Op, err error) error {
	return &StepError{Op: o.Verb.String(), Object: o.object(), Reason: err.Error(), Class: kernel.ErrInvalid}
}

// refusal gives an error its object, its reason and its class.
func refusal(op, object string, err error) error {
	step := &StepError{Op: op, Object: object, Err: err}
	switch {
	case errors.Is(err, unix.EPERM):
		step.Class, step.Reason = kernel.ErrUnsupported, "the capability NET_ADMIN is missing: run as root and privileged"
	case errors.Is(err, errOtherKind):
		step.Class, step.Reason = kernel.ErrConflict, "a device of this name is there and is no dummy device: remove or rename it"
	case errors.Is(err, unix.EINVAL):
		step.Class = kernel.ErrInvalid
		step.Reason = "the source is no address of this machine, or the kernel still checks whether another machine has it"
	case errors.Is(err, errNoDummies):
		step.Class, step.Reason = kernel.ErrUnsupported, "the kernel has no dummy devices: load module dummy"
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EAFNOSUPPORT):
		step.Class = kernel.ErrUnsupported
		step.Reason = "the address family is off on this machine: see the parameter net.ipv6.conf.all.disable_ipv6"
	case errors.Is(err, unix.ENETDOWN):
		step.Reason = "the loopback interface is down: set it up"
	case errors.Is(err, unix.ENODEV):
		step.Reason = "the device is not there: make it first"
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		step.Class = kernel.ErrBusy
	}
	return step
}
