package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// one gives a node whose daemon is not started, with two servers for the Service web.
func one(t *testing.T, flags ...string) (*site, *node) {
	t.Helper()
	s := newSite(t, netns.Topology{Nodes: 2})
	s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
	serve(t, s1, model.TCP, webPort)
	serve(t, s2, model.TCP, webPort)
	s.writeWeb(s1, s2)
	return s, s.node("na", flags...)
}

// works makes sure that the Service web answers on each kind of address, with both IP families.
func (s *site) works(t *testing.T) {
	t.Helper()
	for _, to := range []struct{ from, addr string }{
		{"c1", webIP4 + ":80"},
		{"c1", "[" + webIP6 + "]:80"},
		{"na", webIP4 + ":80"},
		{"out", "10.20.0.11:30080"},
		{"far", webLB4 + ":80"},
		{"far", "[" + webLB6 + "]:80"},
	} {
		if r := s.lab.Host(to.from).TCP(to.addr); r.Kind != netns.OK {
			t.Errorf("%s -> %s: %v", to.from, to.addr, r)
		}
	}
}

func TestRulesStayWhenTheDaemonStops(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s, n := one(t, flavourFlag(flavour))
			n.start()
			n.ready()
			save := func() []string {
				var all []string
				for _, family := range []string{"iptables", "ip6tables"} {
					all = append(all, append(n.rules(family, flavour, "nat"), n.rules(family, flavour, "filter")...)...)
				}
				return all
			}
			want := save()
			for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGKILL} {
				status := n.end(signal)
				if signal != syscall.SIGKILL && status != 0 {
					t.Errorf("after %v: status %d, want 0", signal, status)
				}
				if diff := cmp.Diff(want, save()); diff != "" {
					t.Errorf("rules after %v (-want +got):\n%s", signal, diff)
				}
				s.works(t)
				n.start()
				n.ready()
				if diff := cmp.Diff(want, save()); diff != "" {
					t.Errorf("rules after %v and a new start (-want +got):\n%s", signal, diff)
				}
				if got := n.metric(`turnout_written_objects_total{ip_family="IPv4"}`); got != "0" {
					t.Errorf("after %v and a new start %s objects were written, though all were there", signal, got)
				}
			}
			n.end(syscall.SIGTERM)
		})
	}
}

// heldFor is longer than the iptables tools wait for their lock, which is 5 s.
const heldFor = 8 * time.Second

func TestADaemonStartedWhileOthersHoldTheLockWorksOnceItIsReleased(t *testing.T) {
	needRoot(t)
	t.Parallel()
	needTool(t, "iptables-legacy-restore", "iptables")
	s, n := one(t, flavourFlag("legacy"))
	path := filepath.Join(t.TempDir(), "xtables.lock")
	n.env = []string{"XTABLES_LOCKFILE=" + path}
	lock, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }() // nothing was written
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	n.start()
	released := time.After(heldFor)
	unhealthy := false
	for held := true; held; {
		select {
		case <-released:
			held = false
		case <-time.After(100 * time.Millisecond):
		}
		if status, _, err := n.get("http://127.0.0.1:10256/healthz"); err == nil {
			unhealthy = unhealthy || status == http.StatusServiceUnavailable
			if status == http.StatusOK {
				t.Fatal("the daemon says that it is healthy, without a rule in force")
			}
		}
		if err := n.alive(); err != nil {
			t.Fatal(err)
		}
	}
	if rules := strings.Join(n.rules("iptables", "legacy", "nat"), "\n"); strings.Contains(rules, "KUBE-SVC") {
		t.Fatalf("the lock holds nobody:\n%s", rules)
	}
	start := time.Now()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	n.ready()
	s.works(t)
	took := time.Since(start)
	t.Logf("the lock was held for %v; traffic %v after its release; unhealthy was said meanwhile: %t", heldFor,
		took.Round(time.Millisecond), unhealthy)
	if const10 := 10 * time.Second; took > const10 {
		t.Errorf("traffic %v after the release, want at most %v", took, const10)
	}
	if status, body, err := n.get("http://127.0.0.1:10256/healthz"); err != nil || status != http.StatusOK {
		t.Errorf("healthz: %d %s %v", status, body, err)
	}
}

// mounted makes the daemon start in a mount namespace of its own, after these commands.
func mounted(commands string) []string {
	return []string{"unshare", "--mount", "--propagation", "private", "sh", "-ec", commands + `; exec "$@"`, "sh"}
}

func TestWithoutIptablesTheDaemonSaysSoInOneLineAndEnds(t *testing.T) {
	needRoot(t)
	t.Parallel()
	_, n := one(t)
	n.env = []string{"PATH=/usr/bin:/bin"}
	n.wrap = mounted(`for d in /usr/sbin /sbin /usr/local/sbin; do [ -L $d ] || mount -t tmpfs none $d; done`)
	n.start()
	status, ended := n.ended(patience)
	if !ended || status != 1 {
		t.Fatalf("ended: %t, status %d; want status 1", ended, status)
	}
	last := lastLine(n.log.String())
	if !strings.HasPrefix(last, "turnout: iptables is not available on this host") || !strings.Contains(last, "install iptables") {
		t.Errorf("the last line is %q", last)
	}
	t.Logf("it says: %s", last)
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}

func TestKernelParametersThatCannotBeWrittenStopNobody(t *testing.T) {
	needRoot(t)
	t.Parallel()
	s, n := one(t)
	if err := n.host.Sysctl("net.ipv4.conf.all.route_localnet", "0"); err != nil {
		t.Fatal(err)
	}
	n.wrap = mounted(`mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys`)
	n.start()
	n.ready()
	s.works(t)
	if got := n.log.count("route_localnet"); got != 1 {
		t.Errorf("the log has %d lines about the parameter that could not be written, want 1", got)
	}
	if status := n.end(syscall.SIGTERM); status != 0 {
		t.Errorf("status %d", status)
	}
}
