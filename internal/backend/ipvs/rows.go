package ipvs

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
)

// Rows implements backend.Observed. The kernel's virtual servers have no names, so neither have the rows.
func (o *Observation) Rows() []backend.Row {
	endpoints := map[ipvs.Key][]backend.RowEndpoint{}
	for d, v := range o.destinations {
		endpoints[d.server] = append(endpoints[d.server], backend.RowEndpoint{
			Addr: d.addr, Weight: v.Weight, Active: v.Active, Inactive: v.Inactive,
		})
	}
	for k, list := range endpoints {
		slices.SortFunc(list, func(a, b backend.RowEndpoint) int { return cmp.Compare(a.Addr.String(), b.Addr.String()) })
		shareOut(list, heedsWeights(o.servers[k].Scheduler))
	}
	allowed := map[ipset.Entry][]netip.Prefix{}
	for m := range o.members {
		if at := m.entry; m.set == setAllowed {
			at.Net = netip.Prefix{}
			allowed[at] = append(allowed[at], m.entry.Net)
		}
	}
	var rows []backend.Row
	for m := range o.members {
		if m.set != setServed {
			continue
		}
		r := o.row(m.entry, endpoints)
		if _, filtered := o.members[member{setFiltered, m.entry}]; filtered {
			r.Allow = allowed[m.entry]
			slices.SortFunc(r.Allow, func(a, b netip.Prefix) int { return cmp.Compare(a.String(), b.String()) })
			if len(r.Allow) == 0 {
				r.Do, r.Reason = forward.Drop.String(), forward.SourceNotAllowed.String()
			}
		}
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b backend.Row) int {
		return cmp.Or(cmp.Compare(a.Frontend, b.Frontend), cmp.Compare(a.Proto, b.Proto))
	})
	return rows
}

// row gives what the kernel does with one frontend.
func (o *Observation) row(at ipset.Entry, endpoints map[ipvs.Key][]backend.RowEndpoint) backend.Row {
	key := ipvs.Key{Family: o.opt.Family, Proto: at.Proto, Addr: netip.AddrPortFrom(at.Addr, at.Port)}
	r := backend.Row{Proto: at.Proto.String(), Frontend: key.Addr.String(), Do: forward.Forward.String()}
	how, there := o.servers[key]
	r.Affinity, r.Scheduler = how.Timeout, how.Scheduler
	r.Endpoints, r.Draining = serving(endpoints[key])
	if mark, split := o.members[member{setSplit, at}]; split {
		inner := ipvs.Key{Family: o.opt.Family, Mark: mark}
		masked := ipvs.Key{Family: o.opt.Family, Mark: mark | 1<<o.opt.Masquerading.Bit}
		r.LocalEndpoints = r.Endpoints
		r.Endpoints, _ = serving(joined(endpoints[inner], endpoints[masked]))
		r.Affinity = max(r.Affinity, o.servers[inner].Timeout)
	} else if _, dropped := o.members[member{setDropped, at}]; dropped {
		r.Do, r.Reason = forward.Drop.String(), forward.NoLocalEndpoints.String()
	} else if !there || len(r.Endpoints) == 0 {
		r.Do, r.Reason = forward.Reject.String(), forward.NoEndpoints.String()
	}
	return r
}

// shareOut says which part of new connections each endpoint gets.
func shareOut(list []backend.RowEndpoint, weighted bool) {
	sum := 0.0
	part := func(e backend.RowEndpoint) float64 {
		if weighted || e.Weight == 0 {
			return float64(e.Weight)
		}
		return 1
	}
	for _, e := range list {
		sum += part(e)
	}
	for i := range list {
		if sum > 0 {
			list[i].Share = part(list[i]) / sum
		}
	}
}

// heedsWeights tells whether a scheduler gives an endpoint of more weight more connections. Source: ipvsadm(8).
func heedsWeights(scheduler string) bool {
	switch scheduler {
	case "wrr", "wlc", "sed", "nq", "sh", "mh", "fo", "ovf":
		return true
	}
	return false
}

// serving parts the endpoints that get new connections from those that only keep what they have.
func serving(list []backend.RowEndpoint) (serve, drain []backend.RowEndpoint) {
	for _, e := range list {
		if e.Weight > 0 {
			serve = append(serve, e)
		} else {
			drain = append(drain, e)
		}
	}
	return serve, drain
}

// joined adds up the connections of the two virtual servers that pods and this machine are led to.
func joined(a, b []backend.RowEndpoint) []backend.RowEndpoint {
	out := slices.Clone(a)
	for _, e := range b {
		i := slices.IndexFunc(out, func(have backend.RowEndpoint) bool { return have.Addr == e.Addr })
		if i < 0 {
			out = append(out, e)
			continue
		}
		out[i].Active += e.Active
		out[i].Inactive += e.Inactive
	}
	return out
}
