package answer

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
)

func packet(t *testing.T, src, dst, in string) forward.Packet {
	t.Helper()
	p, err := ParsePacket(src, dst, in)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestATableExplainsWhatItDoesWithAPacket(t *testing.T) {
	a := Choice{Endpoint: "10.60.1.11:8080", Share: 0.5, Local: true}
	b := Choice{Endpoint: "10.60.2.11:8080", Share: 0.5}
	masked := func(c Choice, share float64) Choice { c.SNAT, c.Share = true, share; return c }
	tests := map[string]struct {
		src, dst, in string
		want         Trace
	}{
		"of a pod to a cluster IP": {"10.60.1.5", "10.70.0.10:80", "veth1", Trace{
			Verdict: "forward", Service: "shop/web:http", Kind: "cluster-ip", Frontend: "10.70.0.10:80", Client: "pod",
			Policy: "Cluster", AffinitySeconds: 10800, Choices: []Choice{a, b},
			Explanation: "the connection goes to one of 2 endpoints, each as likely as the others, " +
				"which sees the client's own address",
		}},
		"of an endpoint that may get itself": {"10.60.1.11", "10.70.0.10:80", "veth1", Trace{
			Verdict: "forward", Service: "shop/web:http", Kind: "cluster-ip", Frontend: "10.70.0.10:80", Client: "pod",
			Policy: "Cluster", AffinitySeconds: 10800, Choices: []Choice{masked(a, 0.5), b},
			Explanation: "the connection goes to one of 2 endpoints, each as likely as the others, " +
				"which sees the client's own address, unless it is the client itself",
		}},
		"of an outside client under policy Local": {"198.51.100.7:99", "203.0.113.10:80", "eth0", Trace{
			Verdict: "forward", Service: "shop/web:http", Kind: "load-balancer", Frontend: "203.0.113.10:80", Client: "any",
			Policy: "Local", AffinitySeconds: 10800, Filtered: true, Allow: []string{"198.51.100.0/24"},
			Choices:     []Choice{{Endpoint: "10.60.1.11:8080", Share: 1, Local: true}},
			Explanation: "the connection goes to 10.60.1.11:8080, which sees the client's own address",
		}},
		"of the node to a node port": {"10.20.0.11", "10.20.0.11:30081", "", Trace{
			Verdict: "forward", Service: "shop/far:http", Kind: "node-port", Frontend: "*:30081", Client: "node",
			Policy: "Cluster", Choices: []Choice{masked(b, 1)},
			Explanation: "the connection goes to 10.60.2.11:8080, which sees this node's address as the client",
		}},
		"without endpoint on this node": {"8.8.8.8", "10.20.0.11:30081", "eth0", Trace{
			Verdict: "drop", Reason: "NoLocalEndpoints", Service: "shop/far:http", Kind: "node-port", Frontend: "*:30081",
			Client: "any", Explanation: "shop/far:http has usable endpoints, but none on this node, and its traffic " +
				"policy is Local: the packet is dropped and the client waits until it gives up",
		}},
		"without any endpoint": {"8.8.8.8", "10.70.0.11:53/udp", "eth0", Trace{
			Verdict: "reject", Reason: "NoEndpoints", Service: "shop/empty", Kind: "cluster-ip", Frontend: "10.70.0.11:53",
			Client:      "any",
			Explanation: "shop/empty has no usable endpoint anywhere in the cluster: the client is refused at once",
		}},
		"from a source that may not": {"8.8.8.8", "203.0.113.10:80", "eth0", Trace{
			Verdict: "drop", Reason: "SourceNotAllowed", Service: "shop/web:http", Kind: "load-balancer",
			Frontend: "203.0.113.10:80", AffinitySeconds: 10800, Filtered: true, Allow: []string{"198.51.100.0/24"},
			Explanation: "8.8.8.8 is not in the source ranges of shop/web:http (198.51.100.0/24): the packet is dropped " +
				"and the client waits until it gives up",
		}},
		"to no Service": {"8.8.8.8", "10.70.0.10:81", "eth0", Trace{
			Verdict:     "pass",
			Explanation: "10.70.0.10:81/tcp is not an address of a Service on this node, so the packet is left alone",
		}},
	}
	tab := parse(t, table)
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := packet(t, tc.src, tc.dst, tc.in)
			tc.want.Packet = PacketOf(p)
			if diff := cmp.Diff(tc.want, Explain(tab, p), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("trace (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRulesThatDoSomethingElseAreReported(t *testing.T) {
	tab := parse(t, table)
	p := packet(t, "10.60.1.5", "10.70.0.10:80", "veth1")
	wanted := forward.Lookup(tab, p)
	tests := map[string]struct{ outcome, want string }{
		"the same":       {"forward 10.60.1.11:8080 10.60.2.11:8080 snat=no", ""},
		"one of several": {"forward 10.60.2.11:8080 snat=no", ""},
		"another endpoint": {
			"forward 10.60.9.9:1 snat=no",
			`the rules do "forward 10.60.9.9:1 snat=no" where "forward 10.60.1.11:8080 10.60.2.11:8080 snat=no" is wanted`,
		},
		"another verdict": {"drop", `the rules do "drop" where "forward 10.60.1.11:8080 10.60.2.11:8080 snat=no" is wanted`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			o, err := forward.ParseOutcome(tc.outcome)
			if err != nil {
				t.Fatal(err)
			}
			tr := Explain(tab, p)
			tr.Witness(wanted, backend.Trace{Outcome: o, Steps: []backend.Step{{Where: "nat X", What: "jump"}}})
			if tr.Disagreement != tc.want {
				t.Errorf("disagreement is\n  %q, want\n  %q", tr.Disagreement, tc.want)
			}
			if diff := cmp.Diff([]Step{{"nat X", "jump"}}, tr.Steps); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhatTheKernelAloneTellsNamesTheService(t *testing.T) {
	rows := []Row{
		{Service: "a/np", Kind: "node-port", Frontend: "*:80", Proto: "tcp"},
		{
			Service: "a/ip", Kind: "cluster-ip", Frontend: "10.70.0.10:80", Proto: "tcp", Filtered: true,
			Allow: []string{"10.0.0.0/8"},
		},
		{Service: "a/udp", Kind: "cluster-ip", Frontend: "10.70.0.11:80", Proto: "udp"},
	}
	tests := map[string]struct {
		dst, outcome string
		want         Trace
	}{
		"by its address": {"10.70.0.10:80", "drop reason=SourceNotAllowed", Trace{
			Verdict: "drop",
			Reason:  "SourceNotAllowed", Service: "a/ip", Kind: "cluster-ip", Frontend: "10.70.0.10:80", Filtered: true,
			Allow: []string{"10.0.0.0/8"}, Explanation: "8.8.8.8 is not in the source ranges of a/ip (10.0.0.0/8): " +
				"the packet is dropped and the client waits until it gives up",
		}},
		"by its node port": {"10.20.0.11:80", "reject reason=NoEndpoints", Trace{
			Verdict: "reject", Reason: "NoEndpoints",
			Service: "a/np", Kind: "node-port", Frontend: "*:80",
			Explanation: "a/np has no usable endpoint anywhere in the cluster: the client is refused at once",
		}},
		"not at all": {"10.20.0.11:81", "drop", Trace{
			Verdict:     "drop",
			Explanation: "The packet is dropped and the client waits until it gives up",
		}},
		"nor when it passes": {"10.70.0.11:80", "pass", Trace{
			Verdict:     "pass",
			Explanation: "10.70.0.11:80/tcp is not an address of a Service on this node, so the packet is left alone",
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := packet(t, "8.8.8.8", tc.dst, "eth0")
			o, err := forward.ParseOutcome(tc.outcome)
			if err != nil {
				t.Fatal(err)
			}
			tc.want.Packet = PacketOf(p)
			got := FromObjects(p, backend.Trace{Outcome: o}, rows)
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("trace (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPacketsAreReadFromACommandLine(t *testing.T) {
	tests := map[string]struct{ src, dst, want string }{
		"IPv4":                         {"10.0.0.1", "10.96.0.1:443", "10.0.0.1:0 10.96.0.1:443 tcp"},
		"with a source port":           {"10.0.0.1:99", "10.96.0.1:443/tcp", "10.0.0.1:99 10.96.0.1:443 tcp"},
		"UDP in capitals":              {"10.0.0.1", "10.96.0.1:53/UDP", "10.0.0.1:0 10.96.0.1:53 udp"},
		"SCTP":                         {"10.0.0.1", "10.96.0.1:53/sctp", "10.0.0.1:0 10.96.0.1:53 sctp"},
		"IPv6":                         {"fd00::1", "[fd00::2]:443", "[fd00::1]:0 [fd00::2]:443 tcp"},
		"IPv6 source in brackets":      {"[fd00::1]", "[fd00::2]:443", "[fd00::1]:0 [fd00::2]:443 tcp"},
		"IPv6 source with a port":      {"[fd00::1]:9", "[fd00::2]:443", "[fd00::1]:9 [fd00::2]:443 tcp"},
		"IPv4 mapped into IPv6":        {"::ffff:10.0.0.1", "[::ffff:10.0.0.2]:1", "10.0.0.1:0 10.0.0.2:1 tcp"},
		"a destination without port":   {"10.0.0.1", "10.96.0.1", `error: destination "10.96.0.1" is not ADDRESS:PORT`},
		"an IPv6 one without brackets": {"fd00::1", "fd00::2:443", `error: destination "fd00::2:443" is not ADDRESS:PORT`},
		"port 0":                       {"10.0.0.1", "10.96.0.1:0", `error: destination "10.96.0.1:0" is not ADDRESS:PORT`},
		"an unknown protocol": {
			"10.0.0.1", "10.96.0.1:1/icmp",
			`error: protocol "icmp" of the destination is not tcp, udp or sctp`,
		},
		"an empty protocol": {"10.0.0.1", "10.96.0.1:1/", `error: protocol "" of the destination`},
		"a name as source":  {"web", "10.96.0.1:1", `error: source "web" is not ADDRESS or ADDRESS:PORT`},
		"an empty source":   {"", "10.96.0.1:1", `error: source "" is not`},
		"source of the other IP family": {
			"fd00::1", "10.96.0.1:1",
			`error: source fd00::1 and destination 10.96.0.1 are of different IP families`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p, err := ParsePacket(tc.src, tc.dst, "")
			got := p.Src.String() + " " + p.Dst.String() + " " + p.Proto.String()
			if err != nil {
				got = "error: " + err.Error()
			}
			if strings.HasPrefix(tc.want, "error") && strings.HasPrefix(got, tc.want) {
				return
			}
			if got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestWithoutAnInterfaceTheSourceTellsWhereAPacketComesFrom(t *testing.T) {
	host := []netip.Addr{netip.MustParseAddr("10.20.0.11")}
	tests := map[string]struct {
		src, in string
		own     bool
		shown   string
	}{
		"the machine's own":    {"10.20.0.11", "", true, ""},
		"loopback":             {"127.0.0.1", "", true, ""},
		"somebody else's":      {"8.8.8.8", "", false, ""},
		"with an interface":    {"8.8.8.8", "eth0", false, "eth0"},
		"own on an interface":  {"10.20.0.11", "eth0", false, "eth0"},
		"with a source port":   {"8.8.8.8:5", "", false, ""},
		"own with source port": {"10.20.0.11:5", "", true, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := Placed(packet(t, tc.src, "10.70.0.1:1", tc.in), host)
			if own := p.In == ""; own != tc.own {
				t.Errorf("taken as the machine's own: %v, want %v", own, tc.own)
			}
			if got := PacketOf(p); got.In != tc.shown || got.Src != tc.src {
				t.Errorf("shown as %+v, want src %q and in %q", got, tc.src, tc.shown)
			}
		})
	}
}

// FuzzParsePacket: what is read is written back in a form that reads the same.
func FuzzParsePacket(f *testing.F) {
	f.Add("10.0.0.1", "10.96.0.1:443/udp", "eth0")
	f.Add("[fd00::1]:5", "[fd00::2]:443", "")
	f.Add("::ffff:1.2.3.4", "[::ffff:1.2.3.4%eth0]:1/sctp", "?")
	f.Fuzz(func(t *testing.T, src, dst, in string) {
		p, err := ParsePacket(src, dst, in)
		if err != nil {
			return
		}
		text := PacketOf(p)
		again, err := ParsePacket(text.Src, text.Dst+"/"+text.Proto, in)
		if err != nil || again != p {
			t.Errorf("%q %q reads as %+v and again as %+v, %v", src, dst, p, again, err)
		}
	})
}
