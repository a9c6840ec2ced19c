package xtables

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Fake is an in-memory Tables for tests. It commits section by section as the kernel does, prints what iptables-save
// would print, and refuses what the tools or the kernel refuse: the contract test holds it to that. Beyond them it
// refuses what is never meant, even where they let it pass: port 0, ports by name, a loop of chains that no packet
// reaches yet, an insertion that the nft flavour would misplace, and modules and options that this program does not
// use.
//
// It is safe for use by several goroutines.
type Fake struct {
	mu      sync.Mutex
	family  model.Family
	flavour Flavour
	tables  map[string]*fakeTable
	// outside are objects of other subsystems that rules may name: "set NAME" and "nfacct NAME".
	outside map[string]bool
	// sets tells which sets there are besides; nil for none.
	sets func(name string) bool
	// lacking are the matches, targets and options that are not supported.
	lacking    map[string]bool
	generation uint64
	fail       func(op string, n int) error
	calls      map[string]int
	counts     Counts
}

// Counts says what a Fake was asked so far.
type Counts struct {
	// Saves, Restores and Pulses are calls, failed ones included.
	Saves, Restores, Pulses int
	// Sections are committed table sections; Bytes and Lines are those of all payloads.
	Sections, Bytes, Lines int
}

type fakeTable struct {
	chains map[string]*fakeChain
}

// A fakeChain is never changed once it is part of a table: a section that touches it works on a copy.
type fakeChain struct {
	policy string
	rules  []fakeRule
	// targets are the rules' targets, each once, in the order of their first use; set when a section is committed.
	targets []string
}

type fakeRule struct {
	text string
	rule *Rule
}

var _ Tables = (*Fake)(nil)

// NewFake gives empty tables of a family and a flavour.
func NewFake(family model.Family, flavour Flavour) *Fake {
	return &Fake{
		family: family, flavour: flavour, tables: map[string]*fakeTable{}, outside: map[string]bool{},
		lacking: map[string]bool{}, calls: map[string]int{},
	}
}

// Family tells the IP family.
func (f *Fake) Family() model.Family { return f.family }

// Flavour tells the flavour.
func (f *Fake) Flavour() Flavour { return f.flavour }

// Fail sets a function that decides whether an operation fails; nil lets all pass. It is called with the operation and
// its running number from 1: "save", "restore" and "pulse" before the call does anything, "commit" before a section
// takes effect, and "committed" after it did. It must not call the fake.
func (f *Fake) Fail(fail func(op string, n int) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// Define makes an object of another subsystem known, which rules may name from then on: kind is "set" or "nfacct".
func (f *Fake) Define(kind, name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.outside[kind+" "+name] = true
}

// Sets lets the fake ask which IP sets there are, instead of being told by Define. The function must not call the fake.
func (f *Fake) Sets(exists func(name string) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sets = exists
}

// Names tells whether a rule names an IP set.
func (f *Fake) Names(set string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.tables {
		for _, c := range t.chains {
			for _, r := range c.rules {
				if strings.Contains(r.text+" ", " "+set+" ") {
					return true
				}
			}
		}
	}
	return false
}

// Lack makes the fake refuse a match, a target, or one option of either ("MASQUERADE --random-fully"), as a kernel or a
// tool without it does.
func (f *Fake) Lack(names ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range names {
		f.lacking[n] = true
	}
}

// Counts gives the counts since the fake was made.
func (f *Fake) Counts() Counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts
}

// ask lets the fault hook decide about one operation.
func (f *Fake) ask(op string) error {
	f.calls[op]++
	if f.fail == nil {
		return nil
	}
	return f.fail(op, f.calls[op])
}

// Save implements Tables.
func (f *Fake) Save(ctx context.Context, table string) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.Saves++
	object := fmt.Sprintf("%s table %s", f.family, table)
	if err := ctx.Err(); err != nil {
		return nil, &StepError{Op: "save", Object: object, Err: err}
	}
	if err := f.ask("save"); err != nil {
		return nil, &StepError{Op: "save", Object: object, Err: err}
	}
	t := f.tables[table]
	if t == nil {
		return nil, nil
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%s\n", table)
	names := t.names(table)
	for _, name := range names {
		fmt.Fprintf(&b, ":%s %s [0:0]\n", name, t.chains[name].policy)
	}
	for _, name := range names {
		for _, r := range t.chains[name].rules {
			b.WriteString("-A ")
			b.WriteString(name)
			if r.text != "" {
				b.WriteByte(' ')
				b.WriteString(r.text)
			}
			b.WriteByte('\n')
		}
	}
	b.WriteString("COMMIT\n")
	return b.Bytes(), nil
}

// names gives a table's chains in the order of printing: the built-in ones, then the others by name.
func (t *fakeTable) names(table string) []string {
	base := BaseChains(table)
	names := slices.Clone(base)
	for _, name := range slices.Sorted(maps.Keys(t.chains)) {
		if !slices.Contains(base, name) {
			names = append(names, name)
		}
	}
	return names
}

