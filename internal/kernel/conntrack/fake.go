package conntrack

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Fake is an in-memory Table for tests. It is safe for use by several goroutines.
type Fake struct {
	mu     sync.Mutex
	flows  map[key]flow.Flow
	lastID uint32
	fail   func(op string, n int) error
	calls  map[string]int
}

// A key is what makes an entry unique.
type key struct {
	proto    model.Protocol
	src, dst netip.AddrPort
	zone     uint16
}

func keyOf(f flow.Flow) key { return key{f.Proto, f.OrigSrc, f.OrigDst, f.Zone} }

var _ Table = (*Fake)(nil)

// NewFake gives a table that holds the given entries.
func NewFake(flows ...flow.Flow) *Fake {
	f := &Fake{flows: map[key]flow.Flow{}, calls: map[string]int{}}
	f.Add(flows...)
	return f
}

// Add makes entries, or replaces those of the same original addresses. Each gets an ID, as the kernel gives one, unless
// it has one.
func (f *Fake) Add(flows ...flow.Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range flows {
		if e.ID == 0 {
			f.lastID++
			e.ID = f.lastID
		}
		f.flows[keyOf(e)] = e
	}
}

// Flows gives all entries, sorted by protocol and original addresses.
func (f *Fake) Flows() []flow.Flow {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sorted(func(flow.Flow) bool { return true })
}

func (f *Fake) sorted(keep func(flow.Flow) bool) []flow.Flow {
	var out []flow.Flow
	for _, e := range f.flows {
		if keep(e) {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b flow.Flow) int {
		return cmp.Or(cmp.Compare(a.Proto, b.Proto), a.OrigSrc.Compare(b.OrigSrc), a.OrigDst.Compare(b.OrigDst),
			cmp.Compare(a.Zone, b.Zone))
	})
	return out
}

// Fail sets a function that decides whether an operation fails; nil lets all pass. It is called with "list" or "delete"
// and the running number of that operation from 1, and must not call the fake.
func (f *Fake) Fail(fail func(op string, n int) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// Calls counts the calls of an operation, "list" or "delete".
func (f *Fake) Calls(op string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

func (f *Fake) ask(ctx context.Context, op string) error {
	f.calls[op]++
	if err := ctx.Err(); err != nil {
		return err //nolint:wrapcheck // the callers do
	}
	if f.fail == nil {
		return nil
	}
	return f.fail(op, f.calls[op])
}

// List implements Table.
func (f *Fake) List(
	ctx context.Context, family model.Family, proto model.Protocol, yield func(flow.Flow) bool,
) error {
	f.mu.Lock()
	err := f.ask(ctx, "list")
	all := f.sorted(func(e flow.Flow) bool { return e.Proto == proto && model.FamilyOf(e.OrigSrc.Addr()) == family })
	f.mu.Unlock()
	if err != nil {
		return refusal("list", fmt.Sprintf("%s conntrack entries of %s", family, proto), err)
	}
	for _, e := range all {
		if !yield(e) {
			break
		}
	}
	return nil
}

// Delete implements Table.
func (f *Fake) Delete(ctx context.Context, flows []flow.Flow) (int, error) {
	if len(flows) == 0 {
		return 0, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	object := fmt.Sprintf("%d conntrack entries", len(flows))
	if err := f.ask(ctx, "delete"); err != nil {
		return 0, refusal("delete", object, err)
	}
	flows, first := wellFormed(flows)
	deleted := 0
	for _, e := range flows {
		have, ok := f.flows[keyOf(e)]
		if ok && (e.ID == 0 || e.ID == have.ID) {
			delete(f.flows, keyOf(e))
			deleted++
		}
	}
	if first != nil {
		return deleted, refusal("delete", object, first)
	}
	return deleted, nil
}
