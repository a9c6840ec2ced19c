// Package config turns the daemon's command line, and the KubeProxyConfiguration file that it may name, into one
// validated Config. It decides which of two sources wins, what the defaults are and what is refused; whoever reads a
// Config need not check it again.
//
// It must not import other packages of this module except model: nothing here depends on how a setting is carried out.
// Read Options first, then complete.go.
package config

import (
	"net/netip"
	"time"

	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/turnout-proxy/turnout/internal/model"
)

// DefaultSocket is where the daemon listens for ls and trace.
const DefaultSocket = "/run/turnout/turnout.sock"

// A Mode names a data plane. The zero value is not a mode.
type Mode string

// The modes that this version can run.
const (
	ModeIPTables Mode = "iptables"
	ModeIPVS     Mode = "ipvs"
)

// An Addresses says how the addresses of Services become local in IPVS mode.
type Addresses string

// AddressesRoutes takes a local route for each, AddressesDevice upstream's device kube-ipvs0.
const (
	AddressesRoutes Addresses = "routes"
	AddressesDevice Addresses = "device"
)

// A Flavour tells which of the two iptables tool sets is used.
type Flavour string

// FlavourAuto takes the flavour that the host's other tools use.
const (
	FlavourAuto   Flavour = "auto"
	FlavourLegacy Flavour = "legacy"
	FlavourNFT    Flavour = "nft"
)

// A LocalMode says how packets from this cluster's pods are told from others.
type LocalMode string

// The modes that the KubeProxyConfiguration API knows.
const (
	LocalClusterCIDR         LocalMode = "ClusterCIDR"
	LocalNodeCIDR            LocalMode = "NodeCIDR"
	LocalBridgeInterface     LocalMode = "BridgeInterface"
	LocalInterfaceNamePrefix LocalMode = "InterfaceNamePrefix"
)

// The keywords of nodePortAddresses.
const (
	NodePortPrimary   = "primary"
	NodePortLocalhost = "localhost"
	NodePortAll       = "all"
)

// A Config is everything that a daemon is told. Every value has been checked and defaulted.
type Config struct {
	Mode Mode
	// ModeDefaulted tells that nobody chose the mode, StrictMode that no other may stand in for the one that was chosen.
	ModeDefaulted, StrictMode bool
	// NodeName is this node's name in the cluster, in lower case.
	NodeName string
	Client   Client
	// Manifests is the directory to read objects from instead of an API server; empty means the API server.
	Manifests string
	// Socket is the path of the control socket.
	Socket   string
	IPTables IPTables
	IPVS     IPVS
	Local    Local
	// SyncPeriod and MinSyncPeriod are those of the mode. SyncPeriod is above 0, MinSyncPeriod is between 0 and SyncPeriod.
	SyncPeriod, MinSyncPeriod time.Duration
	// NodePortAddresses are CIDRs and keywords as configured; empty means all addresses. With a bind address the keyword
	// primary still stands in it: see NodePortsFor.
	NodePortAddresses []string
	// BindAddress overrides the node's primary address; unspecified (0.0.0.0 or ::) means that it does not.
	BindAddress netip.Addr
	// Healthz and Metrics are where to serve; an invalid Healthz means that it is switched off.
	Healthz, Metrics netip.AddrPort
	// HardFail tells that a health or metrics address that cannot be listened on ends the daemon.
	HardFail  bool
	Profiling bool
	// OOMScoreAdj is written to /proc/self/oom_score_adj, -1000..1000.
	OOMScoreAdj int
	// NoExternalIPs tells that the feature gate AllowServiceExternalIPs was switched off.
	NoExternalIPs bool
	// Resync is how often an API source compares what it holds with the server's list.
	Resync time.Duration
	Log    Log
	// Cleanup tells that the command is to remove rules and end, as upstream's --cleanup does.
	Cleanup bool
	// File is the configuration file that was read; empty when there was none.
	File string
	// Kept is the merged and defaulted configuration in upstream's form, with the settings that no part of this version
	// uses yet.
	Kept v1alpha1.KubeProxyConfiguration
}

// Client says how to reach the API server. With neither Kubeconfig nor Master it is the one that the pod runs in.
type Client struct {
	Kubeconfig, Master              string
	ContentType, AcceptContentTypes string
	QPS                             float32
	Burst                           int
}

// IPTables are the settings of iptables mode.
type IPTables struct {
	Flavour Flavour
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0..31.
	MasqueradeBit      int
	MasqueradeAll      bool
	LocalhostNodePorts bool
}

// IPVS are the settings of IPVS mode.
type IPVS struct {
	// Scheduler is as in the annotation of a Service: a name of the kernel's, and flags after commas. Empty is "rr".
	Scheduler string
	// ExcludeCIDRs are addresses whose virtual servers belong to others, whoever made them.
	ExcludeCIDRs []netip.Prefix
	// StrictARP keeps the machine from answering ARP for the addresses of Services.
	StrictARP bool
	Addresses Addresses
	// Drain is how long a TCP endpoint that goes may keep its connections, at least a second.
	Drain time.Duration
	// The timeouts of idle connections; 0 leaves the kernel's.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
}

// Local says how pods are told from others; only the fields of the chosen mode matter.
type Local struct {
	Mode LocalMode
	// ClusterCIDRs has at most one prefix of each family.
	ClusterCIDRs                         []netip.Prefix
	BridgeInterface, InterfaceNamePrefix string
}

// Log says what is logged and how.
type Log struct {
	// Format is "text" or "json".
	Format string
	// Verbosity is klog's level, 0..MaxInt32.
	Verbosity int
	// VModule is klog's per-file list, "pattern=N,...".
	VModule string
}

// NodePortsFor gives the NodePort addresses for one family, with the keyword primary replaced by the bind address where
// that is of the family and overrides the Node's own.
func (c *Config) NodePortsFor(f model.Family) []string {
	if !c.BindAddress.IsValid() || c.BindAddress.IsUnspecified() || model.FamilyOf(c.BindAddress) != f {
		return c.NodePortAddresses
	}
	out := make([]string, len(c.NodePortAddresses))
	for i, a := range c.NodePortAddresses {
		if a == NodePortPrimary {
			a = netip.PrefixFrom(c.BindAddress, c.BindAddress.BitLen()).String()
		}
		out[i] = a
	}
	return out
}
