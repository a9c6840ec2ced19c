// Package flow decides which connection tracking entries must be forgotten, so that clients which never close a
// connection do not stay with an endpoint that is gone. It is pure: package conntrack lists and deletes entries, the
// loop brings the two together. It must not import anything below internal/kernel.
//
// # The rule
//
// An entry of a protocol in Protocols is stale if its original destination is a frontend and its replies come from none
// of the Service port's serving endpoints. This holds for every sort of frontend, and whatever the frontend does with
// new connections. Replies from the frontend's own address mean that the entry was made before there was a rule: it
// would bypass the rule for as long as the client goes on sending. Endpoints that are not chosen for new connections
// but still serve keep their flows.
//
// A node port is a frontend at this node's addresses only: a flow to the same port number elsewhere is none of ours.
// The entries of a frontend that no longer exists are stale if they lead to an endpoint that it had.
//
// # Which protocols
//
// UDP has no end of a connection, so the kernel keeps an entry for as long as datagrams come in.
//
// SCTP is treated like UDP. Its clients commonly use one fixed port and heartbeats keep the entry alive, so a new
// association would be led to the dead endpoint by the old entry. With the entry gone the next packet reaches a serving
// endpoint, which aborts what it does not know, and the client sets up a new association at once.
//
// TCP is never touched: an endpoint that is gone resets the connection or lets it time out, and one that is draining
// must be left to do so.
package flow

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Flow is one connection tracking entry. Addresses are never IPv4 mapped into IPv6.
type Flow struct {
	Proto model.Protocol
	// OrigSrc and OrigDst are what the client sent from and to. ReplySrc is where the answers come from, which is the
	// endpoint if the entry is translated, and ReplyDst where they go to.
	OrigSrc, OrigDst   netip.AddrPort
	ReplySrc, ReplyDst netip.AddrPort
	// Zone is the tracking zone of the original direction; 0 is the default one.
	Zone uint16
	// ID tells apart two entries that had the same addresses one after the other; 0 is unknown.
	ID uint32
}

// Protocols are those whose entries can be stale.
func Protocols() []model.Protocol { return []model.Protocol{model.UDP, model.SCTP} }

// Stale gives the entries that must be forgotten now that the table is in effect. It must be called after the table was
// written to the kernel, else a client's next packet makes the same entry again. See Index for frontends that are gone.
func Stale(t *forward.Table, flows ...iter.Seq[Flow]) []Flow {
	ix := NewIndex(t)
	var stale []Flow
	for _, seq := range flows {
		for f := range seq {
			if ix.Stale(f) {
				stale = append(stale, f)
			}
		}
	}
	return stale
}

// An Index answers for one state of a table which entries are stale. It shares nothing with the table once it is made.
type Index struct {
	// frontends gives each frontend's number. A node port has no address.
	frontends map[forward.Key]int32
	// serving holds the endpoints to which flows of a frontend may live on.
	serving map[member]struct{}
	// gone and had are the same for frontends that are no more; had holds what they used to lead to. A frontend has
	// several numbers here if it was replaced several times.
	gone map[forward.Key][]int32
	had  map[member]struct{}
	// nodePorts are the addresses that node ports answer on.
	nodePorts map[netip.Addr]struct{}
	// loopback tells that node ports also answer on every IPv4 loopback address.
	loopback bool
	// count numbers the Service ports.
	count  int32
	protos map[model.Protocol]bool
}

// A member is one endpoint of a Service port, which goes by its number.
type member struct {
	port     int32
	endpoint netip.AddrPort
}

// NewIndex makes the index of a table.
func NewIndex(t *forward.Table) *Index {
	return IndexOf(&t.Context, func(yield func(*forward.Port) bool) {
		for _, name := range t.Names() {
			if !yield(t.Port(name)) {
				return
			}
		}
	})
}

// IndexOf makes the index of some ports and their table's context: for those who have the ports at hand and must not
// touch the table. All ports of a protocol in Protocols must be among them; others are passed over.
func IndexOf(c *forward.Context, ports iter.Seq[*forward.Port]) *Index {
	ix := &Index{
		frontends: map[forward.Key]int32{}, serving: map[member]struct{}{},
		gone: map[forward.Key][]int32{}, had: map[member]struct{}{},
		nodePorts: map[netip.Addr]struct{}{}, protos: map[model.Protocol]bool{},
	}
	for p := range ports {
		if tracked(p.Name.Proto) {
			for _, key := range ix.number(p) {
				ix.frontends[key] = ix.count
			}
			ix.fill(ix.serving, p.Serving)
		}
	}
	ix.scope(c)
	return ix
}

func tracked(p model.Protocol) bool { return p == model.UDP || p == model.SCTP }

// number gives the next Service port a number, and its frontends' keys.
func (ix *Index) number(p *forward.Port) []forward.Key {
	ix.count++
	keys := make([]forward.Key, 0, len(p.Frontends))
	for i := range p.Frontends {
		keys = append(keys, p.Frontends[i].Key(p.Name.Proto))
		ix.protos[p.Name.Proto] = true
	}
	return keys
}

// fill notes endpoints of the Service port that was numbered last.
func (ix *Index) fill(members map[member]struct{}, eps []netip.AddrPort) {
	for _, ep := range eps {
		members[member{ix.count, netip.AddrPortFrom(ep.Addr().Unmap(), ep.Port())}] = struct{}{}
	}
}

// scope notes where node ports answer.
func (ix *Index) scope(c *forward.Context) {
	addrs := c.NodePorts.Addrs
	if c.NodePorts.All {
		addrs = c.HostAddrs
	}
	ix.loopback = c.NodePorts.All && c.NodePorts.Loopback
	for _, a := range addrs {
		if !c.NodePorts.All || !a.IsLoopback() {
			ix.nodePorts[a.Unmap()] = struct{}{}
		}
	}
}

// Remove tells of a Service port as it was in an earlier table, with all of its frontends, after it was removed or
// replaced. Frontends that the present table has are not affected.
func (ix *Index) Remove(old *forward.Port) {
	if old == nil || !tracked(old.Name.Proto) {
		return
	}
	for _, key := range ix.number(old) {
		ix.gone[key] = append(ix.gone[key], ix.count)
	}
	ix.fill(ix.had, old.Serving)
	for _, pool := range [][]forward.Endpoint{old.Cluster, old.Local} {
		for _, ep := range pool {
			ix.fill(ix.had, []netip.AddrPort{ep.AddrPort})
		}
	}
}

// Wants tells whether any entry of a protocol can be stale, so that there is a point in listing them.
func (ix *Index) Wants(p model.Protocol) bool { return ix.protos[p] }

// Stale tells whether an entry must be forgotten.
func (ix *Index) Stale(f Flow) bool {
	key := forward.Key{Addr: f.OrigDst.Addr(), Port: f.OrigDst.Port(), Proto: f.Proto}
	atNode := forward.Key{Port: key.Port, Proto: key.Proto}
	port, ok := ix.frontends[key]
	if !ok && ix.isNodePort(key.Addr) {
		port, ok = ix.frontends[atNode]
	}
	if ok {
		_, serves := ix.serving[member{port, f.ReplySrc}]
		return !serves
	}
	old, ok := ix.gone[key]
	if !ok && ix.isNodePort(key.Addr) {
		old = ix.gone[atNode]
	}
	return slices.ContainsFunc(old, func(port int32) bool {
		_, led := ix.had[member{port, f.ReplySrc}]
		return led
	})
}

func (ix *Index) isNodePort(a netip.Addr) bool {
	_, ok := ix.nodePorts[a]
	return ok || ix.loopback && a.IsLoopback()
}
