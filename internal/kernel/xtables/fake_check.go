package xtables

import (
	"maps"
	"slices"
)

// check is what the kernel looks at when a whole table is handed to it: chains that call each other in a circle, and
// targets that a packet could meet at a place where they do not work.
func (t *fakeTable) check(table string) error {
	w := walk{table: t, state: map[string]int8{}}
	for _, name := range slices.Sorted(maps.Keys(t.chains)) {
		if err := w.visit(name); err != nil {
			return err
		}
	}
	// The order is callees first: from its end, every chain comes after all of its callers.
	from := map[string]map[string]bool{}
	for _, name := range slices.Backward(w.order) {
		if isBase(table, name) {
			from[name] = map[string]bool{name: true}
		}
		for _, callee := range t.chains[name].targets {
			if err := allowedAt(table, callee, from[name]); err != nil {
				return err
			}
			if t.chains[callee] == nil || len(from[name]) == 0 {
				continue
			}
			if from[callee] == nil {
				from[callee] = map[string]bool{}
			}
			maps.Copy(from[callee], from[name])
		}
	}
	return nil
}

// walk visits chains depth first.
type walk struct {
	table *fakeTable
	// state is 1 while a chain is being visited and 2 when it is done.
	state map[string]int8
	order []string
}

func (w *walk) visit(name string) error {
	switch w.state[name] {
	case 1:
		return refuse("chains call each other in a circle through %s", name)
	case 2:
		return nil
	}
	w.state[name] = 1
	for _, callee := range w.table.chains[name].targets {
		if w.table.chains[callee] != nil && w.state[callee] != 2 {
			if err := w.visit(callee); err != nil {
				return err
			}
		}
	}
	w.state[name] = 2
	w.order = append(w.order, name)
	return nil
}

// allowedAt refuses a target in a table, or in a chain that a packet can reach from the given built-in chains.
func allowedAt(table, target string, from map[string]bool) error {
	var only string
	var places []string
	switch target {
	case "DNAT", "REDIRECT":
		only, places = "nat", []string{"PREROUTING", "OUTPUT"}
	case "SNAT":
		only, places = "nat", []string{"POSTROUTING", "INPUT"}
	case "MASQUERADE":
		only, places = "nat", []string{"POSTROUTING"}
	case "REJECT":
		only, places = "filter", []string{"INPUT", "FORWARD", "OUTPUT"}
	default:
		return nil
	}
	if table != only {
		return refuse("%s works in table %s only", target, only)
	}
	for _, base := range slices.Sorted(maps.Keys(from)) {
		if !slices.Contains(places, base) {
			return refuse("%s does not work for packets from %s", target, base)
		}
	}
	return nil
}
