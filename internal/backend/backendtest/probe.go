package backendtest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/conntrack"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// How long a connection may take. Within the lab an answer comes in milliseconds; the rest is for busy machines. Where
// silence is right, every such question costs the short time.
const (
	answerWithin  = 4 * time.Second
	silenceAfter  = 400 * time.Millisecond
	maxConnects   = 120
	allSeenUpTo   = 4
	samples       = 6
	parallelCalls = 8
	// briefAffinity is so short that it may end between two connections on a busy machine.
	briefAffinity = 20 * time.Second
)

// A prober asks the real kernel what happens to packets, by connections in a lab.
type prober struct {
	site *site
	// asked are packets that wait to be asked about together, as most of the time goes by waiting.
	asked         []question
	conversations map[string]*conversation
}

type question struct {
	command command
	packet  forward.Packet
	want    forward.Outcome
	// sticky tells that session affinity keeps the client with one endpoint, brief that it may end at any moment.
	sticky, brief bool
}

// packet asks about a packet. What the lab cannot show is skipped with a message.
func (p *prober) packet(r *run, c command, k forward.Packet, want forward.Outcome) {
	r.t.Helper()
	if why := p.cannot(r, k, want); why != "" {
		r.t.Logf("%s: not asked of the kernel: %s", c, why)
		return
	}
	q := question{command: c, packet: k, want: want}
	if want.Do == forward.Forward {
		affinity := r.world.table.Port(want.Port).Affinity
		q.sticky, q.brief = affinity > 0, affinity < briefAffinity
	}
	p.asked = append(p.asked, q)
}

// flush asks what was collected. Connections that stick to an endpoint are asked about one after the other, as they
// share what the kernel remembers.
func (p *prober) flush(r *run) {
	r.t.Helper()
	var group sync.WaitGroup
	slots := make(chan struct{}, parallelCalls)
	for _, q := range p.asked {
		if q.sticky {
			continue
		}
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			p.ask(r, q)
		})
	}
	group.Wait()
	for _, q := range p.asked {
		if q.sticky {
			p.ask(r, q)
		}
	}
	p.asked = nil
}

// cannot tells why the lab cannot show what happens to a packet; "" if it can.
func (p *prober) cannot(r *run, k forward.Packet, want forward.Outcome) string {
	if r.mode.NoLoopback && k.Dst.Addr().IsLoopback() {
		return "the mode leaves packets for loopback addresses alone"
	}
	if k.Proto == model.SCTP && !netns.SCTP() {
		return "this kernel has no SCTP sockets"
	}
	if k.In != naturalInterface(k.Src.Addr()) && !slices.Contains(r.world.host.Addrs, k.Src.Addr()) {
		return "packets of that client do not come in on link " + k.In
	}
	client, err := p.site.host(k.Src.Addr())
	if err != nil {
		return err.Error()
	}
	for _, c := range want.Choices {
		server, err := p.site.host(c.Endpoint.Addr())
		if err != nil {
			return err.Error()
		}
		if !c.SNAT && !p.site.here(client) && !p.site.here(server) && (!p.site.returns(client) || p.site.returns(server)) {
			return fmt.Sprintf("answers of %s to %s do not come by node na", c.Endpoint, k.Src.Addr())
		}
	}
	return ""
}

// ask makes the connections for one packet.
func (p *prober) ask(r *run, q question) {
	r.t.Helper()
	switch q.want.Do {
	case forward.Forward:
		p.askForward(r, q)
	case forward.Reject:
		if got := p.dial(q.packet, answerWithin); got.Kind != netns.Refused && !blocked(q.packet, got) {
			r.t.Errorf("%s: the kernel: %s; want refused", q.command, got)
		}
	case forward.Drop:
		if got := p.dial(q.packet, silenceAfter); got.Kind != netns.Timeout && !blocked(q.packet, got) {
			r.t.Errorf("%s: the kernel: %s; want no answer", q.command, got)
		}
	case forward.Pass:
		got := p.dial(q.packet, silenceAfter)
		if got.Kind != netns.OK {
			return
		}
		if host, err := p.site.host(q.packet.Dst.Addr()); err != nil || host.Name != got.Server {
			r.t.Errorf("%s: the kernel: %s; want nobody but the owner of %s", q.command, got, q.packet.Dst)
		}
	}
}

// blocked tells that the machine's own datagram was not let out: the kernel tells the sender so at once, for a refusal
// and for silence alike.
func blocked(k forward.Packet, got netns.Result) bool {
	return k.In == "" && k.Proto == model.UDP && errors.Is(got.Err, unix.EPERM)
}

// askForward connects until every endpoint was met, or if they are many, some times.
func (p *prober) askForward(r *run, q question) {
	r.t.Helper()
	seen := map[forward.Choice]bool{}
	for n := range maxConnects {
		got := p.dial(q.packet, answerWithin)
		choice, err := p.choice(r, q, got)
		if err != nil {
			r.t.Errorf("%s: the kernel: %v", q.command, err)
			return
		}
		seen[choice] = true
		switch {
		case q.sticky && !q.brief && len(seen) > 1:
			r.t.Errorf("%s: the kernel: one client met several endpoints in spite of session affinity", q.command)
			return
		case (q.sticky || len(q.want.Choices) > allSeenUpTo) && n+1 >= samples, len(seen) == len(q.want.Choices) && !q.sticky:
			return
		}
	}
	r.t.Errorf("%s: the kernel: %d connections met only %d of %s", q.command, maxConnects, len(seen), q.want)
}

