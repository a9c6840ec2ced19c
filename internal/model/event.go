package model

import (
	"cmp"
	"net/netip"
	"slices"
)

// An Event is one change that a source reports. Exactly one of Service, Slice, Node, ServiceCIDR, File and
// Synced is set.
//
// Sources may send the same object again; a receiver must treat an equal object as no change. Findings always stand
// for the whole object or file: an event replaces what was found about it before, and one without findings clears it.
type Event struct {
	// Service, Slice and Node carry the new state, or with Delete set at least the name of what is gone.
	Service     *Service
	Slice       *EndpointSlice
	Node        *Node
	ServiceCIDR *ServiceCIDR
	Delete      bool
	// File names a file that could not be read whole (Findings say why), or that is good again (no Findings).
	File string
	// Findings are what the source noticed while it read the object.
	Findings []Finding
	// Synced tells that the source has delivered everything that existed when it started. It is sent once.
	Synced bool
}

// A Sink takes events from a source. It must be safe for use by several goroutines and must not block for long.
type Sink func(...Event)

// A Snapshot is everything known of the cluster at one moment.
//
// Its owner is one goroutine, which feeds it events with Apply; what it holds must not be changed by others.
type Snapshot struct {
	Services map[Name]*Service
	// Slices are grouped by the Service that they belong to, then by the slice's own name.
	Slices map[Name]map[string]*EndpointSlice
	// Node is this machine's Node object; nil while it is unknown.
	Node *Node
	// ServiceCIDRs are the ranges of cluster IPs, by the object's name. Nothing that a Service gets depends on them.
	ServiceCIDRs map[string]*ServiceCIDR
	// owner remembers for each slice the Service that it was filed under, as a label can change.
	owner map[Name]Name
}

// NewSnapshot gives an empty snapshot.
func NewSnapshot() *Snapshot {
	return &Snapshot{
		Services: map[Name]*Service{},
		Slices:   map[Name]map[string]*EndpointSlice{},
		owner:    map[Name]Name{},

		ServiceCIDRs: map[string]*ServiceCIDR{},
	}
}

// A Dirty set tells what an event changed: the Services to be decided again, and whether the Node did change.
type Dirty struct {
	Services map[Name]struct{}
	Node     bool
}

// Add marks a Service.
func (d *Dirty) Add(n Name) {
	if d.Services == nil {
		d.Services = map[Name]struct{}{}
	}
	d.Services[n] = struct{}{}
}

// Empty tells that nothing was marked.
func (d *Dirty) Empty() bool { return len(d.Services) == 0 && !d.Node }

// Apply takes one event into the snapshot and marks what it changed. An event that changes nothing marks nothing.
func (s *Snapshot) Apply(e Event, d *Dirty) {
	switch {
	case e.Service != nil:
		s.applyService(e, d)
	case e.Slice != nil:
		s.applySlice(e, d)
	case e.Node != nil:
		var next *Node
		if !e.Delete {
			next = e.Node
		}
		if !s.Node.Equal(next) {
			s.Node, d.Node = next, true
		}
	case e.ServiceCIDR != nil && e.Delete:
		delete(s.ServiceCIDRs, e.ServiceCIDR.Name)
	case e.ServiceCIDR != nil:
		s.ServiceCIDRs[e.ServiceCIDR.Name] = e.ServiceCIDR
	}
}

// ServiceRanges gives the ranges of a family that cluster IPs are taken from, sorted, each once however many objects name
// it.
func (s *Snapshot) ServiceRanges(family Family) []netip.Prefix {
	var out []netip.Prefix
	for _, c := range s.ServiceCIDRs {
		for _, p := range c.CIDRs {
			if FamilyOf(p.Addr()) == family {
				out = append(out, p)
			}
		}
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	return slices.Compact(out)
}

func (s *Snapshot) applyService(e Event, d *Dirty) {
	name := e.Service.Name
	old, known := s.Services[name]
	if e.Delete {
		if known {
			delete(s.Services, name)
			d.Add(name)
		}
		return
	}
	if known && old.Equal(e.Service) {
		return
	}
	s.Services[name] = e.Service
	d.Add(name)
}

func (s *Snapshot) applySlice(e Event, d *Dirty) {
	name := e.Slice.Name
	was, known := s.owner[name]
	now := Name{Namespace: name.Namespace, Name: e.Slice.Service}
	if known && (e.Delete || was != now) {
		delete(s.Slices[was], name.Name)
		if len(s.Slices[was]) == 0 {
			delete(s.Slices, was)
		}
		delete(s.owner, name)
		d.Add(was)
	}
	if e.Delete {
		return
	}
	if known && was == now && s.Slices[now][name.Name].Equal(e.Slice) {
		return
	}
	if s.Slices[now] == nil {
		s.Slices[now] = map[string]*EndpointSlice{}
	}
	s.Slices[now][name.Name] = e.Slice
	s.owner[name] = now
	d.Add(now)
}
