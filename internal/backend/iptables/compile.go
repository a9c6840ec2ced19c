package iptables

import (
	"maps"
	"slices"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
)

// A compiler keeps the wanted program up to date with a forwarding table, and notes which chains differ from what the
// kernel acknowledged. Its work for a change is proportional to the change, but for a change of the pods' detector, of
// the node ports' addresses or of the layout, which renders every port again.
type compiler struct {
	opt     Options
	ctx     forward.Context
	compact bool
	// endpoints is the number of pool members in the whole table: it decides the layout.
	endpoints int
	want      ruleset.Program
	ports     map[forward.PortName]*compiled
	trees     [trees]*tree
	// refused are ports that the kernel did not take; they are left out until the table gives them again.
	refused map[forward.PortName]error
	// dirty has the acknowledged state of every chain that is wanted otherwise.
	dirty map[ruleset.ID]ruleset.State
	// rules counts the wanted chains' rules by table.
	rules map[string]int
}

// compiled remembers what a port put into the program, to take it out again.
type compiled struct {
	chains   []ruleset.ID
	dispatch []placed
	size     int
}

func newCompiler(opt Options) *compiler {
	if opt.CompactAbove == 0 {
		opt.CompactAbove = defaultCompactAbove
	}
	c := &compiler{
		opt: opt, want: ruleset.NewProgram(), ports: map[forward.PortName]*compiled{}, refused: map[forward.PortName]error{},
		dirty: map[ruleset.ID]ruleset.State{}, rules: map[string]int{},
	}
	c.plant()
	return c
}

// plant makes empty dispatch trees.
func (c *compiler) plant() {
	f := c.opt.Family
	c.trees = [trees]*tree{
		treeServices:          newTree(tableNAT, chainServices, f, true),
		treeNodePorts:         newTree(tableNAT, chainNodePorts, f, false),
		treeRefused:           newTree(tableFilter, chainServices, f, true),
		treeExternal:          newTree(tableFilter, chainExternal, f, true),
		treeExternalNodePorts: newTree(tableFilter, chainExternalNodePort, f, false),
		treeFirewall:          newTree(tableFilter, chainFirewall, f, true),
		treeHealthCheck:       newTree(tableFilter, chainNodePorts, f, false),
	}
}

// set wants a chain; drop wants it gone. Both note what the kernel has instead.
func (c *compiler) set(id ruleset.ID, b ruleset.Body) {
	c.change(id, ruleset.State{Body: b, Present: true})
}
func (c *compiler) drop(id ruleset.ID) { c.change(id, ruleset.State{}) }

func (c *compiler) change(id ruleset.ID, next ruleset.State) {
	old, present := c.want.Chains[id]
	was := ruleset.State{Body: old, Present: present}
	if was == next {
		return
	}
	acked, known := c.dirty[id]
	if !known {
		acked = was
		c.dirty[id] = acked
	}
	if acked == next {
		delete(c.dirty, id)
	}
	c.rules[id.Table] += next.Body.Count() - old.Count()
	if next.Present {
		c.want.Chains[id] = next.Body
	} else {
		delete(c.want.Chains, id)
	}
}

// update takes a change of the table. Nil wants nothing at all.
func (c *compiler) update(t *forward.Table, d forward.Delta) []backend.Problem {
	if t == nil {
		c.clear()
		return nil
	}
	names := d.Ports
	full := c.want.Jumps == nil || !sameRules(&c.ctx, &t.Context)
	c.ctx = t.Context
	for _, n := range names {
		delete(c.refused, n)
		c.count(t, n)
	}
	if compact := c.layout(); full || compact != c.compact {
		c.compact = compact
		c.want.Jumps = c.opt.jumps()
		c.fixed()
		names = t.Names()
		for n := range c.ports {
			if t.Port(n) == nil {
				names = append(names, n)
			}
		}
	}
	// A frontend can pass from one port to another, so all are taken out before any is put in.
	for _, n := range names {
		c.retract(n)
	}
	var problems []backend.Problem
	for _, n := range names {
		if err := c.port(n, t.Port(n)); err != nil {
			problems = append(problems, backend.Problem{Port: n, Reason: "CannotExpress", Err: err})
		}
	}
	c.flush()
	return problems
}

// layout tells whether the compact layout is due. A table that shrinks keeps it for a while, so that one which hovers
// around the bound is not written anew all the time.
func (c *compiler) layout() bool {
	bound := c.opt.CompactAbove
	if c.compact {
		bound -= bound / 4
	}
	return c.endpoints > bound && !c.opt.NoBPF
}

