package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	rtnl "github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The figures of ADR 0017 come from here. They are to be compared within one run only.

// applyInOwnTable carries out ops in a table of its own in place of that of local addresses.
func applyInOwnTable(b *testing.B, ops []Op) {
	b.Helper()
	s, err := rtnl.Dial(unix.NETLINK_ROUTE)
	must(b, err)
	defer s.Close()
	var requests []rtnl.Request
	for _, o := range ops {
		r, err := encode(o)
		must(b, err)
		const table = 4 // its place in struct rtmsg
		r.Data[table] = ownTable
		requests = append(requests, r)
	}
	outcome, err := s.Batch(b.Context(), requests)
	must(b, errors.Join(append(outcome, err)...))
}

// A store is a way to make many addresses local, opened in a namespace of its own.
type store struct {
	name string
	// open gives the function that carries out ops.
	open func(b *testing.B, family model.Family) func([]Op)
	// bare: its addresses have no source.
	bare bool
}

func stores() []store {
	return []store{
		{name: "route", open: func(b *testing.B, _ model.Family) func([]Op) {
			b.Helper()
			return func(ops []Op) { b.Helper(); do(b, Kernel{}, ops...) }
		}},
		{name: "own-table", open: func(b *testing.B, family model.Family) func([]Op) {
			b.Helper()
			addRule(b, sample(family))
			return func(ops []Op) { b.Helper(); applyInOwnTable(b, ops) }
		}},
		{name: "device", bare: true, open: func(b *testing.B, _ model.Family) func([]Op) {
			b.Helper()
			d := Dummy{UpstreamDevice}
			if err := d.Ensure(b.Context()); errors.Is(err, kernel.ErrUnsupported) {
				b.Skip(err)
			}
			return func(ops []Op) { b.Helper(); do(b, d, ops...) }
		}},
	}
}

func families() []model.Family { return []model.Family{model.IPv4, model.IPv6} }

// sample gives the address that many makes others like.
func sample(f model.Family) netip.Addr {
	if f == model.IPv6 {
		return addr("fd70::1")
	}
	return addr("10.70.0.1")
}

func (s store) ops(n int, f model.Family) []Op {
	l := Local{Addr: sample(f)}
	if !s.bare {
		l.Source = addr("10.20.0.11")
		if f == model.IPv6 {
			l.Source = addr("fd20::11")
		}
	}
	ops, _ := many(n, l)
	return ops
}

func undo(ops []Op) []Op {
	out := make([]Op, len(ops))
	for i, o := range ops {
		out[i] = Op{Remove, o.Local}
	}
	return out
}

// threadTime is the processor time that the calling thread has used, the kernel's for it included. Other programs disturb
// it less than the clock.
func threadTime(b *testing.B) time.Duration {
	b.Helper()
	var ts unix.Timespec
	must(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}

// perLoop reports processor time.
func perLoop(b *testing.B, used time.Duration) {
	b.Helper()
	b.ReportMetric(float64(used.Nanoseconds())/float64(b.N), "cpu-ns/op")
}

// each runs a benchmark for each way, family and number of addresses that are local already.
func each(b *testing.B, sizes []int, run func(b *testing.B, s store, f model.Family, apply func([]Op), n int)) {
	b.Helper()
	for _, f := range families() {
		for _, s := range stores() {
			for _, n := range sizes {
				b.Run(fmt.Sprintf("%s/%s/addresses=%d", f, s.name, n), func(b *testing.B) {
					isolate(b)
					run(b, s, f, s.open(b, f), n)
				})
			}
		}
	}
}

// BenchmarkFill makes addresses local in one call. Removing them is not counted.
func BenchmarkFill(b *testing.B) {
	each(b, []int{100, 2000, 10000}, func(b *testing.B, s store, f model.Family, apply func([]Op), n int) {
		b.Helper()
		ops := s.ops(n, f)
		var used time.Duration
		for b.Loop() {
			before := threadTime(b)
			apply(ops)
			used += threadTime(b) - before
			b.StopTimer()
			apply(undo(ops))
			b.StartTimer()
		}
		perLoop(b, used)
	})
}

// BenchmarkOne adds one address to others and removes it.
func BenchmarkOne(b *testing.B) {
	each(b, []int{0, 100, 10000}, func(b *testing.B, s store, f model.Family, apply func([]Op), n int) {
		b.Helper()
		ops := s.ops(n+1, f)
		apply(ops[:n])
		add, remove := ops[n:], undo(ops[n:])
		before := threadTime(b)
		for b.Loop() {
			apply(add)
			apply(remove)
		}
		perLoop(b, threadTime(b)-before)
	})
}

// BenchmarkLookup asks for the way to an address elsewhere by connecting a UDP socket.
func BenchmarkLookup(b *testing.B) {
	each(b, []int{0, 100, 10000}, func(b *testing.B, s store, f model.Family, apply func([]Op), n int) {
		b.Helper()
		link(b, f)
		apply(s.ops(n, f))
		elsewhere := addr("198.51.100.7")
		if f == model.IPv6 {
			elsewhere = addr("fd98::7")
		}
		connects(b, elsewhere)
	})
}

// BenchmarkLookupLocal asks for the way to one of the addresses.
func BenchmarkLookupLocal(b *testing.B) {
	each(b, []int{1, 100, 10000}, func(b *testing.B, s store, f model.Family, apply func([]Op), n int) {
		b.Helper()
		ops := s.ops(n, f)
		apply(ops)
		connects(b, ops[n/2].Addr)
	})
}

// link gives the machine a way to everywhere.
func link(b *testing.B, f model.Family) {
	b.Helper()
	must(b, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}))
	var indexes []int
	for _, name := range []string{"a", "b"} {
		l, err := netlink.LinkByName(name)
		must(b, err)
		must(b, netlink.LinkSetUp(l))
		indexes = append(indexes, l.Attrs().Index)
	}
	awaitUp(b, indexes...)
	whole := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	if f == model.IPv6 {
		whole = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	must(b, netlink.RouteAdd(&netlink.Route{LinkIndex: indexes[0], Dst: whole}))
}

