package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/logkey"
)

const proxyLong = `Run the daemon: watch Services and EndpointSlices, write the node's forwarding rules, and keep
them as wanted until it is stopped. Rules stay when it ends, and a new start takes them over without disturbing a
connection.

Objects come from the API server, or with --manifests from a directory of YAML and JSON files that is watched. The flags
are kube-proxy's, and so is the file for --config; with a file most other flags are ignored, and a warning names them.

Exit status: 0 stopped by SIGTERM or SIGINT, 1 failed, 2 wrong use. Under the name kube-proxy it is 1 for wrong use too.`

const proxyExample = `  turnout proxy --config /var/lib/kube-proxy/config.conf
  turnout proxy --kubeconfig /var/lib/kube-proxy/kubeconfig.conf --cluster-cidr 10.244.0.0/16
  turnout proxy --manifests ./services --hostname-override node-a`

func (a *app) proxyCommand() *cobra.Command {
	o := config.NewOptions()
	version := "false"
	cmd := &cobra.Command{
		Use: "proxy", Short: "Run the daemon that forwards Service traffic", Long: proxyLong, Example: proxyExample,
		Args: noArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if version != "false" {
				return written(fmt.Fprintln(a.stdout, a.versionText()))
			}
			return a.proxy(cmd.Context(), o)
		},
	}
	o.AddFlags(cmd.Flags())
	cmd.Flags().StringVar(&version, "version", version, "print the version and end; true or raw")
	cmd.Flags().Lookup("version").NoOptDefVal = "true"
	cmd.Flags().SortFlags = false
	return cmd
}

// kubeProxy is the daemon as a program of its own, for images and units that start kube-proxy.
func (a *app) kubeProxy() *cobra.Command {
	cmd := a.proxyCommand()
	cmd.Use = "kube-proxy"
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.Example = "  kube-proxy --config /var/lib/kube-proxy/config.conf"
	a.style(cmd)
	return cmd
}

func (a *app) proxy(ctx context.Context, o *config.Options) error {
	cfg, notices, err := o.Complete()
	if err != nil {
		return err
	}
	if cfg.Cleanup {
		return a.cleanup(ctx, a.stdout, cfg)
	}
	log, err := newLogger(cfg.Log, a.stderr)
	if err != nil {
		return err
	}
	b := a.build()
	log.Info("Started turnout", logkey.Version, b.Version, kubernetesKey, b.Kubernetes, goKey, b.Go,
		logkey.Node, cfg.NodeName)
	for _, n := range notices {
		log.Warn("Looked at the configuration", logkey.Message, n)
	}
	return runDaemon(ctx, cfg, b.Version, log)
}
