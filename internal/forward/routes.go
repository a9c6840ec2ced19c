package forward

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A routeSet is a list of routes that can be a map key. No frontend has more than three.
type routeSet struct {
	list [3]Route
	n    int
}

func (r *routeSet) add(route Route) {
	r.list[r.n] = route
	r.n++
}

// A routeBook gives equal lists of routes the same memory: there are a few different ones in a table of any size.
type routeBook map[routeSet][]Route

func (b routeBook) routes(r routeSet) []Route {
	list, ok := b[r]
	if !ok {
		list = slices.Clone(r.list[:r.n])
		b[r] = list
	}
	return list
}

// A policy is what the routes of a Service port depend on.
type policy struct {
	externalLocal, internalLocal bool
	masqueradeAll                bool
	podsKnown                    bool
}

// internal gives the routes of the cluster IP.
func (p policy) internal(sel *selection) routeSet {
	var r routeSet
	pool, size := ClusterPool, len(sel.cluster)
	if p.internalLocal {
		pool, size = LocalPool, len(sel.local)
	}
	switch {
	case !sel.any:
		r.add(Route{From: Any, Do: Reject, Reason: NoEndpoints})
	case size == 0:
		r.add(Route{From: Any, Do: Drop, Reason: NoLocalEndpoints})
	case p.masqueradeAll:
		r.add(Route{From: Any, Do: Forward, Pool: pool, SNAT: Always})
	case p.podsKnown:
		// Whoever is not a pod may have no way back to the endpoint that leads through this node.
		r.add(Route{From: Pod, Do: Forward, Pool: pool, SNAT: Hairpin})
		r.add(Route{From: Any, Do: Forward, Pool: pool, SNAT: Always})
	default:
		r.add(Route{From: Any, Do: Forward, Pool: pool, SNAT: Hairpin})
	}
	return r
}

// external gives the routes of all other frontends.
func (p policy) external(sel *selection) routeSet {
	var r routeSet
	if !sel.any {
		r.add(Route{From: Any, Do: Reject, Reason: NoEndpoints})
		return r
	}
	if !p.externalLocal {
		r.add(Route{From: Any, Do: Forward, Pool: ClusterPool, SNAT: Always})
		return r
	}
	// Policy Local is about clients outside the cluster, who would lose their address or the way back. Pods and the node
	// itself lose nothing, so they get every endpoint: the load balancer would bring them to one, too.
	if len(sel.cluster) > 0 {
		if p.podsKnown {
			r.add(Route{From: Pod, Do: Forward, Pool: ClusterPool, SNAT: Hairpin})
		}
		r.add(Route{From: Node, Do: Forward, Pool: ClusterPool, SNAT: Always})
	}
	if len(sel.local) > 0 {
		r.add(Route{From: Any, Do: Forward, Pool: LocalPool, SNAT: Hairpin})
	} else {
		r.add(Route{From: Any, Do: Drop, Reason: NoLocalEndpoints})
	}
	return r
}

// externalLocal tells whether externalTrafficPolicy Local counts: only for types that have it, and for a cluster IP
// with external ones.
func externalLocal(svc *model.Service) bool {
	switch svc.Type {
	case model.LoadBalancer, model.NodePort:
		return svc.ExternalLocal
	case model.ClusterIP:
		return svc.ExternalLocal && len(svc.ExternalIPs) > 0
	case model.ExternalName:
	}
	return false
}

// A filter is loadBalancerSourceRanges as it applies to one family.
type filter struct {
	on    bool
	allow []netip.Prefix
	// ownAddr tells that the list admits this node, which may dial a VIP with the VIP itself as its source.
	ownAddr bool
}

// sourceFilter decides who may come to the Service's load balancer addresses.
//
// A list that says nothing about the family closes it: upstream opens it, which turns "only these IPv6 clients" into
// "every IPv4 client". The exception is a list that admits everyone in the other family.
func sourceFilter(svc *model.Service, family model.Family, host []netip.Addr) (filter, []model.Finding) {
	if len(svc.SourceRanges) == 0 && svc.BadSourceRanges == 0 {
		return filter{}, nil
	}
	f := filter{on: true}
	otherOpen := false
	for _, p := range svc.SourceRanges {
		p = unmapPrefix(p)
		own := model.FamilyOf(p.Addr()) == family
		switch {
		case own && p.Bits() == 0:
			return filter{}, nil
		case own:
			f.allow = append(f.allow, p)
		case p.Bits() == 0:
			otherOpen = true
		}
	}
	if len(f.allow) == 0 {
		if otherOpen {
			return filter{}, nil
		}
		return f, []model.Finding{serviceFinding(svc, model.Error, "NoSourceAllowed", fmt.Sprintf(
			"spec.loadBalancerSourceRanges has no usable %s entry, so no %s client is admitted to the load balancer "+
				"addresses; add one, or %s for everyone", family, family, zeroPrefix(family)))}
	}
	slices.SortFunc(f.allow, netip.Prefix.Compare)
	f.allow = slices.Compact(f.allow)
	for _, p := range f.allow {
		f.ownAddr = f.ownAddr || slices.ContainsFunc(host, func(a netip.Addr) bool {
			return !a.IsLoopback() && p.Contains(a)
		})
	}
	return f, nil
}

