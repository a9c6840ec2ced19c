// Package route makes addresses local: a route of type local for one address lets this machine receive its packets
// without having the address on an interface. So no other program finds it among the machine's addresses, none takes it
// for the source of a connection, and nobody answers ARP for it. It decides nothing.
//
// Read Table first; Kernel is the real thing, Fake the one for tests, and one contract test runs on both. Routes of ours
// bear a protocol number, by which they are told from others' after a restart.
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

// A Local is an address that is local by a route of ours.
type Local struct {
	Addr netip.Addr
	// Source is the address that connections of this machine to Addr come from. It must be one of the machine's own;
	// invalid leaves the choice to the kernel, which takes Addr itself.
	Source netip.Addr
}

// Compare orders by address and source.
func (l Local) Compare(o Local) int {
	return cmp.Or(l.Addr.Compare(o.Addr), l.Source.Compare(o.Source))
}

// A Verb says what an Op does.
type Verb uint8

// Add makes a route, also beside one of somebody else's to the same address. Change gives one of ours another source.
// Remove takes one of ours away. Add and Remove do not mind if it is so already.
const (
	Add Verb = iota + 1
	Change
	Remove
)

// String gives the words of messages.
func (v Verb) String() string {
	return [...]string{"nothing", "add local route", "change local route", "remove local route"}[v]
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

// Table is the local routes of ours in a network namespace.
type Table interface {
	// List gives those of a family.
	List(ctx context.Context, family model.Family) ([]Local, error)

	// Apply carries out changes in their order and tells what became of each: nil, or an error of type *StepError. An Op
	// that fails does not stop the ones after it.
	Apply(ctx context.Context, ops []Op) []error
}

// StepError is how every function here reports a refusal.
type StepError = kernel.StepError
