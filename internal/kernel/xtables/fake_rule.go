package xtables

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// maxInterface is the longest interface name, in bytes. Source: IFNAMSIZ is 16 with its terminator.
const maxInterface = 15

// admit refuses a rule that the tool or the kernel would not take in this chain, whatever other rules there are.
func (s *section) admit(chain string, r *Rule) error {
	if err := admitInterfaces(s.name, chain, r); err != nil {
		return err
	}
	if err := admitProtocol(r); err != nil {
		return err
	}
	if err := s.supports(r); err != nil {
		return err
	}
	for _, m := range r.Matches {
		if err := s.admitMatch(m, r); err != nil {
			return err
		}
	}
	return s.admitTarget(r)
}

// supports refuses what the fake was told to lack.
func (s *section) supports(r *Rule) error {
	if len(s.lacking) == 0 {
		return nil
	}
	used := []string{r.Target.Name}
	for _, o := range r.Target.Options {
		used = append(used, r.Target.Name+" "+o.Name)
	}
	for _, m := range r.Matches {
		used = append(used, m.Module)
		for _, o := range m.Options {
			used = append(used, m.Module+" "+o.Name)
		}
	}
	for _, name := range used {
		if s.lacking[name] {
			return &refusal{text: name + " is not supported, missing kernel module?", class: ErrUnsupported}
		}
	}
	return nil
}

func admitInterfaces(table, chain string, r *Rule) error {
	if len(r.In.Name) > maxInterface || len(r.Out.Name) > maxInterface {
		return refuse("interface name is longer than %d bytes", maxInterface)
	}
	if !isBase(table, chain) {
		return nil
	}
	if r.In.Name != "" && (chain == "OUTPUT" || chain == "POSTROUTING") {
		return refuse("-i cannot be used in %s", chain)
	}
	if r.Out.Name != "" && (chain == "INPUT" || chain == "PREROUTING") {
		return refuse("-o cannot be used in %s", chain)
	}
	return nil
}

func admitProtocol(r *Rule) error {
	switch r.Proto {
	case "", "tcp", "udp", "sctp", "icmp", "icmpv6", "ipv6-icmp":
		return nil
	}
	if n, err := strconv.Atoi(r.Proto); err == nil && n > 0 && n < 256 {
		return nil
	}
	return refuse("unknown protocol %q", r.Proto)
}

// A grammar says which options a module takes, with the number of values of each.
type grammar struct {
	options []syntax
	// oneOf are the options of which at least one must be there.
	oneOf []string
}

// syntax is the number of values that an option takes.
type syntax struct {
	name   string
	values int
}

// matchGrammar knows the modules that Service proxies use.
func matchGrammar(module string) (grammar, bool) {
	switch module {
	case "comment":
		return grammar{[]syntax{{"--comment", 1}}, []string{"--comment"}}, true
	case "tcp", "udp", "sctp":
		return grammar{[]syntax{{"--dport", 1}, {"--sport", 1}}, nil}, true
	case "addrtype":
		return grammar{
			[]syntax{{"--src-type", 1}, {"--dst-type", 1}, {"--limit-iface-in", 0}, {"--limit-iface-out", 0}},
			[]string{"--src-type", "--dst-type"},
		}, true
	case "mark":
		return grammar{[]syntax{{"--mark", 1}}, []string{"--mark"}}, true
	case "conntrack":
		options := []syntax{
			{"--ctstate", 1}, {"--ctproto", 1}, {"--ctorigsrc", 1}, {"--ctorigdst", 1}, {"--ctorigdstport", 1}, {"--ctdir", 1},
		}
		return grammar{options, []string{
			"--ctstate", "--ctproto", "--ctorigsrc", "--ctorigdst", "--ctorigdstport", "--ctdir",
		}}, true
	case "statistic":
		options := []syntax{{"--mode", 1}, {"--probability", 1}, {"--every", 1}, {"--packet", 1}}
		return grammar{options, []string{"--mode"}}, true
	case "recent":
		options := []syntax{
			{"--set", 0},
			{"--rcheck", 0},
			{"--update", 0},
			{"--remove", 0},
			{"--seconds", 1},
			{"--reap", 0},
			{"--hitcount", 1},
			{"--rttl", 0},
			{"--name", 1},
			{"--mask", 1},
			{"--rsource", 0},
			{"--rdest", 0},
		}
		return grammar{options, []string{"--set", "--rcheck", "--update", "--remove"}}, true
	case "bpf":
		return grammar{[]syntax{{"--bytecode", 1}}, []string{"--bytecode"}}, true
	case "set":
		return grammar{[]syntax{{"--match-set", 2}}, []string{"--match-set"}}, true
	case "nfacct":
		return grammar{[]syntax{{"--nfacct-name", 1}}, []string{"--nfacct-name"}}, true
	}
	return grammar{}, false
}

