// Package backendtest is the conformance suite that every mode must pass unchanged. It takes clusters through the
// scripts of package scripts and through random events, and asks of each state what happens to packets: the oracle
// (forward.Lookup), the mode's tracer over a fake kernel whose operations fail now and then, and, as root, the real
// kernel with real connections in network namespaces. It knows no mode: what a mode must lend to it is a Mode.
//
// Besides what a script says, these hold after every step of every script and of every random sequence:
//
//   - a forwarding table built step by step is the one built from scratch, and so are the kernel objects;
//   - reading back after a plan was applied finds nothing to be done, also by a process that was just started;
//   - wherever a plan stops, each packet gets what the old or what the new table says (see safe for the one exception),
//     and a process that starts from there arrives at what is wanted;
//   - with nothing wanted, nothing of the mode is left and all that others made is as it was.
//
// Only tests may import it. Read Mode and Kernel, then test/scripts/README.md for the language, then run.go.
package backendtest

import (
	"testing"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Mode is what the suite needs of a proxy mode.
type Mode struct {
	// Name is for messages.
	Name string
	// Families are those that the mode serves.
	Families []model.Family
	// Fake gives a fresh fake kernel with nothing in it.
	Fake func(t testing.TB, f model.Family) Kernel
	// Real gives the kernel itself, as the calling thread's network namespace has it; the suite makes the namespace. All
	// methods of what it gives are called in that namespace, too. An error says why this machine cannot, and skips what
	// needs it. With a nil function the mode has no real form.
	Real func(t testing.TB, f model.Family) (Kernel, error)
	// Gradual tells that the mode's kernel takes one object after the other. In the middle of a change a packet that is
	// forwarded before and after may then meet part of the old and part of the new endpoints, each as either table says.
	Gradual bool
	// OwnsAddresses tells that the mode makes the addresses of Services this machine's own. What no frontend serves there
	// is then refused, where others let it pass by.
	OwnsAddresses bool
	// NoLoopback tells that the mode leaves packets for loopback addresses alone: it serves no node ports there.
	NoLoopback bool
	// Exceptions are the scripts that the mode is not held to, by file name without ".txtar", each with the reason.
	Exceptions map[string]string
}

// A Kernel is what a mode writes to. Processes come and go; the kernel stays.
type Kernel interface {
	// Open starts a backend that knows nothing yet, as a process does that was started anew.
	Open() backend.Backend
	// Fail sets what is asked before and after each step that a backend takes in the kernel; an error fails that step. Op
	// names the kind of step. Nil lets everything pass. A real kernel does nothing here.
	Fail(ask func(op string) error)
	// Dump prints all objects of the kernel, whoever made them, in a form that is the same for the same objects.
	Dump() (string, error)
	// AddForeign makes objects that belong to others and that the mode must never touch.
	AddForeign() error
	// RemoveForeign takes them away again.
	RemoveForeign() error
	// Damage takes away some of what the mode needs, as other software does that flushes everything.
	Damage() error
}

// An ObservedTracer is an observation that can follow packets through what the kernel holds. Where a backend's
// observations are such, the suite looks at what packets meet wherever a plan may stop. Of the context, only facts about
// the machine may be used.
type ObservedTracer interface {
	Trace(c *forward.Context, p forward.Packet) (backend.Trace, error)
}

// Run is the whole suite. It skips what the machine cannot do, with a message.
func Run(t *testing.T, m Mode) {
	t.Helper()
	t.Run("scripts", func(t *testing.T) { runScripts(t, m) })
	t.Run("random events", func(t *testing.T) { runRandom(t, m) })
	t.Run("kernel", func(t *testing.T) { runKernel(t, m) })
}
