package config

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// Complete reads the configuration file if one was named, settles which source counts, fills in defaults and checks
// everything. The notices are one line each, to be logged as warnings: what was ignored, or is not acted upon yet. On
// an error they are given as well, as they may explain it.
func (o *Options) Complete() (*Config, []string, error) {
	merged, notices, err := o.merge()
	if err != nil {
		return nil, notices, err
	}
	if err := o.checkOwn(); err != nil {
		return nil, notices, err
	}
	if o.hostname != "" {
		name := strings.ToLower(strings.TrimSpace(o.hostname))
		if name == "" {
			return nil, notices, errors.New("empty hostname-override is invalid")
		}
		merged.HostnameOverride = name
	}
	if err := validate(merged); err != nil {
		return nil, notices, err
	}
	cfg, err := o.build(merged)
	if err != nil {
		return nil, notices, err
	}
	if cfg.ModeDefaulted {
		notices = append(notices, "No proxy mode was chosen and iptables is used; "+
			"write mode: iptables, or give --proxy-mode iptables, to stay on it when the default changes")
	}
	return cfg, notices, nil
}

// merge gives upstream's part of the configuration: the file's if there is one, else the flags'.
func (o *Options) merge() (*v1alpha1.KubeProxyConfiguration, []string, error) {
	if o.file == "" {
		return o.fromFlags(), unused(&o.set, o.changed), nil
	}
	c, complaint, err := readFile(o.file)
	if err != nil {
		return nil, nil, err
	}
	var notices []string
	if complaint != "" {
		notices = append(notices, fmt.Sprintf("Configuration file %s has mistakes that were passed over: %s",
			o.file, complaint))
	}
	if ignored := o.ignored(); len(ignored) > 0 {
		notices = append(notices, "Flags were ignored because --config is given: "+strings.Join(ignored, " "))
	}
	o.overlayLog(&c.Logging)
	notices = append(notices, unused(c, nil)...)
	applyDefaults(c)
	return c, notices, nil
}

// fromFlags settles the addresses: an empty one means the default, and a deprecated port flag completes an address
// without a port, or with 0 switches the server off.
func (o *Options) fromFlags() *v1alpha1.KubeProxyConfiguration {
	c := &o.set
	setIfZero(&c.BindAddress, "0.0.0.0")
	setIfZero(&c.HealthzBindAddress, "0.0.0.0:10256")
	setIfZero(&c.MetricsBindAddress, "127.0.0.1:10249")
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, o.healthzPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, o.metricsPort)
	if o.healthzPort == 0 {
		c.HealthzBindAddress = ""
	}
	if o.metricsPort == 0 {
		c.MetricsBindAddress = ""
	}
	return c
}

func (o *Options) changed(name string) bool { return o.fs != nil && o.fs.Changed(name) }

// ignored lists the flags that were given and do not count beside a file, sorted.
func (o *Options) ignored() []string {
	var names []string
	o.fs.Visit(func(f *pflag.Flag) {
		if !ours(f.Name) {
			names = append(names, "--"+f.Name)
		}
	})
	return names
}

// overlayLog puts the logging flags that were given over the file's settings; of the per-file levels both count, the
// flag's first.
func (o *Options) overlayLog(file *logsapi.LoggingConfiguration) {
	flags := &o.set.Logging
	if o.changed("logging-format") {
		file.Format = flags.Format
	}
	if o.changed(logsapi.LogFlushFreqFlagName) {
		file.FlushFrequency = flags.FlushFrequency
	}
	if o.changed("v") {
		file.Verbosity = flags.Verbosity
	}
	if o.changed("vmodule") {
		file.VModule = append(append(logsapi.VModuleConfiguration{}, flags.VModule...), file.VModule...)
	}
	if o.changed("log-text-split-stream") {
		file.Options.Text.SplitStream = flags.Options.Text.SplitStream
	}
	if o.changed("log-text-info-buffer-size") {
		file.Options.Text.InfoBufferSize = flags.Options.Text.InfoBufferSize
	}
}

