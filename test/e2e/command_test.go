package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/test/netns"
)

// The statuses that the help texts promise.
const (
	statusOK, statusFailed, statusUsage = 0, 1, 2
	statusRefused, statusPass           = 3, 4
)

func TestCommandsAnswerWithAndWithoutADaemon(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s, n := one(t, flavourFlag(flavour))
			s.write("empty.yaml", service("empty", tcpPort(80, 0), "10.96.4.1"))
			before := append(n.rules("iptables", flavour, "nat"), n.rules("ip6tables", flavour, "nat")...)
			n.start()
			n.ready()
			offline := []string{"--manifests", s.manifests, "--node", "na", "--cluster-cidr", clusterCIDR()}
			for source, flags := range map[string][]string{
				answer.FromDaemon: {"--socket", n.socket}, answer.FromKernel: {"--socket", "/nowhere", flavourFlag(flavour)},
				answer.FromManifests: offline,
			} {
				t.Run("ls from "+source, func(t *testing.T) { checkListing(t, n, source, flags) })
				t.Run("trace from "+source, func(t *testing.T) { checkTrace(t, n, source, flags) })
			}
			t.Run("cleanup is refused while the daemon runs", func(t *testing.T) {
				want := fmt.Sprintf("a daemon runs here as process %d", n.daemon.Process.Pid)
				if got := n.ask("cleanup"); got.status != statusFailed || !strings.Contains(got.stderr, want) {
					t.Errorf("got %+v, want %q", got, want)
				}
				if err := n.inForce(); err != nil {
					t.Errorf("after the refusal: %v", err)
				}
			})
			t.Run("another user is told what to do", func(t *testing.T) { checkOtherUser(t, n, offline) })
			n.end(syscall.SIGKILL)
			t.Run("a dead daemon's socket is no daemon", func(t *testing.T) { checkStaleSocket(t, n, flavour) })
			t.Run("cleanup removes everything once", func(t *testing.T) {
				got := n.ask("cleanup")
				if got.status != statusOK || strings.Count(got.stdout, "("+flavour+"): removed ") != 2 {
					t.Errorf("the first time: %+v", got)
				}
				if got := n.ask("cleanup"); got != (result{stdout: "Nothing to remove.\n"}) {
					t.Errorf("the second time: %+v", got)
				}
				after := append(n.rules("iptables", flavour, "nat"), n.rules("ip6tables", flavour, "nat")...)
				if diff := cmp.Diff(before, after); diff != "" {
					t.Errorf("table nat before the first start and after cleanup (-before +after):\n%s", diff)
				}
				for _, family := range []string{"iptables", "ip6tables"} {
					for _, table := range []string{"filter", "mangle"} {
						if text := strings.Join(n.rules(family, flavour, table), "\n"); strings.Contains(text, "KUBE-") {
							t.Errorf("%s table %s after cleanup:\n%s", family, table, text)
						}
					}
				}
				if r := s.lab.Host("c1").TCP(webIP4 + ":80"); r.Kind != netns.Unreachable {
					t.Errorf("after cleanup web still says: %v", r)
				}
			})
		})
	}
}

// checkListing asks ls in all its forms.
func checkListing(t *testing.T, n *node, source string, flags []string) {
	t.Helper()
	var fromJSON, fromYAML answer.Listing
	got := n.turnout(append([]string{"ls", "-o", "json"}, flags...)...)
	if err := json.Unmarshal([]byte(got.stdout), &fromJSON); err != nil || got.status != statusOK {
		t.Fatalf("ls -o json: %v: %+v", err, got)
	}
	if fromJSON.Source != source {
		t.Errorf("ls asked %s, want %s", fromJSON.Source, source)
	}
	// Two families, and for each a cluster IP, a load balancer's address and a node port; and the empty Service.
	frontends := map[string]bool{}
	for i := range fromJSON.Rows {
		r := &fromJSON.Rows[i]
		frontends[r.Service+" "+r.Frontend+"/"+r.Proto+" "+r.Family] = true
		drift := ""
		if source == answer.FromDaemon {
			drift = answer.DriftNone
		}
		if r.Drift != drift {
			t.Errorf("%s: drift %q, want %q", r.Frontend, r.Drift, drift)
		}
	}
	want := map[string]bool{}
	for _, f := range []string{
		webIP4 + ":80/tcp IPv4", "[" + webIP6 + "]:80/tcp IPv6", webLB4 + ":80/tcp IPv4",
		"[" + webLB6 + "]:80/tcp IPv6", "*:30080/tcp IPv4", "*:30080/tcp IPv6",
	} {
		want["shop/web:http "+f] = true
	}
	want["shop/empty:http 10.96.4.1:80/tcp IPv4"] = true
	if diff := cmp.Diff(want, frontends); diff != "" {
		t.Errorf("frontends from %s (-want +got):\n%s", source, diff)
	}
	got = n.turnout(append([]string{"ls", "-o", "yaml"}, flags...)...)
	if err := yaml.Unmarshal([]byte(got.stdout), &fromYAML); err != nil || got.status != statusOK {
		t.Fatalf("ls -o yaml: %v: %+v", err, got)
	}
	if diff := cmp.Diff(fromJSON.Rows, fromYAML.Rows); diff != "" {
		t.Errorf("rows of ls (-json +yaml):\n%s", diff)
	}
	for output, column := range map[string]string{"table": "DRIFT", "wide": "AFFINITY"} {
		got := n.turnout(append([]string{"ls", "shop/web", "-o", output}, flags...)...)
		lines := strings.Split(strings.TrimSpace(got.stdout), "\n")
		if got.status != statusOK || len(lines) != 7 || !strings.Contains(lines[0], column) {
			t.Errorf("ls shop/web -o %s: %+v", output, got)
		}
	}
	if got := n.turnout(append([]string{"ls", "-o", "xml"}, flags...)...); got.status != statusUsage {
		t.Errorf("ls -o xml: %+v", got)
	}
}

