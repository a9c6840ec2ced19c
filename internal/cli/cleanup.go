package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/control"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

const cleanupLong = `Remove all that Turnout or kube-proxy left on this node, of all modes, both flavours of iptables and
both IP families, and nothing else: rules, IP sets, virtual servers, local routes and addresses. What other software made
stays, also a chain of ours that a foreign rule jumps to.

It refuses while a daemon answers on the socket, which would write the rules again; --force does it all the same.
Doing it twice is no failure.

Exit status: 0 clean, 1 failed or refused, 2 wrong use.`

const cleanupExample = `  turnout cleanup
  turnout cleanup --force --iptables-flavour nft`

func (a *app) cleanupCommand() *cobra.Command {
	force, socket, flavour := false, config.DefaultSocket, string(config.FlavourAuto)
	cmd := &cobra.Command{
		Use: "cleanup", Short: "Remove all that Turnout and kube-proxy left in the kernel", Long: cleanupLong,
		Example: cleanupExample,
		Args:    noArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch config.Flavour(flavour) {
			case config.FlavourAuto, config.FlavourLegacy, config.FlavourNFT:
			default:
				return usagef("--iptables-flavour %q is not auto, legacy or nft", flavour)
			}
			if !force {
				if err := refuseIfRunning(cmd.Context(), socket); err != nil {
					return err
				}
			}
			return a.cleanup(cmd.Context(), a.stdout, &config.Config{IPTables: config.IPTables{
				Flavour: config.Flavour(flavour), MasqueradeBit: config.DefaultMasqueradeBit,
			}})
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "do it also while a daemon answers on the socket")
	cmd.Flags().StringVar(&socket, "socket", socket, "unix socket of the daemon")
	cmd.Flags().StringVar(&flavour, "iptables-flavour", flavour, "flavour to clean: auto (both), legacy or nft")
	return cmd
}

// refuseIfRunning gives an error while a daemon answers.
func refuseIfRunning(ctx context.Context, socket string) error {
	status, err := control.NewClient(socket).Status(ctx)
	switch {
	case errors.Is(err, control.ErrNoDaemon):
		return nil
	case err != nil:
		return fmt.Errorf("%w; stop the daemon first, or give --force", err)
	}
	return fmt.Errorf("a daemon runs here as process %d and would write the rules again; stop it first, or give --force",
		status.PID)
}

// cleanup empties every place and says what it removed. A place that fails does not keep the others from being cleaned.
func (a *app) cleanup(ctx context.Context, w io.Writer, cfg *config.Config) error {
	if err := a.needRootAlways("remove rules"); err != nil {
		return err
	}
	all, err := places(ctx, cfg)
	if err != nil {
		return err
	}
	var failed []error
	removed := false
	clean := func(p place) error {
		text, err := empty(ctx, p)
		if err != nil {
			return fmt.Errorf("clean %s: %w", p, err)
		}
		if text == "" {
			return nil
		}
		removed = true
		return written(fmt.Fprintf(w, "%s: removed %s\n", p, text))
	}
	var again []place
	for _, p := range all {
		if err := clean(p); err != nil {
			again = append(again, p)
		}
	}
	// Rules of one flavour may name sets that were to go with those of the other, so what failed is tried once more.
	for _, p := range again {
		failed = append(failed, clean(p))
	}
	if err := errors.Join(failed...); err != nil {
		return err
	}
	if !removed {
		return written(fmt.Fprintln(w, "Nothing to remove."))
	}
	return nil
}

// empty syncs one place to the empty table and gives what was removed.
func empty(ctx context.Context, p place) (string, error) {
	b := p.backend
	b.Compile(nil, forward.Delta{})
	before, err := b.Observe(ctx)
	if errors.Is(err, xtables.ErrUnsupported) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	plan := b.Diff(before)
	if plan.Empty() {
		return "", nil
	}
	if r := b.Apply(ctx, plan); !r.OK() {
		return "", r.Err
	}
	after, err := b.Observe(ctx)
	if err != nil {
		return "", err
	}
	counts := before.Objects()
	for kind, n := range after.Objects() {
		counts[kind] -= n
	}
	return objectsText(counts), nil
}
