package health

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/netutil"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// ports keeps the health check ports of Services open. What is wanted is set from outside; one goroutine (run) opens
// and closes.
type ports struct {
	cfg     *Config
	healthy func() bool
	wake    chan struct{}

	mu     sync.Mutex
	wanted map[owner]want

	// open, failed and dead belong to run, apart from dead's channel operations.
	open   map[place]*opened
	failed map[place]error
	// dead gets the places whose server ended by itself.
	dead chan *opened
}

// An owner is a Service in one IP family.
type owner struct {
	family  model.Family
	service model.Name
}

// want is what an owner asks for.
type want struct {
	port       uint16
	localReady int
	addrs      []netip.Addr
}

// A place is one address and port that an owner is to answer at.
type place struct {
	owner owner
	at    netip.AddrPort
}

type opened struct {
	place  place
	server *http.Server
}

func newPorts(cfg *Config, healthy func() bool) *ports {
	return &ports{
		cfg: cfg, healthy: healthy, wake: make(chan struct{}, 1), wanted: map[owner]want{},
		open: map[place]*opened{}, failed: map[place]error{}, dead: make(chan *opened),
	}
}

// set replaces what a family wants. Counts take effect at once, listeners soon after.
func (p *ports) set(f model.Family, scope forward.NodePortScope, services []Service) {
	addrs := listenAddrs(f, scope)
	p.mu.Lock()
	maps.DeleteFunc(p.wanted, func(o owner, _ want) bool { return o.family == f })
	for _, s := range services {
		p.wanted[owner{f, s.Name}] = want{s.Port, s.LocalReady, addrs}
	}
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// listenAddrs are the addresses that NodePorts answer on, and so the only ones that say something about them.
func listenAddrs(f model.Family, scope forward.NodePortScope) []netip.Addr {
	if scope.All {
		if f == model.IPv4 {
			return []netip.Addr{netip.IPv4Unspecified()}
		}
		return []netip.Addr{netip.IPv6Unspecified()}
	}
	var addrs []netip.Addr
	for _, a := range scope.Addrs {
		// An IPv6 link-local address cannot be listened on without its interface.
		if a.Is4() || !a.IsLinkLocalUnicast() {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// run opens and closes listeners until the context ends. Those that could not be opened are tried again.
func (p *ports) run(ctx context.Context) error {
	var servers sync.WaitGroup
	defer servers.Wait()
	defer func() {
		for _, o := range p.open {
			_ = o.server.Close()
		}
	}()
	timer := time.NewTimer(retryListen)
	defer timer.Stop()
	for {
		p.reconcile(ctx, &servers)
		if len(p.failed) > 0 {
			timer.Reset(retryListen)
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.wake:
		case <-timer.C:
		case o := <-p.dead:
			if p.open[o.place] == o {
				delete(p.open, o.place)
			}
		}
	}
}

// reconcile closes what is no longer wanted, then opens what is missing: a port may move from one Service to another.
func (p *ports) reconcile(ctx context.Context, servers *sync.WaitGroup) {
	places := p.places()
	for at, o := range p.open {
		if _, wanted := places[at]; !wanted {
			_ = o.server.Close()
			delete(p.open, at)
		}
	}
	maps.DeleteFunc(p.failed, func(at place, _ error) bool {
		_, wanted := places[at]
		return !wanted
	})
	for _, at := range slices.SortedFunc(maps.Keys(places), comparePlaces) {
		if p.open[at] == nil {
			p.openPlace(ctx, servers, at)
		}
	}
	if p.cfg.Opened != nil {
		p.cfg.Opened(len(p.open), len(p.failed))
	}
}

func (p *ports) places() map[place]struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	places := map[place]struct{}{}
	for o, w := range p.wanted {
		for _, a := range w.addrs {
			places[place{o, netip.AddrPortFrom(a, w.port)}] = struct{}{}
		}
	}
	return places
}

func comparePlaces(a, b place) int {
	if c := a.owner.service.Compare(b.owner.service); c != 0 {
		return c
	}
	return a.at.Compare(b.at)
}

func (p *ports) openPlace(ctx context.Context, servers *sync.WaitGroup, at place) {
	network := "tcp4"
	if at.owner.family == model.IPv6 {
		network = "tcp6"
	}
	var config net.ListenConfig
	l, err := config.Listen(ctx, network, at.at.String())
	if err != nil {
		if p.failed[at] == nil && ctx.Err() == nil {
			p.report(at, fmt.Errorf("listen on %s for the health check of Service %s: %w", at.at, at.owner.service, err))
		}
		p.failed[at] = err
		return
	}
	if p.failed[at] != nil {
		delete(p.failed, at)
		p.report(at, nil)
	}
	o := &opened{at, newServer(p.handler(at.owner))}
	p.open[at] = o
	servers.Go(func() {
		_ = o.server.Serve(netutil.LimitListener(l, maxConnections))
		select {
		case p.dead <- o:
		case <-ctx.Done():
		}
	})
}

func (p *ports) report(at place, err error) {
	if p.cfg.Report == nil {
		return
	}
	p.mu.Lock()
	w := p.wanted[at.owner]
	p.mu.Unlock()
	p.cfg.Report(Service{at.owner.service, at.at.Port(), w.localReady}, at.owner.family, err)
}

// A portReport is the body of an answer. Its fields are those of kube-proxy, in its order.
type portReport struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// handler answers any request with the count of endpoints: good if there is one here and the proxy keeps up.
func (p *ports) handler(o owner) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		p.mu.Lock()
		local := p.wanted[o].localReady
		p.mu.Unlock()
		var body portReport
		body.Service.Namespace, body.Service.Name = o.service.Namespace, o.service.Name
		body.LocalEndpoints, body.ServiceProxyHealthy = local, p.healthy()
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(local))
		writeJSON(w, statusOf(local > 0 && body.ServiceProxyHealthy), body, "\t")
	})
}