// checkTrace asks for packets with every verdict.
func checkTrace(t *testing.T, n *node, source string, flags []string) {
	t.Helper()
	for dst, want := range map[string]int{
		webIP4 + ":80": statusOK, "[" + webIP6 + "]:80/tcp": statusOK, "10.96.4.1:80": statusRefused,
		webIP4 + ":81": statusPass, webIP4 + ":80/udp": statusPass, webIP4: statusUsage,
	} {
		src := "10.60.1.21"
		if strings.HasPrefix(dst, "[") {
			src = "fd60:1::21"
		}
		got := n.turnout(append([]string{"trace", src, dst, "-o", "json"}, flags...)...)
		if got.status != want {
			t.Errorf("trace %s from %s: status %d, want %d\n%s%s", dst, source, got.status, want, got.stdout, got.stderr)
		}
		if want == statusUsage {
			continue
		}
		var tr answer.Trace
		if err := json.Unmarshal([]byte(got.stdout), &tr); err != nil {
			t.Fatalf("trace -o json: %v: %s", err, got.stdout)
		}
		if tr.Source != source || tr.Disagreement != "" || want == statusOK && len(tr.Choices) != 2 {
			t.Errorf("trace %s from %s: %+v", dst, source, tr)
		}
		if text := n.turnout(append([]string{"trace", src, dst}, flags...)...); !strings.Contains(text.stdout, tr.Verdict) {
			t.Errorf("trace %s from %s as text lacks the verdict %q:\n%s", dst, source, tr.Verdict, text.stdout)
		}
	}
}

// checkOtherUser runs commands as a user who may do nothing.
func checkOtherUser(t *testing.T, n *node, offline []string) {
	t.Helper()
	// Whoever may not look into the socket's directory may neither see the socket.
	nobody := func(args ...string) result {
		cmd := n.command(os.Getenv(binaryEnv), args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		return n.run(cmd)
	}
	for _, args := range [][]string{
		{"ls", "--socket", n.socket},
		{"ls", "--socket", "/nowhere"},
		{"trace", "10.60.1.21", webIP4 + ":80", "--socket", "/nowhere"},
		{"cleanup", "--socket", "/nowhere"},
	} {
		got := nobody(args...)
		if got.status != statusFailed || !strings.Contains(got.stderr, "root") || strings.Count(got.stderr, "\n") != 1 {
			t.Errorf("turnout %v as nobody: %+v", args, got)
		}
	}
	copied := t.TempDir()
	if err := os.CopyFS(filepath.Join(copied, "m"), os.DirFS(offline[1])); err != nil {
		t.Fatal(err)
	}
	for dir := copied; dir != filepath.Dir(os.TempDir()) && dir != os.TempDir(); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	args := append([]string{"ls", "--manifests", filepath.Join(copied, "m")}, offline[2:]...)
	if got := nobody(args...); got.status != statusOK || !strings.Contains(got.stdout, webIP4) {
		t.Errorf("turnout %v as nobody: %+v", args, got)
	}
}

// checkStaleSocket looks at what a killed daemon leaves.
func checkStaleSocket(t *testing.T, n *node, flavour string) {
	t.Helper()
	if _, err := os.Lstat(n.socket); err != nil {
		t.Fatalf("the killed daemon has left no socket: %v", err)
	}
	got := n.ask("ls", "-o", "json", flavourFlag(flavour))
	var l answer.Listing
	if err := json.Unmarshal([]byte(got.stdout), &l); err != nil || l.Source != answer.FromKernel || len(l.Rows) != 7 {
		t.Errorf("ls on the socket of a dead daemon: %v: %+v", err, got)
	}
	n.start()
	n.ready()
	if l, err := n.listing(); err != nil || l.Source != answer.FromDaemon {
		t.Errorf("the new daemon on the old socket says %+v, %v", l, err)
	}
	if status := n.end(syscall.SIGTERM); status != statusOK {
		t.Errorf("status %d", status)
	}
	if _, err := os.Lstat(n.socket); err == nil {
		t.Error("the socket is still there after the daemon has ended well")
	}
}
