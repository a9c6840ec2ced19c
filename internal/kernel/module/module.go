// Package module has the kernel's modules loaded that somebody misses. It decides nothing: whether something is there is
// for the edge to find out by asking the kernel for it, as what is built in is in no list of modules.
package module

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/kernel"
)

// timeout bounds how long modprobe(8) may take for all modules.
const timeout = 20 * time.Second

// Load asks modprobe(8) for modules, each by its name, and goes on after one that fails. An error is of class
// kernel.ErrUnsupported; in a container without the host's modules or without the right to load any that is usual.
func Load(ctx context.Context, names ...string) error {
	for _, n := range names {
		if !valid(n) {
			return refusal(names, fmt.Sprintf("%q is no name of a module", n), nil)
		}
	}
	path, err := exec.LookPath("modprobe")
	if err != nil {
		return refusal(names, "modprobe is not installed", err)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, path, append([]string{"-a", "--"}, names...)...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &said, &said, time.Second
	if err := cmd.Run(); err != nil {
		return refusal(names, strings.Join(strings.Fields(kernel.Quote(said.String())), " "), err)
	}
	return nil
}

// valid tells whether a name can be one of a module: no option, no path.
func valid(name string) bool {
	if name == "" || len(name) > 55 || name[0] == '-' {
		return false
	}
	return strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_-") == ""
}

func refusal(names []string, reason string, err error) error {
	return &kernel.StepError{
		Op: "load", Object: fmt.Sprintf("modules %v", names), Reason: reason, Class: kernel.ErrUnsupported, Err: err,
	}
}
