package vm

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// series gives the kernels to test with: one, or with TURNOUT_KERNELS several.
func series() []string {
	if list := os.Getenv("TURNOUT_KERNELS"); list != "" {
		return strings.Fields(list)
	}
	return []string{"6.1"}
}

// packages are those whose tests need a kernel with IPVS, by their place in the repository; each with the tests to run.
func packages() map[string]string {
	return map[string]string{
		"internal/kernel/ipvs":  "TestKernel",
		"internal/kernel/ipset": "TestKernel",
		"internal/kernel/route": "TestKernel|TestRoutes",
	}
}

// inGuest runs a program in a guest, and skips where there is none; in CI that is a failure.
func inGuest(t *testing.T, c Config, argv ...string) (status int, output string) {
	t.Helper()
	var out bytes.Buffer
	c.Output = &out
	status, err := Run(t.Context(), c, argv...)
	if errors.Is(err, ErrUnavailable) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatalf("%v; output:\n%s", err, &out)
	}
	return status, out.String()
}

// One guest tells a good deal: what comes back, that it is the kernel which was asked for, that IPVS is in it with every
// scheduler, and that the host's files stay as they are.
func TestGuest(t *testing.T) {
	mine := filepath.Join(t.TempDir(), "mine")
	if err := os.WriteFile(mine, []byte("the host's"), 0o600); err != nil {
		t.Fatal(err)
	}
	const script = `
uname -r
echo the guest\'s >"$1" && cat "$1" && touch "$1.new"
for s in rr wrr lc wlc lblc lblcr sh dh sed nq fo ovf mh; do modprobe ip_vs_$s || exit 1; done
modprobe dummy && modprobe sctp && modprobe xt_set || exit 1
test "$(id -u)" = 0 && test "$WORD" = 'two words' || exit 1
exit 3`
	for _, s := range series() {
		t.Run(s, func(t *testing.T) {
			c := Config{Kernel: s, Timeout: 2 * time.Minute, Env: []string{"WORD=two words"}}
			status, out := inGuest(t, c, "sh", "-c", script, "sh", mine)
			if status != 3 || !strings.HasPrefix(out, s+".") || !strings.Contains(out, "the guest's") {
				t.Errorf("status %d, output:\n%s", status, out)
			}
			if text, err := os.ReadFile(mine); err != nil || string(text) != "the host's" {
				t.Errorf("the host's file became %q, %v", text, err)
			}
			if _, err := os.Stat(mine + ".new"); err == nil {
				t.Error("a file that the guest made is on the host")
			}
		})
	}
}

// A guest that is stopped, or ends before its program, is an error and no exit status.
func TestAGuestWithoutAnEnd(t *testing.T) {
	for what, tc := range map[string]struct {
		timeout time.Duration
		argv    []string
		want    string
	}{
		"time is up":  {3 * time.Second, []string{"sleep", "1000"}, "was stopped"},
		"it goes off": {2 * time.Minute, []string{"sh", "-c", "echo o >/proc/sysrq-trigger; sleep 1000"}, "ended before"},
	} {
		_, err := Run(t.Context(), Config{Timeout: tc.timeout}, tc.argv...)
		if errors.Is(err, ErrUnavailable) && os.Getenv("CI") != "true" {
			t.Skip(err)
		}
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want one that it %s", what, err, tc.want)
			continue
		}
		_, dir, _ := strings.Cut(err.Error(), " is in ")
		if err := os.RemoveAll(filepath.Dir(dir)); err != nil || !strings.Contains(dir, "turnout-vm-") {
			t.Errorf("%s: the log's directory %q cannot be removed: %v", what, dir, err)
		}
	}
}

// The edges' contracts hold on a kernel that has IPVS.
func TestPackages(t *testing.T) {
	dir := t.TempDir()
	var script strings.Builder
	script.WriteString("result=0\n")
	for p, tests := range packages() {
		binary := filepath.Join(dir, filepath.Base(p)+".test")
		//nolint:gosec // the arguments are words of their own
		if out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", binary, "../../"+p).CombinedOutput(); err != nil {
			t.Fatalf("build the tests of %s: %v\n%s", p, err, out)
		}
		script.WriteString("echo " + p + "; " + binary + " -test.run '" + tests + "' -test.v || result=1\n")
	}
	for _, s := range series() {
		t.Run(s, func(t *testing.T) {
			c := Config{Kernel: s, Timeout: 5 * time.Minute}
			status, out := inGuest(t, c, "sh", "-c", script.String()+"exit $result")
			if status != 0 || strings.Contains(out, "--- SKIP") || strings.Count(out, "\nPASS") != len(packages()) {
				t.Errorf("status %d, output:\n%s", status, out)
			}
		})
	}
}

func TestTheNewestKernelIsTaken(t *testing.T) {
	for _, tc := range []struct{ a, b string }{
		{"linux-image-6.1.0-57-amd64", "linux-image-6.1.0-9-amd64"},
		{"linux-image-6.12.117+deb12-amd64", "linux-image-6.12.12+bpo-amd64"},
	} {
		if !newer(tc.a, tc.b) || newer(tc.b, tc.a) {
			t.Errorf("%s must be newer than %s", tc.a, tc.b)
		}
	}
}
