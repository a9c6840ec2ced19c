package model_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestProtocolsReadBackAndRefuseOthers(t *testing.T) {
	for text, want := range map[string]model.Protocol{
		"": model.TCP, "TCP": model.TCP, "tcp": model.TCP, "UDP": model.UDP, "udp": model.UDP, "SCTP": model.SCTP, "sctp": model.SCTP,
	} {
		if got, err := model.ParseProtocol(text); err != nil || got != want {
			t.Errorf("%q reads as %s, %v; want %s", text, got, err, want)
		}
	}
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		if got, err := model.ParseProtocol(p.String()); err != nil || got != p {
			t.Errorf("%s reads back as %s, %v", p, got, err)
		}
	}
	if _, err := model.ParseProtocol("Tcp"); err == nil || err.Error() != `protocol "Tcp" is not TCP, UDP or SCTP` {
		t.Errorf("Tcp gives error %v", err)
	}
}

func TestWords(t *testing.T) {
	got := []string{
		model.Protocol(1).String(), model.IPv4.String(), model.IPv6.String(),
		model.ClusterIP.String(), model.NodePort.String(), model.LoadBalancer.String(), model.ExternalName.String(),
		model.ServiceType(9).String(), model.Warning.String(), model.Error.String(),
		model.Finding{
			Severity: model.Error, Kind: "Service", Object: "shop/web", Reason: "FrontendConflict", Message: "taken",
		}.String(),
	}
	want := []string{
		"protocol-1", "IPv4", "IPv6", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "ServiceType(9)",
		"warning", "error", "error: Service shop/web: taken (FrontendConflict)",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("words (-want +got):\n%s", diff)
	}
}

func TestAnIPv4AddressInIPv6NotationIsIPv4(t *testing.T) {
	for addr, want := range map[string]model.Family{
		"10.0.0.1": model.IPv4, "::ffff:10.0.0.1": model.IPv4, "fd00::1": model.IPv6, "::10.0.0.1": model.IPv6,
	} {
		if got := model.FamilyOf(netip.MustParseAddr(addr)); got != want {
			t.Errorf("family of %s is %s, want %s", addr, got, want)
		}
	}
}

func TestNamesSortByNamespaceFirst(t *testing.T) {
	names := []model.Name{{"shop", "web"}, {"ops", "web"}, {"shop", "db"}}
	slices.SortFunc(names, model.Name.Compare)
	if diff := cmp.Diff([]model.Name{{"ops", "web"}, {"shop", "db"}, {"shop", "web"}}, names); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func web() *model.Service {
	return &model.Service{
		Name: model.Name{Namespace: "shop", Name: "web"}, Created: time.Unix(1700000000, 0), Type: model.LoadBalancer,
		ClusterIPs:   []netip.Addr{netip.MustParseAddr("10.70.1.10")},
		Ports:        []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80, NodePort: 30080}},
		ExternalIPs:  []netip.Addr{netip.MustParseAddr("203.0.113.9")},
		Ingress:      []netip.Addr{netip.MustParseAddr("192.0.2.10")},
		SourceRanges: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		Affinity:     time.Hour, HealthCheckNodePort: 31999, Annotations: map[string]string{"turnout.dev/proxy-mode": "ipvs"},
	}
}

func part() *model.EndpointSlice {
	return &model.EndpointSlice{
		Name: model.Name{Namespace: "shop", Name: "web-1"}, Service: "web", Family: model.IPv4,
		Ports: []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		Endpoints: []model.Endpoint{{
			Addr: netip.MustParseAddr("10.60.1.11"), Ready: true, Serving: true, Node: "na",
			ZoneHints: []string{"z1"}, NodeHints: []string{"na"},
		}},
	}
}

