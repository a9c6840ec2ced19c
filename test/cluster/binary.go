package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/turnout-proxy/turnout/test/filelock"
)

// The programs that Binary can build.
const (
	// APIServer is what tests run against.
	APIServer = "kube-apiserver"
	// UpstreamProxy is what comparisons are made with.
	UpstreamProxy = "kube-proxy"
	// ControllerManager keeps EndpointSlices for Services with a selector.
	ControllerManager = "kube-controller-manager"
)

// The release that is built, as the version of its module and of the modules that are staged in its repository.
const (
	release = "v1.37.2"
	staged  = "v0.37.2"
)

// binaryEnv names a directory with programs that were built elsewhere; those that are in it are used.
const binaryEnv = "TURNOUT_K8S_BIN"

// Binary gives the path of one of the release's programs, and builds it if that was not done before on this machine.
// That takes some minutes and needs the go command and a module proxy; its output goes to progress. The programs are
// kept in the user's cache directory, never in the repository, and the product does not depend on them. Several
// processes may call it at once: one builds, the others wait.
func Binary(ctx context.Context, name string, progress io.Writer) (string, error) {
	if dir := os.Getenv(binaryEnv); dir != "" {
		if path := filepath.Join(dir, name); executable(path) {
			return path, nil
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a cache directory: %w", err)
	}
	dir := filepath.Join(cache, "turnout", "k8s-"+release)
	path := filepath.Join(dir, "bin", name)
	if executable(path) {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		return "", fmt.Errorf("make the cache directory: %w", err)
	}
	unlock, err := filelock.Lock(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if executable(path) {
		return path, nil
	}
	b := builder{dir: dir, progress: progress}
	if err := b.module(ctx); err != nil {
		return "", err
	}
	// The name appears only when the program is complete.
	half := path + ".half"
	if _, err := b.run(ctx, "build", "-o", half, command(name)); err != nil {
		return "", err
	}
	if err := os.Rename(half, path); err != nil {
		return "", fmt.Errorf("keep %s: %w", name, err)
	}
	return path, nil
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// A builder makes a module of its own that requires the release. The repository's module must not: the release pins
// its staged modules by paths that exist in its own repository only, so each needs a replacement.
type builder struct {
	dir      string
	progress io.Writer
}

// stagedModule finds the modules that the release replaces by paths in its own repository.
var stagedModule = regexp.MustCompile(`(?m)^\s*(?:replace\s+)?(k8s\.io/[a-z0-9.-]+) => \./staging/`)

// module writes the module's files, unless that was done.
func (b builder) module(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(b.dir, "go.sum")); err == nil {
		return nil
	}
	tools := fmt.Sprintf("//go:build tools\n\npackage tools\n\nimport (\n\t_ %q\n\t_ %q\n\t_ %q\n)\n",
		command(APIServer), command(UpstreamProxy), command(ControllerManager))
	head := "module k8sbuild\n\ngo 1.26\n\nrequire k8s.io/kubernetes " + release + "\n"
	for name, content := range map[string]string{"go.mod": head, "tools.go": tools} {
		if err := os.WriteFile(filepath.Join(b.dir, name), []byte(content), 0o644); err != nil {
			return fmt.Errorf("write the module of the build: %w", err)
		}
	}
	out, err := b.run(ctx, "mod", "download", "-json", "k8s.io/kubernetes@"+release)
	if err != nil {
		return err
	}
	var downloaded struct{ GoMod string }
	if err := json.Unmarshal(out, &downloaded); err != nil {
		return fmt.Errorf("read where the release was downloaded to: %w", err)
	}
	original, err := os.ReadFile(downloaded.GoMod)
	if err != nil {
		return fmt.Errorf("read the release's module file: %w", err)
	}
	var full bytes.Buffer
	full.WriteString(head)
	for _, m := range stagedModule.FindAllSubmatch(original, -1) {
		fmt.Fprintf(&full, "\nreplace %s => %s %s\n", m[1], m[1], staged)
	}
	if err := os.WriteFile(filepath.Join(b.dir, "go.mod"), full.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write the module of the build: %w", err)
	}
	_, err = b.run(ctx, "mod", "tidy")
	return err
}

// command gives the package of a program.
func command(name string) string { return "k8s.io/kubernetes/cmd/" + name }

// run runs the go command in the module and gives its standard output.
func (b builder) run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.dir
	// What the caller's build is told must not reach this one: race detector, coverage, vendoring, workspaces.
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off")
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, io.MultiWriter(&said, b.progress)
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		return nil, fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, lines[len(lines)-1])
	}
	return out.Bytes(), nil
}