// choice finds who answered among the outcome's choices, and checks whom the server saw.
func (p *prober) choice(r *run, q question, got netns.Result) (forward.Choice, error) {
	if got.Kind != netns.OK {
		return forward.Choice{}, fmt.Errorf("%s; want %s", got, short(q.want))
	}
	for _, c := range q.want.Choices {
		host, err := p.site.host(c.Endpoint.Addr())
		if err != nil {
			return forward.Choice{}, err
		}
		if got.Port != c.Endpoint.Port() || got.Server != host.Name && got.Server != c.Endpoint.Addr().String() {
			continue
		}
		return c, p.sawRightly(r, q.packet, c, got)
	}
	return forward.Choice{}, fmt.Errorf("%s; want %s", got, short(q.want))
}

// sawRightly checks the client's address as the server saw it. The node's own address can stand for itself or for a
// mask.
func (p *prober) sawRightly(r *run, k forward.Packet, c forward.Choice, got netns.Result) error {
	seen, src := got.ClientSeen.Addr(), k.Src.Addr()
	own := slices.Contains(r.world.host.Addrs, seen)
	switch {
	case src.IsLoopback():
		if seen.IsLoopback() && !slices.Contains(r.world.host.Addrs, c.Endpoint.Addr()) {
			return fmt.Errorf("%s; a loopback address must not be seen", got)
		}
	case k.In == "":
	case c.SNAT && (!own || seen == src):
		return fmt.Errorf("%s; want one of the node's addresses to be seen", got)
	case !c.SNAT && seen != src:
		return fmt.Errorf("%s; want the client's address %s to be seen", got, src)
	}
	return nil
}

func (p *prober) dial(k forward.Packet, timeout time.Duration) netns.Result {
	host, err := p.site.host(k.Src.Addr())
	if err != nil {
		return netns.Result{Kind: netns.Failed, Err: err}
	}
	return host.Dial(netns.Call{
		To: k.Dst, Proto: k.Proto, From: netip.AddrPortFrom(k.Src.Addr(), 0), Timeout: timeout,
	})
}

// serve starts a server wherever the table has an endpoint, as far as the lab has the address.
func (p *prober) serve(t *forward.Table) error {
	for _, name := range t.Names() {
		port := t.Port(name)
		for _, pool := range [][]forward.Endpoint{port.Cluster, port.Local} {
			for _, ep := range pool {
				if err := p.site.serve(name.Proto, ep.AddrPort); err != nil {
					return err
				}
			}
		}
		for _, ep := range port.Serving {
			if err := p.site.serve(name.Proto, ep); err != nil {
				return err
			}
		}
	}
	return nil
}

// forget drops stale connection tracking entries, which is the loop's part after each sync.
func (p *prober) forget(r *run) error {
	ix := flow.NewIndex(r.world.table)
	for _, old := range r.world.gone {
		ix.Remove(old)
	}
	protos := slices.DeleteFunc(flow.Protocols(), func(proto model.Protocol) bool { return !ix.Wants(proto) })
	return r.lane.enter(func() error {
		_, err := conntrack.Forget(context.Background(), conntrack.Kernel{}, r.family, protos, ix.Stale)
		return err // a *StepError says what was tried
	})
}

// runKernel runs the scripts on the real kernel.
func runKernel(t *testing.T, m Mode) {
	t.Helper()
	if m.Real == nil {
		t.Skip("the mode has no real form")
	}
	if testing.Short() {
		t.Skip("takes a minute; run it without -short")
	}
	s := newSite(t)
	list := loadScripts(t)
	for _, family := range m.Families {
		t.Run(family.String(), func(t *testing.T) {
			kernel := s.kernel(t, m, family)
			t.Run("random", func(t *testing.T) { s.randomKernel(t, m, family, kernel) })
			for _, script := range list {
				if script.only != 0 && script.only != family {
					continue
				}
				t.Run(script.name, func(t *testing.T) {
					if reason, ok := m.Exceptions[script.name]; ok {
						t.Skipf("%s is not held to it: %s", m.Name, reason)
					}
					s.script(t, m, family, script, kernel)
				})
			}
		})
	}
}

// script runs one script on the lab's node, and takes away what it leaves also if it fails.
func (s *site) script(t *testing.T, m Mode, family model.Family, sc *script, kernel Kernel) {
	t.Helper()
	l := newLane(t, m, kernel, "")
	l.enter = s.node.Do
	r := newRun(t, m, family, sc, l)
	r.probe = &prober{site: s, conversations: map[string]*conversation{}}
	defer func() {
		r.probe.close()
		if err := errors.Join(s.wipe(family, kernel, r.foreign), s.restore()); err != nil {
			t.Errorf("clean up after the script: %v", err)
		}
	}()
	r.all()
}

// forgetAll makes the node forget all connections of a family.
func (s *site) forgetAll(family model.Family) error {
	return s.node.Do(func() error {
		_, err := conntrack.Forget(context.Background(), conntrack.Kernel{}, family,
			[]model.Protocol{model.TCP, model.UDP}, func(flow.Flow) bool { return true })
		return err // a *StepError says what was tried
	})
}

// wipe removes all of the mode from the node, connections included.
func (s *site) wipe(family model.Family, kernel Kernel, foreign bool) error {
	if err := s.forgetAll(family); err != nil {
		return err
	}
	return s.node.Do(func() error {
		ctx := context.Background()
		b := kernel.Open()
		b.Compile(nil, forward.Delta{})
		have, err := b.Observe(ctx)
		if err != nil {
			return err // the caller says what for
		}
		err = b.Apply(ctx, b.Diff(have)).Err
		if foreign {
			err = errors.Join(err, kernel.RemoveForeign())
		}
		return err
	})
}

// skipText says why a mode cannot run here.
func skipText(m Mode, family model.Family, err error) string {
	return fmt.Sprintf("%s cannot run on this kernel for %s: %s", m.Name, family, strings.TrimSpace(err.Error()))
}