// follow checks options against a grammar.
func (g grammar) follow(who, name string, options []Option) error {
	chosen := len(g.oneOf) == 0
	for i, o := range options {
		at := slices.IndexFunc(g.options, func(s syntax) bool { return s.name == o.Name })
		if at < 0 {
			return refuse("unknown option %q of %s %s", o.Name, who, name)
		}
		if n := g.options[at].values; n != len(o.Values) {
			return refuse("option %s of %s %s takes %d values, not %d", o.Name, who, name, n, len(o.Values))
		}
		if slices.ContainsFunc(options[:i], func(earlier Option) bool { return earlier.Name == o.Name }) {
			return refuse("option %s of %s %s is there twice", o.Name, who, name)
		}
		chosen = chosen || slices.Contains(g.oneOf, o.Name)
	}
	if !chosen {
		return refuse("%s %s needs %s", who, name, strings.Join(g.oneOf, " or "))
	}
	return nil
}

func (s *section) admitMatch(m Match, r *Rule) error {
	g, ok := matchGrammar(m.Module)
	if !ok {
		return &refusal{text: "couldn't load match `" + m.Module + "'", class: ErrUnsupported}
	}
	if err := g.follow("match", m.Module, m.Options); err != nil {
		return err
	}
	value := func(name string) string { return Target{Options: m.Options}.Value(name) }
	switch m.Module {
	case "comment":
		if n := len(value("--comment")); n > MaxComment {
			return refuse("comment of %d bytes, %d at most", n, MaxComment)
		}
	case "tcp", "udp", "sctp":
		return admitPorts(m, r)
	case "addrtype":
		return admitTypes(m)
	case "conntrack":
		return admitStates(value("--ctstate"))
	case "statistic":
		return admitStatistic(m, value("--mode"))
	case "recent":
		return admitRecent(m, value("--name"))
	case "set":
		return s.exists("set", value("--match-set"))
	case "nfacct":
		return s.exists("nfacct", value("--nfacct-name"))
	}
	return nil
}

func (s *section) exists(kind, name string) error {
	if !s.outside[kind+" "+name] && (kind != "set" || s.sets == nil || !s.sets(name)) {
		return refuse("%s %s does not exist", kind, name)
	}
	return nil
}

func admitPorts(m Match, r *Rule) error {
	if r.Proto != m.Module || r.ProtoNot {
		return refuse("match %s needs -p %s", m.Module, m.Module)
	}
	for _, o := range m.Options {
		from, to, ranged := strings.Cut(o.Values[0], ":")
		for _, text := range []string{from, to} {
			if text == to && !ranged {
				continue
			}
			if n, err := strconv.ParseUint(text, 10, 16); err != nil || n == 0 {
				return refuse("invalid port %q of %s", text, o.Name)
			}
		}
	}
	return nil
}

func admitTypes(m Match) error {
	known := []string{
		"UNSPEC", "UNICAST", "LOCAL", "BROADCAST", "ANYCAST", "MULTICAST", "BLACKHOLE", "UNREACHABLE", "PROHIBIT", "THROW",
		"NAT", "XRESOLVE",
	}
	for _, o := range m.Options {
		for _, v := range o.Values {
			for name := range strings.SplitSeq(v, ",") {
				if !slices.Contains(known, name) {
					return refuse("bad address type %q", name)
				}
			}
		}
	}
	return nil
}

func admitStates(states string) error {
	if states == "" {
		return nil
	}
	for name := range strings.SplitSeq(states, ",") {
		if stateOrder(name) < 0 {
			return refuse("bad connection state %q", name)
		}
	}
	return nil
}

func admitStatistic(m Match, mode string) error {
	needs := map[string]string{"random": "--probability", "nth": "--every"}[mode]
	if needs == "" {
		return refuse("bad statistic mode %q", mode)
	}
	if !slices.ContainsFunc(m.Options, func(o Option) bool { return o.Name == needs }) {
		return refuse("statistic mode %s needs %s", mode, needs)
	}
	return nil
}

func admitRecent(m Match, name string) error {
	has := func(option string) bool {
		return slices.ContainsFunc(m.Options, func(o Option) bool { return o.Name == option })
	}
	verbs := 0
	for _, v := range []string{"--set", "--rcheck", "--update", "--remove"} {
		if has(v) {
			verbs++
		}
	}
	switch {
	case verbs != 1:
		return refuse("recent takes one of --set, --rcheck, --update and --remove, not %d", verbs)
	case len(name) > MaxRecentName:
		return refuse("recent name of %d bytes, %d at most", len(name), MaxRecentName)
	case has("--reap") && !has("--seconds"):
		return refuse("recent --reap needs --seconds")
	case has("--seconds") && (has("--set") || has("--remove")):
		return refuse("recent --seconds goes with --rcheck and --update only")
	}
	return nil
}

