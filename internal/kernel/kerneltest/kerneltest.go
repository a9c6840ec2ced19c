// Package kerneltest gives a test a network namespace of its own. Only tests import it.
package kerneltest

import (
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Isolate moves the calling test into a new network namespace, with the loopback interface up, until the test ends. It
// skips the test without root.
//
// The namespace belongs to the calling goroutine's thread, and to the processes that it starts: a goroutine or a
// subtest that needs it must call Isolate itself, or be given what was opened inside. The thread ends with the test.
func Isolate(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("needs root for a network namespace of its own: run as root, or under `unshare -rn`")
	}
	// Never unlocked: the runtime ends a thread whose goroutine ends locked to it, and with it goes the namespace.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		tb.Fatalf("make a network namespace: %v", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		tb.Fatalf("find the loopback interface: %v", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		tb.Fatalf("set the loopback interface up: %v", err)
	}
}
