package forward_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/model"
)

// at gives a moment so many hours after another.
func at(hours int) time.Time { return time.Unix(1700000000, 0).Add(time.Duration(hours) * time.Hour) }

// claims is a Service with a cluster IP of its own and the external address 203.0.113.9:80 and node port 30080.
func claims(n, clusterIP string, created time.Time) *model.Service {
	return &model.Service{
		Name: name(n), Created: created, Type: model.NodePort, ClusterIPs: ips(clusterIP), ExternalIPs: ips("203.0.113.9"),
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30080}},
	}
}

// owner tells who serves a frontend, "" for nobody.
func owner(t *forward.Table, k forward.Key) string {
	n, ok := t.Owner(k)
	if !ok {
		return ""
	}
	return n.String()
}

func external() forward.Key { return forward.Key{Addr: ip("203.0.113.9"), Port: 80, Proto: model.TCP} }

func nodePort() forward.Key { return forward.Key{Port: 30080, Proto: model.TCP} }

func TestWhoServesAFrontendThatSeveralClaim(t *testing.T) {
	tests := map[string]struct {
		services []*model.Service
		want     string
		losers   []string
	}{
		"the oldest": {
			[]*model.Service{claims("shop/a", "10.70.1.1", at(2)), claims("shop/b", "10.70.1.2", at(1)), claims("shop/c", "10.70.1.3", at(3))},
			"shop/b/tcp",
			[]string{"shop/a", "shop/c"},
		},
		"of the same age the first by name": {
			[]*model.Service{claims("shop/b", "10.70.1.1", at(1)), claims("shop/a", "10.70.1.2", at(1)), claims("ops/z", "10.70.1.3", at(1))},
			"ops/z/tcp",
			[]string{"shop/a", "shop/b"},
		},
		"one without a time, from a file, is older than all": {
			[]*model.Service{claims("shop/a", "10.70.1.1", at(1)), claims("shop/z", "10.70.1.2", time.Time{})},
			"shop/z/tcp",
			[]string{"shop/a"},
		},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			var objects []any
			for _, svc := range tc.services {
				objects = append(objects, svc)
			}
			table, found := forward.Build(config(), snapshot(objects...), host())
			if a, b := owner(table, external()), owner(table, nodePort()); a != tc.want || b != tc.want {
				t.Errorf("external address is served for %q and node port for %q, want %q", a, b, tc.want)
			}
			var want []string
			for _, n := range tc.losers {
				want = append(want, "Service "+n+": FrontendConflict", "Service "+n+": FrontendConflict")
			}
			wantFindings(t, found, want...)
			for _, f := range found {
				if !strings.Contains(f.Message, tc.want) {
					t.Errorf("message %q does not name %s", f.Message, tc.want)
				}
			}
		})
	}
}

func TestALoserIsServedWithoutTheFrontendAndGetsItWhenTheWinnerGoes(t *testing.T) {
	winner, loser := claims("shop/a", "10.70.1.1", at(1)), claims("shop/b", "10.70.1.2", at(2))
	s, b := snapshot(winner, loser), forward.NewBuilder(config())
	b.Update(s, model.Dirty{}, host())
	wantPort(t, b.Table(), "shop/b/tcp", `
		port shop/b/tcp
		frontend cluster-ip 10.70.1.2:80
		from any reject reason=NoEndpoints`)
	if got := slices.Collect(maps.Keys(b.Findings())); !slices.Equal(got, []string{"Service shop/b"}) {
		t.Errorf("findings about %v, want Service shop/b", got)
	}

	var d model.Dirty
	s.Apply(model.Event{Service: winner, Delete: true}, &d)
	got := b.Update(s, d, host())
	want := forward.Delta{Ports: []forward.PortName{portName("shop/a/tcp"), portName("shop/b/tcp")}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("delta when the winner goes (-want +got):\n%s", diff)
	}
	wantPort(t, b.Table(), "shop/b/tcp", `
		port shop/b/tcp
		frontend cluster-ip 10.70.1.2:80
		from any reject reason=NoEndpoints
		frontend external-ip 203.0.113.9:80
		from any reject reason=NoEndpoints
		frontend node-port *:30080
		from any reject reason=NoEndpoints`)
	if len(b.Findings()) != 0 {
		t.Errorf("findings %v, want none", b.Findings())
	}

	// It comes back, and is still the older one.
	d = model.Dirty{}
	s.Apply(model.Event{Service: winner}, &d)
	if diff := cmp.Diff(want, b.Update(s, d, host())); diff != "" {
		t.Errorf("delta when the winner is back (-want +got):\n%s", diff)
	}
	if got := owner(b.Table(), external()); got != "shop/a/tcp" {
		t.Errorf("served for %q, want shop/a/tcp", got)
	}
}

