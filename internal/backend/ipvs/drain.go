package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A TCP endpoint that goes keeps its connections: it stays wanted with weight 0, which gets no new ones, until the last
// has ended or its time is up. A virtual server that no packet is led to any more, as its frontend serves all clients
// from one pool now, stays as long as such endpoints need it. UDP and SCTP endpoints go at once, as their clients would
// never notice; and so does everything of a frontend that is gone, as its address is free for other use (B005).
//
// All that is to be remembered is in the kernel, so that a restarted process goes on with what drains: the end of an
// endpoint's time is its upper threshold, which means nothing where no new connections come.

const (
	// defaultDrain is how long an endpoint may drain.
	defaultDrain = 15 * time.Minute
	// drainPoll is the time between two looks at what drains.
	drainPoll = 10 * time.Second
	// epoch is when moments begin, in Unix time: 2020-01-01.
	epoch = 1577836800
)

// A moment is a time in seconds since epoch. It fits the kernel's thresholds for 68 years.
type moment uint32

func momentOf(t time.Time) moment { return moment(max(t.Unix()-epoch, 1)) }

// drain is what a compiler knows of endpoints that drain.
type drain struct {
	// leaving has the endpoints by their servers, each with the end of its time.
	leaving map[ipvs.Key]map[netip.AddrPort]moment
	// retained are servers that are only there for such endpoints.
	retained map[ipvs.Key]bool
	// fresh are servers with endpoints that nobody has looked at yet. The others are looked at again at next.
	fresh map[ipvs.Key]bool
	next  time.Time
}

func newDrain() drain {
	return drain{
		leaving: map[ipvs.Key]map[netip.AddrPort]moment{}, retained: map[ipvs.Key]bool{}, fresh: map[ipvs.Key]bool{},
	}
}

func (d *drain) note(dest destination, until moment) {
	if d.leaving[dest.server] == nil {
		d.leaving[dest.server] = map[netip.AddrPort]moment{}
	}
	d.leaving[dest.server][dest.addr] = until
}

func (d *drain) forget(dest destination) {
	list := d.leaving[dest.server]
	if delete(list, dest.addr); len(list) == 0 {
		delete(d.leaving, dest.server)
		delete(d.fresh, dest.server)
	}
}

func (c *compiler) masqueradeMark() uint32 { return 1 << c.opt.Masquerading.Bit }

// frontend gives the address and port that clients of a virtual server dial.
func (c *compiler) frontend(k ipvs.Key) (forward.Key, bool) {
	if k.Mark == 0 {
		return forward.Key{Addr: k.Addr.Addr(), Port: k.Addr.Port(), Proto: k.Proto}, true
	}
	at, known := c.marks[k.Mark&^c.masqueradeMark()]
	return at, known
}

// drains tells whether the connections of a server's endpoints are waited for.
func (c *compiler) drains(k ipvs.Key) bool {
	at, known := c.frontend(k)
	return known && at.Proto == model.TCP
}

// served tells whether the frontend of a server is wanted.
func (c *compiler) served(k ipvs.Key) bool {
	at, known := c.frontend(k)
	return known && c.program.members.wanted(member{setServed, ipset.Entry{Addr: at.Addr, Proto: at.Proto, Port: at.Port}}).there
}

// leave lets an endpoint drain, or drops it.
func (c *compiler) leave(d destination) {
	p := &c.program
	if !c.drains(d.server) || !p.destinations.has(d).there {
		p.destinations.drop(d)
		return
	}
	c.quieten(d, momentOf(c.opt.Now().Add(c.opt.Drain)))
}

// quieten wants an endpoint without new connections.
func (c *compiler) quieten(d destination, until moment) {
	c.program.destinations.set(d, share{until: until})
	c.drain.note(d, until)
	c.drain.fresh[d.server] = true
}

// retain keeps servers that are not wanted any more, as long as endpoints of theirs drain and the frontend is there.
func (c *compiler) retain(was left) {
	p := &c.program
	for k := range c.drain.leaving {
		wanted := p.servers.wanted(k).there
		how, known := was.servers[k]
		switch {
		case !c.served(k) || !wanted && !known:
			c.forsake(k)
		case !wanted:
			p.servers.set(k, how)
			c.drain.retained[k] = true
		}
	}
	for _, mark := range was.marks {
		c.releaseMark(mark)
	}
}

