package backendtest

import (
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// mirror gives the IPv6 twin of a script that speaks of IPv4 only; "" if it speaks of IPv6 itself. Each range that
// scripts use has its twin, and within it the last numbers stay readable:
//
//	10.20.0.11     fd20::11            nodes
//	10.60.1.21     fd60:1::21          pods; 10.60.128.0/20 and up are the crowds'
//	10.70.1.10     fd70::10a           cluster IPs
//	192.0.2.10     2001:db8:2::10      load balancers
//	203.0.113.9    2001:db8:203::9     external IPs
//	198.51.100.7   2001:db8:100::7     clients far away
//	172.31.9.5     fd31:9::5           a node's further addresses
//	169.254.0.9    fe80::9             link-local
//	127.0.0.1      ::1
func mirror(text string) string {
	if strings.Contains(text, "IPv6") || strings.Contains(text, "::") {
		return ""
	}
	text = strings.ReplaceAll(text, "addressType: IPv4", "addressType: IPv6")
	v4 := regexp.MustCompile(`\b(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})(/\d{1,2}\b)?(:\d+\b)?`)
	return v4.ReplaceAllStringFunc(text, func(s string) string {
		m := v4.FindStringSubmatch(s)
		var n [4]int
		for i := range n {
			n[i], _ = strconv.Atoi(m[i+1]) // the pattern allows digits only
			if n[i] > 255 {
				return s
			}
		}
		if m[5] != "" && m[6] == "" {
			return mirrorPrefix(s)
		}
		twin := mirrorAddr(netip.AddrFrom4([4]byte{byte(n[0]), byte(n[1]), byte(n[2]), byte(n[3])}))
		switch {
		case m[6] != "":
			return "[" + twin + "]" + m[6]
		case m[5] != "": // address/prefix:port does not occur
			return s
		}
		return twin
	})
}

func mirrorAddr(a netip.Addr) string {
	b := a.As4()
	switch {
	case b[0] == 127:
		return "::1"
	case b[0] == 0:
		return "::"
	case b[0] == 10 && b[1] == 20:
		return fmt.Sprintf("fd20::%d", b[3])
	case b[0] == 10 && b[1] == 60 && b[2] >= 128:
		number := 1 + (int(b[2])-128)/16
		return fmt.Sprintf("fd60:10%d::%x", number, (int(b[2])-128)%16*256+int(b[3]))
	case b[0] == 10 && b[1] == 60:
		return fmt.Sprintf("fd60:%d::%d", b[2], b[3])
	case b[0] == 10 && b[1] == 70:
		return fmt.Sprintf("fd70::%x", int(b[2])*256+int(b[3]))
	case b[0] == 192 && b[1] == 0:
		return fmt.Sprintf("2001:db8:2::%d", b[3])
	case b[0] == 203:
		return fmt.Sprintf("2001:db8:203::%d", b[3])
	case b[0] == 198:
		return fmt.Sprintf("2001:db8:100::%d", b[3])
	case b[0] == 172:
		return fmt.Sprintf("fd%d:%d::%d", b[1], b[2], b[3])
	case b[0] == 169:
		return fmt.Sprintf("fe80::%d", b[3])
	}
	return a.String()
}

// mirrorPrefix gives the twin of a range: a whole range of one sort becomes the whole twin, a single address a single
// one, and other sizes keep their distance from the full length.
func mirrorPrefix(s string) string {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return s
	}
	switch {
	case p.Bits() == 0:
		return "::/0"
	case p.Bits() == 32:
		return mirrorAddr(p.Addr()) + "/128"
	case p.Addr().IsLoopback():
		return "::1/128"
	case s == "10.60.0.0/16":
		return "fd60::/16"
	case s == "10.70.0.0/16":
		return "fd70::/112"
	case p.Bits() == 24:
		head, _, _ := strings.Cut(mirrorAddr(p.Addr()), "::")
		return head + "::/64"
	}
	return fmt.Sprintf("%s/%d", mirrorAddr(p.Addr()), 96+p.Bits())
}
