// Package kube follows Services, EndpointSlices, this machine's Node and ServiceCIDRs at a Kubernetes API server and
// sends them as model values. It decides what is asked of the server, when the first state is complete, and that an
// object which vanished while the connection was down is reported as gone; what an object means is for package convert
// to say.
//
// No API object is kept: each is converted as it comes off the wire and only its name is remembered, so memory is that
// of the model. A periodic resync from a cache has no meaning here, as there is no cache that could differ from what
// was sent.
//
// It must not import package forward or a backend, and it does not log: trouble with the server goes to
// Config.OnStatus. Read Run first, then store.go.
package kube

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/convert"
)

// Config says which server is followed, and for whom.
type Config struct {
	// REST reaches the server; see RESTConfig.
	REST *rest.Config
	// NodeName is the name of this machine's Node. With an empty one no Node is followed.
	NodeName string
	// OnStatus, if set, is told of each failed request with the resource's plural name ("services"), and with a nil
	// error of the first one that succeeds after a failure. It is called from several goroutines, at the pace of the
	// retries: at first every second, later every half minute at most.
	OnStatus func(resource string, err error)
}

// nodeWait is how long the Node is waited for once Services and slices are in. A proxy without its Node works, only
// without zones and node addresses, so a server that does not give it must not hold everything up.
const nodeWait = 30 * time.Second

// How soon a failed request is repeated. The jitter spreads the nodes of a large cluster over the time after their API
// server's restart.
const (
	firstRetry  = 800 * time.Millisecond
	lastRetry   = 15 * time.Second
	retryFactor = 2.0
	retryJitter = 1.0             // each delay is stretched by up to this share
	retryReset  = 2 * time.Minute // without a failure for so long, the next one counts as the first
)

// Run follows the server until the context is done. It sends all that exists, then Synced, then every change. Events
// that one answer of the server brings, such as a list after a lost connection, go to the sink in one call.
//
// It is an error if the REST configuration cannot be used at all. A server that is away is not: it is tried again.
func Run(ctx context.Context, cfg Config, sink model.Sink) error {
	clients, err := newClients(cfg.REST)
	if err != nil {
		return err
	}
	defer clients.close()
	g := &gate{sink: sink, waiting: map[string]bool{}, nodeWait: nodeWait}
	defer g.close()
	var running sync.WaitGroup
	defer running.Wait()
	followed := sources(clients, cfg.NodeName)
	for _, s := range followed {
		if !s.aside {
			g.waiting[s.resource] = true
		}
	}
	for _, s := range followed {
		status := &status{resource: s.resource, report: cfg.OnStatus, aside: s.aside, refused: func() {
			if s.optional {
				g.in(s.resource)
			}
		}}
		st := &store{convert: s.convert, gone: s.gone, sink: sink, listed: func() { g.in(s.resource) }}
		running.Go(func() { s.follow(ctx, status, st) })
	}
	<-ctx.Done()
	return nil
}

// A source is one kind of object at the server.
type source struct {
	resource       string
	item           func() message // a new, empty object
	client         rest.Interface
	params         runtime.ParameterCodec
	decode         func([]byte) (runtime.Object, error)
	labels, fields string
	convert        func(runtime.Object) model.Event
	gone           func(model.Name) model.Event
	optional       bool // the server may refuse it for good, and the rest still works
	aside          bool // nothing waits for it, and a server that does not have it is in order
}

// sources are what is followed. The selectors leave out at the server what no proxy of this node is to serve: Services
// of another proxy, headless Services and their slices.
func sources(c clients, nodeName string) []source {
	list := []source{
		{
			resource: servicesResource, client: c.core, params: c.params, decode: c.decode,
			item:    func() message { return &corev1.Service{} },
			labels:  "!" + convert.LabelForeignProxy,
			fields:  fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String(),
			convert: serviceEvent,
			gone:    goneService,
		},
		{
			resource: slicesResource, client: c.discovery, params: c.params, decode: c.decode,
			item:    func() message { return &discoveryv1.EndpointSlice{} },
			labels:  "!" + convert.LabelHeadless,
			convert: sliceEvent,
			gone:    goneSlice,
		},
	}
	list = append(list, source{
		resource: cidrsResource, client: c.networking, params: c.params, decode: c.decode,
		item:     func() message { return &networkingv1.ServiceCIDR{} },
		convert:  cidrEvent,
		gone:     goneCIDR,
		optional: true, aside: true,
	})
	if nodeName == "" {
		return list
	}
	return append(list, source{
		resource: nodesResource, client: c.core, params: c.params, decode: c.decode,
		item:     func() message { return &corev1.Node{} },
		fields:   fields.OneTermEqualSelector("metadata.name", nodeName).String(),
		convert:  nodeEvent,
		gone:     goneNode,
		optional: true,
	})
}

