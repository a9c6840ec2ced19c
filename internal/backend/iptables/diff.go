package iptables

import (
	"bytes"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
)

// plan is the text of one iptables-restore call: a section for each table, each of which takes effect as a whole.
//
// The two tables cannot change in the same moment. Refusals stand in filter and only meet packets that nat did not
// translate, so what filter gains is written before nat changes, and what it loses goes after: at no moment is a
// connection neither forwarded nor refused, and no filtered frontend is open.
type plan struct {
	ruleset.Difference
	batch int
}

// Empty tells that nothing is to be done.
func (p *plan) Empty() bool { return p.Steps() == 0 }

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
	var first, last ruleset.Section
	early, nat, late := p.natSections()
	natChanges := !nat.Empty()
	for _, c := range p.Changes {
		if c.ID.Table == tableFilter {
			p.filterChange(c, natChanges, &first, &last)
		}
	}
	for _, j := range p.Insert {
		if j.Table == tableNAT {
			nat.Insert(j)
		} else {
			first.Insert(j)
		}
	}
	for _, j := range p.Remove {
		switch {
		case j.Table == tableNAT:
			nat.Remove(j)
		case natChanges:
			last.Remove(j)
		default:
			first.Remove(j)
		}
	}
	var b bytes.Buffer
	for _, s := range early {
		s.Print(&b, tableNAT)
	}
	first.Print(&b, tableFilter)
	nat.Print(&b, tableNAT)
	last.Print(&b, tableFilter)
	for _, s := range late {
		s.Print(&b, tableNAT)
	}
	mangle := ruleset.Section{}
	for _, c := range p.Changes {
		if c.ID.Table == tableMangle {
			mangle.Chain(c.ID, c.New, p.Pinned[c.ID])
		}
	}
	mangle.Print(&b, tableMangle)
	return b.Bytes()
}

// filterChange sorts one change of the filter table into what comes before the nat table's changes and what after.
func (p *plan) filterChange(c ruleset.Change, natChanges bool, first, last *ruleset.Section) {
	pinned := p.Pinned[c.ID]
	switch gained, both := union(c); {
	case !natChanges:
		first.Chain(c.ID, c.New, pinned)
	case !c.New.Present, !gained:
		last.Chain(c.ID, c.New, pinned)
	case both == c.New.Body:
		first.Chain(c.ID, c.New, pinned)
	default:
		first.Chain(c.ID, ruleset.State{Body: both, Present: true}, pinned)
		last.Chain(c.ID, c.New, pinned)
	}
}

// natSections splits the changes of the nat table: new chains that nothing refers to yet, what changes for packets, and
// chains that nothing refers to any more.
func (p *plan) natSections() (early []ruleset.Section, main ruleset.Section, late []ruleset.Section) {
	var fresh, gone [ranks][]ruleset.Change
	for _, c := range p.Changes {
		rank := rankOf(c.ID.Name)
		switch {
		case c.ID.Table != tableNAT:
		case rank < rankMain && !c.Old.Present:
			fresh[rank] = append(fresh[rank], c)
		case rank < rankMain && !c.New.Present:
			gone[rank] = append(gone[rank], c)
		default:
			main.Chain(c.ID, c.New, p.Pinned[c.ID])
		}
	}
	if p.batch == 0 || len(p.Changes) <= p.batch { // not worth more than one section
		for _, c := range slices.Concat(slices.Concat(fresh[:]...), slices.Concat(gone[:]...)) {
			main.Chain(c.ID, c.New, p.Pinned[c.ID])
		}
		return nil, main, nil
	}
	for rank, changes := range fresh {
		early = append(early, p.split(rank, changes)...)
	}
	for rank, changes := range slices.Backward(gone[:]) {
		late = append(late, p.split(rank, changes)...)
	}
	return early, main, late
}

// split puts changes of one rank into sections.
func (p *plan) split(rank int, changes []ruleset.Change) []ruleset.Section {
	batch := p.batch
	if rank == rankGroup { // groups refer to each other
		batch = max(batch, len(changes))
	}
	var out []ruleset.Section
	for part := range slices.Chunk(changes, batch) {
		out = append(out, p.sectionOf(part))
	}
	return out
}

func (p *plan) sectionOf(changes []ruleset.Change) ruleset.Section {
	var s ruleset.Section
	for _, c := range changes {
		s.Chain(c.ID, c.New, p.Pinned[c.ID])
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
func union(c ruleset.Change) (gained bool, both ruleset.Body) {
	if !c.Old.Present {
		return true, c.New.Body
	}
	going := map[string]bool{}
	for r := range c.Old.Body.Rules() {
		going[r] = true
	}
	for r := range c.New.Body.Rules() {
		gained = gained || !going[r]
		delete(going, r)
	}
	if len(going) == 0 {
		return true, c.New.Body // nothing goes: new rules or a new order
	}
	var all []string
	for r := range c.Old.Body.Rules() {
		if going[r] {
			all = append(all, r)
		}
	}
	if c.New.Body != "" {
		all = append(all, string(c.New.Body))
	}
	return gained, ruleset.BodyOf(all...)
}
