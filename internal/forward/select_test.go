package forward_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// bothPools is a Service that uses both pools, so that what is selected for either shows.
func bothPools() *model.Service {
	return &model.Service{
		Name: name("shop/web"), Type: model.LoadBalancer, ClusterIPs: ips("10.70.1.10"), Ports: tcp80(),
		Ingress: ips("192.0.2.10"), ExternalLocal: true,
	}
}

// pools gives the lines of a port that tell what was selected.
func pools(table *forward.Table, port string) []string {
	var lines []string
	p := table.Port(portName(port))
	if p == nil {
		return nil
	}
	for _, line := range trimLines(p.String()) {
		if w, _, _ := strings.Cut(line, " "); w == "cluster" || w == "local" || w == "serving" {
			lines = append(lines, line)
		}
	}
	return lines
}

func zone(e model.Endpoint, zones ...string) model.Endpoint {
	e.ZoneHints = zones
	return e
}

func onlyFor(e model.Endpoint, nodes ...string) model.Endpoint {
	e.NodeHints = nodes
	return e
}

func TestEndpointSelection(t *testing.T) {
	tests := map[string]struct {
		endpoints []model.Endpoint
		want      []string
	}{
		"ready endpoints are used, those of this node for policy Local": {
			[]model.Endpoint{readyOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11")},
			[]string{"cluster 10.60.1.11:8080(local) 10.60.2.11:8080", "local 10.60.1.11:8080(local)"},
		},
		"pools are ordered by the text of the address": {
			[]model.Endpoint{readyOn("na", "10.60.1.9"), readyOn("na", "10.60.1.11"), readyOn("na", "10.60.1.100")},
			[]string{
				"cluster 10.60.1.100:8080(local) 10.60.1.11:8080(local) 10.60.1.9:8080(local)",
				"local 10.60.1.100:8080(local) 10.60.1.11:8080(local) 10.60.1.9:8080(local)",
			},
		},
		"an endpoint without a node name is never local": {
			[]model.Endpoint{readyOn("", "10.60.1.11")},
			[]string{"cluster 10.60.1.11:8080"},
		},
		"a not ready one is not used but its flows live on": {
			[]model.Endpoint{readyOn("na", "10.60.1.11"), notReadyOn("na", "10.60.1.12")},
			[]string{
				"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)",
				"serving 10.60.1.11:8080 10.60.1.12:8080",
			},
		},
		"only not ready ones mean nothing to use": {
			[]model.Endpoint{notReadyOn("na", "10.60.1.12")},
			[]string{"serving 10.60.1.12:8080"},
		},
		"B118 terminating ones are used when nothing is ready": {
			[]model.Endpoint{terminatingOn("na", "10.60.1.11"), terminatingOn("nb", "10.60.2.11"), goneOn("nb", "10.60.2.12")},
			[]string{"cluster 10.60.1.11:8080(local) 10.60.2.11:8080", "local 10.60.1.11:8080(local)"},
		},
		"B118 a terminating one serves policy Local while ready ones elsewhere serve policy Cluster": {
			[]model.Endpoint{terminatingOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11")},
			[]string{
				"cluster 10.60.2.11:8080", "local 10.60.1.11:8080(local)", "serving 10.60.1.11:8080 10.60.2.11:8080",
			},
		},
		"B118 a terminating one that no longer serves is out": {
			[]model.Endpoint{goneOn("na", "10.60.1.11"), readyOn("nb", "10.60.2.11")},
			[]string{"cluster 10.60.2.11:8080"},
		},
		"a terminating one on another node does not serve policy Local": {
			[]model.Endpoint{terminatingOn("nb", "10.60.2.11")},
			[]string{"cluster 10.60.2.11:8080"},
		},
		"a ready one that terminates, as with publishNotReadyAddresses, counts as ready": {
			[]model.Endpoint{{Addr: ip("10.60.1.11"), Ready: true, Serving: true, Terminating: true, Node: "na"}},
			[]string{"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)"},
		},
		"zone hints on all keep traffic in the zone, but not that of policy Local": {
			[]model.Endpoint{
				zone(readyOn("na", "10.60.1.11"), "z2"), zone(readyOn("nb", "10.60.2.11"), "z3", "z1"),
			},
			[]string{
				"cluster 10.60.2.11:8080", "local 10.60.1.11:8080(local)", "serving 10.60.1.11:8080 10.60.2.11:8080",
			},
		},
		"one endpoint without a zone hint switches them off": {
			[]model.Endpoint{zone(readyOn("na", "10.60.1.11"), "z1"), readyOn("nb", "10.60.2.11")},
			[]string{"cluster 10.60.1.11:8080(local) 10.60.2.11:8080", "local 10.60.1.11:8080(local)"},
		},
		"hints for other zones only are not followed": {
			[]model.Endpoint{zone(readyOn("nb", "10.60.2.11"), "z2"), zone(readyOn("nc", "10.60.3.11"), "z3")},
			[]string{"cluster 10.60.2.11:8080 10.60.3.11:8080"},
		},
		"hints of endpoints that are not ready do not count": {
			[]model.Endpoint{
				zone(readyOn("nb", "10.60.2.11"), "z1"), zone(readyOn("nc", "10.60.3.11"), "z2"),
				notReadyOn("nb", "10.60.2.12"),
			},
			[]string{
				"cluster 10.60.2.11:8080", "serving 10.60.2.11:8080 10.60.2.12:8080 10.60.3.11:8080",
			},
		},
		"node hints come before zone hints": {
			[]model.Endpoint{
				zone(onlyFor(readyOn("na", "10.60.1.11"), "na"), "z1"), zone(onlyFor(readyOn("nb", "10.60.2.11"), "nb"), "z1"),
			},
			[]string{
				"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)", "serving 10.60.1.11:8080 10.60.2.11:8080",
			},
		},
		"node hints for others only leave it to the zone hints": {
			[]model.Endpoint{
				zone(onlyFor(readyOn("nb", "10.60.2.11"), "nb"), "z1"), zone(onlyFor(readyOn("nc", "10.60.3.11"), "nc"), "z2"),
			},
			[]string{"cluster 10.60.2.11:8080", "serving 10.60.2.11:8080 10.60.3.11:8080"},
		},
		"one endpoint without a node hint switches node hints off": {
			[]model.Endpoint{onlyFor(readyOn("na", "10.60.1.11"), "na"), readyOn("nb", "10.60.2.11")},
			[]string{"cluster 10.60.1.11:8080(local) 10.60.2.11:8080", "local 10.60.1.11:8080(local)"},
		},
		"hints do not matter to the terminating ones": {
			[]model.Endpoint{
				zone(terminatingOn("nb", "10.60.2.11"), "z1"), zone(terminatingOn("nc", "10.60.3.11"), "z2"),
			},
			[]string{"cluster 10.60.2.11:8080 10.60.3.11:8080"},
		},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			got := pools(build(config(), bothPools(), slice(tc.endpoints...), nodeNA()), "shop/web/tcp")
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("pools (-want +got):\n%s", diff)
			}
		})
	}
}

