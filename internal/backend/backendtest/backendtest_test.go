package backendtest

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestAScriptOfIPv4HasATwin(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"addresses of each range": {
			"10.20.0.11 10.60.2.21 10.70.1.10 192.0.2.10 203.0.113.9 198.51.100.7 172.31.9.5 127.0.0.1",
			"fd20::11 fd60:2::21 fd70::10a 2001:db8:2::10 2001:db8:203::9 2001:db8:100::7 fd31:9::5 ::1",
		},
		"an address with a port is put in brackets": {"packet c1 10.70.1.10:80/tcp", "packet c1 [fd70::10a]:80/tcp"},
		"ranges": {
			"10.60.0.0/16 10.60.1.0/24 198.51.100.0/24 10.20.0.11/32 0.0.0.0/0 127.0.0.0/8",
			"fd60::/16 fd60:1::/64 2001:db8:100::/64 fd20::11/128 ::/0 ::1/128",
		},
		"the family of a slice":                  {"addressType: IPv4", "addressType: IPv6"},
		"what is no address stays":               {"1.2.3 version 300.1.2.3", "1.2.3 version 300.1.2.3"},
		"an address of a crowd":                  {"10.60.129.3", "fd60:101::103"},
		"a script about IPv6 itself has no twin": {"packet c1 [fd70::1]:80/tcp", ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, mirror(tc.text)); diff != "" {
				t.Errorf("twin (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAMistakeInAScriptIsNamed(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"no description":             {"apply web.yaml\n", "line 1: must be a comment"},
		"an unknown command":         {"# x\naply web.yaml\n", "there is no such command"},
		"too few arguments":          {"# x\nedit web.yaml\n", "wrong number of arguments"},
		"a packet without outcome":   {"# x\npacket c1 10.70.1.10:80/tcp\n", "needs indented lines"},
		"lines below another one":    {"# x\nrestart\n  pass\n", "takes no indented lines"},
		"lines below nothing":        {"# x\n  pass\n", "below no command"},
		"a quote without end":        {"# x\nedit a 'b c\n", "has no end"},
		"a file that is there twice": {"# x\n-- a --\n-- a --\n", "is there twice"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := parseScript("test", []byte(tc.text))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestEveryScriptCanBeRead(t *testing.T) {
	const atLeast = 60
	names := map[string]bool{}
	for _, s := range loadScripts(t) {
		names[s.name] = true
	}
	if len(names) < atLeast {
		t.Errorf("%d scripts, want at least %d", len(names), atLeast)
	}
}

func TestAnOutcomeMustBeMetExactly(t *testing.T) {
	tests := map[string]struct {
		want, got string
		met       bool
	}{
		"the order of endpoints does not matter": {
			"forward 10.60.1.11:80 10.60.1.12:80 snat=no", "forward 10.60.1.12:80 10.60.1.11:80 snat=no", true,
		},
		"an endpoint is missing": {
			"forward 10.60.1.11:80 10.60.1.12:80 snat=no", "forward 10.60.1.11:80 snat=no", false,
		},
		"an endpoint too many": {
			"forward 10.60.1.11:80 snat=no", "forward 10.60.1.11:80 10.60.1.12:80 snat=no", false,
		},
		"another mask":                {"forward 10.60.1.11:80 snat=no", "forward 10.60.1.11:80 snat=always", false},
		"another verdict":             {"drop reason=NoLocalEndpoints", "reject reason=NoEndpoints", false},
		"another reason":              {"drop reason=NoLocalEndpoints", "drop reason=SourceNotAllowed", false},
		"a reason that is not said":   {"drop", "drop reason=SourceNotAllowed", false},
		"the number of endpoints":     {"forward 2 endpoints snat=no", "forward 10.60.1.11:80 10.60.1.12:80 snat=no", true},
		"another number of endpoints": {"forward 2 endpoints snat=no", "forward 10.60.1.11:80 snat=no", false},
		"a number, and another mask":  {"forward 1 endpoints snat=no", "forward 10.60.1.11:80 snat=always", false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			want, err := parseExpectation([]string{tc.want})
			if err != nil {
				t.Fatal(err)
			}
			if met := want.met(outcome(t, tc.got)); met != tc.met {
				t.Errorf("met: %v, want %v", met, tc.met)
			}
		})
	}
}

func outcome(t *testing.T, text string) forward.Outcome {
	t.Helper()
	o, err := forward.ParseOutcome(text)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestWhatIsSafeInTheMiddleOfAChange(t *testing.T) {
	const a, b = "forward 10.60.1.11:80 snat=no", "forward 10.60.1.12:80 snat=no"
	const both = "forward 10.60.1.11:80 10.60.1.12:80 snat=no"
	tests := map[string]struct {
		was, will, got string
		safe           bool
	}{
		"still the old":                             {a, b, a, true},
		"already the new":                           {a, b, b, true},
		"something between":                         {a, b, both, false},
		"served before and after, and refused":      {a, b, "reject", false},
		"served before and after, and passed by":    {a, b, "pass", false},
		"dropped on the way from nothing to serve":  {"pass", a, "drop", true},
		"dropped on the way from serve to refuse":   {a, "reject", "drop", true},
		"passed by on the way from serve to refuse": {a, "reject", "pass", false},
		"served though both refuse":                 {"drop", "reject", a, false},
		"refused though nobody's":                   {"pass", "pass", "drop", false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := safe(outcome(t, tc.got), outcome(t, tc.was), outcome(t, tc.will)); got != tc.safe {
				t.Errorf("safe: %v, want %v", got, tc.safe)
			}
		})
	}
}

func TestPacketsComeInWhereTheirSourceIs(t *testing.T) {
	tests := map[string]string{
		"c1 10.70.1.10:80/tcp":          "packet 10.60.1.21:40000 10.70.1.10:80/tcp in=pod-c1",
		"10.60.1.12 10.70.1.10:80":      "packet 10.60.1.12:40000 10.70.1.10:80/tcp in=pod-p1x12",
		"na [fd70::1]:53/udp":           "packet [fd20::11]:40000 [fd70::1]:53/udp",
		"s2 10.20.0.11:30080/sctp":      "packet 10.60.2.11:40000 10.20.0.11:30080/sctp in=eth0",
		"far [fd70::1]:80/tcp":          "packet [2001:db8:100::7]:40000 [fd70::1]:80/tcp in=eth0",
		"127.0.0.1 127.0.0.1:30080/tcp": "packet 127.0.0.1:40000 127.0.0.1:30080/tcp",
		"c1 10.70.1.10:80/tcp in=cni0":  "packet 10.60.1.21:40000 10.70.1.10:80/tcp in=cni0",
		"fd60:1::21 [fd70::1]:80/tcp":   "packet [fd60:1::21]:40000 [fd70::1]:80/tcp in=pod-c1",
	}
	for args, want := range tests {
		t.Run(args, func(t *testing.T) {
			p, err := parsePacket(strings.Fields(args))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, packetText(p)); diff != "" {
				t.Errorf("packet (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAFindingIsReplacedByTheNextEvent(t *testing.T) {
	const bad = "kind: Service\nmetadata: {namespace: shop, name: web}\nspec: {clusterIP: 10.70.1.10, ports: [{port: 0}]}\n"
	w := newWorld(newSettings(model.IPv4))
	for _, step := range []struct {
		text string
		want int
	}{{bad, 1}, {strings.ReplaceAll(bad, "port: 0", "port: 80"), 0}} {
		events, err := readObjects(step.text, false)
		if err != nil {
			t.Fatal(err)
		}
		w.take(t, events)
		if got := len(w.findings()); got != step.want {
			t.Errorf("%d findings, want %d:\n%v", got, step.want, w.findings())
		}
	}
}
