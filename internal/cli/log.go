package cli

import (
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/turnout-proxy/turnout/internal/config"
)

// frames is how many calls lie between a log statement and klog's look at its caller, on the way through slog: the
// bridge's Enabled, and slog's Enabled, log and Info. It is what -vmodule goes by.
const frames = 3

// The keys of log lines that nothing else writes; those that others share are in package logkey.
const (
	kubernetesKey = "kubernetes"
	goKey         = "go"
	flavourKey    = "flavour"
	askedKey      = "asked"
	schedulerKey  = "scheduler"
	addressesKey  = "addresses"
	releaseKey    = "kernel"
	valueKey      = "value"
)

// The keys of a JSON line's head.
const (
	tsKey     = "ts"
	callerKey = "caller"
	levelKey  = "v"
)

// newLogger gives a logger in the format that kube-proxy's operators and their tools know, and makes the client
// libraries, which log through klog, write to the same place in the same form.
func newLogger(c config.Log, stderr io.Writer) (*slog.Logger, error) {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	klog.InitFlags(flags)
	settings := [][2]string{{"logtostderr", "true"}, {"v", strconv.Itoa(c.Verbosity)}, {"vmodule", c.VModule}}
	if stderr != os.Stderr {
		klog.SetOutput(stderr)
		settings[0] = [2]string{"logtostderr", "false"}
	}
	for _, s := range settings {
		if err := flags.Set(s[0], s[1]); err != nil {
			return nil, fmt.Errorf("set up the log: %s %q: %w", s[0], s[1], err)
		}
	}
	if c.Format == "json" {
		logger := slog.New(jsonHandler(c, stderr))
		klog.SetSlogLogger(logger)
		return logger, nil
	}
	return slog.New(logr.ToSlogHandler(klog.NewKlogr().WithCallDepth(frames))), nil
}

// jsonHandler writes one JSON object a line, with the keys that Kubernetes components use: ts in milliseconds, caller,
// msg, and v for the verbosity of what is not an error.
func jsonHandler(c config.Log, w io.Writer) slog.Handler {
	return slog.NewJSONHandler(w, &slog.HandlerOptions{
		AddSource: true, Level: slog.Level(-min(c.Verbosity, math.MaxInt16)),
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) > 0 {
				return a
			}
			return jsonAttr(a)
		},
	})
}

func jsonAttr(a slog.Attr) slog.Attr {
	switch a.Key {
	case slog.TimeKey:
		if a.Value.Kind() == slog.KindTime {
			return slog.Float64(tsKey, float64(a.Value.Time().UnixMicro())/float64(time.Millisecond/time.Microsecond))
		}
	case slog.SourceKey:
		if src, ok := a.Value.Any().(*slog.Source); ok && src != nil {
			return slog.String(callerKey, filepath.Base(src.File)+":"+strconv.Itoa(src.Line))
		}
	case slog.LevelKey:
		level, ok := a.Value.Any().(slog.Level)
		switch {
		case !ok:
		case level >= slog.LevelError:
			return slog.Attr{}
		default:
			return slog.Int(levelKey, max(0, -int(level)))
		}
	}
	return a
}