func TestZoneHintsWithoutAZoneOfOurOwnAreNotFollowed(t *testing.T) {
	table := build(config(), bothPools(), slice(
		zone(readyOn("nb", "10.60.2.11"), "z1"), zone(readyOn("nc", "10.60.3.11"), "z2")))
	if diff := cmp.Diff([]string{"cluster 10.60.2.11:8080 10.60.3.11:8080"}, pools(table, "shop/web/tcp")); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
}

func TestWithoutANodeNameNothingIsLocal(t *testing.T) {
	cfg := config()
	cfg.NodeName = ""
	table := build(cfg, bothPools(), slice(readyOn("", "10.60.1.11"), readyOn("na", "10.60.1.12")))
	if diff := cmp.Diff([]string{"cluster 10.60.1.11:8080 10.60.1.12:8080"}, pools(table, "shop/web/tcp")); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
}

func TestB136AnyReadyEntryWinsWhateverTheOrderOfSlices(t *testing.T) {
	tests := map[string]struct {
		entries []model.Endpoint // one a slice, in the order of the slices' names
		want    []string
	}{
		"ready and not ready":                      {[]model.Endpoint{readyOn("na", "10.60.1.11"), notReadyOn("na", "10.60.1.11")}, []string{"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)"}},
		"not ready and ready":                      {[]model.Endpoint{notReadyOn("na", "10.60.1.11"), readyOn("na", "10.60.1.11")}, []string{"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)"}},
		"ready and terminating":                    {[]model.Endpoint{terminatingOn("na", "10.60.1.11"), readyOn("na", "10.60.1.11")}, []string{"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)"}},
		"of two not ready ones the serving counts": {[]model.Endpoint{goneOn("na", "10.60.1.11"), terminatingOn("na", "10.60.1.11")}, []string{"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)"}},
		"of two serving ones the one that stays":   {[]model.Endpoint{terminatingOn("na", "10.60.1.11"), notReadyOn("na", "10.60.1.11")}, []string{"serving 10.60.1.11:8080"}},
		"of two equal ones the first slice's":      {[]model.Endpoint{readyOn("nb", "10.60.1.11"), readyOn("na", "10.60.1.11")}, []string{"cluster 10.60.1.11:8080"}},
		"terminating for good against not serving": {[]model.Endpoint{goneOn("na", "10.60.1.11"), {Addr: ip("10.60.1.11"), Node: "na"}}, nil},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			objects := []any{bothPools()}
			for i, e := range tc.entries {
				part := slice(e)
				part.Name.Name = fmt.Sprintf("web-%d", i)
				objects = append(objects, part)
			}
			for range 4 {
				if diff := cmp.Diff(tc.want, pools(build(config(), objects...), "shop/web/tcp")); diff != "" {
					t.Fatalf("pools (-want +got):\n%s", diff)
				}
				rand.Shuffle(len(objects), func(i, j int) { objects[i], objects[j] = objects[j], objects[i] })
			}
		})
	}
}