// allowAt gives the sorted list for one VIP.
func (f *filter) allowAt(vip netip.Addr) []netip.Prefix {
	if !f.ownAddr || slices.ContainsFunc(f.allow, func(p netip.Prefix) bool { return p.Contains(vip) }) {
		return f.allow
	}
	list := append(slices.Clone(f.allow), netip.PrefixFrom(vip, vip.BitLen()))
	slices.SortFunc(list, netip.Prefix.Compare)
	return list
}

func serviceFinding(svc *model.Service, severity model.Severity, reason, message string) model.Finding {
	return model.Finding{Severity: severity, Kind: "Service", Object: svc.Name.String(), Reason: reason, Message: message}
}

// addresses are a Service's addresses of one family, each list in the object's order.
type addresses struct {
	cluster           netip.Addr
	externalIPs, vips []netip.Addr
}

// serviceAddresses sorts out the addresses of a Service. An invalid cluster address means that the Service is none of
// this family's business.
func serviceAddresses(svc *model.Service, family model.Family) (addresses, []model.Finding) {
	var a addresses
	if svc.Type == model.ExternalName {
		return a, nil
	}
	if svc.Headless {
		if externals, _ := split(svc.ExternalIPs, family); len(externals) > 0 {
			return a, []model.Finding{serviceFinding(svc, model.Warning, "HeadlessExternalIPs", fmt.Sprintf(
				"spec.externalIPs (%s) is ignored because the Service is headless; give it a cluster IP",
				shorten(texts(externals))))}
		}
		return a, nil
	}
	clusters, strangers := split(svc.ClusterIPs, family)
	if len(clusters) == 0 {
		return a, nil
	}
	var found []model.Finding
	var otherExternals, otherVIPs []netip.Addr
	a.externalIPs, otherExternals = split(svc.ExternalIPs, family)
	a.vips, otherVIPs = split(svc.Ingress, family)
	if others := slices.Concat(otherExternals, otherVIPs); len(others) > 0 && len(strangers) == 0 {
		found = append(found, serviceFinding(svc, model.Warning, "WrongFamilyAddress", fmt.Sprintf(
			"the Service has no cluster IP of the family of %s, so these addresses are not served; "+
				"make it dual stack or remove them", shorten(texts(others)))))
	}
	a.cluster = clusters[0]
	all := slices.Concat(clusters[:1], a.externalIPs, a.vips)
	if bad := slices.DeleteFunc(all, serviceable); len(bad) > 0 {
		found = append(found, serviceFinding(svc, model.Error, "UnusableAddress", fmt.Sprintf(
			"a Service cannot be served on loopback, multicast or unspecified addresses; ignored %s",
			shorten(texts(bad)))))
	}
	return a, found
}

// serviceable tells whether a Service may have the address: one that belongs to every machine would take over traffic
// that never was a Service's.
func serviceable(a netip.Addr) bool { return !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() }

// split separates valid addresses by family.
func split(list []netip.Addr, family model.Family) (own, other []netip.Addr) {
	for _, a := range list {
		switch {
		case !a.IsValid():
		case model.FamilyOf(a) == family:
			own = append(own, a.Unmap().WithZone(""))
		default:
			other = append(other, a)
		}
	}
	return own, other
}

func texts(list []netip.Addr) []string {
	words := make([]string, len(list))
	for i, a := range list {
		words[i] = a.String()
	}
	return words
}

// frontends lists what one port of a Service wants to serve, before other Services' claims are looked at.
func frontends(a *addresses, port model.ServicePort, serveExternalIPs bool, f *filter, in, out []Route) []Frontend {
	list := make([]Frontend, 0, 2+len(a.externalIPs)+len(a.vips))
	add := func(next Frontend) {
		if !serviceable(next.Addr) {
			return
		}
		at := slices.IndexFunc(list, func(have Frontend) bool { return have.Addr == next.Addr })
		switch {
		case at < 0:
		case next.Filtered && !list[at].Filtered:
			// Listed twice in one Service, as in externalIPs and as the load balancer's: the filter must not be passed by.
			list = slices.Delete(list, at, at+1)
		default:
			return
		}
		list = append(list, next)
	}
	add(Frontend{Kind: ClusterIP, Addr: a.cluster, Port: port.Port, Routes: in})
	if serveExternalIPs {
		for _, ip := range a.externalIPs {
			add(Frontend{Kind: ExternalIP, Addr: ip, Port: port.Port, Routes: out})
		}
	}
	for _, ip := range a.vips {
		next := Frontend{Kind: LoadBalancer, Addr: ip, Port: port.Port, Routes: out, Filtered: f.on}
		if f.on {
			next.Allow = f.allowAt(ip)
		}
		add(next)
	}
	if port.NodePort != 0 {
		list = append(list, Frontend{Kind: NodePort, Port: port.NodePort, Routes: out})
	}
	return list
}