func TestALoserIsToldWhenAnotherBecomesTheWinner(t *testing.T) {
	a, c := claims("shop/a", "10.70.1.1", at(1)), claims("shop/c", "10.70.1.3", at(3))
	s, b := snapshot(a, claims("shop/b", "10.70.1.2", at(2)), c), forward.NewBuilder(config())
	b.Update(s, model.Dirty{}, host())
	var d model.Dirty
	s.Apply(model.Event{Service: a, Delete: true}, &d)
	b.Update(s, d, host())
	found := b.Findings()["Service shop/c"]
	wantFindings(t, found, "Service shop/c: FrontendConflict", "Service shop/c: FrontendConflict")
	if !strings.Contains(found[0].Message, "shop/b/tcp") {
		t.Errorf("message %q names another winner than shop/b", found[0].Message)
	}
}

func TestARecreatedServiceLosesItsSeniority(t *testing.T) {
	s, b := snapshot(claims("shop/a", "10.70.1.1", at(1)), claims("shop/b", "10.70.1.2", at(2))), forward.NewBuilder(config())
	b.Update(s, model.Dirty{}, host())
	var d model.Dirty
	s.Apply(model.Event{Service: claims("shop/a", "10.70.1.1", at(3))}, &d)
	b.Update(s, d, host())
	if got := owner(b.Table(), external()); got != "shop/b/tcp" {
		t.Errorf("served for %q, want shop/b/tcp", got)
	}
}

func TestPortsOfOneServiceThatClaimTheSame(t *testing.T) {
	svc := &model.Service{Name: name("shop/web"), ClusterIPs: ips("10.70.1.1"), Ports: []model.ServicePort{
		{Name: "b", Protocol: model.TCP, Port: 80}, {Name: "a", Protocol: model.TCP, Port: 80},
	}}
	table, found := forward.Build(config(), snapshot(svc), host())
	wantFindings(t, found, "Service shop/web: FrontendConflict")
	if got := owner(table, forward.Key{Addr: ip("10.70.1.1"), Port: 80, Proto: model.TCP}); got != "shop/web:a/tcp" || table.Len() != 1 {
		t.Errorf("served for %q in a table of %d ports, want shop/web:a/tcp alone", got, table.Len())
	}
}

func TestAPortThatLostEverythingStaysForItsHealthCheck(t *testing.T) {
	lb := claims("shop/b", "10.70.1.1", at(2))
	lb.Type, lb.ExternalLocal, lb.HealthCheckNodePort = model.LoadBalancer, true, 31999
	table := build(config(), claims("shop/a", "10.70.1.1", at(1)), lb)
	wantPort(t, table, "shop/b/tcp", "port shop/b/tcp health=31999 local-ready=0")
}

