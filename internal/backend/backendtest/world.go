package backendtest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A world is the cluster as one family's proxy knows it, and the forwarding tables that follow.
type world struct {
	settings
	snapshot *model.Snapshot
	// builder makes the table step by step, table is the same from scratch: it never changes once it is made. Before is
	// the table that stood there one step ago.
	builder       *forward.Builder
	table, before *forward.Table
	// read are the findings of the last event about each object, by what the sources read.
	read map[string][]model.Finding
	// gone are the Service ports that were removed or replaced since the world began, oldest first.
	gone []*forward.Port
}

func newWorld(s settings) *world {
	return &world{
		settings: s, snapshot: model.NewSnapshot(), builder: forward.NewBuilder(s.cfg), read: map[string][]model.Finding{},
	}
}

// take feeds events, and tells what changed in the builder's table.
func (w *world) take(t testing.TB, events []model.Event) forward.Delta {
	t.Helper()
	var dirty model.Dirty
	for _, e := range events {
		w.snapshot.Apply(e, &dirty)
		w.note(e)
	}
	return w.update(t, dirty)
}

// note keeps the findings of an event.
func (w *world) note(e model.Event) {
	key := ""
	switch {
	case e.Service != nil:
		key = "Service " + e.Service.Name.String()
	case e.Slice != nil:
		key = "EndpointSlice " + e.Slice.Name.String()
	case e.Node != nil:
		key = "Node " + e.Node.Name
	}
	for _, f := range e.Findings {
		key = f.Kind + " " + f.Object
	}
	w.read[key] = e.Findings
}

// update brings both tables up to date, and fails the test if they differ.
func (w *world) update(t testing.TB, dirty model.Dirty) forward.Delta {
	t.Helper()
	first := w.table == nil
	delta := w.builder.Update(w.snapshot, dirty, w.host)
	if first {
		delta = everything(w.builder.Table())
	}
	w.before = w.table
	w.table, _ = forward.Build(w.cfg, w.snapshot, w.host)
	if diff := cmp.Diff(w.table.String(), w.builder.Table().String()); diff != "" {
		t.Errorf("table (-from scratch +step by step):\n%s", diff)
	}
	if w.before != nil {
		for _, name := range difference(w.before, w.table).Ports {
			if old := w.before.Port(name); old != nil {
				w.gone = append(w.gone, old)
			}
		}
	}
	return delta
}

// reset starts over with new settings and the same objects, as a process does that was restarted with another
// configuration.
func (w *world) reset(t testing.TB, s settings) {
	t.Helper()
	w.settings, w.builder = s, forward.NewBuilder(s.cfg)
	w.update(t, model.Dirty{Node: true})
}

// findings gives what is to be told about objects now.
func (w *world) findings() []model.Finding {
	var list []model.Finding
	for _, found := range w.read {
		list = append(list, found...)
	}
	for _, found := range w.builder.Findings() {
		list = append(list, found...)
	}
	slices.SortFunc(list, func(a, b model.Finding) int { return strings.Compare(a.String(), b.String()) })
	return list
}

// everything is the delta that a first compile gets.
func everything(t *forward.Table) forward.Delta {
	if t == nil {
		return forward.Delta{}
	}
	return forward.Delta{Ports: t.Names(), Context: true}
}

// difference is the delta from one table to another; either may be nil.
func difference(old, next *forward.Table) forward.Delta {
	if old == nil || next == nil {
		return everything(next)
	}
	d := forward.Delta{Context: !old.Context.Equal(&next.Context)}
	for _, n := range next.Names() {
		if !next.Port(n).Equal(old.Port(n)) {
			d.Ports = append(d.Ports, n)
		}
	}
	for _, n := range old.Names() {
		if next.Port(n) == nil {
			d.Ports = append(d.Ports, n)
		}
	}
	slices.SortFunc(d.Ports, forward.PortName.Compare)
	return d
}

// portText prints a table's Service ports without what is the same for all.
func portText(t *forward.Table) string {
	var b strings.Builder
	for _, n := range t.Names() {
		b.WriteString(t.Port(n).String())
	}
	return b.String()
}

// contextText prints what is the same for all Service ports.
func contextText(t *forward.Table) string {
	text, _, _ := strings.Cut(t.String(), "\n\n")
	return text
}

// clients are the names that scripts may use for a packet's source: hosts of the lab.
func clientAddr(name string, is4 bool) (netip.Addr, error) {
	var v4, v6 string
	number := 0
	if len(name) == 2 {
		number = int(name[1] - '0')
	}
	switch {
	case name == "out":
		v4, v6 = "10.20.0.200", "fd20::200"
	case name == "far":
		v4, v6 = "198.51.100.7", "2001:db8:100::7"
	case name == "na" || name == "nb" || name == "nc":
		node := 11 + int(name[1]-'a')
		v4, v6 = fmt.Sprintf("10.20.0.%d", node), fmt.Sprintf("fd20::%d", node)
	case len(name) == 2 && name[0] == 's' && number >= 1 && number <= labNodes:
		v4, v6 = fmt.Sprintf("10.60.%d.11", number), fmt.Sprintf("fd60:%d::11", number)
	case len(name) == 2 && name[0] == 'c' && number >= 1 && number <= labNodes:
		v4, v6 = fmt.Sprintf("10.60.%d.21", number), fmt.Sprintf("fd60:%d::21", number)
	default:
		a, err := netip.ParseAddr(name)
		if err != nil {
			return netip.Addr{}, fmt.Errorf("%q is neither an address nor na, nb, nc, s1, c1, s2, c2, s3, c3, out or far", name)
		}
		return a, nil
	}
	if is4 {
		return netip.MustParseAddr(v4), nil
	}
	return netip.MustParseAddr(v6), nil
}

// labNodes is the number of nodes in the lab.
const labNodes = 3

func nodeName(i int) string { return "n" + string(rune('a'+i-1)) }
