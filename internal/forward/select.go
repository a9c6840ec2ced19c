package forward

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A candidate is an endpoint of one Service port before it is decided who may use it.
type candidate struct {
	ep   *model.Endpoint
	addr netip.AddrPort
	// from and to delimit the text of addr in the selector's buffer: the order of pools is that of the texts.
	from, to int
	local    bool
	weight   uint16
}

// A selector merges the slices of a Service and picks endpoints. It keeps its buffers from one port to the next; the
// candidates of a port are valid until the next gather or reset.
type selector struct {
	text []byte
	all  []candidate
	// weights are those of the Service for endpoints that are near.
	weights nearness
}

// A selection is what a Service port can use.
type selection struct {
	cluster, local []Endpoint
	serving        []netip.AddrPort
	// any tells that some endpoint somewhere in the cluster is usable.
	any bool
}

// usable tells whether an endpoint may have the address. An endpoint on one of the others would let whoever may write
// slices take traffic to this node's own loopback or metadata services (CVE-2021-25737).
func usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast()
}

// gather collects the endpoints of one Service port from slices in the order of their names. Each address:port is there
// once, and all are sorted by their texts.
func (s *selector) gather(parts []*model.EndpointSlice, name PortName, family model.Family, nodeName string) {
	s.reset()
	for _, part := range parts {
		if part.Family != family {
			continue
		}
		for _, port := range part.Ports {
			if port.Name == name.Port && port.Protocol == name.Proto && port.Port != 0 {
				s.add(part, port.Port, nodeName)
			}
		}
	}
	text := s.text
	slices.SortFunc(s.all, func(a, b candidate) int {
		if c := bytes.Compare(text[a.from:a.to], text[b.from:b.to]); c != 0 {
			return c
		}
		// What came first has the lower place in the buffer.
		return cmp.Or(rank(a.ep)-rank(b.ep), a.from-b.from)
	})
	s.all = slices.CompactFunc(s.all, func(a, b candidate) bool { return a.addr == b.addr })
}

// reset forgets the candidates, so that the builder does not keep slices alive that the snapshot has let go.
func (s *selector) reset() {
	clear(s.all)
	s.text, s.all = s.text[:0], s.all[:0]
}

func (s *selector) add(part *model.EndpointSlice, port uint16, nodeName string) {
	for i := range part.Endpoints {
		ep := &part.Endpoints[i]
		a := ep.Addr.Unmap()
		if !usable(a) || model.FamilyOf(a) != part.Family {
			continue
		}
		addr := netip.AddrPortFrom(a, port)
		from := len(s.text)
		s.text = addr.AppendTo(s.text)
		s.all = append(s.all, candidate{
			ep: ep, addr: addr, from: from, to: len(s.text), local: nodeName != "" && ep.Node == nodeName,
			weight: s.weights.of(part, ep, nodeName),
		})
	}
}

// rank tells which of several entries for the same address:port counts; the lowest does. Any ready entry makes the
// address usable, whatever the others say, so that the answer does not depend on the order of events.
func rank(ep *model.Endpoint) int {
	switch {
	case ep.Ready && !ep.Terminating:
		return 0
	case ep.Ready:
		return 1
	case ep.Serving && !ep.Terminating:
		return 2
	case ep.Serving:
		return 3
	case !ep.Terminating:
		return 4
	}
	return 5
}

func ready(c *candidate) bool { return c.ep.Ready }

// lastResort tells that an endpoint may be used if there is no ready one (KEP-1669).
func lastResort(c *candidate) bool { return c.ep.Serving && c.ep.Terminating }

// pick selects from the gathered endpoints. useCluster and useLocal say which pools are wanted; the others stay empty.
func (s *selector) pick(useCluster, useLocal bool, nodeName, zone string) selection {
	var sel selection
	sel.serving = s.serving()
	if useCluster {
		sel.cluster = s.endpoints(s.hinted(nodeName, zone))
		if len(sel.cluster) == 0 {
			sel.cluster = s.endpoints(lastResort)
		}
		sel.any = len(sel.cluster) > 0
	}
	if !useLocal {
		return sel
	}
	for i := range s.all {
		sel.any = sel.any || ready(&s.all[i]) || lastResort(&s.all[i])
	}
	sel.local = s.endpoints(func(c *candidate) bool { return c.local && ready(c) })
	if len(sel.local) == 0 {
		sel.local = s.endpoints(func(c *candidate) bool { return c.local && lastResort(c) })
	}
	if slices.Equal(sel.local, sel.cluster) {
		sel.local = sel.cluster
	}
	return sel
}

