package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"github.com/turnout-proxy/turnout/internal/forward"
)

// The fixed chains. Names that upstream has are upstream's, so that a take-over in either direction finds its own.
const (
	chainServices         = "KUBE-SERVICES"
	chainExternal         = "KUBE-EXTERNAL-SERVICES"
	chainExternalNodePort = "KUBE-EXTERNAL-NODEPORTS"
	chainNodePorts        = "KUBE-NODEPORTS"
	chainPostrouting      = "KUBE-POSTROUTING"
	chainMarkMasq         = "KUBE-MARK-MASQ"
	chainForward          = "KUBE-FORWARD"
	chainFirewall         = "KUBE-PROXY-FIREWALL"
	chainCanary           = "KUBE-PROXY-CANARY"
)

// Prefixes of the chains that a Service port has. A hash of 16 characters follows; behind a dispatch or a group prefix
// it has 14. Dispatch and group chains of the nat table begin like chains that upstream looks for and deletes when it
// does not know them, so that nothing of ours outlives a return to it.
const (
	prefixService  = "KUBE-SVC-"
	prefixLocal    = "KUBE-SVL-"
	prefixExternal = "KUBE-EXT-"
	prefixFirewall = "KUBE-FW-"
	prefixEndpoint = "KUBE-SEP-"
	prefixDispatch = "KUBE-SVC-D-"
	prefixGroup    = "KUBE-SEP-G-"
)

// hash gives the first 16 characters of the standard base32 text of the SHA-256 sum: upstream's recipe for chain names.
func hash(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "")))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// portHash is what the chains SVC, SVL, EXT and FW of one Service port share.
func portHash(n forward.PortName) string { return hash(n.Service(), n.Proto.String()) }

// endpointChain names the chain of one endpoint of a Service port.
func endpointChain(n forward.PortName, ep netip.AddrPort) string {
	return prefixEndpoint + hash(n.Service(), n.Proto.String(), ep.String())
}

// poolChain names the chain that chooses among the endpoints of a pool.
func poolChain(n forward.PortName, pool forward.Pool) string {
	if pool == forward.LocalPool {
		return prefixLocal + portHash(n)
	}
	return prefixService + portHash(n)
}

// dispatchChain names the chain of one region of a dispatch tree; path is the region's start as the tree writes it.
func dispatchChain(table, root string, path []byte) string {
	return prefixDispatch + hash("dispatch ", table, " ", root, " ", string(path))[:14]
}

// groupChain names the chain of one group of a large pool.
func groupChain(pool string, path []byte) string {
	return prefixGroup + hash("group ", pool, " ", string(path))[:14]
}

// ours tells whether a chain of a table is one that this mode writes. KUBE-FIREWALL, KUBE-MARK-DROP and the kubelet's
// canary and hint chains are others'.
func ours(table, chain string) bool {
	switch table {
	case tableNAT:
		switch chain {
		case chainServices, chainNodePorts, chainPostrouting, chainMarkMasq:
			return true
		}
		for _, p := range [...]string{prefixService, prefixLocal, prefixExternal, prefixFirewall, prefixEndpoint} {
			if strings.HasPrefix(chain, p) {
				return true
			}
		}
	case tableFilter:
		switch chain {
		case chainServices, chainExternal, chainExternalNodePort, chainForward, chainNodePorts, chainFirewall:
			return true
		}
		return strings.HasPrefix(chain, prefixDispatch)
	}
	return false
}
