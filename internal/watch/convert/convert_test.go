package convert

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/turnout-proxy/turnout/internal/model"
)

var netipValues = cmp.Options{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()}

// said gives each finding as "Reason: message".
func said(list []model.Finding) []string {
	var out []string
	for _, f := range list {
		out = append(out, f.Reason+": "+f.Message)
	}
	return out
}

// matches tells whether each finding begins with the wanted text.
func matches(t *testing.T, got []model.Finding, want []string) {
	t.Helper()
	lines := said(got)
	for i := range max(len(lines), len(want)) {
		if i >= len(lines) || i >= len(want) || !strings.HasPrefix(lines[i], want[i]) {
			t.Fatalf("findings do not begin as wanted (-want +got):\n%s", cmp.Diff(want, lines))
		}
	}
	for _, f := range got {
		if f.Kind == "" || f.Object == "" || f.Severity == 0 || strings.ContainsAny(f.Message, "\n\r") {
			t.Errorf("finding %+v is incomplete or has several lines", f)
		}
	}
}

func TestAFullServiceKeepsAllThatForwardingNeeds(t *testing.T) {
	created := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	in := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web", CreationTimestamp: metav1.NewTime(created),
			Annotations: map[string]string{"turnout.dev/proxy-mode": "ipvs", "other.dev/x": "y"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00::1"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			Ports: []corev1.ServicePort{
				{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080},
				{Name: "dns", Protocol: "UDP", Port: 53},
				{Name: "dns", Protocol: "TCP", Port: 53},
				{Name: "sig", Protocol: "SCTP", Port: 65535},
			},
			ExternalIPs:              []string{"203.0.113.9", " ", "010.001.000.009", "203.0.113.9"},
			LoadBalancerSourceRanges: []string{" 198.51.100.7/24 ", "fd00::/64", "010.0.0.0/08"},
			SessionAffinity:          "ClientIP", ExternalTrafficPolicy: "Local",
			InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyLocal), HealthCheckNodePort: 31000,
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
			{IP: "192.0.2.1"},
			{Hostname: "lb.example"},
			{IP: "192.0.2.2", IPMode: new(corev1.LoadBalancerIPModeProxy)},
			{IP: "::ffff:192.0.2.3", IPMode: new(corev1.LoadBalancerIPModeVIP)},
		}}},
	}
	want := &model.Service{
		Name: model.Name{Namespace: "shop", Name: "web"}, Created: created, Type: model.LoadBalancer,
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")},
		Ports: []model.ServicePort{
			{Name: "http", Protocol: model.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: model.UDP, Port: 53},
			{Name: "dns", Protocol: model.TCP, Port: 53},
			{Name: "sig", Protocol: model.SCTP, Port: 65535},
		},
		ExternalIPs: []netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("10.1.0.9")},
		Ingress:     []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.3")},
		SourceRanges: []netip.Prefix{
			netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("fd00::/64"),
			netip.MustParsePrefix("10.0.0.0/8"),
		},
		Affinity: 3 * time.Hour, ExternalLocal: true, InternalLocal: true, HealthCheckNodePort: 31000,
		Annotations: map[string]string{"turnout.dev/proxy-mode": "ipvs"},
	}
	got, findings := Service(in)
	if diff := cmp.Diff(want, got, netipValues); diff != "" {
		t.Errorf("service (-want +got):\n%s", diff)
	}
	matches(t, findings, nil)
}

