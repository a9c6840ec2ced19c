package netns

import (
	"fmt"
	"net/netip"
)

// The addresses of the cluster. They are the same in every Lab, as each Lab has network namespaces of its own, and all
// come from ranges for private use or documentation.
const (
	nodeNet4, nodeNet6       = "10.20.0.0/24", "fd20::/64"
	clusterNet4, clusterNet6 = "10.60.0.0/16", "fd60::/16"
	serviceNet4, serviceNet6 = "10.70.0.0/16", "fd70::/112"
	lbNet4, lbNet6           = "192.0.2.0/24", "2001:db8:2::/64"
	externalNet4             = "203.0.113.0/24"
	externalNet6             = "2001:db8:203::/64"
	farNet4, farNet6         = "198.51.100.0/24", "2001:db8:100::/64"
	podGateway4, podGateway6 = "169.254.1.1", "fe80::1"
	maxNodes                 = 8
	serverHost, clientHost   = 11, 21
	crowdHost                = 31
)

// ServiceCIDRs are the ranges that cluster IPs are taken from, IPv4 first.
func ServiceCIDRs() []netip.Prefix { return prefixes(serviceNet4, serviceNet6) }

// ClusterCIDRs hold the addresses of all pods, IPv4 first.
func ClusterCIDRs() []netip.Prefix { return prefixes(clusterNet4, clusterNet6) }

// LoadBalancerCIDRs are ranges for load balancers' addresses, IPv4 first. Like the cluster IPs they are routed to the
// first node from outside the cluster.
func LoadBalancerCIDRs() []netip.Prefix { return prefixes(lbNet4, lbNet6) }

// ExternalCIDRs are ranges for spec.externalIPs, IPv4 first, routed like the load balancers' ones.
func ExternalCIDRs() []netip.Prefix { return prefixes(externalNet4, externalNet6) }

// virtual gives every range that holds addresses of Services.
func virtual() []netip.Prefix {
	return append(append(ServiceCIDRs(), LoadBalancerCIDRs()...), ExternalCIDRs()...)
}

func prefixes(texts ...string) []netip.Prefix {
	list := make([]netip.Prefix, len(texts))
	for i, s := range texts {
		list[i] = netip.MustParsePrefix(s)
	}
	return list
}

// A pair is an address of each family.
type pair struct{ v4, v6 netip.Addr }

func (p pair) of(is4 bool) netip.Addr {
	if is4 {
		return p.v4
	}
	return p.v6
}

func pairOf(v4, v6 string) pair { return pair{netip.MustParseAddr(v4), netip.MustParseAddr(v6)} }

// The addresses on the nodes' segment. Node numbers start at 1.
func nodePair(i int) pair {
	return pairOf(fmt.Sprintf("10.20.0.%d", 10+i), fmt.Sprintf("fd20::%d", 10+i))
}

func routerPair() pair    { return pairOf("10.20.0.1", "fd20::1") }
func outPair() pair       { return pairOf("10.20.0.200", "fd20::200") }
func farPair() pair       { return pairOf("198.51.100.7", "2001:db8:100::7") }
func farRouterPair() pair { return pairOf("198.51.100.1", "2001:db8:100::1") }

// podPair is the address of a pod; host is its number within the node's range, 2..254.
func podPair(node, host int) pair {
	return pairOf(fmt.Sprintf("10.60.%d.%d", node, host), fmt.Sprintf("fd60:%d::%d", node, host))
}

// podRange gives the pod range of a node, IPv4 first.
func podRange(node int) []netip.Prefix {
	return prefixes(fmt.Sprintf("10.60.%d.0/24", node), fmt.Sprintf("fd60:%d::/64", node))
}

// crowdRange gives the range that a node's crowd answers for: 4,094 usable IPv4 addresses, within the cluster range.
func crowdRange(node int) []netip.Prefix {
	return prefixes(fmt.Sprintf("10.60.%d.0/20", 128+16*(node-1)), fmt.Sprintf("fd60:10%d::/64", node))
}
