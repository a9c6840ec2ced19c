package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// kubeVersion is the release of Kubernetes whose kube-proxy this version stands in for.
const kubeVersion = "v1.37.2"

// A build says what this binary is.
type build struct {
	Version    string `json:"version"`
	Commit     string `json:"commit,omitempty"`
	Date       string `json:"date,omitempty"`
	Kubernetes string `json:"kubernetes"`
	Go         string `json:"go"`
	Platform   string `json:"platform"`
}

func (a *app) build() build {
	b := build{
		Version: a.version, Kubernetes: kubeVersion, Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	changed := false
	if bi, ok := debug.ReadBuildInfo(); ok {
		if b.Version == "" {
			b.Version = bi.Main.Version
		}
		for _, s := range bi.Settings {
			switch s.Key {
			case "vcs.revision":
				b.Commit = s.Value
			case "vcs.time":
				b.Date = s.Value
			case "vcs.modified":
				changed = s.Value == "true"
			}
		}
	}
	if b.Version == "" {
		b.Version = "(devel)"
	}
	if changed && b.Commit != "" {
		b.Commit += "-modified"
	}
	return b
}

func (a *app) versionText() string {
	b := a.build()
	return fmt.Sprintf("turnout %s (in place of kube-proxy %s, %s, %s)", b.Version, b.Kubernetes, b.Go, b.Platform)
}

func (a *app) versionCommand() *cobra.Command {
	output := outputText
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs, ValidArgsFunction: cobra.NoFileCompletions,
		Long: "Print the version of this binary and the kube-proxy release that it stands in for.\n\n" +
			"Exit status: 0 printed, 2 wrong use.",
		Example: "  turnout version\n  turnout version -o json",
		RunE: func(*cobra.Command, []string) error {
			if output == outputJSON {
				return printJSON(a.stdout, a.build())
			}
			return written(fmt.Fprintln(a.stdout, a.versionText()))
		},
	}
	addOutput(cmd, &output, outputText, outputJSON)
	return cmd
}

// The forms that commands print in.
const (
	outputText  = "text"
	outputTable = "table"
	outputWide  = "wide"
	outputJSON  = "json"
	outputYAML  = "yaml"
)

// addOutput adds the flag -o with the given choices; another value is wrong use.
func addOutput(cmd *cobra.Command, value *string, choices ...string) {
	cmd.Flags().StringVarP(value, "output", "o", *value, "form of the output: "+orList(choices))
	run := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		for _, c := range choices {
			if *value == c {
				if run != nil {
					return run(cmd, args)
				}
				return nil
			}
		}
		return usagef("output form %q is not %s", *value, orList(choices))
	}
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(choices, cobra.ShellCompDirectiveNoFileComp))
}
