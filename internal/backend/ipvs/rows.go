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
		if v.Weight > 0 {
			endpoints[d.server] = append(endpoints[d.server], backend.RowEndpoint{Addr: d.addr})
		}
	}
	for _, list := range endpoints {
		slices.SortFunc(list, func(a, b backend.RowEndpoint) int { return cmp.Compare(a.Addr.String(), b.Addr.String()) })
		for i := range list {
			list[i].Share = 1 / float64(len(list))
		}
	}
	var rows []backend.Row
	for m := range o.members {
		if m.set != setServed {
			continue
		}
		rows = append(rows, o.row(m.entry, endpoints))
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
	r.Affinity, r.Endpoints = how.Timeout, endpoints[key]
	if mark, split := o.members[member{setSplit, at}]; split {
		r.LocalEndpoints, r.Endpoints = r.Endpoints, endpoints[ipvs.Key{Family: o.opt.Family, Mark: mark}]
		r.Affinity = max(r.Affinity, o.servers[ipvs.Key{Family: o.opt.Family, Mark: mark}].Timeout)
	} else if _, dropped := o.members[member{setDropped, at}]; dropped {
		r.Do, r.Reason = forward.Drop.String(), forward.NoLocalEndpoints.String()
	} else if !there || len(r.Endpoints) == 0 {
		r.Do, r.Reason = forward.Reject.String(), forward.NoEndpoints.String()
	}
	if _, filtered := o.members[member{setFiltered, at}]; filtered {
		for m := range o.members {
			if m.set == setAllowed && m.entry.Addr == at.Addr && m.entry.Proto == at.Proto && m.entry.Port == at.Port {
				r.Allow = append(r.Allow, m.entry.Net)
			}
		}
		slices.SortFunc(r.Allow, func(a, b netip.Prefix) int { return cmp.Compare(a.String(), b.String()) })
		if len(r.Allow) == 0 {
			r.Do, r.Reason = forward.Drop.String(), forward.SourceNotAllowed.String()
		}
	}
	return r
}
