// Package model holds the cluster as this node sees it, in plain comparable values: Services, EndpointSlices and
// Nodes, with addresses as net/netip and nothing of the Kubernetes client libraries. Package watch fills it, package
// forward reads it. It decides nothing and must not import either of them.
package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"
)

// Protocol is a transport protocol of a Service port. The zero value is not a protocol.
type Protocol uint8

// The protocols that the Service API knows. The values are the IP protocol numbers (IANA registry).
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String gives the lower-case name, as it appears in rules and in hashed chain names.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprintf("protocol-%d", uint8(p))
}

// ParseProtocol accepts the names in either case ("TCP", "tcp"). An empty name is TCP, the API's default.
func ParseProtocol(s string) (Protocol, error) {
	switch s {
	case "", "TCP", "tcp":
		return TCP, nil
	case "UDP", "udp":
		return UDP, nil
	case "SCTP", "sctp":
		return SCTP, nil
	}
	return 0, fmt.Errorf("protocol %q is not TCP, UDP or SCTP", s)
}

// Family is an IP family. The zero value is not a family.
type Family uint8

// The two IP families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// String gives "IPv4" or "IPv6".
func (f Family) String() string { return fmt.Sprintf("IPv%d", uint8(f)) }

// FamilyOf tells the family of an address. An IPv4 address mapped into IPv6 counts as IPv4.
func FamilyOf(a netip.Addr) Family {
	if a.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// Name identifies a namespaced object.
type Name struct {
	Namespace, Name string
}

// String gives "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Compare orders by namespace, then name.
func (n Name) Compare(o Name) int {
	return cmp.Or(cmp.Compare(n.Namespace, o.Namespace), cmp.Compare(n.Name, o.Name))
}

// ServiceType is spec.type of a Service.
type ServiceType uint8

// The types that the Service API knows; the zero value is ClusterIP, the API's default.
const (
	ClusterIP ServiceType = iota
	NodePort
	LoadBalancer
	ExternalName
)

// String gives the API's spelling.
func (t ServiceType) String() string {
	switch t {
	case ClusterIP:
		return "ClusterIP"
	case NodePort:
		return "NodePort"
	case LoadBalancer:
		return "LoadBalancer"
	case ExternalName:
		return "ExternalName"
	}
	return fmt.Sprintf("ServiceType(%d)", uint8(t))
}

// A Service is the part of a core/v1 Service that forwarding depends on. Values are never changed after they were
// handed over: an update is a new value.
type Service struct {
	Name
	// Created is metadata.creationTimestamp; it decides which of two Services keeps an address that both claim.
	Created time.Time
	Type    ServiceType
	// ClusterIPs are spec.clusterIPs (or spec.clusterIP); empty for a Service without one and for a headless one.
	ClusterIPs []netip.Addr
	// Headless tells that spec.clusterIP is "None".
	Headless bool
	Ports    []ServicePort
	// ExternalIPs are the parsable entries of spec.externalIPs.
	ExternalIPs []netip.Addr
	// Ingress are the load balancer's addresses in status whose ipMode is nil or VIP.
	Ingress []netip.Addr
	// SourceRanges are the parsable entries of spec.loadBalancerSourceRanges.
	SourceRanges []netip.Prefix
	// BadSourceRanges counts the entries that could not be parsed: a list whose every entry is bad must not read as
	// "no list", which would admit everyone.
	BadSourceRanges int
	// Affinity is the ClientIP session affinity timeout; 0 is no affinity. The API counts whole seconds, 1..86400.
	Affinity time.Duration
	// ExternalLocal and InternalLocal tell that the traffic policy is Local.
	ExternalLocal, InternalLocal bool
	// HealthCheckNodePort is spec.healthCheckNodePort; 0 is none.
	HealthCheckNodePort uint16
	// Annotations are those of the turnout.dev/ domain only; nil when there are none.
	Annotations map[string]string
}

// A ServicePort is one entry of spec.ports.
type ServicePort struct {
	Name     string
	Protocol Protocol
	// Port is what clients dial, 1..65535; NodePort is 0 when there is none.
	Port, NodePort uint16
}

// An EndpointSlice is the part of a discovery.k8s.io/v1 EndpointSlice that forwarding depends on. Like Service, a
// value is never changed after it was handed over.
type EndpointSlice struct {
	Name
	// Service is the label kubernetes.io/service-name: the Service in the same namespace that the slice belongs to.
	Service string
	Family  Family
	Ports   []SlicePort
	// Endpoints hold only entries whose first address is valid and of the slice's family.
	Endpoints []Endpoint
	// Trigger is the annotation endpoints.kubernetes.io/last-change-trigger-time; zero when absent.
	Trigger time.Time
	// Weight is the annotation turnout.dev/weight: the share of new connections that each endpoint of the slice gets, in
	// proportion to others'; 0 when absent.
	Weight uint16
}

// A SlicePort is one entry of a slice's ports; entries without a name or a port number are left out.
type SlicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
}

// An Endpoint is one entry of a slice's endpoints. Absent conditions have been replaced by the API's meaning: ready
// and serving true, terminating false.
type Endpoint struct {
	Addr                        netip.Addr
	Ready, Serving, Terminating bool
	// Node is nodeName and Zone is zone, empty when unknown.
	Node, Zone string
	// ZoneHints and NodeHints are hints.forZones and hints.forNodes.
	ZoneHints, NodeHints []string
}

// A Node is the part of a core/v1 Node that forwarding depends on.
type Node struct {
	Name string
	// Zone is the label topology.kubernetes.io/zone.
	Zone string
	// Addresses are the InternalIP addresses, then the ExternalIP ones, in the API's order.
	Addresses []netip.Addr
	PodCIDRs  []netip.Prefix
	// Deleting tells that the Node has a deletion timestamp or the cluster autoscaler's to-be-deleted taint.
	Deleting bool
}

// A ServiceCIDR is the part of a networking.k8s.io/v1 ServiceCIDR that matters here: ranges that cluster IPs are taken
// from.
type ServiceCIDR struct {
	Name  string
	CIDRs []netip.Prefix
}

// Severity grades a Finding.
type Severity uint8

// Warning means that something was ignored or replaced while the rest works. Error means that an object, or a part of
// it, does not get what it asks for.
const (
	Warning Severity = iota + 1
	Error
)

// String gives "warning" or "error".
func (s Severity) String() string {
	if s == Error {
		return "error"
	}
	return "warning"
}

// A Finding is something a user should know about one object: what, why and what to do, on one line each.
type Finding struct {
	Severity Severity
	// Kind and Object name what the finding is about: "Service", "shop/web"; for an unreadable file Kind is "File".
	Kind   string
	Object string
	// Reason is a CamelCase word from a closed list, usable as the reason of an Event.
	Reason string
	// Message is one line; it names the field and the value and, where there is one, the remedy.
	Message string
}

// String is the line that a log or a terminal shows.
func (f Finding) String() string {
	return fmt.Sprintf("%s: %s %s: %s (%s)", f.Severity, f.Kind, f.Object, f.Message, f.Reason)
}
