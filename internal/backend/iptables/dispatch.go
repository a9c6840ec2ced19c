package iptables

import (
	"net/netip"
	"slices"
	"strconv"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Sizes of the dispatch trees, in rules. Up to rootMax a root chain lists its frontends one after the other, as
// upstream does and as people expect to read them; above, it splits by address, and every chain below holds at most
// leafMax. So a packet passes at most 16 rules for each of a few levels instead of one for each frontend.
const (
	rootMax = 50
	leafMax = 16
)

// A tree turns the frontends that one root chain dispatches into a tree of chains. It is a trie over the frontends'
// keys, four bits a level; its shape depends on the set of keys alone, never on the order in which they came, and a
// change touches only the chains on the way to it.
//
// A key is the address, the protocol and the port, in nibbles; a node port's key has no address.
type tree struct {
	table, root string
	family      model.Family
	// hasAddr tells that keys begin with an address.
	hasAddr bool
	top     *branch
	// dropped are chains that fell away since the last flush.
	dropped []string
}

// A branch is either a leaf with entries or an inner node with kids.
type branch struct {
	count   int
	entries []entry
	kids    *[16]*branch
	// dirty tells that something below changed since the last flush; chain is the chain that it owns, "" if none.
	dirty bool
	chain string
}

// An entry is one frontend: its key and the rule that serves it.
type entry struct {
	key  string
	rule string
}

func newTree(table, root string, family model.Family, hasAddr bool) *tree {
	return &tree{table: table, root: root, family: family, hasAddr: hasAddr, top: &branch{dirty: true}}
}

// addrNibbles is the length of the address in a key.
func (t *tree) addrNibbles() int {
	switch {
	case !t.hasAddr:
		return 0
	case t.family == model.IPv6:
		return 32
	}
	return 8
}

// protoNibble and its reverse keep the protocol in four bits.
func protoNibble(p model.Protocol) byte {
	switch p {
	case model.UDP:
		return 1
	case model.SCTP:
		return 2
	case model.TCP:
	}
	return 0
}

func nibbleProto(n byte) model.Protocol {
	return [...]model.Protocol{model.TCP, model.UDP, model.SCTP}[n]
}

// keyOf writes a frontend's key. The address must be of the tree's family, or invalid for a tree of node ports.
func keyOf(k forward.Key) string {
	out := make([]byte, 0, 37)
	if k.Addr.IsValid() {
		for _, b := range k.Addr.AsSlice() {
			out = append(out, b>>4, b&15)
		}
	}
	out = append(out, protoNibble(k.Proto))
	return string(append(out, byte(k.Port>>12), byte(k.Port>>8&15), byte(k.Port>>4&15), byte(k.Port&15)))
}

// set puts a rule at a key; an empty rule takes the key out.
func (t *tree) set(key, rule string) {
	if rule == "" {
		t.remove(t.top, key, 0)
		return
	}
	t.put(t.top, key, rule, 0)
}

func limit(depth int) int {
	if depth == 0 {
		return rootMax
	}
	return leafMax
}

func findEntry(entries []entry, key string) (int, bool) {
	return slices.BinarySearchFunc(entries, key, func(e entry, k string) int {
		switch {
		case e.key < k:
			return -1
		case e.key > k:
			return 1
		}
		return 0
	})
}

// put reports whether the key is new.
func (t *tree) put(b *branch, key, rule string, depth int) bool {
	b.dirty = true
	if b.kids != nil {
		kid := &b.kids[key[depth]]
		if *kid == nil {
			*kid = &branch{dirty: true}
		}
		fresh := t.put(*kid, key, rule, depth+1)
		if fresh {
			b.count++
		}
		return fresh
	}
	i, found := findEntry(b.entries, key)
	if found {
		b.entries[i].rule = rule
		return false
	}
	b.entries = slices.Insert(b.entries, i, entry{key, rule})
	b.count++
	if b.count > limit(depth) && depth < len(key) {
		entries := b.entries
		b.entries, b.kids = nil, &[16]*branch{}
		for _, e := range entries {
			kid := &b.kids[e.key[depth]]
			if *kid == nil {
				*kid = &branch{dirty: true}
			}
			t.put(*kid, e.key, e.rule, depth+1)
		}
	}
	return true
}

// remove reports whether the key was there.
func (t *tree) remove(b *branch, key string, depth int) bool {
	if b.kids == nil {
		i, found := findEntry(b.entries, key)
		if !found {
			return false
		}
		b.entries = slices.Delete(b.entries, i, i+1)
		b.count--
		b.dirty = true
		return true
	}
	kid := b.kids[key[depth]]
	if kid == nil || !t.remove(kid, key, depth+1) {
		return false
	}
	b.dirty = true
	b.count--
	if kid.count == 0 {
		t.release(kid)
		b.kids[key[depth]] = nil
	}
	if b.count <= limit(depth) {
		var entries []entry
		for _, k := range b.kids {
			if k != nil {
				entries = t.gather(k, entries)
			}
		}
		b.entries, b.kids = entries, nil
	}
	return true
}

// gather takes a subtree apart: its entries are appended in order and its chains fall away.
func (t *tree) gather(b *branch, into []entry) []entry {
	t.release(b)
	if b.kids == nil {
		return append(into, b.entries...)
	}
	for _, k := range b.kids {
		if k != nil {
			into = t.gather(k, into)
		}
	}
	return into
}

// release gives up the chain that a branch owns.
func (t *tree) release(b *branch) {
	if b.chain != "" {
		t.dropped = append(t.dropped, b.chain)
		b.chain = ""
	}
}

// flush renders what changed since the last call: it gives the root chain's rules if they changed, and calls write for
// each other chain that changed and drop for each that fell away.
func (t *tree) flush(write func(name string, b ruleset.Body), drop func(name string)) (root []string, changed bool) {
	if !t.top.dirty {
		return nil, false
	}
	written := map[string]bool{}
	rules := t.render(t.top, nil, func(name string, b ruleset.Body) { written[name] = true; write(name, b) })
	for _, name := range t.dropped {
		if !written[name] { // a chain can fall away and come back before it is flushed
			drop(name)
		}
	}
	t.dropped = t.dropped[:0]
	return rules, true
}

// render gives the rules of a branch, and writes the chains below it that changed.
func (t *tree) render(b *branch, path []byte, write func(string, ruleset.Body)) []string {
	b.dirty = false
	if b.kids == nil {
		rules := make([]string, len(b.entries))
		for i, e := range b.entries {
			rules[i] = e.rule
		}
		return rules
	}
	rules := make([]string, 0, 16)
	for nibble, kid := range b.kids {
		if kid == nil {
			continue
		}
		// The path is copied: kids must not share its backing array.
		below := append(slices.Clone(path), byte(nibble))
		for only := t.onlyKid(kid); only >= 0; only = t.onlyKid(kid) {
			t.release(kid)
			kid.dirty = false
			kid, below = kid.kids[only], append(below, byte(only))
		}
		if kid.count == 1 {
			t.release(kid)
			kid.dirty = false
			rules = append(rules, kid.entries[0].rule)
			continue
		}
		name := dispatchChain(t.table, t.root, below)
		if kid.dirty || kid.chain != name {
			kid.chain = name
			write(name, ruleset.BodyOf(t.render(kid, below, write)...))
		}
		rules = append(rules, t.matchOf(below)+"-j "+name)
	}
	return rules
}

// onlyKid gives the index of the single kid of an inner node, or -1.
func (t *tree) onlyKid(b *branch) int {
	only := -1
	if b.kids == nil {
		return -1
	}
	for i, k := range b.kids {
		if k == nil {
			continue
		}
		if only >= 0 {
			return -1
		}
		only = i
	}
	return only
}

// matchOf gives the match of all packets whose key begins with a path, with a blank behind it.
func (t *tree) matchOf(path []byte) string {
	n := t.addrNibbles()
	text := ""
	if n > 0 {
		addr := make([]byte, n/2)
		for i, nibble := range path[:min(len(path), n)] {
			addr[i/2] |= nibble << (4 * (1 - i%2))
		}
		a, _ := netip.AddrFromSlice(addr)
		text = "-d " + netip.PrefixFrom(a, 4*min(len(path), n)).String() + " "
	}
	if len(path) <= n {
		return text
	}
	proto := nibbleProto(path[n]).String()
	text += "-p " + proto + " "
	ports := path[n+1:]
	if len(ports) == 0 {
		return text
	}
	low := 0
	for i := range 4 {
		low <<= 4
		if i < len(ports) {
			low |= int(ports[i])
		}
	}
	high := low | 0xffff>>(4*len(ports))
	return text + "-m " + proto + " --dport " + portRange(low, high) + " "
}

func portRange(low, high int) string {
	if low == high {
		return strconv.Itoa(low)
	}
	return strconv.Itoa(low) + ":" + strconv.Itoa(high)
}