func TestB140ASliceOfAnotherKindDoesNotMatter(t *testing.T) {
	fqdn := slice()
	fqdn.Name, fqdn.Family = name("shop/web-fqdn"), 0
	v6 := slice(readyOn("na", "fd60:1::11"))
	v6.Name, v6.Family = name("shop/web-v6"), model.IPv6
	table, found := forward.Build(config(), snapshot(bothPools(), fqdn, v6, slice(readyOn("nb", "10.60.2.11"))), host())
	wantFindings(t, found)
	if diff := cmp.Diff([]string{"cluster 10.60.2.11:8080"}, pools(table, "shop/web/tcp")); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
}

func TestB142RepackingMoreThanAThousandEndpointsLosesAndDoublesNone(t *testing.T) {
	var all []model.Endpoint
	for i := range 1207 {
		all = append(all, readyOn("nb", netip.AddrFrom4([4]byte{10, 60, byte(2 + i/250), byte(1 + i%250)}).String()))
	}
	parts := func(size int) []*model.EndpointSlice {
		var list []*model.EndpointSlice
		for chunk := range slices.Chunk(all, size) {
			part := slice(chunk...)
			part.Name.Name = fmt.Sprintf("web-%d-%d", size, len(list))
			list = append(list, part)
		}
		return list
	}
	s := snapshot(bothPools())
	b := forward.NewBuilder(config())
	apply := func(e model.Event) {
		var d model.Dirty
		s.Apply(e, &d)
		b.Update(s, d, host())
	}
	for _, part := range parts(100) {
		apply(model.Event{Slice: part})
	}
	var events []model.Event
	for _, part := range parts(81) {
		events = append(events, model.Event{Slice: part})
	}
	rng := rand.New(rand.NewPCG(1, 1))
	rng.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
	for _, part := range parts(100) {
		events = append(events, model.Event{Slice: part, Delete: true})
	}
	for _, e := range events {
		apply(e)
		if n := len(b.Table().Port(portName("shop/web/tcp")).Cluster); n != 1207 {
			t.Fatalf("%d endpoints while slices are repacked, want 1207", n)
		}
	}
}

func TestB143SlicesServeOnlyThePortsTheyName(t *testing.T) {
	svc := &model.Service{Name: name("shop/web"), ClusterIPs: ips("10.70.1.10"), Ports: []model.ServicePort{
		{Name: "web", Protocol: model.TCP, Port: 80}, {Name: "adm", Protocol: model.TCP, Port: 81},
	}}
	web, adm := slice(readyOn("nb", "10.60.2.11")), slice(readyOn("nb", "10.60.2.12"))
	web.Ports = []model.SlicePort{{Name: "web", Protocol: model.TCP, Port: 3000}}
	adm.Name, adm.Ports = name("shop/web-2"), []model.SlicePort{{Name: "adm", Protocol: model.TCP, Port: 3000}}
	table := build(config(), svc, web, adm)
	wantOutcomes(t, table, map[string]string{
		"10.60.1.21 10.70.1.10:80": "forward 10.60.2.11:3000 snat=no",
		"10.60.1.21 10.70.1.10:81": "forward 10.60.2.12:3000 snat=no",
	})
	wantOutcomes(t, build(config(), svc, web), map[string]string{
		"10.60.1.21 10.70.1.10:80": "forward 10.60.2.11:3000 snat=no",
		"10.60.1.21 10.70.1.10:81": "reject reason=NoEndpoints",
	})
}

