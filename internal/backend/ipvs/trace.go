package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
)

// Trace implements backend.Backend.
func (b *Backend) Trace(p forward.Packet) (backend.Trace, error) {
	c := b.c
	t := tracer{
		rules: c.program.rules, opt: c.opt, ctx: &c.ctx, packet: p,
		member: func(m member) (uint32, bool) { mark, has := c.program.members.want[m]; return mark, has },
		set:    func(name string) bool { _, has := c.program.sets.want[name]; return has },
		local:  func(a netip.Addr) bool { _, has := c.program.locals.want[a]; return has },
		server: func(k ipvs.Key) ([]netip.AddrPort, bool) {
			if _, has := c.program.servers.want[k]; !has {
				return nil, false
			}
			var to []netip.AddrPort
			for d, how := range c.program.destinations.want {
				if d.server == k && how.weight > 0 {
					to = append(to, d.addr)
				}
			}
			return to, true
		},
	}
	return t.trace()
}

// Trace follows a packet through what was read from the kernel. Of c it needs the host's addresses.
func (o *Observation) Trace(c *forward.Context, p forward.Packet) (backend.Trace, error) {
	t := tracer{
		rules: o.rules.Program(), opt: o.opt, ctx: c, packet: p,
		member: func(m member) (uint32, bool) { mark, has := o.members[m]; return mark, has },
		set:    func(name string) bool { _, has := o.sets[name]; return has },
		local:  func(a netip.Addr) bool { _, has := o.locals[a]; return has },
		server: func(k ipvs.Key) ([]netip.AddrPort, bool) {
			if _, has := o.servers[k]; !has {
				return nil, false
			}
			var to []netip.AddrPort
			for d, v := range o.destinations {
				if d.server == k && v.Weight > 0 {
					to = append(to, d.addr)
				}
			}
			return to, true
		},
	}
	return t.trace()
}

// tracer follows one packet through a program or an observation.
type tracer struct {
	rules  ruleset.Program
	opt    Options
	ctx    *forward.Context
	packet forward.Packet
	member func(member) (mark uint32, has bool)
	set    func(name string) bool
	local  func(netip.Addr) bool
	// server gives the endpoints of a virtual server that get new connections.
	server func(ipvs.Key) ([]netip.AddrPort, bool)
}

func (t *tracer) walker() *ruleset.Walker {
	return &ruleset.Walker{
		Program: t.rules, Family: t.opt.Family, Packet: t.packet, In: t.packet.In, Host: t.ctx.IsHost, Sets: t.inSet,
	}
}

// inSet answers what a rule asks of a set.
func (t *tracer) inSet(set, directions string, w ruleset.Way) (found bool, mark uint32, err error) {
	name := plainName(set, t.opt.Family)
	if name == "" || !t.set(name) {
		return false, 0, fmt.Errorf("a rule names the set %s, which is not there", set)
	}
	m := member{set: name, entry: ipset.Entry{Addr: w.Dst.Addr(), Proto: t.packet.Proto, Port: w.Dst.Port()}}
	switch directions {
	case "dst,dst":
	case "dst":
		m.entry = ipset.Entry{Addr: w.Dst.Addr()}
		if name == setHealth {
			m.entry = ipset.Entry{Port: w.Dst.Port()}
		}
	case "src":
		m.entry = ipset.Entry{Addr: t.packet.Src.Addr()}
	case "dst,dst,src":
		src := t.packet.Src.Addr()
		for bits := src.BitLen(); bits > 0; bits-- {
			m.entry.Net = netip.PrefixFrom(src, bits).Masked()
			if _, has := t.member(m); has {
				return true, 0, nil
			}
		}
		return false, 0, nil
	default:
		return false, 0, fmt.Errorf("the tracer does not know the directions %q of a set", directions)
	}
	mark, has := t.member(m)
	return has, mark, nil
}

// trace takes the packet through the hooks in the order of the kernel: mangle and nat, then, where the address is local,
// filter and the virtual servers; what this machine sends meets the virtual servers before filter.
func (t *tracer) trace() (backend.Trace, error) {
	k := t.walker()
	hook := "PREROUTING"
	if t.packet.In == "" {
		hook = "OUTPUT"
	}
	ways, err := through(k, []ruleset.Way{{Dst: t.packet.Dst}}, ruleset.Mangle, hook, ruleset.NAT, hook)
	if err != nil {
		return backend.Trace{}, err
	}
	var done []ruleset.Way
	for _, w := range ways {
		on, err := t.route(w)
		if err != nil {
			return backend.Trace{}, err
		}
		done = append(done, on...)
	}
	return ruleset.Result(t.packet, done)
}

