package route

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// Fake is an in-memory Table for tests, which refuses what the kernel refuses. It is safe for use by several goroutines.
type Fake struct {
	mu     sync.Mutex
	routes map[netip.Addr]netip.Addr
	// foreign are addresses that others made local.
	foreign map[netip.Addr]bool
	// own tells which sources the kernel takes; nil takes all.
	own  func(netip.Addr) bool
	fail func(op string) error
	sent int
}

var _ Table = (*Fake)(nil)

// NewFake gives a table without routes. Own tells which addresses are the machine's; nil takes all for its own.
func NewFake(own func(netip.Addr) bool) *Fake {
	return &Fake{routes: map[netip.Addr]netip.Addr{}, foreign: map[netip.Addr]bool{}, own: own}
}

// Fail sets a function that decides whether an operation fails; nil lets all pass. It is called before each Op and each
// List with what is about to be done, and must not call the fake.
func (f *Fake) Fail(fail func(op string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// SetForeign makes addresses local as others do, and only those.
func (f *Fake) SetForeign(addrs ...netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.foreign)
	for _, a := range addrs {
		f.foreign[a] = true
	}
}

// Sent counts the messages that the kernel would have got.
func (f *Fake) Sent() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sent
}

// List implements Table.
func (f *Fake) List(ctx context.Context, family model.Family) ([]Local, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent++
	if err := f.ask(ctx, "list local routes"); err != nil {
		return nil, refusal("list", "local routes", err)
	}
	var out []Local
	for a, source := range f.routes {
		if model.FamilyOf(a) == family {
			out = append(out, Local{a, source})
		}
	}
	slices.SortFunc(out, Local.Compare)
	return out, nil
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
		f.sent++
		if err := o.check(); err != nil {
			out[i] = invalid(o, err)
			continue
		}
		err := f.ask(ctx, o.Verb.String()+" "+o.object())
		if err == nil {
			err = f.apply(o)
		}
		if err != nil {
			out[i] = refusal(o.Verb.String(), o.object(), err)
		}
	}
	return out
}

func (f *Fake) apply(o Op) error {
	if o.Verb == Remove {
		delete(f.routes, o.Addr)
		return nil
	}
	if o.Source.IsValid() && f.own != nil && !f.own(o.Source) {
		return unix.EINVAL
	}
	f.routes[o.Addr] = o.Source
	return nil
}

// Dump prints all routes in a form that is the same for the same routes.
func (f *Fake) Dump() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	for _, a := range slices.SortedFunc(maps.Keys(f.routes), netip.Addr.Compare) {
		b.WriteString("local " + Op{Local: Local{a, f.routes[a]}}.object() + "\n")
	}
	for _, a := range slices.SortedFunc(maps.Keys(f.foreign), netip.Addr.Compare) {
		b.WriteString("foreign local " + a.String() + "\n")
	}
	return b.String()
}
