package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/watch/kube"
)

// watchAPI follows an API server.
func (d *daemon) watchAPI(ctx context.Context) error {
	c := d.cfg.Client
	rest, err := kube.RESTConfig(kube.Connection{
		Kubeconfig: c.Kubeconfig, Master: c.Master, AcceptContentTypes: c.AcceptContentTypes, ContentType: c.ContentType,
		QPS: c.QPS, Burst: c.Burst, UserAgent: "kube-proxy/" + kubeVersion + " turnout/" + d.version,
	})
	if err != nil {
		return err
	}
	d.log.Info("Reading objects from the API server", logkey.Address, rest.Host)
	return kube.Run(ctx, kube.Config{REST: rest, NodeName: d.cfg.NodeName, OnStatus: d.sourceStatus}, d.loop.Sink())
}

// sourceStatus logs that an API server does not answer, and that it does again.
func (d *daemon) sourceStatus(resource string, err error) {
	if err != nil {
		d.log.Error("The API server did not answer, and what is known stays in force", logkey.Kind, resource, logkey.Err, err)
		return
	}
	d.log.Info("The API server answered again", logkey.Kind, resource)
}

// hostLook is how often this machine's addresses are looked at.
const hostLook = 5 * time.Second

// watchHost keeps the loop told of this machine's addresses.
func (d *daemon) watchHost(ctx context.Context) error {
	tick := time.NewTicker(hostLook)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		addrs, err := ownAddrs()
		if err != nil {
			d.log.Error("Did not list this machine's addresses", logkey.Err, err)
			continue
		}
		d.loop.SetHost(addrs)
	}
}

// How the metrics server bounds its clients.
const (
	metricsHeaderTimeout = 5 * time.Second
	metricsAnswerTimeout = 2 * time.Minute
	listenRetry          = 5 * time.Second
)

// serveMetrics serves what kube-proxy serves on its metrics address. An address that cannot be listened on is tried
// again, or with the hard-fail setting ends the daemon.
func (d *daemon) serveMetrics(ctx context.Context) error {
	for {
		err := serveHTTP(ctx, d.cfg.Metrics, d.metricsHandler())
		if ctx.Err() != nil {
			return nil
		}
		if d.cfg.HardFail {
			return fmt.Errorf("metrics server: %w", err)
		}
		d.log.Error("The metrics server is not up", logkey.Address, d.cfg.Metrics, logkey.Err, err, logkey.Retry, listenRetry)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(listenRetry):
		}
	}
}

func (d *daemon) metricsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", d.metrics.Handler())
	mux.HandleFunc("/healthz", plainText("ok"))
	mux.HandleFunc("/healthz/ping", plainText("ok"))
	mux.HandleFunc("/proxyMode", plainText(string(d.cfg.Mode)))
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

// serveHTTP serves until the context ends, and gives an error if that was not the reason.
func serveHTTP(ctx context.Context, addr netip.AddrPort, h http.Handler) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr.String())
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: h, ReadHeaderTimeout: metricsHeaderTimeout, ReadTimeout: metricsHeaderTimeout,
		WriteTimeout: metricsAnswerTimeout, IdleTimeout: metricsAnswerTimeout, MaxHeaderBytes: 64 << 10,
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
