package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// Detect finds out which flavour the other tools of this host use, and says by what it was decided. Rules must go where
// theirs are: packets meet both flavours, but each tool sees and orders only its own.
//
// The first of these that tells decides: the kubelet's marks in table mangle; chains of Kubernetes; the flavour with
// more rules; the flavour of the plain iptables command; the one flavour that works, nft before legacy. No table is
// made by asking, except in the last case. The error is of class ErrUnsupported if neither flavour works.
func Detect(ctx context.Context, family model.Family) (Flavour, string, error) {
	var found []candidate
	var missing []error
	for _, flavour := range []Flavour{NFT, Legacy} {
		c, err := open(ctx, family, flavour, searchPath())
		if err != nil {
			missing = append(missing, err)
			continue
		}
		found = append(found, candidate{flavour: flavour, tables: c, works: func(ctx context.Context) error {
			return Supported(ctx, family, flavour)
		}})
	}
	if len(found) == 0 {
		return "", "", errors.Join(missing...)
	}
	var plain Flavour
	if path := find(searchPath(), program(family)); path != "" {
		plain, _, _ = identify(ctx, path) // what it says counts only if it can be read
	}
	return detect(ctx, found, plain)
}

// A candidate is one flavour whose tools are installed.
type candidate struct {
	flavour Flavour
	tables  Tables
	// works tells whether the kernel takes rules in this flavour.
	works func(context.Context) error
}

// evidence is what one flavour's tables hold.
type evidence struct {
	// hint is a chain by which the kubelet marks its flavour.
	hint        string
	kube, rules int
}

// kubeletHints are the chains in table mangle by which the kubelet's flavour can be told. The first is made for that,
// the second lets the kubelet notice a flush.
func kubeletHints() []string { return []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"} }

func detect(ctx context.Context, found []candidate, plain Flavour) (Flavour, string, error) {
	seen := make([]evidence, len(found))
	var errs []error
	// Mangle first, and alone: it is small, and usually decides.
	for i, c := range found {
		errs = append(errs, seen[i].take(ctx, c.tables, "mangle"))
		if seen[i].hint != "" {
			return c.flavour, fmt.Sprintf("the kubelet made chain %s there", seen[i].hint), nil
		}
	}
	for i, c := range found {
		for _, table := range []string{"nat", "filter", "raw"} {
			errs = append(errs, seen[i].take(ctx, c.tables, table))
		}
	}
	if err := ctx.Err(); err != nil {
		return "", "", fmt.Errorf("detect the flavour of iptables: %w", err)
	}
	if i := most(seen, func(e evidence) int { return e.kube }); i >= 0 {
		return found[i].flavour, fmt.Sprintf("%d chains of Kubernetes are there", seen[i].kube), nil
	}
	if i := most(seen, func(e evidence) int { return e.rules }); i >= 0 {
		return found[i].flavour, fmt.Sprintf("%d rules are there, more than in the other flavour", seen[i].rules), nil
	}
	for _, c := range found {
		if c.flavour == plain {
			return c.flavour, "the plain iptables command is of that flavour", nil
		}
	}
	for _, c := range found {
		err := c.works(ctx)
		if err == nil {
			return c.flavour, "nothing else tells, and it works", nil
		}
		errs = append(errs, err)
	}
	return "", "", fmt.Errorf("no flavour of iptables works: %w", errors.Join(errs...))
}

// most gives the index of the largest value; -1 if there is none above 0, or two alike.
func most(seen []evidence, value func(evidence) int) int {
	best, tie := -1, false
	for i, e := range seen {
		switch {
		case value(e) == 0:
		case best < 0 || value(e) > value(seen[best]):
			best, tie = i, false
		case value(e) == value(seen[best]):
			tie = true
		}
	}
	if tie {
		return -1
	}
	return best
}

// take adds what a table holds. A table that cannot be read adds nothing.
func (e *evidence) take(ctx context.Context, tables Tables, table string) error {
	text, err := tables.Save(ctx, table)
	if err != nil {
		return err
	}
	for line := range bytes.Lines(text) {
		switch line[0] {
		case ':':
			name, _, _ := strings.Cut(string(line[1:]), " ")
			if strings.HasPrefix(name, "KUBE-") && name != probeChain {
				e.kube++
			}
			for _, hint := range kubeletHints() {
				if table == "mangle" && name == hint && e.hint == "" {
					e.hint = hint
				}
			}
		case '-':
			e.rules++
		}
	}
	return nil
}

// Supported tells whether the kernel takes NAT and filter rules of a family in a flavour: nil if so, an error of class
// ErrUnsupported if not, any other if it could not be told. It may leave the empty tables nat and filter behind.
func Supported(ctx context.Context, family model.Family, flavour Flavour) error {
	c, err := open(ctx, family, flavour, searchPath())
	if err != nil {
		return err
	}
	answers := Probe(ctx, c, family, FeatureDNAT, FeatureReject)
	return errors.Join(answers[FeatureDNAT], answers[FeatureReject])
}
