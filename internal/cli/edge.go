package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"sync"
	"time"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/health"
	"github.com/turnout-proxy/turnout/internal/kernel/link"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/kube"
	"github.com/turnout-proxy/turnout/internal/watch/kube/event"
	"github.com/turnout-proxy/turnout/internal/watch/manifest"
)

// A source delivers objects to a sink until the context ends.
type source func(ctx context.Context, sink model.Sink) error

// openSource prepares the source that the configuration names, and gives how the API server is reached if it is one. What
// cannot work is found here, before anything is touched; a server that is away is not an error.
func openSource(cfg *config.Config, version string, log *slog.Logger) (source, *kube.Server, error) {
	if cfg.Manifests != "" {
		log.Info("Reading objects from a directory", logkey.Path, cfg.Manifests)
		return func(ctx context.Context, sink model.Sink) error {
			return manifest.Watch(ctx, cfg.Manifests, cfg.NodeName, sink)
		}, nil, nil
	}
	c := cfg.Client
	server, err := kube.RESTConfig(kube.Connection{
		Kubeconfig: c.Kubeconfig, Master: c.Master, AcceptContentTypes: c.AcceptContentTypes, ContentType: c.ContentType,
		QPS: c.QPS, Burst: c.Burst, UserAgent: "kube-proxy/" + kubeVersion + " turnout/" + version,
	})
	if err != nil {
		return nil, nil, err
	}
	log.Info("Reading objects from the API server", logkey.Address, server.Host)
	away := &outages{log: log, now: time.Now, seen: map[string]outage{}}
	return func(ctx context.Context, sink model.Sink) error {
		return kube.Run(ctx, kube.Config{REST: server, NodeName: cfg.NodeName, OnStatus: away.report}, sink)
	}, server, nil
}

// openEvents prepares to post Events to an API server; with none there is nobody to tell.
func (d *daemon) openEvents(server *kube.Server) error {
	if server == nil {
		return nil
	}
	var err error
	d.events, err = event.New(event.Config{
		REST: server, NodeName: d.cfg.NodeName,
		Count:  func(r event.Result) { d.metrics.Event(string(r)) },
		Report: func(err error) { d.log.Warn("Events do not get through", logkey.Err, err) },
	})
	return err
}

// announce tells in Events that the daemon starts, and if another mode stands in for the one that was asked for.
func (d *daemon) announce() {
	d.events.Node("Starting", "", false)
	if d.chosen.why != nil {
		d.events.Node("ProxyModeFallback", fmt.Sprintf("mode %s stands in for mode %s: %v", d.chosen.mode, d.cfg.Mode,
			d.chosen.why), true)
	}
}

// outageRepeat is how soon an outage is logged again if its reason changes.
const outageRepeat = time.Minute

// Outages log that an API server does not answer: once when it begins, again when the reason changes, and once when it
// is over.
type outages struct {
	log *slog.Logger
	now func() time.Time

	mu   sync.Mutex
	seen map[string]outage
}

// An outage is what was last logged of one resource.
type outage struct {
	text string
	at   time.Time
}

// report takes what kube.Config.OnStatus is told.
func (o *outages) report(resource string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	last, known := o.seen[resource]
	switch {
	case err == nil:
		if known {
			o.log.Info("The API server answered again", logkey.Kind, resource)
		}
		delete(o.seen, resource)
	case !known || err.Error() != last.text && o.now().Sub(last.at) >= outageRepeat:
		o.log.Error("The API server did not answer, and what is known stays in force", logkey.Kind, resource,
			logkey.Err, err)
		o.seen[resource] = outage{err.Error(), o.now()}
	default:
		o.log.Debug("The API server still did not answer", logkey.Kind, resource, logkey.Err, err)
	}
}

// hostRetry is how long a failed watch of this machine's addresses rests.
const hostRetry = time.Second

// watchHost keeps the loop told of this machine's addresses.
func (d *daemon) watchHost(ctx context.Context) error {
	for {
		err := link.Watch(ctx, d.loop.SetHost)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end was asked for
		}
		d.log.Error("Lost sight of this machine's addresses", logkey.Err, err, logkey.Retry, hostRetry)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(hostRetry):
		}
	}
}

// newHealth gives the daemon's health, which counts and logs what it does.
func (d *daemon) newHealth() *health.Health {
	return health.New(health.Config{
		Timeout: 2 * d.cfg.SyncPeriod, NodeOptional: d.cfg.Manifests != "",
		Answered: func(path string, status int) {
			if path == "/livez" {
				d.metrics.Livez(status)
			} else {
				d.metrics.Healthz(status)
			}
		},
		Report: func(s health.Service, family model.Family, err error) {
			if err != nil {
				d.log.Error("A Service's health check port could not be opened", logkey.Service, s.Name,
					logkey.Family, family, logkey.Address, s.Port, logkey.Err, err)
				return
			}
			d.log.Info("A Service's health check port was opened after all", logkey.Service, s.Name, logkey.Family, family)
		},
		Opened: d.metrics.HealthPorts,
	})
}

// serve runs one of the daemon's own HTTP servers until the context ends. An address that cannot be opened is tried
// again, or with the hard-fail setting is an error.
func (d *daemon) serve(
	ctx context.Context, name string, addr netip.AddrPort, h http.Handler, writeTimeout time.Duration,
) error {
	server := &health.Server{
		Addr: addr.String(), Handler: h, WriteTimeout: writeTimeout, Strict: d.cfg.HardFail,
		Report: func(err error) {
			if err != nil {
				d.log.Error("A server's address could not be opened and is tried again", logkey.Component, name,
					logkey.Address, addr, logkey.Err, err)
				return
			}
			d.log.Info("A server's address was opened after all", logkey.Component, name, logkey.Address, addr)
		},
	}
	if err := server.Run(ctx); err != nil {
		return fmt.Errorf("%s server: %w", name, err)
	}
	return nil
}

func (d *daemon) metricsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", d.metrics.Handler())
	mux.HandleFunc("/healthz", plainText("ok"))
	mux.HandleFunc("/healthz/ping", plainText("ok"))
	mux.HandleFunc("/proxyMode", plainText(string(d.chosen.mode)))
	if d.cfg.Profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

func plainText(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write([]byte(text))
	}
}
