package loop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/health"
	"github.com/turnout-proxy/turnout/internal/metric"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A fakeKernel is a map from the name of a Service port to its text, which others may change.
type fakeKernel struct {
	mu         sync.Mutex
	objects    map[string]string
	generation atomic.Int64
	// shared is the generation of several kernels, if set.
	shared *atomic.Int64
	// writes are the times of Apply calls that changed something, and what they wrote.
	writes []write
	// fail, refuse and panics make the kernel or the backend misbehave while they are set.
	fail        error
	observeFail error
	pulseFail   error
	refuse      map[string]error
	panics      bool
	unsupported map[string]string
	// eager makes Diff take an observation for what the kernel acknowledged, as a real backend may.
	eager bool
	// applyTakes and observeTakes are how long the calls last; observes counts them.
	applyTakes, observeTakes time.Duration
	observes, applies        int
}

type write struct {
	at   time.Duration
	what []string
}

// change lets somebody else change the kernel.
func (k *fakeKernel) change(fn func(objects map[string]string)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	fn(k.objects)
	k.touch()
}

func (k *fakeKernel) set(fn func(k *fakeKernel)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	fn(k)
}

// touch raises the fingerprint.
func (k *fakeKernel) touch() { k.pulse().Add(1) }

func (k *fakeKernel) pulse() *atomic.Int64 {
	if k.shared != nil {
		return k.shared
	}
	return &k.generation
}

// count gives a counter: k.count(applies).
func (k *fakeKernel) count(counter func(*fakeKernel) int) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return counter(k)
}

func applies(k *fakeKernel) int { return k.applies }

func observes(k *fakeKernel) int { return k.observes }

func (k *fakeKernel) text() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(k.objects)) {
		fmt.Fprintf(&b, "%s: %s\n", name, k.objects[name])
	}
	return b.String()
}

func (k *fakeKernel) written() []write {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.writes)
}

// A fakeBackend writes one object for each Service port and a fixed one called "base".
type fakeBackend struct {
	kernel *fakeKernel
	began  time.Time

	wanted map[string]string
	// acked is what the kernel acknowledged.
	acked map[string]string
}

func newFake() (*fakeBackend, *fakeKernel) {
	k := &fakeKernel{objects: map[string]string{}}
	return &fakeBackend{
		kernel: k, began: time.Now(), wanted: map[string]string{}, acked: map[string]string{},
	}, k
}

type (
	fakeObserved map[string]string
	// A fakePlan is a set of steps, and what they start from.
	fakePlan struct {
		steps map[string]string
		from  map[string]string
	}
)

func (o fakeObserved) Rows() []backend.Row     { return make([]backend.Row, len(o)) }
func (o fakeObserved) Objects() map[string]int { return map[string]int{"object": len(o)} }
func (p fakePlan) Empty() bool                 { return len(p.steps) == 0 }
func (p fakePlan) Steps() int                  { return len(p.steps) }
func (p fakePlan) String() string              { return strings.Join(slices.Sorted(maps.Keys(p.steps)), " ") }

func (b *fakeBackend) Mode() string { return "fake" }

func (b *fakeBackend) Compile(t *forward.Table, d forward.Delta) []backend.Problem {
	b.kernel.mu.Lock()
	panics, unsupported := b.kernel.panics, b.kernel.unsupported
	b.kernel.mu.Unlock()
	if panics {
		panic("compile went wrong")
	}
	b.wanted["base"] = "always"
	var problems []backend.Problem
	for _, n := range d.Ports {
		p := t.Port(n)
		delete(b.wanted, n.String())
		if p == nil {
			continue
		}
		if reason := unsupported[n.String()]; reason != "" {
			problems = append(problems, backend.Problem{Port: n, Reason: reason, Err: errors.New("no such thing")})
			continue
		}
		var list []string
		for _, e := range p.Cluster {
			list = append(list, e.String())
		}
		b.wanted[n.String()] = strings.Join(list, " ")
	}
	return problems
}

func (b *fakeBackend) Observe(ctx context.Context) (backend.Observed, error) {
	b.kernel.mu.Lock()
	takes, err := b.kernel.observeTakes, b.kernel.observeFail
	b.kernel.observes++
	b.kernel.mu.Unlock()
	if e := pause(ctx, takes); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	b.kernel.mu.Lock()
	defer b.kernel.mu.Unlock()
	return fakeObserved(maps.Clone(b.kernel.objects)), nil
}

