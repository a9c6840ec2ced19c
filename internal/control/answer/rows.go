package answer

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Wanted gives the rows of Service ports, in their order.
func Wanted(family model.Family, ports []*forward.Port) []Row {
	var rows []Row
	for _, p := range ports {
		for i := range p.Frontends {
			rows = append(rows, wanted(family, p, &p.Frontends[i]))
		}
	}
	return rows
}

// Ports gives a table's Service ports in the order of their names. They stay good when the table changes.
func Ports(t *forward.Table) []*forward.Port {
	names := t.Names()
	ports := make([]*forward.Port, len(names))
	for i, n := range names {
		ports[i] = t.Port(n)
	}
	return ports
}

func wanted(family model.Family, p *forward.Port, f *forward.Frontend) Row {
	r := Row{
		Family: family.String(), Service: p.Name.Service(), Kind: f.Kind.String(), Frontend: FrontendText(f),
		Proto: p.Name.Proto.String(), AffinitySeconds: seconds(p.Affinity),
		Filtered: f.Filtered, Allow: texts(f.Allow), Endpoints: []Endpoint{},
	}
	last := f.Routes[len(f.Routes)-1]
	r.Do, r.Reason = last.Do.String(), reasonText(last.Reason)
	if f.Filtered && len(f.Allow) == 0 && last.Do != forward.Reject {
		r.Do, r.Reason = forward.Drop.String(), forward.SourceNotAllowed.String()
		return r
	}
	inside, outside := pool(f.Routes[0]), pool(last)
	if inside == 0 {
		inside = outside
	}
	if inside != 0 {
		r.Endpoints = endpoints(p.Endpoints(inside))
	}
	if outside != 0 && outside != inside && !slices.Equal(p.Cluster, p.Local) {
		r.LocalEndpoints = endpoints(p.Endpoints(outside))
	}
	return r
}

// pool gives the pool that a route forwards to, or 0.
func pool(r forward.Route) forward.Pool {
	if r.Do == forward.Forward {
		return r.Pool
	}
	return 0
}

func endpoints(list []forward.Endpoint) []Endpoint {
	out := make([]Endpoint, 0, len(list))
	for _, e := range list {
		out = append(out, Endpoint{Addr: e.AddrPort.String(), Share: 1 / float64(len(list))})
	}
	return out
}

// FrontendText gives "address:port", with "*" for the address of a node port.
func FrontendText(f *forward.Frontend) string {
	if !f.Addr.IsValid() {
		return "*:" + strconv.Itoa(int(f.Port))
	}
	return netip.AddrPortFrom(f.Addr, f.Port).String()
}

func reasonText(r forward.Reason) string {
	if r == forward.NoReason {
		return ""
	}
	return r.String()
}

func seconds(d time.Duration) int { return int(d / time.Second) }

func texts(list []netip.Prefix) []string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	slices.Sort(out)
	return out
}

// A rowKey tells frontends of one node apart.
type rowKey struct{ family, frontend, proto string }

func (r *Row) key() rowKey { return rowKey{r.Family, r.Frontend, r.Proto} }

// Held gives the rows that a backend read from the kernel. Where it has one row for what a frontend forwards and another
// for what it refuses, as these are different objects, they become one: what clients from outside get is said first.
func Held(family model.Family, rows []backend.Row) []Row {
	out := make([]Row, 0, len(rows))
	at := make(map[rowKey]int, len(rows))
	for i := range rows {
		r := held(family, &rows[i])
		first, found := at[r.key()]
		switch {
		case !found:
			at[r.key()] = len(out)
			out = append(out, r)
		case r.Do != forward.Forward.String():
			out[first].Do, out[first].Reason = r.Do, r.Reason
			setIfEmpty(&out[first].Kind, r.Kind)
		default:
			r.Do, r.Reason = out[first].Do, out[first].Reason
			setIfEmpty(&r.Kind, out[first].Kind)
			out[first] = r
		}
	}
	return out
}

func setIfEmpty(s *string, value string) {
	if *s == "" {
		*s = value
	}
}

func held(family model.Family, b *backend.Row) Row {
	r := Row{
		Family: family.String(), Service: b.Service, Kind: b.Kind, Frontend: frontendText(b.Frontend), Proto: b.Proto,
		Do: b.Do, Reason: b.Reason, AffinitySeconds: seconds(b.Affinity), Allow: texts(b.Allow),
		Filtered:  len(b.Allow) > 0 || b.Reason == forward.SourceNotAllowed.String(),
		Endpoints: rowEndpoints(b.Endpoints), Scheduler: b.Scheduler,
	}
	if len(b.Draining) > 0 {
		r.Draining = rowEndpoints(b.Draining)
	}
	if r.Reason == forward.NoReason.String() {
		r.Reason = ""
	}
	if strings.HasPrefix(r.Frontend, "*:") {
		setIfEmpty(&r.Kind, forward.NodePort.String())
	}
	if len(b.LocalEndpoints) > 0 && !slices.Equal(b.LocalEndpoints, b.Endpoints) {
		r.LocalEndpoints = rowEndpoints(b.LocalEndpoints)
	}
	return r
}

