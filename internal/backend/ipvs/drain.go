package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A TCP endpoint that goes keeps its connections: it gets no new ones (its weight becomes 0), and is taken away when the
// last has ended or when its time is up. What such an endpoint needs stays as long: its virtual server, the route to its
// address, the entries by which the server is known as ours. Nothing is remembered but in the kernel, so a restarted
// process goes on with what drains. UDP and SCTP endpoints go at once, as their clients would never notice.

const (
	// defaultDrain is how long an endpoint may drain.
	defaultDrain = 15 * time.Minute
	// drainPoll is the time between two looks at what drains.
	drainPoll = 10 * time.Second
)

// drains tells whether the connections of a server's endpoints are waited for. A mark's protocol is not known to a
// process that has not made it; most are TCP.
func (c *compiler) drains(k ipvs.Key) bool {
	if !c.begun {
		return false // everything is to go
	}
	proto := k.Proto
	if k.Mark != 0 {
		if known, ok := c.protocols[k.Mark&^c.masqueradeMark()]; ok {
			proto = known
		} else {
			proto = model.TCP
		}
	}
	return proto == model.TCP
}

func (c *compiler) masqueradeMark() uint32 { return 1 << c.opt.Masquerading.Bit }

// waits tells whether an endpoint drains and need not be looked at yet.
func (c *compiler) waits(d destination) bool {
	_, draining := c.draining[d]
	return draining && c.opt.Now().Before(c.nextPoll) && c.drains(d.server)
}

// Wake implements backend.Waiter.
func (b *Backend) Wake() time.Time {
	if len(b.c.draining) == 0 {
		return time.Time{}
	}
	return b.c.nextPoll
}

// A remainder is what must stay for servers that are not wanted any more but have endpoints that drain.
type remainder struct {
	servers map[ipvs.Key]bool
	addrs   map[netip.Addr]bool
}

func (c *compiler) remainder() remainder {
	r := remainder{servers: map[ipvs.Key]bool{}, addrs: map[netip.Addr]bool{}}
	for d := range c.draining {
		if c.waits(d) && !c.program.servers.wanted(d.server).there {
			r.servers[d.server] = true
			r.addrs[d.server.Addr.Addr()] = true
		}
	}
	if len(r.servers) == 0 {
		return r
	}
	for m := range c.program.members.held {
		if m.set == setSplit && r.split(c, m) {
			r.addrs[m.entry.Addr] = true
		}
	}
	return r
}

// split tells whether an entry has the mark of a server that stays.
func (r remainder) split(c *compiler, m member) bool {
	mark := c.program.members.has(m).value
	f := c.opt.Family
	return r.servers[ipvs.Key{Family: f, Mark: mark}] || r.servers[ipvs.Key{Family: f, Mark: mark | c.masqueradeMark()}]
}

// keeps tells whether an entry must stay.
func (r remainder) keeps(c *compiler, m member) bool {
	switch m.set {
	case setServed:
		return r.servers[ipvs.Key{
			Family: c.opt.Family, Proto: m.entry.Proto, Addr: netip.AddrPortFrom(m.entry.Addr, m.entry.Port),
		}]
	case setSplit:
		return r.split(c, m)
	case setAddresses:
		return r.addrs[m.entry.Addr]
	}
	return false
}

// takeDraining finds what drains in what was read from the kernel.
func (c *compiler) takeDraining(o *Observation) {
	now := c.opt.Now()
	for d := range c.draining {
		if v, there := o.destinations[d]; !there || v.Active+v.Inactive == 0 {
			delete(c.draining, d)
		}
	}
	for d, v := range o.destinations {
		if _, known := c.draining[d]; known || v.Weight != 0 || v.Active+v.Inactive == 0 || !c.drains(d.server) {
			continue
		}
		if !c.program.destinations.wanted(d).there {
			c.draining[d] = now.Add(c.opt.Drain)
			c.nextPoll = now.Add(drainPoll)
		}
	}
}

// leave takes endpoints and servers away, or lets them drain.
func (b *Backend) leave(ctx context.Context, ops []ipvs.Op, refused map[forward.PortName]error) error {
	c := b.c
	candidates := map[ipvs.Key][]destination{}
	for _, o := range ops {
		if c.drains(o.Key) {
			candidates[o.Key] = append(candidates[o.Key], c.leaving(o)...)
		}
	}
	if err := b.quiesce(ctx, candidates, refused); err != nil {
		return err
	}
	busy, failed := b.busy(ctx, candidates)
	now := c.opt.Now()
	var removals []ipvs.Op
	var first error
	for _, o := range ops {
		if err := failed[o.Key]; err != nil { // nothing is known of these, which must not stop the others
			first = err
			continue
		}
		removals = append(removals, c.ended(o, busy, now)...)
	}
	if len(c.draining) > 0 {
		c.nextPoll = now.Add(drainPoll)
	}
	return errors.Join(first, b.step(ctx, step{servers: removals}, refused))
}

// leaving gives the endpoints that a removal takes away.
func (c *compiler) leaving(o ipvs.Op) []destination {
	if o.Verb == ipvs.RemoveDestination {
		return []destination{{o.Key, o.To}}
	}
	var out []destination
	for d, held := range c.program.destinations.held {
		if d.server == o.Key && held.there {
			out = append(out, d)
		}
	}
	return out
}

// ended gives what of a removal can be done now: all of it, or the endpoints without connections.
func (c *compiler) ended(o ipvs.Op, busy map[destination]bool, now time.Time) []ipvs.Op {
	if !c.drains(o.Key) {
		return []ipvs.Op{o}
	}
	var ended []ipvs.Op
	kept := false
	for _, d := range c.leaving(o) {
		if c.stays(d, busy[d], now) {
			kept = true
		} else {
			ended = append(ended, ipvs.Op{Verb: ipvs.RemoveDestination, Key: d.server, To: d.addr})
		}
	}
	if kept {
		return ended
	}
	return []ipvs.Op{o}
}

// stays tells whether an endpoint goes on draining, and notes it.
func (c *compiler) stays(d destination, busy bool, now time.Time) bool {
	deadline, known := c.draining[d]
	if !known {
		deadline = now.Add(c.opt.Drain)
	}
	if !busy || !now.Before(deadline) {
		delete(c.draining, d)
		return false
	}
	c.draining[d] = deadline
	return true
}

// quiesce stops new connections to endpoints.
func (b *Backend) quiesce(
	ctx context.Context, candidates map[ipvs.Key][]destination, refused map[forward.PortName]error,
) error {
	var ops []ipvs.Op
	for _, list := range candidates {
		for _, d := range list {
			if b.c.program.destinations.has(d).value != 0 {
				ops = append(ops, ipvs.Op{Verb: ipvs.EditDestination, Key: d.server, To: d.addr})
			}
		}
	}
	return b.step(ctx, step{servers: ops}, refused)
}

// busy tells which endpoints have connections, and of which servers that could not be told.
func (b *Backend) busy(
	ctx context.Context, candidates map[ipvs.Key][]destination,
) (busy map[destination]bool, failed map[ipvs.Key]error) {
	busy, failed = map[destination]bool{}, map[ipvs.Key]error{}
	for k := range candidates {
		list, err := b.kernel.Servers.Destinations(ctx, k)
		if err != nil {
			failed[k] = fmt.Errorf("count connections: %w", err)
		}
		for _, d := range list {
			busy[destination{k, d.Addr}] = d.Active+d.Inactive > 0
		}
	}
	return busy, failed
}
