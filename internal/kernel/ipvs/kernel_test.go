package ipvs

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Fake and kernel get the same changes at random, in batches of random size, and must give the same answers and end with
// the same servers.
func TestKernelAgreesWithTheFake(t *testing.T) {
	k := openKernel(t)
	fake := NewFake("rr", "wlc", "sh")
	r := rand.New(rand.NewPCG(2, 3))
	met := map[string]int{}
	for range 25 {
		ops := make([]Op, 1+r.IntN(60))
		for i := range ops {
			ops[i] = randomOp(r)
		}
		want, got := fake.Apply(t.Context(), ops), k.Apply(t.Context(), ops)
		for i := range ops {
			if diff := cmp.Diff(outcome(want[i]), outcome(got[i])); diff != "" {
				t.Fatalf("%s %s (-fake +kernel):\n%s\nof servers:\n%s", ops[i].Verb, ops[i].object(), diff, fake.Dump())
			}
			met[ops[i].Verb.String()+": "+reason(got[i])]++
		}
		for _, f := range []model.Family{model.IPv4, model.IPv6} {
			want, err1 := fake.List(t.Context(), f)
			got, err2 := k.List(t.Context(), f)
			if diff := cmp.Diff(want, got, same()); diff != "" || err1 != nil || err2 != nil {
				t.Fatalf("%v, %v (-fake +kernel):\n%s", err1, err2, diff)
			}
		}
	}
	// Each verb must have succeeded and failed in each way that it can, else the test shows nothing.
	for _, want := range []string{
		"add virtual server: done", "add virtual server: exists", "add virtual server: scheduler", "change virtual server: done",
		"change virtual server: missing", "change virtual server: scheduler", "remove virtual server: done",
		"remove virtual server: missing", "add destination: done", "add destination: exists", "add destination: missing",
		"change destination: done", "change destination: missing", "remove destination: done", "remove destination: missing",
	} {
		if met[want] == 0 {
			t.Errorf("never met %q in %v", want, met)
		}
	}
}

func outcome(err error) string {
	if err == nil {
		return "done"
	}
	return err.Error()
}

func reason(err error) string {
	for name, known := range map[string]error{"exists": ErrExists, "missing": ErrMissing, "scheduler": ErrScheduler} {
		if errors.Is(err, known) {
			return name
		}
	}
	return outcome(err)
}

// The tool that operators use reads what was written: bytes that only we understand would be of no use.
func TestKernelShowsTheToolWhatWasWritten(t *testing.T) {
	k := openKernel(t)
	tool, err := exec.LookPath("ipvsadm")
	if err != nil {
		t.Skipf("needs ipvsadm to compare with: install the package ipvsadm: %v", err)
	}
	all := servers()
	for i := range all {
		all[i].Mark &= 0xffff // the tool prints those with the highest bit as negative numbers
	}
	fill(t, k, all)
	out, err := exec.CommandContext(t.Context(), tool, "-S", "-n").CombinedOutput()
	if err != nil {
		t.Fatalf("ipvsadm: %v\n%s", err, out)
	}
	want := strings.Split(strings.TrimSpace(`
-A -f 4660 -s rr -p 10800 -M 255.255.255.0
-a -f 4660 -r 10.60.1.11:8080 -m -w 0
-a -f 4660 -r 10.60.1.12:0 -m -w 1
-A -f 4660 -6 -s rr -p 60 -M 127
-a -f 4660 -6 -r [fd60:1::11]:8443 -m -w 0
-A -t 10.70.0.1:80 -s rr
-a -t 10.70.0.1:80 -r 10.60.1.11:8080 -m -w 0
-a -t 10.70.0.1:80 -r 10.60.1.12:8080 -m -w 1
-A -t 10.70.0.2:80 -s rr
-a -t 10.70.0.2:80 -r 10.60.1.11:80 -g -w 3
-a -t 10.70.0.2:80 -r 10.60.1.12:80 -m -w 3
-a -t 10.70.0.2:80 -r [fd60:1::11]:80 -i -w 65535 --tun-type ipip
-A -t [fd70::1]:443 -s rr -p 1 -M 64
-a -t [fd70::1]:443 -r [fd60:1::11]:8443 -m -w 0
-A -u 10.70.0.1:80 -s wlc
-a -u 10.70.0.1:80 -r 10.60.1.11:53 -m -w 0
-A -u 10.70.0.2:0 -s rr -p 4294967 -M 128.0.0.0 -o
-a -u 10.70.0.2:0 -r 10.60.1.11:0 -m -w 0
-A -u [fd70::1]:443 -s rr
-a -u [fd70::1]:443 -r 10.60.1.11:443 -i -w 1 --tun-type ipip
-A --sctp-service 10.70.0.1:80 -s sh -b sh-fallback,sh-port
`), "\n")
	got := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ipvsadm says (-want +got):\n%s", diff)
	}
}

