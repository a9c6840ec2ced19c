package ipset

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	attr "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The commands, attributes and flags that are used. Source: linux/netfilter/ipset/ip_set.h.
const (
	protocol = 6 // the lowest that all kernels with the extension skbinfo speak

	cmdCreate  = 2
	cmdDestroy = 3
	cmdSwap    = 6
	cmdList    = 7
	cmdAdd     = 9
	cmdDel     = 10
	cmdType    = 13

	attrProtocol = 1
	attrSetName  = 2
	attrTypeName = 3 // the second name in a swap
	attrRevision = 4
	attrFamily   = 5
	attrData     = 7
	attrADT      = 8

	dataIP      = 1
	dataPort    = 4
	dataPortTo  = 5
	dataProto   = 7
	dataFlags   = 8
	dataMaxElem = 19
	dataIP2     = 20
	dataCIDR2   = 21
	dataMark    = 27

	addrIPv4 = 1
	addrIPv6 = 2

	flagMarks = 1 << 6
)

// genLen is the length of struct nfgenmsg, which all messages begin with.
const genLen = 4

const maxPort = 65535

// request makes a message; fill adds its attributes behind the protocol's version.
func request(cmd uint8, flags uint16, fill func(*attr.AttributeEncoder)) (netlink.Request, error) {
	ae := attr.NewAttributeEncoder()
	ae.Uint8(attrProtocol, protocol)
	fill(ae)
	data, err := ae.Encode()
	if err != nil {
		return netlink.Request{}, fmt.Errorf("encode: %w", err)
	}
	return netlink.Request{
		Kind: unix.NFNL_SUBSYS_IPSET<<8 | uint16(cmd), Flags: flags,
		Data: append([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}, data...),
	}, nil
}

// Numbers stand in network byte order, and the kernel insists on the flag that says so.

func put16(ae *attr.AttributeEncoder, typ, v uint16) {
	ae.Bytes(typ|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint16(nil, v))
}

func put32(ae *attr.AttributeEncoder, typ uint16, v uint32) {
	ae.Bytes(typ|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint32(nil, v))
}

func put64(ae *attr.AttributeEncoder, typ uint16, v uint64) {
	ae.Bytes(typ|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint64(nil, v))
}

func putAddr(ae *attr.AttributeEncoder, typ uint16, a netip.Addr) {
	ae.Nested(typ, func(ae *attr.AttributeEncoder) error {
		kind := uint16(addrIPv4)
		if a.Is6() {
			kind = addrIPv6
		}
		ae.Bytes(kind|unix.NLA_F_NET_BYTEORDER, a.AsSlice())
		return nil
	})
}

// encode gives the message of an Op; revision is that of the set's type.
func encode(o Op, revision uint8) (netlink.Request, error) {
	name := func(ae *attr.AttributeEncoder) { ae.String(attrSetName, o.Set.Name) }
	switch o.Verb {
	case Create:
		return request(cmdCreate, unix.NLM_F_CREATE, func(ae *attr.AttributeEncoder) {
			name(ae)
			ae.String(attrTypeName, string(o.Set.Type))
			ae.Uint8(attrRevision, revision)
			ae.Uint8(attrFamily, addressFamily(o.Set.Family))
			ae.Nested(attrData, func(ae *attr.AttributeEncoder) error {
				putProperties(ae, o.Set)
				return nil
			})
		})
	case Destroy:
		return request(cmdDestroy, 0, name)
	case Swap:
		return request(cmdSwap, 0, func(ae *attr.AttributeEncoder) {
			name(ae)
			ae.String(attrTypeName, o.With)
		})
	case Add, Remove:
		cmd := uint8(cmdAdd)
		if o.Verb == Remove {
			cmd = cmdDel
		}
		return request(cmd, 0, func(ae *attr.AttributeEncoder) {
			name(ae)
			ae.Nested(attrData, func(ae *attr.AttributeEncoder) error {
				putEntry(ae, o)
				return nil
			})
		})
	}
	return netlink.Request{}, fmt.Errorf("there is no verb %d", o.Verb)
}

func putProperties(ae *attr.AttributeEncoder, s Set) {
	if s.Type == BitmapPort {
		put16(ae, dataPort, 0)
		put16(ae, dataPortTo, maxPort)
	}
	if s.MaxElem != 0 {
		put32(ae, dataMaxElem, s.MaxElem)
	}
	if s.Marks {
		put32(ae, dataFlags, flagMarks)
	}
}

