package ipvs_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	edges "github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	edge "github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// B041, B044: what is missing is named once, all of it, by the module that brings it.
func TestWhatTheKernelLacksIsNamed(t *testing.T) {
	tests := map[string]struct {
		scheduler string
		change    func(*ipset.Fake, *xtables.Fake)
		open      error
		want      []string
		err       string
	}{
		"nothing":          {},
		"the scheduler":    {scheduler: "sed", want: []string{"ip_vs_sed"}},
		"IPVS":             {open: &edges.StepError{Op: "open", Class: edges.ErrUnsupported}, want: []string{"ip_vs"}},
		"IPVS and a type":  {open: &edges.StepError{Op: "open", Class: edges.ErrUnsupported}, change: lackTypes, want: []string{"ip_set_hash_ipportnet", "ip_vs"}},
		"a type of set":    {change: lackTypes, want: []string{"ip_set_hash_ipportnet"}},
		"BPF in rules":     {change: func(_ *ipset.Fake, f *xtables.Fake) { f.Lack("bpf") }, want: []string{"xt_bpf"}},
		"an answer":        {open: errors.New("interrupted"), err: "interrupted"},
		"a sane scheduler": {scheduler: "a b", err: "no name of a scheduler"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			sets, rules := ipset.NewFake(), xtables.NewFake(model.IPv4, xtables.NFT)
			rules.Sets(sets.Has)
			sets.Used(rules.Names)
			if tc.change != nil {
				tc.change(sets, rules)
			}
			open := func(context.Context) (edge.Engine, error) { return edge.NewFake("rr", "sh"), tc.open }
			err := ipvs.Require(t.Context(), open, sets, tc.scheduler, &ipvs.Place{Family: model.IPv4, Rules: rules})
			var lacks *ipvs.LackError
			switch {
			case tc.err != "":
				if err == nil || errors.As(err, &lacks) || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("error %v, want one of another type with %q", err, tc.err)
				}
			case tc.want == nil && err != nil:
				t.Errorf("error %v, want none", err)
			case tc.want != nil && (!errors.As(err, &lacks) || !slices.Equal(lacks.Modules, tc.want)):
				t.Errorf("error %v, want one that names %v", err, tc.want)
			case tc.want != nil && !strings.Contains(err.Error(), "["+strings.Join(tc.want, " ")+"]"):
				t.Errorf("the error does not list %v: %v", tc.want, err)
			}
			if left := sets.Dump(); left != "" {
				t.Errorf("the trial left a set:\n%s", left)
			}
		})
	}
}

func lackTypes(f *ipset.Fake, _ *xtables.Fake) { f.Lack(ipset.HashIPPortNet) }
