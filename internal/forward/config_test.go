package forward_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestWhereNodePortsAnswer(t *testing.T) {
	const unmatched, invalid = "Node na: NodePortAddressesUnmatched", "Node na: InvalidNodePortAddress"
	wide := forward.Host{Addrs: ips("127.0.0.1", "10.20.0.11", "172.31.9.5", "::1", "fd20::11", "fe80::1")}
	tests := map[string]struct {
		list      []string
		localhost bool
		noNode    bool
		v4, v6    string // the lines of the two families
		findings  []string
	}{
		"no list":                                {nil, false, false, "node-ports all", "node-ports all", nil},
		"no list, localhost on":                  {nil, true, false, "node-ports all loopback", "node-ports all", nil},
		"all":                                    {[]string{"all"}, true, false, "node-ports all loopback", "node-ports all", nil},
		"a range over everything beats the rest": {[]string{"10.20.0.0/24", "0.0.0.0/0", "fd20::/64"}, false, false, "node-ports all", "node-ports fd20::11", nil},
		"primary":                                {[]string{"primary"}, true, false, "node-ports 10.20.0.11", "node-ports fd20::11", nil},
		"primary before the Node is known opens all, as upstream does": {
			[]string{"primary"}, true, true, "node-ports all loopback", "node-ports all", []string{unmatched, unmatched},
		},
		"B048 each family uses its own part of the list": {
			[]string{"::1/128", "10.20.0.11/32", "fd20::11/128"}, true, false, "node-ports 10.20.0.11", "node-ports fd20::11", nil,
		},
		"nothing for one family opens it, as upstream does": {
			[]string{"10.20.0.0/24"}, false, false, "node-ports 10.20.0.11", "node-ports all", []string{unmatched},
		},
		"localhost only": {[]string{"localhost"}, true, false, "node-ports 127.0.0.1 loopback", "node-ports", nil},
		"localhost only, switched off": {
			[]string{"localhost"}, false, false, "node-ports", "node-ports", nil,
		},
		"one loopback address": {[]string{"127.0.0.1/32", "fd20::/64"}, true, false, "node-ports 127.0.0.1 loopback", "node-ports fd20::11", nil},
		"a range that contains loopback": {
			[]string{"64.0.0.0/2", "fd20::/64"}, true, false, "node-ports 127.0.0.1 loopback", "node-ports fd20::11", nil,
		},
		"several":                         {[]string{"172.31.0.0/16", "10.20.0.0/24", "fd20::/64"}, false, false, "node-ports 10.20.0.11 172.31.9.5", "node-ports fd20::11", nil},
		"a range without addresses of us": {[]string{"192.168.0.0/16", "fd21::/64"}, false, false, "node-ports", "node-ports", nil},
		"an entry that is no CIDR is reported and ignored": {
			[]string{"eth0", "10.20.0.11", "172.31.0.0/16", "fd20::/64"},
			false, false, "node-ports 172.31.9.5", "node-ports fd20::11",
			[]string{invalid, invalid, invalid, invalid},
		},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			var objects []any
			if !tc.noNode {
				objects = append(objects, nodeNA())
			}
			var got []string
			var found []model.Finding
			for _, cfg := range []forward.Config{config(), config6()} {
				cfg.NodePortAddresses, cfg.LocalhostNodePorts = tc.list, tc.localhost
				table, f := forward.Build(cfg, snapshot(objects...), wide)
				got, found = append(got, trimLines(table.String())[3]), append(found, f...)
			}
			if diff := cmp.Diff([]string{tc.v4, tc.v6}, got); diff != "" {
				t.Errorf("scope (-want +got):\n%s", diff)
			}
			wantFindings(t, found, tc.findings...)
		})
	}
}

func TestAFamilyThatTheMachineDoesNotHaveNeedsNoWarningAboutNodePorts(t *testing.T) {
	cfg := config6()
	cfg.NodePortAddresses = []string{"primary"}
	v4only := &model.Node{Name: "na", Addresses: ips("10.20.0.11")}
	_, found := forward.Build(cfg, snapshot(v4only), forward.Host{Addrs: ips("::1", "fe80::1", "10.20.0.11")})
	wantFindings(t, found)
}

func TestAPrimaryAddressOnLoopbackIsAnUnknownOne(t *testing.T) {
	cfg := config()
	cfg.NodePortAddresses, cfg.LocalhostNodePorts = []string{"primary"}, true
	table, found := forward.Build(cfg, snapshot(&model.Node{Name: "na", Addresses: ips("127.0.0.1")}), host())
	wantFindings(t, found, "Node na: NodePortAddressesUnmatched")
	if diff := cmp.Diff("node-ports all loopback", trimLines(table.String())[3]); diff != "" {
		t.Errorf("scope (-want +got):\n%s", diff)
	}
}

