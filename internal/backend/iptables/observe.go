package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// An Observation is what the kernel's tables hold of this mode: the chains that are ours by name, and our jumps into
// them, whoever wrote them - a former run of this program or upstream's.
type Observation struct {
	chains map[chainID]body
	jumps  []jump
	// pinned are our chains that a rule of somebody else's refers to.
	pinned map[chainID]bool
	opt    Options
}

func (o *Observation) chain(id chainID) chainState {
	b, ok := o.chains[id]
	return chainState{b, ok}
}

// Objects counts chains and rules.
func (o *Observation) Objects() map[string]int {
	out := map[string]int{"chain": len(o.chains), "rule": len(o.jumps)}
	for _, b := range o.chains {
		out["rule"] += b.count()
	}
	return out
}

// observe reads the tables. With canaries, upstream's marker chains count as ours too, which they do only for cleaning
// up: while this program runs they harm nobody.
func observe(ctx context.Context, t xtables.Tables, opt Options, canaries bool) (*Observation, error) {
	o := &Observation{chains: map[chainID]body{}, pinned: map[chainID]bool{}, opt: opt}
	names := []string{tableFilter, tableNAT}
	if canaries {
		names = append(names, tableMangle)
	}
	for _, table := range names {
		data, err := t.Save(ctx, table)
		if err != nil && table == tableMangle && errors.Is(err, xtables.ErrUnsupported) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read table %s: %w", table, err)
		}
		chains, err := xtables.ParseSave(table, data, nil)
		if err != nil {
			return nil, fmt.Errorf("read table %s: %w", table, err)
		}
		o.take(table, chains, canaries)
	}
	return o, nil
}

// take sorts the chains of one table into ours and others'.
func (o *Observation) take(table string, chains []*xtables.SavedChain, canaries bool) {
	known := o.opt.jumps()
	for _, c := range chains {
		if ours(table, c.Name) || canaries && c.Name == chainCanary {
			o.chains[chainID{table, c.Name}] = o.canonical(c.Rules)
			continue
		}
		for _, rule := range c.Rules {
			to := targetOf(rule)
			if !strings.HasPrefix(to, "KUBE-") {
				continue
			}
			j := jump{table: table, from: c.Name, rule: o.canonicalRule(rule), to: to}
			if slices.Contains(known, j) {
				o.jumps = append(o.jumps, j)
			} else {
				o.pinned[chainID{table, to}] = true
			}
		}
	}
}

// canonical joins rules, each in the form that this program writes.
func (o *Observation) canonical(rules []string) body {
	out := make([]string, len(rules))
	for i, r := range rules {
		out[i] = o.canonicalRule(r)
	}
	return bodyOf(out...)
}

// canonicalRule leaves a rule that it cannot read as it stands; such a rule equals none that is wanted.
func (o *Observation) canonicalRule(rule string) string {
	r, err := xtables.ParseRule(o.opt.Family, rule)
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