// sameRules tells whether two contexts give the same rules. The host's other addresses are left to the kernel, so that a
// pod's new interface costs nothing.
func sameRules(a, b *forward.Context) bool {
	return a.Detector == b.Detector && a.NodePorts.All == b.NodePorts.All && a.NodePorts.Loopback == b.NodePorts.Loopback &&
		slices.Equal(a.NodePorts.Addrs, b.NodePorts.Addrs)
}

// count keeps the number of endpoints. A port that is new gets its entry here.
func (c *compiler) count(t *forward.Table, n forward.PortName) {
	p, size := t.Port(n), 0
	if p != nil {
		size = len(p.Cluster) + len(p.Local)
	}
	have := c.ports[n]
	if have == nil {
		have = &compiled{}
		c.ports[n] = have
	}
	c.endpoints += size - have.size
	have.size = size
}

// fixed sets the chains that belong to no port.
func (c *compiler) fixed() {
	for id, b := range c.opt.fixed(c.compact) {
		c.set(id, b)
	}
	for _, t := range c.trees {
		t.top.dirty = true // roots carry rules that depend on the context
	}
}

// retract takes a port's rules out of the dispatch trees.
func (c *compiler) retract(n forward.PortName) {
	have := c.ports[n]
	if have == nil {
		return
	}
	for _, p := range have.dispatch {
		c.trees[p.tree].set(p.key, "")
	}
	have.dispatch = nil
}

// port renders one Service port anew, whose dispatch rules were retracted; nil takes it out.
func (c *compiler) port(n forward.PortName, p *forward.Port) error {
	have := c.ports[n]
	if have == nil {
		have = &compiled{}
		c.ports[n] = have
	}
	var out rendering
	var err error
	if p != nil && c.refused[n] == nil {
		if out, err = render(c.opt, &c.ctx, c.compact, p); err != nil {
			out = rendering{}
		}
	}
	for _, id := range have.chains {
		if _, stays := out.chains[id]; !stays {
			c.drop(id)
		}
	}
	for id, b := range out.chains {
		c.set(id, b)
	}
	for _, p := range out.dispatch {
		c.trees[p.tree].set(p.key, p.rule)
	}
	if p == nil {
		delete(c.ports, n)
		return nil
	}
	have.chains = slices.SortedFunc(maps.Keys(out.chains), ruleset.ID.Compare)
	have.dispatch = out.dispatch
	return err
}

// refuse leaves a port out because the kernel did not take it.
func (c *compiler) refuse(n forward.PortName, err error) {
	size := c.ports[n].size
	c.refused[n] = err
	c.retract(n)
	_ = c.port(n, nil)
	c.ports[n] = &compiled{size: size}
	c.flush()
}

// flush brings the chains of the dispatch trees up to date.
func (c *compiler) flush() {
	const last = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
	head := map[int][]string{treeHealthCheck: loopbackProtection(&c.ctx)}
	tail := map[int][]string{
		treeServices: nodePortJumps(&c.ctx, last, chainNodePorts),
		treeExternal: nodePortJumps(&c.ctx, "kubernetes service nodeports without endpoints", chainExternalNodePort),
	}
	for i, t := range c.trees {
		root, changed := t.flush(
			func(name string, b ruleset.Body) { c.set(ruleset.In(t.table, name), b) },
			func(name string) { c.drop(ruleset.In(t.table, name)) })
		if changed {
			c.set(ruleset.In(t.table, t.root), ruleset.BodyOf(slices.Concat(head[i], root, tail[i])...))
		}
	}
}

// clear wants nothing.
func (c *compiler) clear() {
	for id := range c.want.Chains {
		c.drop(id)
	}
	c.want.Jumps, c.endpoints, c.compact = nil, 0, false
	clear(c.ports)
	clear(c.refused)
	c.plant()
}

// owner finds the port that a line of the program belongs to.
func (c *compiler) owner(id ruleset.ID, rule string) (forward.PortName, bool) {
	for n, have := range c.ports {
		if slices.Contains(have.chains, id) {
			return n, true
		}
		for _, p := range have.dispatch {
			if p.rule == rule && c.trees[p.tree].table == id.Table {
				return n, true
			}
		}
	}
	return forward.PortName{}, false
}

// acknowledge notes that the kernel holds what is wanted.
func (c *compiler) acknowledge() { clear(c.dirty) }
