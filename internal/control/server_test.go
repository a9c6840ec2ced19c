package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
)

// fakeDaemon answers at once, or as long as it is told to wait.
type fakeDaemon struct {
	wait chan struct{}
	// arrived gets a word for each question.
	arrived chan struct{}
	asked   atomic.Int32
	err     error
}

func (f *fakeDaemon) pause(ctx context.Context) error {
	f.asked.Add(1)
	if f.arrived != nil {
		f.arrived <- struct{}{}
	}
	if f.wait != nil {
		select {
		case <-f.wait:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return f.err
}

func (f *fakeDaemon) Status(ctx context.Context) (answer.Status, error) {
	return answer.Status{Mode: "iptables", Node: "n1", PID: 7}, f.pause(ctx)
}

func (f *fakeDaemon) Listing(ctx context.Context) (answer.Listing, error) {
	return answer.Listing{Source: answer.FromDaemon, Rows: []answer.Row{{
		Service: "shop/web", Frontend: "10.0.0.1:80",
		Endpoints: []answer.Endpoint{{Addr: "10.1.0.1:8080", Share: 1}},
	}}}, f.pause(ctx)
}

func (f *fakeDaemon) Trace(ctx context.Context, p forward.Packet) (answer.Trace, error) {
	return answer.Trace{Packet: answer.PacketOf(p), Verdict: "pass"}, f.pause(ctx)
}

func (f *fakeDaemon) Table(ctx context.Context, w io.Writer) error {
	if err := f.pause(ctx); err != nil {
		return err
	}
	_, err := io.WriteString(w, "context IPv4\n")
	return err
}

// quiet gives a server that does not log.
func quiet(d Daemon) *http.Server {
	s := NewServer(d)
	s.ErrorLog = log.New(io.Discard, "", 0)
	return s
}

// serve starts a server and gives its socket. It stops, and must leave nothing running, when the test ends.
func serve(t *testing.T, d Daemon) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.sock")
	ln, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, ln, quiet(d)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
		goleak.VerifyNone(t)
	})
	return path
}

func TestEveryQuestionIsAnswered(t *testing.T) {
	c := NewClient(serve(t, &fakeDaemon{}))
	t.Run("status", func(t *testing.T) {
		got, err := c.Status(t.Context())
		if diff := cmp.Diff(answer.Status{Mode: "iptables", Node: "n1", PID: 7}, got); err != nil || diff != "" {
			t.Errorf("error %v, status (-want +got):\n%s", err, diff)
		}
	})
	t.Run("listing", func(t *testing.T) {
		got, err := c.Listing(t.Context())
		want, _ := (&fakeDaemon{}).Listing(t.Context())
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("error %v, listing (-want +got):\n%s", err, diff)
		}
	})
	t.Run("table", func(t *testing.T) {
		var text bytes.Buffer
		if err := c.Table(t.Context(), &text); err != nil || text.String() != "context IPv4\n" {
			t.Errorf("error %v, table %q", err, text.String())
		}
	})
	for name, packet := range map[string][3]string{
		"trace of IPv4":                 {"10.0.0.1", "10.96.0.1:80/tcp", ""},
		"trace of IPv6 with all fields": {"[fd00::1]:99", "[fd00::2]:53/udp", "eth0"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := answer.ParsePacket(packet[0], packet[1], packet[2])
			if err != nil {
				t.Fatal(err)
			}
			got, err := c.Trace(t.Context(), p)
			want := answer.Trace{Packet: answer.PacketOf(p), Verdict: "pass"}
			if diff := cmp.Diff(want, got); err != nil || diff != "" {
				t.Errorf("error %v, trace (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestWhatTheDaemonCannotAnswerReachesTheClient(t *testing.T) {
	c := NewClient(serve(t, &fakeDaemon{err: errors.New("the kernel is away")}))
	_, err := c.Listing(t.Context())
	if err == nil || !strings.Contains(err.Error(), "the kernel is away") {
		t.Errorf("Listing: %v", err)
	}
	if err := c.Table(t.Context(), io.Discard); err == nil || !strings.Contains(err.Error(), "the kernel is away") {
		t.Errorf("Table: %v", err)
	}
}

// raw sends bytes and gives all that comes back.
func raw(t *testing.T, path, request string) string {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, request); err != nil && !errors.Is(err, syscall.EPIPE) {
		t.Fatal(err)
	}
	reply, err := io.ReadAll(conn)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	return string(reply)
}

func TestARequestThatIsNotOneOfOursIsRefused(t *testing.T) {
	path := serve(t, &fakeDaemon{})
	tests := map[string]struct{ request, want string }{
		"another path":   {"GET /v1/secrets HTTP/1.1\r\nHost: x\r\n\r\n", "404 Not Found"},
		"another method": {"POST /v1/ls HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", "405 Method Not Allowed"},
		"no HTTP":        {"hello\r\n\r\n", "400 Bad Request"},
		"a header beyond bound": {
			"GET /v1/ls HTTP/1.1\r\nHost: x\r\nA: " + strings.Repeat("x", 64<<10) + "\r\n\r\n",
			"431 ",
		},
		"a trace of nothing": {"GET /v1/trace?src=1.2.3.4 HTTP/1.1\r\nHost: x\r\n\r\n", `{"error":"destination`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := raw(t, path, tc.request); !strings.Contains(got, tc.want) {
				t.Errorf("the answer is\n%s\nand should contain %q", got, tc.want)
			}
		})
	}
}

func TestClientsThatSayNothingDoNotKeepOthersOut(t *testing.T) {
	path := serve(t, &fakeDaemon{})
	for range 3 * maxClients {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*headerTimeout)
	defer cancel()
	c := NewClient(path)
	for {
		// The client's own patience is shorter than that of the silent ones ahead of it together.
		_, err := c.Status(ctx)
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("silent clients kept a question from being answered: %v", err)
		}
	}
}

