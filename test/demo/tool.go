package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// clusterCIDR holds the pods of the lab.
const clusterCIDR = "10.60.0.0/16,fd60::/16"

// A tool is the program that is shown. It runs in a work directory that holds a copy of the manifests, so that the commands
// on the screen are short.
type tool struct{ binary, source, mode, dir string }

// newTool makes the work directory.
func newTool(o options) (*tool, error) {
	binary, err := filepath.Abs(o.binary)
	if err == nil {
		_, err = os.Stat(binary)
	}
	if err != nil {
		return nil, fmt.Errorf("there is no program %s (run make build first): %w", o.binary, err)
	}
	dir, err := os.MkdirTemp("", "turnout-demo-")
	if err != nil {
		return nil, fmt.Errorf("make a work directory: %w", err)
	}
	t := &tool{binary: binary, source: o.manifests, mode: o.mode, dir: dir}
	err = os.Mkdir(filepath.Join(dir, manifests), 0o755)
	if err == nil {
		err = copyManifests(o.manifests, filepath.Join(dir, manifests))
	}
	if err != nil {
		t.close()
		return nil, fmt.Errorf("copy the manifests: %w", err)
	}
	return t, nil
}

func (t *tool) close() {
	// What would be left is small, and in the system's place for temporary files.
	_ = os.RemoveAll(t.dir)
}

// offlineArgs completes a command that works from the manifests alone, as seen by node na.
func (t *tool) offlineArgs(args ...string) []string {
	return slices.Concat(args, []string{"--manifests", manifests, "--node", "na", "--cluster-cidr", clusterCIDR})
}

// run runs a command of the tool and gives what it printed. The statuses that trace uses for its answers are no errors.
func (t *tool) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, t.binary, args...)
	cmd.Dir = t.dir
	var out, diagnosis bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &diagnosis
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && args[0] == "trace" && exit.ExitCode() > 2 {
		err = nil
	}
	if err != nil {
		return out.String(), fmt.Errorf("turnout %s: %w: %s", strings.Join(args, " "), err, oneLine(diagnosis.String()))
	}
	return out.String(), nil
}

// print runs a command and shows it with its output.
func (t *tool) print(ctx context.Context, s *screen, args ...string) error {
	s.command("turnout " + strings.Join(args, " "))
	out, err := t.run(ctx, args...)
	if err != nil {
		return err
	}
	s.output(out)
	return nil
}

// knowsMode asks the program itself whether it has the mode.
func (t *tool) knowsMode(ctx context.Context) error {
	args := append(t.offlineArgs("ls"), "--proxy-mode", t.mode)
	cmd := exec.CommandContext(ctx, t.binary, args...)
	cmd.Dir = t.dir
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return errInterrupted
	}
	if err != nil {
		return fmt.Errorf("mode %q cannot be shown: %s", t.mode, strings.TrimPrefix(oneLine(string(out)), "turnout: "))
	}
	return nil
}

// oneLine gives the first line of a text.
func oneLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}
