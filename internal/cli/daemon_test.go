package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/control"
	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/test/netns"
)

// patience is how long a test waits for what must come to pass.
const patience = 20 * time.Second

// A node is a machine of a lab on which the command is run.
type node struct {
	t      *testing.T
	host   *netns.Host
	socket string
	log    *lockedBuffer
	daemon *netns.Cmd
}

// A lockedBuffer takes a process's output while others read it.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newNode(t *testing.T) *node {
	t.Helper()
	lab := netns.Start(t, netns.Topology{Nodes: 1})
	return &node{t: t, host: lab.Host("na"), socket: filepath.Join(t.TempDir(), "t.sock"), log: &lockedBuffer{}}
}

func (n *node) command(args ...string) *netns.Cmd {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := n.host.Command(n.t.Context(), self, args...)
	cmd.Args[0] = "turnout"
	cmd.Env = append(cmd.Env, asTurnout+"=1")
	return cmd
}

// turnout runs a command that asks the node's socket.
func (n *node) turnout(args ...string) result {
	n.t.Helper()
	cmd := n.command(append(args, "--socket", n.socket)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		n.t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// tool runs a program on the node.
func (n *node) tool(name string, args ...string) string {
	n.t.Helper()
	out, err := n.host.Command(n.t.Context(), name, args...).CombinedOutput()
	if err != nil {
		n.t.Fatalf("%s %s: %v: %s", name, args, err, out)
	}
	return string(out)
}

// start starts the daemon.
func (n *node) start(args ...string) {
	n.t.Helper()
	n.daemon = n.command(append([]string{
		"proxy", "--manifests", "testdata/shop", "--hostname-override", "na",
		"--proxy-mode", "iptables", "--cluster-cidr", "10.60.0.0/16,fd60::/16", "--socket", n.socket,
	}, args...)...)
	n.daemon.Stderr = n.log
	if err := n.daemon.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if n.t.Failed() {
			n.t.Logf("the daemon's log:\n%s", n.log)
		}
	})
}

// stop asks the daemon to end, and gives its status.
func (n *node) stop() int {
	n.t.Helper()
	if err := n.daemon.Process.Signal(syscall.SIGTERM); err != nil {
		n.t.Fatal(err)
	}
	_ = n.daemon.Wait()
	return n.daemon.ProcessState.ExitCode()
}

// listing gives what ls says as a value.
func (n *node) listing() (answer.Listing, error) {
	got := n.turnout("ls", "-o", "json")
	var l answer.Listing
	if got.status != 0 {
		return l, errors.New(strings.TrimSpace(got.stderr))
	}
	return l, json.Unmarshal([]byte(got.stdout), &l)
}

