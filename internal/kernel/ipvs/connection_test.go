package ipvs

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

func same() cmp.Option {
	return cmp.Options{cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })}
}

func readAll(t *testing.T, text string) ([]Connection, error) {
	t.Helper()
	var out []Connection
	err := (&connectionReader{}).read(t.Context(), strings.NewReader(text), func(c Connection) bool {
		out = append(out, c)
		return true
	})
	return out, err
}

// What Linux 6.1 printed while ipvsadm -Lnc said the same in its words.
func TestConnectionsAreReadAsTheKernelPrintsThem(t *testing.T) {
	text, err := os.ReadFile("testdata/ip_vs_conn")
	if err != nil {
		t.Fatal(err)
	}
	got, err := readAll(t, string(text))
	if err != nil {
		t.Fatal(err)
	}
	const day = 10799 * time.Second
	want := []Connection{
		{Proto: model.UDP, Client: at("10.80.0.1:51541"), Virtual: at("10.80.0.1:80"), Destination: at("10.60.5.5:8080"), State: "UDP", Expires: 299 * time.Second},
		{Client: at("10.80.0.0:0"), Mark: 0x1234, Destination: at("10.60.5.5:0"), State: "NONE", Expires: day, Template: true},
		{Proto: model.TCP, Client: at("[fd80::3]:52770"), Virtual: at("[fd80::3]:80"), Destination: at("[fd60::55]:8080"), State: "CLOSE", Expires: 9 * time.Second},
		{Proto: model.TCP, Client: at("10.80.0.5:46300"), Virtual: at("10.80.0.5:8080"), Destination: at("10.60.5.5:8080"), State: "CLOSE_WAIT", Expires: 59 * time.Second},
		{Proto: model.TCP, Client: at("10.80.0.5:0"), Virtual: at("10.80.0.5:0"), Destination: at("10.60.5.5:0"), State: "ASSURED", Expires: 299 * time.Second, Template: true},
		{Proto: model.TCP, Client: at("[fd80::]:0"), Virtual: at("[fd80::3]:80"), Destination: at("[fd60::55]:8080"), State: "NONE", Expires: 299 * time.Second, Template: true},
		{Client: at("[fd80::4]:0"), Mark: 0x1234, Destination: at("[fd60::55]:0"), State: "NONE", Expires: day, Template: true},
		{Proto: model.UDP, Client: at("10.80.0.3:56340"), Virtual: at("10.80.0.3:80"), Destination: at("[fd60::9]:80"), State: "UDP", Expires: 299 * time.Second},
	}
	if diff := cmp.Diff(want, got, same()); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
}

func TestRowsThatAreRare(t *testing.T) {
	const rest = " 0A500001 C955 0A500001 0050 0A3C0505 1F90 UDP 299"
	for row, want := range map[string]Connection{
		"UDP" + rest + " sip 0123456789@example.org": {Proto: model.UDP},
		"IP_50" + rest:  {Proto: 50},
		"ICMPv6" + rest: {Proto: 58},
		"TCP 0A500001 0000 0A500001 0050 0A3C0505 1F90 LISTEN 9": {Proto: model.TCP, Template: false},
		"UDP 0A500001 0000 0A500001 0050 0A3C0505 1F90 UDP 9":    {Proto: model.UDP, Template: true}, // before Linux 4.19
		"TCP ffffffff ffff ffffffff ffff ffffffff ffff X 0":      {Proto: model.TCP},
	} {
		got, err := readAll(t, row+"\n")
		if err != nil || len(got) != 1 || got[0].Proto != want.Proto || got[0].Template != want.Template {
			t.Errorf("%q: got %+v, %v; want %s, template %t", row, got, err, want.Proto, want.Template)
		}
	}
	for _, row := range []string{
		"", "UDP", "XYZ" + rest, "IP_256" + rest, "IP_" + rest, "UDP  C955 0A500001 0050 0A3C0505 1F90 UDP 299",
		"UDP 0A50000 C955 0A500001 0050 0A3C0505 1F90 UDP 299", "UDP 0A50000G C955 0A500001 0050 0A3C0505 1F90 UDP 299",
		"UDP 0A500001 B95 0A500001 0050 0A3C0505 1F90 UDP 299", "UDP 0A500001 C955 0A500001 0050 0A3C0505 1F90 UDP",
		"UDP 0A500001 C955 0A500001 0050 0A3C0505 1F90 UDP -1", "UDP 0A500001 C955 0A500001 0050 0A3C0505 1F90 UDP 4294967296",
		"UDP fd80:0000:0000:0000:0000:0000:0000-0003 C955 0A500001 0050 0A3C0505 1F90 UDP 9", "UDP" + rest + strings.Repeat("x", maxRow),
	} {
		if got, err := readAll(t, row+"\n"); err == nil {
			t.Errorf("%.60q was read as %+v", row, got)
		}
	}
}

