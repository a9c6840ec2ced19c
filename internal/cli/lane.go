package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/turnout-proxy/turnout/internal/backend/iptables"
	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/conntrack"
	"github.com/turnout-proxy/turnout/internal/kernel/sysctl"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/loop"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A seat is where one IP family is served: the tools for its rules.
type seat struct {
	family  model.Family
	tables  xtables.Tables
	flavour xtables.Flavour
	// reason tells why it is this flavour.
	reason string
	err    error
}

// openSeats finds the tools for each IP family that this machine has.
func openSeats(ctx context.Context, cfg *config.Config, log *slog.Logger) []*seat {
	var seats []*seat
	for _, f := range families() {
		if f == model.IPv6 && !ipv6Enabled() {
			log.Warn("Services of this IP family are not served", logkey.Family, f, logkey.Err,
				errors.New("IPv6 is switched off on this machine"))
			continue
		}
		seats = append(seats, &seat{family: f})
	}
	var opening sync.WaitGroup
	for _, s := range seats {
		opening.Go(func() { s.tables, s.flavour, s.reason, s.err = openTables(ctx, cfg.IPTables.Flavour, s.family) })
	}
	opening.Wait()
	return seats
}

// openLanes prepares each IP family that this machine can serve. It is an error if there is none.
func openLanes(
	ctx context.Context, cfg *config.Config, chosen choice, seats []*seat, log *slog.Logger,
) ([]loop.Family, error) {
	open := openLane
	if chosen.mode == config.ModeIPVS {
		prepareIPVS(ctx, cfg, log)
		open = openIPVSLane
	}
	var lanes []loop.Family
	var reasons []error
	for _, s := range seats {
		lane, err := loop.Family{}, s.err
		if err == nil {
			lane, err = open(ctx, cfg, chosen, s, log)
		}
		if err != nil {
			reasons = append(reasons, err)
			log.Warn("Services of this IP family are not served", logkey.Family, s.family, logkey.Err, err)
			continue
		}
		lanes = append(lanes, lane)
	}
	if len(lanes) == 0 {
		return nil, fmt.Errorf("%s is not available on this host: %w", chosen.mode, errors.Join(reasons...))
	}
	return lanes, nil
}

func openLane(ctx context.Context, cfg *config.Config, _ choice, s *seat, log *slog.Logger) (loop.Family, error) {
	f := s.family
	if err := supported(ctx, f, s.flavour); err != nil {
		return loop.Family{}, err
	}
	log.Info("Using iptables Proxier", logkey.Family, f, flavourKey, s.flavour, logkey.Reason, s.reason)
	builder := forward.NewBuilder(forwardConfig(cfg, config.ModeIPTables, f))
	if f == model.IPv4 && builder.Table().Context.NodePorts.Loopback {
		routeLocalnet(log)
	}
	options := iptablesOptions(cfg, f, s.flavour)
	options.AcceptInvalid = conntrackIsLiberal(log)
	adapt(&options, xtables.Probe(ctx, s.tables, f, xtables.FeatureBPF, xtables.FeatureRandomFully), log)
	return loop.Family{
		Family: f, Builder: builder, Backend: iptables.New(s.tables, options), Cleaner: cleaner{f, conntrack.Kernel{}},
	}, nil
}

// adapt leaves out of the rules what the kernel does not have. What could not be told counts as there: a rule that is
// refused shows up in the log, one that is missing would not.
func adapt(o *iptables.Options, probed map[xtables.Feature]error, log *slog.Logger) {
	for feature, off := range map[xtables.Feature]*bool{
		xtables.FeatureBPF: &o.NoBPF, xtables.FeatureRandomFully: &o.NoRandomFully,
	} {
		if err := probed[feature]; errors.Is(err, xtables.ErrUnsupported) {
			*off = true
			log.Info("The kernel lacks a feature and rules do without it", logkey.Family, o.Family, logkey.Object, feature,
				logkey.Err, err)
		}
	}
}

// conntrackIsLiberal tells whether the node was told to let TCP packets pass that connection tracking calls invalid. A
// rule that drops them would undo that.
func conntrackIsLiberal(log *slog.Logger) bool {
	const name = "net/netfilter/nf_conntrack_tcp_be_liberal"
	value, err := sysctl.New(sysctl.ProcSys).ReadInt(name)
	if err != nil || value == 0 {
		return false
	}
	log.Info("Left out the rule that drops invalid packets, as connection tracking is liberal", logkey.Object, name)
	return true
}

// routeLocalnet lets packets from 127.0.0.1 leave after a NodePort on it was translated. Without it NodePorts do not
// answer there, which is no reason to end.
func routeLocalnet(log *slog.Logger) {
	const name = "net/ipv4/conf/all/route_localnet"
	wrote, err := sysctl.New(sysctl.ProcSys).Ensure(name, "1")
	switch {
	case err != nil:
		log.Warn("NodePorts will not answer on 127.0.0.1", logkey.Object, name, logkey.Err, err)
	case wrote:
		log.Info("Set a kernel parameter so that NodePorts answer on 127.0.0.1; --iptables-localhost-nodeports=false "+
			"or --nodeport-addresses avoid it", logkey.Object, name)
	}
}

// ipv6Enabled tells whether the kernel has IPv6 and lets interfaces use it.
func ipv6Enabled() bool {
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		return false
	}
	value, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err != nil || strings.TrimSpace(string(value)) != "1"
}

// openTables finds the tools for a family. Whether the kernel takes what a mode writes with them is for the mode to try.
func openTables(
	ctx context.Context, want config.Flavour, f model.Family,
) (xtables.Tables, xtables.Flavour, string, error) {
	flavour, reason := xtables.Flavour(want), "--iptables-flavour"
	if want == config.FlavourAuto {
		var err error
		if flavour, reason, err = xtables.Detect(ctx, f); err != nil {
			return nil, "", "", err
		}
	}
	tables, err := xtables.Open(f, flavour) //nolint:contextcheck // it has a limit of its own
	if err != nil {
		return nil, "", "", err
	}
	return tables, flavour, reason, nil
}

// probeAttempts is how often the kernel is asked whether it takes rules, as long as no answer comes: a tool that was
// killed once must not cost a family its service until the next start.
const probeAttempts = 4

// supported tells whether a family can be served: nil if so.
func supported(ctx context.Context, f model.Family, flavour xtables.Flavour) error {
	var err error
	for range probeAttempts {
		err = xtables.Supported(ctx, f, flavour)
		switch {
		case err == nil, errors.Is(err, xtables.ErrBusy):
			// Somebody who holds the lock does so for a while; the loop tries again until the rules are written.
			return nil
		case errors.Is(err, xtables.ErrUnsupported), ctx.Err() != nil:
			return err
		}
	}
	return err
}

// A cleaner deletes the connection tracking entries that lead to endpoints which are gone.
type cleaner struct {
	family model.Family
	table  conntrack.Table
}

// Clean implements loop.Cleaner.
func (c cleaner) Clean(ctx context.Context, ix *flow.Index) (int, error) {
	protos := slices.DeleteFunc(flow.Protocols(), func(p model.Protocol) bool { return !ix.Wants(p) })
	return conntrack.Forget(ctx, c.table, c.family, protos, ix.Stale)
}
