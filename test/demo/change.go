package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/turnout-proxy/turnout/test/netns"
)

// A daemon is turnout on one node.
type daemon struct {
	cmd  *netns.Cmd
	args []string
	// socket is relative to the work directory.
	socket, log string
	ended       chan struct{}
}

// startDaemon starts turnout on a node.
func (s *story) startDaemon(ctx context.Context, node string) error {
	d := &daemon{socket: node + ".sock", log: filepath.Join(s.tool.dir, node+".log"), ended: make(chan struct{})}
	d.args = []string{
		"proxy", "--proxy-mode", s.tool.mode, "--strict-proxy-mode", "--manifests", manifests, "--hostname-override", node,
		"--cluster-cidr", clusterCIDR, "--socket", d.socket,
	}
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open the log of node %s: %w", node, err)
	}
	defer func() { _ = log.Close() }() // the daemon has a copy
	d.cmd = s.lab.Host(node).Command(ctx, s.tool.binary, d.args...)
	d.cmd.Dir, d.cmd.Stdout, d.cmd.Stderr = s.tool.dir, log, log
	if err := d.cmd.Start(); err != nil {
		return err
	}
	go func() {
		defer close(d.ended)
		_ = d.cmd.Wait() // how it ended is in the log
	}()
	s.nodes[node] = d
	return nil
}

// alive gives an error if a daemon has ended by itself.
func (s *story) alive() error {
	for node, d := range s.nodes {
		select {
		case <-d.ended:
			return fmt.Errorf("turnout on node %s has ended: %s", node, d.lastWords())
		default:
		}
	}
	return nil
}

// lastWords gives the last line of the log.
func (d *daemon) lastWords() string {
	text, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}

// startTraffic loads the web shop from two sides: a pod on na, and a client far away through the load balancer.
func (s *story) startTraffic() []*netns.Traffic {
	var running []*netns.Traffic
	for _, t := range []struct{ from, to string }{{"c1", "10.70.1.10:80"}, {"far", "192.0.2.10:80"}} {
		running = append(running, s.lab.Host(t.from).Load(netns.Load{
			To: netip.MustParseAddrPort(t.to), Rate: s.pace.rate, Long: s.pace.long,
		}))
	}
	return running
}

// total adds up what several loads counted.
func total(loads []netns.Tally) netns.Tally {
	sum := netns.Tally{ByServer: map[string]int{}, Failed: map[netns.Kind]int{}, Broken: map[netns.Break]int{}}
	for _, t := range loads {
		sum.Opened, sum.OK = sum.Opened+t.Opened, sum.OK+t.OK
		sum.Misdirected, sum.Pings = sum.Misdirected+t.Misdirected, sum.Pings+t.Pings
		for k, n := range t.ByServer {
			sum.ByServer[k] += n
		}
		for k, n := range t.Failed {
			sum.Failed[k] += n
		}
		for k, n := range t.Broken {
			sum.Broken[k] += n
		}
		sum.First = append(sum.First, t.First...)
	}
	return sum
}

// tallies reads the counts of running loads.
func tallies(running []*netns.Traffic) netns.Tally {
	var list []netns.Tally
	for _, t := range running {
		list = append(list, t.Tally())
	}
	return total(list)
}

// since gives what was answered between two counts.
func since(before, after netns.Tally) map[string]int {
	answers := map[string]int{}
	for name, n := range after.ByServer {
		if d := n - before.ByServer[name]; d > 0 {
			answers[name] = d
		}
	}
	return answers
}

// A pace is what the machine can carry.
type pace struct {
	// rate is how many new connections a second each of two clients makes, long how many it keeps.
	rate, long int
	// quiet is how long an endpoint must get no new connection to count as out of use. With 100 connections in this time
	// the chance that one of two nodes still sends to it and this is not seen is less than one in a million.
	quiet time.Duration
	// patience is how long the story waits for something that is due at once.
	patience time.Duration
}

func paceHere() pace {
	if os.Getenv(guestEnv) != "" { // an emulated machine is 10 to 30 times slower
		return pace{rate: 10, long: 5, quiet: 5 * time.Second, patience: 3 * time.Minute}
	}
	return pace{rate: 100, long: 25, quiet: 500 * time.Millisecond, patience: 15 * time.Second}
}

