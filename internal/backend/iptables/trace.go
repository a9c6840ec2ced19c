package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// Trace implements backend.Backend. It follows every way that chance can take, so the outcome holds every endpoint that
// the kernel may choose. A client is taken to have no session affinity yet.
func (b *Backend) Trace(p forward.Packet) (backend.Trace, error) {
	return trace(b.c.want, b.c.opt, &b.c.ctx, p)
}

// Trace follows a packet through the tables as they were read from the kernel. Of c it needs the host's addresses.
func (o *Observation) Trace(c *forward.Context, p forward.Packet) (backend.Trace, error) {
	jumps := slices.Clone(o.jumps)
	slices.Reverse(jumps) // they were read from the top, and a program has them in the order of prepending
	return trace(Program{chains: o.chains, jumps: jumps}, o.opt, c, p)
}

// tracer holds what does not change along the way.
type tracer struct {
	program Program
	opt     Options
	ctx     *forward.Context
	packet  forward.Packet
	// in is the interface that the packet came in on, as the present built-in chain sees it.
	in string
}

// A way is a packet somewhere on its way: what was done to it, and the objects it met, the last one first.
type way struct {
	dst     netip.AddrPort
	dnat    bool
	mark    uint32
	snat    bool
	verdict forward.Verdict // Reject or Drop once that was said; Forward stands for accepted
	reason  forward.Reason
	// admitted tells that a source range let it in.
	admitted bool
	steps    *trail
}

// A trail is a list of steps that grows at its head, so that ways which part share what they have in common.
type trail struct {
	step backend.Step
	prev *trail
	len  int
}

func (w way) met(where, what string) way {
	n := 1
	if w.steps != nil {
		n += w.steps.len
	}
	w.steps = &trail{backend.Step{Where: where, What: what}, w.steps, n}
	return w
}

func trace(p Program, opt Options, c *forward.Context, packet forward.Packet) (backend.Trace, error) {
	t := tracer{program: p, opt: opt, ctx: c, packet: packet, in: packet.In}
	hook := "PREROUTING"
	if packet.In == "" {
		hook = "OUTPUT"
	}
	ways, err := t.base(tableNAT, hook, []way{{dst: packet.Dst}})
	if err != nil {
		return backend.Trace{}, err
	}
	var done []way
	for _, w := range ways {
		on, err := t.filterAndPost(w)
		if err != nil {
			return backend.Trace{}, err
		}
		done = append(done, on...)
	}
	return t.result(done)
}

// filterAndPost takes a packet from its routing decision on.
func (t *tracer) filterAndPost(w way) ([]way, error) {
	toHost := t.local(w.dst.Addr())
	hooks := []string{"FORWARD"}
	switch {
	case t.packet.In == "" && toHost:
		hooks = []string{"OUTPUT", "INPUT"}
	case t.packet.In == "":
		hooks = []string{"OUTPUT"}
	case toHost:
		hooks = []string{"INPUT"}
	}
	ways := []way{w}
	for _, hook := range hooks {
		t.in = t.packet.In
		if hook == "INPUT" && t.in == "" {
			t.in = "lo" // the machine's own packets to itself come in there
		}
		var err error
		if ways, err = t.base(tableFilter, hook, ways); err != nil {
			return nil, err
		}
	}
	if toHost && t.packet.In != "" {
		return ways, nil // delivered here: it does not pass POSTROUTING
	}
	return t.base(tableNAT, "POSTROUTING", ways)
}

// base takes packets through our jumps of one built-in chain.
func (t *tracer) base(table, from string, ways []way) ([]way, error) {
	ways = slices.Clone(ways)
	for i := range ways {
		if ways[i].verdict == forward.Forward { // what one built-in chain accepted the next one still sees
			ways[i].verdict = forward.Pass
		}
	}
	for _, j := range slices.Backward(t.program.jumps) { // the last one that was prepended stands first
		if j.table != table || j.from != from {
			continue
		}
		var next []way
		for _, w := range ways {
			out, err := t.jump(j, w)
			if err != nil {
				return nil, err
			}
			next = append(next, out...)
		}
		ways = next
	}
	return ways, nil
}

// jump takes a packet through one rule of a built-in chain, unless its fate in this chain is settled.
func (t *tracer) jump(j jump, w way) ([]way, error) {
	if w.verdict != forward.Pass || j.table == tableNAT && (w.dnat && j.from != "POSTROUTING" || w.snat) {
		return []way{w}, nil
	}
	endings, err := t.rule(j.table, j.from, j.rule, w)
	out := make([]way, len(endings))
	for i, e := range endings {
		out[i] = e.way
	}
	return out, err
}

