package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/route"
	"github.com/turnout-proxy/turnout/internal/model"
)

// maxRefusals bounds how many ports one Apply takes out one after the other before it gives up.
const maxRefusals = 8

// Apply implements backend.Backend. It stops at the first step that failed; what was carried out is remembered, so the
// next plan goes on from there. A port whose objects the kernel refuses as such is left out, and the rest is tried again.
func (b *Backend) Apply(ctx context.Context, p backend.Plan) backend.Report {
	start := time.Now()
	report := backend.Report{}
	next, ok := p.(*plan)
	if !ok {
		report.Err = fmt.Errorf("plan of type %T is not one of this mode", p)
		return report
	}
	if len(b.c.conflicts) > 0 {
		report.Failed = maps.Clone(b.c.conflicts)
		clear(b.c.conflicts)
	}
	conflicts := len(report.Failed)
	for {
		refused := map[forward.PortName]error{}
		report.Steps += next.Steps()
		report.Err = b.carryOut(ctx, next, refused, &report)
		if len(refused) == 0 {
			break
		}
		if report.Failed == nil {
			report.Failed = map[forward.PortName]error{}
		}
		for n, err := range refused {
			if errors.Is(err, ipvs.ErrScheduler) {
				if problems := b.c.lack(n, err); len(problems) > 0 {
					report.Problems = append(report.Problems, problems...)
					continue
				}
			}
			report.Failed[n] = err
			b.c.refuse(n, err)
		}
		if len(report.Failed) > maxRefusals+conflicts {
			break
		}
		next = b.c.plan()
	}
	report.Took = time.Since(start)
	return report
}

// carryOut takes one step after the other, until one fails. Refused gets the ports that a failure is to be blamed on.
func (b *Backend) carryOut(ctx context.Context, p *plan, refused map[forward.PortName]error, r *backend.Report) error {
	var uncounted error
	for _, s := range p.steps {
		if s.rules {
			text := payload(p.rules)
			r.Bytes += len(text)
			if err := b.kernel.Rules.Restore(ctx, text); err != nil {
				return fmt.Errorf("write the rules: %w", err)
			}
			b.c.program.held.Chains, b.c.program.held.Jumps = b.c.program.rules.Chains, b.c.program.rules.Jumps
		}
		if s.reap {
			var some bool
			if some, uncounted = b.reap(ctx); some { // there is more to be taken away than was planned
				return b.carryOut(ctx, b.c.plan(), refused, r)
			}
		}
		if err := b.step(ctx, s, refused); err != nil {
			return err
		}
	}
	return uncounted
}

// step carries out what one edge does in one call, and notes what of it took effect.
func (b *Backend) step(ctx context.Context, s step, refused map[forward.PortName]error) error {
	n := notes{refused: refused}
	for i, err := range b.kernel.Sets.Apply(ctx, s.sets) {
		o := s.sets[i]
		n.take(err, func() { b.c.doneSet(o, b.c.opt.Family) }, func() (forward.PortName, bool) { return b.c.ownerOfEntry(o) })
	}
	b.serve(ctx, s.servers, &n)
	n.note(b.prepare(ctx, s.routes))
	for i, err := range b.kernel.Routes.Apply(ctx, s.routes) {
		o := s.routes[i]
		if errors.Is(err, kernel.ErrInvalid) && o.Source.IsValid() {
			// The kernel takes no source that it still makes sure of. Until it does the source is its choice.
			o.Source = netip.Addr{}
			err = b.kernel.Routes.Apply(ctx, []route.Op{o})[0]
		}
		n.take(err, func() { b.c.doneRoute(o) }, func() (forward.PortName, bool) { return b.c.ownerOfLocal(o) })
	}
	if len(s.former) > 0 {
		for i, err := range b.kernel.Former.Apply(ctx, s.former) {
			a := s.former[i].Addr
			n.take(err, func() { delete(b.c.former, a) }, func() (forward.PortName, bool) { return forward.PortName{}, false })
		}
		n.note(abandon(ctx, b.kernel.Former))
	}
	if !b.c.begun && len(s.routes) > 0 {
		n.note(abandon(ctx, b.kernel.Routes))
	}
	return n.first
}

