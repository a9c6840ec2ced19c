package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/control"
	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/test/netns"
)

// patience is how long a test waits for what must come to pass; the machine may be busy, and an emulated one is slow.
var patience = map[bool]time.Duration{false: 45 * time.Second, true: 4 * time.Minute}[os.Getenv(ipvsEnv) == "1"]

// attempt is how long a connection of a load may take, 0 for the usual time: an emulated machine stands still at times.
var attempt = map[bool]time.Duration{true: 20 * time.Second}[os.Getenv(ipvsEnv) == "1"]

// A site is a cluster of namespaces with the program on its nodes.
type site struct {
	t   *testing.T
	lab *netns.Lab
	// manifests is the directory that all daemons read.
	manifests string
}

// newSite makes a cluster without daemons and without objects but the two nodes.
func newSite(t *testing.T, topology netns.Topology) *site {
	t.Helper()
	needRoot(t)
	s := &site{t: t, lab: netns.Start(t, topology), manifests: t.TempDir()}
	s.write("nodes.yaml", nodeObject(s.lab.Host("na")), nodeObject(s.lab.Host("nb")))
	return s
}

// pod adds a pod to a node.
func (s *site) pod(node, name string, number int) *netns.Host {
	s.t.Helper()
	h, err := s.lab.AddPod(s.lab.Host(node), name, number)
	if err != nil {
		s.t.Fatal(err)
	}
	return h
}

// A node is a machine of the site with the program on it.
type node struct {
	t    *testing.T
	host *netns.Host
	// args start the daemon.
	args   []string
	socket string
	daemon *netns.Cmd
	// log is what all daemons of the node have said, one after the other.
	log *transcript
	env []string
	// wrap is a command that starts the daemon in some environment.
	wrap []string
}

