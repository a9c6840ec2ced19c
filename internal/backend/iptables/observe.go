package iptables

import (
	"context"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// An Observation is what the kernel's tables hold of this mode: the chains that are ours by name, and our jumps into
// them, whoever wrote them - a former run of this program or upstream's.
type Observation struct {
	*ruleset.Observation
	opt Options
}

// Objects counts chains and rules.
func (o *Observation) Objects() map[string]int {
	chains, rules := o.Count()
	return map[string]int{"chain": chains, "rule": rules}
}

// observe reads the tables. With canaries, upstream's marker chains count as ours too, which they do only for cleaning
// up: while this program runs they harm nobody.
func observe(ctx context.Context, t xtables.Tables, opt Options, canaries bool) (*Observation, error) {
	scope := ruleset.Scope{
		Family: opt.Family, Tables: []string{tableFilter, tableNAT}, Ours: ours, Jumps: opt.jumps(),
	}
	if canaries {
		scope.Tables = append(scope.Tables, tableMangle)
		scope.Optional = []string{tableMangle}
		scope.Ours = func(table, chain string) bool { return ours(table, chain) || chain == chainCanary }
	}
	o, err := ruleset.Observe(ctx, t, scope)
	if err != nil {
		return nil, err
	}
	return &Observation{o, opt}, nil
}
