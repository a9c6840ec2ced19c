// Package forward decides what this node must do with a packet that is addressed to a Service, and writes the answer
// down as a Table. All policy lives here, once, for every mode: which endpoints are in use, who may come, who is
// masqueraded, what is refused and why. A backend translates a Table and decides nothing.
//
// Build makes a Table from a model.Snapshot, Builder does the same step by step, Lookup says what a table does with one
// packet (the oracle that every backend is tested against), Format and Parse are its text form.
//
// The package is pure: no clock, no system call, no Kubernetes types. Read table.go, then select.go.
package forward

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A PortName identifies one port of one Service. Two ports of a Service may share a name if their protocols differ.
type PortName struct {
	model.Name
	// Port is the port's name, empty for an unnamed one.
	Port  string
	Proto model.Protocol
}

// Service gives "namespace/service:port", or "namespace/service" for an unnamed port: the form in rule comments and in
// hashed chain names. The protocol is not part of it.
func (n PortName) Service() string {
	if n.Port == "" {
		return n.Name.String()
	}
	return n.Name.String() + ":" + n.Port
}

// String gives "namespace/service:port/protocol".
func (n PortName) String() string { return n.Service() + "/" + n.Proto.String() }

// Compare orders by namespace, Service, port name and protocol.
func (n PortName) Compare(o PortName) int {
	return cmp.Or(n.Name.Compare(o.Name), cmp.Compare(n.Port, o.Port), cmp.Compare(n.Proto, o.Proto))
}

// A Kind tells what sort of address a frontend has. Where a packet fits several frontends the exact address wins over
// the node's own addresses.
type Kind uint8

// The kinds of frontend.
const (
	ClusterIP Kind = iota + 1
	ExternalIP
	LoadBalancer
	NodePort
)

// String gives the words of the text form.
func (k Kind) String() string {
	switch k {
	case ClusterIP:
		return "cluster-ip"
	case ExternalIP:
		return "external-ip"
	case LoadBalancer:
		return "load-balancer"
	case NodePort:
		return "node-port"
	}
	return "unknown-kind"
}

// A SourceClass is a set of clients. Classes are tried in the order of a frontend's routes.
type SourceClass uint8

// Pod is what the table's Detector calls local, Node is every packet whose source is an address of this machine, and
// Any is everything.
const (
	Pod SourceClass = iota + 1
	Node
	Any
)

// String gives the words of the text form.
func (c SourceClass) String() string {
	switch c {
	case Pod:
		return "pod"
	case Node:
		return "node"
	case Any:
		return "any"
	}
	return "unknown-source"
}

// A Verdict is what happens to a connection.
type Verdict uint8

// Pass leaves the packet alone: it is not for a Service, or not for this table. Reject answers with an ICMP
// port-unreachable, so that a TCP client is refused at once. Drop answers nothing.
const (
	Pass Verdict = iota
	Forward
	Reject
	Drop
)

// String gives the words of the text form.
func (v Verdict) String() string {
	switch v {
	case Pass:
		return "pass"
	case Forward:
		return "forward"
	case Reject:
		return "reject"
	case Drop:
		return "drop"
	}
	return "unknown-verdict"
}

// A Pool names one of the two sets of endpoints that a Service port has.
type Pool uint8

// ClusterPool is what traffic policy Cluster uses, LocalPool what policy Local uses.
const (
	ClusterPool Pool = iota + 1
	LocalPool
)

// String gives the words of the text form.
func (p Pool) String() string {
	switch p {
	case ClusterPool:
		return "cluster"
	case LocalPool:
		return "local"
	}
	return "no-pool"
}

// A SNAT mode tells when the client's address is replaced by this node's.
type SNAT uint8

// Hairpin masquerades only a connection whose chosen endpoint is the client itself; Always masquerades every one.
const (
	Hairpin SNAT = iota + 1
	Always
)

// String gives the words of the text form.
func (s SNAT) String() string {
	switch s {
	case Hairpin:
		return "hairpin"
	case Always:
		return "always"
	}
	return "no-snat"
}

// A Reason tells why a connection is not forwarded.
type Reason uint8