// checkOwn checks what only our flags can say.
func (o *Options) checkOwn() error {
	switch Flavour(o.flavour) {
	case FlavourAuto, FlavourLegacy, FlavourNFT:
	default:
		return fmt.Errorf("--iptables-flavour %q is not auto, legacy or nft", o.flavour)
	}
	switch Addresses(o.addresses) {
	case AddressesRoutes, AddressesDevice:
	default:
		return fmt.Errorf("--ipvs-addresses %q is not routes or device", o.addresses)
	}
	if o.drain < time.Second {
		return fmt.Errorf("--ipvs-drain %s is less than a second", o.drain)
	}
	if o.socket == "" {
		return errors.New("--socket is empty; give a path")
	}
	if o.manifests == "" {
		return nil
	}
	info, err := os.Stat(o.manifests)
	if err != nil {
		return fmt.Errorf("--manifests: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("--manifests %s is not a directory", o.manifests)
	}
	return nil
}

// build translates a checked configuration.
func (o *Options) build(c *v1alpha1.KubeProxyConfiguration) (*Config, error) {
	name, err := nodeName(c.HostnameOverride)
	if err != nil {
		return nil, err
	}
	bind, err := parseAddr(c.BindAddress)
	if err != nil {
		return nil, fmt.Errorf("bind address %q: %w", c.BindAddress, err)
	}
	external, gated := c.FeatureGates["AllowServiceExternalIPs"]
	mode := Mode(c.Mode)
	if mode == "" {
		mode = ModeIPTables
	}
	sync, least := periods(c)
	return &Config{
		Mode: mode, ModeDefaulted: c.Mode == "", StrictMode: o.strictMode, NodeName: name,
		Client: Client{
			Kubeconfig: c.ClientConnection.Kubeconfig, Master: o.master, ContentType: c.ClientConnection.ContentType,
			AcceptContentTypes: c.ClientConnection.AcceptContentTypes, QPS: c.ClientConnection.QPS,
			Burst: int(c.ClientConnection.Burst),
		},
		Manifests: o.manifests, Socket: o.socket,
		IPTables: IPTables{
			Flavour: Flavour(o.flavour), MasqueradeBit: int(*c.IPTables.MasqueradeBit),
			MasqueradeAll: c.IPTables.MasqueradeAll, LocalhostNodePorts: *c.IPTables.LocalhostNodePorts,
		},
		IPVS:       o.ipvs(c),
		SyncPeriod: sync, MinSyncPeriod: least,
		Local:             local(c),
		NodePortAddresses: canonicalCIDRs(c.NodePortAddresses),
		BindAddress:       bind,
		Healthz:           parseAddrPort(c.HealthzBindAddress), Metrics: parseAddrPort(c.MetricsBindAddress),
		HardFail: c.BindAddressHardFail, Profiling: c.EnableProfiling, OOMScoreAdj: int(*c.OOMScoreAdj),
		NoExternalIPs: gated && !external, Resync: c.ConfigSyncPeriod.Duration,
		Log:     logSettings(&c.Logging),
		Cleanup: o.cleanup, File: o.file, Kept: *c,
	}, nil
}

// periods gives the longest and the least time between syncs that the configuration has for its mode.
func periods(c *v1alpha1.KubeProxyConfiguration) (sync, least time.Duration) {
	if Mode(c.Mode) == ModeIPVS {
		return c.IPVS.SyncPeriod.Duration, c.IPVS.MinSyncPeriod.Duration
	}
	return c.IPTables.SyncPeriod.Duration, c.IPTables.MinSyncPeriod.Duration
}

func (o *Options) ipvs(c *v1alpha1.KubeProxyConfiguration) IPVS {
	out := IPVS{
		Scheduler: c.IPVS.Scheduler, StrictARP: c.IPVS.StrictARP, Addresses: Addresses(o.addresses), Drain: o.drain,
		TCPTimeout: c.IPVS.TCPTimeout.Duration, TCPFinTimeout: c.IPVS.TCPFinTimeout.Duration,
		UDPTimeout: c.IPVS.UDPTimeout.Duration,
	}
	for _, text := range c.IPVS.ExcludeCIDRs {
		if p, err := parsePrefix(text); err == nil { // in other modes they are not checked
			out.ExcludeCIDRs = append(out.ExcludeCIDRs, p)
		}
	}
	return out
}

// nodeName gives the override or the host's name, trimmed and in lower case.
func nodeName(override string) (string, error) {
	name := override
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("ask the system for its host name: %w; give --hostname-override", err)
		}
		name = host
	}
	if name = strings.ToLower(strings.TrimSpace(name)); name == "" {
		return "", errors.New("the host name is empty; give --hostname-override")
	}
	return name, nil
}

func local(c *v1alpha1.KubeProxyConfiguration) Local {
	l := Local{
		Mode: LocalMode(c.DetectLocalMode), BridgeInterface: c.DetectLocal.BridgeInterface,
		InterfaceNamePrefix: c.DetectLocal.InterfaceNamePrefix,
	}
	if l.Mode == "" {
		l.Mode = LocalClusterCIDR
	}
	for _, text := range clusterCIDRs(c) {
		if p, err := parsePrefix(text); err == nil {
			l.ClusterCIDRs = append(l.ClusterCIDRs, p)
		}
	}
	return l
}

// clusterCIDRs splits the comma-separated list; an empty text is an empty list.
func clusterCIDRs(c *v1alpha1.KubeProxyConfiguration) []string {
	if c.ClusterCIDR == "" {
		return nil
	}
	return strings.Split(c.ClusterCIDR, ",")
}

// canonicalCIDRs writes the CIDRs without leading zeros, so that readers need no lenient parser.
func canonicalCIDRs(list []string) []string {
	var out []string
	for _, text := range list {
		if p, err := parsePrefix(text); err == nil {
			text = netip.PrefixFrom(hostOf(text, p), p.Bits()).String()
		}
		out = append(out, text)
	}
	return out
}

// hostOf gives the address that was written before the slash: whether it is a loopback address matters, also
// where the mask would clear it.
func hostOf(text string, p netip.Prefix) netip.Addr {
	host, _, _ := strings.Cut(text, "/")
	if a, err := parseAddr(host); err == nil {
		return a
	}
	return p.Addr()
}

func logSettings(c *logsapi.LoggingConfiguration) Log {
	l := Log{Format: c.Format, Verbosity: int(c.Verbosity)}
	if l.Format == "" {
		l.Format = logsapi.DefaultLogFormat
	}
	l.VModule = logsapi.VModuleConfigurationPflag(&c.VModule).String()
	return l
}