// follow keeps the store in step with the server until the context is done.
func (s *source) follow(ctx context.Context, status *status, st *store) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := s.list(ctx, o, st)
			return list, status.note(ctx, "list", err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			w, err := s.request(o).Watch(ctx)
			return w, status.note(ctx, "watch", err)
		},
	}
	clk := stoppableClock{stop: ctx.Done()}
	backoff := wait.Backoff{
		Duration: firstRetry, Factor: retryFactor, Jitter: retryJitter, Cap: lastRetry,
		Steps: int(math.Ceil(math.Log(float64(lastRetry)/float64(firstRetry)) / math.Log(retryFactor))),
	}
	r := cache.NewReflectorWithOptions(lw, s.item(), st,
		cache.ReflectorOptions{Name: s.resource, Clock: clk, Backoff: &backoff})
	// The reflector's own Run would log each failed request; status has told the owner already.
	_ = backoff.DelayWithReset(clk, retryReset).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		_ = r.ListAndWatchWithContext(ctx)
		return false, nil
	})
}

// list asks for all objects, or a page of them.
func (s *source) list(ctx context.Context, o metav1.ListOptions, st *store) (runtime.Object, error) {
	body, err := s.request(o).Stream(ctx)
	if err != nil {
		return nil, err //nolint:wrapcheck // status.note does, and the reflector tells errors apart by their type
	}
	defer body.Close()
	l := listReader{item: s.item, decode: s.decode, convert: st.toEvent}
	return l.read(body)
}

// request prepares a list or watch request with the source's selectors.
func (s *source) request(o metav1.ListOptions) *rest.Request {
	o.LabelSelector, o.FieldSelector = s.labels, s.fields
	req := s.client.Get().Resource(s.resource).VersionedParams(&o, s.params)
	if o.Watch && o.TimeoutSeconds != nil {
		req = req.Timeout(time.Duration(*o.TimeoutSeconds) * time.Second)
	}
	return req
}

// status tells the owner how requests for one resource go.
type status struct {
	resource string
	report   func(resource string, err error)
	refused  func() // called when the server will not answer however often it is asked
	aside    bool   // a refusal is no trouble

	mu      sync.Mutex
	failing bool
}

// note reports the outcome of a request and gives the error back. That the asked-for version is no longer there is part
// of following a server, and so is the end of this process: neither is trouble.
func (s *status) note(ctx context.Context, verb string, err error) error {
	switch {
	case ctx.Err() != nil, apierrors.IsResourceExpired(err), apierrors.IsGone(err),
		apierrors.IsInvalid(err) && verb == "watch",
		errors.Is(err, context.Canceled):
		return err
	}
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		s.refused()
		if s.aside {
			return err
		}
	}
	s.mu.Lock()
	was := s.failing
	s.failing = err != nil
	s.mu.Unlock()
	if s.report != nil && (was || err != nil) {
		if err != nil {
			s.report(s.resource, fmt.Errorf("%s %s: %w", verb, s.resource, err))
		} else {
			s.report(s.resource, nil)
		}
	}
	return err
}

// A gate sends Synced once everything that is waited for is in.
type gate struct {
	sink     model.Sink
	nodeWait time.Duration

	mu      sync.Mutex
	waiting map[string]bool
	done    bool
	timer   *time.Timer
}

// in tells that the first state of a resource was sent, or will not come.
func (g *gate) in(resource string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.waiting, resource)
	switch {
	case g.done:
	case len(g.waiting) == 0:
		g.done = true
		g.sink(model.Event{Synced: true})
	case len(g.waiting) == 1 && g.waiting[nodesResource] && g.timer == nil:
		g.timer = time.AfterFunc(g.nodeWait, func() { g.in(nodesResource) })
	}
}

// close makes sure that nothing is sent any more.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.done = true
	if g.timer != nil {
		g.timer.Stop()
	}
}

// A stoppableClock ends all waiting when its owner stops; the reflector's own waiting between two attempts would
// otherwise hold up the end of the process.
type stoppableClock struct {
	clock.RealClock
	stop <-chan struct{}
}

// After is as time.After, but the channel is also ready when the clock stops.
func (c stoppableClock) After(d time.Duration) <-chan time.Time {
	ch := make(chan time.Time, 1)
	go func() {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-c.stop:
		}
		ch <- c.Now()
	}()
	return ch
}
