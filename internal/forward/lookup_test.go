package forward_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

var cmpPrefix = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

func TestB062AClientThatReachesItselfIsMasqueraded(t *testing.T) {
	objects := abc(true, false)
	wantOutcomes(t, build(config(), objects...), map[string]string{
		"10.60.1.11 10.70.1.10:80":    "forward 10.60.1.11:8080(snat) 10.60.2.11:8080 snat=mixed",
		"10.60.1.11 10.20.0.11:30080": "forward 10.60.1.11:8080(snat) 10.60.2.11:8080 snat=mixed",
	})
	objects[1] = slice(readyOn("na", "10.60.1.11"))
	wantOutcomes(t, build(config(), objects...), map[string]string{
		"10.60.1.11 10.70.1.10:80": "forward 10.60.1.11:8080 snat=always",
	})
}

func TestB066ALoopbackSourceIsAlwaysMasqueraded(t *testing.T) {
	cfg := config()
	cfg.LocalhostNodePorts, cfg.ClusterCIDRs = true, nil
	table, err := forward.Parse(strings.NewReader(`
		context IPv4 node=na
		host 10.20.0.11
		node-ports all loopback
		port shop/web/tcp
		frontend node-port *:30080
		from any forward local snat=hairpin
		local 10.60.1.11:8080(local)`))
	if err != nil {
		t.Fatal(err)
	}
	wantOutcomes(t, table, map[string]string{
		"127.0.0.1 127.0.0.1:30080":     "forward 10.60.1.11:8080 snat=always",
		"198.51.100.7 10.20.0.11:30080": "forward 10.60.1.11:8080 snat=no",
	})
	wantOutcomes(t, build(cfg, abc(true, false)...), map[string]string{
		"127.0.0.1 127.0.0.1:30080":   "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always",
		"127.0.0.77 127.0.0.77:30080": "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always",
	})
}

func TestPodsAreToldByWhatTheDetectorLooksAt(t *testing.T) {
	const pod, outside = "forward 10.60.1.11:8080 10.60.2.11:8080 snat=no", "forward 10.60.1.11:8080 snat=no"
	const node = "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always"
	tests := map[string]struct {
		change func(*forward.Config)
		want   map[string]string
	}{
		"the cluster's prefix": {func(*forward.Config) {}, map[string]string{
			"10.60.3.9 192.0.2.10:80 eth0": pod, "198.51.100.7 192.0.2.10:80 cni0": outside,
		}},
		"the mode's name left empty": {func(c *forward.Config) { c.Detect = "" }, map[string]string{
			"10.60.3.9 192.0.2.10:80 eth0": pod,
		}},
		"B160 the node's prefix": {func(c *forward.Config) { c.Detect = forward.DetectNodeCIDR }, map[string]string{
			"10.60.1.9 192.0.2.10:80 cni0": pod, "10.60.3.9 192.0.2.10:80 eth0": outside,
		}},
		"a bridge": {func(c *forward.Config) {
			c.Detect, c.BridgeInterface = forward.DetectBridgeInterface, "cni0"
		}, map[string]string{
			"10.60.1.9 192.0.2.10:80 cni0": pod, "10.60.1.9 192.0.2.10:80 cni01": outside, "10.60.1.9 192.0.2.10:80": outside,
			"10.20.0.11 192.0.2.10:80": node,
		}},
		"the start of interfaces' names": {func(c *forward.Config) {
			c.Detect, c.InterfaceNamePrefix = forward.DetectInterfaceNamePrefix, "veth"
		}, map[string]string{
			"10.60.1.9 192.0.2.10:80 veth3f": pod, "10.60.1.9 192.0.2.10:80 eth0": outside, "10.60.1.9 192.0.2.10:80": outside,
		}},
		"a mode that nobody knows": {func(c *forward.Config) { c.Detect = "Magic" }, map[string]string{
			"10.60.1.9 192.0.2.10:80 cni0": outside,
		}},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			cfg := config()
			tc.change(&cfg)
			wantOutcomes(t, build(cfg, append(abc(true, false), nodeNA())...), tc.want)
		})
	}
}

