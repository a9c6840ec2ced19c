package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Release gives the running kernel's version: its first two numbers, and all of it as uname -r prints it.
func Release() (major, minor int, text string, err error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return 0, 0, "", fmt.Errorf("ask for the kernel's version: %w", err)
	}
	text = unix.ByteSliceToString(u.Release[:])
	if _, err := fmt.Sscanf(text, "%d.%d", &major, &minor); err != nil {
		return 0, 0, text, fmt.Errorf("the kernel's version %q does not begin with two numbers: %w", text, err)
	}
	return major, minor, text, nil
}
