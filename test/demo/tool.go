package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
)

// clusterCIDR holds the pods of the lab.
const clusterCIDR = "10.60.0.0/16,fd60::/16"

// A tool is the program that is shown.
type tool struct{ binary, manifests, mode string }

func newTool(o options) *tool { return &tool{o.binary, o.manifests, o.mode} }

// offlineArgs completes a command that works from the manifests alone, as seen by node na.
func (t *tool) offlineArgs(args ...string) []string {
	return slices.Concat(args, []string{"--manifests", t.manifests, "--node", "na", "--cluster-cidr", clusterCIDR})
}

// run runs a command of the tool and gives what it printed. The statuses that trace uses for its answers are no errors.
func (t *tool) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, t.binary, args...)
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
	out, err := exec.CommandContext(ctx, t.binary, args...).CombinedOutput()
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
