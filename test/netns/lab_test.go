package netns

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEveryHostReachesEveryPodOverBothFamilies(t *testing.T) {
	lab := Start(t, Topology{Nodes: 3})
	for _, server := range []string{"s1", "s2", "s3"} {
		mustServe(t, lab.Host(server), model.TCP, 8080)
		mustServe(t, lab.Host(server), model.UDP, 5353)
	}
	for _, client := range []string{"na", "nb", "nc", "c1", "c2", "c3", "s1", "out", "far"} {
		for _, server := range []string{"s1", "s2", "s3"} {
			from, to := lab.Host(client), lab.Host(server)
			for _, c := range []Call{
				{To: netip.AddrPortFrom(to.Addr4(), 8080)},
				{To: netip.AddrPortFrom(to.Addr6(), 8080)},
				{To: netip.AddrPortFrom(to.Addr4(), 5353), Proto: model.UDP},
				{To: netip.AddrPortFrom(to.Addr6(), 5353), Proto: model.UDP},
			} {
				r := from.Dial(c)
				if r.Kind != OK || r.Server != server || r.Port != c.To.Port() || r.ClientSeen != r.Local {
					t.Errorf("%s to %s at %s: %v (its own address: %s)", client, server, c.To, r, r.Local)
				}
				want := from.Addr4()
				if c.To.Addr().Is6() {
					want = from.Addr6()
				}
				if client != server && r.ClientSeen.Addr() != want {
					t.Errorf("%s to %s at %s: the server saw %s, want %s", client, server, c.To, r.ClientSeen, want)
				}
			}
		}
	}
}

func TestAttemptsEndInTheKindThatTheNetworkGives(t *testing.T) {
	lab := Start(t, Topology{Nodes: 1})
	s1, out := lab.Host("s1"), lab.Host("out")
	blackhole := func(text string) {
		p := netip.MustParsePrefix(text)
		if err := lab.Host("na").link.RouteAdd(&netlink.Route{Dst: ipNet(p), Type: unix.RTN_BLACKHOLE}); err != nil {
			t.Fatal(err)
		}
	}
	blackhole("10.60.1.99/32")
	blackhole("fd60:1::99/128")
	tests := map[string]struct {
		to    string
		proto model.Protocol
		want  Kind
	}{
		"a TCP port that nobody listens on refuses":            {"10.60.1.11:9", model.TCP, Refused},
		"a UDP port that nobody listens on refuses":            {"10.60.1.11:9", model.UDP, Refused},
		"an IPv6 TCP port that nobody listens on refuses":      {"[fd60:1::11]:9", model.TCP, Refused},
		"an IPv6 UDP port that nobody listens on refuses":      {"[fd60:1::11]:9", model.UDP, Refused},
		"a dropped TCP packet times out":                       {"10.60.1.99:80", model.TCP, Timeout},
		"a dropped UDP packet times out":                       {"10.60.1.99:80", model.UDP, Timeout},
		"a dropped IPv6 packet times out":                      {"[fd60:1::99]:80", model.TCP, Timeout},
		"a Service address that no rule takes is unreachable":  {"10.70.1.10:80", model.TCP, Unreachable},
		"a load balancer address without rules is unreachable": {"192.0.2.10:80", model.TCP, Unreachable},
		"an IPv6 Service address without rules is unreachable": {"[fd70::10]:80", model.TCP, Unreachable},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			for _, from := range []*Host{out, lab.Host("far"), lab.Host("c1"), lab.Host("na")} {
				if from.Name == "na" && tc.want == Timeout {
					continue // a local blackhole route fails at once
				}
				call := Call{To: netip.MustParseAddrPort(tc.to), Proto: tc.proto, Timeout: time.Second}
				if tc.want == Timeout {
					call.Timeout = 200 * time.Millisecond
				}
				if r := from.Dial(call); r.Kind != tc.want {
					t.Errorf("from %s: got %v, want %s", from.Name, r, tc.want)
				}
			}
		})
	}
	t.Run("every one of many refusals is answered", func(t *testing.T) {
		for i := range 50 {
			if r := out.Dial(Call{To: netip.AddrPortFrom(s1.Addr4(), 9), Proto: model.UDP}); r.Kind != Refused {
				t.Fatalf("attempt %d: got %v", i, r)
			}
		}
	})
}

func TestAClientMayChooseItsAddressAndPort(t *testing.T) {
	lab := Start(t, Topology{Nodes: 1, Crowd: true})
	mustServe(t, lab.Host("s1"), model.TCP, 8080)
	mustServe(t, lab.Host("s1"), model.UDP, 8080)
	for _, proto := range []model.Protocol{model.TCP, model.UDP} {
		for _, is4 := range []bool{true, false} {
			from := netip.AddrPortFrom(lab.Host("crowd1").Addresses(100, is4)[99], 1234)
			to := netip.AddrPortFrom(lab.Host("s1").addr.of(is4), 8080)
			r := lab.Host("crowd1").Dial(Call{To: to, From: from, Proto: proto})
			if r.Kind != OK || r.ClientSeen != from {
				t.Errorf("%s from %s to %s: got %v", proto, from, to, r)
			}
		}
	}
}

