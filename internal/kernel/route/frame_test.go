package route

import (
	"encoding/binary"
	"net/netip"
)

// Frames are put together by hand here: a test sends what another machine would.

const (
	etherIPv4, etherARP, etherIPv6  = 0x0800, 0x0806, 0x86dd
	protoICMP, protoUDP, protoICMP6 = 1, 17, 58
)

// ether puts a header of the link in front of a packet.
func ether(dst, src []byte, kind uint16, packet []byte) []byte {
	b := append(append([]byte{}, dst...), src...)
	return append(binary.BigEndian.AppendUint16(b, kind), packet...)
}

// arpRequest asks who has an IPv4 address. Source: RFC 826.
func arpRequest(mac []byte, from, who netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, 0, 1}
	b = append(append(b, mac...), from.AsSlice()...)
	b = append(append(b, 0, 0, 0, 0, 0, 0), who.AsSlice()...)
	return ether([]byte{255, 255, 255, 255, 255, 255}, mac, etherARP, b)
}

// neighbourSolicitation asks who has an IPv6 address. Source: RFC 4861, 4.3.
func neighbourSolicitation(mac []byte, from, who netip.Addr) []byte {
	target := who.As16()
	group := netip.AddrFrom16([16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: target[13], 14: target[14], 15: target[15]})
	b := append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, target[:]...)
	b = append(append(b, 1, 1), mac...)
	g := group.As16()
	return ether(append([]byte{0x33, 0x33}, g[12:]...), mac, etherIPv6, packet(from, group, protoICMP6, 2, b))
}

// echo asks for an answer: ping.
func echo(dst, src []byte, from, to netip.Addr) []byte {
	if to.Is4() {
		return ether(dst, src, etherIPv4, packet(from, to, protoICMP, 0, []byte{8, 0, 0, 0, 0, 1, 0, 1}))
	}
	return ether(dst, src, etherIPv6, packet(from, to, protoICMP6, 2, []byte{128, 0, 0, 0, 0, 1, 0, 1}))
}

// datagram is one of UDP.
func datagram(dst, src []byte, from, to netip.AddrPort, data string) []byte {
	b := binary.BigEndian.AppendUint16(nil, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	const header = 8
	b = binary.BigEndian.AppendUint16(b, uint16(header+len(data)))
	b = append(append(b, 0, 0), data...)
	kind := uint16(etherIPv4)
	if to.Addr().Is6() {
		kind = etherIPv6
	}
	return ether(dst, src, kind, packet(from.Addr(), to.Addr(), protoUDP, 6, b))
}

// packet puts an IP header before a payload and writes the payload's checksum at its place. Source: RFC 791, RFC 8200.
func packet(from, to netip.Addr, proto byte, sumAt int, payload []byte) []byte {
	const hops = 255
	if sumAt == 0 { // of ICMP, which sums up its own bytes alone
		binary.BigEndian.PutUint16(payload[2:], sum(payload))
	} else {
		pseudo := append(append([]byte{}, from.AsSlice()...), to.AsSlice()...)
		pseudo = append(pseudo, 0, proto)
		pseudo = binary.BigEndian.AppendUint16(pseudo, uint16(len(payload)))
		binary.BigEndian.PutUint16(payload[sumAt:], sum(append(pseudo, payload...)))
	}
	if to.Is6() {
		b := binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(payload)))
		b = append(b, proto, hops)
		return append(append(append(b, from.AsSlice()...), to.AsSlice()...), payload...)
	}
	const header = 20
	b := binary.BigEndian.AppendUint16([]byte{0x45, 0}, uint16(header+len(payload)))
	b = append(b, 0, 0, 0, 0, hops, proto, 0, 0)
	b = append(append(b, from.AsSlice()...), to.AsSlice()...)
	binary.BigEndian.PutUint16(b[10:], sum(b))
	return append(b, payload...)
}

// sum is the Internet checksum. Source: RFC 1071.
func sum(b []byte) uint16 {
	var n uint32
	for i, x := range b {
		if i%2 == 0 {
			n += uint32(x) << 8
		} else {
			n += uint32(x)
		}
	}
	for n>>16 != 0 {
		n = n&0xffff + n>>16
	}
	return ^uint16(n)
}
