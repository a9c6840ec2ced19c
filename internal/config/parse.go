package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// errAddress is what both parsers say of text that is not an address.
var errAddress = errors.New("not an IP address")

// parseAddr reads an IP address the way that Kubernetes does: leading zeros in the parts of an IPv4 address are
// accepted and mean decimal. A zone is refused.
func parseAddr(s string) (netip.Addr, error) {
	if !strings.Contains(s, ":") {
		parts := strings.Split(s, ".")
		for i, p := range parts {
			if trimmed := strings.TrimLeft(p, "0"); trimmed != "" {
				parts[i] = trimmed
			} else if p != "" {
				parts[i] = "0"
			}
		}
		s = strings.Join(parts, ".")
	}
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, errAddress
	}
	return a.Unmap(), nil
}

// parsePrefix reads a CIDR with the same leniency; bits below the mask are cleared.
func parsePrefix(s string) (netip.Prefix, error) {
	addr, length, found := strings.Cut(s, "/")
	if !found {
		return netip.Prefix{}, fmt.Errorf("%q has no prefix length", s)
	}
	a, err := parseAddr(addr)
	if err != nil {
		return netip.Prefix{}, err
	}
	bits, err := strconv.ParseUint(length, 10, 8)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("prefix length %q is not a number", length)
	}
	p, err := a.Prefix(int(bits))
	if err != nil {
		return p, fmt.Errorf("prefix length %d does not fit %s", bits, a)
	}
	return p, nil
}

// parseAddrPort reads an already checked "IP:port".
func parseAddrPort(s string) netip.AddrPort {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return netip.AddrPort{}
	}
	a, err := parseAddr(host)
	if err != nil {
		return netip.AddrPort{}
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a, uint16(p))
}

// withPort appends the port to a bare IP address and leaves everything else alone: what is wrong is for the
// validation to say.
func withPort(s string, port int32) string {
	if _, _, err := net.SplitHostPort(s); err == nil {
		return s
	}
	if _, err := parseAddr(s); err != nil {
		return s
	}
	return net.JoinHostPort(s, strconv.Itoa(int(port)))
}