func TestManyClientsAreAnsweredAFewAtATime(t *testing.T) {
	d := &fakeDaemon{wait: make(chan struct{}), arrived: make(chan struct{}, 3*maxClients)}
	path := serve(t, d)
	var wg sync.WaitGroup
	var answered atomic.Int32
	for range 3 * maxClients {
		wg.Go(func() {
			if _, err := NewClient(path).Status(t.Context()); err != nil {
				t.Errorf("Status: %v", err)
				return
			}
			answered.Add(1)
		})
	}
	for i := range maxClients {
		select {
		case <-d.arrived:
		case <-time.After(10 * time.Second):
			t.Fatalf("only %d questions reached the daemon", i)
		}
	}
	select {
	case <-d.arrived:
		t.Errorf("more than %d questions are being answered at once", maxClients)
	case <-time.After(200 * time.Millisecond):
		// One more would have come by now: all clients have been started.
	}
	close(d.wait)
	wg.Wait()
	if n := answered.Load(); n != 3*maxClients {
		t.Errorf("%d of %d clients got an answer", n, 3*maxClients)
	}
}

func TestAStopEndsAnswersThatAreUnderWay(t *testing.T) {
	d := &fakeDaemon{wait: make(chan struct{}), arrived: make(chan struct{}, 1)}
	path := filepath.Join(t.TempDir(), "t.sock")
	ln, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, ln, quiet(d)) }()
	asked := make(chan error, 1)
	go func() {
		_, err := NewClient(path).Status(context.WithoutCancel(ctx))
		asked <- err
	}()
	<-d.arrived
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Serve: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Serve did not end")
	}
	if err := <-asked; err == nil {
		t.Error("the client got an answer from a daemon that was stopping")
	}
}

func TestWithoutADaemonTheClientSaysSo(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale.sock")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"no socket": filepath.Join(dir, "none.sock"), "no directory": filepath.Join(dir, "none", "t.sock"),
		"a socket of a dead process": stale,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := NewClient(path).Status(t.Context())
			if !errors.Is(err, ErrNoDaemon) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v, want ErrNoDaemon with the path", err)
			}
		})
	}
}

func TestOtherUsersAreHungUpOn(t *testing.T) {
	if syscall.Getuid() != 0 {
		t.Skip("needs root, to become another user: run go test as root")
	}
	if _, err := exec.LookPath("setpriv"); err != nil {
		t.Skip("needs setpriv (util-linux), to become another user")
	}
	path := serve(t, &fakeDaemon{})
	// What somebody may do who widened the permissions by hand.
	for p := filepath.Dir(path); p != "/"; p = filepath.Dir(p) {
		_ = exec.CommandContext(t.Context(), "chmod", "a+x", p).Run()
	}
	if err := exec.CommandContext(t.Context(), "chmod", "0666", path).Run(); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf(`use IO::Socket::UNIX; $SIG{PIPE} = "IGNORE";
		my $s = IO::Socket::UNIX->new("%s") or die "dial: $!";
		print $s "GET /v1/status HTTP/1.0\r\n\r\n"; my $got = join("", <$s>); print "got<$got>";`, path)
	if _, err := exec.LookPath("perl"); err != nil {
		t.Skip("needs perl, to be another user's client")
	}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"root":   {[]string{"perl", "-e", script}, `"mode":"iptables"`},
		"nobody": {[]string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "perl", "-e", script}, "got<>"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), tc.args[0], tc.args[1:]...).CombinedOutput()
			if err != nil || !strings.Contains(string(out), tc.want) {
				t.Errorf("error %v, output %q, which should contain %q", err, out, tc.want)
			}
		})
	}
}
