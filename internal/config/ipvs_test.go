package config

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestModeIPVSIsConfigured(t *testing.T) {
	tests := map[string]struct {
		file string
		args []string
		want func(*Config)
	}{
		"flags of mode ipvs": {
			args: []string{
				"--proxy-mode=ipvs", "--strict-proxy-mode", "--ipvs-scheduler=mh,mh-port", "--ipvs-sync-period=1m",
				"--ipvs-min-sync-period=2s", "--ipvs-exclude-cidrs=10.20.0.77/32,fd20::77/128", "--ipvs-strict-arp",
				"--ipvs-tcp-timeout=1h", "--ipvs-tcpfin-timeout=1m", "--ipvs-udp-timeout=30s", "--ipvs-drain=5m",
				"--ipvs-addresses=device",
			},
			want: func(c *Config) {
				c.Mode, c.ModeDefaulted, c.StrictMode = ModeIPVS, false, true
				c.SyncPeriod, c.MinSyncPeriod = time.Minute, 2*time.Second
				c.IPVS = IPVS{
					Scheduler: "mh,mh-port", StrictARP: true, Addresses: AddressesDevice, Drain: 5 * time.Minute,
					ExcludeCIDRs: []netip.Prefix{
						netip.MustParsePrefix("10.20.0.77/32"), netip.MustParsePrefix("fd20::77/128"),
					},
					TCPTimeout: time.Hour, TCPFinTimeout: time.Minute, UDPTimeout: 30 * time.Second,
				}
			},
		},
		"a file for mode ipvs": {
			file: header + "mode: ipvs\nipvs: {scheduler: wlc, strictARP: true, excludeCIDRs: [10.20.0.77/32], syncPeriod: 20s, " +
				"tcpTimeout: 10m}\niptables: {syncPeriod: 10s}\n",
			want: func(c *Config) {
				c.Mode, c.ModeDefaulted, c.SyncPeriod, c.MinSyncPeriod = ModeIPVS, false, 20*time.Second, 0
				c.IPVS.Scheduler, c.IPVS.StrictARP, c.IPVS.TCPTimeout = "wlc", true, 10*time.Minute
				c.IPVS.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("10.20.0.77/32")}
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			want := defaults()
			tc.want(&want)
			got, notices, err := complete(t, tc.file, append([]string{"--hostname-override=n1"}, tc.args...)...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(&want, got, compare); diff != "" {
				t.Errorf("configuration (-want +got):\n%s", diff)
			}
			for _, n := range notices {
				if strings.Contains(n, "ipvs") {
					t.Errorf("notice %q", n)
				}
			}
		})
	}
}

func TestMistakesOfModeIPVSAreTold(t *testing.T) {
	const at = "KubeProxyConfiguration.KubeProxyIPVSConfiguration."
	tests := map[string]struct{ text, want string }{
		"a timeout below 0":     {"tcpTimeout: -1s", at + `TCPTimeout: Invalid value: "-1s": must be greater than or equal to 0`},
		"half a second":         {"tcpFinTimeout: 500ms", at + `TCPFinTimeout: Invalid value: "500ms": must be whole seconds`},
		"longer than a kernel":  {"udpTimeout: 1000000h", at + "UDPTimeout: Invalid value"},
		"an address":            {"excludeCIDRs: [10.0.0.1]", at + `ExcludeCidrs[0]: Invalid value: "10.0.0.1": must be a valid CIDR`},
		"a sync period below 0": {"syncPeriod: -1s", `KubeProxyConfiguration.SyncPeriod: Invalid value: "-1s": must be greater than 0`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := complete(t, header+"mode: ipvs\nipvs: {"+tc.text+"}\n")
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
			if _, _, err := complete(t, header+"mode: iptables\nipvs: {"+tc.text+"}\n"); err != nil {
				t.Errorf("in mode iptables: %v", err)
			}
		})
	}
	for flag, want := range map[string]string{
		"--ipvs-addresses=bridge": `--ipvs-addresses "bridge" is not routes or device`,
		"--ipvs-drain=10ms":       "--ipvs-drain 10ms is less than a second",
	} {
		if _, _, err := complete(t, "", "--proxy-mode=ipvs", flag); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", flag, err, want)
		}
	}
}
