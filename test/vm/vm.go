// Package vm runs programs inside a virtual machine whose kernel has what this machine's may lack: IPVS, the dummy
// device, SCTP. The guest sees the host's file system, with a layer above it that takes what it writes and is gone with
// it; so test binaries, tools and their libraries are there, and nothing comes back but output and the exit status.
//
// Kernels are Debian's, unpacked in the user's cache directory. Nothing of the host is changed and no root is needed.
package vm

import (
	"context"
	_ "embed" // the guest's scripts
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

//go:embed guest
var guestScript string

// A Config says what kind of machine a program runs in. The zero value of each field stands for the default given.
type Config struct {
	// Kernel is the series: "6.1" (default) or "6.12".
	Kernel string
	// Memory in MiB, default 2048; CPUs default 2.
	Memory, CPUs int
	// Timeout ends the guest, booting included. Default 10 minutes.
	Timeout time.Duration
	// Dir is the working directory, default the caller's; Env are variables besides the guest's own, as "NAME=value".
	Dir string
	Env []string
	// Network gives the guest an interface from which the host's loopback is 10.0.2.2.
	Network bool
	// Output takes what the program prints, Progress what is being done. Default nowhere.
	Output, Progress io.Writer
}

func (c *Config) setDefaults() error {
	if c.Kernel == "" {
		c.Kernel = "6.1"
	}
	if c.Memory == 0 {
		c.Memory = 2048
	}
	if c.CPUs == 0 {
		c.CPUs = 2
	}
	if c.Timeout == 0 {
		c.Timeout = 10 * time.Minute
	}
	if c.Output == nil {
		c.Output = io.Discard
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	if c.Dir == "" {
		dir, err := os.Getwd()
		if err != nil {
			return fmt.Errorf("find the working directory: %w", err)
		}
		c.Dir = dir
	}
	return nil
}

// ErrUnavailable tells that this machine cannot run the guest, and what is missing.
var ErrUnavailable = errors.New("no virtual machine here")

// Run boots a guest, runs one program in it as root and gives its exit status. An error tells that the program did not
// come to its end; it names the file with what the guest's kernel said.
func Run(ctx context.Context, c Config, argv ...string) (status int, err error) {
	if err := c.setDefaults(); err != nil {
		return 0, err
	}
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return 0, fmt.Errorf("%w: install qemu-system-x86: %w", ErrUnavailable, err)
	}
	k, err := openKernel(ctx, c.Kernel, c.Progress)
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "turnout-vm-")
	if err != nil {
		return 0, fmt.Errorf("make a directory for the guest: %w", err)
	}
	keep := false
	defer func() {
		if !keep {
			_ = os.RemoveAll(dir)
		}
	}()
	if err := writeJob(dir, c, k, argv); err != nil {
		return 0, err
	}
	g := guest{Config: c, kernel: k, dir: dir, qemu: qemu}
	status, err = g.run(ctx)
	if err != nil {
		keep = true
		return 0, fmt.Errorf("%w; what the guest's kernel said is in %s", err, g.console())
	}
	return status, nil
}

// writeJob writes what the guest reads.
func writeJob(dir string, c Config, k *kernel, argv []string) error {
	var job strings.Builder
	job.WriteString("cd " + quote(c.Dir) + " || exit 125\n")
	for _, e := range append([]string{"TURNOUT_REQUIRE_IPVS=1"}, c.Env...) {
		name, value, _ := strings.Cut(e, "=")
		job.WriteString("export " + name + "=" + quote(value) + "\n")
	}
	job.WriteString("exec")
	for _, a := range argv {
		job.WriteString(" " + quote(a))
	}
	files := map[string]string{"guest": guestScript, "job.sh": job.String() + "\n", "modules": k.modules}
	if c.Network {
		files["network"] = ""
	}
	for name, text := range files {
		const readable = 0o644
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), readable); err != nil {
			return fmt.Errorf("write the guest's job: %w", err)
		}
	}
	return nil
}

// quote makes one word of the shell's of any text.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// A guest is one run of the virtual machine.
type guest struct {
	Config
	kernel *kernel
	dir    string
	qemu   string
}

func (g *guest) console() string { return filepath.Join(g.dir, "console.log") }
func (g *guest) status() string  { return filepath.Join(g.dir, "status") }

func (g *guest) args() []string {
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		// KVM hangs with ordinary kernels on some hosts that offer it; emulation works everywhere.
		"-accel", "tcg,thread=multi", "-cpu", "max", "-smp", strconv.Itoa(g.CPUs), "-m", strconv.Itoa(g.Memory),
		"-kernel", g.kernel.image, "-initrd", g.kernel.initrd,
		"-append", "console=ttyS0 panic=-1 loglevel=4 turnout.job=" + g.dir,
		"-serial", "file:" + g.console(),
		"-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
		"-device", "virtio-serial-pci",
		"-chardev", "file,id=output,path=/dev/stdout,append=on", "-device", "virtserialport,chardev=output,name=output",
		"-chardev", "file,id=status,path=" + g.status(), "-device", "virtserialport,chardev=status,name=status",
	}
	if g.Network {
		args = append(args, "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net")
	}
	return args
}

// run starts the machine and waits for its end.
func (g *guest) run(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, g.Timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, g.qemu, g.args()...) //nolint:gosec // the arguments are words of their own
	cmd.Stdout = g.Output
	var complaints strings.Builder
	cmd.Stderr = &complaints
	_, _ = fmt.Fprintf(g.Progress, "vm: booting Linux %s\n", g.kernel.version)
	began := time.Now()
	err := cmd.Run()
	if ctx.Err() != nil {
		return 0, fmt.Errorf("the guest was stopped after %s: %w", time.Since(began).Round(time.Second), ctx.Err())
	}
	if err != nil {
		return 0, fmt.Errorf("qemu: %w: %s", err, strings.TrimSpace(complaints.String()))
	}
	text, err := os.ReadFile(g.status())
	if err != nil {
		return 0, fmt.Errorf("read the exit status: %w", err)
	}
	status, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, errors.New("the guest ended before the program did")
	}
	_, _ = fmt.Fprintf(g.Progress, "vm: exit status %d after %s\n", status, time.Since(began).Round(time.Second))
	return status, nil
}