// await asks until the answer is what is wanted.
func (n *node) await(what string, ask func() (string, error), want string) {
	n.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		got, err := ask()
		if err == nil && got == want {
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("%s: got %q, %v; want %q", what, got, err, want)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// drifts gives how many rows have which drift, and where from: "daemon none=8".
func (n *node) drifts() (string, error) {
	l, err := n.listing()
	if err != nil {
		return "", err
	}
	counts := map[string]int{}
	for _, r := range l.Rows {
		counts[r.Drift]++
	}
	return l.Source + " " + strings.Trim(fmt.Sprint(counts), "map[]"), nil
}

// allInPlace is what drifts says when the shop of testdata is in force.
const allInPlace = "daemon none:8"

func TestADaemonServesIsAskedAndLeavesItsRules(t *testing.T) {
	for _, flavour := range []string{"nft", "legacy"} {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			save := "iptables-" + flavour + "-save"
			if _, err := exec.LookPath(save); err != nil {
				t.Skipf("needs %s: install iptables", save)
			}
			foreign := []string{"-t", "nat", "-A", "PREROUTING", "-s", "192.0.2.77/32", "-j", "ACCEPT"}
			n.tool("iptables-"+flavour, foreign...)
			before := rules(n.tool(save, "-t", "nat"))
			n.start("--iptables-flavour", flavour)
			n.await("rules in place", n.drifts, allInPlace)

			t.Run("ls shows what is programmed", func(t *testing.T) {
				got := n.turnout("ls")
				golden(t, "daemon-ls.txt", got.stdout)
			})
			t.Run("trace follows the rules", func(t *testing.T) {
				got := n.turnout("trace", "10.60.1.21", "10.70.0.53:53/udp", "--in", "eth0")
				golden(t, "daemon-trace.txt", got.stdout)
				if got.status != statusOK {
					t.Errorf("status %d", got.status)
				}
				if got := n.turnout("trace", "10.60.1.21", "10.70.0.11:80"); got.status != statusRefused {
					t.Errorf("trace of a Service without endpoints: status %d, %s", got.status, got.stderr)
				}
				if got := n.turnout("trace", "10.60.1.21", "10.70.0.11:81"); got.status != statusPass {
					t.Errorf("trace of no Service: status %d, %s", got.status, got.stderr)
				}
			})
			t.Run("a second daemon does not start", func(t *testing.T) {
				got := n.turnout("proxy", "--manifests", "testdata/shop", "--proxy-mode=iptables")
				want := fmt.Sprintf("turnout: socket %s: another daemon is running\n", n.socket)
				if got.status != statusFailure || !strings.HasSuffix(got.stderr, want) {
					t.Errorf("got %+v, want a line %q", got, want)
				}
			})
			t.Run("cleanup refuses", func(t *testing.T) {
				got := n.turnout("cleanup")
				want := fmt.Sprintf("turnout: a daemon runs here as process %d and would write the rules again; "+
					"stop it first, or give --force\n", n.daemon.Process.Pid)
				if got.status != statusFailure || got.stderr != want {
					t.Errorf("got %+v, want %q", got, want)
				}
			})
			t.Run("what somebody flushes comes back", func(*testing.T) {
				n.tool("iptables-"+flavour, "-t", "nat", "-F", "KUBE-SERVICES")
				n.await("repair", n.drifts, allInPlace)
				n.await("the count of repairs", func() (string, error) {
					l, err := n.listing()
					if err != nil {
						return "", err
					}
					return fmt.Sprint(l.Families[0].Drifts, l.Families[1].Drifts), nil
				}, "1 0")
			})
			t.Run("the forwarding tables can be read", func(t *testing.T) {
				var text bytes.Buffer
				if err := control.NewClient(n.socket).Table(t.Context(), &text); err != nil {
					t.Fatal(err)
				}
				for _, line := range []string{"context IPv4 node=na", "context IPv6 node=na", "port shop/empty/tcp"} {
					if !strings.Contains(text.String(), line) {
						t.Errorf("the tables lack %q:\n%s", line, &text)
					}
				}
			})
			t.Run("a new address of the node is noticed", func(*testing.T) {
				n.await("the node port on it", func() (string, error) {
					return fmt.Sprint(n.turnout("trace", "8.8.8.8", "10.20.0.99:30080", "--in", "eth0").status), nil
				}, fmt.Sprint(statusPass))
				n.tool("ip", "address", "add", "10.20.0.99/32", "dev", "lo")
				n.await("the node port on it", func() (string, error) {
					return fmt.Sprint(n.turnout("trace", "8.8.8.8", "10.20.0.99:30080", "--in", "eth0").status), nil
				}, fmt.Sprint(statusOK))
			})
			t.Run("the servers answer", func(*testing.T) { n.checkServers() })

			if status := n.stop(); status != statusOK {
				t.Errorf("after SIGTERM the daemon's status is %d", status)
			}
			if _, err := os.Lstat(n.socket); err == nil {
				t.Error("the socket is still there")
			}
			n.checkKernelOnly(flavour)
			t.Run("cleanup removes what was ours and nothing else", func(t *testing.T) {
				got := n.turnout("cleanup")
				if got.status != statusOK || strings.Count(got.stdout, "("+flavour+"): removed ") != 2 {
					t.Errorf("got %+v", got)
				}
				if diff := cmp.Diff(before, rules(n.tool(save, "-t", "nat"))); diff != "" {
					t.Errorf("rules before and after (-before +after):\n%s", diff)
				}
				if got := n.turnout("cleanup"); got != (result{stdout: "Nothing to remove.\n"}) {
					t.Errorf("the second time: %+v", got)
				}
				if got := n.turnout("ls"); got != (result{stdout: "No Services.\n"}) {
					t.Errorf("ls: %+v", got)
				}
			})
		})
	}
}

