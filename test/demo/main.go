// Command demo shows what Turnout does, on one machine and in less than a minute: it builds a small cluster out of network
// namespaces, runs the daemon on each node from a directory of YAML, sends traffic through every kind of Service address,
// scales an endpoint away and kills a daemon while traffic runs, and says in plain words what happened. It decides what is
// shown and what counts as kept promise; the cluster is package netns, the daemon is the built binary, started as a user
// would. It must not import any internal package but model: what it shows is what the commands give.
//
// Exit status: 0 everything was as promised (or, without root, what can run did), 1 something was not, 2 wrong use.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

// options are the flags.
type options struct {
	binary, manifests, mode string
	colour                  bool
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	var o options
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.binary, "turnout", "bin/turnout", "the program to show")
	flags.StringVar(&o.manifests, "manifests", "examples/shop", "directory with the Services")
	flags.StringVar(&o.mode, "mode", "iptables", "proxy mode")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if flags.NArg() > 0 {
		_, _ = fmt.Fprintf(stderr, "demo: unexpected argument %q\n", flags.Arg(0))
		return 2
	}
	// A closed pipe ("make demo | head") ends the demo too, but not before it has tidied up.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGPIPE)
	defer stop()
	o.colour = isTerminal(stdout)
	err := show(ctx, o, stdout)
	var inner *exec.ExitError
	if errors.As(err, &inner) && inner.ExitCode() > 0 {
		return inner.ExitCode() // the demo in the user namespace has said why
	}
	if status, ok := errors.AsType[guestError](err); ok {
		return int(status)
	}
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "demo:", err)
		return 1
	}
	return 0
}

// show picks what can be shown here.
func show(ctx context.Context, o options, out io.Writer) error {
	if os.Getenv(insideEnv) == "probe" {
		return probeInside()
	}
	t, err := newTool(o)
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.knowsMode(ctx); err != nil {
		return err
	}
	s := newScreen(out, o.colour)
	if o.mode == "ipvs" && os.Getenv(guestEnv) == "" && os.Getenv(insideEnv) == "" {
		if why := lacksIPVS(ctx); why != "" {
			return inGuest(ctx, s, why)
		}
	}
	switch {
	case os.Geteuid() != 0:
		return unprivileged(ctx, t, s)
	case os.Getenv(insideEnv) != "":
		s.say("Not root, so all of this happens in a user namespace.", "")
	default:
		if err := install(ctx, s); err != nil {
			return err
		}
	}
	switch err := probeInside(); {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		// Root in a container may be less than root.
		return offline(ctx, t, s, err.Error())
	case err != nil:
		return err
	}
	story := newStory(t, s)
	defer story.close()
	if err := story.tell(ctx); err != nil {
		return err
	}
	if n := s.broken(); n > 0 {
		return fmt.Errorf("%d of %d promises were not kept; they are marked above", n, s.promises)
	}
	return nil
}

// offline shows what needs no root: the same objects, decided without touching the kernel.
func offline(ctx context.Context, t *tool, s *screen, why string) error {
	s.title("Turnout, offline")
	s.say("The whole demo builds a cluster out of network namespaces, which is not possible now:", "  "+why, "",
		"It works as root, outside of a container or in a privileged one:", "  sudo make demo", "",
		"What follows needs nothing: the tools work from a directory of YAML alone, too.")
	steps := []struct {
		heading string
		args    []string
	}{
		{"What node na would forward", []string{"ls"}},
		{
			"What would happen to a client far away that dials the web shop",
			[]string{"trace", "198.51.100.7", "192.0.2.10:80"},
		},
		{
			"The same client at the admin console, which admits the nodes' network only",
			[]string{"trace", "198.51.100.7", "192.0.2.20:80"},
		},
		{"A pod that dials a Service without endpoints", []string{"trace", "10.60.1.21", "10.70.1.99:80"}},
	}
	for _, step := range steps {
		s.section(step.heading)
		if err := t.print(ctx, s, t.offlineArgs(step.args...)...); err != nil {
			return err
		}
	}
	s.say("", "Run it as root to see traffic: sudo make demo")
	return nil
}

// errInterrupted ends the story early.
var errInterrupted = errors.New("interrupted")
