package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// built is where TestMain has put turnout, the demo and the manifests. Every user may run them.
var built string

func TestMain(m *testing.M) {
	status, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}

func buildAndRun(m *testing.M) (status int, err error) {
	built, err = os.MkdirTemp("", "turnout-demo-test-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(built)) }()
	for _, pkg := range []string{"cmd/turnout", "test/demo"} {
		out, err := exec.CommandContext(context.Background(), "go", "build", "-o", built, "../../"+pkg).CombinedOutput()
		if err != nil {
			return 1, fmt.Errorf("build %s: %w: %s", pkg, err, out)
		}
	}
	shop := filepath.Join(built, "shop")
	err = errors.Join(os.Chmod(built, 0o755), os.Mkdir(shop, 0o755), copyManifests("../../examples/shop", shop))
	if err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// demo runs the program as a user; an edit may change the command before it starts. It gives the exit status.
func demo(t *testing.T, edit func(*exec.Cmd), args ...string) (int, string, string) {
	t.Helper()
	args = append([]string{"-turnout", filepath.Join(built, "turnout"), "-manifests", filepath.Join(built, "shop")}, args...)
	cmd := exec.CommandContext(t.Context(), filepath.Join(built, "demo"), args...)
	var stdout, stderr bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = built, &stdout, &stderr
	if edit != nil {
		edit(cmd)
	}
	err := cmd.Run()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces; run it with: make test-netns (as root)")
	}
	if !installed() {
		t.Skip("needs the iptables tools: apt-get install iptables")
	}
}

func TestTheDemoKeepsItsPromises(t *testing.T) {
	needsRoot(t)
	status, stdout, stderr := demo(t, nil)
	if status != 0 || stderr != "" {
		t.Fatalf("status %d, stderr %q, stdout:\n%s", status, stderr, stdout)
	}
	for _, want := range []string{"9. Result", "$ turnout ls", "$ turnout trace", "14 of 14 promises kept"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the screen lacks %q:\n%s", want, stdout)
		}
	}
	if strings.Contains(stdout, "\x1b") {
		t.Error("the screen has colours although it is no terminal")
	}
}

func TestTheDemoFailsWhenNothingIsForwarded(t *testing.T) {
	needsRoot(t)
	// This one answers questions and forwards nothing.
	striker := filepath.Join(t.TempDir(), "turnout")
	script := "#!/bin/sh\nif [ \"$1\" = proxy ]; then echo gone on strike; exit 1; fi\n" +
		"exec " + filepath.Join(built, "turnout") + " \"$@\"\n"
	if err := os.WriteFile(striker, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	status, _, stderr := demo(t, nil, "-turnout", striker)
	if status != 1 || !strings.Contains(stderr, "gone on strike") {
		t.Errorf("status %d, stderr %q; want 1 and the daemon's last words", status, stderr)
	}
}

func TestAModeThatDoesNotExistIsOneClearLine(t *testing.T) {
	status, stdout, stderr := demo(t, nil, "-mode", "carrier-pigeon")
	if status != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "carrier-pigeon") {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
}

func TestWithoutRootTheDemoRunsInAUserNamespaceOrOffline(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	const nobody = 65534
	status, stdout, stderr := demo(t, func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	})
	whole, offline := strings.Contains(stdout, "of 14 promises kept"), strings.Contains(stdout, "sudo make demo")
	if status != 0 || whole == offline {
		t.Errorf("status %d, stderr %q, stdout:\n%s", status, stderr, stdout)
	}
}

func TestOfflineTheDemoShowsDecisionsWithoutAKernel(t *testing.T) {
	o := options{binary: filepath.Join(built, "turnout"), manifests: filepath.Join(built, "shop"), mode: "iptables"}
	tool, err := newTool(o)
	if err != nil {
		t.Fatal(err)
	}
	defer tool.close()
	var out strings.Builder
	if err := offline(t.Context(), tool, newScreen(&out, false), "a test"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"sudo make demo", "turnout ls", "verdict    forward", "SourceNotAllowed", "NoEndpoints"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the screen lacks %q:\n%s", want, out.String())
		}
	}
}

func TestAnEndpointIsTakenOutOfEverySlice(t *testing.T) {
	dir := t.TempDir()
	if err := copyManifests("../../examples/shop", dir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, endpointsFile)
	if err := removeEndpoint(path, "s3"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, name := range []string{"s1", "s2", "s3", "kind: EndpointSlice"} {
		got[name] = strings.Count(string(text), name)
	}
	want := map[string]int{"s1": 2, "s2": 2, "s3": 0, "kind: EndpointSlice": 2}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("mentions (-want +got):\n%s", diff)
	}
	if err := removeEndpoint(path, "s3"); err == nil {
		t.Error("removing a pod that is not there gave no error")
	}
}

func TestBarsShowSharesAndABrokenPromiseCounts(t *testing.T) {
	var out strings.Builder
	s := newScreen(&out, false)
	s.bars("all", []string{"s1", "s2"}, map[string]int{"s1": 3, "s2": 1}, 2)
	want := "\n   all   4 answered, 2 failed\n" +
		"      s1 ##################......  75 %\n      s2 ######..................  25 %\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("bars (-want +got):\n%s", diff)
	}
	s.promise(false, "something")
	if s.broken() != 1 {
		t.Errorf("%d broken promises, want 1", s.broken())
	}
}

func TestAnInterruptedDemoEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	o := options{binary: filepath.Join(built, "turnout"), manifests: filepath.Join(built, "shop"), mode: "iptables"}
	if err := show(ctx, o, &strings.Builder{}); err == nil {
		t.Error("got no error")
	}
}