func TestABadPartOfAServiceIsLeftOutAndNamed(t *testing.T) {
	port80 := []model.ServicePort{{Protocol: model.TCP, Port: 80}}
	ip := []netip.Addr{netip.MustParseAddr("10.96.0.1")}
	tests := map[string]struct {
		change   func(*corev1.ServiceSpec)
		want     model.Service // without name
		findings []string
	}{
		"port 0": {
			func(s *corev1.ServiceSpec) { s.Ports = append([]corev1.ServicePort{{Name: "zero"}}, s.Ports...) },
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{"InvalidPort: spec.ports[0].port: 0 is not in 1..65535"},
		},
		"port above the range and a negative node port": {
			func(s *corev1.ServiceSpec) {
				s.Ports[0].NodePort = -1
				s.Ports = append(s.Ports, corev1.ServicePort{Name: "big", Port: 65536})
			},
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{"InvalidPort: spec.ports[0].nodePort: -1", "InvalidPort: spec.ports[1].port: 65536"},
		},
		"unknown protocol": {
			func(s *corev1.ServiceSpec) {
				s.Ports = append(s.Ports, corev1.ServicePort{Name: "q", Port: 1, Protocol: "QUIC"})
			},
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{`InvalidProtocol: spec.ports[1].protocol: "QUIC"`},
		},
		"second port of the same name": {
			func(s *corev1.ServiceSpec) { s.Ports = append(s.Ports, corev1.ServicePort{Port: 81}) },
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{"DuplicatePort: spec.ports[1]: another port"},
		},
		"port name that could break a rule": {
			func(s *corev1.ServiceSpec) { s.Ports = append(s.Ports, corev1.ServicePort{Name: "a\nb", Port: 81}) },
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{`InvalidName: spec.ports[1].name: "a\nb"`},
		},
		"unparsable cluster IP": {
			func(s *corev1.ServiceSpec) { s.ClusterIP = "10.96.0" },
			model.Service{Ports: port80},
			[]string{`InvalidIP: spec.clusterIP[0]: "10.96.0"`},
		},
		"no cluster IP": {
			func(s *corev1.ServiceSpec) { s.ClusterIP = "" },
			model.Service{Ports: port80},
			[]string{"NoClusterIP: spec.clusterIP is not set"},
		},
		"two cluster IPs of one family": {
			func(s *corev1.ServiceSpec) { s.ClusterIPs = []string{"10.96.0.1", "10.96.0.2"} },
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{"WrongFamily: spec.clusterIPs: 10.96.0.2 is a second IPv4 address"},
		},
		"older and newer cluster IP field differ": {
			func(s *corev1.ServiceSpec) { s.ClusterIP, s.ClusterIPs = "10.96.0.2", []string{"10.96.0.1"} },
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{`InvalidValue: spec.clusterIP "10.96.0.2" differs`},
		},
		"headless": {
			func(s *corev1.ServiceSpec) { s.ClusterIP = "None" },
			model.Service{Ports: port80, Headless: true},
			nil,
		},
		"external name": {
			func(s *corev1.ServiceSpec) { s.ClusterIP, s.Type = "", "ExternalName" },
			model.Service{Ports: port80, Type: model.ExternalName},
			nil,
		},
		"unknown type, policies and affinity": {
			func(s *corev1.ServiceSpec) {
				s.Type, s.ExternalTrafficPolicy, s.SessionAffinity = "Magic", "Near", "Cookie"
				s.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicy("Far"))
			},
			model.Service{ClusterIPs: ip, Ports: port80},
			[]string{
				`InvalidValue: spec.type: "Magic"`, `InvalidValue: spec.sessionAffinity: "Cookie"`,
				`InvalidValue: spec.externalTrafficPolicy: "Near"`, `InvalidValue: spec.internalTrafficPolicy: "Far"`,
			},
		},
		"affinity timeout out of range": {
			func(s *corev1.ServiceSpec) {
				s.SessionAffinity = "ClientIP"
				s.SessionAffinityConfig = &corev1.SessionAffinityConfig{
					ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(86401))},
				}
			},
			model.Service{ClusterIPs: ip, Ports: port80, Affinity: 3 * time.Hour},
			[]string{"InvalidValue: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401"},
		},
		"bad source ranges are counted": {
			func(s *corev1.ServiceSpec) {
				s.LoadBalancerSourceRanges = []string{"10.0.0.0", "10.0.0.0/33", "::ffff:10.0.0.0/95", "::ffff:10.0.0.0/104"}
			},
			model.Service{
				ClusterIPs: ip, Ports: port80, BadSourceRanges: 3,
				SourceRanges: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			},
			[]string{
				`InvalidCIDR: spec.loadBalancerSourceRanges[0]: "10.0.0.0"`,
				`InvalidCIDR: spec.loadBalancerSourceRanges[1]: "10.0.0.0/33"`,
				"InvalidCIDR: spec.loadBalancerSourceRanges[2]",
			},
		},
		"external IP with a zone, and a flood of bad ones": {
			func(s *corev1.ServiceSpec) { s.ExternalIPs = strings.Fields("fe80::1%eth0 b c d e f g 203.0.113.1") },
			model.Service{ClusterIPs: ip, Ports: port80, ExternalIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1")}},
			[]string{
				`InvalidIP: spec.externalIPs[0]: "fe80::1%eth0"`,
				"InvalidIP: spec.externalIPs[1]", "InvalidIP: spec.externalIPs[2]",
				"InvalidIP: spec.externalIPs[3]", "InvalidIP: spec.externalIPs[4]", "InvalidIP: 2 more of this kind",
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			in := &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
				Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}},
			}
			tc.change(&in.Spec)
			got, findings := Service(in)
			tc.want.Name = model.Name{Namespace: "shop", Name: "web"}
			if diff := cmp.Diff(&tc.want, got, netipValues); diff != "" {
				t.Errorf("service (-want +got):\n%s", diff)
			}
			matches(t, findings, tc.findings)
		})
	}
}

