package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// kills is how often the daemon dies in the middle of its work.
const kills = 20

func TestADaemonThatIsKilledInTheMiddleOfAChangeHarmsNobody(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s := newCatalogueSite(t)
			x1 := s.pod("na", "x1", 12)
			serve(t, x1, model.TCP, webPort)
			s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
			// Enough of it that a change has many steps: the Services come and go as a whole, only web stays.
			services, parts := catalogue(s, 100, 300)
			much := catalogueText(t, services[1:], parts[2:])
			s.writeWeb(s1, s2)
			n := s.node("na", flavourFlag(flavour))
			n.start()
			n.pool(s1, s2)
			l := s.load(naRoutes(s.lab), "s1", "s2", "x1")
			seed := uint64(time.Now().UnixNano())
			random := rand.New(rand.NewPCG(seed, 0))
			for i := range kills {
				if i%2 == 0 {
					s.writeWeb(s1, s2, x1)
					s.writeText("catalogue.yaml", much)
				} else {
					s.writeWeb(s1, s2)
					s.remove("catalogue.yaml")
				}
				// Any moment is as good as another; the change takes some 30 to 200 ms.
				time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
				n.end(syscall.SIGKILL)
				n.start()
			}
			n.pool(s1, s2)
			n.ready()
			l.stop()
			if t.Failed() {
				t.Logf("seed %d", seed)
			}
			s.works(t)
			if rules := strings.Join(n.rules("iptables", flavour, "nat"), "\n"); strings.Contains(rules, "small-") {
				t.Errorf("rules of Services that are gone are left:\n%s", rules)
			}
		})
	}
}

// flaky is a tool that fails now and then in the ways that tools fail: somebody holds the lock, it is killed before it has
// done anything, or when it has done everything.
const flaky = `#!/bin/sh
real=%s
case "$*" in *--version*) exec $real "$@" ;; esac
case $(( $(od -An -N1 -tu1 /dev/urandom) %% 30 )) in
0) echo "Another app is currently holding the xtables lock. Stopped waiting after 5s." >&2; exit 4 ;;
1) kill -9 $$ ;;
2) $real "$@"; kill -9 $$ ;;
esac
exec $real "$@"
`

func TestToolsThatFailNowAndThenHarmNobody(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s := newCatalogueSite(t)
			x1 := s.pod("na", "x1", 12)
			serve(t, x1, model.TCP, webPort)
			s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
			dir := t.TempDir()
			for _, family := range families() {
				for _, end := range []string{"-save", "-restore"} {
					name := family + "-" + flavour + end
					program, err := exec.LookPath(name)
					if err == nil {
						err = os.WriteFile(filepath.Join(dir, name), fmt.Appendf(nil, flaky, program), 0o755)
					}
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			s.writeWeb(s1, s2)
			n := s.node("na", flavourFlag(flavour))
			n.start()
			n.pool(s1, s2)
			l := s.load(naRoutes(s.lab), "s1", "s2", "x1")
			n.end(syscall.SIGTERM)
			n.env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
			n.start()
			services, parts := catalogue(s, 20, 0)
			var slowest time.Duration
			for i := range 10 {
				start := time.Now()
				pods := []*netns.Host{s1, s2, x1}
				if i%2 == 0 {
					s.writeCatalogue(services[1:], parts[2:])
				} else {
					pods = pods[:2]
					s.remove("catalogue.yaml")
				}
				s.writeWeb(pods...)
				n.pool(pods...)
				slowest = max(slowest, time.Since(start))
			}
			l.stop()
			t.Logf("10 changes with tools that fail once in 10 runs: the slowest in force after %v", slowest.Round(time.Millisecond))
			n.end(syscall.SIGTERM)
			n.env = nil
			n.start()
			n.ready()
			s.works(t)
		})
	}
}

func TestANodeWithoutIPv6ServesIPv4(t *testing.T) {
	needRoot(t)
	t.Parallel()
	s, n := one(t)
	if err := n.host.Sysctl("net.ipv6.conf.all.disable_ipv6", "1"); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.ready()
	for _, c := range []struct{ from, to string }{{"c1", webIP4 + ":80"}, {"out", "10.20.0.11:30080"}, {"far", webLB4 + ":80"}} {
		if r := s.lab.Host(c.from).TCP(c.to); r.Kind != netns.OK {
			t.Errorf("%s -> %s: %v", c.from, c.to, r)
		}
	}
	if got := n.log.count("Services of this IP family are not served"); got != 1 {
		t.Errorf("the log says %d times that IPv6 is not served, want once", got)
	}
}
