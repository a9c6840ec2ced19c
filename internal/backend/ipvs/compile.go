package ipvs

import (
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Options are the facts that a program depends on besides the forwarding table. They stay the same as long as the
// backend lives.
type Options struct {
	Family       model.Family
	Masquerading ruleset.Masquerading
	// Scheduler is how endpoints are chosen where a Service does not say; the zero value is "rr".
	Scheduler Scheduler
	// Exclude are addresses whose virtual servers are others', unless this mode has made them itself.
	Exclude []netip.Prefix
	// Drain is how long a TCP endpoint that goes may keep its connections; 0 is 15 minutes.
	Drain time.Duration
	// Now is the clock; nil is the machine's.
	Now func() time.Time

	// onDevice tells that addresses are on a device. Then the kernel takes the address itself for the source of this
	// machine's own connections to it.
	onDevice bool
}

// A destination names one endpoint of a virtual server.
type destination struct {
	server ipvs.Key
	addr   netip.AddrPort
}

// A share is how a destination serves. One with weight 0 gets no new connections, and keeps those that it has until the
// given time, see drain.go; until is 0 for the others.
type share struct {
	weight uint16
	until  moment
}

// A program is all that is wanted of the kernel, and what it holds where that differs.
type program struct {
	rules ruleset.Program
	// held are the rules that the kernel has.
	held         ruleset.Observation
	sets         ledger[string, ipset.Set]
	members      ledger[member, uint32]
	servers      ledger[ipvs.Key, ipvs.Properties]
	destinations ledger[destination, share]
	locals       ledger[netip.Addr, netip.Addr]
}

func newProgram() program {
	return program{
		rules: ruleset.NewProgram(), held: ruleset.Observation{Chains: map[ruleset.ID]ruleset.Body{}},
		sets: newLedger[string, ipset.Set](), members: newLedger[member, uint32](),
		servers: newLedger[ipvs.Key, ipvs.Properties](), destinations: newLedger[destination, share](),
		locals: newLedger[netip.Addr, netip.Addr](),
	}
}

// A compiler keeps the wanted program up to date with a forwarding table. Its work for a change is proportional to the
// change, but for a change of this machine's addresses, which renders the ports again that depend on them.
type compiler struct {
	opt Options
	ctx forward.Context
	// begun tells that there is a table.
	begun   bool
	program program
	ports   map[forward.PortName]*compiled
	// refused are ports that the kernel did not take; they are left out until the table gives them again.
	refused map[forward.PortName]error
	// users counts, for each address that is made local, the frontends that need it.
	users map[netip.Addr]int
	marks map[uint32]forward.Key
	// foreign are virtual servers of others, as they were seen last; conflicts the ports that want one of these, which no
	// report has named yet.
	foreign   map[ipvs.Key]bool
	conflicts map[forward.PortName]error
	drain     drain
	// former are addresses that are local in the other way, as they were seen last.
	former map[netip.Addr]bool
	// lacking are schedulers that the kernel does not have.
	lacking map[string]error
}

// compiled is a port as it was rendered last, to take it out again.
type compiled struct {
	port *forward.Port
	rendering
}

func newCompiler(opt Options) *compiler {
	if opt.Scheduler.Name == "" {
		opt.Scheduler.Name = defaultScheduler
	}
	if opt.Drain == 0 {
		opt.Drain = defaultDrain
	}
	if opt.Now == nil {
		opt.Now = time.Now //nolint:forbidigo // the clock's edge
	}
	return &compiler{
		opt: opt, program: newProgram(), ports: map[forward.PortName]*compiled{},
		refused: map[forward.PortName]error{}, users: map[netip.Addr]int{}, marks: map[uint32]forward.Key{},
		foreign: map[ipvs.Key]bool{}, conflicts: map[forward.PortName]error{}, drain: newDrain(), lacking: map[string]error{},
	}
}

// update takes a change of the table. Nil wants nothing at all.
func (c *compiler) update(t *forward.Table, d forward.Delta) []backend.Problem {
	if t == nil {
		c.clear()
		return nil
	}
	for _, n := range d.Ports {
		delete(c.refused, n)
		c.askAgain(t.Port(n), c.last(n))
	}
	names := c.touched(t, d.Ports)
	if !c.begun || c.ctx.Detector != t.Context.Detector {
		c.program.rules = ruleset.Program{Chains: c.opt.chains(t.Context.Detector), Jumps: c.opt.jumps()}
	}
	for _, s := range sets() {
		c.program.sets.set(s, spec(s, c.opt.Family))
	}
	before := c.ctx
	c.ctx, c.begun = t.Context, true
	if !slices.Equal(before.HostAddrs, t.Context.HostAddrs) {
		c.renewLocals()
	}
	// A frontend can pass from one port to another, so all are taken out before any is put in.
	was := left{servers: map[ipvs.Key]ipvs.Properties{}}
	for _, n := range names {
		c.retract(n, &was)
	}
	var problems []backend.Problem
	for _, n := range names {
		if err := c.put(t, n); err != nil {
			problems = append(problems, backend.Problem{Port: n, Reason: "CannotExpress", Err: err})
		} else if err := c.compromise(n); err != nil {
			problems = append(problems, backend.Problem{Port: n, Reason: reasonScheduler, Err: err, Served: true})
		}
	}
	c.retain(was)
	return problems
}

// touched gives the ports that must be rendered anew: those that changed, those whose node ports an address of theirs
// hides or lays open, and those that depend on this machine's addresses if these changed.
func (c *compiler) touched(t *forward.Table, changed []forward.PortName) []forward.PortName {
	seen := map[forward.PortName]bool{}
	for _, n := range changed {
		seen[n] = true
		hides(t, t.Port(n), seen)
		hides(t, c.last(n), seen)
	}
	if c.begun && !sameAddresses(&c.ctx, &t.Context) {
		for n, have := range c.ports {
			if have.port != nil && dependsOnHost(have.port, &c.ctx, &t.Context) {
				seen[n] = true
			}
		}
	}
	return slices.SortedFunc(maps.Keys(seen), forward.PortName.Compare)
}

// hides adds the ports whose node ports have the number of an address of a port's.
func hides(t *forward.Table, p *forward.Port, found map[forward.PortName]bool) {
	if p == nil {
		return
	}
	for i := range p.Frontends {
		f := &p.Frontends[i]
		if n, ok := t.Owner(forward.Key{Port: f.Port, Proto: p.Name.Proto}); ok && f.Addr.IsValid() {
			found[n] = true
		}
	}
}

// last gives a port as it was rendered last, or nil.
func (c *compiler) last(n forward.PortName) *forward.Port {
	if have := c.ports[n]; have != nil {
		return have.port
	}
	return nil
}

func sameAddresses(a, b *forward.Context) bool {
	return slices.Equal(a.HostAddrs, b.HostAddrs) && a.NodePorts.All == b.NodePorts.All &&
		slices.Equal(a.NodePorts.Addrs, b.NodePorts.Addrs)
}

// dependsOnHost tells whether a port is rendered otherwise when this machine's addresses change.
func dependsOnHost(p *forward.Port, before, after *forward.Context) bool {
	return slices.ContainsFunc(p.Frontends, func(f forward.Frontend) bool {
		return !f.Addr.IsValid() || before.IsHost(f.Addr) != after.IsHost(f.Addr)
	})
}

// renewLocals writes the addresses of Services again after this machine's own have changed: the source may be another,
// and the kernel may have taken routes away with an address.
func (c *compiler) renewLocals() {
	for a := range c.users {
		c.program.locals.set(a, c.source())
		c.program.locals.acknowledge(a, state[netip.Addr]{unknown(), true})
	}
}

// unknown is a source that no address has.
func unknown() netip.Addr { return netip.IPv6Unspecified() }

// source gives the address that this machine's own connections to Services come from; invalid if the kernel decides.
func (c *compiler) source() netip.Addr {
	if c.opt.onDevice {
		return netip.Addr{}
	}
	for _, a := range c.ctx.HostAddrs {
		if a.IsGlobalUnicast() {
			return a
		}
	}
	return netip.Addr{}
}

// left is what ports had before they were rendered anew.
type left struct {
	servers map[ipvs.Key]ipvs.Properties
	marks   []uint32
}

// retract takes out what a port put in, and notes it.
func (c *compiler) retract(n forward.PortName, was *left) {
	have := c.ports[n]
	if have == nil {
		return
	}
	p := &c.program
	for _, s := range have.servers {
		was.servers[s.key] = s.how
		p.servers.drop(s.key)
		for _, ep := range s.endpoints {
			c.leave(destination{s.key, ep.AddrPort})
		}
	}
	for _, m := range have.members {
		p.members.drop(m.member)
		if m.mark != 0 {
			was.marks = append(was.marks, m.mark)
		}
	}
	for _, a := range have.locals {
		if c.users[a]--; c.users[a] == 0 {
			delete(c.users, a)
			p.locals.drop(a)
			p.members.drop(member{setAddresses, ipset.Entry{Addr: a}})
		}
	}
	delete(c.ports, n)
}

// put renders a port, or leaves it out.
func (c *compiler) put(t *forward.Table, n forward.PortName) error {
	port := t.Port(n)
	if port == nil || c.refused[n] != nil {
		return nil //nolint:nilerr // that the kernel refused it was reported then
	}
	r := renderer{opt: c.opt, ctx: &c.ctx, table: t, mark: c.mark, port: port}
	r.scheduler, r.sticky, _ = c.schedulers(port) // compromise tells what became of the wish
	out, err := r.render()
	if err != nil {
		for _, m := range out.members {
			if m.mark != 0 {
				delete(c.marks, m.mark)
			}
		}
		return err
	}
	c.ports[n] = &compiled{port, out}
	for _, s := range out.servers {
		if c.foreign[s.key] {
			c.conflict(n, s.key)
			return nil
		}
	}
	p := &c.program
	for _, s := range out.servers {
		p.servers.set(s.key, s.how)
		delete(c.drain.retained, s.key)
		for _, ep := range s.endpoints {
			d := destination{s.key, ep.AddrPort}
			p.destinations.set(d, share{weight: max(ep.Weight, 1)})
			c.drain.forget(d)
		}
	}
	for _, m := range out.members {
		p.members.set(m.member, m.mark)
	}
	for _, a := range out.locals {
		c.users[a]++
		p.locals.set(a, c.source())
		p.members.set(member{setAddresses, ipset.Entry{Addr: a}}, 0)
	}
	return nil
}

// dropMark is the bit that a node's firewall drops marked packets by, as upstream's and the kubelet's do.
const dropMark = 0x8000

// maxSalt is how many marks a frontend may have, for the case that others have the first ones.
const maxSalt = 4

// mark gives the mark of a frontend's virtual server for pods and this machine. It follows from the frontend, so that a
// restarted process finds its own, unless another frontend has it already. It is 0 if all are taken.
func (c *compiler) mark(k forward.Key) uint32 {
	for salt := range byte(maxSalt) {
		mark := markOf(k, salt, c.masqueradeMark())
		other, taken := c.marks[mark]
		if mark == 0 || taken && other != k || c.foreign[ipvs.Key{Family: c.opt.Family, Mark: mark}] {
			continue
		}
		c.marks[mark] = k
		return mark
	}
	return 0
}

// markOf hashes a frontend, leaving out the bits that have a meaning of their own.
func markOf(k forward.Key, salt byte, masquerade uint32) uint32 {
	h := fnv.New32a()
	addr := k.Addr.As16()
	_, _ = h.Write(append(addr[:], byte(k.Port>>8), byte(k.Port), byte(k.Proto), salt)) // a hash takes everything
	return h.Sum32() &^ (dropMark | masquerade)
}

// refuse leaves a port out because the kernel did not take it.
func (c *compiler) refuse(n forward.PortName, err error) {
	c.refused[n] = err
	was := left{servers: map[ipvs.Key]ipvs.Properties{}}
	c.retract(n, &was)
	c.retain(was)
}

// conflict leaves a port out because a virtual server of its belongs to somebody else. Not even the entry may be made by
// which that would be taken for ours.
func (c *compiler) conflict(n forward.PortName, k ipvs.Key) {
	err := &kernel.StepError{
		Op: "add virtual server", Object: k.String(), Err: ipvs.ErrExists, Class: kernel.ErrConflict,
		Reason: "it is there already, made by others: remove it, or give the Service another address",
	}
	c.conflicts[n] = err
	c.refuse(n, err)
}

// clear wants nothing.
func (c *compiler) clear() {
	p := &c.program
	p.rules = ruleset.NewProgram()
	p.sets.clear()
	p.members.clear()
	p.servers.clear()
	p.destinations.clear()
	p.locals.clear()
	c.begun = false
	c.ctx = forward.Context{}
	clear(c.ports)
	clear(c.refused)
	clear(c.conflicts)
	clear(c.users)
	clear(c.marks)
	c.drain = newDrain()
}
