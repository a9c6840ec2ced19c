package control

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func listen(t *testing.T, path string) *Listener {
	t.Helper()
	ln, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

func TestTheSocketAndItsDirectoryAreForTheirOwnerAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "turnout")
	path := filepath.Join(dir, "t.sock")
	ln := listen(t, path)
	for p, want := range map[string]fs.FileMode{path: fs.ModeSocket | 0o600, dir: fs.ModeDir | 0o700} {
		info, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", p, info.Mode(), want)
		}
	}
	if err := ln.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Close the socket is still there: %v", err)
	}
	if err := ln.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestAnExistingDirectoryKeepsItsMode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	listen(t, filepath.Join(dir, "t.sock"))
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the directory has mode %v, %v, want 0755", info.Mode(), err)
	}
}

func TestASocketThatADeadProcessLeftIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	listen(t, path)
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("dial the new socket: %v", err)
	}
	_ = conn.Close()
}

func TestALiveSocketIsNotTakenOver(t *testing.T) {
	tests := map[string]func(t *testing.T, path string){
		"of another daemon": func(t *testing.T, path string) {
			t.Helper()
			listen(t, path)
		},
		"of a process that does not know the lock": func(t *testing.T, path string) {
			t.Helper()
			ln, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = ln.Close() })
		},
	}
	for name, holdSocket := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "t.sock")
			holdSocket(t, path)
			ln, err := Listen(path)
			if ln != nil || !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), path) {
				t.Errorf("Listen gave %v, %v; want ErrInUse that names %s", ln, err, path)
			}
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Fatalf("the live socket does not answer any more: %v", err)
			}
			_ = conn.Close()
		})
	}
}

// A daemon that is killed between a fork and the exec of a tool leaves a process that has the lock for some moments more.
func TestALockThatIsHeldForAMomentIsWaitedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.sock")
	held, err := acquire(path + lockSuffix)
	if err != nil {
		t.Fatal(err)
	}
	released := time.AfterFunc(100*time.Millisecond, func() { _ = held.Close() })
	defer released.Stop()
	listen(t, path)
}

func TestOfDaemonsThatStartTogetherOneWins(t *testing.T) {
	for range 5 {
		path := filepath.Join(t.TempDir(), "t.sock")
		var wins []*Listener
		var mu sync.Mutex
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				ln, err := Listen(path)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					wins = append(wins, ln)
				} else if !errors.Is(err, ErrInUse) {
					t.Errorf("Listen: %v", err)
				}
			})
		}
		wg.Wait()
		if len(wins) != 1 {
			t.Errorf("%d daemons hold the socket, want 1", len(wins))
		}
		for _, ln := range wins {
			_ = ln.Close()
		}
	}
}

func TestAPlaceThatCannotHoldASocketIsRefusedWithAReason(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("keep"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct{ path, want string }{
		"a file":              {file, "not a socket is there; remove it or give another --socket"},
		"a directory":         {dir, "not a socket"},
		"too long a path":     {filepath.Join(dir, strings.Repeat("x", 120)), "give a shorter --socket"},
		"a file as directory": {filepath.Join(file, "t.sock"), "make the socket's directory"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Listen(tc.path)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got error %v, which should contain %q", err, tc.want)
			}
		})
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "keep" {
		t.Errorf("the file is now %q, %v", text, err)
	}
}

func TestThePathMayBeAsLongAsTheSystemAllows(t *testing.T) {
	dir, err := os.MkdirTemp("", "t") //nolint:usetesting // the test's own directory is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	listen(t, filepath.Join(dir, strings.Repeat("x", maxPath-len(dir)-1)))
}

func TestOnlyRootAndTheOwnUserMayAsk(t *testing.T) {
	for name, tc := range map[string]struct {
		peer uint32
		own  int
		want bool
	}{
		"root asks root":     {0, 0, true},
		"root asks a user":   {0, 1000, true},
		"a user asks itself": {1000, 1000, true},
		"a user asks root":   {1000, 0, false},
		"a user asks a user": {1001, 1000, false},
		"nobody asks root":   {65534, 0, false},
		"the largest id":     {^uint32(0), -1, false},
	} {
		if got := permitted(tc.peer, tc.own); got != tc.want {
			t.Errorf("%s: permitted(%d, %d) = %v", name, tc.peer, tc.own, got)
		}
	}
}
