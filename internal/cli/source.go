package cli

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/iptables"
	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/manifest"
)

// families gives both IP families, in the order in which they are shown.
func families() []model.Family { return []model.Family{model.IPv4, model.IPv6} }

// forwardConfig gives what the policy needs to know of the configuration for one family.
func forwardConfig(c *config.Config, mode config.Mode, f model.Family) forward.Config {
	return forward.Config{
		Family: f, NodeName: c.NodeName, Detect: forward.DetectMode(c.Local.Mode), ClusterCIDRs: c.Local.ClusterCIDRs,
		BridgeInterface: c.Local.BridgeInterface, InterfaceNamePrefix: c.Local.InterfaceNamePrefix,
		MasqueradeAll: c.IPTables.MasqueradeAll, NodePortAddresses: c.NodePortsFor(f),
		// Virtual servers cannot lead from a loopback address to an endpoint elsewhere.
		LocalhostNodePorts: c.IPTables.LocalhostNodePorts && mode != config.ModeIPVS, IgnoreExternalIPs: c.NoExternalIPs,
	}
}

// An offline is what would be forwarded for the objects of a directory.
type offline struct {
	cfg      *config.Config
	tables   map[model.Family]*forward.Table
	findings []model.Finding
}

// loadOffline reads the directory and builds both tables. The host's addresses are the given ones, else the Node
// object's, else none but loopback.
func loadOffline(cfg *config.Config, host []netip.Addr) (*offline, error) {
	events, err := manifest.Load(cfg.Manifests, cfg.NodeName)
	if err != nil {
		return nil, err
	}
	o := &offline{cfg: cfg, tables: map[model.Family]*forward.Table{}}
	snapshot := model.NewSnapshot()
	var dirty model.Dirty
	for _, e := range events {
		o.findings = append(o.findings, e.Findings...)
		snapshot.Apply(e, &dirty)
	}
	if len(host) == 0 && snapshot.Node != nil {
		host = snapshot.Node.Addresses
	}
	host = append(slices.Clone(host), netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback())
	for _, f := range families() {
		table, found := forward.Build(forwardConfig(cfg, cfg.Mode, f), snapshot, forward.Host{Addrs: host})
		o.tables[f] = table
		o.findings = append(o.findings, found...)
	}
	return o, nil
}

func (o *offline) listing() answer.Listing {
	l := answer.Listing{
		Source: answer.FromManifests, Mode: string(o.cfg.Mode), Node: o.cfg.NodeName, Rows: []answer.Row{},
		Findings: answer.Findings(o.findings),
	}
	for _, f := range families() {
		l.Rows = append(l.Rows, answer.Wanted(f, answer.Ports(o.tables[f]))...)
	}
	return l
}

func (o *offline) trace(p forward.Packet) (answer.Trace, error) {
	t := o.tables[model.FamilyOf(p.Dst.Addr())]
	p = answer.Placed(p, t.Context.HostAddrs)
	tr := answer.Explain(t, p)
	tr.Source, tr.Mode, tr.Node = answer.FromManifests, string(o.cfg.Mode), o.cfg.NodeName
	b := offlineBackend(o.cfg, t.Context.Family)
	b.Compile(t, forward.Delta{Ports: t.Names(), Context: true})
	bt, err := b.Trace(p)
	if err != nil {
		return tr, fmt.Errorf("follow the packet through the rules: %w", err)
	}
	tr.Witness(forward.Lookup(t, p), bt)
	return tr, nil
}

// offlineBackend gives the mode's backend with no kernel behind it.
func offlineBackend(c *config.Config, f model.Family) backend.Backend {
	if c.Mode == config.ModeIPVS {
		return ipvs.New(ipvs.Kernel{}, ipvsOptions(c, f))
	}
	return iptables.New(nil, iptablesOptions(c, f, ""))
}

// iptablesOptions gives the mode's options for one place; the flavour may be empty where nothing is written.
func iptablesOptions(c *config.Config, f model.Family, flavour xtables.Flavour) iptables.Options {
	o := iptables.Options{Family: f, MasqueradeBit: c.IPTables.MasqueradeBit}
	if flavour == xtables.NFT {
		o.SectionChains = iptables.NFTSectionChains
	}
	return o
}
