package vm

import (
	"bytes"
	"context"
	_ "embed" // the guest's first script
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

//go:embed init
var initScript string

// A kernel is one that is unpacked and ready to boot.
type kernel struct {
	version string
	// image is what boots, initrd the initial file system, modules the directory with modules of this version.
	image, initrd, modules string
}

// bootModules are those that the guest needs to find its root and its ports; the rest is loaded from there.
func bootModules() []string {
	return []string{"virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console"}
}

// openKernel gives the newest kernel of a series, fetched and unpacked if it is not there yet.
func openKernel(ctx context.Context, series string, progress io.Writer) (*kernel, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("%w: find the cache directory: %w", ErrUnavailable, err)
	}
	dir := filepath.Join(cache, "turnout", "vm", "linux-"+series)
	if _, err := os.Stat(filepath.Join(dir, "boot")); err != nil {
		if err := fetch(ctx, series, dir, progress); err != nil {
			return nil, err
		}
	}
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil || len(images) == 0 {
		return nil, fmt.Errorf("%w: no kernel in %s: remove that directory and try again", ErrUnavailable, dir)
	}
	k := &kernel{image: images[0], initrd: filepath.Join(dir, "initrd"), modules: filepath.Join(dir, "lib", "modules")}
	k.version = strings.TrimPrefix(filepath.Base(k.image), "vmlinuz-")
	return k, k.writeInitrd(ctx)
}

// fetch gets Debian's package of a kernel series from where the host gets its packages and unpacks it. The package is
// checked by apt, and the directory appears complete or not at all.
func fetch(ctx context.Context, series, dir string, progress io.Writer) error {
	for tool, pkg := range map[string]string{"apt-get": "apt", "dpkg-deb": "dpkg", "depmod": "kmod"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: install %s: %w", ErrUnavailable, pkg, err)
		}
	}
	name, err := packageOf(ctx, series)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return fmt.Errorf("make the cache directory: %w", err)
	}
	half, err := os.MkdirTemp(filepath.Dir(dir), "half-")
	if err != nil {
		return fmt.Errorf("make the cache directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(half) }()
	_, _ = fmt.Fprintf(progress, "vm: fetching %s\n", name)
	if err := run(ctx, half, "apt-get", "-q", "download", name); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(half, "*.deb"))
	if err != nil || len(files) != 1 {
		return fmt.Errorf("%w: %s was not fetched", ErrUnavailable, name)
	}
	root := filepath.Join(half, "root")
	if err := run(ctx, half, "dpkg-deb", "-x", files[0], root); err != nil {
		return err
	}
	versions, err := os.ReadDir(filepath.Join(root, "lib", "modules"))
	if err != nil || len(versions) != 1 {
		return fmt.Errorf("%w: %s has no modules", ErrUnavailable, name)
	}
	if err := run(ctx, half, "depmod", "-b", root, versions[0].Name()); err != nil {
		return err
	}
	if err := os.Rename(root, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("put the kernel into the cache: %w", err)
	}
	return nil
}

// packageOf finds the newest package of a series that the host's package sources have: the plain flavour, signed or not.
func packageOf(ctx context.Context, series string) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", "linux-image-"+series).Output() //nolint:gosec // one word
	if err != nil {
		return "", fmt.Errorf("%w: ask apt for kernels: %w", ErrUnavailable, err)
	}
	plain := regexp.MustCompile(`^linux-image-` + regexp.QuoteMeta(series) + `[-+.][-+.0-9a-z]*-amd64$`)
	best := ""
	for name := range strings.FieldsSeq(string(out)) {
		if plain.MatchString(name) && !strings.Contains(name, "cloud") && !strings.Contains(name, "-rt-") && newer(name, best) {
			best = name
		}
	}
	if best == "" {
		return "", fmt.Errorf("%w: apt knows no linux-image-%s*-amd64: run apt-get update, and for 6.12 add Debian's backports",
			ErrUnavailable, series)
	}
	return best, nil
}

// newer compares names of packages by the numbers in them.
func newer(a, b string) bool {
	numbers := regexp.MustCompile(`\d+`)
	x, y := numbers.FindAllString(a, -1), numbers.FindAllString(b, -1)
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			return len(x[i]) > len(y[i]) || len(x[i]) == len(y[i]) && x[i] > y[i]
		}
	}
	return len(x) > len(y)
}

func run(ctx context.Context, dir string, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // the arguments are words of their own
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s: %w: %s", ErrUnavailable, strings.Join(argv, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// writeInitrd makes the initial file system: a shell and the modules that lead to the host's root.
func (k *kernel) writeInitrd(ctx context.Context) error {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("%w: install busybox-static: %w", ErrUnavailable, err)
	}
	shell, err := os.ReadFile(busybox)
	if err != nil {
		return fmt.Errorf("read busybox: %w", err)
	}
	order, err := k.loadOrder()
	if err != nil {
		return err
	}
	var a archive
	a.dir("bin")
	a.dir("modules")
	a.file("bin/busybox", shell)
	a.file("init", []byte(initScript))
	var names []string
	for _, m := range order {
		data, err := k.module(ctx, busybox, m)
		if err != nil {
			return fmt.Errorf("read a module: %w", err)
		}
		name := strings.TrimSuffix(filepath.Base(m), ".xz")
		a.file("modules/"+name, data)
		names = append(names, name)
	}
	a.file("modules/order", []byte(strings.Join(names, "\n")+"\n"))
	// Others may do the same at the moment: each writes a file of its own, and the last one stays.
	half, err := os.CreateTemp(filepath.Dir(k.initrd), "initrd-")
	if err != nil {
		return fmt.Errorf("write the initial file system: %w", err)
	}
	defer func() { _ = os.Remove(half.Name()) }() // gone already if all went well
	_, err = half.Write(a.close())
	if err := errors.Join(err, half.Close()); err != nil {
		return fmt.Errorf("write the initial file system: %w", err)
	}
	if err := os.Rename(half.Name(), k.initrd); err != nil {
		return fmt.Errorf("write the initial file system: %w", err)
	}
	return nil
}

// module reads a module, which may be compressed.
func (k *kernel) module(ctx context.Context, busybox, file string) ([]byte, error) {
	path := filepath.Join(k.modules, k.version, file)
	if !strings.HasSuffix(file, ".xz") {
		return os.ReadFile(path) //nolint:wrapcheck // the caller does
	}
	cmd := exec.CommandContext(ctx, busybox, "xzcat", path) //nolint:gosec // the arguments are words of their own
	return cmd.Output()                                     //nolint:wrapcheck // the caller does
}

// loadOrder gives the files of the modules for booting, each behind those that it needs.
func (k *kernel) loadOrder() ([]string, error) {
	text, err := os.ReadFile(filepath.Join(k.modules, k.version, "modules.dep"))
	if err != nil {
		return nil, fmt.Errorf("read the modules' needs: %w", err)
	}
	needs, byName := map[string][]string{}, map[string]string{}
	for line := range strings.Lines(string(text)) {
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
	for _, m := range bootModules() {
		if file, is := byName[m]; is { // else it is built in
			add(file)
		}
	}
	return order, nil
}
