package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// The servers' ports, as in the manifests.
const (
	webPort = 8080
	dnsPort = 5353
)

// A story is one run of the demo.
type story struct {
	tool  *tool
	out   *screen
	lab   *netns.Lab
	nodes map[string]*daemon
	pace  pace
}

func newStory(t *tool, s *screen) *story {
	return &story{tool: t, out: s, nodes: map[string]*daemon{}, pace: paceHere()}
}

func (s *story) close() {
	if s.lab == nil {
		return
	}
	if err := s.lab.Close(); err != nil {
		s.out.say("(while tidying up: " + err.Error() + ")")
	}
}

func (s *story) tell(ctx context.Context) error {
	s.out.title("Turnout: a Service proxy for Kubernetes nodes, mode " + s.tool.mode)
	for _, step := range []func(context.Context) error{
		s.buildCluster, s.startDaemons, s.list, s.traffic, s.refusals, s.trace, s.scale, s.kill, s.end,
	} {
		if ctx.Err() != nil {
			return errInterrupted
		}
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// picture shows the cluster.
const picture = `
far 198.51.100.7 ---- router ----+---------------+----------------+
                                 |               |                |
                       out 10.20.0.200    na 10.20.0.11     nb 10.20.0.12      nodes, with turnout on each
                                           |         |       |    |    |
                                          c1        s1      c2   s2   s3        pods: clients c, servers s`

func (s *story) buildCluster(context.Context) error {
	s.out.section("A small cluster")
	s.out.say("Each name is a network namespace of this machine with a kernel network stack of its own.", "")
	s.out.output(strings.TrimPrefix(picture, "\n"))
	start := time.Now()
	lab, err := netns.New(netns.Topology{Nodes: 2})
	if err != nil {
		return fmt.Errorf("build the cluster: %w", err)
	}
	s.lab = lab
	if _, err := lab.AddPod(lab.Host("nb"), "s3", 12); err != nil {
		return err
	}
	for _, pod := range []string{"s1", "s2", "s3"} {
		if _, err := lab.Host(pod).Serve(model.TCP, webPort); err != nil {
			return err
		}
		if _, err := lab.Host(pod).Serve(model.UDP, dnsPort); err != nil {
			return err
		}
	}
	took := time.Since(start).Round(time.Millisecond)
	s.out.say("", fmt.Sprintf("Built in %v. Nobody answers on a Service address yet:", took))
	r := lab.Host("c1").Dial(netns.Call{To: netip.MustParseAddrPort("10.70.1.10:80"), Timeout: time.Second})
	s.out.promise(r.Kind != netns.OK, fmt.Sprintf("c1 -> web 10.70.1.10:80: %s", r.Kind))
	return nil
}

func (s *story) startDaemons(ctx context.Context) error {
	s.out.section("Turnout starts on both nodes")
	s.out.say("It reads Services and EndpointSlices from a directory of YAML, a copy of "+s.tool.source+".",
		"In a cluster it takes them from the API server instead, with kube-proxy's own flags and configuration file.")
	start := time.Now()
	for _, node := range []string{"na", "nb"} {
		if err := s.startDaemon(ctx, node); err != nil {
			return err
		}
		s.out.command("turnout " + strings.Join(s.nodes[node].args, " "))
	}
	for _, to := range []struct{ host, addr string }{
		{"na", "10.70.1.10:80"}, {"nb", "10.70.1.10:80"}, {"na", "[fd70::110]:80"}, {"nb", "[fd70::110]:80"},
	} {
		if err := s.awaitAnswer(ctx, to.host, to.addr); err != nil {
			return err
		}
	}
	took := time.Since(start).Round(time.Millisecond)
	s.out.say("", fmt.Sprintf("All rules in place on both nodes %v after the start.", took))
	return nil
}

// awaitAnswer waits until a host gets an answer.
func (s *story) awaitAnswer(ctx context.Context, host, to string) error {
	call := netns.Call{To: netip.MustParseAddrPort(to), Timeout: 200 * time.Millisecond}
	deadline := time.Now().Add(s.pace.patience)
	for {
		r := s.lab.Host(host).Dial(call)
		if r.Kind == netns.OK {
			return nil
		}
		if err := s.alive(); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return errInterrupted
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s got no answer from %s within %v: %s; the daemon's last words: %s",
				host, to, s.pace.patience, r, s.nodes[host].lastWords())
		}
		if !wait(ctx, 20*time.Millisecond) {
			return errInterrupted
		}
	}
}

func (s *story) list(ctx context.Context) error {
	s.out.section("What node na forwards now")
	s.out.say("One line for each address that clients dial, read from the daemon and compared with the kernel (DRIFT).")
	return s.tool.print(ctx, s.out, "ls", "--socket", s.nodes["na"].socket)
}

