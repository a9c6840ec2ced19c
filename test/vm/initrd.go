package vm

import (
	"bytes"
	"context"
	"debug/elf"
	_ "embed" // the guest's first script
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

//go:embed init
var initScript string

// An archive is a cpio archive in the form that the kernel unpacks as its initial file system: "newc", a header of
// hexadecimal numbers, the name and the data, each padded to four bytes. Source: the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst.
type archive struct {
	b bytes.Buffer
	n int
}

// The modes of what is in an archive, as in struct stat (inode(7)).
const (
	modeDir  = 0o040755
	modeFile = 0o100755
)

func (a *archive) dir(name string)               { a.add(name, modeDir, nil) }
func (a *archive) file(name string, data []byte) { a.add(name, modeFile, data) }

func (a *archive) add(name string, mode int, data []byte) {
	a.n++
	const links = 1
	// The fields: inode, mode, user, group, links, time, size, device (two numbers), device of a special file (two),
	// length of the name with its end, checksum.
	fields := [13]int{a.n, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0}
	a.b.WriteString("070701")
	for _, f := range fields {
		fmt.Fprintf(&a.b, "%08x", f)
	}
	a.b.WriteString(name + "\x00")
	a.pad()
	a.b.Write(data)
	a.pad()
}

func (a *archive) pad() {
	for a.b.Len()%4 != 0 {
		a.b.WriteByte(0)
	}
}

// close gives the whole archive.
func (a *archive) close() []byte {
	a.add("TRAILER!!!", 0, nil)
	return a.b.Bytes()
}

// bootModules are those that the guest needs to find its root and its port; the others are loaded from there.
func bootModules() []string {
	return []string{"virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console"}
}

// initrd gives the initial file system of a kernel: a shell and the modules that lead to the host's root.
func (k *kernel) initrd(ctx context.Context) ([]byte, error) {
	busybox, err := staticShell()
	if err != nil {
		return nil, err
	}
	shell, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("read busybox: %w", err)
	}
	needs, err := os.ReadFile(filepath.Join(k.modules, k.version, "modules.dep"))
	if err != nil {
		return nil, fmt.Errorf("read what the kernel's modules need: %w", err)
	}
	var a archive
	a.dir("bin")
	a.dir("modules")
	a.file("bin/busybox", shell)
	a.file("init", []byte(initScript))
	var order strings.Builder
	for _, m := range loadOrder(string(needs), bootModules()) {
		data, err := k.module(ctx, busybox, m)
		if err != nil {
			return nil, fmt.Errorf("read the module %s: %w", m, err)
		}
		name := strings.TrimSuffix(filepath.Base(m), ".xz")
		a.file("modules/"+name, data)
		order.WriteString(name + "\n")
	}
	a.file("modules/order", []byte(order.String()))
	return a.close(), nil
}

// staticShell finds a busybox that needs no library, as the initial file system has none.
func staticShell() (string, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return "", fmt.Errorf("%w: no busybox: install busybox-static", ErrUnavailable)
	}
	f, err := elf.Open(path)
	if err != nil {
		return "", fmt.Errorf("read busybox: %w", err)
	}
	defer func() { _ = f.Close() }()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return "", fmt.Errorf("%w: %s needs libraries: install busybox-static in its place", ErrUnavailable, path)
		}
	}
	return path, nil
}

// module reads a module, which may be compressed.
func (k *kernel) module(ctx context.Context, busybox, file string) ([]byte, error) {
	path := filepath.Join(k.modules, k.version, file)
	if !strings.HasSuffix(file, ".xz") {
		return os.ReadFile(path) //nolint:wrapcheck // the caller does
	}
	return exec.CommandContext(ctx, busybox, "xzcat", path).Output() //nolint:wrapcheck // the caller does
}

// loadOrder gives the files of modules, each behind those that it needs, out of the text of modules.dep (modules.dep(5)).
// A name that is not in it stands for what is built into the kernel.
func loadOrder(dep string, names []string) []string {
	needs, byName := map[string][]string{}, map[string]string{}
	for line := range strings.Lines(dep) {
		file, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		needs[file] = strings.Fields(rest)
		name, _, _ := strings.Cut(filepath.Base(file), ".")
		byName[name] = file
	}
	var order []string
	seen := map[string]bool{}
	var add func(file string)
	add = func(file string) {
		if seen[file] {
			return
		}
		seen[file] = true
		for _, n := range needs[file] {
			add(n)
		}
		order = append(order, file)
	}
	for _, name := range names {
		if file, is := byName[name]; is {
			add(file)
		}
	}
	return order
}
