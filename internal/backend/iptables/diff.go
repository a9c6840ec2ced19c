package iptables

import (
	"bytes"
	"slices"
	"strings"
)

// A change is one chain that is to become another.
type change struct {
	id       chainID
	old, new chainState
}

// A difference is all that separates what is from what is wanted.
type difference struct {
	changes []change // sorted by chain
	insert  []jump   // in the order in which they are to be prepended
	remove  []jump
	// pinned are chains that others' rules refer to: they can be emptied but not deleted.
	pinned map[chainID]bool
}

// plan is the text of one iptables-restore call: a section for each table, each of which takes effect as a whole.
//
// The two tables cannot change in the same moment. Refusals stand in filter and only meet packets that nat did not
// translate, so what filter gains is written before nat changes, and what it loses goes after: at no moment is a
// connection neither forwarded nor refused, and no filtered frontend is open.
type plan struct {
	payload []byte
	steps   int
}

// Empty tells that nothing is to be done.
func (p *plan) Empty() bool { return len(p.payload) == 0 }

// Steps counts the chains and jumps to be written or removed.
func (p *plan) Steps() int { return p.steps }

// String gives the restore payload.
func (p *plan) String() string { return string(p.payload) }

// write turns a difference into a plan.
func (d difference) write() *plan {
	p := &plan{steps: len(d.changes) + len(d.insert) + len(d.remove)}
	if p.steps == 0 {
		return p
	}
	var first, nat, last section
	natChanges := false
	for _, c := range d.changes {
		if c.id.table == tableNAT {
			nat.chain(c.id, c.new, d.pinned[c.id])
			natChanges = true
		}
	}
	for _, c := range d.changes {
		if c.id.table != tableFilter {
			continue
		}
		switch gained, both := union(c); {
		case !natChanges:
			first.chain(c.id, c.new, d.pinned[c.id])
		case !c.new.present:
			last.chain(c.id, c.new, d.pinned[c.id])
		case !gained:
			last.chain(c.id, c.new, false)
		case both == c.new.body:
			first.chain(c.id, c.new, false)
		default:
			first.chain(c.id, chainState{both, true}, false)
			last.chain(c.id, c.new, false)
		}
	}
	for _, j := range d.insert {
		if j.table == tableNAT {
			nat.insert(j)
		} else {
			first.insert(j)
		}
	}
	for _, j := range d.remove {
		switch {
		case j.table == tableNAT:
			nat.remove(j)
		case natChanges:
			last.remove(j)
		default:
			first.remove(j)
		}
	}
	var b bytes.Buffer
	first.print(&b, tableFilter)
	nat.print(&b, tableNAT)
	last.print(&b, tableFilter)
	mangle := section{}
	for _, c := range d.changes {
		if c.id.table == tableMangle {
			mangle.chain(c.id, c.new, d.pinned[c.id])
		}
	}
	mangle.print(&b, tableMangle)
	p.payload = b.Bytes()
	return p
}

// union tells whether a chain gains a rule (or its order changes), and gives the new rules with those of the old ones
// behind them that are to go.
func union(c change) (gained bool, both body) {
	if !c.old.present {
		return true, c.new.body
	}
	was := map[string]bool{}
	for r := range c.old.body.rules() {
		was[r] = true
	}
	var all []string
	for r := range c.new.body.rules() {
		gained = gained || !was[r]
		delete(was, r)
		all = append(all, r)
	}
	if len(was) == 0 {
		return true, c.new.body // nothing goes: new rules or a new order
	}
	for r := range c.old.body.rules() {
		if was[r] {
			all = append(all, r)
		}
	}
	return gained, bodyOf(all...)
}

// A section is the part of a payload that one table takes as a whole.
type section struct {
	chains  []change
	deleted []string
	jumps   []string
}

func (s *section) chain(id chainID, next chainState, pinned bool) {
	s.chains = append(s.chains, change{id: id, new: next})
	if !next.present && !pinned {
		s.deleted = append(s.deleted, id.name)
	}
}

func (s *section) insert(j jump) { s.jumps = append(s.jumps, "-I "+j.from+" "+j.rule) }

// remove puts a removal before the insertions, as a deleted chain must have lost its jumps.
func (s *section) remove(j jump) { s.jumps = slices.Insert(s.jumps, 0, "-D "+j.from+" "+j.rule) }

func (s *section) print(b *bytes.Buffer, table string) {
	if len(s.chains) == 0 && len(s.jumps) == 0 {
		return
	}
	b.WriteString("*" + table + "\n")
	for _, c := range s.chains { // a chain line empties the chain, or makes it
		b.WriteString(":" + c.id.name + " - [0:0]\n")
	}
	for _, c := range s.chains {
		for r := range c.new.body.rules() {
			b.WriteString("-A ")
			b.WriteString(c.id.name)
			b.WriteByte(' ')
			b.WriteString(r)
			b.WriteByte('\n')
		}
	}
	for _, j := range s.jumps {
		b.WriteString(j + "\n")
	}
	for _, name := range s.deleted {
		b.WriteString("-X " + name + "\n")
	}
	b.WriteString("COMMIT\n")
}

// diff compares a wanted program with what was read from the kernel.
func diff(want Program, have *Observation) difference {
	d := difference{pinned: have.pinned}
	for id, b := range want.chains {
		old := have.chain(id)
		if next := (chainState{b, true}); old != next {
			d.changes = append(d.changes, change{id, old, next})
		}
	}
	for id, b := range have.chains {
		if _, wanted := want.chains[id]; wanted {
			continue
		}
		old := chainState{b, true}
		if have.pinned[id] && b == "" {
			continue
		}
		d.changes = append(d.changes, change{id: id, old: old})
	}
	slices.SortFunc(d.changes, func(a, b change) int { return a.id.compare(b.id) })
	d.insert, d.remove = diffJumps(want.jumps, have.jumps)
	return d
}

// diffJumps compares the jumps that are wanted with those that are there. One that is there twice loses its copies.
func diffJumps(want, have []jump) (insert, remove []jump) {
	for _, j := range want {
		if !slices.Contains(have, j) {
			insert = append(insert, j)
		}
	}
	seen := map[jump]bool{}
	for _, j := range have {
		if !slices.Contains(want, j) || seen[j] {
			remove = append(remove, j)
		}
		seen[j] = true
	}
	return insert, remove
}

// lineAt finds the line of a payload (counted from 1), and the chain that it speaks of.
func (p *plan) lineAt(number int) (id chainID, rule string) {
	table := ""
	for line := range strings.Lines(string(p.payload)) {
		line = strings.TrimSuffix(line, "\n")
		if after, ok := strings.CutPrefix(line, "*"); ok {
			table = after
		}
		number--
		if number > 0 {
			continue
		}
		switch {
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			return chainID{table, name}, ""
		case strings.HasPrefix(line, "-"):
			_, rest, _ := strings.Cut(line, " ")
			name, rule, _ := strings.Cut(rest, " ")
			return chainID{table, name}, rule
		}
		return chainID{table, ""}, ""
	}
	return chainID{}, ""
}