// The closed list of reasons.
const (
	NoReason Reason = iota
	// NoEndpoints: no endpoint of the Service is usable anywhere in the cluster.
	NoEndpoints
	// NoLocalEndpoints: there are usable endpoints, but none on this node, and the traffic policy is Local.
	NoLocalEndpoints
	// SourceNotAllowed: the client is not in loadBalancerSourceRanges.
	SourceNotAllowed
)

// String gives the words of the text form.
func (r Reason) String() string {
	switch r {
	case NoReason:
		return "none"
	case NoEndpoints:
		return "NoEndpoints"
	case NoLocalEndpoints:
		return "NoLocalEndpoints"
	case SourceNotAllowed:
		return "SourceNotAllowed"
	}
	return "unknown-reason"
}

// A Route answers "a client of this class gets what?". The first route that fits is final.
type Route struct {
	From SourceClass
	// Do is Forward, Reject or Drop.
	Do Verdict
	// Pool and SNAT are set when Do is Forward, Reason otherwise.
	Pool   Pool
	SNAT   SNAT
	Reason Reason
}

// A Frontend is one address that clients dial. Its protocol is that of the Service port it belongs to.
type Frontend struct {
	Kind Kind
	// Addr is invalid for kind NodePort, which stands for every address in the table's NodePortScope.
	Addr netip.Addr
	Port uint16
	// Routes are never empty, and the last one is from Any unless everyone else is to be dropped by an earlier one.
	Routes []Route
	// Filtered tells that only sources in Allow may come; all others are dropped before the routes are looked at.
	// A filter whose list is empty admits nobody. Allow is sorted and has no duplicates.
	Filtered bool
	Allow    []netip.Prefix
}

// Equal compares two frontends by content.
func (f Frontend) Equal(o Frontend) bool {
	return f.Kind == o.Kind && f.Addr == o.Addr && f.Port == o.Port && f.Filtered == o.Filtered &&
		slices.Equal(f.Routes, o.Routes) && slices.Equal(f.Allow, o.Allow)
}

// Key gives the frontend's key in a table; the protocol is that of the port it belongs to.
func (f Frontend) Key(proto model.Protocol) Key { return Key{Addr: f.Addr, Port: f.Port, Proto: proto} }

// An Endpoint is one member of a pool.
type Endpoint struct {
	netip.AddrPort
	// Local tells that it is on this node.
	Local bool
	// Weight is its share of new connections, in proportion to others' of the pool; 0 counts as 1. Only modes with a
	// scheduler that knows weights heed it.
	Weight uint16
}

// A Port is all that a data plane must know about one port of one Service. Values are never changed once they are in a
// table: an update puts a new one in their place, so an equal pointer means equal content.
type Port struct {
	Name PortName
	// Affinity is the ClientIP session affinity timeout; 0 is none.
	Affinity time.Duration
	// Scheduler is how the Service wants its endpoints chosen, as the annotation says it; empty is the mode's default.
	// Modes that cannot choose take no notice.
	Scheduler string
	// Cluster and Local are the two pools, sorted by the text of address:port, without duplicates. A pool that no route
	// uses is empty.
	Cluster, Local []Endpoint
	// Serving are all endpoints, used or not, that still answer: flows to them may live on.
	Serving []netip.AddrPort
	// Frontends are ordered: cluster IP, external IPs, load balancer addresses, node port; each address once.
	Frontends []Frontend
	// HealthCheckNodePort is where the Service's health is asked for; 0 is none. Only one port of a Service carries it.
	HealthCheckNodePort uint16
	// LocalReady is what HealthCheckNodePort answers with: how many addresses on this node have a ready endpoint of the
	// Service, whatever the port. 0 on a port without HealthCheckNodePort.
	LocalReady int
}

// Equal compares two ports by content.
func (p *Port) Equal(o *Port) bool {
	if p == nil || o == nil || p == o {
		return p == o
	}
	return p.Name == o.Name && p.Affinity == o.Affinity && p.Scheduler == o.Scheduler &&
		p.HealthCheckNodePort == o.HealthCheckNodePort &&
		p.LocalReady == o.LocalReady && slices.Equal(p.Cluster, o.Cluster) && slices.Equal(p.Local, o.Local) &&
		slices.Equal(p.Serving, o.Serving) && slices.EqualFunc(p.Frontends, o.Frontends, Frontend.Equal)
}

