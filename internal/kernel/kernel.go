// Package kernel holds what the packages below it, one per kernel interface, have in common: how a refused step is
// reported. It decides nothing and imports none of them.
//
// Each edge makes system calls for one kernel interface (or runs the one tool that does) behind an interface of few
// methods, and has a fake that refuses what the kernel refuses.
package kernel

import (
	"errors"
	"fmt"
	"strings"
)

// The classes of failure. An error of an edge is of at most one class; test with errors.Is. An error of no class is
// unexpected, and worth a retry.
var (
	// ErrBusy: a lock or a resource is held by somebody else at the moment. Try again.
	ErrBusy = errors.New("busy")
	// ErrUnsupported: this machine cannot do it: a tool, a module, a file or a permission is missing. Choose another way.
	ErrUnsupported = errors.New("not supported here")
	// ErrConflict: the object belongs to somebody else or is in use. Never overwrite it.
	ErrConflict = errors.New("in conflict")
	// ErrInvalid: the request itself is wrong. Leave that entry out; trying again is of no use.
	ErrInvalid = errors.New("refused as invalid")
)

// A StepError tells which step the kernel, or its tool, did not carry out and why.
type StepError struct {
	// Op is the verb ("restore", "delete"), Object what it was done to ("IPv4 table nat").
	Op, Object string
	// Line is the payload's line that was refused, counted from 1; 0 when it is not known or there is no payload.
	Line int
	// Text is the payload's line itself, cut to MaxText bytes.
	Text string
	// Reason is the kernel's or the tool's answer on one line.
	Reason string
	// Class is one of the package's classes, or nil.
	Class error
	// Err is the cause: an errno, an exit status, the context's error. It may be nil if Reason says it all.
	Err error
}

// MaxText bounds what a StepError quotes of a payload, in bytes.
const MaxText = 300

// Error gives one line: what was tried, where, and why not.
func (e *StepError) Error() string {
	var b strings.Builder
	b.WriteString(e.Op + " " + e.Object)
	if e.Line > 0 {
		fmt.Fprintf(&b, ", line %d", e.Line)
	}
	if e.Text != "" {
		fmt.Fprintf(&b, " %q", e.Text)
	}
	switch {
	case e.Reason != "":
		b.WriteString(": " + e.Reason)
	case e.Err != nil:
		b.WriteString(": " + e.Err.Error())
	case e.Class != nil:
		b.WriteString(": " + e.Class.Error())
	}
	return b.String()
}

// Unwrap gives the cause and the class, so that errors.Is finds either.
func (e *StepError) Unwrap() []error {
	var errs []error
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	if e.Class != nil {
		errs = append(errs, e.Class)
	}
	return errs
}

// Quote cuts a payload line for StepError.Text. It never cuts inside a UTF-8 sequence.
func Quote(line string) string {
	if len(line) <= MaxText {
		return line
	}
	const mark = "..."
	return strings.ToValidUTF8(line[:MaxText-len(mark)], "") + mark
}
