package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	mathbits "math/bits"
	"net/netip"
	"time"

	attr "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The commands and attributes that are used. Source: linux/ip_vs.h.
const (
	familyName = "IPVS"
	version    = 1

	cmdNewServer = 1
	cmdSetServer = 2
	cmdDelServer = 3
	cmdGetServer = 4
	cmdNewDest   = 5
	cmdSetDest   = 6
	cmdDelDest   = 7
	cmdGetDest   = 8
	cmdSetConfig = 12
	cmdGetConfig = 13
	cmdGetInfo   = 15

	attrServer        = 1
	attrDest          = 2
	attrTimeoutTCP    = 4
	attrTimeoutTCPFin = 5
	attrTimeoutUDP    = 6

	infoVersion = 1
	infoBuckets = 2

	serverFamily    = 1
	serverProto     = 2
	serverAddr      = 3
	serverPort      = 4
	serverMark      = 5
	serverScheduler = 6
	serverFlags     = 7
	serverTimeout   = 8
	serverNetmask   = 9

	destAddr       = 1
	destPort       = 2
	destMethod     = 3
	destWeight     = 4
	destUpper      = 5
	destLower      = 6
	destActive     = 7
	destInactive   = 8
	destPersistent = 9
	destFamily     = 11

	methodMask = 0x7
)

// genLen is the length of struct genlmsghdr, which all messages begin with.
const genLen = 4

// request makes a message of the generic netlink family with the given number.
func request(family uint16, cmd uint8, fill func(*attr.AttributeEncoder)) (netlink.Request, error) {
	ae := attr.NewAttributeEncoder()
	fill(ae)
	data, err := ae.Encode()
	if err != nil {
		return netlink.Request{}, fmt.Errorf("encode: %w", err)
	}
	return netlink.Request{Kind: family, Data: append([]byte{cmd, version, 0, 0}, data...)}, nil
}

func nested(ae *attr.AttributeEncoder, typ uint16, fill func(*attr.AttributeEncoder)) {
	ae.Nested(typ, func(ae *attr.AttributeEncoder) error {
		fill(ae)
		return nil
	})
}

// encode gives the message of an Op.
func encode(family uint16, o Op) (netlink.Request, error) {
	cmd := [...]uint8{0, cmdNewServer, cmdSetServer, cmdDelServer, cmdNewDest, cmdSetDest, cmdDelDest}[o.Verb]
	return request(family, cmd, func(ae *attr.AttributeEncoder) {
		nested(ae, attrServer, func(ae *attr.AttributeEncoder) {
			putKey(ae, o.Key)
			if o.Verb == AddServer || o.Verb == EditServer {
				putProperties(ae, o.Key.Family, o.Properties)
			}
		})
		if o.Verb == AddDestination || o.Verb == EditDestination || o.Verb == RemoveDestination {
			nested(ae, attrDest, func(ae *attr.AttributeEncoder) { putDestination(ae, o) })
		}
	})
}

func putKey(ae *attr.AttributeEncoder, k Key) {
	ae.Uint16(serverFamily, addressFamily(k.Family))
	if k.Mark != 0 {
		ae.Uint32(serverMark, k.Mark)
		return
	}
	ae.Uint16(serverProto, uint16(k.Proto))
	ae.Bytes(serverAddr, paddedAddr(k.Addr.Addr()))
	ae.Bytes(serverPort, binary.BigEndian.AppendUint16(nil, k.Addr.Port()))
}

func putProperties(ae *attr.AttributeEncoder, f model.Family, p Properties) {
	ae.String(serverScheduler, p.Scheduler)
	flags := binary.NativeEndian.AppendUint32(nil, uint32(p.Flags))
	ae.Bytes(serverFlags, binary.NativeEndian.AppendUint32(flags, math.MaxUint32)) // the mask: all of them
	ae.Uint32(serverTimeout, uint32(p.Timeout/time.Second))
	ae.Bytes(serverNetmask, mask(f, p.Prefix))
}

// mask gives a prefix as the kernel has it: a mask in network byte order in IPv4, a length in IPv6.
func mask(f model.Family, prefix uint8) []byte {
	n := int(prefix)
	if n == 0 {
		n = bits(f)
	}
	if f == model.IPv6 {
		return binary.NativeEndian.AppendUint32(nil, uint32(n))
	}
	return binary.BigEndian.AppendUint32(nil, ^uint32(0)<<(32-n))
}

// prefixOf is the inverse of mask.
func prefixOf(f model.Family, b []byte) uint8 {
	if len(b) != 4 {
		return OddPrefix
	}
	n := int(binary.NativeEndian.Uint32(b))
	if f == model.IPv4 {
		n = mathbits.LeadingZeros32(^binary.BigEndian.Uint32(b))
	}
	switch {
	case n == bits(f):
		return 0
	case n == 0 || n > bits(f) || !bytes.Equal(mask(f, uint8(n)), b):
		return OddPrefix
	}
	return uint8(n)
}

func putTimeouts(ae *attr.AttributeEncoder, t Timeouts) {
	ae.Uint32(attrTimeoutTCP, uint32(t.TCP/time.Second))
	ae.Uint32(attrTimeoutTCPFin, uint32(t.TCPFin/time.Second))
	ae.Uint32(attrTimeoutUDP, uint32(t.UDP/time.Second))
}

func putDestination(ae *attr.AttributeEncoder, o Op) {
	ae.Bytes(destAddr, paddedAddr(o.To.Addr()))
	ae.Bytes(destPort, binary.BigEndian.AppendUint16(nil, o.To.Port()))
	ae.Uint16(destFamily, addressFamily(model.FamilyOf(o.To.Addr())))
	if o.Verb == RemoveDestination {
		return
	}
	ae.Uint32(destMethod, uint32(o.Method))
	ae.Uint32(destWeight, uint32(o.Weight))
	ae.Uint32(destUpper, o.Upper)
	ae.Uint32(destLower, o.Lower)
}

