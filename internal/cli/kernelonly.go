package cli

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/iptables"
	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A place is where objects of a mode may be: those of one family, with rules of one flavour.
type place struct {
	family  model.Family
	mode    config.Mode
	flavour xtables.Flavour
	backend backend.Backend
}

func (p place) String() string { return fmt.Sprintf("%s %s (%s)", p.family, p.mode, p.flavour) }

// places gives every place that this machine can have: those of mode ipvs first, as its rules have names that mode
// iptables has, too. It is an error if there is none.
func places(ctx context.Context, cfg *config.Config) ([]place, error) {
	flavour := cfg.IPTables.Flavour
	var out, virtual []place
	var reasons []error
	for _, family := range families() {
		for _, f := range []xtables.Flavour{xtables.NFT, xtables.Legacy} {
			if flavour != config.FlavourAuto && string(flavour) != string(f) {
				continue
			}
			tables, err := xtables.Open(family, f) //nolint:contextcheck // it has a limit of its own
			if err != nil {
				reasons = append(reasons, err)
				continue
			}
			out = append(out, place{
				family, config.ModeIPTables, f, iptables.New(tables, iptablesOptions(cfg, family, f)),
			})
			// A kernel without virtual servers has none of ours.
			if k, err := ipvsKernel(ctx, cfg, tables); err == nil {
				virtual = append(virtual, place{family, config.ModeIPVS, f, ipvs.New(k, ipvsOptions(cfg, family))})
			}
		}
	}
	out = append(virtual, out...)
	if len(out) == 0 {
		return nil, errors.Join(reasons...)
	}
	return out, nil
}

// A sight is what one place holds of ours.
type sight struct {
	place
	observed backend.Observed
}

// look reads every place, without the knowledge of a daemon. A place that the kernel does not have holds nothing.
func look(ctx context.Context, cfg *config.Config) ([]sight, error) {
	all, err := places(ctx, cfg)
	if err != nil {
		return nil, err
	}
	var out []sight
	virtual := map[model.Family]bool{}
	for _, p := range all {
		if virtual[p.family] { // what mode iptables seems to have is part of what was seen
			continue
		}
		observed, err := p.backend.Observe(ctx)
		if errors.Is(err, xtables.ErrUnsupported) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", p, err)
		}
		counts := observed.Objects()
		if p.mode == config.ModeIPVS {
			// Rules alone may be those of mode iptables.
			if counts["set"] == 0 {
				continue
			}
			virtual[p.family] = true
		}
		if objects(observed) > 0 {
			out = append(out, sight{p, observed})
		}
	}
	return out, nil
}

// objects counts what is there of ours.
func objects(o backend.Observed) int {
	n := 0
	for _, count := range o.Objects() {
		n += count
	}
	return n
}

// kernelListing lists what the kernel holds; what is wanted is not known.
func kernelListing(ctx context.Context, cfg *config.Config) (answer.Listing, error) {
	l := answer.Listing{Source: answer.FromKernel, Mode: string(cfg.Mode), Rows: []answer.Row{}}
	sights, err := look(ctx, cfg)
	if err != nil {
		return l, err
	}
	for _, s := range sights {
		l.Mode = string(s.mode)
		l.Rows = append(l.Rows, answer.Held(s.family, s.observed.Rows())...)
		l.Families = append(l.Families, answer.Family{Family: s.family.String(), Objects: s.observed.Objects()})
	}
	return l, nil
}

// kernelTrace follows a packet through what the kernel holds. Packets meet both flavours: the first that does something
// with the packet counts.
func kernelTrace(ctx context.Context, cfg *config.Config, p forward.Packet, host []netip.Addr) (answer.Trace, error) {
	sights, err := look(ctx, cfg)
	if err != nil {
		return answer.Trace{}, err
	}
	family := model.FamilyOf(p.Dst.Addr())
	p = answer.Placed(p, hostAddrs(host, family))
	nothing := answer.FromObjects(p, backend.Trace{}, nil)
	nothing.Source, nothing.Mode = answer.FromKernel, string(cfg.Mode)
	if len(sights) == 0 {
		nothing.Explanation = "no daemon runs and the kernel holds no Service rules, so the packet is left alone"
	}
	c := &forward.Context{Family: family, HostAddrs: hostAddrs(host, family)}
	for _, s := range sights {
		o, can := s.observed.(interface {
			Trace(*forward.Context, forward.Packet) (backend.Trace, error)
		})
		if s.family != family || !can {
			continue
		}
		bt, err := o.Trace(c, p)
		if err != nil {
			return answer.Trace{}, fmt.Errorf("follow the packet through %s: %w", s.place, err)
		}
		nothing.Mode = string(s.mode)
		if bt.Outcome.Do == forward.Pass {
			continue
		}
		tr := answer.FromObjects(p, bt, answer.Held(s.family, s.observed.Rows()))
		tr.Source, tr.Mode = answer.FromKernel, string(s.mode)
		return tr, nil
	}
	return nothing, nil
}

// hostAddrs leaves the addresses of a family, without zones.
func hostAddrs(all []netip.Addr, f model.Family) []netip.Addr {
	var out []netip.Addr
	for _, a := range all {
		if model.FamilyOf(a) == f {
			out = append(out, a.Unmap().WithZone(""))
		}
	}
	return out
}

// objectsText writes counts for people: "12 chains, 40 rules".
func objectsText(counts map[string]int) string {
	var parts []string
	for _, kind := range []string{"chain", "rule", "set", "entry", "virtual server", "destination", "local address"} {
		n, has := counts[kind]
		many := kind + "s"
		switch kind {
		case "entry":
			many = "entries"
		case "local address":
			many = kind + "es"
		}
		switch {
		case !has || n == 0 && kind != "chain" && kind != "rule":
		case n == 1:
			parts = append(parts, "1 "+kind)
		default:
			parts = append(parts, fmt.Sprintf("%d %s", n, many))
		}
	}
	return strings.Join(parts, ", ")
}
