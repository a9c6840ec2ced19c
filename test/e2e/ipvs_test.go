package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// ipvsEnv, set to 1, makes tests fail that would be skipped as the kernel has no IPVS. Virtual machines set it.
const ipvsEnv = "TURNOUT_REQUIRE_IPVS"

// needIPVS ends a test that needs a kernel with IPVS.
func needIPVS(t *testing.T) {
	t.Helper()
	needRoot(t)
	if _, err := ipvs.Open(t.Context()); err != nil {
		if os.Getenv(ipvsEnv) == "1" {
			t.Fatal(err)
		}
		t.Skipf("runs in a virtual machine, see make test-ipvs: %v", err)
	}
}

// gently gives the routes with what an emulated machine carries: at least 20 new connections a second.
func gently(routes []route) []route {
	out := slices.Clone(routes)
	for i := range out {
		out[i].rate = max(out[i].rate/10, 1)
		out[i].long = max(out[i].long/4, 1)
	}
	return out
}

// ipvsNode prepares a daemon in mode ipvs that must not fall back.
func (s *site) ipvsNode(name string, flags ...string) *node {
	s.t.Helper()
	return s.node(name, append([]string{"--proxy-mode=ipvs", "--strict-proxy-mode"}, flags...)...)
}

// ipvsSite makes a site with the Service web, served by both pods, and a daemon that is not started.
func ipvsSite(t *testing.T) (s *site, s1, s2 *netns.Host, na *node) {
	t.Helper()
	needIPVS(t)
	s = newSite(t, netns.Topology{Nodes: 2})
	s1, s2 = s.lab.Host("s1"), s.lab.Host("s2")
	serve(t, s1, model.TCP, webPort)
	serve(t, s2, model.TCP, webPort)
	s.writeWeb(s1, s2)
	return s, s1, s2, s.ipvsNode("na")
}

// B001, B003, B004: endpoints come and go under load, daemons end and are killed, and no connection takes notice.
func TestIPVSSteadyTrafficSurvivesRestartsKillsAndEndpointChanges(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
	x1, x2 := s.pod("na", "x1", 12), s.pod("nb", "x2", 12)
	for _, p := range []*netns.Host{s1, s2, x1, x2} {
		serve(t, p, model.TCP, webPort)
	}
	s.writeWeb(s1, s2)
	na, nb := s.ipvsNode("na"), s.ipvsNode("nb")
	for _, n := range []*node{na, nb} {
		n.start()
	}
	for _, n := range []*node{na, nb} {
		n.pool(s1, s2)
	}
	l := s.load(gently(webRoutes(s.lab)), "s1", "s2")
	c := churn{s, l, na, nb}
	c.grow("x1 comes", []*netns.Host{s1, s2, x1}, na, nb)
	c.restart(nb, syscall.SIGKILL, func() {
		c.grow("x2 comes while the daemon of nb is dead", []*netns.Host{s1, s2, x1, x2}, na)
	}, s1, s2, x1, x2)
	// The endpoints that were there at first go: they keep the long connections, and get no new ones.
	c.shrink("s1 goes", s1, []*netns.Host{s2, x1, x2}, na, nb)
	c.restart(na, syscall.SIGKILL, nil, s2, x1, x2)
	c.shrink("s2 goes", s2, []*netns.Host{x1, x2}, na, nb)
	c.restart(na, syscall.SIGTERM, nil, x1, x2)
	c.restart(nb, syscall.SIGKILL, nil, x1, x2)
	if n := drainingOf(t, na, "s1", s1); n == 0 {
		t.Error("s1 keeps no connection on na while the long ones live")
	}
	c.grow("s1 comes back", []*netns.Host{s1, x1, x2}, na, nb)
	l.stop()
}

// drainingOf counts the connections that a pod keeps on a node though it gets no new ones.
func drainingOf(t *testing.T, n *node, name string, pod *netns.Host) int {
	t.Helper()
	list, err := n.listing()
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for _, r := range list.Rows {
		for _, e := range r.Draining {
			if strings.HasPrefix(e.Addr, pod.Addr4().String()+":") {
				count += e.Active
			}
		}
	}
	t.Logf("%s keeps %d connections on %s", name, count, n.host.Name)
	return count
}

