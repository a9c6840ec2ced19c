package ipset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

var errMalformed = errors.New("a message of the kernel is malformed")

// attributes hands over each attribute of a text, without the flags of its kind.
func attributes(b []byte, each func(kind uint16, value []byte) error) error {
	for len(b) > 0 {
		if len(b) < 4 {
			return errMalformed
		}
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return errMalformed
		}
		if err := each(binary.NativeEndian.Uint16(b[2:])&typeMask, b[4:n]); err != nil {
			return err
		}
		b = b[min(netlink.Align(n), len(b)):]
	}
	return nil
}

// header hands over the attributes of a whole message.
func header(data []byte, each func(kind uint16, value []byte) error) error {
	if len(data) < genLen {
		return errMalformed
	}
	return attributes(data[genLen:], each)
}

// name finds a set's name in a message. It is a part of the message.
func name(data []byte) (found []byte, err error) {
	err = header(data, func(kind uint16, value []byte) error {
		if kind == attrSetName {
			found = word(value)
		}
		return nil
	})
	return found, err
}

// word gives a text less the zero byte that ends it.
func word(b []byte) []byte {
	text, _, _ := bytes.Cut(b, []byte{0})
	return text
}

// versions finds the newest and the oldest version, or revision, in an answer.
func versions(data []byte, newestKind uint16) (oldest, newest uint8, err error) {
	found := false
	err = header(data, func(kind uint16, value []byte) error {
		switch {
		case kind != newestKind && kind != attrOldest:
		case len(value) != 1:
			return errMalformed
		case kind == newestKind:
			newest, found = value[0], true
		default:
			oldest = value[0]
		}
		return nil
	})
	if err == nil && (!found || oldest > newest) {
		err = errMalformed
	}
	return oldest, newest, err
}

// decode adds what one message of a listing says to a content: the first has the set's properties, and each some entries.
func decode(data []byte, into *Content) error {
	var properties, entries []byte
	err := header(data, func(kind uint16, value []byte) error {
		switch kind {
		case attrSetName:
			into.Name = string(word(value))
		case attrTypeName:
			into.Type = Type(word(value))
		case attrFamily:
			if len(value) == 1 {
				into.Family = familyOf(value[0])
			}
		case attrData:
			properties = value
		case attrADT:
			entries = value
		}
		return nil
	})
	if err != nil {
		return err
	}
	if _, known := into.Type.form(); !known {
		into.Foreign = true
		return nil
	}
	if properties != nil {
		elements, err := decodeProperties(properties, &into.Set)
		if err != nil {
			return err
		}
		if into.Entries == nil {
			into.Entries = make(map[Entry]uint32, elements)
		}
	}
	return attributes(entries, func(kind uint16, value []byte) error {
		if kind != attrData {
			return nil
		}
		return decodeEntry(value, into)
	})
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

// decodeProperties also gives for how many entries to make room: what the kernel says, within reason.
func decodeProperties(b []byte, s *Set) (room int, err error) {
	const reason = 1 << 16
	from, to := uint16(0), uint16(maxPort)
	err = attributes(b, func(kind uint16, value []byte) error {
		number := uint64(0)
		switch len(value) {
		case 1:
			number = uint64(value[0])
		case 2:
			number = uint64(binary.BigEndian.Uint16(value))
		case 4:
			number = uint64(binary.BigEndian.Uint32(value))
		}
		switch kind {
		case dataMaxElem:
			s.MaxElem = uint32(number)
		case dataTimeout:
			s.Timeouts, s.Timeout = true, time.Duration(number)*time.Second
		case dataFlags:
			s.Counters, s.Comments, s.Marks = number&flagCounters != 0, number&flagComments != 0, number&flagMarks != 0
			s.Foreign = s.Foreign || number&^(flagCounters|flagComments|flagMarks) != 0
		case dataPort:
			from = uint16(number)
		case dataPortTo:
			to = uint16(number)
		case dataNetmask, dataMarkMask, dataBitmask:
			s.Foreign = true
		case dataElements:
			room = int(min(number, reason))
		}
		return nil
	})
	s.Foreign = s.Foreign || s.Type == BitmapPort && (from != 0 || to != maxPort)
	return room, err
}

func decodeEntry(b []byte, into *Content) error {
	var e Entry
	var first, second netip.Addr
	bits, bits2 := -1, -1
	mark, strange := uint64(0), false
	err := attributes(b, func(kind uint16, value []byte) (err error) {
		switch n := len(value); {
		case kind == dataIP:
			first, err = decodeAddr(value)
		case kind == dataIP2:
			second, err = decodeAddr(value)
		case kind == dataCIDR && n == 1:
			bits = int(value[0])
		case kind == dataCIDR2 && n == 1:
			bits2 = int(value[0])
		case kind == dataPort && n == 2:
			e.Port = binary.BigEndian.Uint16(value)
		case kind == dataProto && n == 1:
			e.Proto = model.Protocol(value[0])
		case kind == dataMark && n == 8:
			mark = binary.BigEndian.Uint64(value)
			strange = strange || mark != 0 && uint32(mark) != ^uint32(0)
		case kind == dataFlags, kind == dataPriority, kind == dataQueue:
			strange = true
		}
		return err
	})
	if err != nil {
		return err
	}
	has, _ := into.Type.form()
	if !has.addr {
		first, second, bits2 = netip.Addr{}, first, bits
	}
	e.Addr = first
	if has.net && second.IsValid() {
		if bits2 < 0 || has.single { // one address has no attribute for its length
			bits2 = second.BitLen()
		}
		e.Net = netip.PrefixFrom(second, bits2)
	}
	if err := into.checkEntry(e); err != nil {
		return fmt.Errorf("%w: %w", errMalformed, err)
	}
	if into.Entries == nil {
		into.Entries = map[Entry]uint32{}
	}
	into.Entries[e] = uint32(mark >> 32)
	into.Foreign = into.Foreign || strange
	return nil
}

func decodeAddr(b []byte) (a netip.Addr, err error) {
	err = attributes(b, func(kind uint16, value []byte) error {
		ok := false
		if a, ok = netip.AddrFromSlice(value); !ok || (kind == addrIPv4) != a.Is4() {
			return errMalformed
		}
		return nil
	})
	return a, err
}