func TestReadingStopsWhenItIsToldTo(t *testing.T) {
	text, err := os.ReadFile("testdata/ip_vs_conn")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	err = (&connectionReader{}).read(t.Context(), bytes.NewReader(text), func(Connection) bool {
		n++
		return n < 2
	})
	if err != nil || n != 2 {
		t.Errorf("told to stop at the second row: %d rows, %v", n, err)
	}
	// The context is looked at now and then, not at each row.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	row := "UDP 0A500001 C955 0A500001 0050 0A3C0505 1F90 UDP 299\n"
	n = 0
	err = (&connectionReader{}).read(ctx, strings.NewReader(strings.Repeat(row, 10*askEvery)), func(Connection) bool {
		n++
		cancel()
		return true
	})
	if !errors.Is(err, context.Canceled) || n > askEvery {
		t.Errorf("canceled at the first row: %d rows, %v", n, err)
	}
}

func TestARowCostsNoMemory(t *testing.T) {
	c := connectionReader{states: map[string]string{}}
	four := []byte("TCP 0A500005 B4DC 0A500005 1F90 0A3C0505 1F90 CLOSE_WAIT       59")
	six := []byte("TCP fd80:0000:0000:0000:0000:0000:0000:0003 CE22 fd80:0000:0000:0000:0000:0000:0000:0003 0050" +
		" fd60:0000:0000:0000:0000:0000:0000:0055 1F90 CLOSE             9")
	n := testing.AllocsPerRun(100, func() {
		for _, row := range [][]byte{four, six} {
			if _, err := c.row(row); err != nil {
				t.Error(err)
			}
		}
	})
	if n != 0 {
		t.Errorf("two rows take %v allocations, want none", n)
	}
	for i := range 1000 {
		c.word([]byte(strings.Repeat("x", i)))
	}
	if len(c.states) > maxStates {
		t.Errorf("%d words are kept, want at most %d", len(c.states), maxStates)
	}
}

// FuzzConnections: whatever is read, nothing panics, and what is understood has addresses.
func FuzzConnections(f *testing.F) {
	text, err := os.ReadFile("testdata/ip_vs_conn")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte("IP_50 0A500001 C955 0A500001 0050 0A3C0505 1F90 ERR! 4294967295 sip x"))
	f.Fuzz(func(t *testing.T, data []byte) {
		n := 0
		_ = (&connectionReader{}).read(t.Context(), bytes.NewReader(data), func(c Connection) bool {
			n++
			if !c.Client.IsValid() || !c.Destination.IsValid() || !c.Virtual.IsValid() && (c.Proto != 0 || !c.Template) {
				t.Errorf("%+v", c)
			}
			return true
		})
		if n > len(data) {
			t.Errorf("%d connections in %d bytes", n, len(data))
		}
	})
}

// A flow is a datagram of a client to a virtual server and the entries that it makes.
type flow struct {
	mark    int
	client  string
	virtual string
	made    []Connection
}

// flows are those through the servers that testConnections makes.
func flows() []flow {
	four, six := at("10.60.5.5:8080"), at("[fd60::55]:8080")
	udp := func(client, virtual string, to netip.AddrPort) Connection {
		return Connection{Proto: model.UDP, Client: at(client), Virtual: at(virtual), Destination: to, State: "UDP"}
	}
	return []flow{
		{0, "10.80.0.100:40001", "10.80.0.1:80", []Connection{udp("10.80.0.100:40001", "10.80.0.1:80", four)}},
		{0, "10.80.0.100:40002", "10.80.0.2:80", []Connection{
			udp("10.80.0.100:40002", "10.80.0.2:80", four),
			{Proto: model.UDP, Client: at("10.80.0.0:0"), Virtual: at("10.80.0.2:80"), Destination: four, State: "NONE", Template: true},
		}},
		{0x1234, "10.80.0.100:40003", "10.80.0.3:99", []Connection{
			udp("10.80.0.100:40003", "10.80.0.3:99", at("10.60.5.5:99")),
			{Client: at("10.80.0.100:0"), Mark: 0x1234, Destination: at("10.60.5.5:0"), State: "NONE", Template: true},
		}},
		{0, "[fd80::100]:40004", "[fd80::1]:80", []Connection{udp("[fd80::100]:40004", "[fd80::1]:80", six)}},
		{0x80001234, "[fd80::100]:40005", "[fd80::3]:99", []Connection{
			udp("[fd80::100]:40005", "[fd80::3]:99", at("[fd60::55]:99")),
			{Client: at("[fd80::100]:0"), Mark: 0x80001234, Destination: at("[fd60::55]:0"), State: "NONE", Template: true},
		}},
	}
}