// pause lets time go by, until the context ends.
func pause(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *fakeBackend) Diff(have backend.Observed) backend.Plan {
	from := b.acked
	if o, ok := have.(fakeObserved); ok {
		from = o
		if b.kernel.count(func(k *fakeKernel) int { return number(k.eager) }) == 1 {
			b.acked = maps.Clone(from)
		}
	}
	plan := fakePlan{steps: map[string]string{}, from: maps.Clone(from)}
	for n, text := range b.wanted {
		if got, ok := from[n]; !ok || got != text {
			plan.steps[n] = "+" + text
		}
	}
	for n := range from {
		if _, ok := b.wanted[n]; !ok && !strings.HasPrefix(n, "foreign") {
			plan.steps[n] = "-"
		}
	}
	return plan
}

func (b *fakeBackend) Apply(ctx context.Context, p backend.Plan) backend.Report {
	k := b.kernel
	k.mu.Lock()
	takes := k.applyTakes
	k.applies++
	k.mu.Unlock()
	if err := pause(ctx, takes); err != nil {
		return backend.Report{Err: err}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fail != nil {
		return backend.Report{Err: k.fail}
	}
	report := backend.Report{Failed: map[forward.PortName]error{}}
	var what []string
	plan := p.(fakePlan)
	b.acked = plan.from
	if plan.Empty() {
		return report
	}
	for n, step := range plan.steps {
		if err := k.refuse[n]; err != nil {
			report.Failed[portName(n)] = err
			continue
		}
		what = append(what, n)
		report.Steps++
		if step == "-" {
			delete(k.objects, n)
			delete(b.acked, n)
			continue
		}
		k.objects[n], b.acked[n] = step[1:], step[1:]
	}
	k.touch()
	if len(what) > 0 {
		slices.Sort(what)
		k.writes = append(k.writes, write{time.Since(b.began), what})
	}
	return report
}

func (b *fakeBackend) Trace(forward.Packet) (backend.Trace, error) {
	return backend.Trace{Steps: []backend.Step{{Where: "fake", What: "seen"}}}, nil
}

func (b *fakeBackend) Pulse(context.Context) (string, error) {
	b.kernel.mu.Lock()
	defer b.kernel.mu.Unlock()
	return fmt.Sprint(b.kernel.pulse().Load()), b.kernel.pulseFail
}

// portName reads "namespace/name/protocol", the String of an unnamed port.
func portName(s string) forward.PortName {
	parts := strings.Split(s, "/")
	proto, err := model.ParseProtocol(parts[2])
	if err != nil {
		panic(err)
	}
	return forward.PortName{Name: model.Name{Namespace: parts[0], Name: parts[1]}, Proto: proto}
}

// A rig is a running loop with its fakes.
type rig struct {
	*Loop
	t       *testing.T
	kernels map[model.Family]*fakeKernel
	fakes   map[model.Family]*fakeBackend
	log     *logBook
	health  *fakeHealth
	metrics *metric.Metrics
	events  *fakeEvents
	sink    model.Sink
	began   time.Time
	cancel  context.CancelFunc
	ended   chan error
}

// start runs a loop for the families, IPv4 alone if none is given, inside a synctest bubble.
func start(t *testing.T, change func(*Config), families ...model.Family) *rig {
	t.Helper()
	if len(families) == 0 {
		families = []model.Family{model.IPv4}
	}
	r := &rig{
		t: t, kernels: map[model.Family]*fakeKernel{}, fakes: map[model.Family]*fakeBackend{}, log: &logBook{},
		health: &fakeHealth{}, events: &fakeEvents{}, began: time.Now(), ended: make(chan error, 1),
	}
	r.metrics = metric.New(r.began, "test")
	cfg := Config{
		MinSyncPeriod: time.Second, Logger: slog.New(slog.NewTextHandler(r.log, nil)), Metrics: r.metrics,
		Health: r.health, Events: r.events, Jitter: func() float64 { return 0.5 },
	}
	for _, f := range families {
		b, k := newFake()
		r.kernels[f], r.fakes[f] = k, b
		cfg.Families = append(cfg.Families, Family{
			Family: f, Builder: forward.NewBuilder(forward.Config{Family: f, NodeName: "na"}), Backend: b,
		})
	}
	if change != nil {
		change(&cfg)
	}
	r.Loop = New(cfg)
	r.sink = r.Sink()
	ctx, cancel := context.WithCancel(t.Context())
	r.cancel = cancel
	go func() { r.ended <- r.Run(ctx) }()
	t.Cleanup(cancel)
	return r
}

// kernel gives the kernel of the first family.
func (r *rig) kernel() *fakeKernel { return r.kernels[r.cfg.Families[0].Family] }

// after lets time go by and waits until everything has come to rest.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// sync tells the loop that the source is complete, and waits for the first round.
func (r *rig) sync(events ...model.Event) {
	r.sink(append(events, model.Event{Synced: true})...)
	after(10 * time.Millisecond)
}

// look gives the loop's view, for fields that may be kept.
func (r *rig) look() View {
	r.t.Helper()
	var v View
	if err := r.Do(r.t.Context(), func(got View) { v = got }); err != nil {
		r.t.Fatalf("Do: %v", err)
	}
	return v
}

// settle waits until the bucket is full again.
func (r *rig) settle() { after(time.Minute) }

// stop ends the loop and waits for its end.
func (r *rig) stop() {
	r.t.Helper()
	r.cancel()
	if err := <-r.ended; err != nil {
		r.t.Errorf("Run: got %v, want nil", err)
	}
}

// since gives the writes after a moment, with times relative to it.
func (r *rig) since(at time.Time) []write {
	var list []write
	for _, w := range r.kernel().written() {
		if d := w.at - at.Sub(r.began); d >= 0 {
			list = append(list, write{d, w.what})
		}
	}
	return list
}

type logBook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// count gives the number of lines with a text.
func (l *logBook) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for line := range strings.Lines(l.buf.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// String gives everything that was logged.
func (l *logBook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

type fakeEvents struct {
	mu   sync.Mutex
	list []model.Finding
}

func (e *fakeEvents) Publish(f model.Finding) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, f)
}

type fakeHealth struct {
	mu       sync.Mutex
	queued   map[model.Family]time.Time
	services []health.Service
}

func (h *fakeHealth) Queued(f model.Family, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.queued == nil {
		h.queued = map[model.Family]time.Time{}
	}
	if _, ok := h.queued[f]; !ok {
		h.queued[f] = at
	}
}

func (h *fakeHealth) Updated(f model.Family, _ time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.queued, f)
}

