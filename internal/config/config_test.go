package config

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/turnout-proxy/turnout/internal/model"
)

const header = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// complete runs a command line; with file not empty that text is the configuration file.
func complete(t *testing.T, file string, args ...string) (*Config, []string, error) {
	t.Helper()
	if file != "" {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"--config", path}, args...)
	}
	fs := pflag.NewFlagSet("proxy", pflag.ContinueOnError)
	fs.SetNormalizeFunc(Normalize)
	o := NewOptions()
	o.AddFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatalf("parse %q: %v", args, err)
	}
	return o.Complete()
}

var compare = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}, netip.AddrPort{}),
	cmpopts.IgnoreFields(Config{}, "Kept", "File"),
	cmpopts.EquateEmpty(),
}

func defaults() Config {
	return Config{
		Mode: ModeIPTables, ModeDefaulted: true, NodeName: "n1",
		Client: Client{ContentType: "application/vnd.kubernetes.protobuf", QPS: 5, Burst: 10},
		Socket: "/run/turnout/turnout.sock",
		IPTables: IPTables{
			Flavour: FlavourAuto, MasqueradeBit: 14, LocalhostNodePorts: true,
		},
		IPVS:       IPVS{Addresses: AddressesRoutes, Drain: 15 * time.Minute},
		SyncPeriod: 30 * time.Second, MinSyncPeriod: time.Second,
		Local:       Local{Mode: LocalClusterCIDR},
		BindAddress: netip.MustParseAddr("0.0.0.0"),
		Healthz:     netip.MustParseAddrPort("0.0.0.0:10256"), Metrics: netip.MustParseAddrPort("127.0.0.1:10249"),
		OOMScoreAdj: -999, Resync: 15 * time.Minute, Log: Log{Format: "text"},
	}
}

