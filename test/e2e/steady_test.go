package e2e

import (
	"syscall"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

func TestSteadyTrafficSurvivesRestartsKillsAndEndpointChanges(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, netns.Topology{Nodes: 2})
			s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
			x1, x2 := s.pod("na", "x1", 12), s.pod("nb", "x2", 12)
			for _, p := range []*netns.Host{s1, s2, x1, x2} {
				serve(t, p, model.TCP, webPort)
			}
			s.writeWeb(s1, s2)
			na, nb := s.node("na", flavourFlag(flavour)), s.node("nb", flavourFlag(flavour))
			for _, n := range []*node{na, nb} {
				n.start()
			}
			for _, n := range []*node{na, nb} {
				n.pool(s1, s2)
			}
			// The long connections are made now, so they are with endpoints that stay.
			l := s.load(webRoutes(s.lab), "s1", "s2")
			c := churn{s, l, na, nb}
			for round := range 3 {
				t.Logf("round %d", round+1)
				c.grow("x1 comes", []*netns.Host{s1, s2, x1}, na, nb)
				c.restart(na, syscall.SIGTERM, nil, s1, s2, x1)
				c.restart(nb, syscall.SIGKILL, func() {
					// Node nb learns of it only when its daemon is back; na at once.
					c.grow("x2 comes while the daemon of nb is dead", []*netns.Host{s1, s2, x1, x2}, na)
				}, s1, s2, x1, x2)
				c.shrink("x1 goes", x1, []*netns.Host{s1, s2, x2}, na, nb)
				c.restart(na, syscall.SIGKILL, nil, s1, s2, x2)
				c.restart(nb, syscall.SIGTERM, nil, s1, s2, x2)
				c.shrink("x2 goes", x2, []*netns.Host{s1, s2}, na, nb)
			}
			l.stop()
		})
	}
}

// A churn changes what traffic depends on, while it runs.
type churn struct {
	*site
	load   *load
	na, nb *node
}

// grow adds an endpoint, and waits for these nodes to have it.
func (c churn) grow(what string, pods []*netns.Host, nodes ...*node) {
	c.t.Helper()
	c.load.expect(names(pods)...)
	start := time.Now()
	c.writeWeb(pods...)
	for _, n := range nodes {
		n.pool(pods...)
	}
	c.t.Logf("%s: in force within %v", what, time.Since(start).Round(time.Millisecond))
	c.load.flow(5)
}

// shrink takes an endpoint away. From the time at which nobody is sent to it any more, nobody may be.
func (c churn) shrink(what string, gone *netns.Host, pods []*netns.Host, nodes ...*node) {
	c.t.Helper()
	start := time.Now()
	c.writeWeb(pods...)
	for _, n := range nodes {
		n.pool(pods...)
	}
	effect := time.Since(start)
	last := c.load.untilQuiet(gone.Name, start)
	c.t.Logf("%s: in force within %v, and it got no new connection later than %v after the change", what, effect.Round(time.Millisecond),
		last.Round(time.Millisecond))
	if last > effect+quiet {
		c.t.Errorf("%s: it got a new connection %v after the change was in force", what, last-effect)
	}
	c.load.expect(names(pods)...)
	c.load.flow(5)
}

// restart ends a daemon, lets connections be made without it, and starts it again.
func (c churn) restart(n *node, signal syscall.Signal, meanwhile func(), pods ...*netns.Host) {
	c.t.Helper()
	status := n.end(signal)
	if signal == syscall.SIGTERM && status != 0 {
		c.t.Errorf("after %v the daemon's status is %d, want 0", signal, status)
	}
	c.load.flow(20)
	if meanwhile != nil {
		meanwhile()
	}
	start := time.Now()
	n.start()
	n.pool(pods...)
	c.t.Logf("after %v on %s: all in force again %v after the start", signal, n.host.Name,
		time.Since(start).Round(time.Millisecond))
	c.load.flow(5)
}

func names(hosts []*netns.Host) []string {
	var list []string
	for _, h := range hosts {
		list = append(list, h.Name)
	}
	return list
}

func serve(t *testing.T, h *netns.Host, proto model.Protocol, port uint16) *netns.Server {
	t.Helper()
	s, err := h.Serve(proto, port)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