// since tells since when a family waits; zero if it does not.
func (h *fakeHealth) since(f model.Family) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.queued[f]
}

func (h *fakeHealth) overdue(f model.Family) bool { return !h.since(f).IsZero() }

func (h *fakeHealth) list() []health.Service {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.services
}

func (h *fakeHealth) SetNode(*model.Node) {}

func (h *fakeHealth) SetServices(_ model.Family, _ forward.NodePortScope, list []health.Service) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.services = list
}

// service is a Service "default/NAME" with one unnamed TCP port.
func service(name, clusterIP string) model.Event {
	return model.Event{Service: &model.Service{
		Name:       model.Name{Namespace: "default", Name: name},
		ClusterIPs: []netip.Addr{netip.MustParseAddr(clusterIP)},
		Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	}}
}

// slice is the only EndpointSlice of a Service, with ready endpoints at port 8080.
func slice(service string, addrs ...string) model.Event {
	s := &model.EndpointSlice{
		Name: model.Name{Namespace: "default", Name: service + "-1"}, Service: service, Family: model.IPv4,
		Ports: []model.SlicePort{{Protocol: model.TCP, Port: 8080}},
	}
	for _, a := range addrs {
		addr := netip.MustParseAddr(a)
		s.Family = model.FamilyOf(addr)
		s.Endpoints = append(s.Endpoints, model.Endpoint{Addr: addr, Ready: true, Serving: true})
	}
	return model.Event{Slice: s}
}

// reasons gives "Reason object" of each event.
func (e *fakeEvents) reasons() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []string
	for _, f := range e.list {
		list = append(list, f.Reason+" "+f.Object)
	}
	return list
}
