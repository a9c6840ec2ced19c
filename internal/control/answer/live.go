package answer

import (
	"net/netip"
	"slices"
	"strconv"
)

// Collapse makes one row of the rows that a mode has for a node port at each of the node's addresses, so that it can be
// set against what is wanted. Their connections are added up.
func Collapse(want, have []Row) []Row {
	wanted := make(map[rowKey]bool, len(want))
	for i := range want {
		wanted[want[i].key()] = true
	}
	at := map[rowKey]int{}
	out := make([]Row, 0, len(have))
	for _, r := range have {
		port, is := portOf(r.Frontend)
		node := rowKey{r.Family, "*:" + port, r.Proto}
		if !is || wanted[r.key()] || !wanted[node] {
			out = append(out, r)
			continue
		}
		if i, found := at[node]; found {
			out[i].add(&r)
			continue
		}
		r.Frontend = node.frontend
		at[node] = len(out)
		out = append(out, r)
	}
	return out
}

func portOf(frontend string) (string, bool) {
	a, err := netip.ParseAddrPort(frontend)
	if err != nil {
		return "", false
	}
	return strconv.Itoa(int(a.Port())), true
}

// add takes the connections of a row for the same frontend at another address.
func (r *Row) add(o *Row) {
	r.Endpoints = sum(r.Endpoints, o.Endpoints)
	r.LocalEndpoints = sum(r.LocalEndpoints, o.LocalEndpoints)
	r.Draining = sum(r.Draining, o.Draining)
}

func sum(to, more []Endpoint) []Endpoint {
	to = slices.Clone(to)
	for _, e := range more {
		i := slices.IndexFunc(to, func(have Endpoint) bool { return have.Addr == e.Addr })
		if i < 0 {
			to = append(to, e)
			continue
		}
		to[i].Active += e.Active
		to[i].Inactive += e.Inactive
	}
	return to
}

// Enliven adds to wanted rows what only the kernel knows of them: schedulers, weights, connections and what drains.
func Enliven(want, have []Row) {
	held := make(map[rowKey]*Row, len(have))
	for i := range have {
		held[have[i].key()] = &have[i]
	}
	for i := range want {
		w, h := &want[i], held[want[i].key()]
		if h == nil || h.Scheduler == "" {
			continue
		}
		w.Scheduler, w.Draining = h.Scheduler, h.Draining
		w.Endpoints = live(w.Endpoints, h.Endpoints)
		w.LocalEndpoints = live(w.LocalEndpoints, h.LocalEndpoints)
	}
}

// live gives the endpoints as the kernel has them, where it has them.
func live(want, have []Endpoint) []Endpoint {
	out := slices.Clone(want)
	for i, e := range out {
		if at := slices.IndexFunc(have, func(h Endpoint) bool { return h.Addr == e.Addr }); at >= 0 {
			out[i] = have[at]
		}
	}
	return out
}