func putEntry(ae *attr.AttributeEncoder, o Op) {
	e := o.Entry
	if e.Addr.IsValid() {
		putAddr(ae, dataIP, e.Addr)
	}
	if e.Proto != 0 || o.Set.Type == BitmapPort {
		put16(ae, dataPort, e.Port)
	}
	if e.Proto != 0 {
		ae.Uint8(dataProto, uint8(e.Proto))
	}
	if e.Net.IsValid() {
		putAddr(ae, dataIP2, e.Net.Addr())
		ae.Uint8(dataCIDR2, uint8(e.Net.Bits()))
	}
	if o.Mark != 0 && o.Verb == Add {
		put64(ae, dataMark, uint64(o.Mark)<<32|0xffffffff)
	}
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

// decode adds what one message of a listing says to a content. It takes nothing from a message that is malformed.
func decode(data []byte, into *Content) error {
	if len(data) < genLen {
		return errShort
	}
	ad, err := attr.NewAttributeDecoder(data[genLen:])
	if err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	var adt []byte
	for ad.Next() {
		switch ad.Type() {
		case attrSetName:
			into.Name = ad.String()
		case attrTypeName:
			into.Type = Type(ad.String())
		case attrFamily:
			into.Family = familyOf(ad.Uint8())
		case attrData:
			ad.Nested(func(ad *attr.AttributeDecoder) error { return decodeProperties(ad, &into.Set) })
		case attrADT: // behind the type, which its entries depend on
			adt = ad.Bytes()
		}
	}
	if err := ad.Err(); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	if adt == nil || !known(into.Type) {
		return nil
	}
	return decodeEntries(adt, into)
}

var errShort = fmt.Errorf("decode: a message is too short")

func known(t Type) bool {
	return t == HashIP || t == HashIPPort || t == HashIPPortNet || t == BitmapPort
}

func familyOf(f uint8) model.Family {
	switch f {
	case unix.AF_INET:
		return model.IPv4
	case unix.AF_INET6:
		return model.IPv6
	}
	return 0
}

func decodeProperties(ad *attr.AttributeDecoder, s *Set) error {
	for ad.Next() {
		switch b := ad.Bytes(); {
		case ad.Type() == dataMaxElem && len(b) == 4:
			s.MaxElem = binary.BigEndian.Uint32(b)
		case ad.Type() == dataFlags && len(b) == 4:
			s.Marks = binary.BigEndian.Uint32(b)&flagMarks != 0
		}
	}
	return ad.Err() //nolint:wrapcheck // decode does
}

func decodeEntries(adt []byte, into *Content) error {
	ad, err := attr.NewAttributeDecoder(adt)
	if err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	for ad.Next() {
		if ad.Type() != attrData {
			continue
		}
		ad.Nested(func(ad *attr.AttributeDecoder) error {
			e, mark, err := decodeEntry(ad)
			if err == nil {
				into.Entries[e] = mark
			}
			return err
		})
	}
	if err := ad.Err(); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return nil
}

func decodeEntry(ad *attr.AttributeDecoder) (e Entry, mark uint32, err error) {
	var second netip.Addr
	bits := -1
	for ad.Next() {
		switch b := ad.Bytes(); {
		case ad.Type() == dataIP:
			e.Addr, err = decodeAddr(b)
		case ad.Type() == dataIP2:
			second, err = decodeAddr(b)
		case ad.Type() == dataCIDR2 && len(b) == 1:
			bits = int(b[0])
		case ad.Type() == dataPort && len(b) == 2:
			e.Port = binary.BigEndian.Uint16(b)
		case ad.Type() == dataProto && len(b) == 1:
			e.Proto = model.Protocol(b[0])
		case ad.Type() == dataMark && len(b) == 8:
			mark = uint32(binary.BigEndian.Uint64(b) >> 32)
		}
		if err != nil {
			return e, 0, err
		}
	}
	if second.IsValid() {
		if bits < 0 { // a network of one address has no attribute for its length
			bits = second.BitLen()
		}
		e.Net = netip.PrefixFrom(second, bits)
	}
	return e, mark, ad.Err() //nolint:wrapcheck // decode does
}

func decodeAddr(b []byte) (netip.Addr, error) {
	ad, err := attr.NewAttributeDecoder(b)
	if err != nil {
		return netip.Addr{}, err //nolint:wrapcheck // decode does
	}
	for ad.Next() {
		if a, ok := netip.AddrFromSlice(ad.Bytes()); ok {
			return a, nil
		}
	}
	return netip.Addr{}, errShort
}
