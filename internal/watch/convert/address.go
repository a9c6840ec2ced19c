package convert

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// parseAddr reads an IP address as the API does: octets of IPv4 with leading zeros are decimal, an IPv4 address mapped
// into IPv6 is IPv4, a zone is not allowed.
func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		if a, err = netip.ParseAddr(stripZeros(s)); err != nil {
			return netip.Addr{}, false
		}
	}
	if a.Zone() != "" {
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// parsePrefix reads an address range in the same way and clears the bits of its host part. Blanks around it are
// ignored, as they have always been in loadBalancerSourceRanges.
func parsePrefix(s string) (netip.Prefix, bool) {
	s = strings.TrimSpace(s)
	addr, bits, ok := strings.Cut(s, "/")
	if !ok {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(stripZeros(addr) + "/" + trimZeros(bits))
	if err != nil {
		return netip.Prefix{}, false
	}
	if a := p.Addr(); a.Is4In6() {
		const mapped = 96 // bits of an IPv4-mapped address in front of the IPv4 part
		if p.Bits() < mapped {
			return netip.Prefix{}, false
		}
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-mapped)
	}
	return p.Masked(), true
}

// stripZeros removes the leading zeros of the decimal octets at the end of an address text.
func stripZeros(s string) string {
	if !strings.Contains(s, ".") {
		return s
	}
	head := ""
	if i := strings.LastIndexByte(s, ':'); i >= 0 {
		head, s = s[:i+1], s[i+1:]
	}
	octets := strings.Split(s, ".")
	for i, o := range octets {
		octets[i] = trimZeros(o)
	}
	return head + strings.Join(octets, ".")
}

// trimZeros removes leading zeros and leaves at least one digit.
func trimZeros(s string) string {
	for len(s) > 1 && s[0] == '0' {
		s = s[1:]
	}
	return s
}

// addr reads the address in a field and notes one that is none.
func (f *findings) addr(field, s string) (netip.Addr, bool) {
	a, ok := parseAddr(s)
	if !ok {
		f.add(model.Error, InvalidIP, "%s: %s is not an IP address, it is ignored: correct or remove it", field, quote(s))
	}
	return a, ok
}

// addrs reads a list of addresses, without blanks and duplicates.
func (f *findings) addrs(field string, list []string) []netip.Addr {
	var out []netip.Addr
	for i, s := range list {
		if strings.TrimSpace(s) == "" {
			continue
		}
		if a, ok := f.addr(fmt.Sprintf("%s[%d]", field, i), s); ok && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// forbidden names the class of an address that must not be an endpoint: it would send the clients' traffic to this
// node's own sockets or to whatever answers on the local link. It is empty for a good address.
func forbidden(a netip.Addr) string {
	switch {
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a.IsMulticast():
		return "a multicast address"
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "the broadcast address"
	}
	return ""
}
