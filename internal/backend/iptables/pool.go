package iptables

import (
	"hash/fnv"
	"net/netip"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// groupMax is the largest number of endpoints that one chain chooses among. Above, endpoints are put into 16 groups by
// a hash of their address and port, and so on, so that a connection passes some 8 rules for each level instead of half
// the pool; and an endpoint that comes or goes changes only its own groups.
const groupMax = 16

// A member is one endpoint of a pool with what a chosen connection does ("-j KUBE-SEP-X", "-p tcp -j DNAT ...").
type member struct {
	endpoint netip.AddrPort
	// before goes in front of the statistic match, after behind it.
	before, after string
}

// choose gives the rules that send a connection to each of the members with the same probability. Chains of groups are
// handed to write.
func choose(pool string, members []member, path []byte, write func(name string, b ruleset.Body)) []string {
	if len(members) <= groupMax || len(path) >= 16 {
		rules := make([]string, len(members))
		for i, m := range members {
			rules[i] = m.before + share(1, len(members)-i) + m.after
		}
		return rules
	}
	var groups [16][]member
	for _, m := range members {
		i := nibbleAt(m.endpoint, len(path))
		groups[i] = append(groups[i], m)
	}
	rules := make([]string, 0, 16)
	left := len(members)
	for i, group := range groups {
		switch len(group) {
		case 0:
			continue
		case 1:
			rules = append(rules, group[0].before+share(1, left)+group[0].after)
		default:
			below := append(append(make([]byte, 0, len(path)+1), path...), byte(i))
			name := groupChain(pool, below)
			write(name, ruleset.BodyOf(choose(pool, group, below, write)...))
			rules = append(rules, share(len(group), left)+"-j "+name)
		}
		left -= len(group)
	}
	return rules
}

// share gives the match of n in left connections; nothing when that is all of them.
func share(n, left int) string {
	if n >= left {
		return ""
	}
	return "-m statistic --mode random --probability " + xtables.Probability(float64(n)/float64(left)) + " "
}

// nibbleAt gives four bits of an endpoint's hash. The hash must never change: a restarted process, and the next version
// too, finds its groups in the kernel by it.
func nibbleAt(ep netip.AddrPort, level int) byte {
	h := fnv.New64a()
	a := ep.Addr().As16()
	_, _ = h.Write(a[:])
	_, _ = h.Write([]byte{byte(ep.Port() >> 8), byte(ep.Port())})
	// FNV leaves the high bits of similar inputs alike; a multiplication by an odd constant spreads them.
	sum := h.Sum64()
	sum ^= sum >> 32
	sum *= 0x9e3779b97f4a7c15
	return byte(sum >> (60 - 4*(level%16)) & 15)
}