// frontendText writes a node port's address as "*", however the backend wrote it.
func frontendText(s string) string {
	for _, any := range []string{":", "0.0.0.0:", "[::]:"} {
		if port, found := strings.CutPrefix(s, any); found {
			return "*:" + port
		}
	}
	return s
}

func rowEndpoints(list []backend.RowEndpoint) []Endpoint {
	out := make([]Endpoint, 0, len(list))
	for _, e := range list {
		out = append(out, Endpoint{
			Addr: e.Addr.String(), Share: e.Share, Weight: int(e.Weight), Active: int(e.Active), Inactive: int(e.Inactive),
		})
	}
	slices.SortFunc(out, func(x, y Endpoint) int { return strings.Compare(x.Addr, y.Addr) })
	return out
}

// Compare sets what is wanted against what the kernel holds, both of the same families: the wanted rows with their
// drift, and after them the rows that nobody wants.
func Compare(want, have []Row) []Row {
	held := make(map[rowKey]*Row, len(have))
	for i := range have {
		held[have[i].key()] = &have[i]
	}
	out := make([]Row, 0, len(want))
	for _, w := range want {
		h, found := held[w.key()]
		delete(held, w.key())
		if !found {
			w.Drift = DriftMissing
		} else if w.Detail = difference(&w, h); w.Detail != "" {
			w.Drift = DriftChanged
		} else {
			w.Drift = DriftNone
		}
		out = append(out, w)
	}
	for i := range have {
		if h := &have[i]; held[h.key()] == h {
			extra := *h
			extra.Drift = DriftExtra
			out = append(out, extra)
		}
	}
	return out
}

// difference says in one sentence how the kernel's row differs from the wanted one, or nothing.
func difference(want, have *Row) string {
	switch {
	case want.Do != have.Do:
		return fmt.Sprintf("the kernel has %s instead of %s", have.Do, want.Do)
	case have.Service != "" && want.Service != have.Service:
		return fmt.Sprintf("the kernel has it for %s", have.Service)
	case want.AffinitySeconds != have.AffinitySeconds:
		return fmt.Sprintf("the kernel has an affinity of %d s instead of %d s", have.AffinitySeconds, want.AffinitySeconds)
	case want.Filtered != have.Filtered || !slices.Equal(want.Allow, have.Allow):
		return fmt.Sprintf("the kernel admits %s instead of %s", admitted(have), admitted(want))
	}
	if d := membership(want.Endpoints, have.Endpoints); d != "" {
		return d
	}
	return membership(want.LocalEndpoints, have.LocalEndpoints)
}

func admitted(r *Row) string {
	switch {
	case !r.Filtered:
		return "every source"
	case len(r.Allow) == 0:
		return "no source"
	}
	return strings.Join(r.Allow, " ")
}

// membership names the endpoints that one list has and the other has not, or whose share is off by more than 1 %.
func membership(want, have []Endpoint) string {
	shares, weighted := make(map[string]float64, len(have)), map[string]bool{}
	for _, e := range have {
		shares[e.Addr] = e.Share
		if e.Weight > 0 {
			weighted[e.Addr] = true
		}
	}
	var parts []string
	for _, e := range want {
		share, found := shares[e.Addr]
		delete(shares, e.Addr)
		switch {
		case !found:
			parts = append(parts, "without "+e.Addr)
		case weighted[e.Addr]: // what is wanted does not say how weights share
		case share-e.Share > e.Share/100 || e.Share-share > e.Share/100:
			parts = append(parts, fmt.Sprintf("%s with %.1f %% instead of %.1f %%", e.Addr, share*100, e.Share*100))
		}
	}
	for _, e := range have {
		if _, extra := shares[e.Addr]; extra {
			parts = append(parts, "with "+e.Addr)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	const most = 3
	if n := len(parts); n > most {
		parts = append(parts[:most], fmt.Sprintf("and %d more differences", n-most))
	}
	return "the kernel has it " + strings.Join(parts, ", ")
}

// Blame says on every frontend of a Service port why it is not served, or is served otherwise than it asks for. The drift
// is that of rows which have none.
func Blame(rows []Row, port forward.PortName, drift, why string) {
	for i := range rows {
		if r := &rows[i]; r.Service == port.Service() && r.Proto == port.Proto.String() && r.Drift != DriftExtra {
			r.Detail = why
			if r.Drift == DriftNone || r.Drift == "" {
				r.Drift = drift
			}
		}
	}
}