// paddedAddr gives an address as a union of both families: 16 bytes.
func paddedAddr(a netip.Addr) []byte {
	out := make([]byte, 16)
	copy(out, a.AsSlice())
	return out
}

func addressFamily(f model.Family) uint16 {
	if f == model.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

var errMalformed = errors.New("decode: a message that is malformed")

// walk hands over the attributes of a message.
func walk(data []byte, each func(typ uint16, b []byte)) error {
	if len(data) < genLen {
		return errMalformed
	}
	return walkBare(data[genLen:], each)
}

func walkBare(data []byte, each func(typ uint16, b []byte)) error {
	ad, err := attr.NewAttributeDecoder(data)
	if err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	for ad.Next() {
		each(ad.Type(), ad.Bytes())
	}
	if err := ad.Err(); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return nil
}

// attributes hands over the attributes that are nested in those of one type.
func attributes(data []byte, typ uint16, each func(typ uint16, b []byte)) error {
	var inner error
	err := walk(data, func(t uint16, b []byte) {
		if t == typ && inner == nil {
			inner = walkBare(b, each)
		}
	})
	if err != nil {
		return err
	}
	return inner
}

// number reads a value of 2 or 4 bytes; another length is 0.
func number(b []byte) uint32 {
	switch len(b) {
	case 2:
		return uint32(binary.NativeEndian.Uint16(b))
	case 4:
		return binary.NativeEndian.Uint32(b)
	}
	return 0
}

// decodeServer reads one message of a listing of servers.
func decodeServer(data []byte) (Server, error) {
	var s Server
	var addr, mask []byte
	var port uint16
	err := attributes(data, attrServer, func(typ uint16, b []byte) {
		switch {
		case typ == serverFamily:
			s.Family = familyOf(number(b))
		case typ == serverProto:
			s.Proto = model.Protocol(number(b))
		case typ == serverAddr:
			addr = b
		case typ == serverPort && len(b) == 2:
			port = binary.BigEndian.Uint16(b)
		case typ == serverMark:
			s.Mark = number(b)
		case typ == serverScheduler:
			s.Scheduler = text(b)
		case typ == serverFlags && len(b) >= 4:
			s.Flags = Flags(binary.NativeEndian.Uint32(b)) & allFlags
		case typ == serverTimeout:
			s.Timeout = time.Duration(number(b)) * time.Second
		case typ == serverNetmask:
			mask = b
		}
	})
	if err != nil {
		return s, err
	}
	if s.Family == 0 {
		return s, errMalformed
	}
	if s.Flags&Persistent == 0 { // the kernel keeps both, and uses them for nothing
		s.Timeout = 0
	} else {
		s.Prefix = prefixOf(s.Family, mask)
	}
	if s.Mark != 0 {
		s.Proto = 0
		return s, nil
	}
	a, ok := addrOf(s.Family, addr)
	if !ok {
		return s, errMalformed
	}
	s.Addr = netip.AddrPortFrom(a, port)
	return s, nil
}

// decodeDestination reads one message of a listing of destinations; family is that of the server.
func decodeDestination(data []byte, family model.Family) (Destination, error) {
	var d Destination
	var addr []byte
	var port uint16
	err := attributes(data, attrDest, func(typ uint16, b []byte) {
		switch {
		case typ == destAddr:
			addr = b
		case typ == destPort && len(b) == 2:
			port = binary.BigEndian.Uint16(b)
		case typ == destMethod:
			d.Method = Method(number(b) & methodMask)
		case typ == destWeight:
			d.Weight = uint16(min(number(b), math.MaxUint16))
		case typ == destUpper:
			d.Upper = number(b)
		case typ == destLower:
			d.Lower = number(b)
		case typ == destActive:
			d.Active = number(b)
		case typ == destInactive:
			d.Inactive = number(b)
		case typ == destPersistent:
			d.Persistent = number(b)
		case typ == destFamily: // a tunnel may lead to the other family; before Linux 3.18 there is no such attribute
			family = familyOf(number(b))
		}
	})
	if err != nil {
		return d, err
	}
	a, ok := addrOf(family, addr)
	if !ok {
		return d, errMalformed
	}
	d.Addr = netip.AddrPortFrom(a, port)
	return d, nil
}

func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

func familyOf(n uint32) model.Family {
	switch n {
	case unix.AF_INET:
		return model.IPv4
	case unix.AF_INET6:
		return model.IPv6
	}
	return 0
}

func addrOf(f model.Family, b []byte) (netip.Addr, bool) {
	if f == 0 || len(b) < bits(f)/8 {
		return netip.Addr{}, false
	}
	return netip.AddrFromSlice(b[:bits(f)/8])
}

// decodeInfo reads the answer that tells about IPVS.
func decodeInfo(data []byte) (Info, error) {
	var i Info
	err := walk(data, func(typ uint16, b []byte) {
		switch typ {
		case infoVersion:
			v := number(b)
			i.Version = fmt.Sprintf("%d.%d.%d", v>>16&0xff, v>>8&0xff, v&0xff)
		case infoBuckets:
			i.Buckets = number(b)
		}
	})
	return i, err
}

// decodeTimeouts reads the answer that tells the timeouts.
func decodeTimeouts(data []byte) (Timeouts, error) {
	var t Timeouts
	err := walk(data, func(typ uint16, b []byte) {
		d := time.Duration(number(b)) * time.Second
		switch typ {
		case attrTimeoutTCP:
			t.TCP = d
		case attrTimeoutTCPFin:
			t.TCPFin = d
		case attrTimeoutUDP:
			t.UDP = d
		}
	})
	return t, err
}
