package ruleset

import (
	"bytes"
	"slices"
	"strings"
)

// A Change is one chain that is to become another.
type Change struct {
	ID       ID
	Old, New State
}

// A Difference is all that separates what is from what is wanted.
type Difference struct {
	Changes []Change // sorted by chain
	Insert  []Jump   // in the order in which they are to be prepended
	Remove  []Jump
	// Pinned are chains that others' rules refer to: they can be emptied but not deleted.
	Pinned map[ID]bool
}

// Steps counts the chains and jumps to be written or removed.
func (d Difference) Steps() int { return len(d.Changes) + len(d.Insert) + len(d.Remove) }

// Diff compares a wanted program with what was read from the kernel.
func Diff(want Program, have *Observation) Difference {
	d := Difference{Pinned: have.Pinned}
	for id, b := range want.Chains {
		old := have.Chain(id)
		if next := (State{b, true}); old != next {
			d.Changes = append(d.Changes, Change{id, old, next})
		}
	}
	for id, b := range have.Chains {
		if _, wanted := want.Chains[id]; wanted {
			continue
		}
		old := State{b, true}
		if have.Pinned[id] && b == "" {
			continue
		}
		d.Changes = append(d.Changes, Change{ID: id, Old: old})
	}
	d.Sort()
	d.Insert, d.Remove = DiffJumps(want.Jumps, have.Jumps)
	return d
}

// Sort puts the changes in the order of their chains.
func (d Difference) Sort() {
	slices.SortFunc(d.Changes, func(a, b Change) int { return a.ID.Compare(b.ID) })
}

// DiffJumps compares the jumps that are wanted with those that are there. One that is there twice loses its copies.
func DiffJumps(want, have []Jump) (insert, remove []Jump) {
	for _, j := range want {
		if !slices.Contains(have, j) {
			insert = append(insert, j)
		}
	}
	seen := map[Jump]bool{}
	for _, j := range have {
		if !slices.Contains(want, j) || seen[j] {
			remove = append(remove, j)
		}
		seen[j] = true
	}
	return insert, remove
}

// A Section is the part of a payload that one table takes as a whole.
type Section struct {
	chains  []Change
	deleted []string
	jumps   []string
}

// Empty tells that a section does nothing.
func (s *Section) Empty() bool { return len(s.chains) == 0 && len(s.jumps) == 0 }

// Chain writes a chain anew, or deletes it; a pinned one is only emptied.
func (s *Section) Chain(id ID, next State, pinned bool) {
	s.chains = append(s.chains, Change{ID: id, New: next})
	if !next.Present && !pinned {
		s.deleted = append(s.deleted, id.Name)
	}
}

// Insert prepends a jump.
func (s *Section) Insert(j Jump) { s.jumps = append(s.jumps, "-I "+j.From+" "+j.Rule) }

// Remove puts a removal before the insertions, as a deleted chain must have lost its jumps.
func (s *Section) Remove(j Jump) { s.jumps = slices.Insert(s.jumps, 0, "-D "+j.From+" "+j.Rule) }

// Print writes the section as iptables-restore reads it, nothing if it is empty.
func (s *Section) Print(b *bytes.Buffer, table string) {
	if s.Empty() {
		return
	}
	b.WriteString("*" + table + "\n")
	for _, c := range s.chains { // a chain line empties the chain, or makes it
		b.WriteString(":" + c.ID.Name + " - [0:0]\n")
	}
	for _, c := range s.chains {
		for r := range c.New.Body.Rules() {
			b.WriteString("-A ")
			b.WriteString(c.ID.Name)
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

// LineAt finds the line of a payload (counted from 1), and the chain that it speaks of.
func LineAt(payload []byte, number int) (id ID, rule string) {
	table := ""
	for raw := range bytes.Lines(payload) {
		line := strings.TrimSuffix(string(raw), "\n")
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
			return In(table, name), ""
		case strings.HasPrefix(line, "-"):
			_, rest, _ := strings.Cut(line, " ")
			name, rule, _ := strings.Cut(rest, " ")
			return In(table, name), rule
		}
		return In(table, ""), ""
	}
	return ID{}, ""
}

// Rules counts the rules that a difference writes, by table.
func (d Difference) Rules() map[string]int {
	n := map[string]int{Filter: 0, NAT: 0}
	for _, c := range d.Changes {
		n[c.ID.Table] += c.New.Body.Count()
	}
	for _, j := range d.Insert {
		n[j.Table]++
	}
	return n
}
