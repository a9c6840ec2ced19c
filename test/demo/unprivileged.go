package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"github.com/turnout-proxy/turnout/test/netns"
)

// insideEnv marks a demo that was started in a user namespace: "probe" only finds out whether that works.
const insideEnv = "TURNOUT_DEMO_INSIDE"

// unprivileged shows the demo in a user namespace, where this user is root over network namespaces of his own. Where the
// system does not allow that it shows what works without.
func unprivileged(ctx context.Context, t *tool, s *screen) error {
	if !installed() {
		return offline(ctx, t, s, "the iptables tools are missing, too: apt-get install iptables")
	}
	probe := inside(ctx, "probe")
	if err := probe.Run(); err != nil {
		if ctx.Err() != nil {
			return errInterrupted
		}
		return offline(ctx, t, s, "this system does not let other users make network namespaces")
	}
	whole := inside(ctx, "whole")
	whole.Stdout, whole.Stderr = os.Stdout, os.Stderr
	whole.Cancel = func() error { return whole.Process.Signal(syscall.SIGTERM) }
	if err := whole.Run(); err != nil {
		return fmt.Errorf("run the demo in a user namespace: %w", err)
	}
	return nil
}

// inside prepares this program to be run in user and network namespaces of its own.
func inside(ctx context.Context, what string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"="+what)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	return cmd
}

// probeInside tells whether a small cluster can be built here.
func probeInside() error {
	lab, err := netns.New(netns.Topology{Nodes: 1})
	if err != nil {
		return fmt.Errorf("a cluster cannot be built: %w", err)
	}
	return lab.Close()
}
