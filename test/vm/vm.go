// Package vm runs programs inside a virtual machine whose kernel has what this machine's may lack: IPVS, the dummy
// device, SCTP. The guest sees the host's file system, with a layer above it that takes what it writes and is gone with
// it; so test binaries, tools and their libraries are there, and nothing comes back but output and the exit status.
//
// Kernels are Debian's, unpacked in the user's cache directory. The host is left as it is, and root is not needed: the
// program is root in the guest, and reads of the host what its caller may read. The package knows nothing of what it
// runs and must not import the product. Read vm.go first, then guest.go and the script guest; kernel.go and initrd.go are about
// what is booted. README.md beside them is for whoever wants to run something.
package vm

import (
	"context"
	"crypto/rand"
	_ "embed" // the guest's script
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

//go:embed guest
var guestScript string

// KernelEnv names the variable that holds the series of the kernel for a Config that does not say.
const KernelEnv = "TURNOUT_VM_KERNEL"

// A Config says in what kind of machine a program runs. The zero value of each field stands for the default given.
type Config struct {
	// Kernel is the series of Debian's kernel, such as "6.12". Default: the variable KernelEnv, else "6.1".
	Kernel string
	// Accel is how the processor is made: "kvm", "tcg" (emulated, some 10 to 30 times slower), or "" for KVM if a guest
	// starts with it on this machine and for emulation otherwise.
	Accel string
	// Memory is the guest's, in MiB; default 2048. What it writes is kept there too.
	Memory int
	// CPUs is the number of the guest's processors; default 2.
	CPUs int
	// Timeout ends the guest, booting included; default 10 minutes.
	Timeout time.Duration
	// Dir is the working directory; default the caller's.
	Dir string
	// Env are variables as "NAME=value". The guest has them, the caller's CI, HOME, LANG, PATH, TMPDIR and TURNOUT_*, and
	// TURNOUT_REQUIRE_IPVS=1. Of one name the last counts.
	Env []string
	// Network gives the guest an interface, 10.0.2.15, from which the host's loopback is 10.0.2.2.
	Network bool
	// Output takes what the program prints, Progress what is done for it, in lines. Default: nowhere.
	Output, Progress io.Writer
}

// What can go wrong. Errors of Run wrap one of them, or the context's error when the time is over.
var (
	// ErrUnavailable tells that this machine cannot run a guest; the message names what is missing and how to get it.
	ErrUnavailable = errors.New("no virtual machine here")
	// ErrNotBooted tells that the guest did not come so far as to start the program.
	ErrNotBooted = errors.New("the guest did not start the program")
	// ErrPanicked tells that the guest's kernel gave up while the program ran.
	ErrPanicked = errors.New("the guest's kernel panicked")
	// ErrPoweredOff tells that the guest was gone, without a word of the kernel's, before the program had ended.
	ErrPoweredOff = errors.New("the guest was switched off before the program had ended")
)

const (
	defaultKernel  = "6.1"
	defaultMemory  = 2048
	defaultCPUs    = 2
	defaultTimeout = 10 * time.Minute
)

func (c *Config) setDefaults() error {
	if c.Kernel == "" {
		c.Kernel = os.Getenv(KernelEnv)
	}
	if c.Kernel == "" {
		c.Kernel = defaultKernel
	}
	if c.Memory == 0 {
		c.Memory = defaultMemory
	}
	if c.CPUs == 0 {
		c.CPUs = defaultCPUs
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.Output == nil {
		c.Output = io.Discard
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	switch c.Accel {
	case "", kvm, tcg:
	default:
		return fmt.Errorf("accelerator %q: want %s or %s", c.Accel, kvm, tcg)
	}
	var err error
	if c.Dir, err = filepath.Abs(c.Dir); err != nil {
		return fmt.Errorf("find the working directory: %w", err)
	}
	return nil
}

// Check tells whether Run can start a guest here: it fetches the kernel if that was not done before, and boots nothing.
// Its error wraps ErrUnavailable if something is missing.
func Check(ctx context.Context, c Config) error {
	if err := c.setDefaults(); err != nil {
		return err
	}
	_, err := prepare(ctx, c)
	return err
}

// prepare finds all that a guest is made of.
func prepare(ctx context.Context, c Config) (*guest, error) {
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return nil, fmt.Errorf("%w: no qemu-system-x86_64: install qemu-system-x86", ErrUnavailable)
	}
	if _, err := staticShell(); err != nil {
		return nil, err
	}
	k, err := openKernel(ctx, c.Kernel, c.Progress)
	if err != nil {
		return nil, err
	}
	return &guest{Config: c, kernel: k, qemu: qemu}, nil
}

// Run boots a guest, runs one program in it as root and gives its exit status, 128 and more if a signal ended it. The
// program's standard output and standard error are one. When it has ended, the guest is gone too, with all that was
// left running in it.
//
// An error tells that the program did not come to its end; then what the guest's kernel said is kept, and the message
// says where.
func Run(ctx context.Context, c Config, argv ...string) (status int, err error) {
	if len(argv) == 0 {
		return 0, errors.New("no program to run in the guest")
	}
	if err := c.setDefaults(); err != nil {
		return 0, err
	}
	g, err := prepare(ctx, c)
	if err != nil {
		return 0, err
	}
	if g.dir, err = os.MkdirTemp("", "turnout-vm-"); err != nil {
		return 0, fmt.Errorf("make a directory for the guest: %w", err)
	}
	defer func() { _ = os.RemoveAll(g.dir) }()
	if strings.ContainsAny(g.dir, " ,\"") {
		return 0, fmt.Errorf("directory %s: QEMU's command line cannot name it: set TMPDIR to one without space and comma", g.dir)
	}
	if err := g.write(ctx, argv); err != nil {
		return 0, err
	}
	if g.Accel == "" {
		g.Accel = g.bestAccel(ctx)
	}
	status, err = g.run(ctx)
	if err == nil || errors.Is(err, context.Canceled) {
		return status, err
	}
	kept := g.dir + ".log"
	if keepErr := os.Rename(g.console(), kept); keepErr != nil {
		return 0, err
	}
	return 0, fmt.Errorf("%w; what its kernel said is in %s", err, kept)
}

// write writes what the guest reads: its initial file system, its script and the program's job.
func (g *guest) write(ctx context.Context, argv []string) error {
	g.nonce = "turnout-guest-" + rand.Text()
	initrd, err := g.kernel.initrd(ctx)
	if err != nil {
		return err
	}
	job, err := jobScript(g.Dir, append(environment(os.Environ()), g.Env...), argv)
	if err != nil {
		return err
	}
	files := map[string][]byte{
		"initrd": initrd, "guest": []byte(guestScript), "job.sh": []byte(job), "modules": []byte(g.kernel.modules),
		"nonce": []byte(g.nonce),
	}
	if g.Network {
		files["network"] = nil
	}
	for name, data := range files {
		const readable = 0o644
		if err := os.WriteFile(filepath.Join(g.dir, name), data, readable); err != nil {
			return fmt.Errorf("write what the guest reads: %w", err)
		}
	}
	return nil
}

// environment gives what the program gets of the caller's variables.
func environment(all []string) []string {
	// In the guest the program is root, whose programs the caller may not have in reach.
	const path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	own := ""
	var list []string
	for _, v := range all {
		name, value, _ := strings.Cut(v, "=")
		switch {
		case name == "PATH":
			own = ":" + value
		case name == "CI", name == "HOME", name == "LANG", name == "TMPDIR", strings.HasPrefix(name, "TURNOUT_"):
			list = append(list, v)
		}
	}
	return append(list, path+own, "TURNOUT_REQUIRE_IPVS=1")
}

// jobScript gives the script that becomes the program.
func jobScript(dir string, env, argv []string) (string, error) {
	name := regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	var b strings.Builder
	b.WriteString("cd " + quote(dir) + " || exit 125\n")
	for _, v := range env {
		n, value, is := strings.Cut(v, "=")
		if !is || !name.MatchString(n) {
			return "", fmt.Errorf("variable %q: want NAME=value", v)
		}
		b.WriteString("export " + n + "=" + quote(value) + "\n")
	}
	b.WriteString("exec")
	for _, a := range argv {
		b.WriteString(" " + quote(a))
	}
	return b.String() + "\n", nil
}

// quote makes one word of the shell's of any text.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