// While others make and remove servers, a listing gives each of the rest once, with its destinations.
func TestKernelListsWhileOthersMakeChanges(t *testing.T) {
	k := openKernel(t)
	space, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(space) }()
	server := func(i, port int) Server {
		k := Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 72, 0, byte(i)}), uint16(port))}
		return Server{Key: k, Properties: rr(), Destinations: []Destination{{Addr: at("10.60.1.11:80"), Weight: 1}}}
	}
	var stay []Server
	for i := range 30 {
		stay = append(stay, server(i, 1))
	}
	fill(t, k, stay)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Setns(space, unix.CLONE_NEWNET)
		for i := 0; ctx.Err() == nil && err == nil; i++ {
			s := server(i%50, 2)
			err = errors.Join(k.Apply(context.WithoutCancel(ctx), []Op{
				{Verb: AddServer, Key: s.Key, Properties: s.Properties}, {Verb: RemoveServer, Key: s.Key},
			})...)
		}
		done <- err
	}()
	for range 5 {
		got, err := k.List(t.Context(), model.IPv4)
		if err != nil {
			t.Errorf("list: %v", err)
		}
		got = slices.DeleteFunc(got, func(s Server) bool { return s.Addr.Port() == 2 })
		if diff := cmp.Diff(stay, got, same()); diff != "" {
			t.Errorf("servers that stay (-want +got):\n%s", diff)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("the changes: %v", err)
	}
}

// A server at the address of a trial takes no connection, also when it has a destination: a connection to 0.0.0.0 leads to
// the loopback address before IPVS sees it.
func TestKernelGivesATrialNoPacket(t *testing.T) {
	k := openKernel(t)
	addresses(t, "10.60.5.5/32")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	port := netip.MustParseAddrPort(l.Addr().String()).Port()
	trial := Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.AddrPortFrom(netip.IPv4Unspecified(), port)}
	fill(t, k, []Server{{trial, rr(), []Destination{{Addr: at("10.60.5.5:8080"), Weight: 1}}}})
	c, err := net.Dial("tcp", trial.Addr.String())
	if err != nil {
		t.Fatalf("a connection to %s does not come to the listener at the loopback address: %v", trial.Addr, err)
	}
	defer func() { _ = c.Close() }()
	if err := k.Connections(t.Context(), func(c Connection) bool {
		t.Errorf("the server got %+v", c)
		return true
	}); err != nil {
		t.Error(err)
	}
}

