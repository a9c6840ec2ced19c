package xtables

import (
	"bytes"
	"fmt"
	"strings"
)

// A SavedChain is one chain as iptables-save prints it. Rules are the texts behind "-A CHAIN ", not yet parsed.
type SavedChain struct {
	Name string
	// Policy is "-" for a chain that users made, else the built-in chain's policy.
	Policy string
	Rules  []string
}

// ParseSave splits the output of iptables-save for one table into its chains, in their order. Text of other tables is
// an error, as is a rule of an undeclared chain. Empty input is a table without chains.
//
// The rules' texts share the memory of one copy of data for each chain that keep accepts; other chains are left out
// (a nil keep accepts all).
func ParseSave(table string, data []byte, keep func(chain string) bool) ([]*SavedChain, error) {
	p := saveParser{table: table, keep: keep, byName: map[string]*SavedChain{}}
	for number := 1; len(data) > 0; number++ {
		var line []byte
		line, data, _ = bytes.Cut(data, []byte{'\n'})
		if err := p.line(bytes.TrimRight(line, "\r ")); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
	}
	return p.chains, nil
}

// saveParser takes one line after the other.
type saveParser struct {
	table   string
	keep    func(chain string) bool
	inTable bool
	chains  []*SavedChain
	// byName holds all chains, also those that are not kept.
	byName map[string]*SavedChain
}

func (p *saveParser) keeps(chain string) bool { return p.keep == nil || p.keep(chain) }

func (p *saveParser) line(line []byte) error {
	switch {
	case len(line) == 0, line[0] == '#', bytes.Equal(line, []byte("COMMIT")):
		return nil
	case line[0] == '*':
		if string(line[1:]) != p.table {
			return fmt.Errorf("table %s where %s was asked for", line[1:], p.table)
		}
		p.inTable = true
		return nil
	case !p.inTable:
		return fmt.Errorf("%.80q before a table", line)
	case line[0] == ':':
		name, rest, _ := strings.Cut(string(line[1:]), " ")
		policy, _, _ := strings.Cut(rest, " ")
		c := &SavedChain{Name: name, Policy: policy}
		p.byName[name] = c
		if p.keeps(name) {
			p.chains = append(p.chains, c)
		}
		return nil
	}
	if line[0] == '[' { // counters
		_, line, _ = bytes.Cut(line, []byte("] "))
	}
	rule, ok := bytes.CutPrefix(line, []byte("-A "))
	if !ok {
		return fmt.Errorf("%.80q is no line of iptables-save", line)
	}
	chain, rule, _ := bytes.Cut(rule, []byte{' '})
	c := p.byName[string(chain)]
	if c == nil {
		return fmt.Errorf("rule of the undeclared chain %s", chain)
	}
	if p.keeps(c.Name) {
		c.Rules = append(c.Rules, string(rule))
	}
	return nil
}