// targetGrammar knows the targets, beside chains, that Service proxies use.
func targetGrammar(name string) (grammar, bool) {
	switch name {
	case "ACCEPT", "DROP", "RETURN":
		return grammar{}, true
	case "DNAT":
		return grammar{
			[]syntax{{"--to-destination", 1}, {"--random", 0}, {"--persistent", 0}},
			[]string{"--to-destination"},
		}, true
	case "SNAT":
		return grammar{
			[]syntax{{"--to-source", 1}, {"--random", 0}, {"--random-fully", 0}, {"--persistent", 0}},
			[]string{"--to-source"},
		}, true
	case "MASQUERADE":
		return grammar{[]syntax{{"--to-ports", 1}, {"--random", 0}, {"--random-fully", 0}}, nil}, true
	case "REDIRECT":
		return grammar{[]syntax{{"--to-ports", 1}, {"--random", 0}}, nil}, true
	case "MARK":
		return grammar{[]syntax{{"--set-xmark", 1}}, []string{"--set-xmark"}}, true
	case "REJECT":
		return grammar{[]syntax{{"--reject-with", 1}}, nil}, true
	case "SET":
		return grammar{[]syntax{{"--map-set", 2}, {"--map-mark", 0}}, []string{"--map-set"}}, true
	}
	return grammar{}, false
}

func isTarget(name string) bool {
	_, ok := targetGrammar(name)
	return ok
}

func (s *section) admitTarget(r *Rule) error {
	t := r.Target
	if t.Name == "" {
		return nil
	}
	g, ok := targetGrammar(t.Name)
	if !ok {
		return s.admitJump(t)
	}
	if t.Goto {
		return refuse("goto %s: not a chain", t.Name)
	}
	if err := g.follow("target", t.Name, t.Options); err != nil {
		return err
	}
	switch t.Name {
	case "DROP":
		if s.name == "nat" {
			return refuse("table nat is not for filtering: DROP is inhibited")
		}
	case "DNAT":
		return admitMapping(s.family, r, t.Value("--to-destination"))
	case "SNAT":
		return admitMapping(s.family, r, t.Value("--to-source"))
	case "MASQUERADE", "REDIRECT":
		if ports := t.Value("--to-ports"); ports != "" {
			return admitMappedPorts(r, ports)
		}
	case "REJECT":
		return admitReject(s.family, r, t.Value("--reject-with"))
	case "SET":
		if s.name != "mangle" {
			return refuse("SET --map-set works in table mangle only")
		}
		return s.exists("set", t.Value("--map-set"))
	}
	return nil
}

func (s *section) admitJump(t Target) error {
	switch {
	case isBase(s.name, t.Name):
		return refuse("chain %s is built in and cannot be jumped to", t.Name)
	case s.chain(t.Name) == nil:
		return refuse("couldn't load target `%s'", t.Name)
	case len(t.Options) > 0:
		return refuse("unknown option %q of chain %s", t.Options[0].Name, t.Name)
	}
	return nil
}

// admitMapping checks ADDR[-ADDR][:PORT[-PORT]], with brackets around an IPv6 address that has a port.
func admitMapping(family model.Family, r *Rule, text string) error {
	addrs, ports := text, ""
	if family == model.IPv6 {
		if rest, ok := strings.CutPrefix(text, "["); ok {
			var closed bool
			if addrs, ports, closed = strings.Cut(rest, "]"); !closed {
				return refuse("mapping %q has no closing bracket", text)
			}
			ports = strings.TrimPrefix(ports, ":")
		}
	} else {
		addrs, ports, _ = strings.Cut(text, ":")
	}
	if addrs == "" && ports == "" {
		return refuse("empty mapping")
	}
	if addrs != "" {
		for part := range strings.SplitSeq(addrs, "-") {
			a, err := netip.ParseAddr(part)
			if err != nil || model.FamilyOf(a) != family || a.Zone() != "" {
				return refuse("bad %s address %q in mapping %q", family, part, text)
			}
		}
	}
	if ports == "" {
		return nil
	}
	return admitMappedPorts(r, ports)
}

func admitMappedPorts(r *Rule, ports string) error {
	if !isPortModule(r.Proto) || r.ProtoNot {
		return refuse("a mapping to a port needs -p tcp, udp or sctp")
	}
	for part := range strings.SplitSeq(ports, "-") {
		if n, err := strconv.ParseUint(part, 10, 16); err != nil || n == 0 {
			return refuse("port %q in a mapping is not valid", part)
		}
	}
	return nil
}

func admitReject(family model.Family, r *Rule, with string) error {
	known := []string{
		"icmp-net-unreachable", "icmp-host-unreachable", "icmp-proto-unreachable", "icmp-port-unreachable",
		"icmp-net-prohibited", "icmp-host-prohibited", "icmp-admin-prohibited", "tcp-reset",
	}
	if family == model.IPv6 {
		known = []string{
			"icmp6-no-route", "icmp6-adm-prohibited", "icmp6-addr-unreachable", "icmp6-port-unreachable",
			"icmp6-policy-fail", "icmp6-reject-route", "tcp-reset",
		}
	}
	if with != "" && !slices.Contains(known, with) {
		return refuse("unknown reject type %q", with)
	}
	if with == "tcp-reset" && (r.Proto != "tcp" || r.ProtoNot) {
		return refuse("tcp-reset needs -p tcp")
	}
	return nil
}
