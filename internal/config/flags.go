package config

import (
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// Options are the command line before it is completed. They are good for one AddFlags and one Complete.
type Options struct {
	file                     string
	master, hostname         string
	manifests, socket        string
	flavour                  string
	addresses                string
	drain                    time.Duration
	strictMode, cleanup      bool
	healthzPort, metricsPort int32
	// set is what upstream's flags wrote, in upstream's form.
	set v1alpha1.KubeProxyConfiguration
	fs  *pflag.FlagSet
}

// Normalize lets flags be written with underscores, as upstream does.
func Normalize(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

// NewOptions gives options that hold the defaults.
func NewOptions() *Options {
	o := &Options{
		healthzPort: healthzPort, metricsPort: metricsPort, addresses: string(AddressesRoutes), drain: defaultDrain,
	}
	applyDefaults(&o.set)
	// As with kube-proxy, flags and a file differ here: a file without the field means no pause.
	o.set.IPVS.MinSyncPeriod.Duration = time.Second
	return o
}

// AddFlags registers every flag: upstream's under upstream's names, then our own.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.fs = fs
	fs.StringVar(&o.file, "config", "", "KubeProxyConfiguration file (v1alpha1, YAML or JSON); with it most other flags "+
		"are ignored")
	fs.StringVar(&o.hostname, "hostname-override", "", "this node's name in the cluster; default the host name")
	o.addOwn(fs)
	o.addClient(fs)
	o.addServers(fs)
	o.addForwarding(fs)
	o.addPeriods(fs)
	o.addIPVS(fs)
	o.addKept(fs)
	logsapi.AddFlags(&o.set.Logging, fs)
	fs.Lookup("logging-format").Usage = `format of the log: "text" or "json"`
	fs.Lookup("v").Usage = "how much is logged: 0 is what an operator needs, 2 adds each sync, 4 and more is for debugging"
}

// AddOfflineFlags registers the flags of commands that work without a daemon: which objects, which node, and what decides
// how they are forwarded.
func (o *Options) AddOfflineFlags(fs *pflag.FlagSet) {
	o.fs = fs
	fs.StringVar(&o.manifests, "manifests", "", "read Services, EndpointSlices and Nodes from the YAML and JSON files "+
		"of this directory, and ask neither a daemon nor the kernel")
	fs.StringVar(&o.hostname, "node", "", "name of the node whose view is taken; default the host name")
	fs.StringVar(&o.socket, "socket", DefaultSocket, "unix socket of the daemon")
	fs.StringVar(&o.flavour, "iptables-flavour", string(FlavourAuto), "iptables tools to use: auto, legacy or nft")
	fs.StringVar(&o.file, "config", "", "KubeProxyConfiguration file for --manifests; with it the flags below are ignored")
	o.addForwarding(fs)
}

func (o *Options) addOwn(fs *pflag.FlagSet) {
	fs.StringVar(&o.manifests, "manifests", "", "read Services, EndpointSlices and Nodes from the YAML and JSON files "+
		"of this directory instead of an API server")
	fs.StringVar(&o.socket, "socket", DefaultSocket, "unix socket on which ls and trace ask the daemon")
	fs.StringVar(&o.flavour, "iptables-flavour", string(FlavourAuto), "iptables tools to use: auto, legacy or nft; "+
		"auto takes the flavour that the host's other tools use")
	fs.BoolVar(&o.strictMode, "strict-proxy-mode", false, "end when the proxy mode cannot be used here, instead of using "+
		"iptables")
	fs.StringVar(&o.addresses, "ipvs-addresses", o.addresses, "how the addresses of Services become local in mode ipvs: "+
		"routes, or device for kube-proxy's kube-ipvs0")
	fs.DurationVar(&o.drain, "ipvs-drain", o.drain, "how long an endpoint that goes may keep its TCP connections in mode "+
		"ipvs")
	fs.BoolVar(&o.cleanup, "cleanup", false, "remove all rules and end, as turnout cleanup does")
}

func (o *Options) addClient(fs *pflag.FlagSet) {
	c := &o.set.ClientConnection
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig file; without it and --master the pod's own service account")
	fs.StringVar(&o.master, "master", "", "URL of the API server, overrides the kubeconfig's; also with --config")
	fs.StringVar(&c.ContentType, "kube-api-content-type", c.ContentType, "content type of requests to the API server")
	fs.Int32Var(&c.Burst, "kube-api-burst", c.Burst, "requests to the API server that may exceed the rate for a moment")
	fs.Float32Var(&c.QPS, "kube-api-qps", c.QPS, "requests a second to the API server")
	fs.DurationVar(&o.set.ConfigSyncPeriod.Duration, "config-sync-period", o.set.ConfigSyncPeriod.Duration,
		"accepted and without effect: no cache is kept that could differ from the API server's list")
}

func (o *Options) addPeriods(fs *pflag.FlagSet) {
	s := &o.set
	fs.DurationVar(&s.IPTables.SyncPeriod.Duration, "iptables-sync-period", s.IPTables.SyncPeriod.Duration,
		"longest wait before a failed Service is tried again; half of the time after which an overdue sync is unhealthy")
	fs.DurationVar(&s.IPTables.MinSyncPeriod.Duration, "iptables-min-sync-period", s.IPTables.MinSyncPeriod.Duration,
		"shortest time between two syncs after a burst of changes")
}

func (o *Options) addServers(fs *pflag.FlagSet) {
	s := &o.set
	fs.StringVar(&s.BindAddress, "bind-address", s.BindAddress, "overrides this node's primary address; "+
		"no socket is bound to it")
	fs.StringVar(&s.HealthzBindAddress, "healthz-bind-address", s.HealthzBindAddress, "IP[:port] of the health server")
	fs.StringVar(&s.MetricsBindAddress, "metrics-bind-address", s.MetricsBindAddress, "IP[:port] of the metrics server")
	fs.BoolVar(&s.BindAddressHardFail, "bind-address-hard-fail", false, "end when the health or metrics address cannot "+
		"be listened on")
	fs.BoolVar(&s.EnableProfiling, "profiling", false, "serve /debug/pprof on the metrics server")
	fs.Int32Var(&o.healthzPort, "healthz-port", o.healthzPort, "port of the health server; 0 switches it off")
	fs.Int32Var(&o.metricsPort, "metrics-port", o.metricsPort, "port of the metrics server")
	const gone = "This flag is deprecated and will be removed in a future release. Please use --%s-bind-address instead."
	for _, name := range []string{"healthz", "metrics"} {
		f := fs.Lookup(name + "-port")
		f.Deprecated, f.Hidden = strings.ReplaceAll(gone, "%s", name), true
	}
}

func (o *Options) addForwarding(fs *pflag.FlagSet) {
	s := &o.set
	fs.StringVar((*string)(&s.Mode), "proxy-mode", "", "proxy mode: iptables, the default, or ipvs")
	fs.Int32Var(s.IPTables.MasqueradeBit, "iptables-masquerade-bit", *s.IPTables.MasqueradeBit,
		"bit of the packet mark that asks for masquerading, 0 to 31")
	fs.BoolVar(&s.IPTables.MasqueradeAll, "masquerade-all", false, "masquerade all traffic to cluster IPs")
	fs.BoolVar(s.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", *s.IPTables.LocalhostNodePorts,
		"let NodePorts answer on 127.0.0.1 too (IPv4 only)")
	fs.StringVar((*string)(&s.DetectLocalMode), "detect-local-mode", "", "how pods are told from others: ClusterCIDR "+
		"(default), NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	fs.StringVar(&s.DetectLocal.BridgeInterface, "pod-bridge-interface", "", "bridge of the pods, for BridgeInterface")
	fs.StringVar(&s.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", "",
		"start of pod interfaces' names, for InterfaceNamePrefix")
	fs.StringVar(&s.ClusterCIDR, "cluster-cidr", "", "addresses of the pods, for ClusterCIDR; a pair for dual stack")
	fs.StringSliceVar(&s.NodePortAddresses, "nodeport-addresses", nil, "node addresses that NodePorts answer on: CIDRs "+
		"and the keywords primary, localhost, all; default all")
	fs.Var(flag.NewMapStringBool(&s.FeatureGates), "feature-gates", "feature gates, NAME=true|false")
}

// addKept registers the flags whose settings are checked and kept for parts of the program that do not exist yet, so
// that a command line written for upstream is accepted.
func (o *Options) addKept(fs *pflag.FlagSet) {
	s := &o.set
	i32 := func(p *int32, name, usage string) { fs.Int32Var(p, name, *p, usage) }
	span := func(p *time.Duration, name, usage string) { fs.DurationVar(p, name, *p, usage) }
	i32(s.OOMScoreAdj, "oom-score-adj", "oom_score_adj of this process, -1000 to 1000")
	i32(s.Conntrack.MaxPerCore, "conntrack-max-per-core", "connections to track for each CPU core; 0 changes nothing")
	i32(s.Conntrack.Min, "conntrack-min", "least number of connections to track")
	span(&s.Conntrack.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", "idle established TCP; "+
		"0 changes nothing")
	span(&s.Conntrack.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", "TCP in CLOSE_WAIT; "+
		"0 changes nothing")
	fs.BoolVar(&s.Conntrack.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "accept TCP packets outside the window")
	span(&s.Conntrack.UDPTimeout.Duration, "conntrack-udp-timeout", "unanswered UDP; 0 changes nothing")
	span(&s.Conntrack.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", "answered UDP; 0 changes nothing")
	fs.StringVar(&s.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", "", "accepted for compatibility")
}

func (o *Options) addIPVS(fs *pflag.FlagSet) {
	s := &o.set.IPVS
	span := func(p *time.Duration, name, usage string) { fs.DurationVar(p, name, *p, usage) }
	fs.StringVar(&s.Scheduler, "ipvs-scheduler", "", "how mode ipvs chooses an endpoint: a scheduler of the kernel's, "+
		"with its flags after commas, as rr (default), wlc or mh,mh-port")
	span(&s.SyncPeriod.Duration, "ipvs-sync-period", "in mode ipvs, how often everything is compared with the kernel, and "+
		"the longest wait before a failed Service is tried again")
	span(&s.MinSyncPeriod.Duration, "ipvs-min-sync-period", "in mode ipvs, the shortest time between two syncs after a "+
		"burst of changes")
	fs.StringSliceVar(&s.ExcludeCIDRs, "ipvs-exclude-cidrs", nil, "addresses whose virtual servers mode ipvs never touches")
	fs.BoolVar(&s.StrictARP, "ipvs-strict-arp", false, "in mode ipvs, do not answer ARP for the addresses of Services")
	span(&s.TCPTimeout.Duration, "ipvs-tcp-timeout", "in mode ipvs, idle TCP connections; 0 leaves the kernel's")
	span(&s.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", "in mode ipvs, TCP connections after a FIN; 0 leaves the kernel's")
	span(&s.UDPTimeout.Duration, "ipvs-udp-timeout", "in mode ipvs, idle UDP flows; 0 leaves the kernel's")
}

// ours tells the flags that count beside a configuration file.
func ours(name string) bool {
	switch name {
	case "config", "hostname-override", "master", "cleanup", "manifests", "socket", "iptables-flavour", "help", "version",
		"strict-proxy-mode", "ipvs-addresses", "ipvs-drain",
		"node", "output", "namespace", "in", "host-address", "connections", "limit",
		"logging-format", "log-flush-frequency", "v", "vmodule", "log-text-split-stream", "log-text-info-buffer-size":
		return true
	}
	return false
}
