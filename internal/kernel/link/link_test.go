package link

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// onLoopback adds or removes an address of the loopback interface.
func onLoopback(t *testing.T, change func(netlink.Link, *netlink.Addr) error, addr string) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		t.Fatal(err)
	}
	a.Flags |= unix.IFA_F_NODAD // duplicate detection would take its time
	if err := change(lo, a); err != nil {
		t.Fatalf("%s: %v", addr, err)
	}
}

func addrs(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range texts {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func diff(want, got []netip.Addr) string {
	return cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}))
}

// The names of interfaces do not matter, but for the device with the addresses of Services; nor does how the kernel labels
// local routes, as none is read: B034, B049.
func TestAddressesOfAllInterfacesAreListedOnceAndSorted(t *testing.T) {
	kerneltest.Isolate(t)
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		l, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		a, err := netlink.ParseAddr("192.0.2.9/24")
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			t.Fatal(err)
		}
	}
	onLoopback(t, netlink.AddrAdd, "fd00::5/128")
	onLoopback(t, netlink.AddrAdd, "10.0.0.1/32")
	got, err := Addrs()
	if err != nil {
		t.Fatal(err)
	}
	if d := diff(addrs("10.0.0.1", "127.0.0.1", "192.0.2.9", "::1", "fd00::5"), got); d != "" {
		t.Errorf("addresses (-want +got):\n%s", d)
	}
}

// watching runs a watcher of the calling thread's namespace and gives what it reports.
func watching(t *testing.T, w *watcher) <-chan []netip.Addr {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	reports := make(chan []netip.Addr, 1000)
	done := make(chan error, 1)
	go func() { done <- w.run(ctx, func(a []netip.Addr) { reports <- a }) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(10 * time.Second):
			t.Error("the watcher does not end with its context")
		}
	})
	return reports
}

// await waits for a report of exactly these addresses.
func await(t *testing.T, reports <-chan []netip.Addr, want []netip.Addr) {
	t.Helper()
	var last []netip.Addr
	deadline := time.After(10 * time.Second)
	for {
		select {
		case last = <-reports:
			if slices.Equal(last, want) {
				return
			}
		case <-deadline:
			t.Fatalf("last report (-want +got):\n%s", diff(want, last))
		}
	}
}

func openWatcher(t *testing.T) *watcher {
	t.Helper()
	w, err := newWatcher()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestWatchReportsEveryChange(t *testing.T) {
	kerneltest.Isolate(t)
	reports := watching(t, openWatcher(t))
	await(t, reports, addrs("127.0.0.1", "::1"))
	onLoopback(t, netlink.AddrAdd, "10.0.0.1/32")
	await(t, reports, addrs("10.0.0.1", "127.0.0.1", "::1"))
	onLoopback(t, netlink.AddrAdd, "fd00::5/128")
	await(t, reports, addrs("10.0.0.1", "127.0.0.1", "::1", "fd00::5"))
	onLoopback(t, netlink.AddrDel, "10.0.0.1/32")
	await(t, reports, addrs("127.0.0.1", "::1", "fd00::5"))
}

func TestManyChangesEndInTheRightAddresses(t *testing.T) {
	kerneltest.Isolate(t)
	w := openWatcher(t)
	if err := w.conn.SetReadBuffer(1); err != nil { // the kernel's least, so that messages are likely to be lost
		t.Fatal(err)
	}
	reports := watching(t, w)
	want := addrs("127.0.0.1", "::1")
	for i := range 500 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		onLoopback(t, netlink.AddrAdd, a.String()+"/32")
		want = append(want, a)
	}
	slices.SortFunc(want, netip.Addr.Compare)
	await(t, reports, want)
	if n := len(reports); n > 100 {
		t.Errorf("%d reports for one burst of changes", n)
	}
}

func TestLostMessagesLeadToANewListing(t *testing.T) {
	kerneltest.Isolate(t)
	w := openWatcher(t)
	// No message ever comes through, only the news that some were lost.
	lost := make(chan error)
	w.receive = func() error { return <-lost }
	reports := watching(t, w)
	t.Cleanup(func() { lost <- fmt.Errorf("closed: %w", unix.EBADF) })
	await(t, reports, addrs("127.0.0.1", "::1"))
	onLoopback(t, netlink.AddrAdd, "10.0.0.1/32")
	lost <- fmt.Errorf("receive: %w", unix.ENOBUFS)
	await(t, reports, addrs("10.0.0.1", "127.0.0.1", "::1"))
}

func TestABrokenSocketEndsTheWatch(t *testing.T) {
	kerneltest.Isolate(t)
	w := openWatcher(t)
	w.receive = func() error { return unix.ECONNRESET }
	err := w.run(t.Context(), func([]netip.Addr) {})
	if step, ok := errors.AsType[*StepError](err); !ok || !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("got %v (%v), want a *StepError of %v", err, step, unix.ECONNRESET)
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	kerneltest.Isolate(t)
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	err := Watch(ctx, func([]netip.Addr) {
		calls++
		cancel()
	})
	if err != nil || calls != 1 {
		t.Errorf("%d calls, %v; want 1 and none", calls, err)
	}
}
