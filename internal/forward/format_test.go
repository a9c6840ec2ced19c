package forward_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/model"
)

const sample = `context IPv4 node=na zone=z1
  pods cidr=10.60.0.0/16
  host 10.20.0.11 127.0.0.1
  node-ports all loopback

port ops/agent/udp
  frontend cluster-ip 10.70.1.60:8125
    from any reject reason=NoEndpoints
  serving 10.60.1.30:8125

port shop/web:https/tcp affinity=3h0m0s health=31999 local-ready=1
  frontend cluster-ip 10.70.1.10:443
    from pod forward cluster snat=hairpin
    from any forward cluster snat=always
  frontend load-balancer 192.0.2.9:443
    allow 10.20.0.0/24 192.0.2.9/32
    from pod forward cluster snat=hairpin
    from node forward cluster snat=always
    from any forward local snat=hairpin
  frontend node-port *:30443
    from pod forward cluster snat=hairpin
    from node forward cluster snat=always
    from any forward local snat=hairpin
  cluster 10.60.1.7:8443(local) 10.60.2.9:8443
  local 10.60.1.7:8443(local)
  serving 10.60.1.7:8443 10.60.2.9:8443 10.60.3.4:8443
`

func sampleTable() *forward.Table {
	cfg := config()
	cfg.LocalhostNodePorts = true
	web := slice(readyOn("na", "10.60.1.7"), readyOn("nb", "10.60.2.9"), notReadyOn("nc", "10.60.3.4"))
	web.Ports = []model.SlicePort{{Name: "https", Protocol: model.TCP, Port: 8443}}
	agent := slice(notReadyOn("na", "10.60.1.30"))
	agent.Name, agent.Service = name("ops/agent-1"), "agent"
	agent.Ports = []model.SlicePort{{Protocol: model.UDP, Port: 8125}}
	return build(cfg, nodeNA(), web, agent,
		&model.Service{
			Name: name("shop/web"), Type: model.LoadBalancer, ClusterIPs: ips("10.70.1.10"), Ingress: ips("192.0.2.9"),
			Ports:        []model.ServicePort{{Name: "https", Protocol: model.TCP, Port: 443, NodePort: 30443}},
			SourceRanges: cidrs("10.20.0.0/24"), ExternalLocal: true, Affinity: 3 * hour, HealthCheckNodePort: 31999,
		},
		&model.Service{
			Name: name("ops/agent"), ClusterIPs: ips("10.70.1.60"), Ports: []model.ServicePort{{Protocol: model.UDP, Port: 8125}},
		})
}

