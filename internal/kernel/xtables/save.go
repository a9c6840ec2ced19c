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
	var chains []*SavedChain
	byName := map[string]*SavedChain{}
	inTable := false
	for number := 1; len(data) > 0; number++ {
		var line []byte
		line, data, _ = bytes.Cut(data, []byte{'\n'})
		line = bytes.TrimRight(line, "\r ")
		if len(line) == 0 || line[0] == '#' || bytes.Equal(line, []byte("COMMIT")) {
			continue
		}
		if line[0] == '*' {
			if string(line[1:]) != table {
				return nil, fmt.Errorf("line %d: table %s where %s was asked for", number, line[1:], table)
			}
			inTable = true
			continue
		}
		if !inTable {
			return nil, fmt.Errorf("line %d: %.80q before a table", number, line)
		}
		switch {
		case line[0] == ':':
			name, rest, _ := strings.Cut(string(line[1:]), " ")
			policy, _, _ := strings.Cut(rest, " ")
			c := &SavedChain{Name: name, Policy: policy}
			byName[name] = c
			if keep == nil || keep(name) {
				chains = append(chains, c)
			}
		case line[0] == '[' || bytes.HasPrefix(line, []byte("-A ")):
			if line[0] == '[' { // counters
				_, line, _ = bytes.Cut(line, []byte("] "))
			}
			name, rule, _ := bytes.Cut(line[3:], []byte{' '})
			c := byName[string(name)]
			if c == nil {
				return nil, fmt.Errorf("line %d: rule of the undeclared chain %s", number, name)
			}
			if keep == nil || keep(c.Name) {
				c.Rules = append(c.Rules, string(rule))
			}
		default:
			return nil, fmt.Errorf("line %d: %.80q is no line of iptables-save", number, line)
		}
	}
	return chains, nil
}
