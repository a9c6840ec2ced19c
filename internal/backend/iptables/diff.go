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
	difference
	batch int
}

// Empty tells that nothing is to be done.
func (p *plan) Empty() bool { return p.Steps() == 0 }

// Steps counts the chains and jumps to be written or removed.
func (p *plan) Steps() int { return len(p.changes) + len(p.insert) + len(p.remove) }

// String gives the restore payload.
func (p *plan) String() string { return string(p.payload()) }

// payload writes the difference as iptables-restore reads it. With batch > 0, chains that do not exist yet and chains
// that go away are written in sections of that many of their own, before and after the section that changes what
// packets meet.
//
// In the nft flavour iptables-restore keeps a sorted list of the chains that a section names and walks along it for
// every line, so one section of 10,000 chains costs a multiple of fifty small ones. The legacy flavour copies the whole
// table for each section and must have one.
func (p *plan) payload() []byte {
	if p.Empty() {
		return nil
	}
	d := p.difference
	var first, last section
	early, nat, late := d.natSections(p.batch)
	natChanges := len(nat.chains) > 0
	for _, c := range d.changes {
		if c.id.table == tableFilter {
			d.filterChange(c, natChanges, &first, &last)
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
	for _, s := range early {
		s.print(&b, tableNAT)
	}
	first.print(&b, tableFilter)
	nat.print(&b, tableNAT)
	last.print(&b, tableFilter)
	for _, s := range late {
		s.print(&b, tableNAT)
	}
	mangle := section{}
	for _, c := range d.changes {
		if c.id.table == tableMangle {
			mangle.chain(c.id, c.new, d.pinned[c.id])
		}
	}
	mangle.print(&b, tableMangle)
	return b.Bytes()
}

// filterChange sorts one change of the filter table into what comes before the nat table's changes and what after.
func (d difference) filterChange(c change, natChanges bool, first, last *section) {
	pinned := d.pinned[c.id]
	switch gained, both := union(c); {
	case !natChanges:
		first.chain(c.id, c.new, pinned)
	case !c.new.present, !gained:
		last.chain(c.id, c.new, pinned)
	case both == c.new.body:
		first.chain(c.id, c.new, pinned)
	default:
		first.chain(c.id, chainState{both, true}, pinned)
		last.chain(c.id, c.new, pinned)
	}
}

// natSections splits the changes of the nat table: new chains that nothing refers to yet, what changes for packets, and
// chains that nothing refers to any more.
func (d difference) natSections(batch int) (early []section, main section, late []section) {
	var fresh, gone [ranks][]change
	for _, c := range d.changes {
		rank := rankOf(c.id.name)
		switch {
		case c.id.table != tableNAT:
		case rank < rankMain && !c.old.present:
			fresh[rank] = append(fresh[rank], c)
		case rank < rankMain && !c.new.present:
			gone[rank] = append(gone[rank], c)
		default:
			main.chain(c.id, c.new, d.pinned[c.id])
		}
	}
	if batch == 0 || len(d.changes) <= batch { // not worth more than one section
		for _, c := range slices.Concat(slices.Concat(fresh[:]...), slices.Concat(gone[:]...)) {
			main.chain(c.id, c.new, d.pinned[c.id])
		}
		return nil, main, nil
	}
	for rank, changes := range fresh {
		early = append(early, d.split(rank, batch, changes)...)
	}
	for rank, changes := range slices.Backward(gone[:]) {
		late = append(late, d.split(rank, batch, changes)...)
	}
	return early, main, late
}

// split puts changes of one rank into sections.
func (d difference) split(rank, batch int, changes []change) []section {
	if rank == rankGroup { // groups refer to each other
		batch = max(batch, len(changes))
	}
	var out []section
	for part := range slices.Chunk(changes, batch) {
		out = append(out, d.sectionOf(part))
	}
	return out
}

func (d difference) sectionOf(changes []change) section {
	var s section
	for _, c := range changes {
		s.chain(c.id, c.new, d.pinned[c.id])
	}
	return s
}

// Ranks of the nat table's chains: a chain refers only to chains of lower rank, but for those of rankMain, which refer
// to all and to each other and change together.
const (
	rankMark = iota
	rankEndpoint
	rankGroup
	rankPool
	rankExternal
	rankFirewall
	rankMain
	ranks
)

func rankOf(chain string) int {
	switch {
	case chain == chainMarkMasq:
		return rankMark
	case strings.HasPrefix(chain, prefixGroup):
		return rankGroup
	case strings.HasPrefix(chain, prefixEndpoint):
		return rankEndpoint
	case strings.HasPrefix(chain, prefixDispatch):
		return rankMain
	case strings.HasPrefix(chain, prefixService), strings.HasPrefix(chain, prefixLocal):
		return rankPool
	case strings.HasPrefix(chain, prefixExternal):
		return rankExternal
	case strings.HasPrefix(chain, prefixFirewall):
		return rankFirewall
	}
	return rankMain
}

// union tells whether a chain gains a rule (or its order changes), and gives the old rules that are to go followed by the
// new ones: until nat has changed, a packet that both have a rule for keeps its old answer.
func union(c change) (gained bool, both body) {
	if !c.old.present {
		return true, c.new.body
	}
	going := map[string]bool{}
	for r := range c.old.body.rules() {
		going[r] = true
	}
	for r := range c.new.body.rules() {
		gained = gained || !going[r]
		delete(going, r)
	}
	if len(going) == 0 {
		return true, c.new.body // nothing goes: new rules or a new order
	}
	var all []string
	for r := range c.old.body.rules() {
		if going[r] {
			all = append(all, r)
		}
	}
	if c.new.body != "" {
		all = append(all, string(c.new.body))
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
func lineAt(payload []byte, number int) (id chainID, rule string) {
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

// rules counts the rules that a difference writes, by table.
func (d difference) rules() map[string]int {
	n := map[string]int{tableFilter: 0, tableNAT: 0}
	for _, c := range d.changes {
		n[c.id.table] += c.new.body.count()
	}
	for _, j := range d.insert {
		n[j.table]++
	}
	return n
}
