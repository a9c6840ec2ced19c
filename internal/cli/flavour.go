package cli

import (
	"bytes"
	"context"
	"errors"

	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// detectFlavour takes the flavour that already holds Kubernetes chains, else nft, else legacy.
func detectFlavour(ctx context.Context, f model.Family) (xtables.Flavour, string, error) {
	var found xtables.Flavour
	var reasons []error
	for _, flavour := range []xtables.Flavour{xtables.NFT, xtables.Legacy} {
		tables, err := xtables.Open(f, flavour)
		if err != nil {
			reasons = append(reasons, err)
			continue
		}
		if found == "" {
			found = flavour
		}
		for _, table := range []string{"mangle", "nat"} {
			text, err := tables.Save(ctx, table)
			if err == nil && bytes.Contains(text, []byte(":KUBE-")) {
				return flavour, "it holds KUBE chains", nil
			}
		}
	}
	if found == "" {
		return "", "", errors.Join(reasons...)
	}
	return found, "no flavour holds KUBE chains", nil
}
