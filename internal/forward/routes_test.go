package forward_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// abc gives a Service with a cluster IP, a node port and a load balancer address, and its slice with one endpoint here
// and one elsewhere.
func abc(externalLocal, internalLocal bool) []any {
	return []any{
		&model.Service{
			Name: name("shop/web"), Type: model.LoadBalancer, ClusterIPs: ips("10.70.1.10"),
			Ports:   []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30080}},
			Ingress: ips("192.0.2.10"), ExternalLocal: externalLocal, InternalLocal: internalLocal,
		},
		slice(readyOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11")),
	}
}

// TestWhoGetsWhichEndpointsAndIsMasqueraded is the matrix of upstream's TestInternalExternalMasquerade.
func TestWhoGetsWhichEndpointsAndIsMasqueraded(t *testing.T) {
	const (
		all, allMasq     = "forward 10.60.1.11:8080 10.60.2.11:8080 snat=no", "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always"
		local, localMasq = "forward 10.60.1.11:8080 snat=no", "forward 10.60.1.11:8080 snat=always"
	)
	flows := []string{
		"10.60.1.21 10.70.1.10:80", "10.60.1.21 10.20.0.11:30080", "10.60.1.21 192.0.2.10:80", // pod
		"10.20.0.11 10.70.1.10:80", "10.20.0.11 10.20.0.11:30080", "10.20.0.11 192.0.2.10:80", // node
		"127.0.0.1 127.0.0.1:30080",                                                                 // localhost
		"198.51.100.7 10.70.1.10:80", "198.51.100.7 10.20.0.11:30080", "198.51.100.7 192.0.2.10:80", // outside
	}
	tests := map[string]struct {
		externalLocal, internalLocal bool
		change                       func(*forward.Config)
		want                         []string
	}{
		"A: both policies Cluster": {false, false, nil, []string{
			all, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq,
		}},
		"B: externalTrafficPolicy Local": {true, false, nil, []string{
			all, all, all, allMasq, allMasq, allMasq, allMasq, allMasq, local, local,
		}},
		"C: internalTrafficPolicy Local": {false, true, nil, []string{
			local, allMasq, allMasq, localMasq, allMasq, allMasq, allMasq, localMasq, allMasq, allMasq,
		}},
		"both policies Local": {true, true, nil, []string{
			local, all, all, localMasq, allMasq, allMasq, allMasq, localMasq, local, local,
		}},
		"A without a detector: a cluster IP masquerades nobody": {
			false, false, func(c *forward.Config) { c.ClusterCIDRs = nil },
			[]string{all, allMasq, allMasq, all, allMasq, allMasq, allMasq, all, allMasq, allMasq},
		},
		"B without a detector: pods are like outside clients": {
			true, false, func(c *forward.Config) { c.ClusterCIDRs = nil },
			[]string{all, local, local, all, allMasq, allMasq, allMasq, all, local, local},
		},
		"A with masqueradeAll: pods are masqueraded at the cluster IP, too": {
			false, false, func(c *forward.Config) { c.MasqueradeAll = true },
			[]string{allMasq, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq, allMasq},
		},
		"B with masqueradeAll: only the cluster IP changes": {
			true, false, func(c *forward.Config) { c.MasqueradeAll = true },
			[]string{allMasq, all, all, allMasq, allMasq, allMasq, allMasq, allMasq, local, local},
		},
		"C with masqueradeAll": {
			false, true, func(c *forward.Config) { c.MasqueradeAll = true },
			[]string{localMasq, allMasq, allMasq, localMasq, allMasq, allMasq, allMasq, localMasq, allMasq, allMasq},
		},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			cfg := config()
			cfg.LocalhostNodePorts = true
			if tc.change != nil {
				tc.change(&cfg)
			}
			want := map[string]string{}
			for i, flow := range flows {
				want[flow] = tc.want[i]
			}
			wantOutcomes(t, build(cfg, abc(tc.externalLocal, tc.internalLocal)...), want)
		})
	}
}

