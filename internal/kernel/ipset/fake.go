package ipset

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Fake is an in-memory Table for tests, which refuses what the kernel refuses. Its entries never go by themselves, and it
// counts them exactly however many there are. It is safe for use by several goroutines.
type Fake struct {
	mu    sync.Mutex
	sets  map[string]Content
	lacks map[Type]bool
	fail  func(op string) error
	used  func(name string) bool
	sent  int
}

var _ Table = (*Fake)(nil)

// NewFake gives a table without sets.
func NewFake() *Fake { return &Fake{sets: map[string]Content{}, lacks: map[Type]bool{}} }

// Fail sets a function that decides whether an operation fails; nil lets all pass. It is called before each Op, Read,
// List and Probe with what is about to be done, and must not call the fake. An errno is reported as the kernel's.
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

// Lack takes types away, as on a machine without their modules. Sets that are there stay.
func (f *Fake) Lack(types ...Type) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range types {
		f.lacks[t] = true
	}
}

// Spoil makes a set one that holds something which is not known, as another program may have put there.
func (f *Fake) Spoil(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c, there := f.sets[name]; there {
		c.Foreign = true
		f.sets[name] = c
	}
}

// Has tells whether there is a set.
func (f *Fake) Has(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, there := f.sets[name]
	return there
}

// Sent counts the messages that the kernel would have got; see Kernel.Sent.
func (f *Fake) Sent() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sent
}

// Read implements Table.
func (f *Fake) Read(ctx context.Context, names []string) ([]Content, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range names {
		if err := checkName(name); err != nil {
			return nil, invalid("list", "IP set "+name, err)
		}
	}
	if err := f.ask(ctx, "list sets"); err != nil {
		return nil, refusal("list", "IP sets", err, explain)
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

// List implements Table.
func (f *Fake) List(ctx context.Context, want func(name string) bool) ([]Set, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.ask(ctx, "list sets"); err != nil {
		return nil, refusal("list", "IP sets", err, explain)
	}
	f.sent++
	var out []Set
	for _, name := range slices.Sorted(maps.Keys(f.sets)) {
		if want == nil || want(name) {
			out = append(out, f.sets[name].Set)
		}
	}
	return out, nil
}

// Probe implements Table. It tells of the newest protocol, and of the revisions that kernels have for sure.
func (f *Fake) Probe(ctx context.Context) (Support, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.ask(ctx, "probe sets"); err != nil {
		return Support{}, refusal("ask for the version of", "IP sets", err, explain)
	}
	out := Support{Protocol: protocolMax, Types: map[Type]uint8{}}
	for _, t := range Types() {
		if !f.lacks[t] {
			out.Types[t] = t.wanted()
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
		if err := o.check(); err != nil {
			out[i] = invalid(o.Verb.String(), o.object(), err)
			continue
		}
		if o.Verb == Create && f.lacks[o.Set.Type] { // found out before there is anything to send
			out[i] = o.refusal(errno(errFindType))
			continue
		}
		f.sent++
		err := f.ask(ctx, o.Verb.String()+" "+o.object())
		if err == nil {
			err = f.apply(o)
		}
		if err != nil {
			out[i] = o.refusal(err)
		}
	}
	return out
}

func (f *Fake) apply(o Op) error {
	have, there := f.sets[o.Set.Name]
	switch o.Verb {
	case Create:
		return f.create(o, have, there)
	case Swap:
		return f.swap(o)
	case Destroy:
		switch {
		case !there && !o.Strict:
			return nil
		case there && f.inUse(o.Set.Name):
			return errno(errBusy)
		}
	case Rename:
		_, taken := f.sets[o.With]
		switch {
		case there && f.inUse(o.Set.Name):
			return errno(errReferenced)
		case there && taken:
			return errno(errSecondName)
		}
	case Add, Remove, Flush:
	}
	if !there {
		return unix.ENOENT
	}
	if (o.Verb == Add || o.Verb == Remove) && (have.Type != o.Set.Type || have.Family != o.Set.Family) {
		return errno(errProtocol) // the kernel lets some pass, if the set has fewer fields
	}
	switch o.Verb {
	case Add:
		return have.add(o)
	case Remove:
		if _, has := have.Entries[o.Entry]; !has && o.Strict {
			return errno(errExist)
		}
		delete(have.Entries, o.Entry)
	case Flush:
		clear(have.Entries)
	case Rename:
		delete(f.sets, o.Set.Name)
		have.Name = o.With
		f.sets[o.With] = have
	case Destroy:
		delete(f.sets, o.Set.Name)
	case Create, Swap:
	}
	return nil
}

func (f *Fake) inUse(name string) bool { return f.used != nil && f.used(name) }

// add puts an entry in, with the kernel's refusals in its order.
func (c Content) add(o Op) error {
	_, has := c.Entries[o.Entry]
	switch {
	case o.Mark != 0 && !c.Marks:
		return errno(errMarks)
	case has && o.Strict:
		return errno(errExist)
	case !has && c.MaxElem != 0 && len(c.Entries) >= int(c.MaxElem):
		return errno(errHashFull)
	}
	c.Entries[o.Entry] = o.Mark
	return nil
}

// errno gives an error as the kernel gives it; refusal says what it means.
func errno(n unix.Errno) error { return n }

func (f *Fake) create(o Op, have Content, there bool) error {
	s := o.Set
	if s.MaxElem == 0 && s.Type != BitmapPort {
		s.MaxElem = DefaultMaxElem
	}
	have.Foreign = false // what spoils a set here are its entries, which the kernel does not mind
	if have.Type != BitmapPort && s.Type != BitmapPort {
		have.Family = s.Family // nor does it mind the family here
	}
	switch {
	case there && have.Set == s && !o.Strict:
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
	case !ok:
		return unix.ENOENT
	case !ok2:
		return errno(errSecondName)
	case a.Type != b.Type || a.Family != b.Family:
		return errno(errTypeMismatch)
	}
	a.Name, b.Name = b.Name, a.Name
	f.sets[a.Name], f.sets[b.Name] = a, b
	return nil
}

// Dump prints all sets in a form that is the same for the same sets: what `ipset restore` takes, and `ipset save` prints
// but for the size of the hash.
func (f *Fake) Dump() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(f.sets)) {
		f.sets[name].dump(&b)
	}
	return b.String()
}

func (c Content) dump(b *strings.Builder) {
	b.WriteString("create " + c.Set.String() + "\n")
	for _, e := range slices.SortedFunc(maps.Keys(c.Entries), Entry.Compare) {
		b.WriteString("add " + c.Name + " " + e.String())
		if mark := c.Entries[e]; mark != 0 {
			b.WriteString(" skbmark 0x" + strconv.FormatUint(uint64(mark), 16))
		}
		b.WriteString("\n")
	}
}
