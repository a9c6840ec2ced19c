package iptables

import (
	"iter"
	"maps"
	"slices"
	"strings"
)

// The tables that this mode writes.
const (
	tableFilter = "filter"
	tableNAT    = "nat"
	// tableMangle holds nothing of ours; a canary chain of upstream's may be there to clean up.
	tableMangle = "mangle"
)

// A chainID names one chain.
type chainID struct {
	table, name string
}

func (c chainID) compare(o chainID) int {
	if c.table != o.table {
		return strings.Compare(c.table, o.table)
	}
	return strings.Compare(c.name, o.name)
}

// A body is the rules of one chain in the canonical form of package xtables, one a line, without "-A CHAIN". The empty
// body is a chain without rules.
type body string

// rules walks over the rules of a body.
func (b body) rules() iter.Seq[string] {
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

// count gives the number of rules.
func (b body) count() int {
	if b == "" {
		return 0
	}
	return strings.Count(string(b), "\n") + 1
}

// bodyOf joins rules.
func bodyOf(rules ...string) body { return body(strings.Join(rules, "\n")) }

// A jump is a rule in a built-in chain that leads into one of ours.
type jump struct {
	table, from string
	// rule is the canonical text; to is the chain that it leads to.
	rule, to string
}

// A Program is the chains of both tables and the jumps into them.
type Program struct {
	chains map[chainID]body
	// jumps are in the order in which they are prepended, so the last one ends up first.
	jumps []jump
}

func newProgram() Program { return Program{chains: map[chainID]body{}} }

// ids gives the chains' names in order.
func (p Program) ids() []chainID { return slices.SortedFunc(maps.Keys(p.chains), chainID.compare) }

// String prints the program as iptables-save would, the jumps first.
func (p Program) String() string {
	var b strings.Builder
	for _, table := range []string{tableFilter, tableNAT} {
		b.WriteString("*" + table + "\n")
		for _, j := range p.jumps {
			if j.table == table {
				b.WriteString("-I " + j.from + " " + j.rule + "\n")
			}
		}
		for _, id := range p.ids() {
			if id.table != table {
				continue
			}
			b.WriteString(":" + id.name + " - [0:0]\n")
			for r := range p.chains[id].rules() {
				b.WriteString("-A " + id.name + " " + r + "\n")
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}
