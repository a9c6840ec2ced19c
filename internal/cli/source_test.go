package cli

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/iptables"
	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/loop"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestThePolicyGetsWhatWasConfigured(t *testing.T) {
	pods := []netip.Prefix{netip.MustParsePrefix("10.60.0.0/16")}
	c := &config.Config{
		NodeName: "n1", Local: config.Local{
			Mode: config.LocalBridgeInterface, ClusterCIDRs: pods, BridgeInterface: "cni0",
			InterfaceNamePrefix: "veth",
		},
		IPTables:          config.IPTables{MasqueradeBit: 7, MasqueradeAll: true, LocalhostNodePorts: true},
		NodePortAddresses: []string{"primary"}, BindAddress: netip.MustParseAddr("192.0.2.1"), NoExternalIPs: true,
	}
	want := forward.Config{
		Family: model.IPv4, NodeName: "n1", Detect: forward.DetectBridgeInterface, ClusterCIDRs: pods,
		BridgeInterface: "cni0", InterfaceNamePrefix: "veth", MasqueradeAll: true,
		NodePortAddresses: []string{"192.0.2.1/32"}, LocalhostNodePorts: true, IgnoreExternalIPs: true,
	}
	same := cmpopts.EquateComparable(netip.Prefix{})
	if diff := cmp.Diff(want, forwardConfig(c, config.ModeIPTables, model.IPv4), same); diff != "" {
		t.Errorf("policy (-want +got):\n%s", diff)
	}
	rules := iptables.Options{Family: model.IPv6, MasqueradeBit: 7, SectionChains: iptables.NFTSectionChains}
	if diff := cmp.Diff(rules, iptablesOptions(c, model.IPv6, xtables.NFT)); diff != "" {
		t.Errorf("rules of the nft flavour (-want +got):\n%s", diff)
	}
	rules.SectionChains = 0
	if diff := cmp.Diff(rules, iptablesOptions(c, model.IPv6, xtables.Legacy)); diff != "" {
		t.Errorf("rules of the legacy flavour (-want +got):\n%s", diff)
	}
}

func TestRulesDoWithoutWhatTheKernelLacks(t *testing.T) {
	lacking, unknown := fmt.Errorf("no: %w", xtables.ErrUnsupported), errors.New("the lock was held")
	tests := map[string]struct {
		probed map[xtables.Feature]error
		want   iptables.Options
		logged int
	}{
		"nothing": {map[xtables.Feature]error{xtables.FeatureBPF: nil, xtables.FeatureRandomFully: nil}, iptables.Options{}, 0},
		"the bpf match": {
			map[xtables.Feature]error{xtables.FeatureBPF: lacking, xtables.FeatureRandomFully: nil},
			iptables.Options{NoBPF: true},
			1,
		},
		"random ports": {
			map[xtables.Feature]error{xtables.FeatureBPF: nil, xtables.FeatureRandomFully: lacking},
			iptables.Options{NoRandomFully: true},
			1,
		},
		"what could not be told counts as there": {map[xtables.Feature]error{
			xtables.FeatureBPF:         unknown,
			xtables.FeatureRandomFully: unknown,
		}, iptables.Options{}, 0},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			var got iptables.Options
			adapt(&got, tc.probed, slog.New(slog.NewTextHandler(&out, nil)))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
			if n := strings.Count(out.String(), "\n"); n != tc.logged {
				t.Errorf("%d lines were logged, want %d:\n%s", n, tc.logged, &out)
			}
		})
	}
}

// held is an observation with given rows.
type held []backend.Row

func (h held) Rows() []backend.Row     { return h }
func (h held) Objects() map[string]int { return nil }

func TestRowsOfADaemonSayHowTheyAreServed(t *testing.T) {
	tab, err := forward.Parse(strings.NewReader("context IPv4 node=na\n  node-ports all\n\n" +
		"port a/one/tcp\n  frontend cluster-ip 10.70.0.1:80\n    from any reject reason=NoEndpoints\n\n" +
		"port a/two/tcp\n  frontend cluster-ip 10.70.0.2:80\n    from any reject reason=NoEndpoints\n"))
	if err != nil {
		t.Fatal(err)
	}
	one := backend.Row{Service: "a/one", Frontend: "10.70.0.1:80", Proto: "tcp", Do: "reject"}
	two := forward.PortName{Name: model.Name{Namespace: "a", Name: "two"}, Proto: model.TCP}
	tests := map[string]struct {
		synced  bool
		drift   int
		rows    held
		trouble []loop.PortStatus
		want    []string
	}{
		"before the sources are complete, what the kernel holds": {false, 0, held{one}, nil, []string{"a/one  "}},
		"nothing to do, nothing differs":                         {true, 0, nil, nil, []string{"a/one none ", "a/two none "}},
		"something to do":                                        {true, 1, held{one}, nil, []string{"a/one none ", "a/two missing "}},
		"refused by the kernel": {
			true, 0,
			held{one},
			[]loop.PortStatus{{Port: two, Err: "no room"}},
			[]string{"a/one none ", "a/two missing refused by the kernel: no room"},
		},
		"beyond the mode": {
			true, 0,
			held{one},
			[]loop.PortStatus{{Port: two, Unsupported: "cannot"}},
			[]string{"a/one none ", "a/two missing cannot"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			f := momentFamily{family: model.IPv4, ports: answer.Ports(tab), trouble: tc.trouble}
			var got []string
			for _, r := range f.rows(&loop.ReadBack{Observed: tc.rows, Drift: tc.drift}, tc.synced) {
				got = append(got, r.Service+" "+r.Drift+" "+r.Detail)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("rows (-want +got):\n%s", diff)
			}
		})
	}
}
