package iptables

import (
	"fmt"
	"testing"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// layouts are the two forms of a program; classic is upstream's.
func layouts(f model.Family) map[string]Options {
	return map[string]Options{
		"classic": {Family: f, MasqueradeBit: 14, CompactAbove: 1 << 30},
		"compact": {Family: f, MasqueradeBit: 14, CompactAbove: -1},
	}
}

func compileAll(t *testing.T, opt Options, table *forward.Table) *compiler {
	t.Helper()
	c := newCompiler(opt)
	if problems := c.update(table, forward.Delta{Ports: table.Names(), Context: true}); len(problems) > 0 {
		t.Fatalf("problems: %v", problems)
	}
	return c
}

func TestTracerAgreesWithOracle(t *testing.T) {
	for seed := range uint64(600) {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			table := gen.Table(seed, family)
			packet := gen.Packet(seed, table)
			want := forward.Lookup(table, packet)
			for name, opt := range layouts(family) {
				c := compileAll(t, opt, table)
				got, err := trace(c.want, opt, &c.ctx, packet)
				if err != nil {
					t.Fatalf("seed %d %s %s: %v\n%s", seed, family, name, err, c.want)
				}
				if !want.Allows(got.Outcome) || len(got.Outcome.Choices) != len(want.Choices) {
					t.Fatalf("seed %d %s %s: packet %+v\n got %v\nwant %v\nsteps:\n%s\ntable:\n%s", seed, family, name, packet, got.Outcome, want,
						stepText(got.Steps), table)
				}
			}
		}
	}
}

func stepText[T fmt.Stringer](steps []T) string {
	s := ""
	for _, x := range steps {
		s += x.String() + "\n"
	}
	return s
}

func TestEveryRuleIsCanonical(t *testing.T) {
	for seed := range uint64(150) {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			table := gen.Table(seed, family)
			for name, opt := range layouts(family) {
				c := compileAll(t, opt, table)
				check := func(rule string) {
					r, err := xtables.ParseRule(family, rule)
					if err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					if r.String() != rule {
						t.Fatalf("%s: rule is not canonical:\nhave %s\nwant %s", name, rule, r)
					}
				}
				for _, b := range c.want.Chains {
					for rule := range b.Rules() {
						check(rule)
					}
				}
				for _, j := range c.want.Jumps {
					check(j.Rule)
				}
			}
		}
	}
}
