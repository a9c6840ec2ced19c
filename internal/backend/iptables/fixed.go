package iptables

import (
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Options are the facts that a program depends on besides the forwarding table. They stay the same as long as the
// backend lives.
type Options struct {
	Family model.Family
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0..31.
	MasqueradeBit int
	// AcceptInvalid leaves out the rule that drops packets which connection tracking calls invalid. It is for nodes that
	// run with net.netfilter.nf_conntrack_tcp_be_liberal, where such packets are meant to pass.
	AcceptInvalid bool
	// NoBPF tells that the kernel lacks the bpf match. Hairpin connections are then recognised by one rule for each
	// endpoint, and the compact layout is not used.
	NoBPF bool
	// NoRandomFully tells that MASQUERADE cannot choose ports at random.
	NoRandomFully bool
	// SectionChains is how many new chains one section of a plan holds at most; 0 is no bound. The nft flavour wants
	// NFTSectionChains, the legacy flavour no bound.
	SectionChains int
	// CompactAbove is the number of endpoints above which the compact layout is used; 0 means 1,000.
	CompactAbove int
}

const defaultCompactAbove = 1000

// NFTSectionChains is the number of chains in a section that iptables-restore 1.8.9 of the nft flavour took least time
// for: 10,000 chains in 2.9 s, where one section takes 5.
const NFTSectionChains = 200

func (o Options) masquerading() ruleset.Masquerading {
	return ruleset.Masquerading{Bit: o.MasqueradeBit, NoRandomFully: o.NoRandomFully}
}

// jumps are the rules in the built-in chains, in the order in which they are prepended. Upstream's set, and one more:
// without the jump from OUTPUT the node itself would hang on an external address without endpoints instead of being
// refused.
func (o Options) jumps() []ruleset.Jump {
	const isNew = "-m conntrack --ctstate NEW "
	j := func(table, from, match, text, to string) ruleset.Jump {
		rule := match
		if text != "" {
			rule += ruleset.Comment(text)
		}
		return ruleset.Jump{Table: table, From: from, Rule: rule + "-j " + to, To: to}
	}
	return []ruleset.Jump{
		j(tableFilter, "INPUT", isNew, "kubernetes externally-visible service portals", chainExternal),
		j(tableFilter, "FORWARD", isNew, "kubernetes externally-visible service portals", chainExternal),
		j(tableFilter, "OUTPUT", isNew, "kubernetes externally-visible service portals", chainExternal),
		j(tableFilter, "INPUT", "", "kubernetes health check service ports", chainNodePorts),
		j(tableFilter, "FORWARD", isNew, "kubernetes service portals", chainServices),
		j(tableFilter, "OUTPUT", isNew, "kubernetes service portals", chainServices),
		j(tableFilter, "FORWARD", "", "kubernetes forwarding rules", chainForward),
		j(tableFilter, "INPUT", isNew, "kubernetes load balancer firewall", chainFirewall),
		j(tableFilter, "OUTPUT", isNew, "kubernetes load balancer firewall", chainFirewall),
		j(tableFilter, "FORWARD", isNew, "kubernetes load balancer firewall", chainFirewall),
		j(tableNAT, "OUTPUT", "", "kubernetes service portals", chainServices),
		j(tableNAT, "PREROUTING", "", "kubernetes service portals", chainServices),
		j(tableNAT, "POSTROUTING", "", "kubernetes postrouting rules", chainPostrouting),
	}
}

// fixed gives the chains that do not depend on any Service.
func (o Options) fixed(compact bool) map[ruleset.ID]ruleset.Body {
	m := o.masquerading()
	var post []string
	if compact {
		post = append(post, ruleset.Comment("kubernetes hairpin connections requiring SNAT")+
			"-m conntrack --ctstate DNAT "+ruleset.HairpinMatch(o.Family)+m.Target())
	}
	var fwd []string
	if !o.AcceptInvalid {
		fwd = append(fwd, "-m conntrack --ctstate INVALID -j DROP")
	}
	return map[ruleset.ID]ruleset.Body{
		ruleset.In(tableNAT, chainPostrouting): ruleset.BodyOf(append(post, m.Carry()...)...),
		ruleset.In(tableNAT, chainMarkMasq):    ruleset.BodyOf(m.SetMark()),
		ruleset.In(tableFilter, chainForward):  ruleset.BodyOf(append(fwd, m.Forwarding()...)...),
	}
}

// loopbackProtection keeps neighbours from the services that listen on 127.0.0.0/8 while the kernel is told to route
// such packets, which NodePorts on loopback addresses need. It stands in a chain that every incoming packet passes and
// that upstream empties when it comes back. Source: CVE-2020-8558.
func loopbackProtection(c *forward.Context) []string {
	if !c.NodePorts.Loopback {
		return nil
	}
	return []string{"! -s 127.0.0.0/8 -d 127.0.0.0/8 ! -i lo " + ruleset.Comment("block incoming localnet connections") +
		"-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"}
}

// nodePortJumps gives the rules that lead packets for this machine's addresses, as far as NodePorts answer on them, to a
// chain. They are the last ones of the chain that they stand in.
func nodePortJumps(c *forward.Context, text, to string) []string {
	s := c.NodePorts
	if s.All {
		loopback := ""
		switch {
		case c.Family == model.IPv6:
			loopback = "! -d ::1/128 "
		case !s.Loopback:
			loopback = "! -d 127.0.0.0/8 "
		}
		return []string{loopback + ruleset.Comment(text) + "-m addrtype --dst-type LOCAL -j " + to}
	}
	rules := make([]string, len(s.Addrs))
	for i, a := range s.Addrs {
		rules[i] = "-d " + ruleset.Host(a) + " " + ruleset.Comment(text) + "-j " + to
	}
	return rules
}