// hinted gives the test for pool Cluster: ready, and meant for this node or zone if all ready endpoints carry hints of
// that sort and at least one is meant for us. One endpoint without a hint disables its level.
func (s *selector) hinted(nodeName, zone string) func(*candidate) bool {
	allNode, allZone, someNode, someZone := true, true, false, false
	for i := range s.all {
		ep := s.all[i].ep
		if !ep.Ready {
			continue
		}
		allNode = allNode && len(ep.NodeHints) > 0
		allZone = allZone && len(ep.ZoneHints) > 0
		someNode = someNode || slices.Contains(ep.NodeHints, nodeName)
		someZone = someZone || slices.Contains(ep.ZoneHints, zone)
	}
	switch {
	case allNode && someNode:
		return func(c *candidate) bool { return ready(c) && slices.Contains(c.ep.NodeHints, nodeName) }
	case allZone && someZone:
		return func(c *candidate) bool { return ready(c) && slices.Contains(c.ep.ZoneHints, zone) }
	}
	return ready
}

// endpoints copies those that pass the test into a slice of exactly their number.
func (s *selector) endpoints(test func(*candidate) bool) []Endpoint {
	n := 0
	for i := range s.all {
		if test(&s.all[i]) {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	list := make([]Endpoint, 0, n)
	for i := range s.all {
		if c := &s.all[i]; test(c) {
			list = append(list, Endpoint{AddrPort: c.addr, Local: c.local, Weight: c.weight})
		}
	}
	return list
}

func (s *selector) serving() []netip.AddrPort {
	n := 0
	for i := range s.all {
		if s.all[i].ep.Serving {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	list := make([]netip.AddrPort, 0, n)
	for i := range s.all {
		if s.all[i].ep.Serving {
			list = append(list, s.all[i].addr)
		}
	}
	return list
}

// localReady counts the distinct addresses of this node's ready endpoints over all ports of a Service: the number that
// a health check port answers with. Endpoints that terminate do not count even while they still get traffic, so that
// load balancers turn away before they are gone.
func localReady(parts []*model.EndpointSlice, family model.Family, nodeName string, names []PortName) int {
	if nodeName == "" {
		return 0
	}
	seen := map[netip.Addr]struct{}{}
	for _, part := range parts {
		serves := func(p model.SlicePort) bool {
			return slices.ContainsFunc(names, func(n PortName) bool { return n.Port == p.Name && n.Proto == p.Protocol })
		}
		if part.Family != family || !slices.ContainsFunc(part.Ports, serves) {
			continue
		}
		for i := range part.Endpoints {
			ep := &part.Endpoints[i]
			if a := ep.Addr.Unmap(); ep.Ready && ep.Node == nodeName && usable(a) {
				seen[a] = struct{}{}
			}
		}
	}
	return len(seen)
}

// unusable reports the endpoints that gather skips.
func unusable(parts []*model.EndpointSlice, family model.Family) []model.Finding {
	var found []model.Finding
	for _, part := range parts {
		if part.Family != family {
			continue
		}
		var bad []string
		for i := range part.Endpoints {
			if a := part.Endpoints[i].Addr; a.IsValid() && !usable(a.Unmap()) {
				bad = append(bad, a.String())
			}
		}
		if len(bad) == 0 {
			continue
		}
		found = append(found, model.Finding{
			Severity: model.Warning, Kind: "EndpointSlice", Object: part.Name.String(), Reason: "UnusableEndpoint",
			Message: "endpoints must not be on loopback, link-local, multicast or unspecified addresses; skipped " +
				shorten(bad),
		})
	}
	return found
}

// shorten joins at most five words and counts the others.
func shorten(words []string) string {
	const most = 5
	if len(words) <= most {
		return strings.Join(words, ", ")
	}
	return strings.Join(words[:most], ", ") + ", ..."
}