func (s *story) scale(ctx context.Context) error {
	s.out.section("An endpoint is scaled away while traffic runs")
	s.out.say(fmt.Sprintf("%d new connections a second and %d long ones with a heartbeat, from pod c1 and from client far.",
		2*s.pace.rate, 2*s.pace.long))
	running := s.startTraffic() //nolint:contextcheck // a load ends when it is stopped
	defer stopAll(running)
	if !wait(ctx, 2*time.Second) {
		return errInterrupted
	}
	before := tallies(running)
	s.out.bars("with three endpoints", []string{"s1", "s2", "s3"}, before.ByServer, before.Failures())
	changed := time.Now()
	if err := removeEndpoint(filepath.Join(s.tool.dir, manifests, endpointsFile), "s3"); err != nil {
		return err
	}
	s.out.say("", "Pod s3 leaves "+endpointsFile+" now ...")
	effect, err := s.untilQuiet(ctx, running, "s3", changed)
	if err != nil {
		return err
	}
	middle := tallies(running)
	if !wait(ctx, 2*time.Second) {
		return errInterrupted
	}
	after := stopAll(running)
	s.out.bars("with two endpoints", []string{"s1", "s2", "s3"}, since(middle, after), after.Failures()-middle.Failures())
	s.out.promise(since(middle, after)["s3"] == 0,
		fmt.Sprintf("s3 got its last new connection %v after the file changed", effect.Round(time.Millisecond)))
	s.judge(after)
	return nil
}

// judge says whether a load met no failure at all.
func (s *story) judge(t netns.Tally) {
	s.out.promise(t.Failures() == 0, fmt.Sprintf(
		"%d new connections and %d heartbeats: %d refused, reset, lost or misdirected", t.Opened, t.Pings, t.Failures()))
	if t.Failures() > 0 {
		s.out.say(t.String())
	}
}

// untilQuiet waits until a server gets no new connection any more, and tells when the last one came.
func (s *story) untilQuiet(
	ctx context.Context, running []*netns.Traffic, server string, start time.Time,
) (time.Duration, error) {
	last, at := -1, start
	for {
		now := time.Now()
		if n := tallies(running).ByServer[server]; n != last {
			last, at = n, now
		}
		if now.Sub(at) > s.pace.quiet {
			return at.Sub(start), nil
		}
		if now.Sub(start) > s.pace.patience {
			return 0, fmt.Errorf("%s still gets new connections %v after it was removed; the daemon's last words: %s",
				server, s.pace.patience, s.nodes["na"].lastWords())
		}
		if !wait(ctx, 2*time.Millisecond) {
			return 0, errInterrupted
		}
	}
}

func (s *story) kill(ctx context.Context) error {
	s.out.section("The daemon of node na is killed (kill -9), and comes back")
	s.out.say("Rules stay in the kernel. The new daemon finds them, takes them over, and disturbs nobody.")
	running := s.startTraffic() //nolint:contextcheck // a load ends when it is stopped
	defer stopAll(running)
	if !wait(ctx, time.Second) {
		return errInterrupted
	}
	d := s.nodes["na"]
	if err := d.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill the daemon of node na: %w", err)
	}
	<-d.ended
	if !wait(ctx, time.Second) {
		return errInterrupted
	}
	if err := s.startDaemon(ctx, "na"); err != nil {
		return err
	}
	if err := s.awaitList(ctx); err != nil {
		return err
	}
	if !wait(ctx, time.Second) {
		return errInterrupted
	}
	after := stopAll(running)
	s.out.bars("before, during and after", []string{"s1", "s2"}, after.ByServer, after.Failures())
	s.judge(after)
	return nil
}

// awaitList waits until the new daemon of na answers, and says that the kernel holds what it wants.
func (s *story) awaitList(ctx context.Context) error {
	deadline := time.Now().Add(s.pace.patience)
	for {
		out, err := s.tool.run(ctx, "ls", "shop/web", "--socket", s.nodes["na"].socket, "-o", "table")
		if err == nil && strings.Contains(out, "shop/web") && !strings.Contains(out, "missing") {
			return nil
		}
		if err := s.alive(); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the new daemon of node na is not ready within %v: %w; its list: %q", s.pace.patience, err, out)
		}
		if !wait(ctx, 50*time.Millisecond) {
			return errInterrupted
		}
	}
}

// stopAll ends loads, once, and gives their final count.
func stopAll(running []*netns.Traffic) netns.Tally {
	list := make([]netns.Tally, 0, len(running))
	for _, t := range running {
		list = append(list, t.Stop())
	}
	return total(list)
}
