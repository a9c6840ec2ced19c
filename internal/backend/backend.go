// Package backend is the contract between the loop and a mode: a backend is a code generator that turns a
// forward.Table into kernel objects of one kind. It decides no policy.
//
// A backend serves one IP family and belongs to one goroutine. It keeps the wanted program and remembers which parts of
// it the kernel has not acknowledged yet; the loop asks for plans and applies them. The conformance suite that every
// backend passes unchanged is in backendtest.
package backend

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
)

// A Backend turns a forwarding table into kernel state. Compile and Diff are pure; only Observe, Apply and Pulse touch
// the kernel.
type Backend interface {
	// Mode is the name that operators use: "iptables", "ipvs", ...
	Mode() string

	// Compile brings the wanted program up to date with the table. The delta says what changed since the last call; the
	// first call must pass every port. A nil table wants nothing at all, not even the fixed objects: applying the plan
	// that follows removes everything of this mode. It returns the ports that the mode cannot express, each with its
	// reason; everything else is compiled.
	Compile(t *forward.Table, d forward.Delta) []Problem

	// Observe reads what the kernel holds of ours.
	Observe(ctx context.Context) (Observed, error)

	// Diff gives the steps from what was observed to what is wanted. With nil it starts from what the kernel last
	// acknowledged, at a cost that depends on the change alone. Diff of the wanted state gives an empty plan.
	Diff(have Observed) Plan

	// Apply carries a plan out. No prefix of a plan leaves a reference to a missing object or opens a filtered frontend.
	// What failed stays wanted: it is part of the next plan.
	Apply(ctx context.Context, p Plan) Report

	// Trace follows one packet through the wanted program, object by object.
	Trace(p forward.Packet) (Trace, error)

	// Pulse is a cheap fingerprint of the kernel's objects, for noticing that somebody else changed them: as long as it
	// stays the same nothing did. It costs no more than a few system calls whatever the table's size.
	Pulse(ctx context.Context) (string, error)
}

// A Waiter is a backend with work for later, as taking away an endpoint whose connections have ended.
type Waiter interface {
	// Wake gives the time from which Diff(nil) may have something to do though nothing was compiled; zero is never. It is
	// called by whoever calls the other methods.
	Wake() time.Time
}

// A Problem is one Service port that a mode cannot serve as asked.
type Problem struct {
	Port   forward.PortName
	Reason string
	Err    error
	// Served tells that it is served all the same, but not quite as asked.
	Served bool
}

// Observed is what the kernel holds of one mode, as its backend read it.
type Observed interface {
	// Rows lists the frontends that the kernel's objects serve, for people; it needs no forwarding table.
	Rows() []Row
	// Objects counts the kernel objects that are ours, by kind ("chain", "rule").
	Objects() map[string]int
}

// A Plan is an ordered list of steps that one backend made and only it can apply.
type Plan interface {
	// Empty tells that nothing is to be done.
	Empty() bool
	// Steps counts the kernel objects to be written or removed.
	Steps() int
	// String prints the steps: the dry run.
	String() string
}

// A Report says what became of a plan.
type Report struct {
	// Err is set if the plan as a whole did not take effect; the kernel may hold a safe prefix of it.
	Err error
	// Failed are the ports that the kernel refused while the rest of the plan took effect.
	Failed map[forward.PortName]error
	// Problems are the ports that took effect in another form than they ask for, as the kernel lacks something.
	Problems []Problem
	// Steps counts what was carried out, Bytes what was handed to the kernel or its tool.
	Steps, Bytes int
	Took         time.Duration
}

// OK tells that everything took effect.
func (r Report) OK() bool { return r.Err == nil && len(r.Failed) == 0 }

// A Row is one frontend as the kernel serves it.
type Row struct {
	// Service is "namespace/service:port", as far as the kernel's objects tell.
	Service  string
	Kind     string
	Frontend string
	Proto    string
	// Do is "forward", "reject" or "drop".
	Do        string
	Reason    string `json:",omitempty"`
	Affinity  time.Duration
	Allow     []netip.Prefix
	Endpoints []RowEndpoint
	// LocalEndpoints are the pool of policy Local where it differs from Endpoints.
	LocalEndpoints []RowEndpoint `json:",omitempty"`
	// Scheduler is the kernel's name for how endpoints are chosen, in modes where there is a choice.
	Scheduler string `json:",omitempty"`
	// Draining are endpoints that get no new connections and keep those that they have.
	Draining []RowEndpoint `json:",omitempty"`
}

// A RowEndpoint is one endpoint of a Row. Share is the part of new connections that it gets, 0..1.
type RowEndpoint struct {
	Addr  netip.AddrPort
	Share float64
	// Weight and the numbers of connections are there in modes whose kernel objects have them.
	Weight           uint16 `json:",omitempty"`
	Active, Inactive uint32 `json:",omitempty"`
}

// A Trace is the way of one packet through a mode's objects.
type Trace struct {
	// Outcome has Do, Choices and, when it can be told from the objects, Reason. Port and Frontend are not filled.
	Outcome forward.Outcome
	// Steps are the objects that the packet met, in order, as a person would look them up.
	Steps []Step
}

// A Step is one object that a packet met.
type Step struct {
	// Where names the object ("nat KUBE-SERVICES"), What says what it did with the packet.
	Where, What string
}

// String gives one line.
func (s Step) String() string { return fmt.Sprintf("%-34s %s", s.Where, s.What) }
