package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Walker follows the first packet of one connection through the rules of a program. It follows every way that chance
// can take. A client is taken to have no session affinity yet.
type Walker struct {
	Program Program
	Family  model.Family
	Packet  forward.Packet
	// In is the interface that the packet came in on, as the present built-in chain sees it.
	In string
	// Out is the interface that it leaves by; empty where that is not known, or nowhere.
	Out string
	// Host tells whether an address is this machine's.
	Host func(netip.Addr) bool
	// Admits tells of a chain that whoever is led on from it was let in by a source range; nil if there are none.
	Admits func(chain string) bool
	// Sets tells whether an IP set has a way's packet, seen by the given directions ("dst,dst,src"), and the mark that
	// the set keeps for it; nil if no rule asks. An error says that there is no such set.
	Sets func(set, directions string, w Way) (found bool, mark uint32, err error)
}

// A Way is a packet somewhere on its way: what was done to it, and the objects it met, the last one first.
type Way struct {
	Dst     netip.AddrPort
	DNAT    bool
	Mark    uint32
	SNAT    bool
	Verdict forward.Verdict // Reject or Drop once that was said; Forward stands for accepted
	Reason  forward.Reason
	// Admitted tells that a source range let it in.
	Admitted bool
	steps    *trail
}

// A trail is a list of steps that grows at its head, so that ways which part share what they have in common.
type trail struct {
	step backend.Step
	prev *trail
	len  int
}

// Met gives the way with one object more that it met.
func (w Way) Met(where, what string) Way {
	n := 1
	if w.steps != nil {
		n += w.steps.len
	}
	w.steps = &trail{backend.Step{Where: where, What: what}, w.steps, n}
	return w
}