// checkKernelOnly asks without a daemon: what it left is still in force and can be seen.
func (n *node) checkKernelOnly(flavour string) {
	n.t.Run("without the daemon the kernel is read", func(t *testing.T) {
		got := n.turnout("ls", "--iptables-flavour", flavour)
		golden(t, "kernel-ls.txt", got.stdout)
		got = n.turnout("trace", "10.60.1.21", "10.70.0.53:53/udp", "--in", "eth0")
		golden(t, "kernel-trace.txt", got.stdout)
		if got.status != statusOK {
			t.Errorf("status %d", got.status)
		}
		for dst, want := range map[string]int{"10.70.0.11:80": statusRefused, "10.70.0.11:81": statusPass} {
			if got := n.turnout("trace", "10.60.1.21", dst); got.status != want {
				t.Errorf("trace to %s: status %d, want %d\n%s%s", dst, got.status, want, got.stdout, got.stderr)
			}
		}
	})
}

// rules drops what changes from one save to the next.
func rules(save string) []string {
	var out []string
	for line := range strings.Lines(save) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "-A") || strings.HasPrefix(line, ":KUBE") {
			out = append(out, line)
		}
	}
	return out
}

// checkServers asks the health and metrics servers as a kubelet and a scraper do.
func (n *node) checkServers() {
	for url, want := range map[string]string{
		"http://127.0.0.1:10256/healthz":   `"healthy":true`,
		"http://127.0.0.1:10256/livez":     `"healthy":true`,
		"http://127.0.0.1:10249/healthz":   "ok",
		"http://127.0.0.1:10249/proxyMode": "iptables",
		"http://127.0.0.1:10249/metrics":   "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
	} {
		err := n.get(url, want)
		if err != nil {
			n.t.Errorf("%s: %v", url, err)
		}
	}
}

// get asks a server on the node.
func (n *node) get(url, want string) error {
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
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	var body bytes.Buffer
	if _, err := body.ReadFrom(resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || !strings.Contains(body.String(), want) {
		return fmt.Errorf("status %d, body %q lacks %q", resp.StatusCode, body.String(), want)
	}
	return nil
}

func TestWhatKubeProxyLeftIsSeenAndCleanedUp(t *testing.T) {
	payload, err := os.ReadFile(filepath.Join("testdata", "kube-proxy.rules"))
	if err != nil {
		t.Fatal(err)
	}
	for _, flavour := range []string{"nft", "legacy"} {
		t.Run(flavour, func(t *testing.T) {
			n := newNode(t)
			restore := n.host.Command(t.Context(), "iptables-"+flavour+"-restore")
			restore.Stdin = bytes.NewReader(payload)
			if out, err := restore.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			golden(t, "left-ls.txt", n.turnout("ls").stdout)
			got := n.turnout("trace", "10.60.1.21", "10.70.0.10:80", "--in", "eth0")
			golden(t, "left-trace.txt", got.stdout)
			if got.status != statusOK {
				t.Errorf("trace: status %d, %s", got.status, got.stderr)
			}
			if got := n.turnout("cleanup"); got.status != statusOK || got.stderr != "" {
				t.Errorf("cleanup: %+v", got)
			}
			var left []string
			for _, table := range []string{"mangle", "filter", "nat"} {
				for _, line := range rules(n.tool("iptables-"+flavour+"-save", "-t", table)) {
					left = append(left, table+" "+strings.TrimSuffix(line, " - [0:0]"))
				}
			}
			want := []string{
				"mangle :KUBE-IPTABLES-HINT", "mangle :KUBE-KUBELET-CANARY",
				"filter :KUBE-FIREWALL", "filter :KUBE-KUBELET-CANARY", "filter -A INPUT -j KUBE-FIREWALL",
				"filter -A FORWARD -j OTHER", "filter -A OUTPUT -j KUBE-FIREWALL",
				`filter -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet ` +
					`connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`,
				"filter -A OTHER -s 192.0.2.77/32 -j DROP",
				"nat :KUBE-KUBELET-CANARY", "nat -A PREROUTING -j OTHER", "nat -A OTHER -s 192.0.2.77/32 -j ACCEPT",
			}
			if diff := cmp.Diff(want, left); diff != "" {
				t.Errorf("what is left (-want +got):\n%s", diff)
			}
		})
	}
}
