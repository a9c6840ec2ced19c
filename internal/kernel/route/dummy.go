package route

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	attr "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

const (
	// UpstreamDevice is the name of the device that upstream puts the addresses of Services on.
	UpstreamDevice = "kube-ipvs0"
	// kindDummy is the kind of device that swallows what is sent to it.
	kindDummy = "dummy"
)

var (
	// errNoDummies: the kernel does not know this kind of device.
	errNoDummies = errors.New("no dummy devices")
	// errOtherKind: the name belongs to a device that is no dummy.
	errOtherKind = errors.New("the device is of another kind")
	// errSource: an address on a device was to have a source.
	errSource = errors.New("an address on a device has no source")
)

// Dummy is addresses on a dummy device. It is never set up: an address is local also where its device is down. Link-local
// and loopback addresses on it are nobody's. Its methods act in the network namespace of the calling thread.
type Dummy struct {
	// Name is the device's, of at most 15 bytes.
	Name string
}

var _ Device = Dummy{}

// Ensure implements Device.
func (d Dummy) Ensure(ctx context.Context) error {
	s, err := netlink.Dial(unix.NETLINK_ROUTE)
	if err == nil {
		defer s.Close()
		err = d.ensure(ctx, s)
	}
	if err != nil {
		return refusal("make", d.object(), err)
	}
	return nil
}

func (d Dummy) object() string { return "dummy device " + d.Name }

func (d Dummy) ensure(ctx context.Context, s *netlink.Socket) error {
	if _, err := d.index(ctx, s); !errors.Is(err, unix.ENODEV) {
		return err
	}
	ae := attr.NewAttributeEncoder()
	ae.String(unix.IFLA_IFNAME, d.Name)
	ae.Nested(unix.IFLA_LINKINFO, func(ae *attr.AttributeEncoder) error {
		ae.String(unix.IFLA_INFO_KIND, kindDummy)
		return nil
	})
	data, err := ae.Encode()
	if err != nil {
		return err //nolint:wrapcheck // the caller's StepError names the operation
	}
	err = one(ctx, s, netlink.Request{
		Kind: unix.RTM_NEWLINK, Flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL,
		Data: append(make([]byte, unix.SizeofIfInfomsg), data...),
	})
	switch {
	case errors.Is(err, unix.EEXIST): // made by somebody meanwhile
		_, err = d.index(ctx, s)
	case errors.Is(err, unix.EOPNOTSUPP):
		err = errNoDummies
	}
	return err
}

// one sends a request alone.
func one(ctx context.Context, s *netlink.Socket, r netlink.Request) error {
	outcome, _ := s.Batch(ctx, []netlink.Request{r}) // whatever ended it stands in the outcome, too
	return outcome[0]
}

// Delete implements Device.
func (d Dummy) Delete(ctx context.Context) error {
	s, err := netlink.Dial(unix.NETLINK_ROUTE)
	if err == nil {
		defer s.Close()
		var index uint32
		if index, err = d.index(ctx, s); err == nil {
			header := make([]byte, unix.SizeofIfInfomsg)
			binary.NativeEndian.PutUint32(header[4:], index)
			err = one(ctx, s, netlink.Request{Kind: unix.RTM_DELLINK, Data: header})
		}
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return refusal("delete", d.object(), err)
	}
	return nil
}

// index gives the number of the device, ENODEV if there is none, errOtherKind if it is no dummy.
func (d Dummy) index(ctx context.Context, s *netlink.Socket) (uint32, error) {
	ae := attr.NewAttributeEncoder()
	ae.String(unix.IFLA_IFNAME, d.Name)
	data, err := ae.Encode()
	if err != nil {
		return 0, err //nolint:wrapcheck // the caller's StepError names the operation
	}
	var index uint32
	var kind string
	r := netlink.Request{Kind: unix.RTM_GETLINK, Data: append(make([]byte, unix.SizeofIfInfomsg), data...)}
	err = s.Ask(ctx, r, func(m netlink.Message) error {
		if len(m.Data) < unix.SizeofIfInfomsg {
			return unix.EBADMSG
		}
		index = binary.NativeEndian.Uint32(m.Data[4:])
		var err error
		kind, err = kindOf(m.Data[unix.SizeofIfInfomsg:])
		return err
	})
	if err == nil && kind != kindDummy {
		err = errOtherKind
	}
	return index, err
}

