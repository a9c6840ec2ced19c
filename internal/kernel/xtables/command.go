package xtables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// lockWait is how long a tool waits for the lock that all iptables commands share. Unit: seconds, as the tools want it.
// It is also what kube-proxy waits.
const lockWait = "5"

// killWait is how long a killed tool may keep its pipes open before they are closed under it.
const killWait = 2 * time.Second

// maxReply bounds what is kept of a tool's messages, in bytes.
const maxReply = 64 << 10

// Command is the kernel's tables, by way of the installed iptables tools. It has no state of its own and may be used by
// several goroutines; the tools exclude each other. Its methods act in the network namespace of the calling thread.
type Command struct {
	family  model.Family
	flavour Flavour
	// restore and save are the full paths of the two programs.
	restore, save string
	version       string
}

var _ Tables = (*Command)(nil)

// Open finds the tools of a flavour: by the flavour's own names first (iptables-legacy-restore), then by the plain
// names if these are of the flavour. It fails with class ErrUnsupported if there are none.
func Open(family model.Family, flavour Flavour) (*Command, error) {
	return open(context.Background(), family, flavour, searchPath())
}

func open(ctx context.Context, family model.Family, flavour Flavour, dirs []string) (*Command, error) {
	base := program(family)
	var seen []string
	for _, name := range []string{base + "-" + string(flavour), base} {
		restore, save := find(dirs, name+"-restore"), find(dirs, name+"-save")
		if restore == "" || save == "" {
			continue
		}
		has, version, err := identify(ctx, restore)
		if err != nil {
			seen = append(seen, fmt.Sprintf("%s: %v", restore, err))
			continue
		}
		if has != flavour {
			seen = append(seen, fmt.Sprintf("%s is of the %s flavour", restore, has))
			continue
		}
		return &Command{family: family, flavour: flavour, restore: restore, save: save, version: version}, nil
	}
	reason := fmt.Sprintf("%s-%s-restore and -save are not on the PATH: install iptables", base, flavour)
	if len(seen) > 0 {
		reason = fmt.Sprintf("no %s-restore of the %s flavour (%s): install iptables",
			base, flavour, strings.Join(seen, "; "))
	}
	return nil, &StepError{
		Op: "find", Object: fmt.Sprintf("%s tools of flavour %s", base, flavour), Reason: reason, Class: ErrUnsupported,
	}
}

// program gives the name that the family's tools start with.
func program(family model.Family) string {
	if family == model.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// searchPath gives the directories to look for tools in. The system directories are always among them: services are
// often started without them.
func searchPath() []string {
	return append(filepath.SplitList(os.Getenv("PATH")), "/usr/local/sbin", "/usr/sbin", "/sbin")
}

func find(dirs []string, name string) string {
	for _, d := range dirs {
		path := filepath.Join(d, name)
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 && filepath.IsAbs(path) {
			return path
		}
	}
	return ""
}

// An identity is what a tool said of itself.
type identity struct {
	flavour Flavour
	version string
}

// identities remembers what tools said, as a start asks each of them several times. The zero value is ready.
type identities struct {
	mu    sync.Mutex
	known map[toolFile]identity
}

// A toolFile is a program as it was when it was asked.
type toolFile struct {
	path     string
	size     int64
	modified time.Time
}

var asked identities //nolint:gochecknoglobals // a memory of files, which are the machine's and not a caller's

// identify asks a tool for its flavour. Tools older than 1.8 name none; they are legacy.
func identify(ctx context.Context, path string) (Flavour, string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", "", fmt.Errorf("look for the tool: %w", err)
	}
	file := toolFile{path, st.Size(), st.ModTime()}
	asked.mu.Lock()
	defer asked.mu.Unlock()
	if id, has := asked.known[file]; has {
		return id.flavour, id.version, nil
	}
	flavour, version, err := askTool(ctx, path)
	if err == nil {
		if asked.known == nil {
			asked.known = map[toolFile]identity{}
		}
		asked.known[file] = identity{flavour, version}
	}
	return flavour, version, err
}

