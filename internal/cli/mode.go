package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	edge "github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/module"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A choice is the mode that runs, and why it is not the one that was asked for; nil if it is.
type choice struct {
	mode config.Mode
	why  error
	// noRandomFully tells for mode ipvs where MASQUERADE cannot choose ports at random.
	noRandomFully map[model.Family]bool
}

// chooseMode finds out whether the mode that was asked for works here. If not it gives the one that stands in, or an
// error where none may.
func chooseMode(ctx context.Context, cfg *config.Config, seats []*seat, log *slog.Logger) (choice, error) {
	if cfg.Mode != config.ModeIPVS {
		return choice{mode: cfg.Mode}, nil
	}
	works, err := requireIPVS(ctx, cfg, seats)
	var lacks *ipvs.LackError
	if errors.As(err, &lacks) {
		if loading := module.Load(ctx, lacks.Modules...); loading != nil {
			log.Info("Could not load modules", logkey.Err, loading)
		}
		works, err = requireIPVS(ctx, cfg, seats)
	}
	switch {
	case err == nil:
		return works, nil
	case !errors.As(err, &lacks):
		// That it could not be told is no reason to change the mode: it may work the next time.
		return choice{}, fmt.Errorf("proxy mode ipvs: %w", err)
	case cfg.StrictMode:
		return choice{}, fmt.Errorf("proxy mode ipvs: %w; load them, or leave out --strict-proxy-mode to use iptables", err)
	}
	//nolint:sloglint // operators look for this line as it is, with the list at its end
	log.Error(fmt.Sprintf("IPVS proxier will not be used because the following required kernel modules are not loaded: %v",
		lacks.Modules), logkey.Err, errors.Join(lacks.Reasons...))
	log.Error("Fell back to mode iptables", askedKey, cfg.Mode)
	return choice{mode: config.ModeIPTables, why: err}, nil
}

// requireIPVS tries what mode ipvs needs, for each family that this machine serves.
func requireIPVS(ctx context.Context, cfg *config.Config, seats []*seat) (choice, error) {
	var places []*ipvs.Place
	for _, s := range seats {
		if s.err == nil {
			places = append(places, &ipvs.Place{Family: s.family, Rules: s.tables})
		}
	}
	works := choice{mode: config.ModeIPVS, noRandomFully: map[model.Family]bool{}}
	open := func(ctx context.Context) (edge.Engine, error) { return edge.Open(ctx) }
	err := ipvs.Require(ctx, open, ipset.NewKernel(), cfg.IPVS.Scheduler, places...)
	for _, p := range places {
		works.noRandomFully[p.Family] = p.NoRandomFully
	}
	return works, err
}
