package backendtest

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A run takes one lane through one script.
type run struct {
	t      testing.TB
	mode   Mode
	family model.Family
	script *script
	world  *world
	lane   *lane
	// packets are all that the script asks about in this family, whenever it does.
	packets []forward.Packet
	// begun tells that the script's settings are complete.
	begun bool
	// pristine is the kernel before the mode wrote to it; foreign and damaged tell what was done to it.
	pristine         string
	foreign, damaged bool
	// probe sends real traffic; nil on a fake kernel.
	probe *prober
	files map[string]string
}

// runScripts runs every script on the fake kernel.
func runScripts(t *testing.T, m Mode) {
	t.Helper()
	for _, s := range loadScripts(t) {
		for _, family := range m.Families {
			if s.only != 0 && s.only != family {
				continue
			}
			t.Run(s.name+"/"+family.String(), func(t *testing.T) {
				t.Parallel()
				if reason, ok := m.Exceptions[s.name]; ok {
					t.Skipf("%s is not held to it: %s", m.Name, reason)
				}
				if s.big && testing.Short() {
					t.Skip("takes seconds; run it without -short")
				}
				lane := newLane(t, m, m.Fake(t, family), s.name)
				newRun(t, m, family, s, lane).all()
			})
		}
	}
}

func newRun(t testing.TB, m Mode, family model.Family, s *script, l *lane) *run {
	t.Helper()
	r := &run{t: t, mode: m, family: family, script: s, lane: l, world: newWorld(newSettings(family))}
	r.files = maps.Clone(s.files)
	for _, c := range s.commands {
		if c.name != "packet" {
			continue
		}
		p, err := parsePacket(c.args)
		if err != nil {
			t.Fatalf("%s: %v", c, err)
		}
		if model.FamilyOf(p.Dst.Addr()) == family && !slices.Contains(r.packets, p) {
			r.packets = append(r.packets, p)
		}
	}
	return r
}

// all carries out the script, and then takes everything away again.
func (r *run) all() {
	r.t.Helper()
	r.pristine = r.lane.dump()
	for _, c := range r.script.commands {
		r.beforeCommand(c)
		if err := r.command(c); err != nil {
			r.t.Fatalf("%s: %v", c, err)
		}
		if r.t.Failed() {
			r.t.Fatalf("%s: see above", c)
		}
	}
	r.beforeCommand(command{})
	r.cleanup()
}

// beforeCommand asks the real kernel what was collected, unless more of the same follows.
func (r *run) beforeCommand(c command) {
	r.t.Helper()
	if r.probe != nil && c.name != "packet" {
		r.probe.flush(r)
		if r.t.Failed() {
			r.t.Fatalf("see above")
		}
	}
}

func (r *run) command(c command) error {
	r.t.Helper()
	if c.name == "set" {
		return r.set(c.args)
	}
	if c.name == "foreign" {
		return r.addForeign()
	}
	if !r.begun {
		r.begin()
	}
	switch c.name {
	case "apply", "delete":
		return r.applyFiles(c.args, c.name == "delete")
	case "edit":
		return r.edit(c.args)
	case "crowd":
		return r.crowd(c.args)
	case "fleet", "nofleet":
		return r.fleet(c.args, c.name == "nofleet")
	case "packet":
		return r.packet(c)
	case "table":
		return r.text(c.want, portText(r.world.table))
	case "context":
		return r.text(c.want, contextText(r.world.table))
	case "find", "nofind":
		return r.find(c.args, c.name == "find")
	case "flows":
		return r.flows(c.want)
	case "observe":
		r.lane.settled()
	case "restart":
		r.lane.adopts(r.world.table)
	case "damage":
		return r.damage()
	case "cleanup":
		r.cleanup()
		r.begun = false
	case "open", "ping", "stray", "expires":
		if r.probe != nil {
			return r.probe.conversation(r, c)
		}
	}
	return nil
}

// begin is the proxy's first sync, of what is known by then.
func (r *run) begin() {
	r.t.Helper()
	r.begun = true
	r.world.update(r.t, model.Dirty{Node: true})
	r.lane.reopen()
	r.lane.compile(r.world.builder.Table(), everything(r.world.builder.Table()))
	r.settle(nil)
}

// set changes settings: before the first other command those that the proxy starts with, later by a restart.
func (r *run) set(args []string) error {
	r.t.Helper()
	next := r.world.settings
	for _, a := range args {
		if err := next.set(a); err != nil {
			return err
		}
	}
	if r.probe != nil {
		if err := r.probe.site.become(next); err != nil {
			r.t.Skipf("not on the real kernel: %v", err)
		}
	}
	if !r.begun {
		r.world = newWorld(next)
		return nil
	}
	before := r.world.table
	r.world.reset(r.t, next)
	r.lane.reopen()
	r.lane.compile(r.world.builder.Table(), everything(r.world.builder.Table()))
	r.settle(before)
	return nil
}

