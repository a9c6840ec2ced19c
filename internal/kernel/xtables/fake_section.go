package xtables

import (
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A section is the part of a payload for one table while it is read: copies of the chains that it touched.
type section struct {
	name    string
	family  model.Family
	flavour Flavour
	table   *fakeTable
	outside map[string]bool
	sets    func(name string) bool
	lacking map[string]bool
	// changed holds the touched chains; nil for a removed one.
	changed map[string]*fakeChain
	// fresh are the rules that the section added. With the nft flavour they have no place yet that others can refer to.
	fresh map[*Rule]bool
	// refs counts jumps to a chain; filled from the table when a chain is first asked about.
	refs map[string]int
	// counted tells that refs is in step with the table.
	counted bool
}

// chain gives a chain as it is at this point of the section, or nil.
func (s *section) chain(name string) *fakeChain {
	if c, ok := s.changed[name]; ok {
		return c
	}
	return s.table.chains[name]
}

// touch gives a chain that may be changed, or nil if there is none.
func (s *section) touch(name string) *fakeChain {
	if c, ok := s.changed[name]; ok {
		return c
	}
	old := s.table.chains[name]
	if old == nil {
		return nil
	}
	c := &fakeChain{policy: old.policy, rules: slices.Clone(old.rules)}
	s.changed[name] = c
	return c
}

// declare does a line ":CHAIN POLICY [counters]": a user's chain is made, or flushed if it is there.
func (s *section) declare(text string) error {
	f := strings.Fields(text)
	if len(f) < 2 {
		return refuse("chain line %q has no policy", text)
	}
	name, policy := f[0], f[1]
	if isBase(s.name, name) {
		if policy != "ACCEPT" && policy != "DROP" {
			return refuse("bad policy %q of chain %s", policy, name)
		}
		s.touch(name).policy = policy
		return nil
	}
	if policy != "-" {
		return refuse("chain %s is not built in and cannot have the policy %s", name, policy)
	}
	if err := chainName(name); err != nil {
		return err
	}
	s.empty(name)
	return nil
}

func chainName(name string) error {
	switch {
	case len(name) > MaxChainName:
		return refuse("chain name %q is too long: %d bytes, %d at most", name, len(name), MaxChainName)
	case name == "" || name[0] == '-' || name[0] == '!':
		return refuse("chain name %q must not begin with '-' or '!'", name)
	case isTarget(name):
		return refuse("chain name %q clashes with a target", name)
	}
	return nil
}

// empty makes a chain, or takes all of its rules out.
func (s *section) empty(name string) {
	policy := "-"
	if old := s.chain(name); old != nil {
		policy = old.policy
		s.count(old.rules, -1)
	}
	s.changed[name] = &fakeChain{policy: policy}
}

func (s *section) count(rules []fakeRule, by int) {
	if !s.counted {
		return
	}
	for _, r := range rules {
		if r.rule.Target.Name != "" {
			s.refs[r.rule.Target.Name] += by
		}
	}
}

// references counts the jumps to a chain at this point of the section.
func (s *section) references(name string) int {
	if !s.counted {
		s.counted = true
		for chain, c := range s.table.chains {
			if _, changed := s.changed[chain]; !changed {
				s.count(c.rules, +1)
			}
		}
		for _, c := range s.changed {
			if c != nil {
				s.count(c.rules, +1)
			}
		}
	}
	return s.refs[name]
}

// command does a line "-X ...".
func (s *section) command(line string) error {
	op, rest, _ := strings.Cut(line, " ")
	name, rest, _ := strings.Cut(strings.TrimSpace(rest), " ")
	rest = strings.TrimSpace(rest)
	switch op {
	case "-N", "--new-chain":
		if err := chainName(name); err != nil {
			return err
		}
		if s.chain(name) != nil {
			return refuse("chain %s already exists", name)
		}
		s.empty(name)
		return nil
	case "-F", "--flush":
		return s.flush(name)
	case "-X", "--delete-chain":
		return s.remove(name)
	case "-A", "--append", "-I", "--insert", "-D", "--delete":
		return s.edit(op, name, rest)
	}
	return refuse("unknown command %q", op)
}

func (s *section) flush(name string) error {
	if name == "" {
		for _, n := range s.names() {
			s.empty(n)
		}
		return nil
	}
	if s.chain(name) == nil {
		return refuse("no chain by the name %s", name)
	}
	s.empty(name)
	return nil
}

func (s *section) names() []string {
	var names []string
	for n := range s.table.chains {
		if s.chain(n) != nil {
			names = append(names, n)
		}
	}
	for n, c := range s.changed {
		if c != nil && s.table.chains[n] == nil {
			names = append(names, n)
		}
	}
	return names
}

// remove deletes one chain, or every user's chain if no name is given.
func (s *section) remove(name string) error {
	if name != "" {
		return s.removeOne(name)
	}
	for _, n := range s.names() {
		if isBase(s.name, n) {
			continue
		}
		if err := s.removeOne(n); err != nil {
			return err
		}
	}
	return nil
}

func (s *section) removeOne(name string) error {
	c := s.chain(name)
	switch {
	case c == nil:
		return refuse("no chain by the name %s", name)
	case isBase(s.name, name):
		return refuse("chain %s is built in", name)
	case len(c.rules) > 0:
		return &refusal{text: "chain " + name + " is not empty", class: ErrConflict}
	case s.references(name) > 0:
		return &refusal{text: "chain " + name + " is in use", class: ErrConflict}
	}
	s.changed[name] = nil
	return nil
}

// edit appends, inserts or deletes one rule.
func (s *section) edit(op, name, rest string) error {
	c := s.touch(name)
	if c == nil {
		return refuse("no chain by the name %s", name)
	}
	at := len(c.rules)
	if op == "-I" || op == "--insert" {
		at = 0
	}
	first, more, _ := strings.Cut(rest, " ")
	n, err := strconv.Atoi(first)
	numbered := err == nil && op != "-A" && op != "--append"
	if numbered {
		if n < 1 || n > len(c.rules)+1 {
			return refuse("index %d of chain %s is out of range", n, name)
		}
		at, rest = n-1, strings.TrimSpace(more)
	}
	if op == "-D" || op == "--delete" {
		return s.delete(name, c, numbered, at, rest)
	}
	if at > 0 && numbered && s.flavour == NFT &&
		slices.ContainsFunc(c.rules, func(o fakeRule) bool { return s.fresh[o.rule] }) {
		return refuse("iptables-nft gets the place of rule %d wrong after other rules were added to chain %s", n, name)
	}
	r, err := ParseRule(s.family, rest)
	if err != nil {
		return refuse("%v", err)
	}
	if err := s.admit(name, r); err != nil {
		return err
	}
	added := fakeRule{text: r.String(), rule: r}
	c.rules = slices.Insert(c.rules, at, added)
	s.fresh[r] = true
	s.count([]fakeRule{added}, +1)
	return nil
}

// delete takes out a rule by its number, or the first of a text.
func (s *section) delete(name string, c *fakeChain, numbered bool, at int, text string) error {
	if numbered {
		return s.deleteNumber(name, c, at)
	}
	r, err := ParseRule(s.family, text)
	if err != nil {
		return refuse("%v", err)
	}
	text = r.String()
	return s.deleteAt(name, c, slices.IndexFunc(c.rules, func(o fakeRule) bool { return o.text == text }))
}

// deleteNumber deletes the rule at an index.
func (s *section) deleteNumber(name string, c *fakeChain, at int) error {
	if s.flavour == NFT && at < len(c.rules) && s.fresh[c.rules[at].rule] {
		return refuse("rule %d of chain %s was added in this section: iptables-nft cannot delete it by number", at+1, name)
	}
	return s.deleteAt(name, c, at)
}

func (s *section) deleteAt(name string, c *fakeChain, at int) error {
	if at < 0 || at >= len(c.rules) {
		return refuse("chain %s has no such rule", name)
	}
	s.count(c.rules[at:at+1], -1)
	c.rules = slices.Delete(c.rules, at, at+1)
	return nil
}