func TestIPv6IsTreatedAlike(t *testing.T) {
	svc := &model.Service{
		Name: name("shop/web"), Type: model.LoadBalancer, ClusterIPs: ips("10.70.1.10", "fd70::10"),
		Ports:   []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30080}},
		Ingress: ips("192.0.2.10", "fd88::10"), ExternalLocal: true, SourceRanges: cidrs("198.51.100.0/24", "fd99::/64"),
	}
	part := slice(readyOn("na", "fd60:1::11"), readyOn("nb", "fd60:2::11"))
	part.Family = model.IPv6
	wantOutcomes(t, build(config6(), svc, part), map[string]string{
		"fd60:1::21 [fd70::10]:80":      "forward [fd60:1::11]:8080 [fd60:2::11]:8080 snat=no",
		"fd60:1::11 [fd70::10]:80":      "forward [fd60:1::11]:8080(snat) [fd60:2::11]:8080 snat=mixed",
		"fd20::11 [fd70::10]:80":        "forward [fd60:1::11]:8080 [fd60:2::11]:8080 snat=always",
		"fd99::7 [fd20::11]:30080":      "forward [fd60:1::11]:8080 snat=no",
		"fd99::7 [fd88::10]:80":         "forward [fd60:1::11]:8080 snat=no",
		"fd98::7 [fd88::10]:80":         "drop reason=SourceNotAllowed",
		"fd60:1::21 [fd88::10]:80":      "drop reason=SourceNotAllowed",
		"198.51.100.7 10.70.1.10:80":    "pass",
		"198.51.100.7 10.20.0.11:30080": "pass",
	})
}

func TestWithoutUsableEndpointsForThePolicy(t *testing.T) {
	const (
		reject, drop = "reject reason=NoEndpoints", "drop reason=NoLocalEndpoints"
		remote       = "forward 10.60.2.11:8080 snat=no"
		remoteMasq   = "forward 10.60.2.11:8080 snat=always"
	)
	elsewhere := slice(readyOn("nb", "10.60.2.11"))
	tests := map[string]struct {
		externalLocal, internalLocal bool
		slice                        *model.EndpointSlice
		want                         map[string]string
	}{
		"B152 no endpoints at all: everyone is refused at once": {false, false, slice(), map[string]string{
			"10.60.1.21 10.70.1.10:80": reject, "10.20.0.11 10.70.1.10:80": reject, "198.51.100.7 10.70.1.10:80": reject,
			"10.60.1.21 192.0.2.10:80": reject, "10.20.0.11 192.0.2.10:80": reject, "198.51.100.7 192.0.2.10:80": reject,
			"10.60.1.21 10.20.0.11:30080": reject, "198.51.100.7 10.20.0.11:30080": reject,
		}},
		"B152 no endpoints and policies Local: refused as well": {true, true, slice(notReadyOn("na", "10.60.1.11")), map[string]string{
			"10.60.1.21 10.70.1.10:80": reject, "198.51.100.7 192.0.2.10:80": reject, "198.51.100.7 10.20.0.11:30080": reject,
		}},
		"B108 B107 externalTrafficPolicy Local, endpoints elsewhere only: outside clients are dropped, pods and the node served": {
			true, false, elsewhere, map[string]string{
				"10.60.1.21 192.0.2.10:80": remote, "10.20.0.11 192.0.2.10:80": remoteMasq, "198.51.100.7 192.0.2.10:80": drop,
				"10.60.1.21 10.20.0.11:30080": remote, "198.51.100.7 10.20.0.11:30080": drop,
				"10.60.1.21 10.70.1.10:80": remote, "198.51.100.7 10.70.1.10:80": remoteMasq,
			},
		},
		"B112 internalTrafficPolicy Local, endpoints elsewhere only: the cluster IP drops, the rest serves": {
			false, true, elsewhere, map[string]string{
				"10.60.1.21 10.70.1.10:80": drop, "10.20.0.11 10.70.1.10:80": drop, "198.51.100.7 192.0.2.10:80": remoteMasq,
			},
		},
		"both Local, endpoints elsewhere only": {true, true, elsewhere, map[string]string{
			"10.60.1.21 10.70.1.10:80": drop, "198.51.100.7 192.0.2.10:80": drop, "10.60.1.21 192.0.2.10:80": remote,
		}},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			objects := abc(tc.externalLocal, tc.internalLocal)
			objects[1] = tc.slice
			wantOutcomes(t, build(config(), objects...), tc.want)
		})
	}
}

