package ipvs

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/route"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A plan is the steps from what the kernel holds to what is wanted, in an order in which it may stop anywhere. What
// classifies, filters and owns a frontend is there before its virtual server, which is there before the address becomes
// local; what goes, goes in the opposite order. A frontend that drops some clients keeps those that it serves served.
type plan struct {
	steps []step
	rules ruleset.Difference
	// clean tells that nothing is wanted any more: rules go behind what they guard.
	clean bool
	// conflicts tells that there are ports to be reported.
	conflicts bool
}

// A step is what one edge does in one call. Only one of the fields is used.
type step struct {
	sets    []ipset.Op
	rules   bool
	servers []ipvs.Op
	routes  []route.Op
	// former are changes of what is local in the other way.
	former []route.Op
	// reap tells to look which endpoints that drain have no connections left.
	reap bool
}

// Empty tells that nothing is to be done.
func (p *plan) Empty() bool {
	return p.Steps() == 0 && !p.conflicts && !slices.ContainsFunc(p.steps, func(s step) bool { return s.reap })
}

// Steps counts the kernel objects to be written or removed.
func (p *plan) Steps() int {
	n := p.rules.Steps()
	for _, s := range p.steps {
		n += len(s.sets) + len(s.servers) + len(s.routes) + len(s.former)
	}
	return n
}

// String prints the steps.
func (p *plan) String() string {
	var b strings.Builder
	for _, s := range p.steps {
		if s.rules {
			b.Write(payload(p.rules))
		}
		for _, o := range s.sets {
			fmt.Fprintf(&b, "%s %s %s\n", o.Verb, o.Set.Name, o.Entry)
		}
		for _, o := range s.servers {
			fmt.Fprintf(&b, "%s %s %s %s weight %d\n", o.Verb, o.Key, o.Properties, o.To, o.Weight)
		}
		if s.reap {
			b.WriteString("take away endpoints whose connections have ended\n")
		}
		for _, o := range slices.Concat(s.routes, s.former) {
			fmt.Fprintf(&b, "%s %s source %s\n", o.Verb, o.Addr, o.Source)
		}
	}
	return b.String()
}

// payload writes rules as iptables-restore reads them. Mangle comes first, as it has the filters.
func payload(d ruleset.Difference) []byte {
	var b bytes.Buffer
	for _, table := range []string{ruleset.Mangle, ruleset.Filter, ruleset.NAT} {
		var s ruleset.Section
		for _, c := range d.Changes {
			if c.ID.Table == table {
				s.Chain(c.ID, c.New, d.Pinned[c.ID])
			}
		}
		for _, j := range d.Insert {
			if j.Table == table {
				s.Insert(j)
			}
		}
		for _, j := range d.Remove {
			if j.Table == table {
				s.Remove(j)
			}
		}
		s.Print(&b, table)
	}
	return b.Bytes()
}

// plan gives the steps that lead from what is held to what is wanted.
func (c *compiler) plan() *plan {
	p := &c.program
	out := &plan{rules: ruleset.Diff(p.rules, &p.held), clean: !c.begun, conflicts: len(c.conflicts) > 0}
	rules := step{rules: true}
	made, gone := c.setSteps()
	adds, drops := c.memberOps(true), c.memberOps(false)
	staying, going := c.split(drops)
	servers := c.serverOps()
	locals := c.localOps()
	out.add(step{sets: made})
	out.add(step{sets: pick(adds, setServed, setAddresses, setAllowed, setFiltered, setNotPods, setAll, setSplit, setHealth)})
	if !out.clean {
		out.add(rules)
	}
	out.add(step{servers: servers.come})
	out.add(step{sets: pick(adds, setDropped)})
	out.add(step{routes: locals.come})
	out.add(step{former: c.formerOps()})
	out.add(step{sets: pick(staying, setDropped)})
	out.add(step{servers: servers.quiet})
	out.add(step{sets: pick(staying, setSplit)})
	out.add(step{servers: servers.quietMarked})
	out.add(step{reap: c.due()})
	out.add(step{servers: servers.leave})
	out.add(step{routes: locals.leave})
	if out.clean {
		out.add(rules)
	}
	out.add(step{sets: pick(going, setDropped, setSplit)})
	out.add(step{sets: pick(drops, setAll, setNotPods, setFiltered, setAllowed, setAddresses, setServed, setHealth)})
	out.add(step{sets: gone})
	return out
}

// split tells the entries of frontends that stay from those of frontends that go.
func (c *compiler) split(drops map[string][]ipset.Op) (staying, going map[string][]ipset.Op) {
	staying, going = map[string][]ipset.Op{}, map[string][]ipset.Op{}
	for _, set := range []string{setDropped, setSplit} {
		for _, o := range drops[set] {
			to := going
			if c.program.members.wanted(member{setServed, o.Entry}).there {
				to = staying
			}
			to[set] = append(to[set], o)
		}
	}
	return staying, going
}

