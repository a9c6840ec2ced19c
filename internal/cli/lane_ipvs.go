package cli

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/conntrack"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	edge "github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/route"
	"github.com/turnout-proxy/turnout/internal/kernel/sysctl"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/loop"
	"github.com/turnout-proxy/turnout/internal/model"
)

// openIPVSLane prepares one IP family for mode ipvs.
func openIPVSLane(
	ctx context.Context, cfg *config.Config, chosen choice, s *seat, log *slog.Logger,
) (loop.Family, error) {
	k, err := ipvsKernel(ctx, cfg, s.tables)
	if err != nil {
		return loop.Family{}, err
	}
	options := ipvsOptions(cfg, s.family)
	options.Masquerading.NoRandomFully = chosen.noRandomFully[s.family]
	log.Info("Using ipvs Proxier", logkey.Family, s.family, schedulerKey, options.Scheduler.Name,
		addressesKey, cfg.IPVS.Addresses, flavourKey, s.flavour, logkey.Reason, s.reason)
	return loop.Family{
		Family: s.family, Builder: forward.NewBuilder(forwardConfig(cfg, config.ModeIPVS, s.family)),
		Backend: ipvs.New(k, options), Cleaner: cleaner{s.family, conntrack.Kernel{}},
	}, nil
}

// ipvsKernel opens the edges of mode ipvs beside the rules.
func ipvsKernel(ctx context.Context, cfg *config.Config, rules xtables.Tables) (ipvs.Kernel, error) {
	servers, err := edge.Open(ctx)
	if err != nil {
		return ipvs.Kernel{}, err
	}
	k := ipvs.Kernel{
		Rules: rules, Sets: ipset.NewKernel(), Servers: servers,
		Routes: route.Kernel{}, Former: route.Dummy{Name: route.UpstreamDevice},
	}
	if cfg.IPVS.Addresses == config.AddressesDevice {
		k.Routes, k.Former = k.Former, k.Routes
	}
	return k, nil
}

// ipvsOptions gives the mode's options. The scheduler was read when the mode was chosen; where it was not, as nothing is
// to be written, one that cannot be read counts as none.
func ipvsOptions(c *config.Config, f model.Family) ipvs.Options {
	o := ipvs.Options{
		Family: f, Masquerading: ruleset.Masquerading{Bit: c.IPTables.MasqueradeBit}, Exclude: c.IPVS.ExcludeCIDRs,
		Drain: c.IPVS.Drain,
	}
	if s, err := ipvs.ParseScheduler(c.IPVS.Scheduler); err == nil {
		o.Scheduler = s
	}
	return o
}

// prepareIPVS sets what mode ipvs needs of the machine as a whole. What the kernel refuses is told and does not stop it.
func prepareIPVS(ctx context.Context, cfg *config.Config, log *slog.Logger) {
	major, minor, release, err := kernel.Release()
	if err != nil {
		log.Warn("The kernel's version is not known and taken for a new one", logkey.Err, err)
		major = 1 << 10
	}
	parameters, notice := ipvs.Parameters(major, minor, cfg.IPVS.StrictARP)
	if notice != "" {
		log.Warn("This kernel's IPVS has a fault", releaseKey, release, logkey.Message, notice)
	}
	tree := sysctl.New(sysctl.ProcSys)
	for _, p := range parameters {
		wrote, err := tree.Ensure(p.Name, p.Value)
		switch {
		case err != nil:
			log.Warn("A kernel parameter could not be set", logkey.Object, p.Name, valueKey, p.Value,
				logkey.Message, p.Without, logkey.Err, err)
		case wrote:
			log.Info("Set a kernel parameter", logkey.Object, p.Name, valueKey, p.Value, releaseKey, release)
		default:
			log.Debug("A kernel parameter is right", logkey.Object, p.Name, valueKey, p.Value)
		}
	}
	t := edge.Timeouts{TCP: cfg.IPVS.TCPTimeout, TCPFin: cfg.IPVS.TCPFinTimeout, UDP: cfg.IPVS.UDPTimeout}
	if t == (edge.Timeouts{}) {
		return
	}
	engine, err := edge.Open(ctx)
	if err == nil {
		err = engine.SetTimeouts(ctx, t)
	}
	if err != nil {
		log.Warn("The timeouts of connections could not be set", logkey.Err, fmt.Errorf("%+v: %w", t, err))
	}
}
