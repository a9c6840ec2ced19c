package answer

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// table is a node "na" with a Service of each sort.
const table = `context IPv4 node=na
  pods cidr=10.60.0.0/16
  host 10.20.0.11 127.0.0.1
  node-ports all loopback

port shop/closed/tcp
  frontend load-balancer 203.0.113.11:80
    allow none
    from any forward cluster snat=always
  cluster 10.60.1.11:8080(local)

port shop/empty/udp
  frontend cluster-ip 10.70.0.11:53
    from any reject reason=NoEndpoints

port shop/far:http/tcp
  frontend node-port *:30081
    from pod forward cluster snat=hairpin
    from node forward cluster snat=always
    from any drop reason=NoLocalEndpoints
  cluster 10.60.2.11:8080

port shop/web:http/tcp affinity=3h0m0s
  frontend cluster-ip 10.70.0.10:80
    from pod forward cluster snat=hairpin
    from any forward cluster snat=always
  frontend load-balancer 203.0.113.10:80
    allow 198.51.100.0/24
    from pod forward cluster snat=hairpin
    from node forward cluster snat=always
    from any forward local snat=hairpin
  cluster 10.60.1.11:8080(local) 10.60.2.11:8080
  local 10.60.1.11:8080(local)
`

func parse(t *testing.T, text string) *forward.Table {
	t.Helper()
	tab, err := forward.Parse(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

func half(addrs ...string) []Endpoint {
	out := make([]Endpoint, len(addrs))
	for i, a := range addrs {
		out[i] = Endpoint{Addr: a, Share: 1 / float64(len(addrs))}
	}
	return out
}

func wantedRows() []Row {
	return []Row{
		{
			Family: "IPv4", Service: "shop/closed", Kind: "load-balancer", Frontend: "203.0.113.11:80", Proto: "tcp",
			Do: "drop", Reason: "SourceNotAllowed", Filtered: true,
		},
		{
			Family: "IPv4", Service: "shop/empty", Kind: "cluster-ip", Frontend: "10.70.0.11:53", Proto: "udp",
			Do: "reject", Reason: "NoEndpoints",
		},
		{
			Family: "IPv4", Service: "shop/far:http", Kind: "node-port", Frontend: "*:30081", Proto: "tcp",
			Do: "drop", Reason: "NoLocalEndpoints", Endpoints: half("10.60.2.11:8080"),
		},
		{
			Family: "IPv4", Service: "shop/web:http", Kind: "cluster-ip", Frontend: "10.70.0.10:80", Proto: "tcp",
			Do: "forward", AffinitySeconds: 10800, Endpoints: half("10.60.1.11:8080", "10.60.2.11:8080"),
		},
		{
			Family: "IPv4", Service: "shop/web:http", Kind: "load-balancer", Frontend: "203.0.113.10:80", Proto: "tcp",
			Do: "forward", AffinitySeconds: 10800, Filtered: true, Allow: []string{"198.51.100.0/24"},
			Endpoints: half("10.60.1.11:8080", "10.60.2.11:8080"), LocalEndpoints: half("10.60.1.11:8080"),
		},
	}
}

func TestATableGivesOneRowForEachFrontend(t *testing.T) {
	got := Wanted(model.IPv4, Ports(parse(t, table)))
	if diff := cmp.Diff(wantedRows(), got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

// kernelRows are those of wantedRows as a backend reads them.
func kernelRows() []backend.Row {
	a, b := netip.MustParseAddrPort("10.60.1.11:8080"), netip.MustParseAddrPort("10.60.2.11:8080")
	both := []backend.RowEndpoint{{Addr: b, Share: 0.5001}, {Addr: a, Share: 0.4999}}
	return []backend.Row{
		{
			Service: "shop/closed", Kind: "load-balancer", Frontend: "203.0.113.11:80", Proto: "tcp", Do: "drop",
			Reason: "SourceNotAllowed",
		},
		{Service: "shop/empty", Frontend: "10.70.0.11:53", Proto: "udp", Do: "reject", Reason: "NoEndpoints"},
		{Service: "shop/far:http", Frontend: ":30081", Proto: "tcp", Do: "drop", Reason: "NoLocalEndpoints"},
		{
			Service: "shop/far:http", Kind: "node-port", Frontend: ":30081", Proto: "tcp", Do: "forward",
			Endpoints: []backend.RowEndpoint{{Addr: b, Share: 1}},
		},
		{
			Service: "shop/web:http", Kind: "cluster-ip", Frontend: "10.70.0.10:80", Proto: "tcp", Do: "forward",
			Affinity: 3 * time.Hour, Endpoints: both,
		},
		{
			Service: "shop/web:http", Kind: "load-balancer", Frontend: "203.0.113.10:80", Proto: "tcp", Do: "forward",
			Affinity: 3 * time.Hour, Allow: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, Endpoints: both,
			LocalEndpoints: []backend.RowEndpoint{{Addr: a, Share: 1}},
		},
	}
}

func TestKernelRowsReadLikeWantedOnes(t *testing.T) {
	want := wantedRows()
	want[1].Kind = ""
	for _, i := range []int{3, 4} {
		want[i].Endpoints = []Endpoint{{Addr: "10.60.1.11:8080", Share: 0.4999}, {Addr: "10.60.2.11:8080", Share: 0.5001}}
	}
	got := Held(model.IPv4, kernelRows())
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

func TestAFrontendIsComparedWithTheKernels(t *testing.T) {
	type drift struct{ Service, Frontend, Drift, Detail string }
	none := []drift{
		{"shop/closed", "203.0.113.11:80", DriftNone, ""},
		{"shop/empty", "10.70.0.11:53", DriftNone, ""},
		{"shop/far:http", "*:30081", DriftNone, ""},
		{"shop/web:http", "10.70.0.10:80", DriftNone, ""},
		{"shop/web:http", "203.0.113.10:80", DriftNone, ""},
	}
	with := func(i int, d, detail string) []drift {
		out := append([]drift{}, none...)
		out[i].Drift, out[i].Detail = d, detail
		return out
	}
	tests := map[string]struct {
		damage func(rows []backend.Row) []backend.Row
		want   []drift
	}{
		"nothing": {func(r []backend.Row) []backend.Row { return r }, none},
		"gone":    {func(r []backend.Row) []backend.Row { return append(r[:1], r[2:]...) }, with(1, DriftMissing, "")},
		"another verdict": {
			func(r []backend.Row) []backend.Row { r[1].Do = "drop"; return r },
			with(1, DriftChanged, "the kernel has drop instead of reject"),
		},
		"another Service": {
			func(r []backend.Row) []backend.Row { r[4].Service = "shop/old"; return r },
			with(3, DriftChanged, "the kernel has it for shop/old"),
		},
		"no affinity": {
			func(r []backend.Row) []backend.Row { r[4].Affinity = 0; return r },
			with(3, DriftChanged, "the kernel has an affinity of 0 s instead of 10800 s"),
		},
		"an open filter": {
			func(r []backend.Row) []backend.Row { r[5].Allow = nil; return r },
			with(4, DriftChanged, "the kernel admits every source instead of 198.51.100.0/24"),
		},
		"an endpoint less": {
			func(r []backend.Row) []backend.Row { r[4].Endpoints = r[4].Endpoints[1:]; return r },
			with(3, DriftChanged, "the kernel has it without 10.60.2.11:8080"),
		},
		"an endpoint more": {func(r []backend.Row) []backend.Row {
			r[3].Endpoints = append(r[3].Endpoints, backend.RowEndpoint{Addr: netip.MustParseAddrPort("10.60.9.9:1")})
			return r
		}, with(2, DriftChanged, "the kernel has it with 10.60.9.9:1")},
		"uneven shares": {func(r []backend.Row) []backend.Row {
			r[4].Endpoints = []backend.RowEndpoint{
				{Addr: r[4].Endpoints[0].Addr, Share: 0.9},
				{Addr: r[4].Endpoints[1].Addr, Share: 0.1},
			}
			return r
		}, with(3, DriftChanged, "the kernel has it 10.60.1.11:8080 with 10.0 % instead of 50.0 %, "+
			"10.60.2.11:8080 with 90.0 % instead of 50.0 %")},
		"another local endpoint": {func(r []backend.Row) []backend.Row {
			r[5].LocalEndpoints[0].Addr = netip.MustParseAddrPort("10.60.1.12:8080")
			return r
		}, with(4, DriftChanged, "the kernel has it without 10.60.1.11:8080, with 10.60.1.12:8080")},
		"something that nobody wants": {func(r []backend.Row) []backend.Row {
			return append(r, backend.Row{
				Service: "old/one", Kind: "cluster-ip", Frontend: "10.70.9.9:1", Proto: "tcp",
				Do: "reject",
			})
		}, append(append([]drift{}, none...), drift{"old/one", "10.70.9.9:1", DriftExtra, ""})},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var got []drift
			for _, r := range Compare(wantedRows(), Held(model.IPv4, tc.damage(kernelRows()))) {
				got = append(got, drift{r.Service, r.Frontend, r.Drift, r.Detail})
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("drift (-want +got):\n%s", diff)
			}
		})
	}
}

func TestManyDifferencesAreCounted(t *testing.T) {
	got := membership(half("a", "b", "c", "d", "e"), nil)
	if want := "the kernel has it without a, without b, without c, and 2 more differences"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAFailingPortIsSaidOnItsFrontends(t *testing.T) {
	rows := Compare(wantedRows(), Held(model.IPv4, kernelRows()))
	Blame(rows, forward.PortName{Name: model.Name{Namespace: "shop", Name: "web"}, Port: "http", Proto: model.TCP}, DriftMissing, "why")
	for _, r := range rows {
		want := Row{Drift: DriftNone}
		if r.Service == "shop/web:http" {
			want = Row{Drift: DriftMissing, Detail: "why"}
		}
		if r.Drift != want.Drift || r.Detail != want.Detail {
			t.Errorf("%s %s has drift %q, %q; want %q, %q",
				r.Service, r.Frontend, r.Drift, r.Detail, want.Drift, want.Detail)
		}
	}
}

func TestAListingIsRestrictedToWhatWasAskedFor(t *testing.T) {
	tests := map[string]struct {
		namespace, service string
		want               []string
	}{
		"everything": {"", "", []string{
			"a/web:http", "a/web:dns", "a/web2", "b/web:http", "Service a/web", "Service a/web2", "Node n",
		}},
		"a namespace": {"a", "", []string{
			"a/web:http", "a/web:dns", "a/web2", "Service a/web", "Service a/web2",
		}},
		"a name":                    {"", "web", []string{"a/web:http", "a/web:dns", "b/web:http", "Service a/web"}},
		"a name in a namespace":     {"b", "web", []string{"b/web:http"}},
		"namespace and name as one": {"", "a/web", []string{"a/web:http", "a/web:dns", "Service a/web"}},
		"one port":                  {"", "a/web:dns", []string{"a/web:dns", "Service a/web"}},
		"a port without namespace":  {"", "web:http", []string{"a/web:http", "b/web:http", "Service a/web"}},
		"what is not there":         {"c", "", nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			l := Listing{
				Rows: []Row{{Service: "a/web:http"}, {Service: "a/web:dns"}, {Service: "a/web2"}, {Service: "b/web:http"}},
				Findings: []Finding{
					{Kind: "Service", Object: "a/web"},
					{Kind: "Service", Object: "a/web2"},
					{Kind: "Node", Object: "n"},
				},
			}
			l.Select(tc.namespace, tc.service)
			var got []string
			for _, r := range l.Rows {
				got = append(got, r.Service)
			}
			for _, f := range l.Findings {
				got = append(got, f.Kind+" "+f.Object)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("listing (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRowsAreSortedByServiceFamilyAndKind(t *testing.T) {
	l := Listing{Rows: []Row{
		{Service: "b/x", Family: "IPv4", Kind: "cluster-ip"},
		{Service: "a/x", Family: "IPv6", Kind: "cluster-ip"},
		{Service: "a/x", Family: "IPv4", Kind: "node-port"},
		{Service: "a/x", Family: "IPv4", Kind: "load-balancer"},
		{Service: "a/x", Family: "IPv4", Kind: "cluster-ip", Frontend: "2"},
		{Service: "a/x", Family: "IPv4", Kind: "cluster-ip", Frontend: "1"},
	}}
	l.Sort()
	var got []string
	for _, r := range l.Rows {
		got = append(got, strings.TrimSpace(r.Service+" "+r.Family+" "+r.Kind+" "+r.Frontend))
	}
	want := []string{
		"a/x IPv4 cluster-ip 1", "a/x IPv4 cluster-ip 2", "a/x IPv4 load-balancer", "a/x IPv4 node-port",
		"a/x IPv6 cluster-ip", "b/x IPv4 cluster-ip",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestFindingsAreSortedAndSaidOnce(t *testing.T) {
	f := model.Finding{Severity: model.Error, Kind: "Service", Object: "b/x", Reason: "R", Message: "m"}
	g := model.Finding{Severity: model.Warning, Kind: "Node", Object: "n", Reason: "R", Message: "m"}
	want := []Finding{{"warning", "Node", "n", "R", "m"}, {"error", "Service", "b/x", "R", "m"}}
	if diff := cmp.Diff(want, Findings([]model.Finding{f, g, f})); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
}

func TestNodePortsAreSetAgainstWhatIsWantedAsOne(t *testing.T) {
	want := []Row{
		{
			Family: "IPv4", Service: "shop/web:http", Kind: "node-port", Frontend: "*:30080", Proto: "tcp", Do: "forward",
			Endpoints: []Endpoint{{Addr: "10.60.1.11:8080", Share: 1}},
		},
		{Family: "IPv4", Service: "shop/vip:http", Kind: "external-ip", Frontend: "10.20.0.12:30080", Proto: "tcp", Do: "forward"},
	}
	at := func(frontend string, active int) Row {
		return Row{
			Family: "IPv4", Frontend: frontend, Proto: "tcp", Do: "forward", Scheduler: "wlc",
			Endpoints: []Endpoint{{Addr: "10.60.1.11:8080", Share: 1, Weight: 3, Active: active, Inactive: 1}},
			Draining:  []Endpoint{{Addr: "10.60.1.12:8080", Active: active}},
		}
	}
	have := Collapse(want, []Row{at("10.20.0.11:30080", 2), at("172.31.9.5:30080", 3), at("10.20.0.12:30080", 9), at("10.20.0.11:99", 1)})
	var frontends []string
	for _, r := range have {
		frontends = append(frontends, r.Frontend)
	}
	if diff := cmp.Diff([]string{"*:30080", "10.20.0.12:30080", "10.20.0.11:99"}, frontends); diff != "" {
		t.Errorf("frontends (-want +got):\n%s", diff)
	}
	Enliven(want, have)
	wantLive := Row{
		Family: "IPv4", Service: "shop/web:http", Kind: "node-port", Frontend: "*:30080", Proto: "tcp", Do: "forward",
		Endpoints: []Endpoint{{Addr: "10.60.1.11:8080", Share: 1, Weight: 3, Active: 5, Inactive: 2}}, Scheduler: "wlc",
		Draining: []Endpoint{{Addr: "10.60.1.12:8080", Active: 5}},
	}
	if diff := cmp.Diff(wantLive, want[0]); diff != "" {
		t.Errorf("row (-want +got):\n%s", diff)
	}
}
