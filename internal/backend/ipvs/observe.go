package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

// An Observation is what the kernel holds of this mode, whoever wrote it: a former run of this program or upstream's.
// Sets are named as in IPv4.
type Observation struct {
	opt     Options
	rules   *ruleset.Observation
	sets    map[string]ipset.Set
	members map[member]uint32
	servers map[ipvs.Key]ipvs.Properties
	// destinations are those of our servers.
	destinations map[destination]ipvs.Destination
	locals       map[netip.Addr]netip.Addr
	// former are addresses that are local in the other way.
	former []netip.Addr
	// foreign are the virtual servers of others.
	foreign map[ipvs.Key]bool
	// possible has the marks that the frontends may have, each with its frontend. It is empty without servers of marks.
	possible map[uint32]forward.Key
}

// observe reads the kernel.
func observe(ctx context.Context, k Kernel, opt Options) (*Observation, error) {
	o := &Observation{
		opt: opt, sets: map[string]ipset.Set{}, members: map[member]uint32{}, servers: map[ipvs.Key]ipvs.Properties{},
		destinations: map[destination]ipvs.Destination{}, locals: map[netip.Addr]netip.Addr{}, foreign: map[ipvs.Key]bool{},
	}
	var err error
	o.rules, err = ruleset.Observe(ctx, k.Rules, ruleset.Scope{
		Family: opt.Family, Tables: []string{ruleset.Filter, ruleset.NAT, ruleset.Mangle}, Ours: ours,
		Jumps: append(opt.jumps(), upstreamJumps()...),
	})
	if err != nil {
		return nil, fmt.Errorf("read the rules: %w", err)
	}
	if err := o.readSets(ctx, k.Sets); err != nil {
		return nil, err
	}
	servers, err := k.Servers.List(ctx, opt.Family)
	if err != nil {
		return nil, fmt.Errorf("read the virtual servers: %w", err)
	}
	if slices.ContainsFunc(servers, func(s ipvs.Server) bool { return s.Mark != 0 }) {
		o.possible = o.marks()
	}
	owned := o.owner()
	for _, s := range servers {
		if !owned(s.Key) {
			o.foreign[s.Key] = true
			continue
		}
		o.servers[s.Key] = s.Properties
		for _, d := range s.Destinations {
			o.destinations[destination{s.Key, d.Addr}] = d
		}
	}
	locals, err := k.Routes.List(ctx, opt.Family)
	if err != nil {
		return nil, fmt.Errorf("read the local routes: %w", err)
	}
	for _, l := range locals {
		o.locals[l.Addr] = l.Source
	}
	if k.Former == nil {
		return o, nil
	}
	former, err := k.Former.List(ctx, opt.Family)
	if err != nil {
		return nil, fmt.Errorf("read the addresses from before: %w", err)
	}
	for _, l := range former {
		o.former = append(o.former, l.Addr)
	}
	return o, nil
}

func (o *Observation) readSets(ctx context.Context, t ipset.Table) error {
	plain := map[string]string{}
	var names []string
	for _, s := range slices.Concat(sets(), upstreamSets()) {
		name := setName(s, o.opt.Family)
		plain[name] = s
		names = append(names, name)
	}
	contents, err := t.Read(ctx, names)
	if err != nil {
		return fmt.Errorf("read the sets: %w", err)
	}
	for _, c := range contents {
		s := plain[c.Name]
		o.sets[s] = c.Set
		for e, mark := range c.Entries {
			o.members[member{s, e}] = mark
		}
	}
	return nil
}

// owner tells our virtual servers, and upstream's, from others': a set has each of ours before it is made, and those of
// marks bear one that follows from such a frontend.
func (o *Observation) owner() func(ipvs.Key) bool {
	marks := map[uint32]bool{}
	for m, mark := range o.members {
		if m.set == setSplit {
			marks[mark] = true
		}
	}
	for mark := range o.possible {
		marks[mark] = true
	}
	for mark := range maps.Clone(marks) {
		marks[mark|1<<o.opt.Masquerading.Bit] = true
	}
	return func(k ipvs.Key) bool {
		if k.Mark != 0 {
			return marks[k.Mark]
		}
		return o.owns(ipset.Entry{Addr: k.Addr.Addr(), Proto: k.Proto, Port: k.Addr.Port()})
	}
}

// owns tells whether a set says that the virtual server of an address is ours, or kube-proxy's.
func (o *Observation) owns(e ipset.Entry) bool {
	has := func(set string, e ipset.Entry) bool {
		_, has := o.members[member{set, e}]
		return has
	}
	if has(setServed, e) {
		return true
	}
	if slices.ContainsFunc(o.opt.Exclude, func(p netip.Prefix) bool { return p.Contains(e.Addr) }) {
		return false
	}
	for _, s := range []string{
		setNotPods, setAll, "KUBE-EXTERNAL-IP-LOCAL", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT-SCTP-HASH",
	} {
		if has(s, e) {
			return true
		}
	}
	port := ipset.Entry{Port: e.Port}
	return e.Proto == model.TCP && has("KUBE-NODE-PORT-TCP", port) || e.Proto == model.UDP && has("KUBE-NODE-PORT-UDP", port)
}

// Objects counts what is ours.
func (o *Observation) Objects() map[string]int {
	chains, rules := o.rules.Count()
	return map[string]int{
		"chain": chains, "rule": rules, "set": len(o.sets), "entry": len(o.members), "virtual server": len(o.servers),
		"destination": len(o.destinations), "local address": len(o.locals) + len(o.former),
	}
}

// marks gives the marks that the frontends may have, each with its frontend.
func (o *Observation) marks() map[uint32]forward.Key {
	out := map[uint32]forward.Key{}
	for m := range o.members {
		if m.set != setServed {
			continue
		}
		k := forward.Key{Addr: m.entry.Addr, Port: m.entry.Port, Proto: m.entry.Proto}
		for salt := range byte(maxSalt) {
			out[markOf(k, salt, 1<<o.opt.Masquerading.Bit)] = k
		}
	}
	return out
}
