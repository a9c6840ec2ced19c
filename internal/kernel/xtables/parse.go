package xtables

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// ParseRule reads a rule as it follows "-A CHAIN " in a restore payload or in save output, and brings it into the
// canonical form, so that ParseRule(text).String() is what iptables-save prints for it.
//
// It knows the options of the modules that this program writes; a rule with other options parses as long as they follow
// the usual grammar, and is then kept as it stands.
func ParseRule(family model.Family, text string) (*Rule, error) {
	w, err := words(text)
	if err != nil {
		return nil, err
	}
	p := ruleParser{family: family, words: w, rule: &Rule{}}
	for p.at < len(p.words) {
		if err := p.step(); err != nil {
			return nil, fmt.Errorf("rule %q: %w", text, err)
		}
	}
	if p.not {
		return nil, fmt.Errorf("rule %q: ends with '!'", text)
	}
	if err := canonical(family, p.rule); err != nil {
		return nil, fmt.Errorf("rule %q: %w", text, err)
	}
	return p.rule, nil
}

// ruleParser walks over the words of one rule. The options of a module follow its -m, those of a target its -j.
type ruleParser struct {
	family model.Family
	words  []string
	at     int
	not    bool
	rule   *Rule
	// into is where the next option goes.
	into *[]Option
}

func (p *ruleParser) step() error {
	word := p.words[p.at]
	p.at++
	switch word {
	case "!":
		p.not = true
		return nil
	case "-s", "--source", "-d", "--destination", "-i", "--in-interface", "-o", "--out-interface", "-p", "--protocol",
		"-m", "--match", "-j", "--jump", "-g", "--goto":
		if p.at >= len(p.words) {
			return fmt.Errorf("%s has no value", word)
		}
		value := p.words[p.at]
		p.at++
		return p.fixed(word, value)
	}
	if !strings.HasPrefix(word, "-") {
		return fmt.Errorf("unexpected word %q", word)
	}
	return p.option(word)
}

func (p *ruleParser) fixed(flag, value string) error {
	not := p.not
	p.not = false
	switch flag {
	case "-s", "--source", "-d", "--destination":
		prefix, err := prefixOf(p.family, value)
		if err != nil {
			return err
		}
		a := Addr{Prefix: prefix, Not: not}
		if prefix.Bits() == 0 && !not {
			a = Addr{}
		}
		if flag == "-s" || flag == "--source" {
			p.rule.Src = a
		} else {
			p.rule.Dst = a
		}
	case "-i", "--in-interface":
		p.rule.In = Interface{Name: value, Not: not}
	case "-o", "--out-interface":
		p.rule.Out = Interface{Name: value, Not: not}
	case "-p", "--protocol":
		p.rule.Proto, p.rule.ProtoNot = strings.ToLower(value), not
	case "-m", "--match":
		p.rule.Matches = append(p.rule.Matches, Match{Module: value})
		p.into = &p.rule.Matches[len(p.rule.Matches)-1].Options
	case "-j", "--jump", "-g", "--goto":
		p.rule.Target = Target{Name: value, Goto: flag == "-g" || flag == "--goto"}
		p.into = &p.rule.Target.Options
	}
	return nil
}

func (p *ruleParser) option(name string) error {
	o := Option{Not: p.not, Name: name}
	p.not = false
	for p.at < len(p.words) && !p.startsOption(p.at) {
		o.Values = append(o.Values, p.words[p.at])
		p.at++
	}
	if name == "--dport" || name == "--sport" {
		p.portOption(o)
		return nil
	}
	if p.into == nil {
		return fmt.Errorf("option %s belongs to no module", name)
	}
	*p.into = append(*p.into, o)
	return nil
}

// startsOption tells whether the word at i begins something new. A value may begin with a dash only if it is a number.
func (p *ruleParser) startsOption(i int) bool {
	w := p.words[i]
	return w == "!" || len(w) > 1 && w[0] == '-' && (w[1] < '0' || w[1] > '9')
}

// portOption puts a port match into the protocol's module, which "-p tcp --dport 80" loads without being told.
func (p *ruleParser) portOption(o Option) {
	module := p.rule.Proto
	for i := range p.rule.Matches {
		m := &p.rule.Matches[i]
		if isPortModule(m.Module) {
			m.Options = append(m.Options, o)
			return
		}
	}
	p.rule.Matches = append(p.rule.Matches, Match{Module: module, Options: []Option{o}})
	p.into = &p.rule.Matches[len(p.rule.Matches)-1].Options
}

func isPortModule(m string) bool { return m == "tcp" || m == "udp" || m == "sctp" }