func askTool(ctx context.Context, path string) (Flavour, string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput()
	version := strings.TrimSpace(string(out))
	switch {
	case strings.Contains(version, "(nf_tables)"):
		return NFT, version, nil
	case strings.Contains(version, "(legacy)"):
		return Legacy, version, nil
	case err != nil:
		return "", "", fmt.Errorf("run with --version: %w", err)
	}
	return Legacy, version, nil
}

// Family tells the IP family.
func (c *Command) Family() model.Family { return c.family }

// Flavour tells the flavour.
func (c *Command) Flavour() Flavour { return c.flavour }

// Version is the tool's own line, such as "iptables-restore v1.8.9 (legacy)".
func (c *Command) Version() string { return c.version }

// Save implements Tables.
func (c *Command) Save(ctx context.Context, table string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, &StepError{Op: "save", Object: fmt.Sprintf("%s table %s", c.family, table), Err: err}
	}
	if exists, err := tableExists(c.family, c.flavour, table); err == nil && !exists {
		return nil, nil
	}
	return c.print(ctx, table)
}

// print runs the tool, which may make the table if it does not exist.
func (c *Command) print(ctx context.Context, table string) ([]byte, error) {
	object := fmt.Sprintf("%s table %s", c.family, table)
	var out bytes.Buffer
	cmd, reply := c.tool(ctx, c.save, "-t", table)
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		return nil, c.refusal(ctx, "save", object, nil, reply.String(), err)
	}
	text := out.Bytes()
	// The notice replaces the table's rules, on whichever stream, and the exit status may still be 0.
	for _, said := range []string{reply.String(), head(text, maxReply)} {
		if line := incompatible(said, table); line != "" {
			return nil, &StepError{
				Op: "save", Object: object, Class: ErrConflict,
				Reason: line + " (other software wrote rules that iptables cannot print)",
			}
		}
	}
	return text, nil
}

// incompatible finds the tool's notice that it cannot print the table.
func incompatible(said, table string) string {
	for line := range strings.Lines(said) {
		if strings.HasPrefix(line, "-") || strings.HasPrefix(line, ":") {
			continue
		}
		if strings.Contains(line, "is incompatible") && strings.Contains(line, "`"+table+"'") {
			return strings.TrimSpace(strings.TrimLeft(line, "# "))
		}
	}
	return ""
}

func head(text []byte, limit int) string { return string(text[:min(len(text), limit)]) }

// Restore implements Tables.
func (c *Command) Restore(ctx context.Context, payload []byte) error {
	cmd, reply := c.tool(ctx, c.restore, "-w", lockWait, "--noflush")
	cmd.Stdin = bytes.NewReader(payload)
	cmd.Stdout = reply
	if err := cmd.Run(); err != nil {
		return c.refusal(ctx, "restore", c.family.String()+" tables", payload, reply.String(), err)
	}
	return nil
}

// tool prepares a run whose messages go to the returned reply.
func (c *Command) tool(ctx context.Context, path string, args ...string) (*exec.Cmd, *bounded) {
	reply := &bounded{limit: maxReply}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stderr = reply
	cmd.WaitDelay = killWait
	return cmd, reply
}

// refusal turns a failed run into a StepError.
func (c *Command) refusal(ctx context.Context, op, object string, payload []byte, reply string, err error) error {
	step := &StepError{Op: op, Object: object, Err: err}
	if cause := ctx.Err(); cause != nil {
		step.Err = cause
		step.Reason = fmt.Sprintf("%s was stopped: %v", filepath.Base(c.restore), cause)
		return step
	}
	reason, line := digest(reply)
	step.Line, step.Reason = line, cmp.Or(reason, err.Error())
	if table, text := locate(payload, line); table != "" {
		step.Object = fmt.Sprintf("%s table %s", c.family, table)
		step.Text = text
	}
	status := -1
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status = exit.ExitCode()
	}
	if op == "restore" && step.Text == "COMMIT" && reason == "" {
		step.Reason = fmt.Sprintf("the kernel refused the section (%v)", err)
	}
	step.Class = classify(c.flavour, status, reply)
	return step
}

// bounded keeps the first limit bytes written to it and drops the rest.
type bounded struct {
	buf   bytes.Buffer
	limit int
}

func (b *bounded) Write(p []byte) (int, error) {
	if room := b.limit - b.buf.Len(); room > 0 {
		b.buf.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (b *bounded) String() string { return b.buf.String() }
