package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
)

// A Scheduler is a way of choosing an endpoint, by the kernel's name, with what it is told besides.
type Scheduler struct {
	Name  string
	Flags ipvs.Flags
}

// defaultScheduler takes the endpoints in turn.
const defaultScheduler = "rr"

// ParseScheduler reads what settings and annotations say: a name, then flags after commas, as "sh,sh-port". Empty is
// "rr". Any name will do that the kernel may have; the flags are those of the schedulers sh and mh. As with kube-proxy,
// "mh" alone looks at the client's port, too.
func ParseScheduler(text string) (Scheduler, error) {
	name, rest, flagged := strings.Cut(text, ",")
	s := Scheduler{Name: strings.TrimSpace(name)}
	if s.Name == "" {
		if flagged {
			return s, fmt.Errorf("scheduler %.40q begins with a comma: want a name such as rr, then its flags", text)
		}
		return Scheduler{Name: defaultScheduler}, nil
	}
	if len(s.Name) > maxSchedulerName || strings.Trim(s.Name, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
		return s, fmt.Errorf("%.40q is no name of a scheduler: want one of the kernel's, such as rr, wrr, lc, wlc, sh or mh",
			name)
	}
	if s.Name == "mh" && !flagged {
		s.Flags = ipvs.Scheduler2
	}
	for flag := range strings.SplitSeq(rest, ",") {
		switch flag = strings.TrimSpace(flag); {
		case !flagged:
		case (s.Name == "sh" || s.Name == "mh") && flag == s.Name+"-fallback":
			s.Flags |= ipvs.Scheduler1
		case (s.Name == "sh" || s.Name == "mh") && flag == s.Name+"-port":
			s.Flags |= ipvs.Scheduler2
		default:
			return s, fmt.Errorf("scheduler %s has no flag %.40q: sh and mh have NAME-fallback and NAME-port, others none",
				s.Name, flag)
		}
	}
	return s, nil
}

// maxSchedulerName is the longest name of a scheduler: IP_VS_SCHEDNAME_MAXLEN less the zero byte.
const maxSchedulerName = 15

// reasonScheduler is why a port is served, but not as it asked to be.
const reasonScheduler = "SchedulerUnavailable"

// sticky is how clients stay at an endpoint where the kernel cannot remember them: their address decides, and another
// endpoint takes over from one that drains.
func sticky() Scheduler { return Scheduler{"sh", ipvs.Scheduler1} }

// schedulers gives the scheduler of a port, and the one that takes the place of remembering its clients. An error tells
// what the port asks for and does not get.
func (c *compiler) schedulers(p *forward.Port) (own, stays Scheduler, err error) {
	own, stays = c.opt.Scheduler, sticky()
	var errs []error
	if p.Scheduler != "" {
		asked, err := ParseScheduler(p.Scheduler)
		if err == nil {
			err = c.lacking[asked.Name]
		}
		if err == nil {
			own = asked
		} else {
			errs = append(errs, fmt.Errorf("%w; endpoints are chosen by %s", err, own.Name))
		}
	}
	if err := c.lacking[stays.Name]; err != nil {
		if p.Affinity > 0 {
			errs = append(errs, fmt.Errorf("%w; pods and this machine keep no endpoint", err))
		}
		stays = own
	}
	return own, stays, errors.Join(errs...)
}

// compromise tells what a port that is served asked for and does not get.
func (c *compiler) compromise(n forward.PortName) error {
	have := c.ports[n]
	if have == nil {
		return nil
	}
	if have.port.Scheduler == "" && !slices.ContainsFunc(have.servers, func(s server) bool {
		return s.key.Mark != 0 && have.port.Affinity > 0
	}) {
		return nil
	}
	_, _, err := c.schedulers(have.port)
	return err
}

// askAgain forgets that the kernel lacks a scheduler when a Service asks for it that did not before.
func (c *compiler) askAgain(next, last *forward.Port) {
	if next == nil || next.Scheduler == "" || last != nil && last.Scheduler == next.Scheduler {
		return
	}
	if s, err := ParseScheduler(next.Scheduler); err == nil {
		delete(c.lacking, s.Name)
	}
}

// lack notes that the kernel has not the scheduler that a port's servers were to have, and renders all ports anew that
// it was wanted for. It gives these; none if the port cannot be served without it.
func (c *compiler) lack(n forward.PortName, err error) []backend.Problem {
	have := c.ports[n]
	if have == nil {
		return nil
	}
	name := c.missing(have)
	if name == "" {
		return nil
	}
	c.lacking[name] = err
	var problems []backend.Problem
	for _, other := range slices.SortedFunc(maps.Keys(c.ports), forward.PortName.Compare) {
		p := c.ports[other]
		if !slices.ContainsFunc(p.servers, func(s server) bool { return s.how.Scheduler == name }) {
			continue
		}
		p.reschedule(c)
		problems = append(problems, backend.Problem{Port: other, Reason: reasonScheduler, Err: c.compromise(other), Served: true})
	}
	return problems
}

// missing gives the scheduler of a port that another may stand in for and that the kernel did not take; "" if none.
func (c *compiler) missing(have *compiled) string {
	for _, s := range have.servers {
		held := c.program.servers.has(s.key)
		if held.there && held.value.Scheduler == s.how.Scheduler || s.how.Scheduler == c.opt.Scheduler.Name {
			continue
		}
		return s.how.Scheduler
	}
	return ""
}

// reschedule gives a port's servers the schedulers that it can have.
func (p *compiled) reschedule(c *compiler) {
	own, stays, _ := c.schedulers(p.port) // compromise tells what became of the wish
	for i := range p.servers {
		s := &p.servers[i]
		s.how = properties(p.port, s.key, own, stays)
		c.program.servers.set(s.key, s.how)
	}
}
