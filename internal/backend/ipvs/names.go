package ipvs

import (
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The IP sets, by the names of IPv4; setName gives those of a family. Where upstream has a set of the same meaning the
// name is upstream's.
const (
	// setServed has every frontend. It tells a virtual server of ours from others', also after a restart, so it gains a
	// frontend before the server is made and loses it when the server is gone.
	setServed = "KUBE-IPVS-SERVED"
	// setAddresses has every address that was made local for a Service.
	setAddresses = "KUBE-IPVS-IPS"
	// setNotPods has frontends whose clients are masqueraded unless they are pods, setAll those where all are.
	setNotPods = "KUBE-CLUSTER-IP"
	setAll     = "KUBE-EXTERNAL-IP"
	// setSplit has frontends that serve pods and this machine itself from another pool than everybody else. It keeps the
	// mark of the virtual server for them.
	setSplit = "KUBE-IPVS-SPLIT"
	// setDropped has frontends that drop what comes from outside.
	setDropped = "KUBE-IPVS-DROP"
	// setFiltered has frontends with source ranges, setAllowed those ranges.
	setFiltered = "KUBE-LOAD-BALANCER-FW"
	setAllowed  = "KUBE-LOAD-BALANCER-SOURCE-CIDR"
	// setHealth has health check node ports.
	setHealth = "KUBE-HEALTH-CHECK-NODE-PORT"
)

// sets are all of them, in the order in which they are made.
func sets() []string {
	return []string{
		setServed, setAddresses, setNotPods, setAll, setSplit, setDropped, setFiltered, setAllowed, setHealth,
	}
}

// upstreamSets are upstream's that this mode has no use for. They go when no rule names them any more.
func upstreamSets() []string {
	return []string{
		"KUBE-LOOP-BACK", "KUBE-EXTERNAL-IP-LOCAL", "KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER-LOCAL",
		"KUBE-LOAD-BALANCER-SOURCE-IP", "KUBE-NODE-PORT-TCP", "KUBE-NODE-PORT-LOCAL-TCP", "KUBE-NODE-PORT-UDP",
		"KUBE-NODE-PORT-LOCAL-UDP", "KUBE-NODE-PORT-SCTP-HASH", "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
	}
}

// SetNames gives the names of all sets of this mode in a family.
func SetNames(f model.Family) []string {
	var out []string
	for _, s := range sets() {
		out = append(out, setName(s, f))
	}
	return out
}

// setName gives a set's name in a family, as upstream forms it.
func setName(name string, f model.Family) string {
	if f == model.IPv6 {
		name = "KUBE-6-" + strings.TrimPrefix(name, "KUBE-")
		name = name[:min(len(name), ipset.MaxName)]
	}
	return name
}

// The chains. Names that upstream's IPVS mode has are upstream's.
const (
	chainServices    = "KUBE-SERVICES"
	chainPostrouting = "KUBE-POSTROUTING"
	chainMarkMasq    = "KUBE-MARK-MASQ"
	chainForward     = "KUBE-FORWARD"
	chainHealth      = "KUBE-NODE-PORT"
	chainAddresses   = "KUBE-IPVS-FILTER"
	chainSplit       = "KUBE-IPVS-SPLIT"
	chainDropped     = "KUBE-IPVS-DROP"
)

// ours tells whether a chain of a table is one that this mode writes, or upstream's IPVS mode wrote.
func ours(table, chain string) bool {
	switch table {
	case ruleset.Mangle:
		return slices.Contains([]string{chainServices, chainSplit, chainDropped}, chain)
	case ruleset.NAT:
		return slices.Contains([]string{
			chainServices, chainPostrouting, chainMarkMasq, "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER",
		}, chain)
	case ruleset.Filter:
		return slices.Contains([]string{
			chainForward, chainHealth, chainAddresses, "KUBE-PROXY-FIREWALL", "KUBE-SOURCE-RANGES-FIREWALL",
			"KUBE-IPVS-OUT-FILTER",
		}, chain)
	}
	return false
}

// spec gives a set's properties in a family; the number of its entries is bounded by memory alone.
func spec(name string, f model.Family) ipset.Set {
	const many = 1 << 20
	s := ipset.Set{Name: setName(name, f), Type: ipset.HashIPPort, Family: f, MaxElem: many}
	switch name {
	case setAddresses:
		s.Type = ipset.HashIP
	case setAllowed:
		s.Type = ipset.HashIPPortNet
	case setSplit:
		s.Marks = true
	case setHealth:
		s.Type, s.Family, s.MaxElem = ipset.BitmapPort, 0, 0
	}
	return s
}
