// Package cli is the command line: one file a command, and the wiring of the daemon. It decides what is printed, what
// is asked of whom, and with which status the process ends. All policy lives in other packages; nothing but
// cmd/turnout imports this one.
//
// Read Main, then the file of the command in question.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/turnout-proxy/turnout/internal/config"
)

// The statuses that a process ends with.
const (
	statusOK      = 0
	statusFailure = 1
	statusUsage   = 2
	// statusRefused and statusPass are answers of trace, not failures.
	statusRefused = 3
	statusPass    = 4
)

// A statusError ends the process with a status of its own. An empty text prints nothing.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string { return e.text }

// usagef is a mistake in the command line.
func usagef(format string, args ...any) error {
	return &statusError{status: statusUsage, text: fmt.Sprintf(format, args...)}
}

// An app is what the commands share: where to print, and which version this is.
type app struct {
	stdout, stderr io.Writer
	version        string
	// getuid tells who runs the process.
	getuid func() int
}

// Main runs a command line, the program's name first, and gives the status to end with. The version is what the linker
// was told; it may be empty. Under the name kube-proxy the whole line belongs to the daemon.
func Main(args []string, stdout, stderr io.Writer, version string) int {
	a := &app{stdout: stdout, stderr: stderr, version: version, getuid: os.Getuid}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// A second signal ends a process that does not heed the first.
	context.AfterFunc(ctx, stop)
	name, rest := "turnout", []string(nil)
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	asKubeProxy := name == "kube-proxy"
	root := a.root()
	if asKubeProxy {
		root = a.kubeProxy()
	}
	root.SetArgs(rest)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return statusOK
	}
	status := statusFailure
	if own, ok := errors.AsType[*statusError](err); ok {
		status = own.status
	}
	if text := oneLine(err); text != "" {
		fmt.Fprintf(stderr, "turnout: %s\n", text)
	}
	if asKubeProxy {
		// Upstream knows no other failure.
		status = min(status, statusFailure)
	}
	return status
}

// oneLine folds an error into one line.
func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), "; ")
}

const rootLong = `Turnout forwards the traffic of Kubernetes Services on this node, in place of kube-proxy.

Exit status: 0 done, 1 failed, 2 wrong use. trace has two more, see turnout trace --help.`

const rootExample = `  turnout proxy --config /var/lib/kube-proxy/config.conf
  turnout ls
  turnout trace 10.244.1.5 10.96.0.1:443`

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use: "turnout", Short: "Kubernetes Service proxy for a node", Long: rootLong, Example: rootExample,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			return cmd.Help()
		},
		Args: cobra.ArbitraryArgs, Version: a.versionText(),
	}
	root.AddCommand(a.proxyCommand(), a.lsCommand(), a.traceCommand(), a.cleanupCommand(), a.versionCommand())
	// Its own flag, as cobra's would take -v, which is the log's.
	root.Flags().Bool("version", false, "print the version")
	a.style(root)
	root.InitDefaultCompletionCmd()
	return root
}

// style makes errors one line, and help and its order the same for all commands.
func (a *app) style(root *cobra.Command) {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetGlobalNormalizationFunc(config.Normalize)
	root.SetFlagErrorFunc(flagError)
	for _, c := range append(root.Commands(), root) {
		if c.Flags().Lookup("manifests") != nil {
			// The error says only that the flag is absent.
			_ = c.MarkFlagDirname("manifests")
		}
	}
}

// flagError says which flag is wrong, and which one might have been meant.
func flagError(cmd *cobra.Command, err error) error {
	if absent, ok := errors.AsType[*pflag.NotExistError](err); ok && absent.GetSpecifiedShortnames() == "" {
		name := absent.GetSpecifiedName()
		if near := nearestFlag(cmd, name); near != "" {
			return usagef("unknown flag --%s; did you mean --%s?", name, near)
		}
		return usagef("unknown flag --%s; see %s --help", name, cmd.CommandPath())
	}
	return usagef("%s", err)
}

func nearestFlag(cmd *cobra.Command, name string) string {
	best, least := "", 3
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		if d := distance(name, f.Name); d < least {
			best, least = f.Name, d
		}
	})
	return best
}

func unknownCommand(cmd *cobra.Command, name string) error {
	best, least := "", 3
	for _, c := range cmd.Commands() {
		if d := distance(name, c.Name()); c.IsAvailableCommand() && d < least {
			best, least = c.Name(), d
		}
	}
	if best != "" {
		return usagef("unknown command %q; did you mean %s?", name, best)
	}
	return usagef("unknown command %q; see turnout --help", name)
}

// distance counts the letters to add, remove or replace to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// noArgs refuses positional arguments in upstream's words.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%q does not take any arguments, got %q", cmd.CommandPath(), args)
	}
	return nil
}
