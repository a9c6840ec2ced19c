package conntrack

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A client that sends from one port without a pause stays with a removed endpoint until its entry is forgotten, and
// stays untranslated if its first datagram came before the rule.
func TestASenderThatNeverStopsReachesTheNewEndpoint(t *testing.T) {
	kerneltest.Isolate(t)
	tables := openTables(t)
	const frontend = "10.70.0.53:53"
	onLoopback(t, "10.60.5.5", "10.60.1.7", "10.60.1.8")
	client := listen(t, "10.60.5.5:4000")
	first, second := listen(t, "10.60.1.7:5353"), listen(t, "10.60.1.8:5353")
	send := func(text string) {
		t.Helper()
		if _, err := client.WriteToUDPAddrPort([]byte(text), netip.MustParseAddrPort(frontend)); err != nil {
			t.Fatal(err)
		}
	}
	lead := func(endpoint string) {
		t.Helper()
		payload := fmt.Sprintf("*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -d 10.70.0.53/32 -p udp -m udp --dport 53 "+
			"-j DNAT --to-destination %s\nCOMMIT\n", endpoint)
		if err := tables.Restore(t.Context(), []byte(payload)); err != nil {
			t.Fatal(err)
		}
	}
	// The kernel tracks connections only once a rule needs it.
	other := "*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -d 10.70.0.99/32 -p udp -j DNAT --to-destination 10.60.1.7\n" +
		"-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n"
	if err := tables.Restore(t.Context(), []byte(other)); err != nil {
		t.Fatal(err)
	}
	forget := func(endpoint string, want int) {
		t.Helper()
		ix := flow.NewIndex(tableOf(t, endpoint))
		n, err := Forget(t.Context(), Kernel{}, model.IPv4, flow.Protocols(), ix.Stale)
		if err != nil || n != want {
			t.Fatalf("forgot %d entries, %v; want %d", n, err, want)
		}
	}

	send("before the rule") // to nobody
	lead("10.60.1.7:5353")
	forget("10.60.1.7:5353", 1)
	send("to the first")
	receive(t, first, "to the first")
	forget("10.60.1.7:5353", 0)

	lead("10.60.1.8:5353")
	send("still to the first")
	receive(t, first, "still to the first")
	forget("10.60.1.8:5353", 1)
	send("to the second")
	receive(t, second, "to the second")
	forget("10.60.1.8:5353", 0)
}

func openTables(t *testing.T) xtables.Tables {
	t.Helper()
	flavour, _, err := xtables.Detect(t.Context(), model.IPv4)
	if err != nil {
		t.Skip(err)
	}
	tables, err := xtables.Open(model.IPv4, flavour)
	if err != nil {
		t.Fatal(err)
	}
	return tables
}

// tableOf gives a forwarding table with one Service of one endpoint.
func tableOf(t *testing.T, endpoint string) *forward.Table {
	t.Helper()
	tbl, err := forward.Parse(strings.NewReader(`context IPv4 node=na
  pods unknown
  host 127.0.0.1
  node-ports all

port net/dns/udp
  frontend cluster-ip 10.70.0.53:53
    from any forward cluster snat=hairpin
  cluster ` + endpoint + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	return tbl
}

// onLoopback gives the loopback interface addresses and makes it the way to everywhere: a route is looked up before
// packets are translated.
func onLoopback(t *testing.T, addrs ...string) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a + "/32")
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.AddrAdd(lo, addr); err != nil {
			t.Fatal(err)
		}
	}
	all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: all}); err != nil {
		t.Fatal(err)
	}
}

func listen(t *testing.T, addr string) *net.UDPConn {
	t.Helper()
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func receive(t *testing.T, c *net.UDPConn, want string) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	n, _, err := c.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatalf("%q did not arrive: %v", want, err)
	}
	if got := string(buf[:n]); got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
}