// through takes packets through hooks, given as pairs of table and built-in chain. What was refused goes no further.
func through(k *ruleset.Walker, ways []ruleset.Way, hooks ...string) ([]ruleset.Way, error) {
	var out []ruleset.Way
	for pair := range slices.Chunk(hooks, 2) {
		var going []ruleset.Way
		for _, w := range ways {
			if w.Verdict == forward.Drop || w.Verdict == forward.Reject {
				out = append(out, w)
			} else {
				going = append(going, w)
			}
		}
		var err error
		if ways, err = k.Hook(pair[0], pair[1], going); err != nil {
			return nil, err
		}
	}
	return append(out, ways...), nil
}

// route takes a packet from its routing decision on.
func (t *tracer) route(w ruleset.Way) ([]ruleset.Way, error) {
	k := t.walker()
	local := t.ctx.IsHost(w.Dst.Addr()) || t.local(w.Dst.Addr())
	switch {
	case w.Verdict == forward.Drop || w.Verdict == forward.Reject:
		return []ruleset.Way{w}, nil
	case t.packet.In == "":
		return t.sent(k, w, local)
	case !local:
		return through(k, []ruleset.Way{w}, ruleset.Filter, "FORWARD", ruleset.NAT, "POSTROUTING")
	}
	ways, err := through(k, []ruleset.Way{w}, ruleset.Filter, "INPUT")
	if err != nil {
		return nil, err
	}
	return t.served(ways, func(w ruleset.Way) ([]ruleset.Way, error) {
		if t.ctx.IsHost(w.Dst.Addr()) {
			return []ruleset.Way{w}, nil // delivered here: it does not pass POSTROUTING
		}
		return through(k, []ruleset.Way{w}, ruleset.Filter, "OUTPUT", ruleset.NAT, "POSTROUTING")
	})
}

// sent takes a packet of this machine's own on. What no virtual server takes and is local comes in by the loopback
// interface.
func (t *tracer) sent(k *ruleset.Walker, w ruleset.Way, local bool) ([]ruleset.Way, error) {
	return t.served([]ruleset.Way{w}, func(w ruleset.Way) ([]ruleset.Way, error) {
		back := local && !w.DNAT || w.DNAT && t.ctx.IsHost(w.Dst.Addr())
		if back {
			k.Out = "lo"
		} else {
			k.Out = ""
		}
		ways, err := through(k, []ruleset.Way{w}, ruleset.Filter, "OUTPUT", ruleset.NAT, "POSTROUTING")
		if err != nil || !back {
			return ways, err
		}
		k.In = "lo"
		return through(k, ways, ruleset.Filter, "INPUT")
	})
}

// served takes packets through the virtual servers, and what comes of them further.
func (t *tracer) served(ways []ruleset.Way, on func(ruleset.Way) ([]ruleset.Way, error)) ([]ruleset.Way, error) {
	var out []ruleset.Way
	for _, w := range ways {
		if w.Verdict == forward.Drop || w.Verdict == forward.Reject {
			out = append(out, w)
			continue
		}
		for _, chosen := range t.schedule(w) {
			if chosen.Verdict == forward.Reject {
				out = append(out, chosen)
				continue
			}
			next, err := on(chosen)
			if err != nil {
				return nil, err
			}
			out = append(out, next...)
		}
	}
	return out, nil
}

// schedule gives what the virtual servers make of a packet: one way for each endpoint that may be chosen.
func (t *tracer) schedule(w ruleset.Way) []ruleset.Way {
	at := ipvs.Key{Family: t.opt.Family, Proto: t.packet.Proto, Addr: w.Dst}
	for _, k := range []ipvs.Key{{Family: t.opt.Family, Mark: w.Mark}, at} {
		if k.Mark == 0 && !k.Addr.IsValid() {
			continue
		}
		to, there := t.server(k)
		if !there {
			continue
		}
		where := "virtual server " + k.String()
		if len(to) == 0 {
			w = w.Met(where, "has no endpoint and refuses")
			w.Verdict, w.Reason = forward.Reject, forward.NoEndpoints
			return []ruleset.Way{w}
		}
		slices.SortFunc(to, func(a, b netip.AddrPort) int { return strings.Compare(a.String(), b.String()) })
		out := make([]ruleset.Way, len(to))
		for i, ep := range to {
			out[i] = w.Met(where, "-> "+ep.String())
			out[i].Dst, out[i].DNAT = ep, true
		}
		return out
	}
	return []ruleset.Way{w}
}
