package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/test/vm"
)

// guestEnv marks a demo that was started in a virtual machine.
const guestEnv = "TURNOUT_DEMO_GUEST"

// guestLimit is how long a guest may live: emulated, the demo takes some minutes.
const guestLimit = 15 * time.Minute

// lacksIPVS tells why mode ipvs cannot be shown on this kernel; "" if it can.
func lacksIPVS(ctx context.Context) string {
	const listing = "/proc/net/ip_vs"
	if _, err := os.Stat(listing); err == nil {
		return ""
	}
	why := "modprobe is not installed"
	if path, err := exec.LookPath("modprobe"); err == nil {
		out, err := exec.CommandContext(ctx, path, "ip_vs").CombinedOutput()
		if err == nil {
			if _, err := os.Stat(listing); err == nil {
				return ""
			}
		}
		why = oneLine(string(out))
	}
	return "this machine's kernel has no IPVS (" + why + ")"
}

// inGuest shows the demo in a virtual machine with a kernel that has IPVS.
func inGuest(ctx context.Context, s *screen, why string) error {
	s.say("Mode ipvs cannot be shown right here: "+why+".",
		"So all of this happens in a virtual machine with a kernel of Debian's. Without KVM it takes some minutes.", "")
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	dir, err := os.Getwd()
	if err != nil {
		return fmt.Errorf("find this directory: %w", err)
	}
	status, err := vm.Run(ctx, vm.Config{
		Dir: dir, Env: []string{guestEnv + "=1"}, Output: os.Stdout, Progress: os.Stderr, Timeout: guestLimit,
	}, slices.Concat([]string{self}, os.Args[1:])...)
	switch {
	case errors.Is(err, vm.ErrUnavailable):
		return fmt.Errorf("%w; or show another mode: make demo", err)
	case err != nil:
		return fmt.Errorf("show the demo in a virtual machine: %w", err)
	case status != 0:
		return guestError(status)
	}
	return nil
}

// A guestError is the exit status of a demo in a virtual machine, which has said why.
type guestError int

func (s guestError) Error() string { return fmt.Sprintf("exit status %d", int(s)) }
