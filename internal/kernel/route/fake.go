package route

import (
	"context"
	"errors"
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
	memory
	// foreign are addresses that others made local.
	foreign map[netip.Addr]bool
	// own tells which sources the kernel takes; nil takes all. None of withdrawn is one.
	own       func(netip.Addr) bool
	withdrawn map[netip.Addr]bool
	down      bool
}

var _ Table = (*Fake)(nil)

// NewFake gives a table without routes. Own tells which addresses are the machine's; nil takes all for its own.
func NewFake(own func(netip.Addr) bool) *Fake {
	return &Fake{
		memory: memory{locals: map[netip.Addr]netip.Addr{}}, foreign: map[netip.Addr]bool{},
		own: own, withdrawn: map[netip.Addr]bool{},
	}
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

// Withdraw takes an address from the machine. IPv4 routes keep it for their source, IPv6 routes lose it.
func (f *Fake) Withdraw(a netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.withdrawn[a] = true
	for addr, source := range f.locals {
		if source == a && addr.Is6() {
			f.locals[addr] = netip.Addr{}
		}
	}
}

// SetDown takes the loopback interface down, with all IPv6 routes over it, or up again. IPv4 does not mind.
func (f *Fake) SetDown(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = down
	if down {
		maps.DeleteFunc(f.locals, func(a, _ netip.Addr) bool { return a.Is6() })
	}
}

// List implements Table.
func (f *Fake) List(ctx context.Context, family model.Family) ([]Local, error) {
	return f.list(ctx, family, "local routes")
}

// Apply implements Table.
func (f *Fake) Apply(ctx context.Context, ops []Op) []error {
	return f.each(ctx, ops, nil, func(o Op) error {
		switch {
		case o.Verb == Remove:
			delete(f.locals, o.Addr)
		case f.down && o.Addr.Is6():
			return errno(unix.ENETDOWN)
		case o.Source.IsValid() && (f.withdrawn[o.Source] || f.own != nil && !f.own(o.Source)):
			return errno(unix.EINVAL)
		default:
			f.locals[o.Addr] = o.Source
		}
		return nil
	})
}

// Dump prints all routes in a form that is the same for the same routes.
func (f *Fake) Dump() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	f.dump(&b)
	for _, a := range slices.SortedFunc(maps.Keys(f.foreign), netip.Addr.Compare) {
		b.WriteString("foreign local " + a.String() + "\n")
	}
	return b.String()
}

// FakeDummy is an in-memory Device for tests, which refuses what the kernel refuses. It is safe for use by several
// goroutines.
type FakeDummy struct {
	memory
	// kind is that of the device; empty if there is none.
	kind string
	// absent: the kernel has no dummy devices.
	absent bool
}

var _ Device = (*FakeDummy)(nil)

// NewFakeDummy gives a kernel that has dummy devices, and none of the name.
func NewFakeDummy() *FakeDummy {
	return &FakeDummy{memory: memory{locals: map[netip.Addr]netip.Addr{}}}
}

// SetKind has the device replaced by one of a kind, without addresses; empty takes it away.
func (f *FakeDummy) SetKind(kind string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kind = kind
	clear(f.locals)
}

// SetAbsent has the kernel forget, or know again, how to make dummy devices.
func (f *FakeDummy) SetAbsent(absent bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.absent = absent
}

// Ensure implements Device.
func (f *FakeDummy) Ensure(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.ask(ctx, "make dummy device")
	if err == nil {
		err = f.device()
	}
	if errors.Is(err, unix.ENODEV) {
		f.sent++
		err = nil
		if f.absent {
			err = errNoDummies
		} else {
			f.kind = kindDummy
		}
	}
	if err != nil {
		return refusal("make", "dummy device", err)
	}
	return nil
}

// device looks the device up.
func (f *FakeDummy) device() error {
	f.sent++
	switch f.kind {
	case kindDummy:
		return nil
	case "":
		return errno(unix.ENODEV)
	default:
		return errOtherKind
	}
}

// Delete implements Device.
func (f *FakeDummy) Delete(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.ask(ctx, "delete dummy device")
	if err == nil {
		err = f.device()
	}
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil
	case err != nil:
		return refusal("delete", "dummy device", err)
	}
	f.sent++
	f.kind = ""
	clear(f.locals)
	return nil
}

// List implements Table.
func (f *FakeDummy) List(ctx context.Context, family model.Family) ([]Local, error) {
	f.mu.Lock()
	err := f.device()
	f.mu.Unlock()
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, refusal("list", "addresses of dummy device", err)
	}
	return f.list(ctx, family, "addresses of dummy device")
}

// Apply implements Table.
func (f *FakeDummy) Apply(ctx context.Context, ops []Op) []error {
	return f.each(ctx, ops, f.device, func(o Op) error {
		switch {
		case o.Verb == Remove:
			delete(f.locals, o.Addr)
		case o.Source.IsValid():
			return errSource
		default:
			f.locals[o.Addr] = netip.Addr{}
		}
		return nil
	})
}

// Dump prints the device and its addresses in a form that is the same for the same ones.
func (f *FakeDummy) Dump() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kind == "" {
		return ""
	}
	var b strings.Builder
	b.WriteString("device of kind " + f.kind + "\n")
	f.dump(&b)
	return b.String()
}

// memory is what both fakes have: addresses with their sources, a count of messages, and failures on demand.
type memory struct {
	mu     sync.Mutex
	locals map[netip.Addr]netip.Addr
	fail   func(op string) error
	sent   int
}

// Fail sets a function that decides whether an operation fails; nil lets all pass. It is called before each Op and each
// other call with what is about to be done, and must not call the fake.
func (m *memory) Fail(fail func(op string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = fail
}

// Sent counts the messages that the kernel would have got.
func (m *memory) Sent() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sent
}

func (m *memory) ask(ctx context.Context, op string) error {
	if err := ctx.Err(); err != nil {
		return err //nolint:wrapcheck // the caller does
	}
	if m.fail == nil {
		return nil
	}
	return m.fail(op)
}

func (m *memory) list(ctx context.Context, family model.Family, what string) ([]Local, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sent++
	if err := m.ask(ctx, "list "+what); err != nil {
		return nil, refusal("list", what, err)
	}
	var out []Local
	for a, source := range m.locals {
		if model.FamilyOf(a) == family {
			out = append(out, Local{a, source})
		}
	}
	slices.SortFunc(out, Local.Compare)
	return out, nil
}

// each carries out ops that are well-formed, after open if there is one.
func (m *memory) each(ctx context.Context, ops []Op, open func() error, do func(Op) error) []error {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]error, len(ops))
	if len(ops) == 0 {
		return out
	}
	if open != nil {
		if err := open(); err != nil {
			return failAll(out, ops, err)
		}
	}
	for i, o := range ops {
		if err := o.check(); err != nil {
			out[i] = invalid(o, err)
			continue
		}
		m.sent++
		err := m.ask(ctx, o.Verb.String()+" "+o.object())
		if err == nil {
			err = do(o)
		}
		switch {
		case errors.Is(err, errSource):
			out[i] = invalid(o, err)
		case err != nil:
			out[i] = refusal(o.Verb.String(), o.object(), err)
		}
	}
	return out
}

func (m *memory) dump(b *strings.Builder) {
	for _, a := range slices.SortedFunc(maps.Keys(m.locals), netip.Addr.Compare) {
		b.WriteString("local " + Op{Local: Local{a, m.locals[a]}}.object() + "\n")
	}
}

// errno gives an error as the kernel gives it; refusal says what it means.
func errno(n unix.Errno) error { return n }
