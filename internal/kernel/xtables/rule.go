package xtables

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Rule is one iptables rule in typed form: the part that every tool version prints in the same order first, then the
// matches in the order in which they were loaded, then the target. Its String is the text that iptables-save prints
// behind "-A CHAIN ", so a rule read back compares equal to the rule that was written.
type Rule struct {
	Src, Dst Addr
	In, Out  Interface
	// Proto is the name or number behind -p; empty for any. ProtoNot inverts it.
	Proto    string
	ProtoNot bool
	Matches  []Match
	Target   Target
}

// An Addr is an address match. The zero value matches every address.
type Addr struct {
	Prefix netip.Prefix
	Not    bool
}

// An Interface is an interface match. A name that ends in '+' matches every name with that start; the empty name
// matches every interface.
type Interface struct {
	Name string
	Not  bool
}

// A Match is one loaded match module ("-m comment") with its options.
type Match struct {
	Module  string
	Options []Option
}

// A Target is what follows -j (or -g, with Goto); an empty name is a rule without a target, which only counts.
type Target struct {
	Name    string
	Goto    bool
	Options []Option
}

// An Option is one option of a match or a target; Not is the '!' before it. Name includes the dashes.
type Option struct {
	Not    bool
	Name   string
	Values []string
}

// Option gives the named option of a module, and whether it is there.
func (r *Rule) Option(module, name string) (Option, bool) {
	for _, m := range r.Matches {
		if m.Module != module {
			continue
		}
		for _, o := range m.Options {
			if o.Name == name {
				return o, true
			}
		}
	}
	return Option{}, false
}

// Comment gives the text of the rule's comment, or "".
func (r *Rule) Comment() string {
	o, ok := r.Option("comment", "--comment")
	if !ok || len(o.Values) == 0 {
		return ""
	}
	return o.Values[0]
}

// Value gives the first value of a target's option, or "".
func (t Target) Value(name string) string {
	for _, o := range t.Options {
		if o.Name == name && len(o.Values) > 0 {
			return o.Values[0]
		}
	}
	return ""
}

// String gives the canonical text: what iptables-save prints behind "-A CHAIN ".
func (r *Rule) String() string {
	var b strings.Builder
	b.Grow(128)
	writeAddr(&b, "-s", r.Src)
	writeAddr(&b, "-d", r.Dst)
	writeInterface(&b, "-i", r.In)
	writeInterface(&b, "-o", r.Out)
	if r.Proto != "" {
		writeNot(&b, r.ProtoNot)
		b.WriteString("-p ")
		b.WriteString(r.Proto)
		b.WriteByte(' ')
	}
	for _, m := range r.Matches {
		b.WriteString("-m ")
		b.WriteString(m.Module)
		b.WriteByte(' ')
		writeOptions(&b, m.Options)
	}
	if r.Target.Name != "" {
		if r.Target.Goto {
			b.WriteString("-g ")
		} else {
			b.WriteString("-j ")
		}
		b.WriteString(r.Target.Name)
		b.WriteByte(' ')
		writeOptions(&b, r.Target.Options)
	}
	return strings.TrimSuffix(b.String(), " ")
}

func writeNot(b *strings.Builder, not bool) {
	if not {
		b.WriteString("! ")
	}
}

func writeAddr(b *strings.Builder, flag string, a Addr) {
	if !a.Prefix.IsValid() {
		return
	}
	writeNot(b, a.Not)
	b.WriteString(flag)
	b.WriteByte(' ')
	b.WriteString(a.Prefix.String())
	b.WriteByte(' ')
}

func writeInterface(b *strings.Builder, flag string, i Interface) {
	if i.Name == "" {
		return
	}
	writeNot(b, i.Not)
	b.WriteString(flag)
	b.WriteByte(' ')
	b.WriteString(i.Name)
	b.WriteByte(' ')
}

func writeOptions(b *strings.Builder, options []Option) {
	for _, o := range options {
		writeNot(b, o.Not)
		b.WriteString(o.Name)
		b.WriteByte(' ')
		for _, v := range o.Values {
			if alwaysBare(o.Name) {
				b.WriteString(v)
			} else {
				b.WriteString(Quote(v))
			}
			b.WriteByte(' ')
		}
	}
}

// alwaysBare tells which options the tool prints without its quoting function: everything but free text.
func alwaysBare(option string) bool {
	switch option {
	case "--comment", "--name", "--log-prefix", "--nfacct-name":
		return false
	case "--bytecode":
		return false
	}
	return true
}

// Quote writes a word as iptables-save does: bare if it holds nothing but letters, digits, '-' and '_', else in double
// quotes with backslashes before quotes and backslashes.
func Quote(s string) string {
	bare := s != ""
	for i := 0; i < len(s) && bare; i++ {
		c := s[i]
		bare = c == '_' || c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	}
	if bare {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 2)
	b.WriteByte('"')
	for i := 0; i < len(s); i++ {
		if c := s[i]; c == '"' || c == '\\' || c == '\'' {
			b.WriteByte('\\')
		}
		b.WriteByte(s[i])
	}
	b.WriteByte('"')
	return b.String()
}

// words splits a line as iptables-restore does: at blanks, with double quotes and backslashes.
func words(line string) ([]string, error) {
	out := make([]string, 0, 24)
	var word []byte
	inWord, quoted := false, false
	start := -1 // where an unquoted word without escapes began: then it is a plain slice of the line
	flush := func(end int) {
		if start >= 0 {
			out = append(out, line[start:end])
		} else if inWord {
			out = append(out, string(word))
		}
		start, word, inWord = -1, word[:0], false
	}
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quoted && c == '\\' && i+1 < len(line):
			i++
			word = append(word, line[i])
		case c == '"':
			if start >= 0 {
				word = append(word[:0], line[start:i]...)
				start = -1
			}
			quoted, inWord = !quoted, true
		case quoted:
			word = append(word, c)
		case c == ' ' || c == '\t':
			flush(i)
		case inWord:
			word = append(word, c)
		case start < 0:
			start = i
		}
	}
	if quoted {
		return nil, fmt.Errorf("unclosed quote in %q", line)
	}
	flush(len(line))
	return out, nil
}

// prefixOf parses an address or a prefix of a family; host bits are cut.
func prefixOf(family model.Family, s string) (netip.Prefix, error) {
	var p netip.Prefix
	if a, err := netip.ParseAddr(s); err == nil {
		p = netip.PrefixFrom(a, a.BitLen())
	} else if p, err = netip.ParsePrefix(s); err != nil {
		return p, fmt.Errorf("%q is neither an address nor a prefix", s)
	}
	if model.FamilyOf(p.Addr()) != family {
		return p, fmt.Errorf("%q is not of family %s", s, family)
	}
	return p.Masked(), nil
}