func TestNodePortsAnswerInTheirScopeOnly(t *testing.T) {
	const served, pass = "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always", "pass"
	tests := map[string]struct {
		list      []string
		localhost bool
		want      map[string]string
	}{
		"all, without loopback": {nil, false, map[string]string{
			"198.51.100.7 10.20.0.11:30080": served, "127.0.0.1 127.0.0.1:30080": pass, "198.51.100.7 10.20.0.12:30080": pass,
		}},
		"all, with loopback": {nil, true, map[string]string{
			"127.0.0.1 127.0.0.1:30080": served, "127.0.0.1 127.0.0.77:30080": served,
		}},
		"some": {[]string{"10.20.0.0/24"}, true, map[string]string{
			"198.51.100.7 10.20.0.11:30080": served, "127.0.0.1 127.0.0.1:30080": pass,
		}},
		"localhost": {[]string{"localhost"}, true, map[string]string{
			"198.51.100.7 10.20.0.11:30080": pass, "127.0.0.1 127.0.0.1:30080": served,
		}},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			cfg := config()
			cfg.NodePortAddresses, cfg.LocalhostNodePorts = tc.list, tc.localhost
			wantOutcomes(t, build(cfg, abc(false, false)...), tc.want)
		})
	}
}

func TestIPv6NodePortsNeverAnswerOnLoopback(t *testing.T) {
	cfg := config6()
	cfg.NodePortAddresses, cfg.LocalhostNodePorts = []string{"all"}, true
	svc := &model.Service{
		Name: name("shop/web"), Type: model.NodePort, ClusterIPs: ips("fd70::10"),
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30080}},
	}
	wantOutcomes(t, build(cfg, svc), map[string]string{
		"::1 [::1]:30080": "pass", "fd99::7 [fd20::11]:30080": "reject reason=NoEndpoints",
	})
}

func TestHostAddressesAreSortedPlainAndOfTheFamily(t *testing.T) {
	table, _ := forward.Build(config(), snapshot(), forward.Host{
		Addrs: append(ips("10.20.0.11", "::ffff:10.20.0.9", "fd20::11", "10.20.0.11", "127.0.0.1"), ips("fe80::1%eth0")[0].Next()),
	})
	if diff := cmp.Diff("host 10.20.0.9 10.20.0.11 127.0.0.1", trimLines(table.String())[2]); diff != "" {
		t.Errorf("host (-want +got):\n%s", diff)
	}
	v6, _ := forward.Build(config6(), snapshot(), forward.Host{Addrs: ips("fe80::1%eth0", "fd20::11")})
	if diff := cmp.Diff("host fd20::11 fe80::1", trimLines(v6.String())[2]); diff != "" {
		t.Errorf("host (-want +got):\n%s", diff)
	}
}

func TestB160TheContextFollowsTheNode(t *testing.T) {
	cfg := config()
	cfg.Detect, cfg.NodePortAddresses = forward.DetectNodeCIDR, []string{"primary"}
	h := forward.Host{Addrs: ips("127.0.0.1", "10.20.0.11", "10.20.0.99")}
	s, b := snapshot(append(abc(true, false), nodeNA())...), forward.NewBuilder(cfg)
	b.Update(s, model.Dirty{}, h)
	const pod, outside = "forward 10.60.1.11:8080 10.60.2.11:8080 snat=no", "forward 10.60.1.11:8080 snat=no"
	wantOutcomes(t, b.Table(), map[string]string{
		"10.60.1.21 192.0.2.10:80": pod, "10.60.9.21 192.0.2.10:80": outside, "198.51.100.7 10.20.0.99:30080": "pass",
	})
	moved := nodeNA()
	moved.PodCIDRs, moved.Addresses = cidrs("10.60.9.0/24"), ips("10.20.0.99")
	old := b.Table().Port(portName("shop/web/tcp"))
	var d model.Dirty
	s.Apply(model.Event{Node: moved}, &d)
	if got := b.Update(s, d, h); !got.Context || len(got.Ports) != 0 {
		t.Errorf("delta %v, want the context alone", got)
	}
	if b.Table().Port(portName("shop/web/tcp")) != old {
		t.Error("a port whose content did not change was replaced")
	}
	wantOutcomes(t, b.Table(), map[string]string{
		"10.60.1.21 192.0.2.10:80": outside, "10.60.9.21 192.0.2.10:80": pod, "198.51.100.7 10.20.0.99:30080": outside,
		"198.51.100.7 10.20.0.11:30080": "pass",
	})
	// The Node goes: pods can no longer be told, and the routes say so.
	d = model.Dirty{}
	s.Apply(model.Event{Node: moved, Delete: true}, &d)
	got := b.Update(s, d, h)
	if !got.Context || !slices.Equal(got.Ports, []forward.PortName{portName("shop/web/tcp")}) {
		t.Errorf("delta %v, want the context and shop/web/tcp", got)
	}
	wantOutcomes(t, b.Table(), map[string]string{"10.60.9.21 192.0.2.10:80": outside})
}
