package model

import (
	"maps"
	"slices"
)

// Equal tells whether two values describe the same Service. Nil equals nil only.
func (s *Service) Equal(o *Service) bool {
	if s == nil || o == nil {
		return s == o
	}
	return s.Name == o.Name && s.Created.Equal(o.Created) && s.Type == o.Type && s.Headless == o.Headless &&
		slices.Equal(s.ClusterIPs, o.ClusterIPs) && slices.Equal(s.Ports, o.Ports) &&
		slices.Equal(s.ExternalIPs, o.ExternalIPs) && slices.Equal(s.Ingress, o.Ingress) &&
		slices.Equal(s.SourceRanges, o.SourceRanges) && s.BadSourceRanges == o.BadSourceRanges &&
		s.Affinity == o.Affinity && s.ExternalLocal == o.ExternalLocal && s.InternalLocal == o.InternalLocal &&
		s.HealthCheckNodePort == o.HealthCheckNodePort && maps.Equal(s.Annotations, o.Annotations)
}

// Equal tells whether two values describe the same slice. The trigger time does not count: it says when something
// changed, not what.
func (s *EndpointSlice) Equal(o *EndpointSlice) bool {
	if s == nil || o == nil {
		return s == o
	}
	return s.Name == o.Name && s.Service == o.Service && s.Family == o.Family && s.Weight == o.Weight &&
		slices.Equal(s.Ports, o.Ports) &&
		slices.EqualFunc(s.Endpoints, o.Endpoints, Endpoint.Equal)
}

// Equal tells whether two values describe the same endpoint.
func (e Endpoint) Equal(o Endpoint) bool {
	return e.Addr == o.Addr && e.Ready == o.Ready && e.Serving == o.Serving && e.Terminating == o.Terminating &&
		e.Node == o.Node && e.Zone == o.Zone && slices.Equal(e.ZoneHints, o.ZoneHints) && slices.Equal(e.NodeHints, o.NodeHints)
}

// Equal tells whether two values describe the same Node. Nil equals nil only.
func (n *Node) Equal(o *Node) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.Name == o.Name && n.Zone == o.Zone && n.Deleting == o.Deleting &&
		slices.Equal(n.Addresses, o.Addresses) && slices.Equal(n.PodCIDRs, o.PodCIDRs)
}
