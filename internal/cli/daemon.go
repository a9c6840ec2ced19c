package cli

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/control"
	"github.com/turnout-proxy/turnout/internal/health"
	"github.com/turnout-proxy/turnout/internal/kernel/link"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/loop"
	"github.com/turnout-proxy/turnout/internal/metric"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/kube/event"
)

// metricsTimeout bounds an answer of the metrics server, a CPU profile among them.
const metricsTimeout = 2 * time.Minute

// A daemon is the running proxy with all its parts.
type daemon struct {
	cfg *config.Config
	// chosen is the mode that runs.
	chosen  choice
	version string
	started time.Time
	log     *slog.Logger
	loop    *loop.Loop
	metrics *metric.Metrics
	// events is nil where there is no API server.
	events *event.Publisher
}

// runDaemon works until the context ends or a part cannot go on. Rules stay in any case.
func runDaemon(ctx context.Context, cfg *config.Config, version string, log *slog.Logger) error {
	source, server, err := openSource(cfg, version, log)
	if err != nil {
		return err
	}
	setOOMScore(cfg.OOMScoreAdj, log)
	spendMemory()
	ln, err := control.Listen(cfg.Socket)
	if errors.Is(err, control.ErrInUse) {
		return err
	}
	if err != nil {
		log.Warn("The control socket is not available and ls and trace will read the kernel", logkey.Err, err)
	}
	if ln != nil {
		defer func() { _ = ln.Close() }()
	}
	d := &daemon{cfg: cfg, version: version, started: time.Now(), log: log}
	d.metrics = metric.New(d.started, version)
	if err := d.openEvents(server); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	// What there is to serve is read while the machine is looked at: both take their time.
	var early gate
	g.Go(func() error { return source(ctx, early.put) })
	checks := d.newHealth()
	if err := d.prepare(ctx, checks); err != nil {
		cancel()
		return errors.Join(err, g.Wait())
	}
	early.open(d.loop.Sink())
	d.announce()
	d.run(ctx, g, checks, ln)
	if err := g.Wait(); err != nil {
		return err //nolint:wrapcheck // each part says what it is
	}
	log.Info("Stopped, all rules stay")
	return nil
}

// prepare finds out what this machine can do, and makes the loop.
func (d *daemon) prepare(ctx context.Context, checks *health.Health) error {
	cfg, log := d.cfg, d.log
	seats := openSeats(ctx, cfg, log)
	var err error
	if d.chosen, err = chooseMode(ctx, cfg, seats, log); err != nil {
		return err
	}
	d.metrics.Fallback(string(cfg.Mode), string(d.chosen.mode), d.chosen.why != nil)
	lanes, err := openLanes(ctx, cfg, d.chosen, seats, log)
	if err != nil {
		return err
	}
	d.loop = loop.New(loop.Config{
		Families: lanes, MinSyncPeriod: cfg.MinSyncPeriod, SyncPeriod: cfg.SyncPeriod,
		VerifyPeriod: d.verifyPeriod(),
		Logger:       log, Metrics: d.metrics, Health: checks, Started: saveMemory, Events: d.events,
	})
	addrs, err := link.Addrs()
	if err != nil {
		return err
	}
	d.loop.SetHost(addrs)
	return nil
}

// run starts the parts that work side by side.
func (d *daemon) run(ctx context.Context, g *errgroup.Group, checks *health.Health, ln net.Listener) {
	cfg := d.cfg
	g.Go(func() error { return d.loop.Run(ctx) })
	g.Go(func() error { return d.watchHost(ctx) })
	g.Go(func() error { return checks.Run(ctx) })
	if d.events != nil {
		g.Go(func() error { return d.events.Run(ctx) })
	}
	if cfg.Healthz.IsValid() {
		g.Go(func() error { return d.serve(ctx, "health", cfg.Healthz, checks.Handler(), 0) })
	}
	g.Go(func() error { return d.serve(ctx, "metrics", cfg.Metrics, d.metricsHandler(), metricsTimeout) })
	if ln == nil {
		return
	}
	g.Go(func() error {
		server := control.NewServer(d)
		server.ErrorLog = slog.NewLogLogger(d.log.Handler(), slog.LevelDebug)
		if err := control.Serve(ctx, ln, server); err != nil {
			d.log.Error("The control socket is gone and ls and trace will read the kernel", logkey.Err, err)
		}
		return nil
	})
}

// A gate keeps what a source sends until there is somebody to take it.
type gate struct {
	mu   sync.Mutex
	to   model.Sink
	held []model.Event
}

// put is a model.Sink.
func (g *gate) put(events ...model.Event) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.to != nil {
		g.to(events...)
		return
	}
	g.held = append(g.held, events...)
}

// open hands over what was kept, and from then on everything at once.
func (g *gate) open(to model.Sink) {
	g.mu.Lock()
	defer g.mu.Unlock()
	to(g.held...)
	g.to, g.held = to, nil
}

// verifyPeriod gives how often everything is compared with the kernel though nothing suggests it. In mode ipvs nothing
// ever does, as the kernel counts no changes of virtual servers and sets; it is soon done there.
func (d *daemon) verifyPeriod() time.Duration {
	if d.chosen.mode == config.ModeIPVS {
		return d.cfg.SyncPeriod
	}
	return 0
}

// Until the first sync, where almost all allocation happens, memory is spent for time; from then on it is saved. At
// 10,000 Services of 10 endpoints the first sync is a tenth faster, and the process settles at half of its peak.
const (
	startGCPercent = 400
	gcPercent      = 50
)

// spendMemory and saveMemory say how often the garbage collector runs, unless the environment does.
func spendMemory() { setGCPercent(startGCPercent) }

func saveMemory() {
	setGCPercent(gcPercent)
	go debug.FreeOSMemory() // it takes a moment that the loop should not wait
}

func setGCPercent(percent int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

// setOOMScore asks the kernel to spare this process. Containers often may not: that is no reason to end.
func setOOMScore(adj int, log *slog.Logger) {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(adj)), 0); err != nil {
		log.Debug("Did not set oom_score_adj", logkey.Err, err)
	}
}