// An ending is a way that came to the end of a rule or a chain; final tells that no further rule sees it.
type ending struct {
	way
	final bool
}

// chain takes a packet through a chain.
func (t *tracer) chain(table, name string, w way) ([]ending, error) {
	b, ok := t.program.chains[chainID{table, name}]
	if !ok {
		return nil, fmt.Errorf("%s: jump to the missing chain %s", table, name)
	}
	going := []way{w}
	var done []ending
	for rule := range b.rules() {
		var next []way
		for _, g := range going {
			out, err := t.rule(table, name, rule, g)
			if err != nil {
				return nil, err
			}
			for _, e := range out {
				if e.final {
					done = append(done, e)
				} else {
					next = append(next, e.way)
				}
			}
		}
		going = next
		if len(going) == 0 {
			break
		}
	}
	for _, g := range going {
		done = append(done, ending{way: g})
	}
	return done, nil
}

// rule gives what becomes of a packet at one rule. Endings that are not final go on with the next rule; RETURN is told
// apart by the caller's chain being left, so it is final in the chain and not above.
func (t *tracer) rule(table, chain, text string, w way) ([]ending, error) {
	r, err := xtables.ParseRule(t.opt.Family, text)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", table, chain, err)
	}
	hit, chance, err := t.matches(r, w)
	if err != nil {
		return nil, fmt.Errorf("%s %s: rule %q: %w", table, chain, text, err)
	}
	if !hit {
		return []ending{{way: w}}, nil
	}
	out, err := t.target(table, chain, text, r, w)
	if chance {
		out = append(out, ending{way: w})
	}
	return out, err
}

func (t *tracer) target(table, chain, text string, r *xtables.Rule, w way) ([]ending, error) {
	where := table + " " + chain
	switch r.Target.Name {
	case "":
		return []ending{{way: w}}, nil
	case "MARK":
		value, mask, _ := strings.Cut(r.Target.Value("--set-xmark"), "/")
		v, err := strconv.ParseUint(value, 0, 32)
		m, err2 := strconv.ParseUint(mask, 0, 32)
		if err != nil || err2 != nil {
			return nil, fmt.Errorf("%s: mark %q", where, r.Target.Value("--set-xmark"))
		}
		w.mark = w.mark&^uint32(m) ^ uint32(v)
		return []ending{{way: w.met(where, text)}}, nil
	case "DNAT":
		to, err := netip.ParseAddrPort(r.Target.Value("--to-destination"))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		w.dst, w.dnat = to, true
		return []ending{{w.met(where, text), true}}, nil
	case "MASQUERADE":
		w.snat = true
		return []ending{{w.met(where, text), true}}, nil
	case "REJECT", "DROP":
		w.verdict, w.reason = forward.Drop, reasonOf(r.Comment())
		if w.reason == forward.SourceNotAllowed && w.admitted {
			w.reason = forward.NoLocalEndpoints // let in, but there was nowhere to go
		}
		if r.Target.Name == "REJECT" {
			w.verdict = forward.Reject
		}
		return []ending{{w.met(where, text), true}}, nil
	case "ACCEPT":
		w.verdict = forward.Forward
		return []ending{{w.met(where, text), true}}, nil
	case "RETURN":
		return []ending{{w, true}}, nil
	}
	w.admitted = w.admitted || strings.HasPrefix(chain, prefixFirewall)
	out, err := t.chain(table, r.Target.Name, w.met(where, text))
	for i, e := range out {
		// A packet that left the chain by its end or by RETURN goes on here.
		out[i].final = e.final && (e.dnat != w.dnat || e.snat != w.snat || e.verdict != w.verdict)
		if !out[i].final && e.mark == w.mark {
			out[i].steps = w.steps // nothing happened there
		}
	}
	return out, err
}

func reasonOf(comment string) forward.Reason {
	switch {
	case strings.HasSuffix(comment, " has no endpoints"):
		return forward.NoEndpoints
	case strings.HasSuffix(comment, " has no local endpoints"):
		return forward.NoLocalEndpoints
	case strings.Contains(comment, " traffic not accepted by "):
		return forward.SourceNotAllowed
	}
	return forward.NoReason
}

func (t *tracer) local(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(t.ctx.HostAddrs, a)
}

// matches tells whether a rule takes a packet; with chance it may or may not.
func (t *tracer) matches(r *xtables.Rule, w way) (hit, chance bool, err error) {
	if !addrMatches(r.Src, t.packet.Src.Addr()) || !addrMatches(r.Dst, w.dst.Addr()) ||
		r.In.Name != "" && interfaceMatches(r.In.Name, t.in) == r.In.Not ||
		r.Proto != "" && (r.Proto == t.packet.Proto.String()) == r.ProtoNot {
		return false, false, nil
	}
	for _, m := range r.Matches {
		if m.Module == "statistic" {
			chance = true
			continue
		}
		ok, err := t.module(m, w)
		if err != nil || !ok {
			return false, false, err
		}
	}
	return true, chance, nil
}