func connects(b *testing.B, to netip.Addr) {
	b.Helper()
	var sa unix.Sockaddr
	if to.Is6() {
		sa = &unix.SockaddrInet6{Port: 9, Addr: to.As16()}
	} else {
		sa = &unix.SockaddrInet4{Port: 9, Addr: to.As4()}
	}
	fd, err := unix.Socket(int(addressFamily(model.FamilyOf(to))), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(b, err)
	defer func() { _ = unix.Close(fd) }()
	before := threadTime(b)
	for b.Loop() {
		must(b, unix.Connect(fd, sa))
	}
	perLoop(b, threadTime(b)-before)
}

// BenchmarkForward has packets forwarded that have nothing to do with local addresses, each by itself.
func BenchmarkForward(b *testing.B) {
	for _, rpFilter := range []string{"0", "1"} {
		for _, n := range []int{0, 1, 10000} {
			for _, s := range stores() {
				b.Run(fmt.Sprintf("rp_filter=%s/%s/addresses=%d", rpFilter, s.name, n), func(b *testing.B) {
					isolate(b)
					forward(b, rpFilter, func() {
						if apply := s.open(b, model.IPv4); n > 0 {
							apply(s.ops(n, model.IPv4))
						}
					})
				})
			}
		}
	}
}

func forward(b *testing.B, rpFilter string, prepare func()) {
	b.Helper()
	pin(b)
	prepare()
	in, out := [2]string{"a", "b"}, [2]string{"c", "d"}
	var index [2]int
	var mac [2][]byte
	for i, pair := range [][2]string{in, out} {
		must(b, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: pair[0]}, PeerName: pair[1]}))
		far, err := netlink.LinkByName(pair[1])
		must(b, err)
		near, err := netlink.LinkByName(pair[0])
		must(b, err)
		set(b, "net/ipv4/conf/"+pair[0]+"/rp_filter", rpFilter)
		must(b, netlink.LinkSetUp(far))
		must(b, netlink.LinkSetUp(near))
		awaitUp(b, near.Attrs().Index, far.Attrs().Index)
		must(b, netlink.AddrAdd(near, &netlink.Addr{IPNet: &net.IPNet{
			IP: net.IPv4(192, 0, 2, byte(1+128*i)), Mask: net.CIDRMask(25, 32),
		}}))
		index[i], mac[i] = far.Attrs().Index, near.Attrs().HardwareAddr
	}
	set(b, "net/ipv4/conf/all/rp_filter", "0")
	set(b, "net/ipv4/ip_forward", "1")
	c, err := netlink.LinkByName("c")
	must(b, err)
	must(b, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: c.Attrs().Index, Family: netlink.FAMILY_V4, State: netlink.NUD_PERMANENT, IP: net.IPv4(192, 0, 2, 200),
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	}))
	raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	must(b, err)
	defer func() { _ = unix.Close(raw) }()
	must(b, unix.Bind(raw, &unix.SockaddrLinklayer{Ifindex: index[0]}))
	frame := datagram(mac[0], []byte{2, 0, 0, 0, 0, 2}, netip.MustParseAddrPort("192.0.2.77:1"),
		netip.MustParseAddrPort("192.0.2.200:9"), "x")
	sent, before, start := 0, received(b, index[1]), threadTime(b)
	for b.Loop() {
		if _, err := unix.Write(raw, frame); err != nil {
			b.Fatal(err)
		}
		sent++
	}
	perLoop(b, threadTime(b)-start)
	if got := received(b, index[1]) - before; got < uint64(sent)*9/10 {
		b.Fatalf("%d of %d packets were forwarded", got, sent)
	}
}

func received(b *testing.B, index int) uint64 {
	b.Helper()
	l, err := netlink.LinkByIndex(index)
	must(b, err)
	return l.Attrs().Statistics.RxPackets
}

// BenchmarkMemory tells what an address costs the kernel, from the growth of its slabs: it wants a quiet machine.
func BenchmarkMemory(b *testing.B) {
	each(b, []int{10000}, func(b *testing.B, s store, f model.Family, apply func([]Op), n int) {
		b.Helper()
		ops := s.ops(n, f)
		var total float64
		for b.Loop() {
			b.StopTimer()
			before := kernelBytes(b)
			apply(ops)
			total += float64(kernelBytes(b) - before)
			apply(undo(ops))
			settle(b)
			b.StartTimer()
		}
		b.ReportMetric(total/float64(b.N*n), "B/address")
	})
}

// settle waits for the kernel to give back what it only gives back after a grace period.
func settle(b *testing.B) {
	b.Helper()
	for last, end := int64(-1), time.Now().Add(5*time.Second); time.Now().Before(end); {
		now := kernelBytes(b)
		if now == last {
			return
		}
		last = now
		time.Sleep(200 * time.Millisecond)
	}
}

// kernelBytes gives the size of all slabs and of memory for each processor.
func kernelBytes(b *testing.B) int64 {
	b.Helper()
	text, err := os.ReadFile("/proc/meminfo")
	must(b, err)
	var sum int64
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); f[0] == "Slab:" || f[0] == "Percpu:" {
			kb, err := strconv.ParseInt(f[1], 10, 64)
			must(b, err)
			sum += kb << 10
		}
	}
	return sum
}