func TestPacketsThatAreForNoService(t *testing.T) {
	wantOutcomes(t, build(config(), abc(false, false)...), map[string]string{
		"198.51.100.7 192.0.2.10:81":         "pass",
		"198.51.100.7 192.0.2.11:80":         "pass",
		"198.51.100.7 192.0.2.10:80/udp":     "pass",
		"198.51.100.7 10.20.0.11:30081":      "pass",
		"198.51.100.7 10.20.0.11:30080/sctp": "pass",
		"fd99::7 [fd70::10]:80":              "pass",
	})
	wantOutcomes(t, build(config(), abc(false, false)...), map[string]string{
		"::ffff:198.51.100.7 [::ffff:192.0.2.10]:80": "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always",
	})
	if got := forward.Lookup(build(config()), forward.Packet{}); got.Do != forward.Pass {
		t.Errorf("a packet without addresses gives %v, want pass", got)
	}
}

func TestB159ANodePortDoesNotAnswerOnAnotherServicesAddress(t *testing.T) {
	wantOutcomes(t, build(config(), abc(false, false)...), map[string]string{"198.51.100.7 192.0.2.10:30080": "pass"})
}

func TestB147TheExactAddressWinsOverTheNodePortAndGivesItBack(t *testing.T) {
	lb := &model.Service{
		Name: name("shop/lb"), Type: model.LoadBalancer, ClusterIPs: ips("10.70.1.20"), Ingress: ips("10.20.0.11"),
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 30080}},
	}
	s, b := snapshot(append(abc(false, false), lb)...), forward.NewBuilder(config())
	b.Update(s, model.Dirty{}, host())
	wantOutcomes(t, b.Table(), map[string]string{
		"198.51.100.7 10.20.0.11:30080": "reject reason=NoEndpoints",
	})
	var d model.Dirty
	s.Apply(model.Event{Service: lb, Delete: true}, &d)
	b.Update(s, d, host())
	wantOutcomes(t, b.Table(), map[string]string{
		"198.51.100.7 10.20.0.11:30080": "forward 10.60.1.11:8080 10.60.2.11:8080 snat=always",
	})
}

func TestB145ProtocolsAreIndependentInAllFrontends(t *testing.T) {
	svc := &model.Service{
		Name: name("shop/dns"), Type: model.LoadBalancer, ClusterIPs: ips("10.70.1.53"), Ingress: ips("192.0.2.53"),
		Ports: []model.ServicePort{
			{Name: "dns", Protocol: model.UDP, Port: 53, NodePort: 30065}, {Name: "dns", Protocol: model.TCP, Port: 53, NodePort: 30065},
		},
	}
	part := slice(readyOn("nb", "10.60.2.11"))
	part.Service = "dns"
	part.Ports = []model.SlicePort{
		{Name: "dns", Protocol: model.UDP, Port: 5353}, {Name: "dns", Protocol: model.TCP, Port: 5354},
	}
	const udp, tcp = "forward 10.60.2.11:5353 snat=always", "forward 10.60.2.11:5354 snat=always"
	table, found := forward.Build(config(), snapshot(svc, part), host())
	wantFindings(t, found)
	wantOutcomes(t, table, map[string]string{
		"198.51.100.7 10.70.1.53:53/udp": udp, "198.51.100.7 192.0.2.53:53/udp": udp, "198.51.100.7 10.20.0.11:30065/udp": udp,
		"198.51.100.7 10.70.1.53:53/tcp": tcp, "198.51.100.7 192.0.2.53:53/tcp": tcp, "198.51.100.7 10.20.0.11:30065/tcp": tcp,
	})
	onlyTCP := *svc
	onlyTCP.Ports = svc.Ports[1:]
	table = build(config(), &onlyTCP, part)
	wantOutcomes(t, table, map[string]string{
		"198.51.100.7 10.70.1.53:53/udp": "pass", "198.51.100.7 10.20.0.11:30065/udp": "pass",
		"198.51.100.7 10.70.1.53:53/tcp": tcp, "198.51.100.7 10.20.0.11:30065/tcp": tcp,
	})
}

func TestOutcomeNamesWhoDecided(t *testing.T) {
	got := forward.Lookup(build(config(), abc(true, false)...), packet("10.60.1.21 192.0.2.10:80"))
	if got.Port != portName("shop/web/tcp") || got.Frontend.Kind != forward.LoadBalancer || got.From != forward.Pod {
		t.Errorf("decided by %s, %s, from %s; want shop/web/tcp, load-balancer, from pod", got.Port, got.Frontend.Kind, got.From)
	}
}