// A trip is one way to reach a Service.
type trip struct {
	label, from, to string
	proto           model.Protocol
	servers         []string
}

func (s *story) traffic(ctx context.Context) error {
	s.out.section("Traffic through every kind of address")
	s.out.say("300 new connections each. Every server is to get its fair share, and nothing may fail.")
	all, two := []string{"s1", "s2", "s3"}, []string{"s1", "s2"}
	for _, t := range []trip{
		{"pod c1 -> cluster IP 10.70.1.10:80", "c1", "10.70.1.10:80", model.TCP, all},
		{"node na -> cluster IP 10.70.1.10:80", "na", "10.70.1.10:80", model.TCP, all},
		{"pod s1 -> its own Service (hairpin)", "s1", "10.70.1.10:80", model.TCP, all},
		{"client out -> NodePort 10.20.0.12:30080", "out", "10.20.0.12:30080", model.TCP, all},
		{"client far -> load balancer 192.0.2.10:80", "far", "192.0.2.10:80", model.TCP, all},
		{"pod c2 -> IPv6 cluster IP [fd70::110]:80", "c2", "[fd70::110]:80", model.TCP, all},
		{"pod c2 -> UDP name server 10.70.1.53:53", "c2", "10.70.1.53:53", model.UDP, two},
	} {
		if ctx.Err() != nil {
			return errInterrupted
		}
		s.travel(t)
	}
	return nil
}

// travel makes many connections and judges how they were spread.
func (s *story) travel(t trip) {
	const connections = 300
	answers, failed := map[string]int{}, 0
	var first string
	call := netns.Call{To: netip.MustParseAddrPort(t.to), Proto: t.proto}
	for range connections {
		r := s.lab.Host(t.from).Dial(call)
		if r.Kind == netns.OK {
			answers[r.Server]++
			continue
		}
		failed++
		if first == "" {
			first = r.String()
		}
		if failed > 5 {
			break
		}
	}
	s.out.bars(t.label, t.servers, answers, failed)
	if failed > 0 {
		s.out.promise(false, "no connection fails; the first said: "+first)
		return
	}
	// With 300 connections to 3 servers a share below 20 % or above 47 % has a chance of less than one in a million.
	fair := len(answers) == len(t.servers)
	for _, name := range t.servers {
		share := float64(answers[name]) / connections * float64(len(t.servers))
		fair = fair && share > 0.6 && share < 1.41
	}
	s.out.promise(fair, fmt.Sprintf("all %d answered, each server had its share", connections))
}

func (s *story) refusals(context.Context) error {
	s.out.section("What must not work")
	empty := s.lab.Host("c1").TCP("10.70.1.99:80")
	s.out.promise(empty.Kind == netns.Refused,
		fmt.Sprintf("c1 -> empty 10.70.1.99:80, a Service without endpoints: %s at once, after %v", empty.Kind,
			empty.Took.Round(100*time.Microsecond)))
	call := netns.Call{To: netip.MustParseAddrPort("192.0.2.20:80"), Timeout: 500 * time.Millisecond}
	inside, outside := s.lab.Host("out").Dial(call), s.lab.Host("far").Dial(call)
	s.out.promise(inside.Kind == netns.OK,
		fmt.Sprintf("out -> admin 192.0.2.20:80, loadBalancerSourceRanges [10.20.0.0/24]: %s", inside.Kind))
	s.out.promise(outside.Kind == netns.Timeout, fmt.Sprintf("far -> the same: %s, its packets are dropped", outside.Kind))
	return nil
}

func (s *story) trace(ctx context.Context) error {
	s.out.section("Why? Ask for one packet")
	s.out.say("turnout trace follows a packet from the decision down to each rule, without sending it.")
	socket := s.nodes["na"].socket
	if err := s.tool.print(ctx, s.out, "trace", "198.51.100.7", "192.0.2.10:80", "--socket", socket); err != nil {
		return err
	}
	return s.tool.print(ctx, s.out, "trace", "198.51.100.7", "192.0.2.20:80", "--socket", socket)
}

func (s *story) end(context.Context) error {
	s.out.section("Result")
	kept := s.out.promises - s.out.broken()
	s.out.say(fmt.Sprintf("%d of %d promises kept, in %v. The namespaces are removed now; nothing is left on this machine.",
		kept, s.out.promises, time.Since(s.out.start).Round(100*time.Millisecond)))
	if s.out.broken() == 0 {
		s.out.say("", "Next: turnout --help, or the same in your cluster with kube-proxy's own configuration file.")
	}
	return nil
}

// wait pauses, and tells whether the story goes on.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
