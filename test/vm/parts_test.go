package vm

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// serve says one thing to everyone who connects to the loopback, and gives the port.
func serve(t *testing.T, said string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed
			}
			_, _ = io.WriteString(c, said)
			_ = c.Close()
		}
	}()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func TestWordsAreTakenOutOfTheStream(t *testing.T) {
	const nonce = "turnout-guest-N"
	tests := map[string]struct {
		in     string
		out    string
		status int // -1 if it did not end
		ready  int
	}{
		"a whole life":                     {nonce + " ready\nhello\n" + nonce + " exit 3\n", "hello\n", 3, 1},
		"no end of line before the end":    {nonce + " ready\nhello" + nonce + " exit 0\n", "hello", 0, 1},
		"what comes after the end":         {nonce + " ready\n" + nonce + " exit 1\nstray", "", 1, 1},
		"output like the words of a guest": {nonce + " ready\nturnout-guest-M exit 0\n" + nonce + " exit 4\n", "turnout-guest-M exit 0\n", 4, 1},
		"an end in the middle of a word":   {nonce + " ready\nx" + nonce + " exit 1", "x" + nonce + " exit 1", -1, 1},
		"the beginning of a nonce at last": {nonce + " ready\nturnout-gue", "turnout-gue", -1, 1},
		"nothing":                          {"", "", -1, 0},
	}
	for name, tc := range tests {
		for size, reader := range map[string]io.Reader{
			"at once": strings.NewReader(tc.in), "byte by byte": iotest.OneByteReader(strings.NewReader(tc.in)),
		} {
			t.Run(name+" "+size, func(t *testing.T) {
				var out strings.Builder
				ready := 0
				s := stream{nonce: []byte(nonce), out: &out, ready: func() { ready++ }}
				ended, err := s.copy(reader)
				if err != nil {
					t.Fatal(err)
				}
				status := s.status
				if !ended {
					status = -1
				}
				if out.String() != tc.out || status != tc.status || ready != tc.ready {
					t.Errorf("output %q, status %d, ready %d; want %q, %d, %d", &out, status, ready, tc.out, tc.status, tc.ready)
				}
			})
		}
	}
}

func TestAStreamThatCannotBePassedOnIsAnError(t *testing.T) {
	closed := errors.New("closed")
	s := stream{nonce: []byte("N"), out: failing{closed}, ready: func() {}}
	if _, err := s.copy(strings.NewReader("x\n")); !errors.Is(err, closed) {
		t.Errorf("error %v, want %v", err, closed)
	}
	s = stream{nonce: []byte("N"), out: io.Discard, ready: func() {}}
	if _, err := s.copy(strings.NewReader("N exit soon\n")); err == nil {
		t.Error("no error for a word that is none")
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestTheNewestPlainPackageIsTaken(t *testing.T) {
	names := []string{
		"linux-image-6.1.0-9-amd64", "linux-image-6.1.0-57-amd64", "linux-image-6.1.0-57-cloud-amd64", "linux-image-6.1.0-58-rt-amd64",
		"linux-image-6.1.0-58-amd64-dbg", "linux-image-6.1.0-58-amd64-unsigned", "linux-image-6.12.9+bpo-amd64",
		"linux-image-6.12.117+deb12-amd64", "linux-image-6.12.12+bpo-amd64", "linux-image-6.1.0-58-686", "linux-image-amd64",
	}
	for series, want := range map[string]string{
		"6.1": "linux-image-6.1.0-57-amd64", "6.12": "linux-image-6.12.117+deb12-amd64", "6.9": "",
	} {
		if got := newest(series, names); got != want {
			t.Errorf("of %s got %q, want %q", series, got, want)
		}
	}
}

func TestModulesAreLoadedBehindThoseThatTheyNeed(t *testing.T) {
	const dep = `kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet.ko.xz:
kernel/net/9p/9pnet_virtio.ko.xz: kernel/drivers/virtio/virtio_ring.ko.xz kernel/drivers/virtio/virtio.ko.xz kernel/net/9p/9pnet.ko.xz
kernel/drivers/virtio/virtio_ring.ko.xz:
kernel/drivers/virtio/virtio.ko.xz: kernel/drivers/virtio/virtio_ring.ko.xz
kernel/fs/netfs/netfs.ko.xz:
`
	got := loadOrder(dep, []string{"built_in", "9p", "9pnet_virtio"})
	want := []string{
		"kernel/net/9p/9pnet.ko.xz", "kernel/fs/netfs/netfs.ko.xz", "kernel/fs/9p/9p.ko.xz",
		"kernel/drivers/virtio/virtio_ring.ko.xz", "kernel/drivers/virtio/virtio.ko.xz", "kernel/net/9p/9pnet_virtio.ko.xz",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestAKernelThatGivesUpIsHeard(t *testing.T) {
	panicked, last := panicLine([]byte("a\r\nb\r\nmount: no such device\r\n\r\nsee dmesg\r\n[ 1.1] Kernel panic - not syncing: Attempted to kill init!\r\n[ 1.2] CPU: 0\r\n"))
	if panicked != "Attempted to kill init!" || last != "b; mount: no such device; see dmesg" {
		t.Errorf("got %q behind %q", panicked, last)
	}
	if panicked, last = panicLine([]byte("all is well\n")); panicked != "" || last != "all is well" {
		t.Errorf("got %q behind %q of a kernel that is well", panicked, last)
	}
}

func TestWhoEndedAGuestFromOutsideIsTold(t *testing.T) {
	// What QEMU does when it gets a signal, to the letter: it says so and ends well.
	const says = "qemu-system-x86_64: terminating on signal 15 from pid 4711"
	dir := t.TempDir()
	qemu := filepath.Join(dir, "qemu")
	if err := os.WriteFile(qemu, []byte("#!/bin/sh\necho '"+says+"' >&2\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	c := Config{Timeout: time.Minute, Accel: tcg}
	if err := c.setDefaults(); err != nil {
		t.Fatal(err)
	}
	g := guest{Config: c, kernel: &kernel{}, qemu: qemu, dir: dir, nonce: "N"}
	if _, err := g.run(t.Context()); !errors.Is(err, ErrNotBooted) || !strings.Contains(err.Error(), says) {
		t.Errorf("error %v, want %v with %q", err, ErrNotBooted, says)
	}
}

func TestAnArchiveHasTheFormOfTheKernel(t *testing.T) {
	var a archive
	a.file("ab", []byte("hello"))
	got := string(a.close())
	// The header has 110 bytes; it and the name are padded to four together, and so are the data.
	want := "070701" + "00000001" + "000081ed" + strings.Repeat("0", 16) + "00000001" + "00000000" + "00000005" +
		strings.Repeat("0", 32) + "00000003" + "00000000" + "ab\x00" + "\x00\x00\x00" + "hello" + "\x00\x00\x00"
	if head := got[:min(len(got), len(want))]; head != want {
		t.Errorf("archive:\n%q, want\n%q", head, want)
	}
	if len(got)%4 != 0 || !strings.Contains(got[len(want):], "TRAILER!!!\x00") {
		t.Errorf("the archive ends with %q", got[len(want):])
	}
}