// Pulse implements Tables.
func (f *Fake) Pulse(ctx context.Context) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.Pulses++
	object := fmt.Sprintf("pulse of the %s tables (%s)", f.family, f.flavour)
	if err := ctx.Err(); err != nil {
		return "", &StepError{Op: "read", Object: object, Err: err}
	}
	if err := f.ask("pulse"); err != nil {
		return "", &StepError{Op: "read", Object: object, Err: err}
	}
	return fmt.Sprintf("fake generation %d", f.generation), nil
}

// Restore implements Tables.
func (f *Fake) Restore(ctx context.Context, payload []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.Restores++
	f.counts.Bytes += len(payload)
	f.counts.Lines += bytes.Count(payload, []byte{'\n'})
	object := f.family.String() + " tables"
	if err := ctx.Err(); err != nil {
		return &StepError{Op: "restore", Object: object, Err: err}
	}
	if err := f.ask("restore"); err != nil {
		return &StepError{Op: "restore", Object: object, Err: err}
	}
	var s *section
	number := 0
	for raw := range bytes.Lines(payload) {
		number++
		line := strings.Trim(string(raw), "\r\n")
		next, err := f.line(s, line)
		if err != nil {
			if s != nil {
				object = fmt.Sprintf("%s table %s", f.family, s.name)
			}
			return refused(object, number, line, err)
		}
		s = next
	}
	if s != nil {
		return refused(fmt.Sprintf("%s table %s", f.family, s.name), number+1, "", refuse("COMMIT expected"))
	}
	return nil
}

// refused wraps what was wrong with one line. A failure that was injected keeps its own class.
func refused(object string, number int, line string, err error) error {
	step := &StepError{
		Op: "restore", Object: object, Line: number, Text: kernel.Quote(line), Reason: err.Error(), Err: err,
	}
	if r, ok := err.(*refusal); ok { //nolint:errorlint // only one made here, never a wrapped one, has a class
		step.Class, step.Err = r.class, nil
	}
	return step
}

// A refusal is the fake's own no.
type refusal struct {
	text  string
	class error
}

func (r *refusal) Error() string { return r.text }

func refuse(format string, args ...any) error {
	return &refusal{text: fmt.Sprintf(format, args...), class: ErrInvalid}
}

// line takes one line into the open section s (nil outside of any) and gives the section that is open after it.
func (f *Fake) line(s *section, line string) (*section, error) {
	switch {
	case line == "", line[0] == '#':
		return s, nil
	case line[0] == '*' && s == nil:
		return f.open(line[1:])
	case s == nil:
		return nil, refuse("%q is in no table", line)
	case line == "COMMIT":
		return nil, f.commit(s)
	case line[0] == ':':
		return s, s.declare(line[1:])
	case line[0] == '-':
		return s, s.command(line)
	}
	return s, refuse("bad argument %q", line)
}

func (f *Fake) open(table string) (*section, error) {
	base := BaseChains(table)
	if base == nil {
		return nil, &refusal{text: fmt.Sprintf("unable to initialize table %q", table), class: ErrUnsupported}
	}
	t := f.tables[table]
	if t == nil {
		t = &fakeTable{chains: map[string]*fakeChain{}}
		for _, name := range base {
			t.chains[name] = &fakeChain{policy: "ACCEPT"}
		}
		if f.flavour == Legacy {
			f.tables[table] = t // to look at a table is to make it there
		}
	}
	return &section{
		name: table, family: f.family, flavour: f.flavour, table: t, outside: f.outside, sets: f.sets, lacking: f.lacking,
		changed: map[string]*fakeChain{}, fresh: map[*Rule]bool{}, refs: map[string]int{},
	}, nil
}

func (c *fakeChain) distinctTargets() []string {
	var out []string
	seen := map[string]bool{"": true}
	for _, r := range c.rules {
		if name := r.rule.Target.Name; !seen[name] {
			seen[name] = true
			out = append(out, name)
		}
	}
	return out
}

// commit makes a section's changes real, if the table as a whole is one that the kernel takes.
func (f *Fake) commit(s *section) error {
	if err := f.ask("commit"); err != nil {
		return err
	}
	if f.flavour == NFT && len(s.changed) == 0 && f.tables[s.name] == nil {
		return nil // this flavour makes a table only with something in it
	}
	next := &fakeTable{chains: maps.Clone(s.table.chains)}
	for name, c := range s.changed {
		if c == nil {
			delete(next.chains, name)
			continue
		}
		c.targets = c.distinctTargets()
		next.chains[name] = c
	}
	if err := next.check(s.name); err != nil {
		return err
	}
	f.tables[s.name] = next
	f.generation++
	f.counts.Sections++
	return f.ask("committed")
}
