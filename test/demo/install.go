package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// installed tells whether the iptables tools are there, in either flavour.
func installed() bool {
	for _, name := range []string{"iptables-restore", "iptables-nft-restore", "iptables-legacy-restore"} {
		for _, dir := range []string{"", "/usr/sbin/", "/sbin/"} {
			if _, err := exec.LookPath(dir + name); err == nil {
				return true
			}
		}
	}
	return false
}

// install makes sure that the iptables tools are there. On Debian and its descendants it gets them.
func install(ctx context.Context, s *screen) error {
	if installed() {
		return nil
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil {
		return errors.New("the iptables tools are missing: install the package iptables and run this again")
	}
	s.say("The iptables tools are missing. Installing the package iptables with apt-get ...")
	if err := aptGet(ctx, apt, "install"); err == nil {
		return nil
	}
	// A fresh machine has no package lists yet.
	if err := aptGet(ctx, apt, "update"); err != nil {
		return err
	}
	return aptGet(ctx, apt, "install")
}

func aptGet(ctx context.Context, apt, action string) error {
	args := []string{"-q", "-y", action}
	if action == "install" {
		args = append(args, "--no-install-recommends", "iptables")
	}
	cmd := exec.CommandContext(ctx, apt, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
		return fmt.Errorf("apt-get %s: %w: %s", action, err, lines[len(lines)-1])
	}
	return nil
}