// take brings events into the table and the table into the kernel.
func (r *run) take(events []model.Event) {
	r.t.Helper()
	before := r.world.table
	delta := r.world.take(r.t, events)
	r.lane.compile(r.world.builder.Table(), delta)
	r.settle(before)
}

// settle applies what was compiled and checks what must hold after every step.
func (r *run) settle(before *forward.Table) {
	r.t.Helper()
	if r.probe != nil {
		if err := r.probe.serve(r.world.table); err != nil {
			r.t.Fatalf("start the endpoints' servers: %v", err)
		}
	}
	r.lane.sync()
	r.lane.settled()
	if r.probe != nil {
		if err := r.probe.forget(r); err != nil {
			r.t.Errorf("forget stale connection tracking entries: %v", err)
		}
		return
	}
	c := &change{
		mode: r.mode, family: r.family, old: before, next: r.world.table, packets: r.packets, foreign: r.foreign,
	}
	if !r.damaged {
		if diff := cmp.Diff(c.open(r.t, c.next).dump(), r.lane.dump()); diff != "" {
			r.t.Errorf("kernel (-from scratch +step by step):\n%s", diff)
		}
	}
	c.prefixes(r.t, stride(c.old, c.next))
}

// stride is 1 for tables of ordinary size, and more for those where each try costs seconds.
func stride(tables ...*forward.Table) int {
	n := 0
	for _, t := range tables {
		if t == nil {
			continue
		}
		for _, name := range t.Names() {
			n += len(t.Port(name).Cluster) + 1
		}
	}
	return 1 + n/100
}

func (r *run) applyFiles(names []string, gone bool) error {
	r.t.Helper()
	var events []model.Event
	for _, name := range names {
		text, ok := r.files[name]
		if !ok {
			return fmt.Errorf("there is no file %s", name)
		}
		list, err := readObjects(text, gone)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		events = append(events, list...)
	}
	r.take(events)
	return nil
}

// edit replaces all occurrences of a text in a file and applies it.
func (r *run) edit(args []string) error {
	r.t.Helper()
	text, ok := r.files[args[0]]
	if !ok {
		return fmt.Errorf("there is no file %s", args[0])
	}
	if !strings.Contains(text, args[1]) {
		return fmt.Errorf("%s does not contain %q", args[0], args[1])
	}
	r.files[args[0]] = strings.ReplaceAll(text, args[1], args[2])
	return r.applyFiles(args[:1], false)
}

// crowd makes many endpoints: NAMESPACE/SERVICE PORTNAME PORT NUMBER.
func (r *run) crowd(args []string) error {
	r.t.Helper()
	namespace, name, ok := strings.Cut(args[0], "/")
	port, err := strconv.ParseUint(args[2], 10, 16)
	n, err2 := strconv.Atoi(args[3])
	if !ok || err != nil || err2 != nil {
		return errors.New("want NAMESPACE/SERVICE PORTNAME PORT NUMBER")
	}
	portName := args[1]
	if portName == "-" {
		portName = ""
	}
	events, err := crowdSlices(r.family, model.Name{Namespace: namespace, Name: name}, portName, uint16(port), n)
	if err != nil {
		return err
	}
	r.take(events)
	return nil
}

// fleet makes many Services, or deletes them: FIRST NUMBER.
func (r *run) fleet(args []string, gone bool) error {
	r.t.Helper()
	first, err := strconv.Atoi(args[0])
	n, err2 := strconv.Atoi(args[1])
	if err != nil || err2 != nil {
		return errors.New("want FIRST NUMBER")
	}
	r.take(fleetEvents(r.family, first, n, gone))
	return nil
}

func (r *run) packet(c command) error {
	r.t.Helper()
	p, err := parsePacket(c.args)
	if err != nil {
		return err
	}
	want, err := parseExpectation(c.want)
	if err != nil {
		return err
	}
	if model.FamilyOf(p.Dst.Addr()) != r.family {
		return nil
	}
	got := forward.Lookup(r.world.table, p)
	if !want.met(got) {
		r.t.Errorf("%s: the table says (-want +got):\n- %s\n+ %s\ntable:\n%s", c, want, short(got), portText(r.world.table))
		return nil
	}
	r.lane.trace(r.world.table, p)
	if r.probe != nil {
		r.probe.packet(r, c, p, got)
	}
	return nil
}

