package xtables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Feature is something that rules may use and that not every kernel or tool has. Its value names it for people.
type Feature string

// The features that can be probed.
const (
	FeatureDNAT        Feature = "target DNAT"
	FeatureMasquerade  Feature = "target MASQUERADE"
	FeatureRandomFully Feature = "target MASQUERADE --random-fully"
	FeatureMark        Feature = "match and target mark"
	FeatureReject      Feature = "target REJECT"
	FeatureComment     Feature = "match comment"
	FeatureAddrtype    Feature = "match addrtype"
	FeatureConntrack   Feature = "match conntrack"
	FeatureStatistic   Feature = "match statistic"
	FeatureRecent      Feature = "match recent"
	FeatureBPF         Feature = "match bpf"
	FeatureSCTP        Feature = "match sctp"
)

// Features gives all of them.
func Features() []Feature {
	return []Feature{
		FeatureDNAT, FeatureMasquerade, FeatureRandomFully, FeatureMark, FeatureReject, FeatureComment, FeatureAddrtype,
		FeatureConntrack, FeatureStatistic, FeatureRecent, FeatureBPF, FeatureSCTP,
	}
}

// probeChain is the scratch chain. No rule ever jumps to it, so no packet meets what is tried there.
const probeChain = "KUBE-TURNOUT-PROBE"

// Trial gives a rule that uses the feature.
func (f Feature) Trial(family model.Family) Trial {
	table, rule := f.rule(family)
	return Trial{table, rule}
}

func (f Feature) rule(family model.Family) (table, text string) {
	switch f {
	case FeatureDNAT:
		if family == model.IPv6 {
			return "nat", "-p tcp -m tcp -j DNAT --to-destination [fd00::1]:80"
		}
		return "nat", "-p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80"
	case FeatureMasquerade:
		return "nat", "-j MASQUERADE"
	case FeatureRandomFully:
		return "nat", "-j MASQUERADE --random-fully"
	case FeatureMark:
		return "nat", "-m mark --mark 0x4000/0x4000 -j MARK --xor-mark 0x4000"
	case FeatureReject:
		return "filter", "-j REJECT"
	case FeatureComment:
		return "nat", "-m comment --comment probe"
	case FeatureAddrtype:
		return "nat", "-m addrtype --dst-type LOCAL"
	case FeatureConntrack:
		return "nat", "-m conntrack --ctstate NEW"
	case FeatureStatistic:
		return "nat", "-m statistic --mode random --probability 0.5"
	case FeatureRecent:
		return "nat", "-m recent --name " + probeChain + " --rcheck --seconds 1 --reap"
	case FeatureBPF:
		return "nat", `-m bpf --bytecode "1,6 0 0 0"`
	case FeatureSCTP:
		return "nat", "-p sctp -m sctp --dport 1"
	}
	return "", ""
}

// Probe finds out which features can be used, by putting rules into a scratch chain that no packet reaches and removing
// it. A check by the tool alone (--test) would not do: it does not ask the kernel.
//
// Each feature gets one of three answers: nil is yes, an error of class ErrUnsupported is no, and any other error means
// that it could not be told, as a lock was held or the right to ask is missing.
func Probe(ctx context.Context, t Tables, family model.Family, features ...Feature) map[Feature]error {
	trials := make(map[Feature]Trial, len(features))
	for _, f := range features {
		trials[f] = f.Trial(family)
	}
	return ProbeRules(ctx, t, trials)
}

// ProbeRules does the same for rules of the caller's, each under the name that people shall read.
func ProbeRules(ctx context.Context, t Tables, trials map[Feature]Trial) map[Feature]error {
	out := make(map[Feature]error, len(trials))
	features := slices.Sorted(maps.Keys(trials))
	rules := make([]Trial, len(features))
	for i, f := range features {
		rules[i] = trials[f]
	}
	// Usually everything works, and then one attempt for all of them is enough.
	err := try(ctx, t, rules...)
	// While somebody holds the lock each attempt takes as long as the tools wait for it, and none tells more.
	if err == nil || len(features) == 1 || errors.Is(err, ErrBusy) {
		for _, f := range features {
			out[f] = answer(ctx, t, f, err)
		}
		return out
	}
	for i, f := range features {
		out[f] = answer(ctx, t, f, try(ctx, t, rules[i]))
	}
	return out
}

// A Trial is a rule in canonical form and the table to try it in.
type Trial struct{ Table, Rule string }

// try puts rules into scratch chains, and removes these in any case.
func try(ctx context.Context, t Tables, rules ...Trial) error {
	sections := map[string]*strings.Builder{}
	var add, remove strings.Builder
	for _, table := range []string{"mangle", "nat", "filter"} {
		for _, r := range rules {
			if r.Table != table {
				continue
			}
			if sections[table] == nil {
				sections[table] = &strings.Builder{}
			}
			fmt.Fprintf(sections[table], "-A %s %s\n", probeChain, r.Rule)
		}
		if rules := sections[table]; rules != nil {
			fmt.Fprintf(&add, "*%s\n:%s - [0:0]\n%sCOMMIT\n", table, probeChain, rules)
			fmt.Fprintf(&remove, "*%s\n:%s - [0:0]\n-X %s\nCOMMIT\n", table, probeChain, probeChain)
		}
	}
	err := t.Restore(ctx, []byte(add.String()))
	if errors.Is(err, ErrBusy) {
		return err // without the lock nothing was restored
	}
	// Also after a failure: the first of two sections may be in effect. A chain that stays is flushed by the next probe.
	if gone := t.Restore(ctx, []byte(remove.String())); err == nil && gone != nil {
		return fmt.Errorf("remove chain %s: %w", probeChain, gone)
	}
	return err
}

// answer sorts an attempt's result into one of the three answers. The rules are known to be well formed, so whatever
// refuses them as such lacks something.
func answer(ctx context.Context, t Tables, f Feature, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil || errors.Is(err, ErrBusy) || !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrUnsupported) {
		return fmt.Errorf("could not tell whether %s works: %w", f, err)
	}
	if forbidden(ctx, t) {
		// The class of the cause would read as a no.
		return fmt.Errorf("could not tell whether %s works: %v", f, err) //nolint:errorlint // see above
	}
	return &StepError{Op: "probe", Object: string(f), Reason: err.Error(), Class: ErrUnsupported}
}

// forbidden tells whether the right to change the tables is missing.
func forbidden(ctx context.Context, t Tables) bool {
	_, err := t.Pulse(ctx)
	return errors.Is(err, ErrUnsupported) && isPermission(err)
}
