package ipvs

import (
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The rules are the same for any number of Services: which frontend gets what stands in the IP sets. They change only
// with the way in which pods are recognised.
//
// A packet meets them in this order. In mangle, before anything is translated: source ranges, the mark that leads pods
// and this machine to a virtual server of their own, and what is dropped. In nat: what is to be masqueraded. In filter,
// on the way to the virtual server: what no frontend serves of an address that is only local for Services' sake.

// isNew restricts a rule to the first packet of a connection.
const isNew = "-m conntrack --ctstate NEW "

// jumps are the rules in the built-in chains, in the order in which they are prepended.
func (o Options) jumps() []ruleset.Jump {
	j := func(table, from, match, text, to string) ruleset.Jump {
		return ruleset.Jump{Table: table, From: from, Rule: match + ruleset.Comment(text) + "-j " + to, To: to}
	}
	return []ruleset.Jump{
		j(ruleset.NAT, "OUTPUT", "", "kubernetes service portals", chainServices),
		j(ruleset.NAT, "PREROUTING", "", "kubernetes service portals", chainServices),
		j(ruleset.NAT, "POSTROUTING", "", "kubernetes postrouting rules", chainPostrouting),
		j(ruleset.Filter, "FORWARD", "", "kubernetes forwarding rules", chainForward),
		j(ruleset.Filter, "INPUT", "", "kubernetes health check rules", chainHealth),
		j(ruleset.Filter, "INPUT", "", "kubernetes ipvs access filter", chainAddresses),
		j(ruleset.Mangle, "OUTPUT", isNew, "kubernetes service portals", chainServices),
		j(ruleset.Mangle, "PREROUTING", isNew, "kubernetes service portals", chainServices),
	}
}

// upstreamJumps are those that upstream's IPVS mode has besides. They are known so that they go.
func upstreamJumps() []ruleset.Jump {
	j := func(from, text, to string) ruleset.Jump {
		return ruleset.Jump{Table: ruleset.Filter, From: from, Rule: ruleset.Comment(text) + "-j " + to, To: to}
	}
	return []ruleset.Jump{
		j("INPUT", "kube-proxy firewall rules", "KUBE-PROXY-FIREWALL"),
		j("FORWARD", "kube-proxy firewall rules", "KUBE-PROXY-FIREWALL"),
		j("OUTPUT", "kubernetes ipvs access filter", "KUBE-IPVS-OUT-FILTER"),
	}
}

// in gives the match of a set.
func (o Options) in(set, directions string) string {
	return "-m set --match-set " + setName(set, o.Family) + " " + directions + " "
}

func (o Options) notIn(set, directions string) string {
	return "-m set ! --match-set " + setName(set, o.Family) + " " + directions + " "
}

// chains gives the chains for a way of recognising pods.
func (o Options) chains(d forward.Detector) map[ruleset.ID]ruleset.Body {
	m := o.Masquerading
	forwarding := m.Forwarding()
	reject := "-j REJECT --reject-with icmp-port-unreachable"
	if o.Family == model.IPv6 {
		reject = "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return map[ruleset.ID]ruleset.Body{
		ruleset.In(ruleset.Mangle, chainServices): ruleset.BodyOf(
			ruleset.Comment("traffic not accepted by load balancer source ranges")+
				o.in(setFiltered, "dst,dst")+o.notIn(setAllowed, "dst,dst,src")+"-j DROP",
			o.in(setSplit, "dst,dst")+"-j "+chainSplit,
			o.in(setDropped, "dst,dst")+"-j "+chainDropped,
		),
		ruleset.In(ruleset.Mangle, chainSplit):    ruleset.BodyOf(o.splitRules(d)...),
		ruleset.In(ruleset.Mangle, chainDropped):  ruleset.BodyOf(o.dropRules(d)...),
		ruleset.In(ruleset.NAT, chainServices):    ruleset.BodyOf(o.masqueradeRules(d)...),
		ruleset.In(ruleset.NAT, chainMarkMasq):    ruleset.BodyOf(m.SetMark()),
		ruleset.In(ruleset.NAT, chainPostrouting): ruleset.BodyOf(append([]string{o.hairpin()}, m.Carry()...)...),
		ruleset.In(ruleset.Filter, chainForward):  ruleset.BodyOf(forwarding...),
		ruleset.In(ruleset.Filter, chainHealth): ruleset.BodyOf(
			"-p tcp " + ruleset.Comment("Kubernetes health check node port") + o.in(setHealth, "dst") + "-j ACCEPT"),
		ruleset.In(ruleset.Filter, chainAddresses): ruleset.BodyOf(
			o.in(setServed, "dst,dst")+"-j RETURN",
			isNew+o.in(setAddresses, "dst")+reject),
	}
}

// clients gives the matches of pods and of this machine itself, each made by a function from the rule's match that
// stands before the modules and the rest.
func clients(d forward.Detector, rest string) []string {
	var rules []string
	if pod, known := ruleset.FromPod(d); known {
		rules = append(rules, pod+rest)
	}
	return append(rules, "-m addrtype --src-type LOCAL "+rest)
}

// splitRules mark the packets of pods and of this machine, so that the virtual server for them takes them.
func (o Options) splitRules(d forward.Detector) []string {
	return clients(d, "-j SET --map-set "+setName(setSplit, o.Family)+" dst,dst --map-mark")
}

// dropRules drop what is not served to clients from outside.
func (o Options) dropRules(d forward.Detector) []string {
	return append(clients(d, o.in(setSplit, "dst,dst")+"-j RETURN"),
		ruleset.Comment("service has no local endpoints")+"-j DROP")
}

// masqueradeRules mark what is to be masqueraded.
func (o Options) masqueradeRules(d forward.Detector) []string {
	const target = "-j " + chainMarkMasq
	rules := []string{o.in(setAll, "dst,dst") + target}
	if o.onDevice {
		rules = append(rules, ruleset.Comment("connections that took a service address for their source")+
			o.in(setAddresses, "src")+o.in(setServed, "dst,dst")+target)
	}
	notPod := ""
	if pod, known := ruleset.FromPod(d); known {
		notPod = "! " + pod
		rules = append(rules, notPod+o.in(setNotPods, "dst,dst")+target)
	}
	return append(rules, notPod+"-m addrtype --src-type LOCAL "+o.in(setSplit, "dst,dst")+target)
}

// hairpin masks the connection of an endpoint that was handed to itself. What this machine sends to its own address
// stays on the loopback interface and is none.
func (o Options) hairpin() string {
	return "! -o lo " + ruleset.Comment("kubernetes hairpin connections requiring SNAT") +
		ruleset.HairpinMatch(o.Family) + o.Masquerading.Target()
}