func TestAFrontendWithoutAFittingRouteDrops(t *testing.T) {
	table, err := forward.Parse(strings.NewReader(`
		context IPv4
		port shop/web/tcp
		frontend cluster-ip 10.70.1.10:80
		from node reject reason=NoEndpoints`))
	if err != nil {
		t.Fatal(err)
	}
	wantOutcomes(t, table, map[string]string{"198.51.100.7 10.70.1.10:80": "drop"})
}

func TestAllows(t *testing.T) {
	tests := map[string]struct {
		want, got string
		allowed   bool
	}{
		"the same":                      {"forward 10.60.1.11:80 snat=no", "forward 10.60.1.11:80 snat=no", true},
		"one of several":                {"forward 10.60.1.11:80 10.60.2.11:80 snat=no", "forward 10.60.2.11:80 snat=no", true},
		"one with its own SNAT":         {"forward 10.60.1.11:80(snat) 10.60.2.11:80 snat=mixed", "forward 10.60.1.11:80 snat=always", true},
		"another endpoint":              {"forward 10.60.1.11:80 snat=no", "forward 10.60.2.11:80 snat=no", false},
		"one too many":                  {"forward 10.60.1.11:80 snat=no", "forward 10.60.1.11:80 10.60.2.11:80 snat=no", false},
		"other SNAT":                    {"forward 10.60.1.11:80 snat=no", "forward 10.60.1.11:80 snat=always", false},
		"no reason known":               {"drop reason=NoLocalEndpoints", "drop", true},
		"another reason":                {"drop reason=NoLocalEndpoints", "drop reason=SourceNotAllowed", false},
		"a reason where none is wanted": {"drop", "drop reason=SourceNotAllowed", false},
		"another verdict":               {"drop reason=NoLocalEndpoints", "reject", false},
		"pass":                          {"pass", "pass", true},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			if got := outcome(t, tc.want).Allows(outcome(t, tc.got)); got != tc.allowed {
				t.Errorf("%q allows %q: %v, want %v", tc.want, tc.got, got, tc.allowed)
			}
		})
	}
	if outcome(t, "forward 10.60.1.11:80 snat=no").Allows(forward.Outcome{Do: forward.Forward}) {
		t.Error("forwarding to nowhere is allowed")
	}
}

func outcome(t *testing.T, s string) forward.Outcome {
	t.Helper()
	o, err := forward.ParseOutcome(s)
	if err != nil {
		t.Fatal(err)
	}
	if o.String() != s {
		t.Fatalf("%q reads back as %q", s, o)
	}
	return o
}

func TestParseOutcomeRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                                      "outcome is empty; it starts with pass, forward, reject or drop",
		"fly":                                   `outcome "fly": verdict "fly" is not one of pass, forward, reject, drop`,
		"drop reason=Rain":                      `outcome "drop reason=Rain": reason "Rain" is not one of NoEndpoints, NoLocalEndpoints, SourceNotAllowed`,
		"forward 10.0.0.1:80 snat=maybe":        `outcome "forward 10.0.0.1:80 snat=maybe": snat "maybe" is not no, always or mixed`,
		"forward 10.0.0.1":                      `outcome "forward 10.0.0.1": endpoint "10.0.0.1" is not address:port`,
		"forward snat=no":                       `outcome "forward snat=no": forward, and nothing else, goes with endpoints`,
		"drop 10.0.0.1:80":                      `outcome "drop 10.0.0.1:80": forward, and nothing else, goes with endpoints`,
		"drop snat=no":                          `outcome "drop snat=no": snat=no does not fit its endpoints`,
		"forward 10.0.0.1:80 snat=mixed":        `outcome "forward 10.0.0.1:80 snat=mixed": snat=mixed does not fit its endpoints`,
		"forward 10.0.0.1:80(snat) snat=always": "",
	} {
		_, err := forward.ParseOutcome(text)
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: error %q, want %q", text, got, want)
		}
	}
}

func TestWordsOfValuesOutsideTheLists(t *testing.T) {
	got := []string{
		forward.Kind(9).String(), forward.SourceClass(9).String(), forward.Verdict(9).String(), forward.Pool(9).String(),
		forward.SNAT(9).String(), forward.Reason(9).String(), forward.NoReason.String(),
	}
	want := []string{"unknown-kind", "unknown-source", "unknown-verdict", "no-pool", "no-snat", "unknown-reason", "none"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("words (-want +got):\n%s", diff)
	}
}