func (p *plan) add(s step) {
	if s.rules && p.rules.Steps() > 0 || s.reap || len(s.sets) > 0 || len(s.servers) > 0 || len(s.routes) > 0 ||
		len(s.former) > 0 {
		p.steps = append(p.steps, s)
	}
}

// setSteps gives the sets that are to be made and those that are to go.
func (c *compiler) setSteps() (made, gone []ipset.Op) {
	l := &c.program.sets
	for _, name := range slices.Concat(sets(), upstreamSets()) {
		held, differs := l.held[name]
		if !differs {
			continue
		}
		want := l.wanted(name)
		switch {
		case !held.there:
			made = append(made, ipset.Op{Verb: ipset.Create, Set: want.value})
		case !want.there:
			gone = append(gone, ipset.Op{Verb: ipset.Destroy, Set: ipset.Set{Name: setName(name, c.opt.Family)}})
		default:
			made = append(made, c.replace(name, want.value)...)
		}
	}
	return made, gone
}

// replace makes a set with other properties anew beside the old one, with all its entries, and exchanges the two.
func (c *compiler) replace(name string, want ipset.Set) []ipset.Op {
	beside := want
	beside.Name = "KUBE-TMP-" + strings.TrimPrefix(want.Name, "KUBE-")
	beside.Name = beside.Name[:min(len(beside.Name), ipset.MaxName)]
	ops := []ipset.Op{{Verb: ipset.Destroy, Set: beside}, {Verb: ipset.Create, Set: beside}}
	for m, mark := range c.program.members.want {
		if m.set == name {
			ops = append(ops, ipset.Op{Verb: ipset.Add, Set: beside, Entry: m.entry, Mark: mark})
		}
	}
	return append(ops, ipset.Op{Verb: ipset.Swap, Set: want, With: beside.Name}, ipset.Op{Verb: ipset.Destroy, Set: beside})
}

// memberOps gives the entries to be added, or those to be removed, by their sets. What goes with its whole set is left
// out.
func (c *compiler) memberOps(add bool) map[string][]ipset.Op {
	l := &c.program.members
	out := map[string][]ipset.Op{}
	for m := range l.held {
		want := l.wanted(m)
		set, there := c.program.sets.want[m.set]
		if want.there != add || !there {
			continue
		}
		verb := ipset.Remove
		if add {
			verb = ipset.Add
		}
		out[m.set] = append(out[m.set], ipset.Op{Verb: verb, Set: set, Entry: m.entry, Mark: want.value})
	}
	for _, ops := range out {
		slices.SortFunc(ops, func(a, b ipset.Op) int { return a.Entry.Compare(b.Entry) })
	}
	return out
}

// pick joins the changes of sets in the given order.
func pick(ops map[string][]ipset.Op, names ...string) []ipset.Op {
	var out []ipset.Op
	for _, n := range names {
		out = append(out, ops[n]...)
	}
	return out
}

// movement is what comes or changes, and what goes.
type movement[T any] struct{ come, leave []T }

// serverMovement has besides the endpoints that are to get no more connections, those of marks apart: these keep theirs
// until no packet is marked any more.
type serverMovement struct{ come, quiet, quietMarked, leave []ipvs.Op }

func (c *compiler) serverOps() serverMovement {
	var out serverMovement
	p := &c.program
	for k, held := range p.servers.held {
		switch want := p.servers.wanted(k); {
		case !want.there:
			out.leave = append(out.leave, ipvs.Op{Verb: ipvs.RemoveServer, Key: k})
		case held.there:
			out.come = append(out.come, ipvs.Op{Verb: ipvs.EditServer, Key: k, Properties: want.value})
		default:
			out.come = append(out.come, ipvs.Op{Verb: ipvs.AddServer, Key: k, Properties: want.value})
		}
	}
	for d, held := range p.destinations.held {
		want := p.destinations.wanted(d)
		o := ipvs.Op{
			Verb: ipvs.EditDestination, Key: d.server, To: d.addr, Weight: want.value.weight, Upper: uint32(want.value.until),
		}
		switch {
		case !want.there:
			if p.servers.wanted(d.server).there { // else it goes with its server
				out.leave = append(out.leave, ipvs.Op{Verb: ipvs.RemoveDestination, Key: d.server, To: d.addr})
			}
		case !held.there:
			o.Verb = ipvs.AddDestination
			out.come = append(out.come, o)
		case o.Weight == 0 && d.server.Mark != 0:
			out.quietMarked = append(out.quietMarked, o)
		case o.Weight == 0:
			out.quiet = append(out.quiet, o)
		default:
			out.come = append(out.come, o)
		}
	}
	for _, ops := range [][]ipvs.Op{out.come, out.quiet, out.quietMarked, out.leave} {
		slices.SortFunc(ops, compareServerOps)
	}
	return out
}