func flowServers() []Server {
	four, six := []Destination{{Addr: at("10.60.5.5:8080"), Weight: 1}}, []Destination{{Addr: at("[fd60::55]:8080"), Weight: 1}}
	hour := Properties{Scheduler: "rr", Flags: Persistent, Timeout: time.Hour}
	subnet := hour
	subnet.Prefix = 24
	return []Server{
		{Key{Family: model.IPv4, Proto: model.UDP, Addr: at("10.80.0.1:80")}, rr(), four},
		{Key{Family: model.IPv4, Proto: model.UDP, Addr: at("10.80.0.2:80")}, subnet, four},
		{Key{Family: model.IPv4, Mark: 0x1234}, hour, four},
		{Key{Family: model.IPv6, Proto: model.UDP, Addr: at("[fd80::1]:80")}, rr(), six},
		{Key{Family: model.IPv6, Mark: 0x80001234}, hour, six},
	}
}

func TestFakeListsConnections(t *testing.T) {
	fake := NewFake("rr")
	testConnections(t, fake, func(list []flow) {
		var all []Connection
		for _, f := range list {
			for _, c := range f.made {
				c.Expires = 299 * time.Second
				if c.Template {
					c.Expires = 3599 * time.Second
				}
				all = append(all, c)
			}
		}
		fake.SetConnections(all...)
	})
}

func TestKernelListsConnections(t *testing.T) {
	k := openKernel(t)
	addresses(t, "10.80.0.1/32", "10.80.0.2/32", "10.80.0.3/32", "10.80.0.100/32", "10.60.5.5/32",
		"fd80::1/128", "fd80::3/128", "fd80::100/128", "fd60::55/128")
	testConnections(t, k, func(list []flow) {
		for _, f := range list {
			send(t, f)
		}
	})
	// The kernel's counts, which the fake is told.
	key := Key{Family: model.IPv4, Proto: model.UDP, Addr: at("10.80.0.2:80")}
	want := []Destination{{Addr: at("10.60.5.5:8080"), Weight: 1, Inactive: 1, Persistent: 1}}
	got, err := k.Destinations(t.Context(), key)
	if diff := cmp.Diff(want, got, same()); diff != "" || err != nil {
		t.Errorf("destination of a flow: %v (-want +got):\n%s", err, diff)
	}
	// The table is that of the thread's namespace, not that of the process.
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its namespace
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = k.Connections(t.Context(), func(c Connection) bool {
				t.Errorf("in a new namespace: %+v", c)
				return true
			})
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// addresses gives the loopback interface addresses.
func addresses(t *testing.T, list ...string) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			t.Fatal(err)
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(lo, addr); err != nil {
			t.Fatalf("add %s: %v", a, err)
		}
	}
}

// send sends a flow's datagram. Nobody listens at the destination, so that nothing comes back but a refusal.
func send(t *testing.T, f flow) {
	t.Helper()
	d := net.Dialer{
		LocalAddr: net.UDPAddrFromAddrPort(at(f.client)),
		Control: func(_, _ string, c syscall.RawConn) (err error) {
			controlErr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, f.mark) })
			return errors.Join(controlErr, err)
		},
	}
	c, err := d.DialContext(t.Context(), "udp", f.virtual)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatalf("send to %s: %v", f.virtual, err)
	}
}

func testConnections(t *testing.T, table subject, send func([]flow)) {
	t.Helper()
	list := func(ctx context.Context, most int) ([]Connection, error) {
		var out []Connection
		err := table.Connections(ctx, func(c Connection) bool {
			out = append(out, c)
			return len(out) < most
		})
		return out, err
	}
	if got, err := list(t.Context(), 100); err != nil || len(got) != 0 {
		t.Errorf("before there is one: %+v, %v", got, err)
	}
	fill(t, table, flowServers())
	send(flows())
	var want []Connection
	for _, f := range flows() {
		want = append(want, f.made...)
	}
	got, err := list(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range got {
		longest := 5 * time.Minute
		if c.Template {
			longest = time.Hour
		}
		if c.Expires <= longest/2 || c.Expires > longest {
			t.Errorf("%+v expires after %s, want up to %s", c, c.Expires, longest)
		}
		got[i].Expires = 0
	}
	byClient := cmpopts.SortSlices(func(a, b Connection) bool {
		return a.Client.Compare(b.Client) < 0 || a.Client == b.Client && a.Mark < b.Mark
	})
	if diff := cmp.Diff(want, got, same(), byClient); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
	if got, err := list(t.Context(), 2); err != nil || len(got) != 2 {
		t.Errorf("stopped after 2: got %d, %v", len(got), err)
	}
	if !slices.ContainsFunc(want, func(c Connection) bool { return c.Template }) {
		t.Error("no template was looked at")
	}
}
