// Package ipvs is the IPVS mode: each frontend is one of the kernel's virtual servers, which are found by a hash, so a new
// connection and a change cost the same with any number of Services. It decides no policy and must not import watch,
// loop or client-go.
//
// A program has four sorts of objects: rules, the same for any number of Services, which ask IP sets what to do with a
// frontend; the sets; the virtual servers with their endpoints; and local routes, by which packets for a Service's
// address come to the virtual servers. Pods and this machine itself may be served from another pool than everybody
// else: then their packets are marked, and a second virtual server takes packets with that mark.
//
// Read names.go for the sets and chains, fixed.go for the rules, render.go for what one Service port gets, plan.go for
// the order of changes.
package ipvs

import (
	"context"
	"fmt"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/route"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// A Kernel is the edges that this mode writes to.
type Kernel struct {
	Rules   xtables.Tables
	Sets    ipset.Table
	Servers ipvs.Table
	// Routes makes the addresses of Services local. Former is the way in which another program, or this one with another
	// setting, may have done so: what is there goes once Routes has it. Former may be nil.
	Routes, Former route.Table
}

// Backend is the IPVS mode for one IP family.
type Backend struct {
	kernel Kernel
	c      *compiler
}

var (
	_ backend.Backend = (*Backend)(nil)
	_ backend.Waiter  = (*Backend)(nil)
)

// New gives a backend that writes to the given edges.
func New(k Kernel, opt Options) *Backend {
	_, opt.onDevice = k.Routes.(route.Device)
	return &Backend{kernel: k, c: newCompiler(opt)}
}

// Mode gives "ipvs".
func (b *Backend) Mode() string { return "ipvs" }

// Compile implements backend.Backend.
func (b *Backend) Compile(t *forward.Table, d forward.Delta) []backend.Problem {
	return b.c.update(t, d)
}

// Observe implements backend.Backend.
func (b *Backend) Observe(ctx context.Context) (backend.Observed, error) {
	o, err := observe(ctx, b.kernel, b.c.opt)
	if err != nil {
		return nil, err
	}
	return o, nil
}

// Diff implements backend.Backend.
func (b *Backend) Diff(have backend.Observed) backend.Plan {
	if o, ok := have.(*Observation); ok {
		b.c.observed(o)
	}
	return b.c.plan()
}

// Pulse implements backend.Backend. It shows changes of the rules; others' changes of sets, virtual servers and routes
// are found by reading back, as the kernel counts none of them.
func (b *Backend) Pulse(ctx context.Context) (string, error) {
	pulse, err := b.kernel.Rules.Pulse(ctx)
	if err != nil {
		return "", fmt.Errorf("read the rules' pulse: %w", err)
	}
	return pulse, nil
}