func TestTheTextFormIsStable(t *testing.T) {
	if diff := cmp.Diff(sample, sampleTable().String()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
}

func TestTheTextFormReadsBack(t *testing.T) {
	got, err := forward.Parse(strings.NewReader("# a comment\n\n" + sample))
	if err != nil {
		t.Fatal(err)
	}
	if !forward.Equal(sampleTable(), got) {
		t.Errorf("table (-built +read):\n%s", cmp.Diff(sample, got.String()))
	}
}

func TestParseSortsWhatABuilderSorts(t *testing.T) {
	got, err := forward.Parse(strings.NewReader(`
		context IPv6
		pods interface-prefix=veth
		host fd20::11 ::1 fd20::11
		node-ports fd20::11 fd20::10
		port b/b/sctp
			frontend external-ip [fd77::9]:9
				allow fd99::/64 fd20::/64 fd99::/64
				from any forward local snat=always
			local [fd60::9]:80 [fd60::11]:80
			serving [fd60::9]:80 [fd60::11]:80 [fd60::9]:80
		port a/a/tcp
			frontend cluster-ip [fd70::1]:80
				allow none
				from any reject reason=NoEndpoints`))
	if err != nil {
		t.Fatal(err)
	}
	want := `context IPv6
  pods interface-prefix=veth
  host ::1 fd20::11
  node-ports fd20::10 fd20::11

port a/a/tcp
  frontend cluster-ip [fd70::1]:80
    allow none
    from any reject reason=NoEndpoints

port b/b/sctp
  frontend external-ip [fd77::9]:9
    allow fd20::/64 fd99::/64
    from any forward local snat=always
  local [fd60::11]:80 [fd60::9]:80
  serving [fd60::11]:80 [fd60::9]:80
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
}

func TestNamesThatAreNoWordsAreQuoted(t *testing.T) {
	cfg := config()
	cfg.NodeName, cfg.Detect, cfg.BridgeInterface = "node \"one\"\n", forward.DetectBridgeInterface, "br 0"
	svc := &model.Service{
		Name: name("shop/we b"), ClusterIPs: ips("10.70.1.10"), Ports: []model.ServicePort{{Name: "pört\\", Protocol: model.TCP, Port: 80}},
	}
	table := build(cfg, svc)
	if diff := cmp.Diff(`context IPv4 node="node \"one\"\n"`, trimLines(table.String())[0]); diff != "" {
		t.Errorf("context line (-want +got):\n%s", diff)
	}
	got, err := forward.Parse(strings.NewReader(table.String()))
	if err != nil {
		t.Fatal(err)
	}
	if !forward.Equal(table, got) {
		t.Errorf("table (-built +read):\n%s", cmp.Diff(table.String(), got.String()))
	}
}

func TestParseErrorsNameTheLineAndTheFault(t *testing.T) {
	const head, port = "context IPv4\n", "context IPv4\nport a/b/tcp\n"
	const front = port + "frontend cluster-ip 10.70.1.1:80\n"
	for text, want := range map[string]string{
		"":                                         `no "context" line: a table starts with one`,
		"host 10.0.0.1":                            `line 1: "host" before the context line`,
		"port a/b/tcp":                             "line 1: port before the context line",
		"context":                                  "line 1: context without a family; write IPv4 or IPv6",
		"context IPv5":                             `line 1: family "IPv5" is not one of IPv4, IPv6`,
		"context IPv4 foo=1":                       `line 1: context has no option "foo=1"; it has node= and zone=`,
		head + "\n# x\ncontext IPv4":               "line 4: a second context line; a table has one",
		head + "frontends":                         `line 2: "frontends" does not belong to the context`,
		head + "pods":                              "line 2: pods takes one word, not 0",
		head + "pods interface=":                   `line 2: pods "interface=" is not cidr=, interface=, interface-prefix= with a value, or unknown`,
		head + "pods cidr=10.0.0.1/8":              "line 2: CIDR 10.0.0.1/8 has bits set behind its prefix; write 10.0.0.0/8",
		head + "pods cidr=ten":                     `line 2: "ten" is not a CIDR`,
		head + "pods cidr=fd00::/8":                "line 2: address fd00:: is not of the table's family IPv4",
		head + "host ten":                          `line 2: "ten" is not an IP address`,
		head + "host ::ffff:10.0.0.1":              "line 2: address ::ffff:10.0.0.1 is not plain; write it without a zone, and an IPv4 one with dots only",
		head + "node-ports all 10.0.0.1":           "line 2: node-ports are on all addresses or on some, not both",
		head + "port":                              "line 2: port without a name",
		head + "port a":                            `line 2: port name "a" is not namespace/service:port/protocol`,
		head + "port a/b":                          `line 2: port name "a/b" is not namespace/service:port/protocol`,
		head + "port a/b/icmp":                     `line 2: port name "a/b/icmp" is not namespace/service:port/protocol`,
		head + "port a/b/":                         `line 2: port name "a/b/" is not namespace/service:port/protocol`,
		head + "port a/:x/tcp":                     `line 2: port name "a/:x/tcp" is not namespace/service:port/protocol`,
		head + "port a/b/tcp affinity=3":           `line 2: port a/b/tcp: affinity "3" is not a duration like 3h`,
		head + "port a/b/tcp affinity=-3s":         `line 2: port a/b/tcp: affinity "-3s" is not a duration like 3h`,
		head + "port a/b/tcp health=0":             `line 2: port a/b/tcp: health "0" is not a port number`,
		head + "port a/b/tcp local-ready=":         `line 2: port a/b/tcp: local-ready "" is not a number`,
		head + "port a/b/tcp x":                    `line 2: port a/b/tcp: no option "x"; there are affinity=, scheduler=, health= and local-ready=`,
		port:                                       "port a/b/tcp from line 2: neither a frontend nor a health check port",
		port + "port c/d/tcp":                      "line 3: port a/b/tcp from line 2: neither a frontend nor a health check port",
		port + "allow none":                        `line 3: "allow" does not belong here`,
		port + "frontend cluster-ip":               "line 3: frontend takes a kind and an address, not 1 words",
		port + "frontend pod 10.0.0.1:80":          `line 3: kind "pod" is not one of cluster-ip, external-ip, load-balancer, node-port`,
		port + "frontend node-port 80":             `line 3: node port "80" is not *:port`,
		port + "frontend cluster-ip *:80":          `line 3: "*:80" is not address:port`,
		port + "frontend cluster-ip 10.0.0.1:0":    "line 3: port of 10.0.0.1:0 is 0",
		front:                                      "port a/b/tcp from line 2: frontend 10.70.1.1:80 has no route",
		front + "cluster 10.0.0.1:80":              "line 4: frontend 10.70.1.1:80 has no route",
		front + "port c/d/tcp":                     "line 4: port a/b/tcp from line 2: frontend 10.70.1.1:80 has no route",
		front + "allow":                            `line 4: allow without a CIDR; write "none" to admit nobody`,
		front + "allow none\nallow none":           "line 5: a second allow line; a frontend has one",
		front + "allow 10.0.0.0":                   `line 4: "10.0.0.0" is not a CIDR`,
		front + "from any drop":                    "line 4: a route is: from CLASS forward POOL snat=MODE, or: from CLASS VERDICT reason=REASON",
		front + "from me drop reason=NoEndpoints":  `line 4: class "me" is not one of pod, node, any`,
		front + "from any pass reason=NoEndpoints": `line 4: verdict "pass" is not one of forward, reject, drop`,
		front + "from any drop cluster":            "line 4: drop takes reason= and nothing else",
		front + "from any drop reason=none":        `line 4: reason "none" is not one of NoEndpoints, NoLocalEndpoints, SourceNotAllowed`,
		front + "from any forward all snat=always": `line 4: pool "all" is not one of cluster, local`,
		front + "from any forward local always":    "line 4: forward takes a pool and snat=",
		front + "from any forward local snat=no":   `line 4: snat "no" is not one of hairpin, always`,
		front + "from any forward local snat=always": "port a/b/tcp from line 2: " +
			"pool local must have endpoints if a route forwards to it, and only then",
		front + "from any drop reason=NoEndpoints\ncluster 10.0.0.1:80": "port a/b/tcp from line 2: " +
			"pool cluster must have endpoints if a route forwards to it, and only then",
		front + strings.Repeat("from any drop reason=NoEndpoints\n", 4):                    "line 7: a frontend has at most 3 routes",
		front + "from any drop reason=NoEndpoints\nfrontend cluster-ip 10.70.1.1:80":       "line 5: frontend 10.70.1.1:80 is there already, at port a/b/tcp",
		front + "from any drop reason=NoEndpoints\nport a/b/tcp":                           "line 5: port a/b/tcp is there a second time",
		front + "from any forward local snat=always\nlocal 10.0.0.1:80\nlocal 10.0.0.1:80": "line 6: a second line for this pool",
		front + "from any forward local snat=always\nlocal 10.0.0.1:80 10.0.0.1:80(local)": "line 5: endpoint 10.0.0.1:80 is there twice",
		front + "from any forward local snat=always\nlocal 10.0.0.1":                       `line 5: "10.0.0.1" is not address:port`,
		front + "from any drop reason=NoEndpoints\nserving\nserving":                       "line 6: a second serving line; a port has one",
		front + "from any drop reason=NoEndpoints\nserving 1":                              `line 5: "1" is not address:port`,
		"context IPv4\nport a/b/tcp local-ready=1\nfrontend node-port *:80\nfrom any drop reason=NoEndpoints": "port a/b/tcp from line 2: " +
			"local-ready goes with health only",
		`context IPv4 node="a`:                          `line 1: quoted text "a has no end`,
		`context IPv4 node="` + strings.Repeat("a", 99): `line 1: quoted text "` + strings.Repeat("a", 39) + `... has no end`,
		`context IPv4 node="a"b`:                        `line 1: quoted text "a" is followed by more text; separate words by a space`,
	} {
		_, err := forward.Parse(strings.NewReader(text))
		got := ""
		if err != nil {
			got = err.Error()
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: error (-want +got):\n%s", text, diff)
		}
	}
}

type broken struct{ err error }

func (b broken) Write([]byte) (int, error) { return 0, b.err }

func (b broken) Read([]byte) (int, error) { return 0, b.err }

func TestBrokenFilesAreReported(t *testing.T) {
	err := errors.New("disk on fire")
	if got := forward.Format(broken{err}, sampleTable()); !errors.Is(got, err) {
		t.Errorf("write error %v, want %v", got, err)
	}
	if _, got := forward.Parse(broken{err}); !errors.Is(got, err) || got.Error() != "line 1: disk on fire" {
		t.Errorf("read error %v, want line 1: %v", got, err)
	}
	if got := forward.Format(io.Discard, forward.NewBuilder(config()).Table()); got != nil {
		t.Errorf("empty table: %v", got)
	}
}

func TestEqualSeesEveryDifference(t *testing.T) {
	if !forward.Equal(nil, nil) || forward.Equal(nil, sampleTable()) || forward.Equal(sampleTable(), nil) {
		t.Error("nil equals nil only")
	}
	var none *forward.Port
	if !none.Equal(nil) || none.Equal(&forward.Port{}) {
		t.Error("a nil port equals nil only")
	}
	read := func(text string) *forward.Table {
		table, err := forward.Parse(strings.NewReader(text))
		if err != nil {
			t.Fatalf("%v in:\n%s", err, text)
		}
		return table
	}
	for _, change := range [][2]string{
		{"node=na", "node=nb"},
		{"zone=z1", "zone=z2"},
		{"cidr=10.60.0.0/16", "interface=cni0"},
		{"cidr=10.60.0.0/16", "unknown"},
		{"host 10.20.0.11", "host 10.20.0.12"},
		{"node-ports all", "node-ports"},
		{"all loopback", "all"},
		{"node-ports all", "node-ports 10.20.0.11"},
		{"ops/agent", "ops/agent2"},
		{"3h0m0s", "2h0m0s"},
		{"health=31999", "health=31998"},
		{"local-ready=1", "local-ready=2"},
		{"cluster-ip 10.70.1.10:443", "external-ip 10.70.1.10:443"},
		{"10.70.1.10:443", "10.70.1.11:443"},
		{"*:30443", "*:30444"},
		{"    allow 10.20.0.0/24 192.0.2.9/32\n", ""},
		{"allow 10.20.0.0/24 192.0.2.9/32", "allow none"},
		{"any forward cluster snat=always", "any forward cluster snat=hairpin"},
		{"reason=NoEndpoints", "reason=NoLocalEndpoints"},
		{"cluster 10.60.1.7:8443(local)", "cluster 10.60.1.7:8443"},
		{"  local 10.60.1.7:8443(local)", "  local 10.60.1.8:8443(local)"},
		{" 10.60.3.4:8443", ""},
	} {
		changed := strings.Replace(sample, change[0], change[1], 1)
		if changed == sample || forward.Equal(read(sample), read(changed)) {
			t.Errorf("%q for %q makes no difference", change[1], change[0])
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(sample)
	f.Add("context IPv6 node=\"a b\"\n  pods interface-prefix=veth\n  host fd20::11\n  node-ports fd20::11\n")
	for seed := range uint64(20) {
		f.Add(gen.Table(seed, model.IPv4).String())
		f.Add(gen.Table(seed, model.IPv6).String())
	}
	f.Fuzz(func(t *testing.T, text string) {
		first, err := forward.Parse(strings.NewReader(text))
		if err != nil {
			return
		}
		written := first.String()
		second, err := forward.Parse(strings.NewReader(written))
		if err != nil {
			t.Fatalf("what Format wrote: %v\n%s", err, written)
		}
		if !forward.Equal(first, second) {
			t.Fatalf("table changed (-first +second):\n%s", cmp.Diff(written, second.String()))
		}
		if diff := cmp.Diff(written, second.String()); diff != "" {
			t.Fatalf("text changed (-first +second):\n%s", diff)
		}
	})
}