func TestAFailureInjectedIsReported(t *testing.T) {
	f := NewFake("rr")
	var asked []string
	fail := func(errno error) {
		f.Fail(func(op string) error {
			asked = append(asked, op)
			return errno
		})
	}
	fail(unix.EPERM)
	errs := f.Apply(t.Context(), []Op{{Verb: AddServer, Key: web(), Properties: rr()}})
	_, err1 := f.List(t.Context(), model.IPv4)
	_, err2 := f.Servers(t.Context(), model.IPv4)
	_, err3 := f.Destinations(t.Context(), web())
	_, err4 := f.Info(t.Context())
	_, err5 := f.Timeouts(t.Context())
	errs = append(errs, err1, err2, err3, err4, err5, f.SetTimeouts(t.Context(), Timeouts{}), f.TryScheduler(t.Context(), "rr"),
		f.Connections(t.Context(), func(Connection) bool { return true }))
	for i, err := range errs {
		if !errors.Is(err, unix.EPERM) || !errors.Is(err, kernel.ErrUnsupported) || !strings.Contains(err.Error(), "NET_ADMIN") {
			t.Errorf("call %d: got %v, want a missing capability", i, err)
		}
	}
	want := []string{
		"add virtual server 10.70.0.1:80/tcp rr", "list virtual servers", "list virtual servers",
		"list destinations of 10.70.0.1:80/tcp", "ask for the version", "ask for the timeouts", "set the timeouts",
		"add virtual server 0.0.0.0:1/tcp rr", "list connections",
	}
	if diff := cmp.Diff(want, asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	for errno, class := range map[unix.Errno]error{
		unix.EAFNOSUPPORT: kernel.ErrUnsupported, unix.EINVAL: kernel.ErrInvalid, unix.ERANGE: kernel.ErrInvalid,
		unix.ENOBUFS: kernel.ErrBusy, unix.EAGAIN: kernel.ErrBusy, unix.EEXIST: kernel.ErrConflict,
	} {
		fail(errno)
		if err := f.Apply(t.Context(), []Op{{Verb: AddServer, Key: web(), Properties: rr()}})[0]; !errors.Is(err, class) {
			t.Errorf("%s: got %v, want class %v", unix.ErrnoName(errno), err, class)
		}
	}
}

// A trial whose server cannot be removed says so, and which one it is.
func TestATrialThatLeavesSomethingSaysSo(t *testing.T) {
	f := NewFake("rr")
	f.Fail(func(op string) error {
		if strings.HasPrefix(op, "remove") {
			return unix.ENOBUFS
		}
		return nil
	})
	err := f.TryScheduler(t.Context(), "rr")
	if !errors.Is(err, kernel.ErrBusy) || !strings.Contains(err.Error(), "0.0.0.0:1/tcp") {
		t.Errorf("got %v, want a busy kernel and the server's address", err)
	}
	f.Fail(nil)
	if err := f.TryScheduler(t.Context(), "rr"); err != nil {
		t.Errorf("the next trial: %v", err)
	}
	if got, want := f.Dump(), "server 0.0.0.0:1/tcp rr\n"; got != want {
		t.Errorf("got servers %q, want %q", got, want)
	}
}

func TestADumpIsTheSameForTheSameServers(t *testing.T) {
	f := NewFake("rr", "wlc", "sh")
	all := servers()
	slices.Reverse(all)
	fill(t, f, all[:len(all)-2])
	const want = `server 10.70.0.1:80/sctp sh flags 0x18
server 10.70.0.2:0/udp rr persistent 4294967 prefix 1 flags 0x4
  -> 10.60.1.11:0 weight 0
server 10.70.0.2:80/tcp rr
  -> 10.60.1.11:80 weight 3 route upper 1000 lower 900
  -> 10.60.1.12:80 weight 3 upper 2147483647 lower 1
  -> [fd60:1::11]:80 weight 65535 tunnel upper 7 lower 0
server mark 0x80001234 (IPv4) rr persistent 10800 prefix 24
  -> 10.60.1.11:8080 weight 0
  -> 10.60.1.12:0 weight 1
server [fd70::1]:443/tcp rr persistent 1 prefix 64
  -> [fd60:1::11]:8443 weight 0
server [fd70::1]:443/udp rr
  -> 10.60.1.11:443 weight 1 tunnel
server mark 0x80001234 (IPv6) rr persistent 60 prefix 127
  -> [fd60:1::11]:8443 weight 0
`
	if diff := cmp.Diff(want, f.Dump()); diff != "" {
		t.Errorf("dump (-want +got):\n%s", diff)
	}
}