func TestB144EachEndpointIsReachedOnItsSlicesPort(t *testing.T) {
	other := slice(readyOn("nb", "10.60.2.11"))
	other.Name, other.Ports = name("shop/web-2"), []model.SlicePort{{Protocol: model.TCP, Port: 9099}}
	wantOutcomes(t, build(config(), bothPools(), slice(readyOn("na", "10.60.1.11")), other), map[string]string{
		"10.60.1.21 10.70.1.10:80": "forward 10.60.1.11:8080 10.60.2.11:9099 snat=no",
	})
}

func TestASlicePortOfAnotherProtocolIsAnotherPort(t *testing.T) {
	udp := slice(readyOn("nb", "10.60.2.11"))
	udp.Ports = []model.SlicePort{{Protocol: model.UDP, Port: 8080}}
	wantOutcomes(t, build(config(), bothPools(), udp), map[string]string{
		"10.60.1.21 10.70.1.10:80": "reject reason=NoEndpoints",
	})
}

func TestB057EndpointsOnLoopbackOrLinkLocalAddressesAreSkippedAndReported(t *testing.T) {
	table, found := forward.Build(config(), snapshot(bothPools(), slice(
		readyOn("na", "127.0.0.1"), readyOn("na", "169.254.169.254"), readyOn("na", "0.0.0.0"), readyOn("na", "224.0.0.1"),
		readyOn("na", "127.8.8.8"), readyOn("na", "127.8.8.9"), readyOn("na", "10.60.1.11"))), host())
	if diff := cmp.Diff([]string{"cluster 10.60.1.11:8080(local)", "local 10.60.1.11:8080(local)"},
		pools(table, "shop/web/tcp")); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
	wantFindings(t, found, "EndpointSlice shop/web-1: UnusableEndpoint")
	if !strings.Contains(found[0].Message, "169.254.169.254") {
		t.Errorf("message %q does not name the addresses", found[0].Message)
	}

	svc := bothPools()
	svc.ClusterIPs = ips("fd70::10")
	v6 := slice(readyOn("na", "::1"), readyOn("na", "fe80::1"), readyOn("na", "ff02::1"), readyOn("na", "::"))
	v6.Family = model.IPv6
	table, found = forward.Build(config6(), snapshot(svc, v6), host())
	if got := pools(table, "shop/web/tcp"); got != nil {
		t.Errorf("pools %v, want none", got)
	}
	wantFindings(t, found, "EndpointSlice shop/web-1: UnusableEndpoint", "Service shop/web: WrongFamilyAddress")
}

func TestB118HealthCountsReadyAddressesOfThisNodeOverAllPorts(t *testing.T) {
	svc := bothPools()
	svc.HealthCheckNodePort = 31999
	svc.Ports = []model.ServicePort{
		{Name: "web", Protocol: model.TCP, Port: 80}, {Name: "adm", Protocol: model.TCP, Port: 81},
	}
	part := slice(readyOn("na", "10.60.1.11"), readyOn("na", "10.60.1.12"), readyOn("nb", "10.60.2.11"),
		terminatingOn("na", "10.60.1.13"), notReadyOn("na", "10.60.1.14"), readyOn("na", "127.0.0.1"))
	part.Ports = []model.SlicePort{
		{Name: "web", Protocol: model.TCP, Port: 8080}, {Name: "adm", Protocol: model.TCP, Port: 8081},
	}
	stranger := slice(readyOn("na", "10.60.1.15"))
	stranger.Name = name("shop/web-2")
	again := slice(readyOn("na", "10.60.1.11"))
	again.Name, again.Ports = name("shop/web-3"), part.Ports
	table := build(config(), svc, part, stranger, again)
	first, second := table.Port(portName("shop/web:adm/tcp")), table.Port(portName("shop/web:web/tcp"))
	if first.HealthCheckNodePort != 31999 || first.LocalReady != 2 {
		t.Errorf("first port answers %d on %d, want 2 on 31999", first.LocalReady, first.HealthCheckNodePort)
	}
	if second.HealthCheckNodePort != 0 || second.LocalReady != 0 {
		t.Errorf("second port has %d on %d, want nothing", second.LocalReady, second.HealthCheckNodePort)
	}
	cfg := config()
	cfg.NodeName = ""
	if p := build(cfg, svc, part).Port(portName("shop/web:adm/tcp")); p.LocalReady != 0 {
		t.Errorf("%d local endpoints without a node name, want 0", p.LocalReady)
	}
}

func TestEqualPoolsShareTheirMemory(t *testing.T) {
	p := build(config(), bothPools(), slice(readyOn("na", "10.60.1.11"), readyOn("na", "10.60.1.12"))).
		Port(portName("shop/web/tcp"))
	if &p.Cluster[0] != &p.Local[0] {
		t.Error("pools with the same endpoints are two slices")
	}
}