// releaseMark forgets whose a mark is, once no server has it.
func (c *compiler) releaseMark(mark uint32) {
	plain := ipvs.Key{Family: c.opt.Family, Mark: mark &^ c.masqueradeMark()}
	masked := ipvs.Key{Family: c.opt.Family, Mark: mark | c.masqueradeMark()}
	if !c.program.servers.wanted(plain).there && !c.program.servers.wanted(masked).there {
		delete(c.marks, plain.Mark)
	}
}

// forsake drops a server with its endpoints that drain.
func (c *compiler) forsake(k ipvs.Key) {
	for addr := range c.drain.leaving[k] {
		c.end(destination{k, addr})
	}
	c.letGo(k)
}

// letGo drops a server that was only there for endpoints that drained.
func (c *compiler) letGo(k ipvs.Key) {
	if !c.drain.retained[k] {
		return
	}
	delete(c.drain.retained, k)
	c.program.servers.drop(k)
	c.releaseMark(k.Mark)
}

// end drops an endpoint that has drained, and its server if that was there for it alone.
func (c *compiler) end(d destination) {
	c.program.destinations.drop(d)
	c.drain.forget(d)
	if _, more := c.drain.leaving[d.server]; !more {
		c.letGo(d.server)
	}
}

// adopt finds what drains in what was read from the kernel: what a former process left, and what it did not come to.
func (c *compiler) adopt(o *Observation) {
	if !c.begun {
		return
	}
	now := c.opt.Now()
	for d, v := range o.destinations {
		if !c.program.destinations.wanted(d).there {
			c.adoptOne(o, d, v, now)
		}
	}
	for k, list := range c.drain.leaving {
		for addr, until := range list {
			if v, there := o.destinations[destination{k, addr}]; there && v.Weight == 0 && ended(v, until, now) {
				c.drain.fresh[k] = true
			}
		}
	}
	c.drain.next = now.Add(drainPoll)
}

// adoptOne lets an endpoint drain that is not wanted, if its frontend is.
func (c *compiler) adoptOne(o *Observation, d destination, v ipvs.Destination, now time.Time) {
	mark := d.server.Mark &^ c.masqueradeMark()
	if at, ours := o.possible[mark]; ours && mark != 0 {
		if _, known := c.marks[mark]; !known {
			c.marks[mark] = at
		}
	}
	if !c.drains(d.server) || !c.served(d.server) {
		return
	}
	until := momentOf(now.Add(c.opt.Drain))
	if v.Weight == 0 && v.Upper != 0 {
		until = min(until, moment(v.Upper))
	}
	if !c.program.servers.wanted(d.server).there {
		c.program.servers.set(d.server, o.servers[d.server])
		c.drain.retained[d.server] = true
	}
	c.quieten(d, until)
}

// ended tells whether an endpoint has drained.
func ended(v ipvs.Destination, until moment, now time.Time) bool {
	return v.Active+v.Inactive == 0 || momentOf(now) >= until
}

// due tells whether it is time to look at what drains.
func (c *compiler) due() bool {
	return len(c.drain.fresh) > 0 || len(c.drain.leaving) > 0 && !c.opt.Now().Before(c.drain.next)
}

// Wake implements backend.Waiter.
func (b *Backend) Wake() time.Time {
	if len(b.c.drain.leaving) == 0 {
		return time.Time{}
	}
	return b.c.drain.next
}

// reap looks at what drains and wants away what has drained; it tells whether there was such. What cannot be told of one
// server does not stop the others.
func (b *Backend) reap(ctx context.Context) (some bool, err error) {
	c := b.c
	now := c.opt.Now()
	all := !now.Before(c.drain.next)
	if all {
		c.drain.next = now.Add(drainPoll)
	}
	var failed []error
	for k, list := range c.drain.leaving {
		if !all && !c.drain.fresh[k] {
			continue
		}
		counted, err := b.kernel.Servers.Destinations(ctx, k)
		if err != nil {
			failed = append(failed, fmt.Errorf("count connections: %w", err))
			continue
		}
		delete(c.drain.fresh, k)
		busy := map[netip.AddrPort]bool{}
		for _, v := range counted {
			until, leaving := list[v.Addr]
			busy[v.Addr] = leaving && (v.Weight != 0 || !ended(v, until, now))
		}
		for addr := range list {
			if !busy[addr] {
				c.end(destination{k, addr})
				some = true
			}
		}
	}
	return some, errors.Join(failed...)
}
