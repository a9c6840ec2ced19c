package backendtest

import (
	"slices"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
)

// lookup asks the oracle; where no table is in force nothing is a Service's.
func lookup(t *forward.Table, p forward.Packet) forward.Outcome {
	if t == nil {
		return forward.Outcome{Do: forward.Pass}
	}
	return forward.Lookup(t, p)
}

// trace checks what the backend's tracer and, where there is one, the tracer over the kernel's objects say of a packet.
func (l *lane) trace(table *forward.Table, p forward.Packet) {
	l.t.Helper()
	want := lookup(table, p)
	got, err := l.b.Trace(p)
	l.compare("the wanted objects", table, p, want, got, err)
	if l.seen == nil {
		l.seen = l.observe()
	}
	if o, ok := l.seen.(ObservedTracer); ok {
		got, err := o.Trace(&table.Context, p)
		l.compare("the kernel's objects", table, p, want, got, err)
	}
}

func (l *lane) compare(
	what string, table *forward.Table, p forward.Packet, want forward.Outcome, got backend.Trace, err error,
) {
	l.t.Helper()
	got.Outcome, want = leveled(got.Outcome, p), leveled(want, p)
	switch {
	case err != nil:
		l.t.Errorf("%s: %s: trace: %v", packetText(p), what, err)
	case agrees(got.Outcome, want), l.mode.excuses(got.Outcome, want, p, table):
	default:
		l.t.Errorf("%s:\n%s say %s\nthe table says %s\nway:\n%s", packetText(p), what, short(got.Outcome), short(want),
			stepText(got.Steps))
	}
}

// between checks that a kernel in the middle of a change from one table to the next is safe for each packet.
func (l *lane) between(where string, old, next *forward.Table, packets []forward.Packet) {
	l.t.Helper()
	o, ok := l.observe().(ObservedTracer)
	if !ok {
		return
	}
	ctx := old
	if next != nil {
		ctx = next
	}
	if ctx == nil {
		return
	}
	for _, p := range packets {
		was, will := leveled(lookup(old, p), p), leveled(lookup(next, p), p)
		got, err := o.Trace(&ctx.Context, p)
		if err != nil {
			l.t.Errorf("%s: %s: trace: %v", where, packetText(p), err)
			continue
		}
		got.Outcome = leveled(got.Outcome, p)
		switch {
		case safe(got.Outcome, was, will), l.mode.Gradual && gradual(got.Outcome, was, will),
			l.mode.excuses(got.Outcome, will, p, old, next):
		default:
			l.t.Errorf("%s: %s:\nthe kernel's objects say %s\nbefore the change %s\nafter it %s\nway:\n%s", where, packetText(p),
				short(got.Outcome), short(was), short(will), stepText(got.Steps))
		}
	}
}

// leveled calls the connection of an address of this machine to itself masked: nobody could tell, so modes may differ.
func leveled(o forward.Outcome, p forward.Packet) forward.Outcome {
	o.Choices = slices.Clone(o.Choices)
	for i, c := range o.Choices {
		o.Choices[i].SNAT = c.SNAT || p.In == "" && c.Endpoint.Addr() == p.Src.Addr()
	}
	return o
}

// excuses tells whether a mode may differ from its tables in what it does with a packet, by what it says of itself.
func (m Mode) excuses(got, want forward.Outcome, p forward.Packet, tables ...*forward.Table) bool {
	return m.OwnsAddresses && owned(got, want, p, tables...) ||
		m.NoLoopback && got.Do == forward.Pass && p.Dst.Addr().IsLoopback()
}

// owned tells whether a packet that passes by a table was refused because an address of a Service is the machine's own.
func owned(got, want forward.Outcome, p forward.Packet, tables ...*forward.Table) bool {
	if got.Do != forward.Reject || want.Do != forward.Pass {
		return false
	}
	for _, t := range tables {
		if t == nil {
			continue
		}
		for _, n := range t.Names() {
			for _, f := range t.Port(n).Frontends {
				if f.Addr == p.Dst.Addr() {
					return true
				}
			}
		}
	}
	return false
}

// gradual tells whether a packet that is forwarded before and after meets part of the endpoints of both: each as one of
// the two tables says, or masked where one of them masks.
func gradual(got, was, will forward.Outcome) bool {
	all := slices.Concat(was.Choices, will.Choices)
	masks := slices.ContainsFunc(all, func(c forward.Choice) bool { return c.SNAT })
	for _, c := range got.Choices {
		known := func(o forward.Choice) bool { return o.Endpoint == c.Endpoint && (o.SNAT == c.SNAT || c.SNAT && masks) }
		if !slices.ContainsFunc(all, known) {
			return false
		}
	}
	return got.Do == forward.Forward && (was.Do == forward.Forward || will.Do == forward.Forward)
}

// safe tells whether a packet may meet an outcome in the middle of a change. What the old and what the new table say is
// safe. Besides, a packet may be refused in either way if at least one of them does not forward it and at least one makes
// it a Service's: kernels that keep refusals apart from translations cannot change both in the same moment. So no packet
// that is forwarded before and after is ever lost, none gets past a refusal of both, and none is led anywhere else.
func safe(got, was, will forward.Outcome) bool {
	if agrees(got, was) || agrees(got, will) {
		return true
	}
	refused := got.Do == forward.Reject || got.Do == forward.Drop
	served := was.Do == forward.Forward && will.Do == forward.Forward
	unknown := was.Do == forward.Pass && will.Do == forward.Pass
	return refused && !served && !unknown
}

func packetText(p forward.Packet) string {
	in := ""
	if p.In != "" {
		in = " in=" + p.In
	}
	return "packet " + p.Src.String() + " " + p.Dst.String() + "/" + p.Proto.String() + in
}

func stepText(steps []backend.Step) string {
	const most = 40
	text := ""
	for i, s := range steps {
		if i == most {
			return text + "  ...\n"
		}
		text += "  " + s.String() + "\n"
	}
	return text
}
