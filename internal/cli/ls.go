package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/control"
	"github.com/turnout-proxy/turnout/internal/control/answer"
)

const lsLong = `List what this node forwards: one line for each address that clients dial.

With a daemon on the socket each line is compared with what the kernel holds (column DRIFT: none, missing, extra or
changed). Without one the kernel alone is read. With --manifests neither is asked: the list is what a daemon would
program for the objects of the directory.

In mode ipvs each line also has the scheduler and the numbers of active and inactive connections; with -o wide each
endpoint has its share, and its weight and connections as "/wWEIGHT/ACTIVE+INACTIVE". --connections lists the connections
themselves, as ipvsadm -Lnc does.

SERVICE restricts the list to one Service: NAME, NAMESPACE/NAME, or either with :PORTNAME.

Exit status: 0 listed, 1 failed, 2 wrong use. An empty list is no failure.`

const lsExample = `  turnout ls
  turnout ls -n shop -o wide
  turnout ls shop/web:http -o json
  turnout ls shop/web --connections
  turnout ls --manifests ./services --node node-a`

func (a *app) lsCommand() *cobra.Command {
	o := config.NewOptions()
	output, namespace := outputTable, ""
	connections, limit := false, defaultConnections
	cmd := &cobra.Command{
		Use: "ls [SERVICE]", Aliases: []string{"list"}, Short: "List what the node forwards", Long: lsLong,
		Example: lsExample,
		Args:    atMostOne, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, _, err := o.Complete()
			if err != nil {
				return err
			}
			l, err := a.listing(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			service := ""
			if len(args) == 1 {
				service = args[0]
			}
			l.Select(namespace, service)
			l.Sort()
			if !connections {
				return a.printListing(&l, output)
			}
			c, err := a.connections(cmd.Context(), &l, limit, namespace != "" || service != "")
			if err != nil {
				return err
			}
			return a.printConnections(&c, output)
		},
	}
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "list Services of this namespace only")
	cmd.Flags().BoolVar(&connections, "connections", false, "list the connections of mode ipvs instead")
	cmd.Flags().IntVar(&limit, "limit", limit, "how many connections are listed at most; 0 is all")
	o.AddOfflineFlags(cmd.Flags())
	addOutput(cmd, &output, outputTable, outputWide, outputJSON, outputYAML)
	return cmd
}

func atMostOne(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return usagef("%s takes at most one Service, got %q", cmd.CommandPath(), args)
	}
	return nil
}

// listing asks the best source there is.
func (a *app) listing(ctx context.Context, cfg *config.Config) (answer.Listing, error) {
	if cfg.Manifests != "" {
		o, err := loadOffline(cfg, nil)
		if err != nil {
			return answer.Listing{}, err
		}
		return o.listing(), nil
	}
	l, err := control.NewClient(cfg.Socket).Listing(ctx)
	if errors.Is(err, control.ErrNoDaemon) {
		if err := a.needRoot("read the kernel's rules"); err != nil {
			return l, err
		}
		return kernelListing(ctx, cfg)
	}
	return l, err
}

// needRoot says early and in one line what would end in a puzzling refusal by some tool.
func (a *app) needRoot(what string) error {
	if a.getuid() != 0 {
		return errors.New("no daemon answers, and only root can " + what + "; run as root, or give --manifests")
	}
	return nil
}

func (a *app) printListing(l *answer.Listing, output string) error {
	switch output {
	case outputJSON:
		return printJSON(a.stdout, l)
	case outputYAML:
		return printYAML(a.stdout, l)
	}
	return renderListing(a.stdout, l, output == outputWide, colour(a.stdout))
}