func TestSCTPServersAnswerWhereTheKernelHasSCTP(t *testing.T) {
	if !SCTP() {
		t.Skip("this kernel has no SCTP sockets")
	}
	lab := Start(t, Topology{Nodes: 1})
	mustServe(t, lab.Host("s1"), model.SCTP, 9899)
	for _, is4 := range []bool{true, false} {
		to := netip.AddrPortFrom(lab.Host("s1").addr.of(is4), 9899)
		conn, r := lab.Host("out").Open(Call{To: to, Proto: model.SCTP})
		if conn == nil || r.Server != "s1" {
			t.Fatalf("%s: got %v", to, r)
		}
		if kind, err := conn.Ping(time.Second); kind != OK {
			t.Errorf("%s: ping: %s, %v", to, kind, err)
		}
		conn.Close()
	}
	if r := lab.Host("out").Dial(Call{To: netip.MustParseAddrPort("10.60.1.11:9"), Proto: model.SCTP}); r.Kind != Refused {
		t.Errorf("a port that nobody listens on: got %v, want refused", r)
	}
}

func TestACrowdAnswersOnEachOfItsAddresses(t *testing.T) {
	lab := Start(t, Topology{Crowd: true})
	for _, crowd := range []string{"crowd1", "crowd2"} {
		for _, proto := range []model.Protocol{model.TCP, model.UDP} {
			mustServe(t, lab.Host(crowd), proto, 8080)
			for _, is4 := range []bool{true, false} {
				list := lab.Host(crowd).Addresses(1000, is4)
				if len(list) != 1000 {
					t.Fatalf("%s has %d addresses, want 1000", crowd, len(list))
				}
				for _, i := range []int{0, 1, 255, 256, 999} {
					r := lab.Host("c1").Dial(Call{To: netip.AddrPortFrom(list[i], 8080), Proto: proto})
					if r.Kind != OK || r.Server != list[i].String() {
						t.Errorf("%s at %s: got %v", proto, list[i], r)
					}
				}
			}
		}
	}
}

func TestALongConnectionLivesAndTellsHowItEnds(t *testing.T) {
	lab := Start(t, Topology{Nodes: 1})
	server := mustServe(t, lab.Host("s1"), model.TCP, 8080)
	conn, r := lab.Host("out").Open(Call{To: netip.MustParseAddrPort("10.60.1.11:8080")})
	if conn == nil {
		t.Fatalf("open: %v", r)
	}
	defer conn.Close()
	for range 3 {
		if kind, err := conn.Ping(time.Second); kind != OK {
			t.Fatalf("ping: %s, %v", kind, err)
		}
	}
	server.Close()
	if kind, err := conn.Ping(time.Second); kind != Closed && kind != Reset {
		t.Errorf("ping after the server closed: %s, %v", kind, err)
	}
	if total, clients := server.Received(); total != 1 || clients[r.Local] != 1 {
		t.Errorf("the server counted %d connections, by client %v; want 1 from %s", total, clients, r.Local)
	}
}

func TestASilentServerCountsAndAnswersNothing(t *testing.T) {
	lab := Start(t, Topology{Nodes: 1})
	server, err := lab.Host("s1").ServeSilently(8125)
	if err != nil {
		t.Fatal(err)
	}
	call := Call{To: netip.MustParseAddrPort("10.60.1.11:8125"), Proto: model.UDP, Timeout: 100 * time.Millisecond}
	if r := lab.Host("c1").Dial(call); r.Kind != Timeout {
		t.Errorf("got %v, want a timeout", r)
	}
	if total, _ := server.Received(); total != 1 {
		t.Errorf("the server counted %d datagrams, want 1", total)
	}
}

func TestALoadCountsFailuresByKind(t *testing.T) {
	lab := Start(t, Topology{Nodes: 1})
	server := mustServe(t, lab.Host("s1"), model.TCP, 8080)
	traffic := lab.Host("out").Load(Load{
		To: netip.MustParseAddrPort("10.60.1.11:8080"), Rate: 200, Long: 5, Heartbeat: 10 * time.Millisecond,
	})
	await(t, "100 connections and 100 pings", func() bool {
		c := traffic.Tally()
		return c.OK >= 100 && c.Pings >= 100
	})
	if c := traffic.Tally(); c.Failures() != 0 {
		t.Fatalf("failures while nothing was wrong: %s", c)
	}
	traffic.Expect("another")
	await(t, "misdirected connections", func() bool { return traffic.Tally().Misdirected > 0 })
	server.Close()
	await(t, "refused and broken connections", func() bool {
		c := traffic.Tally()
		return c.Failed[Refused] > 0 && len(c.Broken) > 0
	})
	c := traffic.Stop()
	if c.Failures() <= c.Failures("s1") || len(c.First) == 0 {
		t.Errorf("broken connections with s1 do not count apart: %s", c)
	}
}