// kindOf reads the kind of a device off the attributes of a message about it; hardware has none.
func kindOf(attributes []byte) (string, error) {
	ad, err := attr.NewAttributeDecoder(attributes)
	if err != nil {
		return "", err //nolint:wrapcheck // the caller's StepError names the operation
	}
	kind := ""
	for ad.Next() {
		if ad.Type() != unix.IFLA_LINKINFO {
			continue
		}
		ad.Nested(func(in *attr.AttributeDecoder) error {
			for in.Next() {
				if in.Type() == unix.IFLA_INFO_KIND {
					kind = in.String()
				}
			}
			return nil
		})
	}
	return kind, ad.Err() //nolint:wrapcheck // the caller's StepError names the operation
}

// List implements Table. There are no addresses where there is no device.
func (d Dummy) List(ctx context.Context, family model.Family) ([]Local, error) {
	s, err := netlink.Dial(unix.NETLINK_ROUTE)
	var out []Local
	if err == nil {
		defer s.Close()
		strict := s.Strict() == nil
		out, err = settledList(func() ([]Local, error) { return d.list(ctx, s, family, strict) })
	}
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, refusal("list", family.String()+" addresses of "+d.object(), err)
	}
	return out, nil
}

func (d Dummy) list(ctx context.Context, s *netlink.Socket, family model.Family, strict bool) ([]Local, error) {
	index, err := d.index(ctx, s)
	if err != nil {
		return nil, err
	}
	header := ifaddrmsg{family: addressFamily(family)}
	if strict {
		header.index = index
	}
	var out []Local
	err = s.Dump(ctx, netlink.Request{Kind: unix.RTM_GETADDR, Data: header.bytes()}, func(m netlink.Message) error {
		a, on := decodeAddr(m.Data)
		if on == index && a.IsValid() && model.FamilyOf(a) == family && !a.IsLinkLocalUnicast() && !a.IsLoopback() {
			out = append(out, Local{Addr: a})
		}
		return nil
	})
	slices.SortFunc(out, Local.Compare)
	return slices.Compact(out), err
}

// Apply implements Table. There is nothing to Change of an address, so that is refused if it names a source.
func (d Dummy) Apply(ctx context.Context, ops []Op) []error {
	return apply(ctx, ops, func(s *netlink.Socket) (encoder, error) {
		index, err := d.index(ctx, s)
		if err != nil {
			return nil, err
		}
		return func(o Op) (netlink.Request, error) { return encodeAddr(o, index) }, nil
	})
}

// ifaddrmsg is the header of a message about an address: struct ifaddrmsg of linux/if_addr.h.
type ifaddrmsg struct {
	family, bits, flags, scope uint8
	index                      uint32
}

func (m ifaddrmsg) bytes() []byte {
	return binary.NativeEndian.AppendUint32([]byte{m.family, m.bits, m.flags, m.scope}, m.index)
}

// encodeAddr gives the message of an Op on an address. An address has the scope of this machine alone, so that no
// connection to elsewhere takes it for its source; other machines are not asked whether they have it.
func encodeAddr(o Op, index uint32) (netlink.Request, error) {
	if o.Source.IsValid() && o.Verb != Remove {
		return netlink.Request{}, errSource
	}
	header := ifaddrmsg{
		family: addressFamily(model.FamilyOf(o.Addr)), bits: uint8(o.Addr.BitLen()), flags: unix.IFA_F_NODAD,
		scope: unix.RT_SCOPE_HOST, index: index,
	}
	if o.Addr.Is4() {
		header.flags = 0
	}
	r := netlink.Request{Kind: unix.RTM_DELADDR, Data: putAddr(header.bytes(), unix.IFA_LOCAL, o.Addr)}
	if o.Verb != Remove {
		r.Kind, r.Flags = unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL
	}
	return r, nil
}

// decodeAddr gives the address that a message is about, and the number of its interface.
func decodeAddr(b []byte) (netip.Addr, uint32) {
	if len(b) < unix.SizeofIfAddrmsg {
		return netip.Addr{}, 0
	}
	ad, err := attr.NewAttributeDecoder(b[unix.SizeofIfAddrmsg:])
	if err != nil {
		return netip.Addr{}, 0
	}
	var local, address netip.Addr
	for ad.Next() {
		switch ad.Type() {
		case unix.IFA_LOCAL:
			local, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.IFA_ADDRESS:
			address, _ = netip.AddrFromSlice(ad.Bytes())
		}
	}
	if !local.IsValid() { // IPv6 tells the address alone, which is that of the other side for IPv4
		local = address
	}
	return local, binary.NativeEndian.Uint32(b[4:])
}
