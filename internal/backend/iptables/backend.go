// Package iptables is the iptables mode: it turns a forwarding table into chains of the nat and filter tables, in either
// flavour of the tools, and keeps them that way. It decides no policy and must not import watch, loop or client-go.
//
// A program is text in the form that iptables-save prints, so that what is wanted and what is there compare as strings.
// Read names.go for the chains, port.go for what one Service port gets, dispatch.go and pool.go for the two trees that
// keep a new connection cheap at any size, diff.go for the order in which tables change.
package iptables

import (
	"context"
	"fmt"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// Backend is the iptables mode for one IP family.
type Backend struct {
	tables xtables.Tables
	c      *compiler
	// jumps are those that the kernel acknowledged.
	jumps []ruleset.Jump
	// last counts the rules that the last Apply wrote, by table.
	last map[string]int
}

var _ backend.Backend = (*Backend)(nil)

// New gives a backend that writes to the given tables.
func New(t xtables.Tables, opt Options) *Backend {
	return &Backend{tables: t, c: newCompiler(opt)}
}

// Mode gives "iptables".
func (b *Backend) Mode() string { return "iptables" }

// Compile implements backend.Backend.
func (b *Backend) Compile(t *forward.Table, d forward.Delta) []backend.Problem {
	return b.c.update(t, d)
}

// Program gives the wanted program; it is for printing and must not be kept over the next Compile.
func (b *Backend) Program() ruleset.Program { return b.c.want }

// Observe implements backend.Backend.
func (b *Backend) Observe(ctx context.Context) (backend.Observed, error) {
	o, err := observe(ctx, b.tables, b.c.opt, b.c.want.Jumps == nil)
	if err != nil {
		return nil, err
	}
	return o, nil
}

// Diff implements backend.Backend.
func (b *Backend) Diff(have backend.Observed) backend.Plan {
	if o, ok := have.(*Observation); ok {
		return b.plan(b.diffObserved(o))
	}
	d := ruleset.Difference{}
	for id, old := range b.c.dirty {
		now, present := b.c.want.Chains[id]
		d.Changes = append(d.Changes, ruleset.Change{ID: id, Old: old, New: ruleset.State{Body: now, Present: present}})
	}
	d.Sort()
	d.Insert, d.Remove = ruleset.DiffJumps(b.c.want.Jumps, b.jumps)
	return b.plan(d)
}

func (b *Backend) plan(d ruleset.Difference) *plan {
	return &plan{Difference: d, batch: b.c.opt.SectionChains}
}

// diffObserved also takes the observation over as what the kernel acknowledged.
func (b *Backend) diffObserved(o *Observation) ruleset.Difference {
	d := ruleset.Diff(b.c.want, o.Observation)
	clear(b.c.dirty)
	for _, c := range d.Changes {
		b.c.dirty[c.ID] = c.Old
	}
	b.jumps = o.Jumps
	return d
}

// Pulse implements backend.Backend.
func (b *Backend) Pulse(ctx context.Context) (string, error) {
	pulse, err := b.tables.Pulse(ctx)
	if err != nil {
		return "", fmt.Errorf("read the tables' pulse: %w", err)
	}
	return pulse, nil
}

// Rules counts the rules that are wanted and those that the last Apply wrote, by table.
func (b *Backend) Rules() (total, last map[string]int) {
	total = map[string]int{tableFilter: b.c.rules[tableFilter], tableNAT: b.c.rules[tableNAT]}
	for _, j := range b.c.want.Jumps {
		total[j.Table]++
	}
	return total, b.last
}