func TestNamesUpToTheAPIsLimitAreUsed(t *testing.T) {
	long := strings.Repeat("a", 253)
	s, findings := Service(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: long}, Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1"},
	})
	if s == nil || s.Name.Name != long {
		t.Errorf("service %v, want one with the long name", s)
	}
	matches(t, findings, []string{"InvalidName: metadata.name has 253 characters"})
	sl, findings := EndpointSlice(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: long,
			Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
		},
		AddressType: "IPv4",
	})
	if sl == nil || sl.Name.Name != long {
		t.Errorf("slice %v, want one with the long name", sl)
	}
	matches(t, findings, nil)
	for _, bad := range []string{"", long + "a", "Web", "-web", "web.", "we b", "wéb"} {
		s, findings := Service(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: bad}})
		if s != nil {
			t.Errorf("service named %q was used", bad)
		}
		matches(t, findings, []string{"InvalidName: metadata.name: "})
	}
}

func TestAFullSliceKeepsAllThatForwardingNeeds(t *testing.T) {
	in := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web-abc", Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05.000000006Z"},
		},
		AddressType: "IPv6",
		Ports: []discoveryv1.EndpointPort{
			{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))},
			{Port: new(int32(1))},
		},
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"fd00::1", "fd00::2"}},
			{
				Addresses: []string{"FD00:0::3"}, NodeName: new("n1"), Zone: new("z9"),
				Conditions: discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)},
				Hints: &discoveryv1.EndpointHints{
					ForZones: []discoveryv1.ForZone{
						{Name: "z1"},
						{Name: "z2"},
					}, ForNodes: []discoveryv1.ForNode{{Name: "n1"}},
				},
			},
			{Addresses: []string{"fd00::4"}, Conditions: discoveryv1.EndpointConditions{Serving: new(false)}},
		},
	}
	want := &model.EndpointSlice{
		Name: model.Name{Namespace: "shop", Name: "web-abc"}, Service: "web", Family: model.IPv6,
		Ports: []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}, {Protocol: model.TCP, Port: 1}},
		Endpoints: []model.Endpoint{
			{Addr: netip.MustParseAddr("fd00::1"), Ready: true, Serving: true},
			{
				Addr: netip.MustParseAddr("fd00::3"), Serving: true, Terminating: true, Node: "n1", Zone: "z9",
				ZoneHints: []string{"z1", "z2"}, NodeHints: []string{"n1"},
			},
			{Addr: netip.MustParseAddr("fd00::4"), Ready: true},
		},
		Trigger: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
	}
	got, findings := EndpointSlice(in)
	if diff := cmp.Diff(want, got, netipValues); diff != "" {
		t.Errorf("slice (-want +got):\n%s", diff)
	}
	matches(t, findings, nil)
}