// text compares lines, whatever their indentation. A single "-" stands for no lines.
func (r *run) text(want []string, text string) error {
	r.t.Helper()
	var got []string
	if len(want) == 1 && want[0] == "-" {
		want = nil
	}
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			got = append(got, line)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("text (-want +got):\n%s", diff)
	}
	return nil
}

// find looks for a finding with a reason, about an object if one is given ("Service shop/web").
func (r *run) find(args []string, wanted bool) error {
	r.t.Helper()
	var seen []string
	found := false
	for _, f := range r.world.findings() {
		seen = append(seen, f.String())
		if (len(args) < 1 || f.Reason == args[0]) && (len(args) < 2 || f.Kind+" "+f.Object == args[1]) {
			found = true
		}
	}
	if found != wanted {
		return fmt.Errorf("finding there: %v, wanted: %v; all findings:\n%s", found, wanted, strings.Join(seen, "\n"))
	}
	return nil
}

// flows asks package flow about connection tracking entries: PROTO CLIENT DST REPLY-FROM stale|kept.
func (r *run) flows(lines []string) error {
	r.t.Helper()
	ix := flow.NewIndex(r.world.table)
	for _, old := range r.world.gone {
		ix.Remove(old)
	}
	for _, line := range lines {
		var proto, verdict string
		var at [3]string
		if n, err := fmt.Sscan(line, &proto, &at[0], &at[1], &at[2], &verdict); n != 5 || err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("%q: want PROTOCOL CLIENT:PORT DESTINATION:PORT REPLY:PORT stale|kept", line)
		}
		var addr [3]netip.AddrPort
		for i := range at {
			a, err := netip.ParseAddrPort(at[i])
			if err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
			addr[i] = a
		}
		p, err := model.ParseProtocol(proto)
		if err != nil || verdict != "stale" && verdict != "kept" {
			return fmt.Errorf("%q: protocol or verdict unknown", line)
		}
		if model.FamilyOf(addr[1].Addr()) != r.family {
			continue
		}
		f := flow.Flow{Proto: p, OrigSrc: addr[0], OrigDst: addr[1], ReplySrc: addr[2], ReplyDst: addr[0]}
		if got := ix.Stale(f); got != (verdict == "stale") {
			r.t.Errorf("flow %s: stale is %v", line, got)
		}
	}
	return nil
}

func (r *run) addForeign() error {
	r.t.Helper()
	if r.foreign {
		return errors.New("foreign objects are there already")
	}
	r.foreign = true
	if err := r.lane.enter(r.lane.kernel.AddForeign); err != nil {
		return fmt.Errorf("add foreign objects: %w", err)
	}
	if !r.begun {
		r.pristine = r.lane.dump()
		return nil
	}
	return errors.New("foreign objects come before the proxy starts")
}

// damage lets somebody else take objects away, and the backend repair it as a periodic check does.
func (r *run) damage() error {
	r.t.Helper()
	if r.foreign {
		return errors.New("who flushes takes foreign objects along: use a script without them")
	}
	before, pulse := r.lane.dump(), r.lane.pulse()
	if err := r.lane.enter(r.lane.kernel.Damage); err != nil {
		return fmt.Errorf("damage: %w", err)
	}
	if r.lane.dump() == before {
		return errors.New("the mode's damage changes nothing")
	}
	r.damaged, r.lane.seen = true, nil
	if now := r.lane.pulse(); now == pulse {
		r.t.Errorf("the pulse %q does not show the damage", pulse)
	}
	if plan := r.lane.b.Diff(r.lane.observe()); plan.Empty() {
		r.t.Errorf("reading back does not show the damage")
	}
	r.lane.synced = false // the loop reads back when it finds drift
	r.lane.sync()
	r.lane.settled()
	return nil
}

// cleanup wants nothing any more: the kernel must become what it was.
func (r *run) cleanup() {
	r.t.Helper()
	if r.world.table == nil {
		return
	}
	if r.probe == nil {
		c := &change{
			mode: r.mode, family: r.family, old: r.world.table, packets: r.packets, foreign: r.foreign,
		}
		c.prefixes(r.t, stride(c.old))
	}
	r.lane.compile(nil, forward.Delta{})
	r.lane.sync()
	r.lane.settled()
	for kind, n := range r.lane.observe().Objects() {
		if n != 0 {
			r.t.Errorf("after the cleanup %d of kind %s are left", n, kind)
		}
	}
	r.gone()
}

// gone compares the kernel with what it was before the mode came.
func (r *run) gone() {
	r.t.Helper()
	if diff := cmp.Diff(r.pristine, r.lane.dump()); diff != "" {
		r.t.Errorf("kernel after the cleanup (-before +after):\n%s", diff)
	}
}