func compareServerOps(a, b ipvs.Op) int {
	return cmp.Or(a.Key.Compare(b.Key), cmp.Compare(a.Verb, b.Verb), a.To.Compare(b.To))
}

// formerOps takes away what is local in the other way.
func (c *compiler) formerOps() []route.Op {
	var out []route.Op
	for a := range c.former {
		out = append(out, route.Op{Verb: route.Remove, Local: route.Local{Addr: a}})
	}
	slices.SortFunc(out, func(a, b route.Op) int { return a.Addr.Compare(b.Addr) })
	return out
}

func (c *compiler) localOps() movement[route.Op] {
	var out movement[route.Op]
	l := &c.program.locals
	for a, held := range l.held {
		want := l.wanted(a)
		o := route.Op{Verb: route.Add, Local: route.Local{Addr: a, Source: want.value}}
		switch {
		case !want.there:
			o.Verb = route.Remove
			out.leave = append(out.leave, o)
			continue
		case held.there:
			o.Verb = route.Change
		}
		out.come = append(out.come, o)
	}
	byAddr := func(a, b route.Op) int { return a.Addr.Compare(b.Addr) }
	slices.SortFunc(out.come, byAddr)
	slices.SortFunc(out.leave, byAddr)
	return out
}

// observed takes over what was read from the kernel.
func (c *compiler) observed(o *Observation) {
	p := &c.program
	p.held = *o.rules
	p.sets.observe(o.sets)
	p.members.observe(o.members)
	p.servers.observe(o.servers)
	shares := make(map[destination]share, len(o.destinations))
	for d, v := range o.destinations {
		shares[d] = share{v.Weight, moment(v.Upper)}
		if v.Method != ipvs.Masquerade || v.Lower != 0 {
			shares[d] = share{v.Weight, math.MaxUint32} // no endpoint is wanted so
		}
	}
	p.destinations.observe(shares)
	p.locals.observe(o.locals)
	c.foreign = o.foreign
	for k := range o.foreign {
		if p.servers.wanted(k).there {
			if n, found := c.ownerOfServer(ipvs.Op{Key: k}); found {
				c.conflict(n, k)
			}
		}
	}
	c.former = map[netip.Addr]bool{}
	for _, a := range o.former {
		c.former[a] = true
	}
	c.adopt(o)
}

// done takes over what a set's change made of it.
func (c *compiler) doneSet(o ipset.Op, f model.Family) {
	p := &c.program
	name := plainName(o.Set.Name, f)
	switch o.Verb {
	case ipset.Create:
		p.sets.acknowledge(name, state[ipset.Set]{o.Set, true})
	case ipset.Destroy:
		p.sets.acknowledge(name, state[ipset.Set]{})
		for m := range p.members.held {
			if m.set == name {
				p.members.acknowledge(m, state[uint32]{})
			}
		}
	case ipset.Add:
		p.members.acknowledge(member{name, o.Entry}, state[uint32]{o.Mark, true})
	case ipset.Remove:
		p.members.acknowledge(member{name, o.Entry}, state[uint32]{})
	case ipset.Swap:
		p.sets.acknowledge(name, state[ipset.Set]{o.Set, true})
		for m := range p.members.held {
			if m.set == name {
				p.members.acknowledge(m, p.members.wanted(m))
			}
		}
	case ipset.Rename, ipset.Flush: // not in any plan
	}
}

// plainName gives a set's name as in IPv4; "" for one that is only there while another is replaced.
func plainName(name string, f model.Family) string {
	for _, s := range slices.Concat(sets(), upstreamSets()) {
		if setName(s, f) == name {
			return s
		}
	}
	return ""
}

func (c *compiler) doneServer(o ipvs.Op) {
	p := &c.program
	d := destination{o.Key, o.To}
	switch o.Verb {
	case ipvs.AddServer, ipvs.EditServer:
		p.servers.acknowledge(o.Key, state[ipvs.Properties]{o.Properties, true})
	case ipvs.RemoveServer:
		p.servers.acknowledge(o.Key, state[ipvs.Properties]{})
		for d := range p.destinations.held {
			if d.server == o.Key {
				p.destinations.acknowledge(d, state[share]{})
			}
		}
	case ipvs.AddDestination, ipvs.EditDestination:
		p.destinations.acknowledge(d, state[share]{share{o.Weight, moment(o.Upper)}, true})
	case ipvs.RemoveDestination:
		p.destinations.acknowledge(d, state[share]{})
	}
}

func (c *compiler) doneRoute(o route.Op) {
	held := state[netip.Addr]{o.Source, true}
	if o.Verb == route.Remove {
		held = state[netip.Addr]{}
	}
	c.program.locals.acknowledge(o.Addr, held)
}