func TestABadPartOfASliceIsLeftOutAndNamed(t *testing.T) {
	good := discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}}
	tests := map[string]struct {
		change   func(*discoveryv1.EndpointSlice)
		want     string // the endpoints and ports that are used; empty for no slice at all
		findings []string
	}{
		"IPv6 address in an IPv4 slice": {
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "fd00::1" },
			"[10.0.0.1] [8080/tcp]",
			[]string{"WrongFamily: endpoints[0].addresses[0]: fd00::1 is not an IPv4 address"},
		},
		"mapped and zero-padded addresses are IPv4": {
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "::ffff:010.0.0.002" },
			"[10.0.0.2 10.0.0.1] [8080/tcp]", nil,
		},
		"no address": {
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses = nil },
			"[10.0.0.1] [8080/tcp]",
			[]string{"NoAddress: endpoints[0].addresses is empty"},
		},
		"no IP address": {
			func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "10.0.0.256" },
			"[10.0.0.1] [8080/tcp]",
			[]string{`InvalidIP: endpoints[0].addresses[0]: "10.0.0.256"`},
		},
		"addresses that lead back to the node or to no host": {
			func(s *discoveryv1.EndpointSlice) {
				s.Endpoints = nil
				for _, a := range []string{"127.0.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "255.255.255.255"} {
					s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
				}
				s.Endpoints = append(s.Endpoints, good)
			},
			"[10.0.0.1] [8080/tcp]",
			[]string{
				"ForbiddenAddress: endpoints[0].addresses[0]: 127.0.0.1 is a loopback address",
				"ForbiddenAddress: endpoints[1].addresses[0]: 169.254.169.254 is a link-local address",
				"ForbiddenAddress: endpoints[2].addresses[0]: 0.0.0.0 is the unspecified address",
				"ForbiddenAddress: endpoints[3].addresses[0]: 224.0.0.1 is a multicast address",
				"ForbiddenAddress: endpoints[4].addresses[0]: 255.255.255.255 is the broadcast address",
			},
		},
		"ports that cannot be": {
			func(s *discoveryv1.EndpointSlice) {
				s.Ports = append(s.Ports, discoveryv1.EndpointPort{Port: new(int32(0))}, discoveryv1.EndpointPort{},
					discoveryv1.EndpointPort{Port: new(int32(1)), Protocol: new(corev1.Protocol("ICMP"))})
			},
			"[10.0.0.9 10.0.0.1] [8080/tcp]",
			[]string{
				"InvalidPort: ports[1].port: 0", "InvalidPort: ports[2].port is not set",
				`InvalidProtocol: ports[3].protocol: "ICMP"`,
			},
		},
		"no label": {
			func(s *discoveryv1.EndpointSlice) { s.Labels = nil },
			"",
			[]string{"NoServiceName: label kubernetes.io/service-name is missing"},
		},
		"FQDN": {
			func(s *discoveryv1.EndpointSlice) { s.AddressType = "FQDN" },
			"",
			[]string{`UnsupportedAddressType: addressType: "FQDN"`},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			in := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "shop", Name: "web-1",
					Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
				},
				AddressType: "IPv4", Ports: []discoveryv1.EndpointPort{{Port: new(int32(8080))}},
				Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.9"}}, good},
			}
			tc.change(in)
			got, findings := EndpointSlice(in)
			if diff := cmp.Diff(tc.want, used(got)); diff != "" {
				t.Errorf("used (-want +got):\n%s", diff)
			}
			matches(t, findings, tc.findings)
		})
	}
}

// used shows a slice's addresses and ports.
func used(s *model.EndpointSlice) string {
	if s == nil {
		return ""
	}
	var addrs, ports []string
	for _, e := range s.Endpoints {
		addrs = append(addrs, e.Addr.String())
	}
	for _, p := range s.Ports {
		ports = append(ports, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
	}
	return fmt.Sprintf("%v %v", addrs, ports)
}

func TestEndpointsBecomeSlicesPerSubsetAndFamily(t *testing.T) {
	got, findings := Endpoints(&corev1.Endpoints{ //nolint:staticcheck // see Endpoints
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Subsets: []corev1.EndpointSubset{ //nolint:staticcheck // see Endpoints
			{
				Addresses: []corev1.EndpointAddress{
					{IP: "10.0.0.1", NodeName: new("n1")},
					{IP: "fd00::1"},
					{IP: "x"},
					{IP: "::1"},
				},
				NotReadyAddresses: []corev1.EndpointAddress{{IP: "10.0.0.2"}},
				Ports:             []corev1.EndpointPort{{Name: "http", Port: 8080}, {Port: 0}},
			},
			{
				Addresses: []corev1.EndpointAddress{{IP: "10.0.0.3"}},
				Ports:     []corev1.EndpointPort{{Name: "http", Port: 9090}},
			},
		},
	})
	http := func(p uint16) []model.SlicePort {
		return []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: p}}
	}
	named := func(n string) model.Name { return model.Name{Namespace: "shop", Name: n} }
	want := []*model.EndpointSlice{
		{
			Name: named("web/endpoints-0-IPv4"), Service: "web", Family: model.IPv4, Ports: http(8080),
			Endpoints: []model.Endpoint{
				{
					Addr: netip.MustParseAddr("10.0.0.1"), Ready: true, Serving: true,
					Node: "n1",
				}, {Addr: netip.MustParseAddr("10.0.0.2")},
			},
		},
		{
			Name: named("web/endpoints-0-IPv6"), Service: "web", Family: model.IPv6, Ports: http(8080),
			Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("fd00::1"), Ready: true, Serving: true}},
		},
		{
			Name: named("web/endpoints-1-IPv4"), Service: "web", Family: model.IPv4, Ports: http(9090),
			Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("10.0.0.3"), Ready: true, Serving: true}},
		},
	}
	if diff := cmp.Diff(want, got, netipValues); diff != "" {
		t.Errorf("slices (-want +got):\n%s", diff)
	}
	matches(t, findings, []string{
		"InvalidPort: subsets[0].ports[1].port: 0", `InvalidIP: subsets[0].addresses[2].ip: "x"`,
		"ForbiddenAddress: subsets[0].addresses[3].ip: ::1",
	})
}