func TestCommandLineAndFileGiveTheConfiguration(t *testing.T) {
	tests := map[string]struct {
		file string
		args []string
		want func(*Config)
	}{
		"nothing given leaves the defaults":           {want: func(*Config) {}},
		"a file without settings leaves the defaults": {file: header, want: func(*Config) {}},
		"a file with zeros leaves the defaults, as kubeadm writes it": {
			file: header + "bindAddress: 0.0.0.0\nclientConnection: {burst: 0, qps: 0, contentType: ''}\n" +
				"configSyncPeriod: 0s\nconntrack: {maxPerCore: null, min: null}\nhealthzBindAddress: ''\n" +
				"iptables: {masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}\nnodePortAddresses: null\nmode: ''\n",
			want: func(*Config) {},
		},
		"flags set what they name": {
			args: []string{
				"--proxy-mode=iptables", "--iptables-masquerade-bit=7", "--masquerade-all",
				"--iptables-localhost-nodeports=false", "--iptables-sync-period=1m", "--iptables-min-sync-period=0s",
				"--cluster-cidr=10.244.0.0/16,fd00:244::/56", "--nodeport-addresses=primary,10.0.0.0/8",
				"--bind-address=192.0.2.1", "--healthz-bind-address=127.0.0.1", "--metrics-bind-address=[::1]:9",
				"--bind-address-hard-fail", "--profiling", "--oom-score-adj=5", "--config-sync-period=1h",
				"--kubeconfig=/k", "--master=https://m", "--kube-api-qps=2.5", "--kube-api-burst=0",
				"--kube-api-content-type=application/json", "--manifests=/", "--socket=/s", "--iptables-flavour=nft",
				"-v=3", "--vmodule=loop=5", "--feature-gates=AllowServiceExternalIPs=false", "--cleanup",
			},
			want: func(c *Config) {
				c.ModeDefaulted = false
				c.IPTables = IPTables{Flavour: FlavourNFT, MasqueradeBit: 7, MasqueradeAll: true}
				c.SyncPeriod, c.MinSyncPeriod = time.Minute, 0
				c.Local.ClusterCIDRs = []netip.Prefix{
					netip.MustParsePrefix("10.244.0.0/16"),
					netip.MustParsePrefix("fd00:244::/56"),
				}
				c.NodePortAddresses = []string{"primary", "10.0.0.0/8"}
				c.BindAddress = netip.MustParseAddr("192.0.2.1")
				c.Healthz = netip.MustParseAddrPort("127.0.0.1:10256")
				c.Metrics = netip.MustParseAddrPort("[::1]:9")
				c.HardFail, c.Profiling, c.OOMScoreAdj, c.Resync = true, true, 5, time.Hour
				c.Client = Client{Kubeconfig: "/k", Master: "https://m", QPS: 2.5, ContentType: "application/json"}
				c.Manifests, c.Socket = "/", "/s"
				c.Log = Log{Format: "text", Verbosity: 3, VModule: "loop=5"}
				c.NoExternalIPs, c.Cleanup = true, true
			},
		},
		"underscores in flag names are dashes": {
			args: []string{"--proxy_mode=iptables", "--masquerade_all"},
			want: func(c *Config) { c.ModeDefaulted, c.IPTables.MasqueradeAll = false, true },
		},
		"a file sets what it names": {
			file: header + "mode: iptables\nclusterCIDR: 10.244.0.0/16\ndetectLocalMode: InterfaceNamePrefix\n" +
				"detectLocal: {bridgeInterface: cni0, interfaceNamePrefix: veth}\nhostnameOverride: N1\n" +
				"clientConnection: {kubeconfig: /k, acceptContentTypes: application/json, qps: 7, burst: 8}\n" +
				"iptables: {masqueradeBit: 0, masqueradeAll: true, localhostNodePorts: false, syncPeriod: 10s, " +
				"minSyncPeriod: 2s}\n" +
				"nodePortAddresses: ['127.0.0.010/8', localhost]\nlogging: {format: json, verbosity: 2}\n" +
				"oomScoreAdj: 0\nfeatureGates: {AllowServiceExternalIPs: true}\n",
			want: func(c *Config) {
				c.ModeDefaulted = false
				c.Local = Local{
					Mode: LocalInterfaceNamePrefix, BridgeInterface: "cni0", InterfaceNamePrefix: "veth",
					ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
				}
				c.Client.Kubeconfig, c.Client.AcceptContentTypes = "/k", "application/json"
				c.Client.QPS, c.Client.Burst = 7, 8
				c.IPTables = IPTables{
					Flavour: FlavourAuto, MasqueradeAll: true,
				}
				c.SyncPeriod, c.MinSyncPeriod = 10*time.Second, 2*time.Second
				c.NodePortAddresses = []string{"127.0.0.10/8", "localhost"}
				c.Log = Log{Format: "json", Verbosity: 2}
				c.OOMScoreAdj = 0
			},
		},
		"an IPv6 bind address in a file moves the default addresses": {
			file: header + "bindAddress: '::'\n",
			want: func(c *Config) {
				c.BindAddress = netip.MustParseAddr("::")
				c.Healthz = netip.MustParseAddrPort("[::]:10256")
				c.Metrics = netip.MustParseAddrPort("[::1]:10249")
			},
		},
		"an IPv6 bind address as a flag does not": {
			args: []string{"--bind-address=::"},
			want: func(c *Config) { c.BindAddress = netip.MustParseAddr("::") },
		},
		"an empty address flag keeps the default": {
			args: []string{"--healthz-bind-address=", "--metrics-bind-address=", "--bind-address="},
			want: func(*Config) {},
		},
		"a deprecated health port completes an address": {
			args: []string{"--healthz-bind-address=192.0.2.1", "--healthz-port=99"},
			want: func(c *Config) { c.Healthz = netip.MustParseAddrPort("192.0.2.1:99") },
		},
		"a deprecated health port of 0 switches the server off": {
			args: []string{"--healthz-port=0"},
			want: func(c *Config) { c.Healthz = netip.AddrPort{} },
		},
		"beside a file only some flags count": {
			file: header + "hostnameOverride: other\nclusterCIDR: 10.1.0.0/16\n" +
				"logging: {verbosity: 1, vmodule: [{filePattern: a, verbosity: 1}]}\n",
			args: []string{
				"--hostname-override= N1 ", "--master=https://m", "--socket=/s", "-v=4", "--vmodule=b=2",
				"--cluster-cidr=10.2.0.0/16", "--masquerade-all",
			},
			want: func(c *Config) {
				c.Client.Master, c.Socket = "https://m", "/s"
				c.Log = Log{Format: "text", Verbosity: 4, VModule: "b=2,a=1"}
				c.Local.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			args := tc.args
			if !strings.Contains(tc.file+strings.Join(args, " "), "ostname") {
				args = append([]string{"--hostname-override=n1"}, args...)
			}
			got, _, err := complete(t, tc.file, args...)
			if err != nil {
				t.Fatal(err)
			}
			want := defaults()
			tc.want(&want)
			if diff := cmp.Diff(&want, got, compare); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWithoutAnOverrideTheNodeIsTheHostInLowerCase(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Skip(err)
	}
	got, _, err := complete(t, "")
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.ToLower(strings.TrimSpace(host)); got.NodeName != want {
		t.Errorf("node name is %q, want %q", got.NodeName, want)
	}
}

func TestAMistakeIsToldInUpstreamsWords(t *testing.T) {
	const root = "KubeProxyConfiguration."
	const pair = "must be a either a single CIDR or dual-stack pair of CIDRs (e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]"
	tests := map[string]struct {
		file, want string
		args       []string
	}{
		"masquerade bit too big": {
			"iptables: {masqueradeBit: 32}",
			root + `KubeProxyIPTablesConfiguration.MasqueradeBit: Invalid value: 32: must be within the range [0, 31]`,
			[]string{"--iptables-masquerade-bit=32"},
		},
		"masquerade bit negative": {
			"iptables: {masqueradeBit: -1}",
			root + `KubeProxyIPTablesConfiguration.MasqueradeBit: Invalid value: -1: must be within the range [0, 31]`,
			[]string{"--iptables-masquerade-bit=-1"},
		},
		"unknown mode": {
			"mode: fast",
			root + `Mode.ProxyMode: Invalid value: "fast": must be iptables, ipvs, nftables or blank ` +
				`(blank means the best-available proxy [currently iptables])`,
			[]string{"--proxy-mode=fast"},
		},
		"mode in the wrong case": {
			"mode: IPTables", root + `Mode.ProxyMode: Invalid value: "IPTables"`,
			[]string{"--proxy-mode=IPTables"},
		},
		"burst negative": {
			"clientConnection: {burst: -1}",
			root + `ClientConnection.Burst: Invalid value: -1: must be greater than or equal to 0`,
			[]string{"--kube-api-burst=-1"},
		},
		"resync period": {
			"configSyncPeriod: -1s", root + `ConfigSyncPeriod: Invalid value: "-1s": must be greater than 0`,
			[]string{"--config-sync-period=-1s"},
		},
		"sync period": {
			"iptables: {syncPeriod: -1s, minSyncPeriod: -2s}",
			root + `SyncPeriod: Invalid value: "-1s": must be greater than 0`,
			[]string{"--iptables-sync-period=-1s", "--iptables-min-sync-period=-2s"},
		},
		"least sync period": {
			"iptables: {minSyncPeriod: -2s}",
			root + `MinSyncPeriod: Invalid value: "-2s": must be greater than or equal to 0`,
			[]string{"--iptables-min-sync-period=-2s"},
		},
		"least sync period above the sync period": {
			"iptables: {minSyncPeriod: 40s}",
			root + `SyncPeriod: Invalid value: "40s": must be greater than or equal to KubeProxyConfiguration.MinSyncPeriod`,
			[]string{"--iptables-min-sync-period=40s"},
		},
		"bind address": {
			"bindAddress: host",
			root + `BindAddress: Invalid value: "host": not a valid textual representation of an IP address`,
			[]string{"--bind-address=host"},
		},
		"health address without port": {
			"healthzBindAddress: 'host'",
			root + `HealthzBindAddress: Invalid value: "host": must be IP:port`,
			[]string{"--healthz-bind-address=host"},
		},
		"health address that is a name": {
			"healthzBindAddress: 'host:1'",
			root + `HealthzBindAddress: Invalid value: "host": must be a valid IP`,
			[]string{"--healthz-bind-address=host:1"},
		},
		"health port too big": {
			"healthzBindAddress: '1.2.3.4:65536'",
			root + `HealthzBindAddress: Invalid value: "65536": must be a valid port`,
			[]string{"--healthz-bind-address=1.2.3.4:65536"},
		},
		"metrics port of 0": {
			"metricsBindAddress: '1.2.3.4:0'",
			root + `MetricsBindAddress: Invalid value: "0": must be a valid port`,
			[]string{"--metrics-bind-address=1.2.3.4:0"},
		},
		"metrics address in brackets without port": {
			"metricsBindAddress: '[::1]'",
			root + `MetricsBindAddress: Invalid value: "[::1]": must be IP:port`,
			[]string{"--metrics-bind-address=[::1]"},
		},
		"metrics switched off": {
			"", root + `MetricsBindAddress: Invalid value: "": must be IP:port`,
			[]string{"--metrics-port=0"},
		},
		"node port address": {
			"nodePortAddresses: [primary, 10.0.0.1]",
			root + `NodePortAddresses[1]: Invalid value: "10.0.0.1": must be a valid CIDR or one of the keywords ` +
				`'primary', 'localhost', 'all'`,
			[]string{"--nodeport-addresses=primary,10.0.0.1"},
		},
		"node port keyword twice": {
			"nodePortAddresses: [all, all]",
			root + `NodePortAddresses[1]: Duplicate value: "all"`,
			[]string{"--nodeport-addresses=all,all"},
		},
		"detection mode": {
			"detectLocalMode: clustercidr",
			root + `DetectLocalMode: Unsupported value: "clustercidr": supported values: "ClusterCIDR", "NodeCIDR", ` +
				`"BridgeInterface", "InterfaceNamePrefix", ""`,
			[]string{"--detect-local-mode=clustercidr"},
		},
		"bridge without name": {
			"detectLocalMode: BridgeInterface",
			root + `DetectLocalConfiguration.InterfaceName: Invalid value: "": must not be empty`,
			[]string{"--detect-local-mode=BridgeInterface"},
		},
		"prefix without text": {
			"detectLocalMode: InterfaceNamePrefix",
			root + `DetectLocalConfiguration.InterfacePrefix: Invalid value: "": must not be empty`,
			[]string{"--detect-local-mode=InterfaceNamePrefix"},
		},
		"cluster CIDR": {
			"clusterCIDR: 10.0.0.0/40",
			root + `DetectLocalConfiguration.ClusterCIDRs[0]: Invalid value: "10.0.0.0/40": must be a valid CIDR block ` +
				`(e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)`,
			[]string{"--cluster-cidr=10.0.0.0/40"},
		},
		"three cluster CIDRs": {
			"clusterCIDR: 10.0.0.0/8,11.0.0.0/8,fd00::/8",
			root + `DetectLocalConfiguration.ClusterCIDRs: Invalid value: ["10.0.0.0/8","11.0.0.0/8","fd00::/8"]: ` + pair,
			[]string{"--cluster-cidr=10.0.0.0/8,11.0.0.0/8,fd00::/8"},
		},
		"two cluster CIDRs of a family": {
			"clusterCIDR: 10.0.0.0/8,11.0.0.0/8",
			root + `DetectLocalConfiguration.ClusterCIDRs: Invalid value: ["10.0.0.0/8","11.0.0.0/8"]: ` + pair,
			[]string{"--cluster-cidr=10.0.0.0/8,11.0.0.0/8"},
		},
		"oom score": {
			"oomScoreAdj: 1001",
			root + `KubeProxyLinuxConfiguration.OOMScoreAdj: Invalid value: 1001: must be within the range [-1000, 1000]`,
			[]string{"--oom-score-adj=1001"},
		},
		"conntrack maximum": {
			"conntrack: {maxPerCore: -1}",
			root + `KubeProxyLinuxConfiguration.KubeProxyConntrackConfiguration.MaxPerCore: Invalid value: -1: ` +
				`must be greater than or equal to 0`,
			[]string{"--conntrack-max-per-core=-1"},
		},
		"conntrack minimum": {
			"conntrack: {min: -1}",
			root + `KubeProxyLinuxConfiguration.KubeProxyConntrackConfiguration.Min: Invalid value: -1`,
			[]string{"--conntrack-min=-1"},
		},
		"conntrack timeout": {
			"conntrack: {udpTimeout: -1s}",
			root + `KubeProxyLinuxConfiguration.KubeProxyConntrackConfiguration.UDPTimeout: Invalid value: "-1s"`,
			[]string{"--conntrack-udp-timeout=-1s"},
		},
		"log format": {
			"logging: {format: xml}",
			root + `logging.format: Invalid value: "xml": Unsupported log format`,
			[]string{"--logging-format=xml"},
		},
		"per-file levels in JSON": {
			"logging: {format: json, vmodule: [{filePattern: a, verbosity: 1}]}",
			root + `logging.vmodule: Forbidden: Only supported for text log format`,
			[]string{"--logging-format=json", "--vmodule=a=1"},
		},
		"two mistakes are both told": {
			"bindAddress: x\noomScoreAdj: -1001",
			`OOMScoreAdj: Invalid value: -1001: must be within the range [-1000, 1000], KubeProxyConfiguration.BindAddress`,
			[]string{"--bind-address=x", "--oom-score-adj=-1001"},
		},
		"a mode of a later version": {
			"mode: nftables", `proxy mode "nftables" is not available in this version; use iptables or ipvs`,
			[]string{"--proxy-mode=nftables"},
		},
		"the removed mode": {
			"mode: userspace", `proxy mode "userspace" is not available in this version`,
			[]string{"--proxy-mode=userspace"},
		},
	}
	check := func(t *testing.T, err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error\n  %v\nwhich should contain\n  %s", err, want)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("the error has more than one line: %q", err)
		}
	}
	for name, tc := range tests {
		t.Run(name+", as a flag", func(t *testing.T) {
			_, _, err := complete(t, "", tc.args...)
			check(t, err, tc.want)
		})
		if tc.file == "" {
			continue
		}
		t.Run(name+", in a file", func(t *testing.T) {
			_, _, err := complete(t, header+tc.file+"\n")
			check(t, err, tc.want)
		})
	}
}

func TestAFileThatCannotBeReadIsNamedWithTheReason(t *testing.T) {
	tests := map[string]struct{ file, want string }{
		"another kind": {"apiVersion: v1\nkind: Pod\n", `it is "Pod" of "v1"`},
		"no kind":      {"mode: iptables\n", `it is "" of ""`},
		"an older version": {
			"apiVersion: kubeproxy.config.k8s.io/v1\nkind: KubeProxyConfiguration\n",
			`of "kubeproxy.config.k8s.io/v1"`,
		},
		"a wrong type": {header + "iptables: {syncPeriod: 7}\n", "syncPeriod"},
		"not YAML":     {header + "mode: [\n", "failed to decode"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := complete(t, tc.file)
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "config.yaml") {
				t.Errorf("got error %v, which should name config.yaml and contain %q", err, tc.want)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("the error has more than one line: %q", err)
			}
		})
	}
	t.Run("absent", func(t *testing.T) {
		_, _, err := complete(t, "", "--config=/does/not/exist")
		if err == nil || !strings.Contains(err.Error(), "/does/not/exist: no such file") {
			t.Errorf("got error %v", err)
		}
	})
}