func TestAnUpdateTouchesWhatChangedAndNothingElse(t *testing.T) {
	s := snapshot(append(abc(true, false), claims("shop/other", "10.70.1.2", at(1)))...)
	b := forward.NewBuilder(config())
	first := b.Update(s, model.Dirty{}, host())
	want := forward.Delta{Ports: []forward.PortName{portName("shop/other/tcp"), portName("shop/web/tcp")}, Context: true}
	if diff := cmp.Diff(want, first); diff != "" {
		t.Errorf("first delta (-want +got):\n%s", diff)
	}
	steps := []struct {
		what  string
		event model.Event
		want  forward.Delta
	}{
		{
			"an endpoint more",
			model.Event{Slice: slice(readyOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11"), readyOn("nb", "10.60.2.12"))},
			forward.Delta{Ports: []forward.PortName{portName("shop/web/tcp")}},
		},
		{
			"the same again",
			model.Event{Slice: slice(readyOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11"), readyOn("nb", "10.60.2.12"))},
			forward.Delta{},
		},
		{
			"another order",
			model.Event{Slice: slice(readyOn("nb", "10.60.2.12"), readyOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11"))},
			forward.Delta{},
		},
		{
			"a slice of nobody",
			model.Event{Slice: &model.EndpointSlice{Name: name("shop/lost"), Service: "lost", Family: model.IPv4}},
			forward.Delta{},
		},
		{"the zone of the Node", model.Event{Node: nodeNA()}, forward.Delta{Context: true}},
		{"a Node that is to be removed", model.Event{Node: &model.Node{
			Name: "na", Zone: "z1", Addresses: ips("10.20.0.11", "fd20::11"), PodCIDRs: cidrs("10.60.1.0/24", "fd60:1::/64"), Deleting: true,
		}}, forward.Delta{}},
		{
			"the loser of a conflict goes",
			model.Event{Service: &model.Service{Name: name("shop/other")}, Delete: true},
			forward.Delta{Ports: []forward.PortName{portName("shop/other/tcp")}},
		},
	}
	for _, step := range steps {
		t.Run(step.what, func(t *testing.T) {
			var d model.Dirty
			s.Apply(step.event, &d)
			got := b.Update(s, d, host())
			if diff := cmp.Diff(step.want, got); diff != "" {
				t.Errorf("delta (-want +got):\n%s", diff)
			}
			if got.Empty() != (len(step.want.Ports) == 0 && !step.want.Context) {
				t.Errorf("delta says empty: %v", got.Empty())
			}
		})
	}
}

// TestIncrementalEqualsScratch is the builder's contract: whatever the events were and however they were grouped, the
// table and the findings are those of a fresh build, and a delta names exactly the ports whose value was replaced.
func TestIncrementalEqualsScratch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		family := rapid.SampledFrom([]model.Family{model.IPv4, model.IPv6}).Draw(t, "family")
		cfg := gen.Config(seed, family)
		events := gen.Events(seed, rapid.IntRange(1, 80).Draw(t, "events"))
		s, b := model.NewSnapshot(), forward.NewBuilder(cfg)
		h := gen.Host(seed)
		for len(events) > 0 {
			n := rapid.IntRange(1, min(6, len(events))).Draw(t, "group")
			var dirty model.Dirty
			for _, e := range events[:n] {
				s.Apply(e, &dirty)
			}
			events = events[n:]
			if rapid.IntRange(0, 9).Draw(t, "host changes") == 0 {
				h = gen.Host(rapid.Uint64().Draw(t, "host"))
			}
			before := ports(b.Table())
			delta := b.Update(s, dirty, h)
			checkDelta(t, before, ports(b.Table()), delta)
			checkScratch(t, b, cfg, s, h)
		}
	})
}

func ports(t *forward.Table) map[forward.PortName]*forward.Port {
	m := map[forward.PortName]*forward.Port{}
	for _, n := range t.Names() {
		m[n] = t.Port(n)
	}
	return m
}

// checkDelta compares the addresses of the ports before and after.
func checkDelta(t *rapid.T, before, after map[forward.PortName]*forward.Port, delta forward.Delta) {
	var want []forward.PortName
	for n, p := range after {
		if before[n] != p {
			want = append(want, n)
			if p.Equal(before[n]) {
				t.Errorf("port %s was replaced by an equal one", n)
			}
		}
	}
	for n := range before {
		if after[n] == nil {
			want = append(want, n)
		}
	}
	slices.SortFunc(want, forward.PortName.Compare)
	if diff := cmp.Diff(want, delta.Ports); diff != "" {
		t.Errorf("ports in the delta (-want +got):\n%s", diff)
	}
}

func checkScratch(t *rapid.T, b *forward.Builder, cfg forward.Config, s *model.Snapshot, h forward.Host) {
	want, wantFound := forward.Build(cfg, s, h)
	if !forward.Equal(want, b.Table()) {
		t.Fatalf("table (-scratch +incremental):\n%s", cmp.Diff(trimLines(want.String()), trimLines(b.Table().String())))
	}
	var found []model.Finding
	all := b.Findings()
	for _, object := range slices.Sorted(maps.Keys(all)) {
		found = append(found, all[object]...)
	}
	if diff := cmp.Diff(wantFound, found); diff != "" {
		t.Fatalf("findings (-scratch +incremental):\n%s", diff)
	}
	for n, p := range ports(b.Table()) {
		for _, f := range p.Frontends {
			if got, _ := b.Table().Owner(f.Key(n.Proto)); got != n {
				t.Fatalf("frontend %s:%d of %s is found at %s", f.Addr, f.Port, n, got)
			}
		}
	}
	read, err := forward.Parse(strings.NewReader(b.Table().String()))
	if err != nil {
		t.Fatalf("the table's own text: %v", err)
	}
	if !forward.Equal(read, b.Table()) {
		t.Fatalf("table (-built +read back):\n%s", cmp.Diff(trimLines(b.Table().String()), trimLines(read.String())))
	}
}