// canonical rewrites what the tools print in another way than they accept it.
func canonical(family model.Family, r *Rule) error {
	for i := range r.Matches {
		m := &r.Matches[i]
		var err error
		switch m.Module {
		case "mark":
			err = canonicalMark(m.Options, "--mark")
		case "conntrack":
			canonicalStates(m.Options)
		case "statistic":
			err = canonicalProbability(m.Options)
		case "recent":
			m.Options = canonicalRecent(family, m.Options)
		}
		if err != nil {
			return err
		}
	}
	switch r.Target.Name {
	case "MARK":
		return canonicalMarkTarget(&r.Target)
	case "REJECT":
		if len(r.Target.Options) == 0 {
			with := "icmp-port-unreachable"
			if family == model.IPv6 {
				with = "icmp6-port-unreachable"
			}
			r.Target.Options = []Option{{Name: "--reject-with", Values: []string{with}}}
		}
	}
	return nil
}

// canonicalMark prints "value/mask" in short hexadecimal, as a mark is read back.
func canonicalMark(options []Option, name string) error {
	for i, o := range options {
		if o.Name != name || len(o.Values) != 1 {
			continue
		}
		value, mask, found := strings.Cut(o.Values[0], "/")
		v, err := strconv.ParseUint(value, 0, 32)
		if err != nil {
			return fmt.Errorf("mark %q is not a number", o.Values[0])
		}
		text := fmt.Sprintf("0x%x", v)
		if found {
			m, err := strconv.ParseUint(mask, 0, 32)
			if err != nil {
				return fmt.Errorf("mark %q has a mask that is not a number", o.Values[0])
			}
			if m != math.MaxUint32 {
				text += fmt.Sprintf("/0x%x", m)
			}
		}
		options[i].Values = []string{text}
	}
	return nil
}

// canonicalMarkTarget turns the three ways to set a mark into the one that is stored.
func canonicalMarkTarget(t *Target) error {
	for i, o := range t.Options {
		if len(o.Values) != 1 {
			continue
		}
		var format string
		switch o.Name {
		case "--or-mark":
			format = "0x%x/0x%x"
		case "--xor-mark":
			format = "0x%x/0x0"
		case "--set-xmark", "--set-mark", "--and-mark":
			continue
		default:
			continue
		}
		v, err := strconv.ParseUint(o.Values[0], 0, 32)
		if err != nil {
			return fmt.Errorf("mark %q is not a number", o.Values[0])
		}
		text := fmt.Sprintf(format, v, v)
		if o.Name == "--xor-mark" {
			text = fmt.Sprintf(format, v)
		}
		t.Options[i] = Option{Name: "--set-xmark", Values: []string{text}}
	}
	return nil
}

// stateOrder is the order in which the tools print connection states, whatever the order of input.
func stateOrder(s string) int {
	return slices.Index([]string{"INVALID", "NEW", "RELATED", "ESTABLISHED", "UNTRACKED", "SNAT", "DNAT"}, s)
}

func canonicalStates(options []Option) {
	for i, o := range options {
		if o.Name == "--ctstate" && len(o.Values) == 1 {
			states := strings.Split(o.Values[0], ",")
			slices.SortFunc(states, func(a, b string) int { return cmp.Compare(stateOrder(a), stateOrder(b)) })
			options[i].Values = []string{strings.Join(states, ",")}
		}
	}
}

// ProbabilityOne is the fixed-point value that the statistic match stores for probability 1 (31 fraction bits).
//
// Source: XT_STATISTIC_MODE_RANDOM in the kernel's include/uapi/linux/netfilter/xt_statistic.h.
const ProbabilityOne = 1 << 31

// Probability gives the text of a probability as it is read back: rounded to the kernel's 31 bits, 11 decimals.
func Probability(p float64) string {
	return strconv.FormatFloat(math.Round(p*ProbabilityOne)/ProbabilityOne, 'f', 11, 64)
}

func canonicalProbability(options []Option) error {
	for i, o := range options {
		if o.Name != "--probability" || len(o.Values) != 1 {
			continue
		}
		p, err := strconv.ParseFloat(o.Values[0], 64)
		if err != nil || p < 0 || p > 1 {
			return fmt.Errorf("probability %q is not between 0 and 1", o.Values[0])
		}
		options[i].Values = []string{Probability(p)}
	}
	return nil
}

// canonicalRecent orders the options of a recent match as they are printed and adds the defaults that always are.
func canonicalRecent(family model.Family, options []Option) []Option {
	mask := "255.255.255.255"
	if family == model.IPv6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	side := "--rsource"
	byName := map[string]Option{}
	for _, o := range options {
		if o.Name == "--rdest" {
			side = "--rdest"
		}
		byName[o.Name] = o
	}
	if _, ok := byName["--mask"]; !ok {
		byName["--mask"] = Option{Name: "--mask", Values: []string{mask}}
	}
	byName[side] = Option{Name: side}
	var out []Option
	for _, name := range []string{
		"--set", "--rcheck", "--update", "--remove", "--seconds", "--reap", "--hitcount", "--rttl",
		"--name", "--mask", side,
	} {
		if o, ok := byName[name]; ok {
			out = append(out, o)
		}
	}
	return out
}
