// Package route makes addresses local, so that this machine receives their packets. It decides nothing.
//
// There are two ways, and both are a Table. Kernel writes a route of type local for each address: no interface has the
// address then, so no program finds it among the machine's addresses or takes it for the source of a connection of its
// own. Dummy puts addresses on a device of kube-proxy's, for those who look for them there. What else each of them does,
// as answering ARP, is told by the tests in facts_test.go.
//
// Read Table first; Kernel and Dummy are the real things, Fake and FakeDummy those for tests, and one contract test runs
// on all. Routes of ours bear a protocol number and a metric, by which they are told from others' after a restart.
package route

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Protocol marks routes of ours. Numbers above 4 mean nothing to the kernel, and no routing daemon that iproute2 knows
// has this one. Source: linux/rtnetlink.h, rt_protos of iproute2.
const Protocol = 84

// Metric is that of our routes, of which the smallest wins. Routes by which the kernel makes the machine's own addresses
// local have 0, so a Service's never stands before one. And the kernel replaces a route by one of the same metric only:
// as nobody else has this one, nobody else's route is replaced.
const Metric = 848484

// A Local is an address that is local by our doing.
type Local struct {
	Addr netip.Addr
	// Source is the address that connections of this machine to Addr come from. It must be one of the machine's own;
	// invalid leaves the choice to the kernel, which takes Addr itself for IPv4, and mostly so for IPv6. An address on a
	// device has none.
	Source netip.Addr
}

// Compare orders by address and source.
func (l Local) Compare(o Local) int {
	return cmp.Or(l.Addr.Compare(o.Addr), l.Source.Compare(o.Source))
}

// A Verb says what an Op does.
type Verb uint8

// Add makes an address local, also where somebody else did. Change gives it another source, at once: there is no moment
// in between in which it is not local. Remove takes away what Add did. None minds if it is so already: Add changes, and
// Change adds.
const (
	Add Verb = iota + 1
	Change
	Remove
)

// String gives the words of messages.
func (v Verb) String() string {
	return [...]string{"nothing", "add local address", "change local address", "remove local address"}[v]
}

// An Op is one change.
type Op struct {
	Verb Verb
	Local
}

func (o Op) object() string {
	if o.Source.IsValid() {
		return o.Addr.String() + " from " + o.Source.String()
	}
	return o.Addr.String()
}

// check tells what is wrong with an Op before the kernel sees it; nil if nothing is.
func (o Op) check() error {
	if !o.Addr.IsValid() || o.Addr.Zone() != "" || o.Addr.Is4In6() {
		return fmt.Errorf("%s is no address of a Service", o.Addr)
	}
	if o.Source.IsValid() && model.FamilyOf(o.Source) != model.FamilyOf(o.Addr) {
		return fmt.Errorf("source %s is of another family", o.Source)
	}
	return nil
}

// Table is the addresses that are local by our doing in a network namespace.
//
// The kernel changes routes by itself. When a source ceases to be the machine's, IPv6 routes lose it, while IPv4 routes
// keep it and connections go out with an address that nobody answers to. When the loopback interface goes down, IPv6
// routes go. So whoever keeps a Table lists it anew when the machine's addresses have changed.
type Table interface {
	// List gives those of a family, sorted by address. Each address is there once.
	List(ctx context.Context, family model.Family) ([]Local, error)

	// Apply carries out changes in their order and tells what became of each: nil, or an error of type *StepError. An Op
	// that fails does not stop the ones after it. Each is one message to the kernel, and hundreds go in one system call.
	Apply(ctx context.Context, ops []Op) []error
}

// A Device is a Table whose addresses are on a device of its own, which must be there before any is added.
type Device interface {
	Table

	// Ensure makes the device unless it is there. The error is of class kernel.ErrUnsupported if this kernel has no such
	// devices, and kernel.ErrConflict if one of another kind has the name.
	Ensure(ctx context.Context) error

	// Delete removes the device with all addresses. It does nothing if there is none, and refuses with class
	// kernel.ErrConflict if the device is of another kind.
	Delete(ctx context.Context) error
}

// StepError is how every function here reports a refusal.
type StepError = kernel.StepError