// serve changes virtual servers first and their endpoints after them: what was to be ours and turns out to be somebody
// else's must not get endpoints.
func (b *Backend) serve(ctx context.Context, ops []ipvs.Op, n *notes) {
	failed := map[ipvs.Key]bool{}
	var first, second []ipvs.Op
	for _, o := range ops {
		if o.Verb == ipvs.AddServer || o.Verb == ipvs.EditServer {
			first = append(first, o)
		} else {
			second = append(second, o)
		}
	}
	for _, part := range [][]ipvs.Op{first, second} {
		part = slices.DeleteFunc(part, func(o ipvs.Op) bool { return failed[o.Key] })
		for i, err := range b.kernel.Servers.Apply(ctx, part) {
			o := part[i]
			if gone(o, err) {
				err = nil
			}
			failed[o.Key] = failed[o.Key] || err != nil
			n.take(err, func() { b.c.doneServer(o) }, func() (forward.PortName, bool) { return b.c.ownerOfServer(o) })
		}
	}
}

// prepare makes the device that addresses are to be added to.
func (b *Backend) prepare(ctx context.Context, ops []route.Op) error {
	device, is := b.kernel.Routes.(route.Device)
	if !is || !slices.ContainsFunc(ops, func(o route.Op) bool { return o.Verb == route.Add }) {
		return nil
	}
	if err := device.Ensure(ctx); err != nil {
		return fmt.Errorf("make the device for the addresses of Services: %w", err)
	}
	return nil
}

// abandon removes a device that has no address left of either family.
func abandon(ctx context.Context, t route.Table) error {
	device, is := t.(route.Device)
	if !is {
		return nil
	}
	for _, f := range []model.Family{model.IPv4, model.IPv6} {
		if left, err := device.List(ctx, f); err != nil || len(left) > 0 {
			return err
		}
	}
	return device.Delete(ctx)
}

// notes collect what became of the changes of one step.
type notes struct {
	refused map[forward.PortName]error
	first   error
}

func (n *notes) note(err error) {
	if n.first == nil {
		n.first = err
	}
}

// take notes one change: done if it took effect; else its port is refused if the kernel would refuse it again.
func (n *notes) take(err error, done func(), owner func() (forward.PortName, bool)) {
	if err == nil {
		done()
		return
	}
	if errors.Is(err, kernel.ErrInvalid) || errors.Is(err, kernel.ErrConflict) || errors.Is(err, ipvs.ErrScheduler) {
		if name, found := owner(); found {
			n.refused[name] = err
		}
	}
	n.note(err)
}

// gone tells whether an error says that what was to be removed is not there.
func gone(o ipvs.Op, err error) bool {
	return errors.Is(err, ipvs.ErrMissing) && (o.Verb == ipvs.RemoveServer || o.Verb == ipvs.RemoveDestination)
}

// ownerOfEntry, ownerOfServer and ownerOfLocal find the port that an object was wanted for.

func (c *compiler) ownerOfEntry(o ipset.Op) (forward.PortName, bool) {
	name := plainName(o.Set.Name, c.opt.Family)
	return c.find(func(have *compiled) bool {
		for _, m := range have.members {
			if m.member == (member{name, o.Entry}) {
				return true
			}
		}
		return false
	})
}

func (c *compiler) ownerOfServer(o ipvs.Op) (forward.PortName, bool) {
	return c.find(func(have *compiled) bool {
		for _, s := range have.servers {
			if s.key == o.Key {
				return true
			}
		}
		return false
	})
}

func (c *compiler) ownerOfLocal(o route.Op) (forward.PortName, bool) {
	return c.find(func(have *compiled) bool {
		return slices.Contains(have.locals, o.Addr)
	})
}

func (c *compiler) find(is func(*compiled) bool) (forward.PortName, bool) {
	for n, have := range c.ports {
		if is(have) {
			return n, true
		}
	}
	return forward.PortName{}, false
}
