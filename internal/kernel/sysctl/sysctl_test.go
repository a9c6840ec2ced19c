package sysctl

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
)

// tree makes a tree with one parameter.
func tree(t *testing.T, name, value string) (Tree, string) {
	t.Helper()
	root := t.TempDir()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return New(root), path
}

func TestReadAndWrite(t *testing.T) {
	const name = "net/ipv4/conf/eth0.100/rp_filter"
	s, _ := tree(t, name, "2")
	if got, err := s.Read(name); err != nil || got != "2" {
		t.Fatalf("got %q, %v; want 2", got, err)
	}
	if err := s.Write(name, "1"); err != nil {
		t.Fatal(err)
	}
	if got, err := s.ReadInt(name); err != nil || got != 1 {
		t.Errorf("got %d, %v; want 1", got, err)
	}
}

func TestEnsureAndRaiseWriteOnlyWhatDiffers(t *testing.T) {
	const name = "net/netfilter/nf_conntrack_max"
	tests := map[string]struct {
		have  string
		do    func(Tree) (bool, error)
		wrote bool
		want  string
	}{
		"ensure what is there":   {"5", func(s Tree) (bool, error) { return s.Ensure(name, "5") }, false, "5"},
		"ensure another value":   {"5", func(s Tree) (bool, error) { return s.Ensure(name, "4") }, true, "4"},
		"raise what is enough":   {"5", func(s Tree) (bool, error) { return s.Raise(name, 5) }, false, "5"},
		"raise what is more":     {"6", func(s Tree) (bool, error) { return s.Raise(name, 5) }, false, "6"},
		"raise what is too low":  {"4", func(s Tree) (bool, error) { return s.Raise(name, 5) }, true, "5"},
		"raise from nine to ten": {"9", func(s Tree) (bool, error) { return s.Raise(name, 10) }, true, "10"},
	}
	for what, tc := range tests {
		t.Run(what, func(t *testing.T) {
			s, _ := tree(t, name, tc.have)
			wrote, err := tc.do(s)
			if err != nil || wrote != tc.wrote {
				t.Errorf("wrote: %v, %v; want %v", wrote, err, tc.wrote)
			}
			if got, err := s.Read(name); err != nil || got != tc.want {
				t.Errorf("got %q, %v; want %q", got, err, tc.want)
			}
		})
	}
}

func TestAMissingParameterIsAnErrorThatSaysSo(t *testing.T) {
	s, _ := tree(t, "net/a", "1")
	calls := map[string]func() error{
		"read":   func() error { _, err := s.Read("net/b"); return err },
		"write":  func() error { return s.Write("net/b", "1") },
		"ensure": func() error { _, err := s.Ensure("net/b", "1"); return err },
		"raise":  func() error { _, err := s.Raise("net/b", 1); return err },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			err := call()
			if !errors.Is(err, kernel.ErrUnsupported) || !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("got %v, want one of class %v that is %v", err, kernel.ErrUnsupported, fs.ErrNotExist)
			}
			if !strings.Contains(err.Error(), "net/b") || !strings.Contains(err.Error(), "module") {
				t.Errorf("%v: does not name the parameter and what is missing", err)
			}
			if _, err := os.Stat(filepath.Join(s.root, "net/b")); err == nil {
				t.Error("the file was made")
			}
		})
	}
}

func TestAReadOnlyTreeThatIsRightIsNoError(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root for a read-only mount: run as root, or under `unshare -rm`")
	}
	s, _ := tree(t, "net/a", "5")
	if err := unix.Mount(s.root, s.root, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(s.root, 0); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mount("", s.root, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if wrote, err := s.Ensure("net/a", "5"); err != nil || wrote {
		t.Errorf("ensure: wrote %v, %v; want neither", wrote, err)
	}
	if wrote, err := s.Raise("net/a", 4); err != nil || wrote {
		t.Errorf("raise: wrote %v, %v; want neither", wrote, err)
	}
	_, err := s.Ensure("net/a", "6")
	if !errors.Is(err, kernel.ErrUnsupported) || !errors.Is(err, unix.EROFS) {
		t.Errorf("got %v, want one of class %v that is %v", err, kernel.ErrUnsupported, unix.EROFS)
	}
	for _, part := range []string{"write 6", "stays at 5", "read-only"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}

func TestNamesThatLeaveTheTreeAreRefused(t *testing.T) {
	s, _ := tree(t, "net/a", "1")
	for _, name := range []string{"", ".", "..", "/etc/passwd", "../a", "net/../../a", "net//a", "net/a/", "net/a\x00", "net\\a"} {
		if _, err := s.Read(name); !errors.Is(err, kernel.ErrInvalid) {
			t.Errorf("read %q: got %v, want one of class %v", name, err, kernel.ErrInvalid)
		}
		if err := s.Write(name, "1"); !errors.Is(err, kernel.ErrInvalid) {
			t.Errorf("write %q: got %v, want one of class %v", name, err, kernel.ErrInvalid)
		}
	}
}

func TestAValueThatIsNoNumberIsReportedAndKept(t *testing.T) {
	s, path := tree(t, "net/a", "lots")
	if _, err := s.Raise("net/a", 5); !errors.Is(err, kernel.ErrInvalid) {
		t.Errorf("got %v, want one of class %v", err, kernel.ErrInvalid)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "lots\n" {
		t.Errorf("got %q, %v", text, err)
	}
}

func TestTheKernelsParametersBelongToTheNamespace(t *testing.T) {
	kerneltest.Isolate(t)
	s := New(ProcSys)
	const name = "net/ipv4/conf/all/route_localnet"
	if _, err := s.Ensure(name, "1"); err != nil {
		if errors.Is(err, kernel.ErrUnsupported) {
			t.Skip(err)
		}
		t.Fatal(err)
	}
	if got, err := s.ReadInt(name); err != nil || got != 1 {
		t.Errorf("got %d, %v; want 1", got, err)
	}
	if err := s.Write(name, "many"); !errors.Is(err, kernel.ErrInvalid) {
		t.Errorf("got %v, want one of class %v", err, kernel.ErrInvalid)
	}
}