func addrMatches(m xtables.Addr, a netip.Addr) bool {
	return !m.Prefix.IsValid() || m.Prefix.Contains(a) != m.Not
}

func interfaceMatches(pattern, name string) bool {
	if start, ok := strings.CutSuffix(pattern, "+"); ok {
		return name != "" && strings.HasPrefix(name, start)
	}
	return name == pattern
}

// module evaluates one match module for the first packet of a connection.
func (t *tracer) module(m xtables.Match, w way) (bool, error) {
	switch m.Module {
	case "comment":
		return true, nil
	case "bpf":
		if !strings.Contains(hairpinMatch(t.opt.Family), xtables.Quote(m.Options[0].Values[0])) {
			return false, fmt.Errorf("a BPF program that is not ours")
		}
		return t.packet.Src.Addr() == w.dst.Addr(), nil
	case "recent":
		return m.Options[0].Name == "--set", nil
	}
	for _, o := range m.Options {
		ok, err := t.option(m.Module, o, w)
		if err != nil || ok == o.Not {
			return false, err
		}
	}
	return true, nil
}

func (t *tracer) option(module string, o xtables.Option, w way) (bool, error) {
	value := ""
	if len(o.Values) > 0 {
		value = o.Values[0]
	}
	switch module + o.Name {
	case "tcp--dport", "udp--dport", "sctp--dport":
		low, high, ranged := strings.Cut(value, ":")
		if !ranged {
			high = low
		}
		l, err := strconv.ParseUint(low, 10, 16)
		h, err2 := strconv.ParseUint(high, 10, 16)
		if err != nil || err2 != nil {
			return false, fmt.Errorf("port %q", value)
		}
		return l <= uint64(w.dst.Port()) && uint64(w.dst.Port()) <= h, nil
	case "mark--mark":
		v, m, masked := strings.Cut(value, "/")
		want, err := strconv.ParseUint(v, 0, 32)
		mask := uint64(0xffffffff)
		if masked && err == nil {
			mask, err = strconv.ParseUint(m, 0, 32)
		}
		if err != nil {
			return false, fmt.Errorf("mark %q is not a number", value)
		}
		return uint64(w.mark)&mask == want, nil
	case "conntrack--ctstate":
		states := strings.Split(value, ",")
		return slices.Contains(states, "NEW") || w.dnat && slices.Contains(states, "DNAT"), nil
	case "addrtype--dst-type":
		return t.local(w.dst.Addr()), nil
	case "addrtype--src-type":
		return t.local(t.packet.Src.Addr()), nil
	}
	return false, fmt.Errorf("the tracer does not know %s of module %s", o.Name, module)
}

// result puts the ways together.
func (t *tracer) result(ways []way) (backend.Trace, error) {
	var out backend.Trace
	for i, w := range ways {
		do := w.verdict
		switch {
		case do == forward.Reject || do == forward.Drop:
		case w.dnat:
			do = forward.Forward
		default:
			do = forward.Pass
		}
		if i > 0 && do != out.Outcome.Do {
			return out, fmt.Errorf("packet %v: chance decides between %s and %s", t.packet, out.Outcome.Do, do)
		}
		out.Outcome.Do, out.Outcome.Reason = do, w.reason
		if do == forward.Forward {
			c := forward.Choice{Endpoint: w.dst, SNAT: w.snat}
			if !slices.Contains(out.Outcome.Choices, c) {
				out.Outcome.Choices = append(out.Outcome.Choices, c)
			}
		}
	}
	out.Steps = steps(ways)
	return out, nil
}

// steps lists what the packet met: the whole way if there is one, else what all ways have in common and what chance
// decides.
func steps(ways []way) []backend.Step {
	if len(ways) == 0 {
		return nil
	}
	list := func(w way) []backend.Step {
		var s []backend.Step
		for at := w.steps; at != nil; at = at.prev {
			s = append(s, at.step)
		}
		slices.Reverse(s)
		return s
	}
	first := list(ways[0])
	common := len(first)
	for _, w := range ways[1:] {
		s := list(w)
		n := 0
		for n < min(common, len(s)) && s[n] == first[n] {
			n++
		}
		common = n
	}
	if len(ways) == 1 {
		return first
	}
	out := append(slices.Clone(first[:common]), backend.Step{
		Where: first[min(common, len(first)-1)].Where, What: fmt.Sprintf("chance chooses one of %d; for example:", len(ways)),
	})
	return append(out, first[common:]...)
}
