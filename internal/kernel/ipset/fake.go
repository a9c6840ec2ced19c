package ipset

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
)

// Fake is an in-memory Table for tests, which refuses what the kernel refuses. It is safe for use by several goroutines.
type Fake struct {
	mu   sync.Mutex
	sets map[string]Content
	fail func(op string) error
	used func(name string) bool
	sent int
}

var _ Table = (*Fake)(nil)

// NewFake gives a table without sets.
func NewFake() *Fake { return &Fake{sets: map[string]Content{}} }

// Fail sets a function that decides whether an operation fails; nil lets all pass. It is called before each Op and each
// Read with what is about to be done, and must not call the fake.
func (f *Fake) Fail(fail func(op string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// Used sets a function that tells whether a rule names a set, which then cannot be destroyed. It must not call the fake.
func (f *Fake) Used(used func(name string) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.used = used
}

// Has tells whether there is a set.
func (f *Fake) Has(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, there := f.sets[name]
	return there
}

// Sent counts the messages that the kernel would have got.
func (f *Fake) Sent() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sent
}

// Read implements Table.
func (f *Fake) Read(ctx context.Context, names []string) ([]Content, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.ask(ctx, "list sets"); err != nil {
		return nil, refusal("list", "IP sets", err)
	}
	var out []Content
	for _, name := range names {
		f.sent++
		if c, there := f.sets[name]; there {
			out = append(out, Content{Set: c.Set, Entries: maps.Clone(c.Entries)})
		}
	}
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
		err := o.check()
		if err != nil {
			out[i] = &StepError{Op: o.Verb.String(), Object: o.object(), Reason: err.Error(), Class: kernel.ErrInvalid}
			continue
		}
		if err = f.ask(ctx, o.Verb.String()+" "+o.object()); err == nil {
			err = f.apply(o)
		}
		if err != nil {
			out[i] = refusal(o.Verb.String(), o.object(), err)
		}
	}
	return out
}

func (f *Fake) apply(o Op) error {
	have, there := f.sets[o.Set.Name]
	switch o.Verb {
	case Create:
		return f.create(o.Set, have, there)
	case Destroy:
		if there && f.used != nil && f.used(o.Set.Name) {
			return errno(errBusy)
		}
		delete(f.sets, o.Set.Name)
		return nil
	case Swap:
		return f.swap(o)
	case Add, Remove:
	}
	switch {
	case !there:
		return unix.ENOENT
	case o.Verb == Remove:
		delete(have.Entries, o.Entry)
		return nil
	case o.Mark != 0 && !have.Marks:
		return errno(errMarks)
	}
	if _, has := have.Entries[o.Entry]; !has && have.MaxElem != 0 && len(have.Entries) >= int(have.MaxElem) {
		return errno(errHashFull)
	}
	have.Entries[o.Entry] = o.Mark
	return nil
}

// errno gives an error as the kernel gives it; refusal says what it means.
func errno(n unix.Errno) error { return n }

func (f *Fake) create(s Set, have Content, there bool) error {
	switch {
	case !known(s.Type):
		return errno(errFindType)
	case (s.Type == BitmapPort) != (s.Family == 0):
		return errno(errFindType)
	case there && have.Set == s:
		return nil
	case there:
		return unix.EEXIST
	}
	f.sets[s.Name] = Content{Set: s, Entries: map[Entry]uint32{}}
	return nil
}

func (f *Fake) swap(o Op) error {
	a, ok := f.sets[o.Set.Name]
	b, ok2 := f.sets[o.With]
	switch {
	case !ok || !ok2:
		return unix.ENOENT
	case a.Type != b.Type || a.Family != b.Family:
		return errno(errTypeMismatch)
	}
	a.Name, b.Name = b.Name, a.Name
	f.sets[a.Name], f.sets[b.Name] = a, b
	return nil
}

// Dump prints all sets in a form that is the same for the same sets.
func (f *Fake) Dump() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(f.sets)) {
		c := f.sets[name]
		b.WriteString("create " + c.Set.String() + "\n")
		for _, e := range slices.SortedFunc(maps.Keys(c.Entries), Entry.Compare) {
			b.WriteString("add " + name + " " + e.String())
			if mark := c.Entries[e]; mark != 0 {
				b.WriteString(" skbmark 0x" + strconv.FormatUint(uint64(mark), 16))
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}