// A transcript takes a process's output while others read it.
type transcript struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *transcript) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *transcript) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// count tells how many lines have a text.
func (l *transcript) count(text string) int {
	n := 0
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// node prepares the daemon of a node; it is not started. The flags come after those that every node has.
func (s *site) node(name string, flags ...string) *node {
	s.t.Helper()
	n := &node{t: s.t, host: s.lab.Host(name), socket: filepath.Join(s.t.TempDir(), "s"), log: &transcript{}}
	n.args = slices.Concat([]string{
		"proxy", "--socket", n.socket, "--manifests", s.manifests, "--hostname-override", name,
		"--cluster-cidr", clusterCIDR(),
	}, flags)
	s.t.Cleanup(func() {
		for _, never := range []string{"DATA RACE", "panic", "goroutine "} {
			if n.log.count(never) > 0 {
				s.t.Errorf("the daemon on %s said %q", name, never)
			}
		}
		if s.t.Failed() {
			s.t.Logf("the daemon's log on %s:\n%s", name, n.log)
		}
	})
	return n
}

func clusterCIDR() string {
	var texts []string
	for _, p := range netns.ClusterCIDRs() {
		texts = append(texts, p.String())
	}
	return strings.Join(texts, ",")
}

func flavourFlag(flavour string) string { return "--iptables-flavour=" + flavour }

// command prepares a program on the node.
func (n *node) command(name string, args ...string) *netns.Cmd {
	cmd := n.host.Command(context.Background(), name, args...)
	cmd.Env = append(cmd.Env, n.env...)
	return cmd
}

// start starts the daemon. It is not ready yet.
func (n *node) start() {
	n.t.Helper()
	argv := slices.Concat(n.wrap, []string{os.Getenv(binaryEnv)}, n.args)
	n.daemon = n.command(argv[0], argv[1:]...)
	n.daemon.Stderr = n.log
	if err := n.daemon.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() { _ = n.daemon.Wait() }() // how it ended is asked for in ended
}

// end sends a signal to the daemon, and gives its status when it has ended: -1 if the signal killed it.
func (n *node) end(signal syscall.Signal) int {
	n.t.Helper()
	if err := n.daemon.Process.Signal(signal); err != nil {
		n.t.Fatalf("signal the daemon of %s: %v", n.host.Name, err)
	}
	_ = n.daemon.Wait() // the status says it
	return n.daemon.ProcessState.ExitCode()
}

// ended tells whether the daemon has ended, and how.
func (n *node) ended(within time.Duration) (status int, ok bool) {
	done := make(chan struct{})
	go func() {
		_ = n.daemon.Wait() // the status says it
		close(done)
	}()
	select {
	case <-done:
		return n.daemon.ProcessState.ExitCode(), true
	case <-time.After(within):
		return 0, false
	}
}

// alive fails the test if the daemon has ended.
func (n *node) alive() error {
	if err := n.daemon.Process.Signal(syscall.Signal(0)); err != nil {
		return stop(fmt.Errorf("the daemon of %s has ended: %w", n.host.Name, err))
	}
	return nil
}

// A result is how a command ended.
type result struct {
	stdout, stderr string
	status         int
}

// turnout runs a command of the program on the node.
func (n *node) turnout(args ...string) result {
	n.t.Helper()
	return n.run(n.command(os.Getenv(binaryEnv), args...))
}

// ask runs a command that has the flag --socket.
func (n *node) ask(args ...string) result {
	n.t.Helper()
	return n.turnout(append(args, "--socket", n.socket)...)
}

func (n *node) run(cmd *netns.Cmd) result {
	n.t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		n.t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// tool runs a program of the system on the node; it must succeed.
func (n *node) tool(name string, args ...string) string {
	n.t.Helper()
	got := n.run(n.command(name, args...))
	if got.status != 0 {
		n.t.Fatalf("%s %s on %s: status %d: %s%s", name, strings.Join(args, " "), n.host.Name, got.status, got.stdout, got.stderr)
	}
	return got.stdout
}

// rules gives the rules and chains of a table, without counters and comments.
func (n *node) rules(family, flavour, table string) []string {
	n.t.Helper()
	return ruleLines(n.tool(family+"-"+flavour+"-save", "-t", table))
}

func ruleLines(save string) []string {
	var out []string
	for line := range strings.Lines(save) {
		line = strings.TrimSpace(line)
		if chain, isChain := strings.CutPrefix(line, ":"); isChain {
			name, rest, _ := strings.Cut(chain, " ")
			policy, _, _ := strings.Cut(rest, " ")
			line = ":" + name + " " + policy
		}
		if line != "" && !strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return out
}

// listing asks the daemon over its socket what it forwards.
func (n *node) listing() (answer.Listing, error) {
	return control.NewClient(n.socket).Listing(context.Background())
}

// inForce tells whether the daemon knows all objects and the kernel holds what it wants of them.
func (n *node) inForce() error {
	if err := n.alive(); err != nil {
		return err
	}
	l, err := n.listing()
	if err != nil {
		return err
	}
	return drifts(&l)
}

func drifts(l *answer.Listing) error {
	if len(l.Notes) > 0 {
		return errors.New(strings.Join(l.Notes, " "))
	}
	for _, f := range l.Families {
		if f.Error != "" || f.Pending > 0 {
			return fmt.Errorf("%s: %d steps pending, error %q", f.Family, f.Pending, f.Error)
		}
	}
	for i := range l.Rows {
		if r := &l.Rows[i]; r.Drift != answer.DriftNone {
			return fmt.Errorf("%s %s: drift %s %s", r.Service, r.Frontend, r.Drift, r.Detail)
		}
	}
	return nil
}

// ready waits until the daemon has put everything in force.
func (n *node) ready() {
	n.t.Helper()
	eventually(n.t, "rules in force on "+n.host.Name, n.inForce)
}

// get asks one of the daemon's own HTTP servers.
func (n *node) get(url string) (status int, body string, err error) {
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = n.host.Do(func() error {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
	c := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: patience}
	resp, err := c.Get(url)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }() // it was only read
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// metric gives the value of a series, written as it is exposed, labels included.
func (n *node) metric(series string) string {
	n.t.Helper()
	_, body, err := n.get("http://127.0.0.1:10249/metrics")
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(body) {
		if value, found := strings.CutPrefix(line, series+" "); found {
			return strings.TrimSpace(value)
		}
	}
	return "absent"
}

// A stopper is an error that no waiting will cure.
type stopper struct{ error }

func stop(err error) error { return stopper{err} }

// eventually asks until there is no error any more, and tells how long that took.
func eventually(t testing.TB, what string, ask func() error) time.Duration {
	t.Helper()
	start := time.Now()
	took, err := within(patience, ask)
	if err != nil {
		t.Fatalf("%s, after %v: %v", what, time.Since(start).Round(time.Millisecond), err)
	}
	return took
}

// within asks until there is no error any more or the time is over.
func within(limit time.Duration, ask func() error) (time.Duration, error) {
	start := time.Now()
	for {
		asked := time.Now()
		err := ask()
		took := time.Since(start)
		var final stopper
		switch {
		case err == nil:
			return took, nil
		case errors.As(err, &final), took > limit:
			return took, err
		}
		// What asks must not keep what is asked from its work, where both are slow.
		time.Sleep(max(20*time.Millisecond, min(time.Since(asked), time.Second)))
	}
}
