package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A LackError tells that the kernel lacks something that this mode cannot do without.
type LackError struct {
	// Modules are those that bring it, sorted. Where they are built in and something is lacking all the same, the reasons
	// tell more.
	Modules []string
	Reasons []error
}

// Error says it in the words that operators look for.
func (l *LackError) Error() string {
	return fmt.Sprintf("IPVS proxier will not be used because the following required kernel modules are not loaded: [%s]: %v",
		strings.Join(l.Modules, " "), errors.Join(l.Reasons...))
}

// Unwrap gives the reasons.
func (l *LackError) Unwrap() []error { return l.Reasons }

func (l *LackError) add(module string, err error) {
	if !slices.Contains(l.Modules, module) {
		l.Modules = append(l.Modules, module)
		slices.Sort(l.Modules)
	}
	l.Reasons = append(l.Reasons, err)
}

// A Place is where one IP family is served.
type Place struct {
	Family model.Family
	Rules  xtables.Tables
	// NoRandomFully is set by Require: MASQUERADE cannot choose ports at random there.
	NoRandomFully bool
}

// An Opener asks the kernel for its virtual servers.
type Opener func(context.Context) (ipvs.Engine, error)

// Require finds out by trial whether the kernel has what the mode needs in these places, and makes it load what it can
// load by itself. An error of type *LackError says what is missing; any other one, that it could not be told.
func Require(ctx context.Context, open Opener, sets ipset.Table, scheduler string, places ...*Place) error {
	l := &LackError{}
	s, err := ParseScheduler(scheduler)
	if err != nil {
		return err
	}
	engine, err := open(ctx)
	if err == nil {
		err = engine.TryScheduler(ctx, s.Name)
	}
	switch {
	case err == nil:
	case errors.Is(err, ipvs.ErrScheduler):
		l.add("ip_vs_"+s.Name, err)
	case errors.Is(err, kernel.ErrUnsupported):
		l.add("ip_vs", err)
	default:
		return fmt.Errorf("ask the kernel for IPVS: %w", err)
	}
	support, err := sets.Probe(ctx)
	switch {
	case errors.Is(err, kernel.ErrUnsupported):
		l.add("ip_set", err)
	case err != nil:
		return fmt.Errorf("ask the kernel for IP sets: %w", err)
	default:
		for _, t := range support.Missing(setTypes()...) {
			l.add("ip_set_"+strings.NewReplacer(":", "_", ",", "").Replace(string(t)),
				fmt.Errorf("the kernel has no sets of type %s", t))
		}
	}
	if len(l.Reasons) == 0 {
		if err := l.everywhere(ctx, sets, places); err != nil {
			return err
		}
	}
	if len(l.Reasons) > 0 {
		return l
	}
	return nil
}

// setTypes are those that the mode's sets are made of.
func setTypes() []ipset.Type {
	var out []ipset.Type
	for _, name := range sets() {
		if t := spec(name, model.IPv4).Type; !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	return out
}

// probeSet is a set that rules of the trial name.
const probeSet = "KUBE-TURNOUT-PROBE"

// everywhere tries the rules of the mode in all places at once.
func (l *LackError) everywhere(ctx context.Context, sets ipset.Table, places []*Place) error {
	found, failed := make([]LackError, len(places)), make([]error, len(places))
	var trying sync.WaitGroup
	for i, p := range places {
		trying.Go(func() { failed[i] = found[i].rules(ctx, sets, p) })
	}
	trying.Wait()
	for _, f := range found {
		for i, err := range f.Reasons {
			l.add(f.Modules[i], err)
		}
	}
	return errors.Join(failed...)
}

// rules tries the rules of the mode in one place.
func (l *LackError) rules(ctx context.Context, sets ipset.Table, p *Place) error {
	set := spec(setSplit, p.Family)
	set.Name = fmt.Sprintf("%s-%d", probeSet, p.Family)
	if err := sets.Apply(ctx, []ipset.Op{{Verb: ipset.Create, Set: set}})[0]; err != nil {
		return fmt.Errorf("try a set: %w", err)
	}
	defer sets.Apply(context.WithoutCancel(ctx), []ipset.Op{{Verb: ipset.Destroy, Set: set}})
	const asking = xtables.Feature("match set and target SET")
	modules := map[xtables.Feature]string{
		asking: "xt_set", xtables.FeatureBPF: "xt_bpf", xtables.FeatureAddrtype: "xt_addrtype",
		xtables.FeatureConntrack: "xt_conntrack", xtables.FeatureComment: "xt_comment", xtables.FeatureMark: "xt_mark",
		xtables.FeatureMasquerade: "xt_MASQUERADE", xtables.FeatureReject: rejectModule(p.Family),
	}
	trials := map[xtables.Feature]xtables.Trial{
		xtables.FeatureRandomFully: xtables.FeatureRandomFully.Trial(p.Family),
	}
	for f := range modules {
		trials[f] = f.Trial(p.Family)
	}
	trials[asking] = xtables.Trial{
		Table: "mangle",
		Rule:  "-m set --match-set " + set.Name + " dst,dst -j SET --map-set " + set.Name + " dst,dst --map-mark",
	}
	answers := xtables.ProbeRules(ctx, p.Rules, trials)
	p.NoRandomFully = errors.Is(answers[xtables.FeatureRandomFully], kernel.ErrUnsupported)
	for _, f := range slices.Sorted(maps.Keys(modules)) {
		switch err := answers[f]; {
		case err == nil || errors.Is(err, kernel.ErrBusy):
			// What could not be told as a lock is held counts as there: the loop will find out.
		case errors.Is(err, kernel.ErrUnsupported):
			l.Modules, l.Reasons = append(l.Modules, modules[f]), append(l.Reasons, err)
		default:
			return err
		}
	}
	return nil
}

func rejectModule(f model.Family) string {
	if f == model.IPv6 {
		return "ip6t_REJECT"
	}
	return "ipt_REJECT"
}
