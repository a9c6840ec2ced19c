package ipvs

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Fake is an in-memory Table and Engine for tests, which refuses what the kernel refuses. It is safe for use by several
// goroutines.
type Fake struct {
	mu          sync.Mutex
	servers     map[Key]*fakeServer
	schedulers  map[string]bool
	connections []Connection
	timeouts    Timeouts
	fail        func(op string) error
	sent        int
}

type fakeServer struct {
	Properties
	to map[netip.AddrPort]Destination
}

var (
	_ Table  = (*Fake)(nil)
	_ Engine = (*Fake)(nil)
)

// NewFake gives a table without servers, of a kernel with the given schedulers.
func NewFake(schedulers ...string) *Fake {
	f := &Fake{
		servers: map[Key]*fakeServer{}, schedulers: map[string]bool{},
		timeouts: Timeouts{TCP: 15 * time.Minute, TCPFin: 2 * time.Minute, UDP: 5 * time.Minute},
	}
	for _, s := range schedulers {
		f.schedulers[s] = true
	}
	return f
}

// Fail sets a function that decides whether an operation fails, and with which errno; nil lets all pass. It is called with
// what is about to be done, as "list virtual servers", "list connections" or the verb and the object of an Op, and must
// not call the fake.
func (f *Fake) Fail(fail func(op string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// Connect sets how many connections a destination has.
func (f *Fake) Connect(k Key, to netip.AddrPort, active, inactive uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.servers[k]
	if s == nil {
		return fmt.Errorf("%s: %w", k, ErrMissing)
	}
	d, there := s.to[to]
	if !there {
		return fmt.Errorf("%s -> %s: %w", k, to, ErrMissing)
	}
	d.Active, d.Inactive = active, inactive
	s.to[to] = d
	return nil
}

// SetConnections replaces the connections that there are. The counts of destinations stay as they are: see Connect.
func (f *Fake) SetConnections(list ...Connection) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.connections = slices.Clone(list)
}

// Sent counts the messages that the kernel would have got.
func (f *Fake) Sent() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sent
}

// List implements Table.
func (f *Fake) List(ctx context.Context, family model.Family) ([]Server, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out, err := f.list(ctx, family)
	empty := false
	for i, s := range out {
		f.sent++
		out[i].Destinations = f.servers[s.Key].destinations()
		empty = empty || len(out[i].Destinations) == 0
	}
	if empty {
		f.sent++
	}
	return out, err
}

// Servers implements Table.
func (f *Fake) Servers(ctx context.Context, family model.Family) ([]Server, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list(ctx, family)
}

func (f *Fake) list(ctx context.Context, family model.Family) ([]Server, error) {
	f.sent++
	if err := f.ask(ctx, "list virtual servers"); err != nil {
		return nil, failure("list", "virtual servers of "+family.String(), err)
	}
	var out []Server
	for k, s := range f.servers {
		if k.Family == family {
			out = append(out, Server{Key: k, Properties: s.Properties})
		}
	}
	slices.SortFunc(out, func(a, b Server) int { return a.Compare(b.Key) })
	return out, nil
}

func (s *fakeServer) destinations() []Destination {
	var out []Destination
	for _, d := range s.to {
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b Destination) int { return a.Addr.Compare(b.Addr) })
	return out
}

// Destinations implements Table.
func (f *Fake) Destinations(ctx context.Context, k Key) ([]Destination, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent++
	if err := f.ask(ctx, "list destinations of "+k.String()); err != nil {
		return nil, failure("list", "destinations of "+k.String(), err)
	}
	if s := f.servers[k]; s != nil {
		return s.destinations(), nil
	}
	return nil, nil
}

func (f *Fake) ask(ctx context.Context, op string) error {
	if err := ctx.Err(); err != nil {
		return err //nolint:wrapcheck // the caller does
	}
	if f.fail == nil {
		return nil
	}
	return f.fail(op)
}

