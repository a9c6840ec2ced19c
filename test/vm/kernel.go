package vm

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/test/filelock"
)

// A kernel is one that is unpacked and ready to boot.
type kernel struct {
	// version is what "uname -r" says, such as "6.1.0-37-amd64".
	version string
	// dir is the kernel's place in the cache, image what boots, modules the directory that is /lib/modules in the guest.
	dir, image, modules string
}

// openKernel gives the kernel of a series, fetched and unpacked if that was not done before. What is in the cache is
// used as long as it is there.
func openKernel(ctx context.Context, series string, progress io.Writer) (*kernel, error) {
	if !regexp.MustCompile(`^\d+\.\d+$`).MatchString(series) {
		return nil, fmt.Errorf("kernel %q: want a series such as 6.1", series)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("%w: find the cache directory: %w", ErrUnavailable, err)
	}
	dir := filepath.Join(cache, "turnout", "vm", "linux-"+series)
	if _, err := os.Stat(dir); err != nil {
		if err := fetch(ctx, series, dir, progress); err != nil {
			return nil, err
		}
	}
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return nil, fmt.Errorf("%w: %s does not hold a kernel: remove it and try again", ErrUnavailable, dir)
	}
	return &kernel{
		version: strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-"),
		dir:     dir, image: images[0], modules: filepath.Join(dir, "lib", "modules"),
	}, nil
}

// fetch gets Debian's package of a kernel series from where this machine gets its packages, and unpacks it. The package
// is checked by apt, and the directory appears complete or not at all. Of several processes one fetches, the others wait.
func fetch(ctx context.Context, series, dir string, progress io.Writer) error {
	for _, tool := range [][2]string{{"apt-get", "apt"}, {"apt-cache", "apt"}, {"dpkg-deb", "dpkg"}, {"depmod", "kmod"}} {
		if _, err := exec.LookPath(tool[0]); err != nil {
			return fmt.Errorf("%w: no %s: install %s", ErrUnavailable, tool[0], tool[1])
		}
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return fmt.Errorf("make the cache directory: %w", err)
	}
	unlock, err := filelock.Lock(ctx, dir+".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	names, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", "linux-image-"+series).Output()
	if err != nil {
		return fmt.Errorf("%w: ask apt for kernels: %w", ErrUnavailable, err)
	}
	name := newest(series, strings.Fields(string(names)))
	if name == "" {
		return fmt.Errorf("%w: apt has no package of Linux %s: run apt-get update; Debian 12 has 6.1, its backports have 6.12",
			ErrUnavailable, series)
	}
	half, err := os.MkdirTemp(filepath.Dir(dir), "half-")
	if err != nil {
		return fmt.Errorf("make the cache directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(half) }()
	_, _ = fmt.Fprintf(progress, "vm: fetching %s\n", name)
	if err := run(ctx, half, "apt-get", "-q", "download", name); err != nil {
		return fmt.Errorf("%w (if it is gone from the mirror, run apt-get update)", err)
	}
	return unpack(ctx, half, dir, progress)
}

// unpack makes the kernel's directory of the one package in the directory half.
func unpack(ctx context.Context, half, dir string, progress io.Writer) error {
	files, err := filepath.Glob(filepath.Join(half, "*.deb"))
	if err != nil || len(files) != 1 {
		return fmt.Errorf("%w: apt-get download left %d packages, want one", ErrUnavailable, len(files))
	}
	_, _ = fmt.Fprintf(progress, "vm: unpacking %s\n", filepath.Base(files[0]))
	root := filepath.Join(half, "root")
	if err := run(ctx, half, "dpkg-deb", "-x", files[0], root); err != nil {
		return err
	}
	versions, err := os.ReadDir(filepath.Join(root, "lib", "modules"))
	if err != nil || len(versions) != 1 {
		return fmt.Errorf("%w: %s has no modules", ErrUnavailable, filepath.Base(files[0]))
	}
	if err := run(ctx, half, "depmod", "-b", root, versions[0].Name()); err != nil {
		return err
	}
	if err := os.Rename(root, dir); err != nil {
		return fmt.Errorf("put the kernel into the cache: %w", err)
	}
	return nil
}

// newest finds the package with the highest version of a series among names of packages, or gives "". Only the plain
// flavour will do: the one for clouds has no 9p, and the unsigned one has the same content.
func newest(series string, names []string) string {
	plain := regexp.MustCompile(`^linux-image-` + regexp.QuoteMeta(series) + `\.\d[-+.0-9a-z]*-amd64$`)
	flavour := regexp.MustCompile(`-(cloud|rt)-`)
	best := ""
	for _, name := range names {
		if plain.MatchString(name) && !flavour.MatchString(name) && newer(name, best) {
			best = name
		}
	}
	return best
}

// newer compares names of packages by the numbers in them.
func newer(a, b string) bool {
	digits := regexp.MustCompile(`\d+`)
	x, y := digits.FindAllString(a, -1), digits.FindAllString(b, -1)
	for i := range min(len(x), len(y)) {
		m, _ := strconv.Atoi(x[i]) // digits only
		n, _ := strconv.Atoi(y[i])
		if m != n {
			return m > n
		}
	}
	return len(x) > len(y)
}

// run runs a program of the host in a directory.
func run(ctx context.Context, dir string, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s: %w: %s", ErrUnavailable, strings.Join(argv, " "), err, bytes.TrimSpace(out))
	}
	return nil
}