func TestANodeGivesItsInternalAddressesFirst(t *testing.T) {
	got, findings := Node(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{corev1.LabelTopologyZone: "z1"}},
		Spec: corev1.NodeSpec{
			PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24", "fd00:1::/64", "bad"},
			Taints: []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}},
		},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: "ExternalIP", Address: "203.0.113.1"},
			{Type: "Hostname", Address: "n1"},
			{Type: "InternalIP", Address: "192.0.2.1"},
			{Type: "InternalIP", Address: "x"},
			{
				Type:    "InternalIP",
				Address: "fd00::1",
			},
		}},
	})
	want := &model.Node{
		Name: "n1", Zone: "z1", Deleting: true,
		Addresses: []netip.Addr{
			netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fd00::1"),
			netip.MustParseAddr("203.0.113.1"),
		},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:1::/64")},
	}
	if diff := cmp.Diff(want, got, netipValues); diff != "" {
		t.Errorf("node (-want +got):\n%s", diff)
	}
	matches(t, findings, []string{`InvalidCIDR: spec.podCIDRs[2]: "bad"`, `InvalidIP: status.addresses[3].address: "x"`})
	now := metav1.Now()
	if n, _ := Node(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", DeletionTimestamp: &now}}); !n.Deleting {
		t.Error("a node with a deletion timestamp is not deleting")
	}
	if n, _ := Node(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1"},
		Spec:       corev1.NodeSpec{PodCIDR: "10.0.0.0/8"},
	}); len(n.PodCIDRs) != 1 || n.Deleting {
		t.Errorf("node %+v, want the older podCIDR field and no deletion", n)
	}
}

func TestExcludedObjectsAreToldByTheLabelAlone(t *testing.T) {
	if !ServiceExcluded(map[string]string{LabelForeignProxy: ""}) || ServiceExcluded(map[string]string{LabelHeadless: ""}) {
		t.Error("a Service is excluded by the foreign-proxy label only")
	}
	if !SliceExcluded(map[string]string{LabelHeadless: ""}) || SliceExcluded(map[string]string{LabelForeignProxy: "x"}) {
		t.Error("a slice is excluded by the headless label only")
	}
}

// FuzzAddressesAreNeverMisread feeds any text to both parsers: what is accepted must be canonical and parse to itself.
func FuzzAddressesAreNeverMisread(f *testing.F) {
	for _, s := range []string{
		"10.0.0.1", "010.0.0.1", "::ffff:1.2.3.4", "fe80::1%a", "10.0.0.0/08", " ::/0 ", "0000.0.0.0",
		"1.2.3.4/",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if a, ok := parseAddr(s); ok {
			if b, ok := parseAddr(a.String()); !ok || a != b || a.Is4In6() || a.Zone() != "" {
				t.Errorf("%q gave %v, which gives %v", s, a, b)
			}
		}
		if p, ok := parsePrefix(s); ok {
			if q, ok := parsePrefix(p.String()); !ok || p != q || p != p.Masked() || !p.IsValid() {
				t.Errorf("%q gave %v, which gives %v", s, p, q)
			}
		}
	})
}