// Hook takes packets through the program's jumps of one built-in chain.
func (k *Walker) Hook(table, from string, ways []Way) ([]Way, error) {
	ways = slices.Clone(ways)
	for i := range ways {
		if ways[i].Verdict == forward.Forward { // what one built-in chain accepted the next one still sees
			ways[i].Verdict = forward.Pass
		}
	}
	for _, j := range slices.Backward(k.Program.Jumps) { // the last one that was prepended stands first
		if j.Table != table || j.From != from {
			continue
		}
		var next []Way
		for _, w := range ways {
			out, err := k.jump(j, w)
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
func (k *Walker) jump(j Jump, w Way) ([]Way, error) {
	if w.Verdict != forward.Pass || j.Table == NAT && (w.DNAT && j.From != "POSTROUTING" || w.SNAT) {
		return []Way{w}, nil
	}
	endings, err := k.rule(j.Table, j.From, j.Rule, w)
	out := make([]Way, len(endings))
	for i, e := range endings {
		out[i] = e.Way
	}
	return out, err
}

// An ending is a way that came to the end of a rule or a chain; final tells that no further rule sees it.
type ending struct {
	Way
	final bool
}

// chain takes a packet through a chain.
func (k *Walker) chain(table, name string, w Way) ([]ending, error) {
	b, ok := k.Program.Chains[In(table, name)]
	if !ok {
		return nil, fmt.Errorf("%s: jump to the missing chain %s", table, name)
	}
	going := []Way{w}
	var done []ending
	for rule := range b.Rules() {
		var next []Way
		for _, g := range going {
			out, err := k.rule(table, name, rule, g)
			if err != nil {
				return nil, err
			}
			for _, e := range out {
				if e.final {
					done = append(done, e)
				} else {
					next = append(next, e.Way)
				}
			}
		}
		going = next
		if len(going) == 0 {
			break
		}
	}
	for _, g := range going {
		done = append(done, ending{Way: g})
	}
	return done, nil
}

// rule gives what becomes of a packet at one rule. Endings that are not final go on with the next rule; RETURN is told
// apart by the caller's chain being left, so it is final in the chain and not above.
func (k *Walker) rule(table, chain, text string, w Way) ([]ending, error) {
	r, err := xtables.ParseRule(k.Family, text)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", table, chain, err)
	}
	hit, chance, err := k.Matches(r, w)
	if err != nil {
		return nil, fmt.Errorf("%s %s: rule %q: %w", table, chain, text, err)
	}
	if !hit {
		return []ending{{Way: w}}, nil
	}
	out, err := k.target(table, chain, text, r, w)
	if chance {
		out = append(out, ending{Way: w})
	}
	return out, err
}

func (k *Walker) target(table, chain, text string, r *xtables.Rule, w Way) ([]ending, error) {
	where := table + " " + chain
	switch r.Target.Name {
	case "":
		return []ending{{Way: w}}, nil
	case "MARK":
		value, mask, _ := strings.Cut(r.Target.Value("--set-xmark"), "/")
		v, err := strconv.ParseUint(value, 0, 32)
		m, err2 := strconv.ParseUint(mask, 0, 32)
		if err != nil || err2 != nil {
			return nil, fmt.Errorf("%s: mark %q", where, r.Target.Value("--set-xmark"))
		}
		w.Mark = w.Mark&^uint32(m) ^ uint32(v)
		return []ending{{Way: w.Met(where, text)}}, nil
	case "DNAT":
		to, err := netip.ParseAddrPort(r.Target.Value("--to-destination"))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		w.Dst, w.DNAT = to, true
		return []ending{{w.Met(where, text), true}}, nil
	case "MASQUERADE":
		w.SNAT = true
		return []ending{{w.Met(where, text), true}}, nil
	case "REJECT", "DROP":
		w.Verdict, w.Reason = forward.Drop, ReasonOf(r.Comment())
		if w.Reason == forward.SourceNotAllowed && w.Admitted {
			w.Reason = forward.NoLocalEndpoints // let in, but there was nowhere to go
		}
		if r.Target.Name == "REJECT" {
			w.Verdict = forward.Reject
		}
		return []ending{{w.Met(where, text), true}}, nil
	case "SET":
		return k.mapped(where, text, r, w)
	case "ACCEPT":
		w.Verdict = forward.Forward
		return []ending{{w.Met(where, text), true}}, nil
	case "RETURN":
		return []ending{{w, true}}, nil
	}
	w.Admitted = w.Admitted || k.Admits != nil && k.Admits(chain)
	out, err := k.chain(table, r.Target.Name, w.Met(where, text))
	for i, e := range out {
		// A packet that left the chain by its end or by RETURN goes on here.
		out[i].final = e.final && (e.DNAT != w.DNAT || e.SNAT != w.SNAT || e.Verdict != w.Verdict)
		if !out[i].final && e.Mark == w.Mark {
			out[i].steps = w.steps // nothing happened there
		}
	}
	return out, err
}

// mapped gives a packet the mark that an IP set keeps for it.
func (k *Walker) mapped(where, text string, r *xtables.Rule, w Way) ([]ending, error) {
	for _, o := range r.Target.Options {
		if o.Name != "--map-set" || len(o.Values) != 2 {
			continue
		}
		found, mark, err := k.inSet(o.Values[0], o.Values[1], w)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		if found {
			w.Mark = mark
			w = w.Met(where, text)
		}
		return []ending{{Way: w}}, nil
	}
	return nil, fmt.Errorf("%s: the tracer does not know %q", where, text)
}

func (k *Walker) inSet(set, directions string, w Way) (found bool, mark uint32, err error) {
	if k.Sets == nil {
		return false, 0, fmt.Errorf("a rule asks for the set %s, and there are none", set)
	}
	return k.Sets(set, directions, w)
}

// ReasonOf tells from a rule's comment why it refuses what it matches. Every mode words its comments so.
func ReasonOf(comment string) forward.Reason {
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

// Matches tells whether a rule takes a packet; with chance it may or may not.
func (k *Walker) Matches(r *xtables.Rule, w Way) (hit, chance bool, err error) {
	if !addrMatches(r.Src, k.Packet.Src.Addr()) || !addrMatches(r.Dst, w.Dst.Addr()) ||
		r.In.Name != "" && interfaceMatches(r.In.Name, k.In) == r.In.Not ||
		r.Out.Name != "" && interfaceMatches(r.Out.Name, k.Out) == r.Out.Not ||
		r.Proto != "" && (r.Proto == k.Packet.Proto.String()) == r.ProtoNot {
		return false, false, nil
	}
	for _, m := range r.Matches {
		if m.Module == "statistic" {
			chance = true
			continue
		}
		ok, err := k.module(m, w)
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
func (k *Walker) module(m xtables.Match, w Way) (bool, error) {
	switch m.Module {
	case "comment":
		return true, nil
	case "bpf":
		if !strings.Contains(HairpinMatch(k.Family), xtables.Quote(m.Options[0].Values[0])) {
			return false, fmt.Errorf("a BPF program that is not ours")
		}
		return k.Packet.Src.Addr() == w.Dst.Addr(), nil
	case "recent":
		return m.Options[0].Name == "--set", nil
	}
	for _, o := range m.Options {
		ok, err := k.option(m.Module, o, w)
		if err != nil || ok == o.Not {
			return false, err
		}
	}
	return true, nil
}

func (k *Walker) option(module string, o xtables.Option, w Way) (bool, error) {
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
		return l <= uint64(w.Dst.Port()) && uint64(w.Dst.Port()) <= h, nil
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
		return uint64(w.Mark)&mask == want, nil
	case "conntrack--ctstate":
		states := strings.Split(value, ",")
		return slices.Contains(states, "NEW") || w.DNAT && slices.Contains(states, "DNAT"), nil
	case "set--match-set":
		if len(o.Values) != 2 {
			return false, fmt.Errorf("set match %q", o.Values)
		}
		found, _, err := k.inSet(value, o.Values[1], w)
		return found, err
	case "addrtype--dst-type":
		return k.Host(w.Dst.Addr()), nil
	case "addrtype--src-type":
		return k.Host(k.Packet.Src.Addr()), nil
	}
	return false, fmt.Errorf("the tracer does not know %s of module %s", o.Name, module)
}

// Result puts the ends of all ways together to what becomes of a packet.
func Result(packet forward.Packet, ways []Way) (backend.Trace, error) {
	var out backend.Trace
	for i, w := range ways {
		do := w.Verdict
		switch {
		case do == forward.Reject || do == forward.Drop:
		case w.DNAT:
			do = forward.Forward
		default:
			do = forward.Pass
		}
		if i > 0 && do != out.Outcome.Do {
			return out, fmt.Errorf("packet %v: chance decides between %s and %s", packet, out.Outcome.Do, do)
		}
		out.Outcome.Do, out.Outcome.Reason = do, w.Reason
		if do == forward.Forward {
			c := forward.Choice{Endpoint: w.Dst, SNAT: w.SNAT}
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
func steps(ways []Way) []backend.Step {
	if len(ways) == 0 {
		return nil
	}
	list := func(w Way) []backend.Step {
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