// Apply implements Table.
func (f *Fake) Apply(ctx context.Context, ops []Op) []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]error, len(ops))
	for i, o := range ops {
		if err := o.check(); err != nil {
			out[i] = invalid(o, err)
			continue
		}
		f.sent++
		err := f.ask(ctx, o.Verb.String()+" "+o.object())
		if err == nil {
			err = f.apply(o)
		}
		if err != nil {
			out[i] = explain(o, err)
		}
	}
	return out
}

func (f *Fake) apply(o Op) error {
	s := f.servers[o.Key]
	switch o.Verb {
	case AddServer:
		if s != nil {
			return unix.EEXIST
		}
		if !f.schedulers[o.Properties.Scheduler] {
			return unix.ENOENT
		}
		f.servers[o.Key] = &fakeServer{Properties: o.Properties, to: map[netip.AddrPort]Destination{}}
		return nil
	case EditServer, RemoveServer, AddDestination, EditDestination, RemoveDestination:
	}
	if s == nil {
		return unix.ESRCH
	}
	old, there := s.to[o.To]
	switch o.Verb {
	case AddServer:
	case EditServer:
		if !f.schedulers[o.Properties.Scheduler] {
			return unix.ENOENT
		}
		s.Properties = o.Properties
	case RemoveServer:
		delete(f.servers, o.Key)
	case AddDestination:
		if there {
			return unix.EEXIST
		}
		s.to[o.To] = Destination{Addr: o.To, Weight: o.Weight, Method: o.Method, Upper: o.Upper, Lower: o.Lower}
	case EditDestination:
		if !there {
			return unix.ENOENT
		}
		old.Weight, old.Method, old.Upper, old.Lower = o.Weight, o.Method, o.Upper, o.Lower
		s.to[o.To] = old
	case RemoveDestination:
		if !there {
			return unix.ENOENT
		}
		delete(s.to, o.To)
	}
	return nil
}

// Connections implements Table.
func (f *Fake) Connections(ctx context.Context, yield func(Connection) bool) error {
	f.mu.Lock()
	err := f.ask(ctx, "list connections")
	list := f.connections
	f.mu.Unlock()
	if err != nil {
		return failure("list", "connections of virtual servers", err)
	}
	for _, c := range list {
		if !yield(c) {
			break
		}
	}
	return nil
}

// Info implements Engine.
func (f *Fake) Info(ctx context.Context) (Info, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent++
	if err := f.ask(ctx, "ask for the version"); err != nil {
		return Info{}, failure("ask for", "the version of IPVS", err)
	}
	return Info{Version: "1.2.1", Buckets: 4096}, nil
}

// TryScheduler implements Engine.
func (f *Fake) TryScheduler(ctx context.Context, name string) error { return try(ctx, f, name) }

// Timeouts implements Engine.
func (f *Fake) Timeouts(ctx context.Context) (Timeouts, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent++
	if err := f.ask(ctx, "ask for the timeouts"); err != nil {
		return Timeouts{}, failure("ask for", timeoutsObject, err)
	}
	return f.timeouts, nil
}

// SetTimeouts implements Engine.
func (f *Fake) SetTimeouts(ctx context.Context, t Timeouts) error {
	if err := t.check(); err != nil {
		return &StepError{Op: "set", Object: timeoutsObject, Reason: err.Error(), Class: kernel.ErrInvalid}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent++
	if err := f.ask(ctx, "set the timeouts"); err != nil {
		return failure("set", timeoutsObject, err)
	}
	f.timeouts = Timeouts{
		TCP: cmp.Or(t.TCP, f.timeouts.TCP), TCPFin: cmp.Or(t.TCPFin, f.timeouts.TCPFin), UDP: cmp.Or(t.UDP, f.timeouts.UDP),
	}
	return nil
}

// Dump prints all servers in a form that is the same for the same servers.
func (f *Fake) Dump() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	keys := make([]Key, 0, len(f.servers))
	for k := range f.servers {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, Key.Compare)
	var b strings.Builder
	for _, k := range keys {
		s := f.servers[k]
		fmt.Fprintf(&b, "server %s %s\n", k, s.Properties)
		for _, d := range s.destinations() {
			fmt.Fprintf(&b, "  -> %s\n", d)
		}
	}
	return b.String()
}