// Endpoints gives the pool's members.
func (p *Port) Endpoints(pool Pool) []Endpoint {
	if pool == LocalPool {
		return p.Local
	}
	return p.Cluster
}

// Uses tells whether a route of any frontend forwards to the pool.
func (p *Port) Uses(pool Pool) bool {
	for _, f := range p.Frontends {
		for _, r := range f.Routes {
			if r.Do == Forward && r.Pool == pool {
				return true
			}
		}
	}
	return false
}

// A Detector says which packets come from a pod. At most one of the fields is set; none means that pods cannot be told
// from others, and then no route is from Pod.
type Detector struct {
	// CIDR holds the pods' addresses.
	CIDR netip.Prefix
	// Interface is the bridge that pods' packets come in on; InterfacePrefix the start of such interfaces' names.
	Interface, InterfacePrefix string
}

// Known tells that pods can be told from others.
func (d Detector) Known() bool { return d != Detector{} }

// A NodePortScope says on which of this machine's addresses NodePorts answer.
type NodePortScope struct {
	// All means every address of this machine. Addrs is then empty.
	All bool
	// Addrs are the addresses to answer on, sorted. Loopback addresses are among them only if Loopback is set.
	Addrs []netip.Addr
	// Loopback tells that NodePorts also answer on loopback addresses (IPv4 only).
	Loopback bool
}

// A Context is what a table's routes refer to: the facts about this node that are the same for every Service.
type Context struct {
	Family   model.Family
	NodeName string
	// Zone is the node's topology zone, for display.
	Zone     string
	Detector Detector
	// HostAddrs are the addresses of this machine, loopback included, sorted. A packet from one of them is from Node.
	HostAddrs []netip.Addr
	NodePorts NodePortScope
}

// Equal compares two contexts.
func (c *Context) Equal(o *Context) bool {
	return c.Family == o.Family && c.NodeName == o.NodeName && c.Zone == o.Zone && c.Detector == o.Detector &&
		slices.Equal(c.HostAddrs, o.HostAddrs) && c.NodePorts.All == o.NodePorts.All &&
		c.NodePorts.Loopback == o.NodePorts.Loopback && slices.Equal(c.NodePorts.Addrs, o.NodePorts.Addrs)
}

// A Table says what this node does with every Service's traffic of one IP family.
//
// A table that a Builder maintains changes with each Update; only the goroutine that owns the builder may read it.
type Table struct {
	Context Context
	ports   map[PortName]*Port
	// index finds frontends: the exact address first, then (with an invalid address) the node port. A builder also files
	// health check node ports in it, as no node port can have their number.
	index map[Key]PortName
}

// A Key is what makes a frontend unique in a table. Addr is invalid for a node port.
type Key struct {
	Addr  netip.Addr
	Port  uint16
	Proto model.Protocol
}

// Port gives the Service port, or nil.
func (t *Table) Port(n PortName) *Port { return t.ports[n] }

// Owner tells which Service port serves a frontend.
func (t *Table) Owner(k Key) (PortName, bool) {
	n, ok := t.index[k]
	return n, ok
}

// Len gives the number of Service ports.
func (t *Table) Len() int { return len(t.ports) }

// Names gives the Service ports' names in order.
func (t *Table) Names() []PortName {
	names := make([]PortName, 0, len(t.ports))
	for n := range t.ports {
		names = append(names, n)
	}
	slices.SortFunc(names, PortName.Compare)
	return names
}

// Equal tells whether two tables say the same. Nil equals nil only.
func Equal(a, b *Table) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Context.Equal(&b.Context) && maps.EqualFunc(a.ports, b.ports, (*Port).Equal)
}

// A Delta tells what an update changed in a table.
type Delta struct {
	// Ports are the Service ports that were put, replaced or removed, sorted; Table.Port gives nil for a removed one.
	Ports []PortName
	// Context tells that the table's Context changed; every port then counts as changed, also if Ports is short.
	Context bool
}

// Empty tells that nothing changed.
func (d Delta) Empty() bool { return len(d.Ports) == 0 && !d.Context }