func TestB112ClusterIPOnlyWithInternalLocal(t *testing.T) {
	svc := &model.Service{
		Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: tcp80(), InternalLocal: true,
	}
	wantPort(t, build(config(), svc, slice(readyOn("nb", "10.60.2.11"))), "shop/web/tcp", `
		port shop/web/tcp
		frontend cluster-ip 10.70.1.10:80
		from any drop reason=NoLocalEndpoints
		serving 10.60.2.11:8080`)
	wantPort(t, build(config(), svc, slice(readyOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11"))), "shop/web/tcp", `
		port shop/web/tcp
		frontend cluster-ip 10.70.1.10:80
		from pod forward local snat=hairpin
		from any forward local snat=always
		local 10.60.1.11:8080(local)
		serving 10.60.1.11:8080 10.60.2.11:8080`)
	wantPort(t, build(config(), svc, slice(terminatingOn("nb", "10.60.2.11"))), "shop/web/tcp", `
		port shop/web/tcp
		frontend cluster-ip 10.70.1.10:80
		from any drop reason=NoLocalEndpoints
		serving 10.60.2.11:8080`)
	wantPort(t, build(config(), svc), "shop/web/tcp", `
		port shop/web/tcp
		frontend cluster-ip 10.70.1.10:80
		from any reject reason=NoEndpoints`)
}

func TestExternalPolicyLocalCountsOnlyForTypesThatHaveIt(t *testing.T) {
	const clusterPolicy, localPolicy = "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always", "forward 10.60.1.11:8080 snat=no"
	tests := map[string]struct {
		change func(*model.Service)
		packet string
		want   string
	}{
		"B107 node port": {
			func(s *model.Service) { s.Type = model.NodePort }, "198.51.100.7 10.20.0.11:30080", localPolicy,
		},
		"B110 cluster IP with external IPs": {
			func(s *model.Service) { s.Type, s.ExternalIPs = model.ClusterIP, ips("203.0.113.9") },
			"198.51.100.7 203.0.113.9:80", localPolicy,
		},
		"cluster IP with a left-over node port and load balancer address": {
			func(s *model.Service) { s.Type = model.ClusterIP }, "198.51.100.7 192.0.2.10:80", clusterPolicy,
		},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			objects := abc(true, false)
			tc.change(objects[0].(*model.Service))
			wantOutcomes(t, build(config(), objects...), map[string]string{tc.packet: tc.want})
		})
	}
}

func TestLoadBalancerSourceRanges(t *testing.T) {
	tests := map[string]struct {
		ranges   []string
		bad      int
		want     string // the allow line, empty for none
		findings []string
	}{
		"no list admits everyone": {nil, 0, "", nil},
		"a list is sorted, without host bits and duplicates": {
			[]string{"198.51.100.0/24", "172.16.5.1/12", "198.51.100.9/24"}, 0, "allow 172.16.0.0/12 198.51.100.0/24", nil,
		},
		"a range over every address admits everyone":  {[]string{"198.51.100.0/24", "0.0.0.0/0"}, 0, "", nil},
		"other family's ranges are left out":          {[]string{"198.51.100.0/24", "fd99::/64"}, 0, "allow 198.51.100.0/24", nil},
		"bad entries beside good ones change nothing": {[]string{"198.51.100.0/24"}, 2, "allow 198.51.100.0/24", nil},
		"a list that cannot be read admits nobody": {
			nil, 2, "allow none", []string{"Service shop/web: NoSourceAllowed"},
		},
		"a list for the other family only admits nobody": {
			[]string{"fd99::/64"}, 0, "allow none", []string{"Service shop/web: NoSourceAllowed"},
		},
		"a list that admits everyone of the other family admits everyone": {[]string{"fd99::/64", "::/0"}, 0, "", nil},
		"a list with this node's address admits the VIP, which the node may have as its source": {
			[]string{"10.20.0.0/24"}, 0, "allow 10.20.0.0/24 192.0.2.10/32", nil,
		},
		"unless the VIP is admitted anyway":         {[]string{"10.20.0.0/24", "192.0.2.0/24"}, 0, "allow 10.20.0.0/24 192.0.2.0/24", nil},
		"loopback is no address of this node here":  {[]string{"127.0.0.0/8"}, 0, "allow 127.0.0.0/8", nil},
		"an IPv4 range in IPv6 notation is IPv4":    {[]string{"::ffff:198.51.100.0/120"}, 0, "allow 198.51.100.0/24", nil},
		"an IPv6 range that only looks like IPv4's": {[]string{"::ffff:0:0/90", "198.51.100.0/24"}, 0, "allow 198.51.100.0/24", nil},
		"everyone of the other family beside a range of this one": {
			[]string{"::/0", "198.51.100.0/24"}, 0, "allow 198.51.100.0/24", nil,
		},
		"an open range of the other family is enough": {[]string{"::/0"}, 3, "", nil},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			objects := abc(false, false)
			svc := objects[0].(*model.Service)
			svc.SourceRanges, svc.BadSourceRanges, svc.ExternalIPs = cidrs(tc.ranges...), tc.bad, ips("203.0.113.9")
			table, found := forward.Build(config(), snapshot(objects...), host())
			wantFindings(t, found, tc.findings...)
			want := `port shop/web/tcp
				frontend cluster-ip 10.70.1.10:80
				from pod forward cluster snat=hairpin
				from any forward cluster snat=always
				frontend external-ip 203.0.113.9:80
				from any forward cluster snat=always
				frontend load-balancer 192.0.2.10:80
				` + tc.want + `
				from any forward cluster snat=always
				frontend node-port *:30080
				from any forward cluster snat=always
				cluster 10.60.1.11:8080(local) 10.60.2.11:8080`
			wantPort(t, table, "shop/web/tcp", want)
		})
	}
}

func TestB053SourceRangesHoldForPodsAndTheNodeToo(t *testing.T) {
	objects := abc(true, false)
	objects[0].(*model.Service).SourceRanges = cidrs("198.51.100.0/24", "fd99::/64")
	wantOutcomes(t, build(config(), objects...), map[string]string{
		"198.51.100.7 192.0.2.10:80":    "forward 10.60.1.11:8080 snat=no",
		"203.0.113.1 192.0.2.10:80":     "drop reason=SourceNotAllowed",
		"10.60.1.21 192.0.2.10:80":      "drop reason=SourceNotAllowed",
		"10.20.0.11 192.0.2.10:80":      "drop reason=SourceNotAllowed",
		"10.20.0.11 10.70.1.10:80":      "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always",
		"203.0.113.1 10.20.0.11:30080":  "forward 10.60.1.11:8080 snat=no",
		"198.51.100.7 10.20.0.11:30080": "forward 10.60.1.11:8080 snat=no",
	})
	objects[1] = slice()
	wantOutcomes(t, build(config(), objects...), map[string]string{
		"203.0.113.1 192.0.2.10:80": "reject reason=NoEndpoints",
	})
	objects[1] = slice(readyOn("nb", "10.60.2.11"))
	wantOutcomes(t, build(config(), objects...), map[string]string{
		"203.0.113.1 192.0.2.10:80":  "drop reason=SourceNotAllowed",
		"198.51.100.7 192.0.2.10:80": "drop reason=NoLocalEndpoints",
	})
}

func TestB073SourceRangesWithoutANodeOrHostAddresses(t *testing.T) {
	objects := abc(true, false)
	objects[0].(*model.Service).SourceRanges = cidrs("10.20.0.0/24")
	s := snapshot(objects...)
	b := forward.NewBuilder(config())
	b.Update(s, model.Dirty{}, forward.Host{})
	if diff := cmp.Diff(cidrs("10.20.0.0/24"), b.Table().Port(portName("shop/web/tcp")).Frontends[1].Allow, cmpPrefix); diff != "" {
		t.Errorf("allowed before the addresses are known (-want +got):\n%s", diff)
	}
	// The node's addresses appear: nothing is dirty, and yet the VIP joins the list.
	d := b.Update(s, model.Dirty{}, host())
	if diff := cmp.Diff(cidrs("10.20.0.0/24", "192.0.2.10/32"), b.Table().Port(portName("shop/web/tcp")).Frontends[1].Allow, cmpPrefix); diff != "" {
		t.Errorf("allowed after it (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(forward.Delta{Ports: []forward.PortName{portName("shop/web/tcp")}, Context: true}, d); diff != "" {
		t.Errorf("delta (-want +got):\n%s", diff)
	}
}

func TestWhichServicesAreServed(t *testing.T) {
	const nothing = ""
	tests := map[string]struct {
		svc      *model.Service
		want     string
		findings []string
	}{
		"B155 ExternalName, even with a cluster IP": {
			&model.Service{Name: name("shop/web"), Type: model.ExternalName, ClusterIPs: ips("10.70.1.10"), Ports: tcp80()}, nothing, nil,
		},
		"B155 headless": {&model.Service{Name: name("shop/web"), Headless: true, Ports: tcp80()}, nothing, nil},
		"B156 headless with external IPs": {
			&model.Service{Name: name("shop/web"), Headless: true, Ports: tcp80(), ExternalIPs: ips("203.0.113.9")},
			nothing,
			[]string{"Service shop/web: HeadlessExternalIPs"},
		},
		"headless with external IPs of the other family": {
			&model.Service{Name: name("shop/web"), Headless: true, Ports: tcp80(), ExternalIPs: ips("fd77::9")}, nothing, nil,
		},
		"without a cluster IP": {
			&model.Service{Name: name("shop/web"), Type: model.LoadBalancer, Ports: tcp80(), Ingress: ips("192.0.2.10")}, nothing, nil,
		},
		"B166 with a cluster IP of the other family only": {
			&model.Service{
				Name: name("shop/web"), Type: model.NodePort, ClusterIPs: ips("fd70::10"),
				Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30080}},
			}, nothing, nil,
		},
		"without ports": {&model.Service{Name: name("shop/web"), ClusterIPs: ips("10.70.1.10")}, nothing, nil},
		"B070 addresses of another family are skipped and reported": {
			&model.Service{
				Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: tcp80(),
				ExternalIPs: ips("fd77::9", "203.0.113.9"), Ingress: ips("fd88::9"),
			},
			`port shop/web/tcp
			frontend cluster-ip 10.70.1.10:80
			from any reject reason=NoEndpoints
			frontend external-ip 203.0.113.9:80
			from any reject reason=NoEndpoints`,
			[]string{"Service shop/web: WrongFamilyAddress"},
		},
		"dual stack: each family has its part": {
			&model.Service{
				Name: name("shop/web"), ClusterIPs: ips("fd70::10", "10.70.1.10"), Ports: tcp80(),
				ExternalIPs: ips("fd77::9", "203.0.113.9"),
			},
			`port shop/web/tcp
			frontend cluster-ip 10.70.1.10:80
			from any reject reason=NoEndpoints
			frontend external-ip 203.0.113.9:80
			from any reject reason=NoEndpoints`, nil,
		},
		"node port and ingress count whatever the type": {
			&model.Service{
				Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ingress: ips("192.0.2.10"),
				Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30080}}, Affinity: 3 * hour,
				HealthCheckNodePort: 31999, ExternalLocal: true,
			},
			`port shop/web/tcp affinity=3h0m0s
			frontend cluster-ip 10.70.1.10:80
			from any reject reason=NoEndpoints
			frontend load-balancer 192.0.2.10:80
			from any reject reason=NoEndpoints
			frontend node-port *:30080
			from any reject reason=NoEndpoints`, nil,
		},
		"addresses that every machine has are refused": {
			&model.Service{
				Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: tcp80(), ExternalIPs: ips("127.0.0.1", "0.0.0.0"),
				Ingress: ips("224.0.0.5"),
			},
			`port shop/web/tcp
			frontend cluster-ip 10.70.1.10:80
			from any reject reason=NoEndpoints`,
			[]string{"Service shop/web: UnusableAddress"},
		},
		"a port listed twice": {
			&model.Service{Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: []model.ServicePort{
				{Protocol: model.TCP, Port: 80}, {Protocol: model.TCP, Port: 81},
			}},
			`port shop/web/tcp
			frontend cluster-ip 10.70.1.10:80
			from any reject reason=NoEndpoints`,
			[]string{"Service shop/web: DuplicatePort"},
		},
		"an address twice is one frontend, the first": {
			&model.Service{
				Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: tcp80(),
				ExternalIPs: ips("192.0.2.10", "203.0.113.9", "203.0.113.9"), Ingress: ips("192.0.2.10", "192.0.2.10"),
			},
			`port shop/web/tcp
			frontend cluster-ip 10.70.1.10:80
			from any reject reason=NoEndpoints
			frontend external-ip 192.0.2.10:80
			from any reject reason=NoEndpoints
			frontend external-ip 203.0.113.9:80
			from any reject reason=NoEndpoints`, nil,
		},
		"an address twice, with and without a filter, is filtered": {
			&model.Service{
				Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: tcp80(), SourceRanges: cidrs("198.51.100.0/24"),
				ExternalIPs: ips("192.0.2.10", "203.0.113.9"), Ingress: ips("192.0.2.10"),
			},
			`port shop/web/tcp
			frontend cluster-ip 10.70.1.10:80
			from any reject reason=NoEndpoints
			frontend external-ip 203.0.113.9:80
			from any reject reason=NoEndpoints
			frontend load-balancer 192.0.2.10:80
			allow 198.51.100.0/24
			from any reject reason=NoEndpoints`, nil,
		},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			table, found := forward.Build(config(), snapshot(tc.svc), host())
			wantFindings(t, found, tc.findings...)
			wantPort(t, table, "shop/web/tcp", tc.want)
			if tc.want == nothing && table.Len() != 0 {
				t.Errorf("table has %d ports, want none", table.Len())
			}
		})
	}
}

func TestB155AServiceThatChangesItsTypeIsServedAndForgotten(t *testing.T) {
	s, b := snapshot(slice(readyOn("nb", "10.60.2.11"))), forward.NewBuilder(config())
	external := &model.Service{Name: name("shop/web"), Type: model.ExternalName, Ports: tcp80()}
	plain := &model.Service{Name: name("shop/web"), ClusterIPs: ips("10.70.1.60"), Ports: tcp80()}
	headless := &model.Service{Name: name("shop/web"), Headless: true, Ports: tcp80()}
	for _, svc := range []*model.Service{external, plain, headless, plain, external} {
		var d model.Dirty
		s.Apply(model.Event{Service: svc}, &d)
		b.Update(s, d, host())
		want := "pass"
		if svc == plain {
			want = "forward 10.60.2.11:8080 snat=no"
		}
		wantOutcomes(t, b.Table(), map[string]string{"10.60.1.21 10.70.1.60:80": want})
	}
}

func TestIgnoredExternalIPsStillCountAsAccessFromOutside(t *testing.T) {
	cfg := config()
	cfg.IgnoreExternalIPs = true
	svc := &model.Service{
		Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: tcp80(), ExternalIPs: ips("203.0.113.9"), InternalLocal: true,
	}
	wantPort(t, build(cfg, svc, slice(readyOn("nb", "10.60.2.11"))), "shop/web/tcp", `
		port shop/web/tcp
		frontend cluster-ip 10.70.1.10:80
		from any drop reason=NoLocalEndpoints
		serving 10.60.2.11:8080`)
}

func TestHealthCheckNodePortNeedsALoadBalancerWithPolicyLocal(t *testing.T) {
	for what, tc := range map[string]struct {
		typ   model.ServiceType
		local bool
		want  uint16
	}{
		"load balancer, Local":   {model.LoadBalancer, true, 31999},
		"load balancer, Cluster": {model.LoadBalancer, false, 0},
		"node port, Local":       {model.NodePort, true, 0},
	} {
		t.Run(what, func(t *testing.T) {
			svc := &model.Service{
				Name: name("shop/web"), Type: tc.typ, ClusterIPs: ips("10.70.1.10"), Ports: tcp80(),
				ExternalLocal: tc.local, HealthCheckNodePort: 31999,
			}
			if got := build(config(), svc).Port(portName("shop/web/tcp")).HealthCheckNodePort; got != tc.want {
				t.Errorf("health check port %d, want %d", got, tc.want)
			}
		})
	}
}

func TestB124B125AffinityIsTheSameForBothPoolsAndBelongsToThePort(t *testing.T) {
	objects := abc(true, false)
	svc := objects[0].(*model.Service)
	svc.Affinity = 3 * hour
	svc.Ports = append(svc.Ports, model.ServicePort{Name: "adm", Protocol: model.TCP, Port: 81})
	table := build(config(), objects...)
	for _, n := range table.Names() {
		if got := table.Port(n).Affinity; got != 3*hour {
			t.Errorf("affinity of %s is %v, want 3h", n, got)
		}
	}
	if table.Len() != 2 {
		t.Errorf("%d ports, want 2", table.Len())
	}
}
