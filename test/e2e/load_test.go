package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// A load is steady traffic to the Service web, in every way that it can be reached.
type load struct {
	t       *testing.T
	started time.Time
	names   []string
	parts   []*netns.Traffic
	long    int
	done    bool
}

// A route is one way to a Service, with its share of the traffic.
type route struct {
	from, to   string
	rate, long int
}

// webRoutes are at least 200 new connections a second and 50 long ones, over every kind of address and both families.
func webRoutes(lab *netns.Lab) []route {
	onNode := func(node string) string {
		return netip.AddrPortFrom(lab.Host(node).Addr4(), webNodePort).String()
	}
	return []route{
		{"c1", webIP4 + ":80", 70, 12},
		{"c2", "[" + webIP6 + "]:80", 40, 10},
		{"out", onNode("na"), 40, 10},
		{"out", onNode("nb"), 40, 8},
		{"far", webLB4 + ":80", 70, 12},
	}
}

// load starts traffic that these servers may answer, and waits until every long connection stands.
func (s *site) load(routes []route, servers ...string) *load {
	s.t.Helper()
	l := &load{t: s.t, started: time.Now()}
	for _, r := range routes {
		l.names = append(l.names, r.from+" -> "+r.to)
		l.long += r.long
		l.parts = append(l.parts, s.lab.Host(r.from).Load(netns.Load{
			To: netip.MustParseAddrPort(r.to), Proto: model.TCP, Rate: r.rate, Long: r.long, Expect: servers, Timeout: attempt,
		}))
	}
	s.t.Cleanup(func() {
		for _, p := range l.parts {
			p.Stop()
		}
	})
	eventually(s.t, "all long connections stand", func() error {
		pings := 0
		for _, p := range l.parts {
			pings += p.Tally().Pings
		}
		if pings < 2*l.long {
			return fmt.Errorf("%d heartbeats", pings)
		}
		return nil
	})
	return l
}

// expect changes which servers may answer.
func (l *load) expect(servers ...string) {
	for _, p := range l.parts {
		p.Expect(servers...)
	}
}

// opened counts the new connections on every route.
func (l *load) opened() []int {
	counts := make([]int, len(l.parts))
	for i, p := range l.parts {
		counts[i] = p.Tally().Opened
	}
	return counts
}

// flow waits until so many more connections were made on every route.
func (l *load) flow(n int) {
	l.t.Helper()
	before := l.opened()
	eventually(l.t, fmt.Sprintf("%d more connections on every route", n), func() error {
		for i, now := range l.opened() {
			if now < before[i]+n {
				return fmt.Errorf("%s: %d", l.names[i], now-before[i])
			}
		}
		return nil
	})
}

// byServer counts the answers of a server.
func (l *load) byServer(server string) int {
	n := 0
	for _, p := range l.parts {
		n += p.Tally().ByServer[server]
	}
	return n
}

// quiet is how long a server must have no new connection to count as left alone. What was on its way to it when the rules
// changed has come to an end by then.
const quiet = 500 * time.Millisecond

// untilQuiet waits until a server gets no new connection any more, and tells how long after the start the last one was.
func (l *load) untilQuiet(server string, start time.Time) time.Duration {
	l.t.Helper()
	last, at := l.byServer(server), time.Now()
	eventually(l.t, server+" is left alone", func() error {
		if n := l.byServer(server); n != last {
			last, at = n, time.Now()
		}
		if since := time.Since(at); since < quiet {
			return fmt.Errorf("the last connection came %v ago", since)
		}
		return nil
	})
	return at.Sub(start)
}

// stop ends the traffic, prints its figures and fails the test for every failure.
func (l *load) stop() {
	l.t.Helper()
	if l.done {
		return
	}
	l.done = true
	var opened, ok, pings, failed, late int
	var slowest time.Duration
	took := time.Since(l.started)
	// All at once, or the last part would have more time than the rest.
	var stopping sync.WaitGroup
	for _, p := range l.parts {
		stopping.Go(func() { p.Stop() })
	}
	stopping.Wait()
	for i, p := range l.parts {
		tally := p.Tally()
		opened, ok, pings = opened+tally.Opened, ok+tally.OK, pings+tally.Pings
		failed, late = failed+tally.Failures(), late+tally.Late
		slowest = max(slowest, tally.Slowest)
		if tally.Failures() > 0 {
			l.t.Errorf("%s: %s", l.names[i], tally)
		}
		if tally.Opened == 0 {
			l.t.Errorf("%s: no connection at all", l.names[i])
		}
	}
	l.t.Logf("load: %d new connections in %.1f s (%.0f a second, %d left out as the machine was busy), %d ok, slowest %v; "+
		"%d long connections, %d heartbeats; %d failures", opened, took.Seconds(), float64(opened)/took.Seconds(), late, ok,
		slowest.Round(time.Millisecond), l.long, pings, failed)
}

// pool waits until the daemon has these pods, and no others, in force for the Service web.
func (n *node) pool(pods ...*netns.Host) time.Duration {
	n.t.Helper()
	var want4, want6 []string
	for _, p := range pods {
		want4 = append(want4, netip.AddrPortFrom(p.Addr4(), webPort).String())
		want6 = append(want6, netip.AddrPortFrom(p.Addr6(), webPort).String())
	}
	slices.Sort(want4)
	slices.Sort(want6)
	return eventually(n.t, "the endpoints of web on "+n.host.Name, func() error {
		if err := n.alive(); err != nil {
			return err
		}
		l, err := n.listing()
		if err != nil {
			return err
		}
		seen := map[string]bool{}
		for i := range l.Rows {
			r := &l.Rows[i]
			if !strings.HasPrefix(r.Service, namespace+"/web:") {
				continue
			}
			seen[r.Family] = true
			want := want4
			if r.Family == model.IPv6.String() {
				want = want6
			}
			if got := addrs(r); r.Drift != answer.DriftNone || !slices.Equal(got, want) {
				return fmt.Errorf("%s: endpoints %v, want %v; drift %q; families %+v", r.Frontend, got, want, r.Drift, l.Families)
			}
		}
		if len(seen) != 2 {
			return fmt.Errorf("rows of web for the families %v, of %d rows", seen, len(l.Rows))
		}
		return nil
	})
}

func addrs(r *answer.Row) []string {
	var list []string
	for _, e := range r.Endpoints {
		list = append(list, e.Addr)
	}
	slices.Sort(list)
	return list
}
