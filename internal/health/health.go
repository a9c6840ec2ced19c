// Package health answers the health questions of load balancers and of the node's own supervisor: whether the proxy
// keeps up and the node wants traffic (/healthz, /livez), and how many endpoints of a Service are on this node (health
// check node ports). It decides what healthy means; it must not import loop, backend or Kubernetes types.
//
// Read state.go for the rules, ports.go for the ports of Services, server.go for the limits of every server.
package health

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Service is one that has a health check port.
type Service struct {
	Name model.Name
	// Port is spec.healthCheckNodePort.
	Port uint16
	// LocalReady counts the addresses on this node that have a ready endpoint, of one IP family.
	LocalReady int
}

// A Config says how a Health judges. The zero value stands for the defaults given.
type Config struct {
	// Timeout is how long a sync may be overdue before the proxy counts as unhealthy: twice the sync period.
	// Default 60 s.
	Timeout time.Duration
	// NodeOptional makes a node without a Node object eligible for traffic, as when no source has Nodes.
	NodeOptional bool
	// Answered is told of every answer to /healthz and /livez, with the path and the HTTP status; may be nil.
	Answered func(path string, status int)
	// Report is told when a Service's port cannot be opened, once until it can, and then with a nil error; may be nil.
	// It must not block.
	Report func(s Service, family model.Family, err error)
	// Opened is told how many Service ports are open and how many could not be opened whenever that changes; may be nil.
	Opened func(open, failed int)
	// Now is the time. Default time.Now.
	Now func() time.Time
}

// Health holds what health checks depend on. Its methods may be called from any goroutine and do not block.
type Health struct {
	cfg   Config
	ports *ports

	mu    sync.Mutex
	state state
}

// New gives a Health that counts as healthy until something is overdue.
func New(cfg Config) *Health {
	if cfg.Timeout == 0 {
		cfg.Timeout = 60 * time.Second
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	h := &Health{cfg: cfg, state: state{families: map[model.Family]progress{}}}
	h.ports = newPorts(&h.cfg, h.Healthy)
	return h
}

// Queued tells that a family waits for a sync since the given time, or for longer.
func (h *Health) Queued(f model.Family, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state.queued(f, at)
}

// Updated tells that everything which was queued for a family is in effect.
func (h *Health) Updated(f model.Family, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state.updated(f, at)
}

// SetNode hands over this machine's Node; nil while it is unknown.
func (h *Health) SetNode(n *model.Node) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state.node = n
}

// SetServices replaces the Services of a family that have a health check port, and the addresses to answer on.
func (h *Health) SetServices(f model.Family, scope forward.NodePortScope, services []Service) {
	h.ports.set(f, scope, services)
}

// Healthy tells that no family is overdue.
func (h *Health) Healthy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state.healthy(h.cfg.Now(), h.cfg.Timeout)
}

// Run keeps the Services' ports open until the context ends, and then closes them.
func (h *Health) Run(ctx context.Context) error { return h.ports.run(ctx) }

// Handler serves /healthz and /livez, and nothing else.
func (h *Health) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { h.answer(w, "/healthz", true) })
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { h.answer(w, "/livez", false) })
	return mux
}

func (h *Health) answer(w http.ResponseWriter, path string, withNode bool) {
	h.mu.Lock()
	body, ok := h.state.report(h.cfg.Now(), h.cfg.Timeout, withNode, h.cfg.NodeOptional)
	h.mu.Unlock()
	status := statusOf(ok)
	writeJSON(w, status, body, "")
	if h.cfg.Answered != nil {
		h.cfg.Answered(path, status)
	}
}

func statusOf(ok bool) int {
	if ok {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}
