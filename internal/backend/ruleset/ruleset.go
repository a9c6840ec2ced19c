// Package ruleset keeps chains of a mode's own, and jumps into them, in the tables of iptables: what is wanted, what is
// there, how the two differ as a payload of iptables-restore, and what the rules do with a packet. It knows no Service:
// which rules there are is for a mode to say.
//
// A program is text in the form that iptables-save prints, so that what is wanted and what is there compare as strings.
// It must not import a mode. Read this file, then walk.go.
package ruleset

import (
	"iter"
	"maps"
	"slices"
	"strings"
)

// The tables that modes write to.
const (
	Filter = "filter"
	NAT    = "nat"
	Mangle = "mangle"
)

// An ID names one chain of one table.
type ID struct{ Table, Name string }

// In gives the ID of a chain.
func In(table, name string) ID { return ID{Table: table, Name: name} }

// Compare orders by table and name.
func (c ID) Compare(o ID) int {
	if c.Table != o.Table {
		return strings.Compare(c.Table, o.Table)
	}
	return strings.Compare(c.Name, o.Name)
}

// A Body is the rules of one chain in the canonical form of package xtables, one a line, without "-A CHAIN". The empty
// body is a chain without rules.
type Body string

// BodyOf joins rules.
func BodyOf(rules ...string) Body { return Body(strings.Join(rules, "\n")) }

// Rules walks over the rules of a body.
func (b Body) Rules() iter.Seq[string] {
	return func(yield func(string) bool) {
		if b == "" {
			return
		}
		for line := range strings.SplitSeq(string(b), "\n") {
			if !yield(line) {
				return
			}
		}
	}
}

// Count gives the number of rules.
func (b Body) Count() int {
	if b == "" {
		return 0
	}
	return strings.Count(string(b), "\n") + 1
}

// A State is one chain as it is or was; not present is a chain that does not exist.
type State struct {
	Body    Body
	Present bool
}

// A Jump is a rule in a built-in chain that leads into one of ours.
type Jump struct {
	Table, From string
	// Rule is the canonical text; To is the chain that it leads to.
	Rule, To string
}

// A Program is the chains of all tables and the jumps into them.
type Program struct {
	Chains map[ID]Body
	// Jumps are in the order in which they are prepended, so the last one ends up first.
	Jumps []Jump
}

// NewProgram gives a program without anything.
func NewProgram() Program { return Program{Chains: map[ID]Body{}} }

// Sorted gives the chains' names in order.
func (p Program) Sorted() []ID { return slices.SortedFunc(maps.Keys(p.Chains), ID.Compare) }

// String prints the program as iptables-save would, the jumps first.
func (p Program) String() string {
	var b strings.Builder
	for _, table := range []string{Filter, Mangle, NAT} {
		used := false
		begin := func() {
			if !used {
				b.WriteString("*" + table + "\n")
			}
			used = true
		}
		for _, j := range p.Jumps {
			if j.Table == table {
				begin()
				b.WriteString("-I " + j.From + " " + j.Rule + "\n")
			}
		}
		for _, id := range p.Sorted() {
			if id.Table != table {
				continue
			}
			begin()
			b.WriteString(":" + id.Name + " - [0:0]\n")
			for r := range p.Chains[id].Rules() {
				b.WriteString("-A " + id.Name + " " + r + "\n")
			}
		}
		if used {
			b.WriteString("COMMIT\n")
		}
	}
	return b.String()
}