// B014: an endpoint that drains has a time, also through restarts; then clients that speak get an error.
func TestIPVSDrainingEndsInTime(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1, x1 := s.lab.Host("s1"), s.pod("na", "x1", 12)
	serve(t, s1, model.TCP, webPort)
	serve(t, x1, model.TCP, webPort)
	s.writeWeb(s1)
	const drain = 30 * time.Second
	na := s.ipvsNode("na", "--ipvs-drain="+drain.String())
	na.start()
	na.pool(s1)
	talk := s.load([]route{{"c1", webIP4 + ":80", 0, 3}}, "s1", "x1").parts[0]
	start := time.Now()
	s.writeWeb(x1)
	na.pool(x1)
	for range 2 {
		na.end(syscall.SIGKILL)
		na.start()
		na.pool(x1)
	}
	// With connections that send all the time, a reset is what tells that the time was up.
	eventually(t, "the connections to s1 end", func() error {
		broken := 0
		for b, n := range talk.Tally().Broken {
			if b.Server == "s1" && b.Kind == netns.Reset {
				broken += n
			}
		}
		if broken < 3 {
			return fmt.Errorf("%d of 3 long connections were reset", broken)
		}
		return nil
	})
	tally := talk.Tally()
	if n := drainingOf(t, na, "s1", s1); n > 0 {
		t.Errorf("s1 still has %d connections on na", n)
	}
	for _, f := range tally.First {
		t.Logf("%v after the change: %s", f.At.Sub(start).Round(time.Second), f.What)
		if f.At.Sub(start) < drain {
			t.Errorf("a connection ended %v after the change, before its time of %v", f.At.Sub(start), drain)
		}
	}
}

// B007, B008: clients of UDP leave an endpoint that is gone at once, also those that never pause.
func TestIPVSUDPClientsLeaveAnEndpointThatIsGone(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
	old := serve(t, s1, model.UDP, 5353)
	serve(t, s2, model.UDP, 5353)
	port := udpPort(53, 5353, 0)
	dns := func(pods ...*netns.Host) {
		s.write("dns.yaml", service("dns", port, "10.96.1.53"), slice4("dns", port, pods...))
	}
	dns(s1)
	na := s.ipvsNode("na")
	na.start()
	na.ready()
	traffic := s.lab.Host("c1").Load(netns.Load{
		To: netip.MustParseAddrPort("10.96.1.53:53"), Proto: model.UDP, Rate: 20, Long: 2, Expect: []string{"s1", "s2"}, Timeout: 5 * time.Second,
	})
	eventually(t, "s1 answers", func() error {
		if n := traffic.Tally().ByServer["s1"]; n < 10 {
			return fmt.Errorf("%d answers", n)
		}
		return nil
	})
	dns(s2)
	eventually(t, "s2 alone is in force", func() error {
		list, err := na.listing()
		if err != nil {
			return err
		}
		for i := range list.Rows {
			if r := &list.Rows[i]; r.Service == namespace+"/dns:dns" || strings.HasPrefix(r.Service, namespace+"/dns") {
				if got := addrs(r); len(got) != 1 || !strings.HasPrefix(got[0], s2.Addr4().String()) {
					return fmt.Errorf("endpoints %v", got)
				}
				return drifts(&list)
			}
		}
		return errors.New("no row of dns")
	})
	old.Close()
	before := traffic.Tally()
	eventually(t, "s2 answers", func() error {
		if n := traffic.Tally().ByServer["s2"]; n < 40 {
			return fmt.Errorf("%d answers", n)
		}
		return nil
	})
	after := traffic.Stop()
	t.Logf("before the server ended: %s; at the end: %s", before, after)
	if lost := after.Failures() - before.Failures(); lost > 2 {
		t.Errorf("%d exchanges and flows were lost after the change was in force: %s", lost, after)
	}
}

// A Service that is deleted takes its virtual server, routes and entries along, with connections or without: B005, B006.
func TestIPVSADeletedServiceLeavesNothing(t *testing.T) {
	s, s1, s2, na := ipvsSite(t)
	s.write("other.yaml", service("other", tcpPort(80, 0), "10.96.1.20"))
	na.start()
	na.pool(s1, s2)
	traffic := s.lab.Host("c1").Load(netns.Load{To: netip.MustParseAddrPort(webIP4 + ":80"), Rate: 10, Long: 3})
	for range 3 {
		eventually(t, "traffic", func() error {
			if n := traffic.Tally().OK; n == 0 {
				return errors.New("no connection yet")
			}
			return nil
		})
		s.writeWeb(s2) // s1 drains when the Service goes
		na.pool(s2)
		s.remove("web.yaml")
		eventually(t, "the Service is gone", func() error {
			list, err := na.listing()
			if err != nil {
				return err
			}
			if len(list.Rows) != 1 {
				return fmt.Errorf("%d rows", len(list.Rows))
			}
			return drifts(&list)
		})
		for _, tool := range [][]string{
			{"ipvsadm", "-Ln"}, {"ipset", "save"}, {"ip", "route", "show", "table", "local", "proto", "84"},
		} {
			out := na.tool(tool[0], tool[1:]...)
			for _, gone := range []string{webIP4, webLB4, ":30080", "tcp:30080"} {
				if strings.Contains(out, gone) {
					t.Errorf("%v still has %s:\n%s", tool, gone, out)
				}
			}
		}
		s.writeWeb(s1, s2)
		na.pool(s1, s2)
	}
	traffic.Stop()
}

