package ruleset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Scope says what of the tables is a mode's own.
type Scope struct {
	Family model.Family
	// Tables are read in this order; one that the kernel lacks counts as empty if it is among Optional.
	Tables, Optional []string
	// Ours tells by table and name whether a chain is the mode's.
	Ours func(table, chain string) bool
	// Jumps are the rules in built-in chains that the mode writes.
	Jumps []Jump
}

// An Observation is what the tables hold of a mode: the chains that are its own by name, and its jumps into them,
// whoever wrote them.
type Observation struct {
	Chains map[ID]Body
	// Jumps are in the order in which the tables have them, from the top.
	Jumps []Jump
	// Pinned are own chains that a rule of somebody else's refers to: they can be emptied but not deleted.
	Pinned map[ID]bool
}

// Observe reads the tables.
func Observe(ctx context.Context, t xtables.Tables, s Scope) (*Observation, error) {
	o := &Observation{Chains: map[ID]Body{}, Pinned: map[ID]bool{}}
	for _, table := range s.Tables {
		data, err := t.Save(ctx, table)
		if err != nil && errors.Is(err, xtables.ErrUnsupported) && slices.Contains(s.Optional, table) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read table %s: %w", table, err)
		}
		chains, err := xtables.ParseSave(table, data, nil)
		if err != nil {
			return nil, fmt.Errorf("read table %s: %w", table, err)
		}
		o.take(s, table, chains)
	}
	return o, nil
}

// Program gives what was read in the form of a program.
func (o *Observation) Program() Program {
	jumps := slices.Clone(o.Jumps)
	slices.Reverse(jumps) // they were read from the top, and a program has them in the order of prepending
	return Program{Chains: o.Chains, Jumps: jumps}
}

// Chain gives the state of one chain.
func (o *Observation) Chain(id ID) State {
	b, ok := o.Chains[id]
	return State{b, ok}
}

// Count gives the number of chains and of rules, jumps among them.
func (o *Observation) Count() (chains, rules int) {
	rules = len(o.Jumps)
	for _, b := range o.Chains {
		rules += b.Count()
	}
	return len(o.Chains), rules
}

// take sorts the chains of one table into own and others'.
func (o *Observation) take(s Scope, table string, chains []*xtables.SavedChain) {
	for _, c := range chains {
		if s.Ours(table, c.Name) {
			o.Chains[In(table, c.Name)] = canonical(s.Family, c.Rules)
			continue
		}
		for _, rule := range c.Rules {
			to := targetOf(rule)
			if !s.Ours(table, to) {
				continue
			}
			j := Jump{Table: table, From: c.Name, Rule: canonicalRule(s.Family, rule), To: to}
			if slices.Contains(s.Jumps, j) {
				o.Jumps = append(o.Jumps, j)
			} else {
				o.Pinned[In(table, to)] = true
			}
		}
	}
}

// canonical joins rules, each in the form that this program writes.
func canonical(f model.Family, rules []string) Body {
	out := make([]string, len(rules))
	for i, r := range rules {
		out[i] = canonicalRule(f, r)
	}
	return BodyOf(out...)
}

// canonicalRule leaves a rule that it cannot read as it stands; such a rule equals none that is wanted.
func canonicalRule(f model.Family, rule string) string {
	r, err := xtables.ParseRule(f, rule)
	if err != nil {
		return rule
	}
	return r.String()
}

// targetOf gives the word behind -j or -g.
func targetOf(rule string) string {
	for _, flag := range []string{"-j ", "-g "} {
		at := strings.LastIndex(rule, flag)
		if at > 0 && rule[at-1] != ' ' || at < 0 {
			continue
		}
		to, _, _ := strings.Cut(rule[at+len(flag):], " ")
		return to
	}
	return ""
}
