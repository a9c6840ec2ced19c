// Package sysctl reads and writes kernel parameters in a file tree such as /proc/sys. It decides no values. A parameter
// that is missing or cannot be written is an error of class kernel.ErrUnsupported, which must never end the program:
// containers often have read-only trees, and parameters come and go with their modules.
package sysctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
)

// Where the trees are.
const (
	// ProcSys holds the parameters that the sysctl command knows. Those below net belong to the network namespace of the
	// calling thread.
	ProcSys = "/proc/sys"
	// Modules holds the parameters of modules, as in "nf_conntrack/parameters/hashsize".
	Modules = "/sys/module"
)

// A Tree is a directory of parameters. Names are paths below it, with slashes: "net/ipv4/conf/eth0.100/rp_filter".
type Tree struct{ root string }

// New gives the tree at a directory. It need not exist.
func New(root string) Tree { return Tree{root: root} }

// A StepError is how every function here reports a refusal.
type StepError = kernel.StepError

// path gives a parameter's file, if the name stays inside the tree.
func (t Tree) path(op, name string) (string, error) {
	if !fs.ValidPath(name) || name == "." || strings.ContainsAny(name, "\x00\n\\") {
		return "", &StepError{
			Op: op, Object: fmt.Sprintf("parameter %q", name), Reason: "not a path of names with slashes between them",
			Class: kernel.ErrInvalid,
		}
	}
	return filepath.Join(t.root, filepath.FromSlash(name)), nil
}

// Read gives a parameter's value without the white space around it.
func (t Tree) Read(name string) (string, error) {
	path, err := t.path("read", name)
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", refusal("read", "parameter "+path, err)
	}
	return strings.TrimSpace(string(text)), nil
}

// ReadInt gives a parameter's value as a whole number.
func (t Tree) ReadInt(name string) (int, error) {
	text, err := t.Read(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, &StepError{
			Op: "read", Object: "parameter " + filepath.Join(t.root, name), Text: kernel.Quote(text),
			Reason: "not a whole number", Class: kernel.ErrInvalid,
		}
	}
	return n, nil
}

// Write sets a parameter, whatever it is. It never makes a file.
func (t Tree) Write(name, value string) error {
	path, err := t.path("write", name)
	if err != nil {
		return err
	}
	object := fmt.Sprintf("%s to parameter %s", value, path)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return refusal("write", object, err)
	}
	_, err = f.WriteString(value + "\n")
	if err = errors.Join(err, f.Close()); err != nil {
		return refusal("write", object, err)
	}
	return nil
}

// Ensure sets a parameter unless it has that value already, and tells whether it wrote. So a tree that is read-only but
// right is no error. If the value cannot be set the error names the present one.
func (t Tree) Ensure(name, value string) (bool, error) {
	have, err := t.Read(name)
	if err == nil && have == value {
		return false, nil
	}
	return t.set(name, value, have, err)
}

// Raise sets a parameter to a number unless it is at least that already, and tells whether it wrote.
func (t Tree) Raise(name string, least int) (bool, error) {
	have, err := t.ReadInt(name)
	if err == nil && have >= least {
		return false, nil
	}
	return t.set(name, strconv.Itoa(least), strconv.Itoa(have), err)
}

// set writes a value in place of have, unless the file is known to be missing.
func (t Tree) set(name, value, have string, read error) (bool, error) {
	if errors.Is(read, fs.ErrNotExist) || errors.Is(read, kernel.ErrInvalid) {
		return false, read
	}
	err := t.Write(name, value)
	if err == nil {
		return true, nil
	}
	if step, ok := errors.AsType[*StepError](err); ok && read == nil {
		step.Reason = fmt.Sprintf("%s; it stays at %s", step.Reason, have)
	}
	return false, err
}

// refusal says what is wrong with a parameter's file, and what to do.
func refusal(op, object string, err error) error {
	step := &StepError{Op: op, Object: object, Err: err, Class: kernel.ErrUnsupported}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		step.Reason = "it does not exist: its module is not loaded, or this kernel has none"
	case errors.Is(err, unix.EROFS):
		step.Reason = "the file system is read-only: run privileged, or set it on the host"
	case errors.Is(err, fs.ErrPermission):
		step.Reason = "permission denied: run as root and privileged, or set it on the host"
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE):
		step.Class = kernel.ErrInvalid
		step.Reason = "the kernel does not take this value"
	default:
		step.Class = nil
	}
	return step
}