func TestOwnFlagsAreChecked(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct{ flag, want string }{
		"unknown flavour":            {"--iptables-flavour=old", `--iptables-flavour "old" is not auto, legacy or nft`},
		"no socket":                  {"--socket=", "--socket is empty"},
		"manifests that are absent":  {"--manifests=/does/not/exist", "--manifests: stat /does/not/exist: no such file"},
		"manifests that are a file":  {"--manifests=" + file, "is not a directory"},
		"a node name of blanks only": {"--hostname-override=  ", "empty hostname-override is invalid"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := complete(t, "", tc.flag)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got error %v, which should contain %q", err, tc.want)
			}
		})
	}
}

func TestWhatIsIgnoredIsSaid(t *testing.T) {
	tests := map[string]struct {
		file string
		args []string
		want []string
	}{
		"nothing to say":       {args: []string{"--proxy-mode=iptables"}},
		"kubeadm's empty file": {file: header + "mode: iptables\nconntrack: {maxPerCore: null, tcpBeLiberal: false}\n"},
		"no mode": {want: []string{
			"No proxy mode was chosen and iptables is used; write mode: iptables, or give --proxy-mode iptables, to " +
				"stay on it when the default changes",
		}},
		"flags beside a file, but not those that count": {
			file: header + "mode: iptables\n",
			args: []string{"--proxy-mode=iptables", "--masquerade_all", "-v=2", "--socket=/s", "--hostname-override=n"},
			want: []string{"Flags were ignored because --config is given: --masquerade-all --proxy-mode"},
		},
		"settings of a file that nothing acts upon": {
			file: header + "mode: iptables\nconntrack: {min: 0, udpTimeout: 5s}\n" +
				"featureGates: {B: true, A: false, AllowServiceExternalIPs: false}\n",
			want: []string{
				"Setting conntrack.min is not acted upon by this version",
				"Setting conntrack.udpTimeout is not acted upon by this version",
				"Feature gates are not acted upon by this version: A B",
			},
		},
		"flags that nothing acts upon": {
			args: []string{"--proxy-mode=iptables", "--conntrack-min=5", "--ipvs-scheduler=sh"},
			want: []string{"Setting --conntrack-min is not acted upon by this version"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, got, err := complete(t, tc.file, tc.args...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("notices (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMistakesThatOnlyAStrictReaderSeesAreNoticedAndPassedOver(t *testing.T) {
	for name, tc := range map[string]struct{ file, want, mode string }{
		"an unknown field":                    {header + "mode: iptables\nspeed: high\n", `field "speed"`, "iptables"},
		"a key that stands twice counts last": {header + "mode: ipvs\nmode: iptables\n", `"mode" already set`, "iptables"},
	} {
		t.Run(name, func(t *testing.T) {
			got, notices, err := complete(t, tc.file)
			if err != nil {
				t.Fatal(err)
			}
			if all := strings.Join(notices, "\n"); !strings.Contains(all, tc.want) || len(notices) != 1 {
				t.Errorf("notices are %q, want one with %q", notices, tc.want)
			}
			if string(got.Kept.Mode) != tc.mode {
				t.Errorf("mode is %q, want %q", got.Kept.Mode, tc.mode)
			}
		})
	}
}

// FuzzFile: whatever stands in a file, the answer is a configuration or an error of one line.
func FuzzFile(f *testing.F) {
	f.Add([]byte(header + "mode: iptables\nclusterCIDR: 10.0.0.0/8\nconntrack: {min: 1}\n"))
	f.Add([]byte(header + "iptables: {masqueradeBit: 99, syncPeriod: -1s}\nhealthzBindAddress: '[::1'\n"))
	f.Add([]byte(header + "logging: {format: json, flushFrequency: 5, vmodule: [{filePattern: a, verbosity: 1}]}\n"))
	f.Add([]byte(header + "nodePortAddresses: [primary, '::/129', 1.2.3.4/0]\nbindAddress: '::ffff:1.2.3.4'\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, _, err := decode(data)
		if err == nil {
			applyDefaults(c)
			err = validate(c)
		}
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("the error has more than one line: %q", err)
			}
			return
		}
		o := NewOptions()
		cfg, err := o.build(c)
		if err != nil {
			return
		}
		if !cfg.Metrics.IsValid() || cfg.SyncPeriod <= 0 || !cfg.BindAddress.IsValid() {
			t.Errorf("an incomplete configuration was accepted: %+v", cfg)
		}
	})
}

func TestSettingsOfLaterVersionsAreKept(t *testing.T) {
	got, _, err := complete(t, header+"ipvs: {scheduler: sh}\nwinkernel: {sourceVip: 1.2.3.4}\nportRange: 1-2\n")
	if err != nil {
		t.Fatal(err)
	}
	want := v1alpha1.KubeProxyConfiguration{}
	applyDefaults(&want)
	want.IPVS.Scheduler, want.Winkernel.SourceVip, want.PortRange = "sh", "1.2.3.4", "1-2"
	if diff := cmp.Diff(want, got.Kept); diff != "" {
		t.Errorf("kept configuration (-want +got):\n%s", diff)
	}
}

func TestTheBindAddressStandsInForPrimary(t *testing.T) {
	c := Config{NodePortAddresses: []string{"primary", "10.0.0.0/8"}, BindAddress: netip.MustParseAddr("192.0.2.1")}
	tests := map[string]struct {
		family model.Family
		want   []string
	}{
		"of its family":     {model.IPv4, []string{"192.0.2.1/32", "10.0.0.0/8"}},
		"not of the others": {model.IPv6, []string{"primary", "10.0.0.0/8"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, c.NodePortsFor(tc.family)); diff != "" {
				t.Errorf("addresses (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAddressesAreReadAsKubernetesDoes(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "010.000.0.01": "10.0.0.1", "0.0.0.0": "0.0.0.0", "::ffff:1.2.3.4": "1.2.3.4",
		"::1": "::1", "": "", "1.2.3": "", "1.2.3.256": "", "fe80::1%eth0": "", "1..2.3": "",
	} {
		a, err := parseAddr(text)
		if got := a; (want == "") != (err != nil) || want != "" && got.String() != want {
			t.Errorf("parseAddr(%q) = %v, %v; want %q", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"10.0.0.1/8": "10.0.0.0/8", "010.1.0.0/16": "10.1.0.0/16", "fd00::1/64": "fd00::/64",
		"10.0.0.0": "", "10.0.0.0/33": "", "10.0.0.0/x": "", "x/8": "",
	} {
		p, err := parsePrefix(text)
		if (want == "") != (err != nil) || want != "" && p.String() != want {
			t.Errorf("parsePrefix(%q) = %v, %v; want %q", text, p, err, want)
		}
	}
}