func TestACommandRunsInTheNamespaceAndDiesWithTheLab(t *testing.T) {
	lab := Start(t, Topology{Nodes: 1})
	node := lab.Host("na")
	got, err := node.Command(t.Context(), "readlink", "/proc/self/ns/net").Output()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.Readlink(node.Path())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, strings.TrimSpace(string(got))); diff != "" {
		t.Errorf("namespace (-want +got):\n%s", diff)
	}
	long := node.Command(context.Background(), "sleep", "1000")
	if err := long.Start(); err != nil {
		t.Fatal(err)
	}
	if err := lab.Close(); err != nil {
		t.Fatal(err)
	}
	if err := long.Wait(); err == nil {
		t.Error("the command ended well, want it killed")
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", long.Process.Pid)); err == nil {
		t.Errorf("process %d is still there", long.Process.Pid)
	}
}

func TestIptablesOfALabLocksAFileOfItsOwn(t *testing.T) {
	tool, err := exec.LookPath("iptables-legacy")
	if err != nil {
		t.Skip("needs iptables-legacy (apt-get install iptables)")
	}
	lab := Start(t, Topology{Nodes: 1})
	if err := unix.Flock(int(lab.lockFile.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	list := []string{"-w", "1", "-t", "nat", "-L"}
	if out, err := lab.Host("na").Command(t.Context(), tool, list...).CombinedOutput(); err == nil {
		t.Errorf("iptables ran although the lab's lock is held: %s", out)
	}
	if err := unix.Flock(int(lab.lockFile.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if out, err := lab.Host("na").Command(t.Context(), tool, list...).CombinedOutput(); err != nil {
		t.Errorf("iptables: %v: %s", err, out)
	}
}

func TestNothingIsLeftOfAClosedLab(t *testing.T) {
	keeper := Start(t, Topology{Nodes: 1}) // a namespace to hold one end of a link whose other end is in the lab
	before := descriptors(t)
	lab := Start(t, Topology{Crowd: true})
	witness := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "witness"}, PeerName: "witness",
		PeerNamespace: netlink.NsFd(lab.Host("na").file.Fd()),
	}
	if err := keeper.Host("na").link.LinkAdd(witness); err != nil {
		t.Fatal(err)
	}
	mustServe(t, lab.Host("s1"), model.TCP, 8080)
	if err := lab.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, "the kernel to remove the namespace", func() bool {
		_, err := keeper.Host("na").link.LinkByName("witness")
		return err != nil
	})
	if diff := cmp.Diff(before, descriptors(t)); diff != "" {
		t.Errorf("open files (-before +after):\n%s", diff)
	}
}

func TestNothingIsLeftOfAKilledProcess(t *testing.T) {
	if os.Getenv("TURNOUT_LAB_CHILD") != "" {
		runUntilKilled(t)
		return
	}
	keeper := Start(t, Topology{Nodes: 1})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := keeper.Host("na").Command(t.Context(), self, "-test.run=^TestNothingIsLeftOfAKilledProcess$", "-test.v")
	child.Env = append(child.Env, "TURNOUT_LAB_CHILD=1")
	stdin, err := child.StdinPipe() // held open: the child reads from it
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stdin.Close() }()
	var output bytes.Buffer
	child.Stdout, child.Stderr = &output, &output
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	witness := func() bool {
		_, err := keeper.Host("na").link.LinkByName("witness")
		return err == nil
	}
	await(t, "the child to build its lab", witness)
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // it was killed
	await(t, "the kernel to remove the child's namespaces", func() bool { return !witness() })
}

// runUntilKilled builds a lab with a child process of its own, and puts one end of a link into the namespace that this
// process itself was started in.
func runUntilKilled(t *testing.T) {
	t.Helper()
	lab := Start(t, Topology{Nodes: 1})
	if err := lab.Host("na").Command(t.Context(), "sleep", "1000").Start(); err != nil {
		t.Fatal(err)
	}
	link := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "witness"}, PeerName: "witness",
		PeerNamespace: netlink.NsFd(lab.Host("na").file.Fd()),
	}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	_, _ = os.Stdin.Read(make([]byte, 1)) // until killed
}

func BenchmarkALabOfTwoNodes(b *testing.B) {
	for b.Loop() {
		lab := Start(b, Topology{})
		if err := lab.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func TestALabRefusesATopologyItCannotAddress(t *testing.T) {
	for _, n := range []int{-1, 9} {
		if lab, err := New(Topology{Nodes: n}); err == nil {
			t.Errorf("a lab of %d nodes was built", n)
			if err := lab.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func mustServe(t *testing.T, h *Host, proto model.Protocol, port uint16) *Server {
	t.Helper()
	s, err := h.Serve(proto, port)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// await waits until a condition holds, for at most ten seconds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited 10 s for %s", what)
		}
	}
}

// descriptors counts this process's open files by kind.
func descriptors(t *testing.T) map[string]int {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, l := range links {
		target, err := os.Readlink(l)
		if err != nil {
			continue // the directory that was read
		}
		kind, _, _ := strings.Cut(target, ":")
		count[kind]++
	}
	return count
}