// B036, B037: virtual servers of others stay as they are, through syncs, restarts and cleanup.
func TestIPVSForeignVirtualServersAreLeftAlone(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1 := s.lab.Host("s1")
	serve(t, s1, model.TCP, webPort)
	na := s.ipvsNode("na", "--ipvs-exclude-cidrs=10.20.0.77/32")
	foreign := func(what string) {
		t.Helper()
		out := na.tool("ipvsadm", "-Sn")
		for _, want := range []string{
			"-a -t 10.20.0.77:6443 -r 10.20.0.5:6443 -m -w 7", "-a -t 10.20.0.78:80 -r 10.20.0.6:80 -m -w 3", "-A -f 77 -s wlc",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in\n%s", what, want, out)
			}
		}
	}
	for _, args := range []string{
		"-A -t 10.20.0.77:6443 -s rr", "-a -t 10.20.0.77:6443 -r 10.20.0.5:6443 -m -w 7", "-A -t 10.20.0.78:80 -s rr",
		"-a -t 10.20.0.78:80 -r 10.20.0.6:80 -m -w 3", "-A -f 77 -s wlc",
	} {
		na.tool("ipvsadm", strings.Fields(args)...)
	}
	s.writeWeb(s1)
	na.start()
	na.pool(s1)
	foreign("after the first sync")
	na.end(syscall.SIGKILL)
	s.remove("web.yaml")
	na.start()
	na.ready()
	foreign("after a restart")
	na.end(syscall.SIGTERM)
	if got := na.turnout("cleanup", "--socket", na.socket); got.status != 0 {
		t.Errorf("cleanup: %+v", got)
	}
	foreign("after cleanup")
	if out := na.tool("ipvsadm", "-Sn"); strings.Contains(out, webIP4) {
		t.Errorf("cleanup left:\n%s", out)
	}
	if out := na.tool("ipset", "list", "-n"); strings.TrimSpace(out) != "" {
		t.Errorf("cleanup left sets: %s", out)
	}
}

// B018, B023: a port that no Service has is refused on a Service's address, and reached on the node's own.
func TestIPVSPortsOfTheHostAreNotReachedByServiceAddresses(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1, host := s.lab.Host("s1"), s.lab.Host("na")
	serve(t, s1, model.TCP, webPort)
	serve(t, host, model.TCP, 2222)
	own := service("own", tcpPort(80, 0), "10.96.1.30")
	own.Spec.Type = corev1.ServiceTypeLoadBalancer
	own.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: host.Addr4().String()}}
	s.writeWeb(s1)
	s.write("own.yaml", own, slice4("own", own.Spec.Ports[0], s1))
	na := s.ipvsNode("na")
	na.start()
	na.pool(s1)
	// B030: on loopback a node port is refused at once, and no kernel parameter opens it.
	if got := strings.TrimSpace(na.tool("cat", "/proc/sys/net/ipv4/conf/all/route_localnet")); got != "0" {
		t.Errorf("route_localnet is %s", got)
	}
	for _, c := range []struct {
		from, to string
		want     netns.Kind
	}{
		{"c1", webIP4 + ":80", netns.OK},
		{"c1", webIP4 + ":2222", netns.Refused},
		{"c1", "[" + webIP6 + "]:2222", netns.Refused},
		{"out", webLB4 + ":80", netns.OK},
		{"out", webLB4 + ":2222", netns.Refused},
		{"out", host.Addr4().String() + ":2222", netns.OK},
		{"c1", host.Addr4().String() + ":2222", netns.OK},
		{"out", host.Addr4().String() + ":80", netns.OK},
		{"c1", host.Addr4().String() + ":80", netns.OK},
		{"na", webIP4 + ":80", netns.OK},
		{"na", webIP4 + ":2222", netns.Refused},
	} {
		if r := s.lab.Host(c.from).Dial(netns.Call{To: netip.MustParseAddrPort(c.to)}); r.Kind != c.want {
			t.Errorf("%s -> %s: %v, want %s", c.from, c.to, r, c.want)
		}
	}
}

