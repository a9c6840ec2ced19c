package vm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/turnout-proxy/turnout/test/filelock"
)

// The two ways to have a processor, as QEMU's option -accel calls them.
const (
	kvm = "kvm"
	tcg = "tcg"
)

// bootLimit is how long a guest may take until it starts the program. Emulated it takes some 8 s, and a minute on a
// machine with ten others at work.
const bootLimit = 3 * time.Minute

// A guest is one run of the virtual machine.
type guest struct {
	Config
	kernel *kernel
	qemu   string
	// dir is what the guest's own scripts read, on the host.
	dir string
	// nonce begins the lines that the guest's script says itself.
	nonce string
}

// console is the file with what the guest's kernel says.
func (g *guest) console() string { return filepath.Join(g.dir, "console.log") }

// machine gives QEMU's arguments for a machine that boots and has nothing but a console.
func (g *guest) machine(accel, console, parameters string) []string {
	processor := []string{"-accel", "tcg,thread=multi", "-cpu", "max"}
	if accel == kvm {
		processor = []string{"-accel", "kvm", "-cpu", "host"}
	}
	return append(processor,
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-smp", strconv.Itoa(g.CPUs), "-m", strconv.Itoa(g.Memory),
		"-kernel", g.kernel.image, "-initrd", filepath.Join(g.dir, "initrd"),
		"-append", "console=ttyS0 panic=-1 loglevel=4 "+parameters, "-serial", "file:"+console)
}

// args gives QEMU's arguments. The guest's output goes to the file descriptor 3.
func (g *guest) args() []string {
	args := append(g.machine(g.Accel, g.console(), "turnout.job="+g.dir),
		"-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
		"-device", "virtio-serial-pci", "-chardev", "file,id=output,path=/dev/fd/3",
		"-device", "virtserialport,chardev=output,name=output")
	if g.Network {
		args = append(args, "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net")
	}
	return args
}

// run starts the machine and passes on its output until the program has ended, or the machine.
func (g *guest) run(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, g.Timeout)
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	from, to, err := os.Pipe()
	if err != nil {
		return 0, fmt.Errorf("make a pipe for the guest's output: %w", err)
	}
	defer func() { _ = from.Close() }()
	var complaints bytes.Buffer
	cmd := exec.CommandContext(ctx, g.qemu, g.args()...)
	cmd.ExtraFiles, cmd.Stderr = []*os.File{to}, &complaints
	cmd.SysProcAttr = diesWithUs()
	runtime.LockOSThread() // what the guest dies with is this thread
	defer runtime.UnlockOSThread()
	_, _ = fmt.Fprintf(g.Progress, "vm: booting Linux %s (%s)\n", g.kernel.version, g.Accel)
	began, booted := time.Now(), false
	err = cmd.Start()
	_ = to.Close()
	if err != nil {
		return 0, fmt.Errorf("%w: start QEMU: %w", ErrUnavailable, err)
	}
	limit := time.AfterFunc(bootLimit, func() { stop(fmt.Errorf("%w within %s", ErrNotBooted, bootLimit)) })
	defer limit.Stop()
	s := stream{nonce: []byte(g.nonce), out: g.Output, ready: func() {
		limit.Stop()
		booted = true
		_, _ = fmt.Fprintf(g.Progress, "vm: ready after %s\n", time.Since(began).Round(100*time.Millisecond))
	}}
	ended, copyErr := s.copy(from)
	if ended || copyErr != nil {
		_ = cmd.Process.Kill() // nobody hears it any more
	}
	waitErr := cmd.Wait()
	took := time.Since(began).Round(time.Second)
	switch {
	case copyErr != nil:
		return 0, copyErr
	case ended:
		_, _ = fmt.Fprintf(g.Progress, "vm: exit status %d after %s\n", s.status, took)
		return s.status, nil
	case ctx.Err() != nil:
		return 0, fmt.Errorf("the guest was stopped after %s: %w", took, context.Cause(ctx))
	case waitErr != nil:
		return 0, fmt.Errorf("QEMU with %s: %w: %s", g.Accel, waitErr, strings.TrimSpace(complaints.String()))
	}
	return 0, g.whyGone(booted, strings.TrimSpace(complaints.String()))
}

// diesWithUs makes the kernel end a process when the thread that started it ends, and leaves it out of what a terminal
// sends to the foreground: we are told, and end it.
func diesWithUs() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// whyGone finds out why the machine ended by itself, from what its kernel said and what QEMU said.
func (g *guest) whyGone(booted bool, complaints string) error {
	text, err := os.ReadFile(g.console())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read what the guest's kernel said: %w", err)
	}
	panicked, last := panicLine(text)
	kind := ErrPoweredOff
	switch {
	case panicked != "" && booted:
		return fmt.Errorf("%w: %s", ErrPanicked, panicked)
	case !booted:
		kind = ErrNotBooted
	}
	switch {
	case complaints != "": // among others, that a signal from elsewhere ended it, which QEMU does not call a failure
		return fmt.Errorf("%w: QEMU says: %s", kind, complaints)
	case !booted && last != "":
		return fmt.Errorf("%w: %s", kind, last)
	}
	return kind
}

// panicLine gives the line in which a kernel gives up, or "", and the last lines before it, which tell more when a
// script of the guest's had failed.
func panicLine(console []byte) (panicked, last string) {
	const enough = 3
	var before []string
	lines := bufio.NewScanner(bytes.NewReader(console))
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if _, what, is := strings.Cut(line, "Kernel panic - not syncing: "); is {
			panicked = what
			break
		}
		if line != "" {
			before = append(before, line)
		}
	}
	return panicked, strings.Join(before[max(0, len(before)-enough):], "; ")
}

// probeLimit is how long a guest may take to say a word when KVM is tried. Where KVM works, it takes less than 2 s.
const probeLimit = 5 * time.Second

// bestAccel gives KVM if this kernel starts with it on this machine. Some machines offer KVM and then hang, so it is tried
// once after each boot of the machine, and the outcome is kept beside the kernel. Whatever goes wrong stands for no.
func (g *guest) bestAccel(ctx context.Context) string {
	device, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return tcg
	}
	_ = device.Close()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return tcg
	}
	unlock, err := filelock.Lock(ctx, g.kernel.dir+".lock")
	if err != nil {
		return tcg
	}
	defer unlock()
	path := g.kernel.dir + ".accel"
	if known, err := os.ReadFile(path); err == nil {
		if accel, is := strings.CutPrefix(string(known), string(boot)); is && (accel == kvm || accel == tcg) {
			return accel
		}
	}
	_, _ = fmt.Fprintf(g.Progress, "vm: trying KVM, for %s at most\n", probeLimit)
	accel := tcg
	if g.probe(ctx) {
		accel = kvm
	}
	if ctx.Err() == nil {
		const readable = 0o644
		_ = os.WriteFile(path, append(boot, accel...), readable) // else the next one tries again
	}
	return accel
}

// probe tells whether the kernel comes up with KVM and ends by itself.
func (g *guest) probe(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	console := filepath.Join(g.dir, "probe.log")
	cmd := exec.CommandContext(ctx, g.qemu, g.machine(kvm, console, "turnout.probe")...)
	cmd.SysProcAttr = diesWithUs()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Run(); err != nil {
		return false
	}
	said, err := os.ReadFile(console)
	return err == nil && bytes.Contains(said, []byte("turnout: the kernel is up"))
}
