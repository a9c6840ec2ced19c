package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The environment variables that this package heeds.
const (
	// binaryEnv names a turnout program to test, so that none is built.
	binaryEnv = "TURNOUT_E2E_BINARY"
	// buildFlagsEnv has more flags for the build, such as -race.
	buildFlagsEnv = "TURNOUT_E2E_BUILDFLAGS"
	// rootEnv, set to 1, makes tests fail that would be skipped for want of root. So does CI=true.
	rootEnv = "TURNOUT_REQUIRE_ROOT"
	// clusterEnv, set to 1, does the same for want of Kubernetes' programs; package cluster heeds it too.
	clusterEnv = "TURNOUT_REQUIRE_CLUSTER"
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

// run builds the program once for all tests.
func run(m *testing.M) int {
	if os.Geteuid() != 0 || os.Getenv(binaryEnv) != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "turnout-e2e-")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }() // it is the system's place for what nobody needs
		err = build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build turnout:", err)
		return 1
	}
	return m.Run()
}

func build(dir string) error {
	// One test runs the program as another user.
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	binary := filepath.Join(dir, "turnout")
	args := append([]string{"build"}, strings.Fields(os.Getenv(buildFlagsEnv))...)
	args = append(args, "-o", binary, "github.com/turnout-proxy/turnout/cmd/turnout")
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return os.Setenv(binaryEnv, binary)
}

// needRoot ends a test that cannot run: it is skipped, or fails where nothing may be skipped.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	const why = "needs root for network namespaces; run it with: sudo go test ./test/e2e/"
	if os.Getenv(rootEnv) == "1" || os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// needTool ends a test that lacks a program of the system.
func needTool(t testing.TB, name, from string) {
	t.Helper()
	if _, err := exec.LookPath(name); err == nil {
		return
	}
	why := fmt.Sprintf("needs %s: install %s", name, from)
	if os.Getenv(rootEnv) == "1" || os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// bothFlavours gives the iptables flavours, for a test that runs once with each. The test runs beside others.
func bothFlavours(t *testing.T) []string {
	t.Helper()
	needRoot(t)
	t.Parallel()
	flavours := []string{"nft", "legacy"}
	for _, flavour := range flavours {
		needTool(t, "iptables-"+flavour+"-restore", "iptables")
		needTool(t, "ip6tables-"+flavour+"-restore", "iptables")
	}
	return flavours
}