func node() *model.Node {
	return &model.Node{
		Name: "na", Zone: "z1", Addresses: []netip.Addr{netip.MustParseAddr("10.20.0.11")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.60.1.0/24")},
	}
}

func TestEqualSeesEveryFieldOfAService(t *testing.T) {
	for field, change := range map[string]func(*model.Service){
		"Name":                func(s *model.Service) { s.Name.Name = "db" },
		"Created":             func(s *model.Service) { s.Created = s.Created.Add(time.Second) },
		"Type":                func(s *model.Service) { s.Type = model.NodePort },
		"ClusterIPs":          func(s *model.Service) { s.ClusterIPs = nil },
		"Headless":            func(s *model.Service) { s.Headless = true },
		"Ports":               func(s *model.Service) { s.Ports[0].NodePort = 0 },
		"ExternalIPs":         func(s *model.Service) { s.ExternalIPs = nil },
		"Ingress":             func(s *model.Service) { s.Ingress = nil },
		"SourceRanges":        func(s *model.Service) { s.SourceRanges = nil },
		"BadSourceRanges":     func(s *model.Service) { s.BadSourceRanges = 1 },
		"Affinity":            func(s *model.Service) { s.Affinity = 0 },
		"ExternalLocal":       func(s *model.Service) { s.ExternalLocal = true },
		"InternalLocal":       func(s *model.Service) { s.InternalLocal = true },
		"HealthCheckNodePort": func(s *model.Service) { s.HealthCheckNodePort = 0 },
		"Annotations":         func(s *model.Service) { s.Annotations = nil },
	} {
		changed := web()
		change(changed)
		if web().Equal(changed) {
			t.Errorf("a change of %s is not seen", field)
		}
	}
	var none *model.Service
	if !web().Equal(web()) || none.Equal(web()) || web().Equal(none) || !none.Equal(none) {
		t.Error("equal Services are not equal, or nil equals something else")
	}
	utc := web()
	utc.Created = utc.Created.UTC()
	if !web().Equal(utc) {
		t.Error("the same moment in another time zone is another one")
	}
}

func TestEqualSeesEveryFieldOfASlice(t *testing.T) {
	for field, change := range map[string]func(*model.EndpointSlice){
		"Name":        func(s *model.EndpointSlice) { s.Name.Name = "web-2" },
		"Service":     func(s *model.EndpointSlice) { s.Service = "db" },
		"Family":      func(s *model.EndpointSlice) { s.Family = model.IPv6 },
		"Ports":       func(s *model.EndpointSlice) { s.Ports[0].Port++ },
		"Endpoints":   func(s *model.EndpointSlice) { s.Endpoints = nil },
		"Addr":        func(s *model.EndpointSlice) { s.Endpoints[0].Addr = s.Endpoints[0].Addr.Next() },
		"Ready":       func(s *model.EndpointSlice) { s.Endpoints[0].Ready = false },
		"Serving":     func(s *model.EndpointSlice) { s.Endpoints[0].Serving = false },
		"Terminating": func(s *model.EndpointSlice) { s.Endpoints[0].Terminating = true },
		"Node":        func(s *model.EndpointSlice) { s.Endpoints[0].Node = "nb" },
		"ZoneHints":   func(s *model.EndpointSlice) { s.Endpoints[0].ZoneHints = nil },
		"NodeHints":   func(s *model.EndpointSlice) { s.Endpoints[0].NodeHints = nil },
	} {
		changed := part()
		change(changed)
		if part().Equal(changed) {
			t.Errorf("a change of %s is not seen", field)
		}
	}
	var none *model.EndpointSlice
	later := part()
	later.Trigger = time.Unix(1700000001, 0)
	if !part().Equal(later) || none.Equal(part()) || part().Equal(none) || !none.Equal(none) {
		t.Error("slices that differ in their trigger time only are not equal, or nil equals something else")
	}
}

func TestEqualSeesEveryFieldOfANode(t *testing.T) {
	for field, change := range map[string]func(*model.Node){
		"Name":      func(n *model.Node) { n.Name = "nb" },
		"Zone":      func(n *model.Node) { n.Zone = "z2" },
		"Addresses": func(n *model.Node) { n.Addresses = nil },
		"PodCIDRs":  func(n *model.Node) { n.PodCIDRs = nil },
		"Deleting":  func(n *model.Node) { n.Deleting = true },
	} {
		changed := node()
		change(changed)
		if node().Equal(changed) {
			t.Errorf("a change of %s is not seen", field)
		}
	}
	var none *model.Node
	if !node().Equal(node()) || none.Equal(node()) || node().Equal(none) || !none.Equal(none) {
		t.Error("equal Nodes are not equal, or nil equals something else")
	}
}

func TestApplyMarksWhatAnEventChangesAndNothingElse(t *testing.T) {
	shopWeb := model.Name{Namespace: "shop", Name: "web"}
	shopDB := model.Name{Namespace: "shop", Name: "db"}
	marks := func(names ...model.Name) model.Dirty {
		var d model.Dirty
		for _, n := range names {
			d.Add(n)
		}
		return d
	}
	moved := part()
	moved.Service = "db"
	fuller := part()
	fuller.Endpoints = append(fuller.Endpoints, model.Endpoint{Addr: netip.MustParseAddr("10.60.1.12")})
	second := part()
	second.Name.Name, second.Service = "web-2", "db"
	cheaper := web()
	cheaper.Affinity = 0
	s := model.NewSnapshot()
	for _, step := range []struct {
		what   string
		event  model.Event
		want   model.Dirty
		slices map[model.Name]int // slices known per Service afterwards
	}{
		{"nothing", model.Event{}, marks(), nil},
		{"synced", model.Event{Synced: true}, marks(), nil},
		{"findings about a file", model.Event{File: "a.yaml", Findings: []model.Finding{{}}}, marks(), nil},
		{"an unknown Service goes", model.Event{Service: web(), Delete: true}, marks(), nil},
		{"an unknown slice goes", model.Event{Slice: part(), Delete: true}, marks(), nil},
		{"a Service", model.Event{Service: web()}, marks(shopWeb), nil},
		{"the same again", model.Event{Service: web()}, marks(), nil},
		{"another state of it", model.Event{Service: cheaper}, marks(shopWeb), nil},
		{"a slice", model.Event{Slice: part()}, marks(shopWeb), map[model.Name]int{shopWeb: 1}},
		{"an equal slice", model.Event{Slice: part()}, marks(), map[model.Name]int{shopWeb: 1}},
		{"one with an endpoint more", model.Event{Slice: fuller}, marks(shopWeb), map[model.Name]int{shopWeb: 1}},
		{"a slice of another Service", model.Event{Slice: second}, marks(shopDB), map[model.Name]int{shopWeb: 1, shopDB: 1}},
		{"a slice that changes hands", model.Event{Slice: moved}, marks(shopWeb, shopDB), map[model.Name]int{shopDB: 2}},
		{
			"a slice that goes, by its name alone",
			model.Event{Slice: &model.EndpointSlice{Name: part().Name}, Delete: true},
			marks(shopDB),
			map[model.Name]int{shopDB: 1},
		},
		{"the last slice goes", model.Event{Slice: second, Delete: true}, marks(shopDB), nil},
		{"the Service goes", model.Event{Service: &model.Service{Name: shopWeb}, Delete: true}, marks(shopWeb), nil},
		{"the Node", model.Event{Node: node()}, model.Dirty{Node: true}, nil},
		{"the same Node", model.Event{Node: node()}, marks(), nil},
		{"the Node goes", model.Event{Node: node(), Delete: true}, model.Dirty{Node: true}, nil},
		{"and goes again", model.Event{Node: node(), Delete: true}, marks(), nil},
	} {
		t.Run(step.what, func(t *testing.T) {
			var got model.Dirty
			s.Apply(step.event, &got)
			if diff := cmp.Diff(step.want, got); diff != "" {
				t.Errorf("marks (-want +got):\n%s", diff)
			}
			if got.Empty() != (len(step.want.Services) == 0 && !step.want.Node) {
				t.Errorf("dirty set says empty: %v", got.Empty())
			}
			var counts map[model.Name]int
			for owner, parts := range s.Slices {
				if counts == nil {
					counts = map[model.Name]int{}
				}
				counts[owner] = len(parts)
			}
			if diff := cmp.Diff(step.slices, counts); diff != "" {
				t.Errorf("slices (-want +got):\n%s", diff)
			}
		})
	}
	if len(s.Services) != 0 || s.Node != nil {
		t.Errorf("snapshot keeps %v and %v", s.Services, s.Node)
	}
}

func TestApplyGathersTheMarksOfSeveralEvents(t *testing.T) {
	s := model.NewSnapshot()
	var d model.Dirty
	s.Apply(model.Event{Service: web()}, &d)
	s.Apply(model.Event{Node: node()}, &d)
	if len(d.Services) != 1 || !d.Node || d.Empty() {
		t.Errorf("marks %v, want shop/web and the Node", d)
	}
}
