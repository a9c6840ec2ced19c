package module

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/turnout-proxy/turnout/internal/kernel"
)

// stub puts a program in the place of modprobe, and gives the file that it writes its arguments to.
func stub(t *testing.T, script string) (args string) {
	t.Helper()
	dir := t.TempDir()
	args = filepath.Join(dir, "args")
	text := "#!/bin/sh\necho \"$@\" >" + args + "\n" + script
	if err := os.WriteFile(filepath.Join(dir, "modprobe"), []byte(text), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	return args
}

func TestAllModulesAreAskedForAtOnce(t *testing.T) {
	args := stub(t, "exit 0")
	if err := Load(t.Context(), "ip_vs", "ip_vs_rr"); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(args); err != nil || string(text) != "-a -- ip_vs ip_vs_rr\n" {
		t.Errorf("called with %q, %v", text, err)
	}
}

func TestAFailureSaysWhatModprobeSaid(t *testing.T) {
	stub(t, "echo 'FATAL: Module ip_vs not found' >&2; exit 1")
	err := Load(t.Context(), "ip_vs")
	if !errors.Is(err, kernel.ErrUnsupported) || !strings.Contains(err.Error(), "FATAL: Module ip_vs not found") {
		t.Errorf("error %v", err)
	}
}

func TestWithoutModprobeNothingIsLoaded(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if err := Load(t.Context(), "ip_vs"); !errors.Is(err, kernel.ErrUnsupported) {
		t.Errorf("error %v, want %v", err, kernel.ErrUnsupported)
	}
}

func TestWhatIsNoNameIsNeverPassedOn(t *testing.T) {
	args := stub(t, "exit 0")
	for _, name := range []string{"", "-r", "a b", "../x", "A", strings.Repeat("x", 60)} {
		if err := Load(t.Context(), "ip_vs", name); err == nil {
			t.Errorf("took %q for a module", name)
		}
	}
	if _, err := os.Stat(args); err == nil {
		t.Error("modprobe was called")
	}
}