// B032: where others drop what is forwarded, Service traffic passes all the same, and nothing else.
func TestIPVSPassesAFirewallThatDropsWhatIsForwarded(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
	serve(t, s2, model.TCP, webPort)
	serve(t, s1, model.TCP, webPort)
	s.writeWeb(s2)
	na := s.ipvsNode("na")
	na.tool("iptables", "-P", "FORWARD", "DROP")
	na.start()
	na.pool(s2)
	for _, c := range []struct {
		from, to string
		want     netns.Kind
	}{
		{"out", "10.20.0.11:30080", netns.OK},
		{"far", webLB4 + ":80", netns.OK},
		{"out", netip.AddrPortFrom(s1.Addr4(), webPort).String(), netns.Timeout},
	} {
		if r := s.lab.Host(c.from).Dial(netns.Call{To: netip.MustParseAddrPort(c.to), Timeout: 3 * time.Second}); r.Kind != c.want {
			t.Errorf("%s -> %s: %v, want %s", c.from, c.to, r, c.want)
		}
	}
}

// B013: a client of a Service with affinity stays while it comes back in time, and is free again at most as long after as
// the kernel keeps its last flow.
func TestIPVSAffinityEnds(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
	serve(t, s1, model.UDP, 5353)
	serve(t, s2, model.UDP, 5353)
	port := udpPort(53, 5353, 0)
	sticky := service("dns", port, "10.96.1.53")
	seconds := int32(3)
	sticky.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	sticky.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	s.write("dns.yaml", sticky, slice4("dns", port, s1, s2))
	na := s.ipvsNode("na", "--ipvs-udp-timeout=2s")
	na.start()
	na.ready()
	ask := func() string {
		t.Helper()
		r := s.lab.Host("c1").UDP("10.96.1.53:53")
		if r.Kind != netns.OK {
			t.Fatalf("c1 -> 10.96.1.53:53/udp: %v", r)
		}
		return r.Server
	}
	first := ask()
	for range 8 {
		time.Sleep(500 * time.Millisecond)
		if got := ask(); got != first {
			t.Fatalf("led to %s after %s, within the time of affinity", got, first)
		}
	}
	eventually(t, "another server after the time of affinity", func() error {
		// The flow's 2 s, the affinity's 3 s, and what the kernel's timers round up.
		time.Sleep(7 * time.Second)
		if got := ask(); got == first {
			return fmt.Errorf("still %s", got)
		}
		return nil
	})
}

// B029: an echo request to a Service's address is refused, endpoints or not; to the node's own it is answered.
func TestIPVSEchoRequestsToServicesAreRefused(t *testing.T) {
	needIPVS(t)
	s := newSite(t, netns.Topology{Nodes: 2})
	s1 := s.lab.Host("s1")
	s.write("none.yaml", service("none", tcpPort(80, 0), "10.96.1.20"))
	s.writeWeb(s1)
	na := s.ipvsNode("na")
	na.start()
	na.pool(s1)
	for _, c := range []struct{ from, to, want string }{
		{"c1", webIP4, "unreachable"},
		{"c1", "10.96.1.20", "unreachable"},
		{"out", webLB4, "unreachable"},
		{"c1", "10.20.0.11", "answered"},
		{"out", "10.20.0.11", "answered"},
	} {
		if got := echo(t, s.lab.Host(c.from), netip.MustParseAddr(c.to)); got != c.want {
			t.Errorf("%s -> %s: %s, want %s", c.from, c.to, got, c.want)
		}
	}
}

// echo sends an echo request and tells what comes back. Source: RFC 792.
func echo(t *testing.T, from *netns.Host, to netip.Addr) string {
	t.Helper()
	const reply, unreachable = 0, 3
	got := "silence"
	err := from.Do(func() error {
		conn, err := net.ListenPacket("ip4:icmp", "0.0.0.0")
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		// Type 8, code 0, checksum, identifier 0x2a2a, number 1.
		request := []byte{8, 0, 0xcd, 0xd4, 0x2a, 0x2a, 0, 1}
		//nolint:forbidigo // this library asks for it
		if _, err := conn.WriteTo(request, &net.IPAddr{IP: to.AsSlice()}); err != nil {
			return err
		}
		if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		buffer := make([]byte, 1500)
		for {
			n, _, err := conn.ReadFrom(buffer)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			}
			switch {
			case err != nil:
				return err
			case n > 0 && buffer[0] == reply:
				got = "answered"
				return nil
			case n > 0 && buffer[0] == unreachable:
				got = "unreachable"
				return nil
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}
