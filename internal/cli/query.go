package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/turnout-proxy/turnout/internal/control"
	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/loop"
	"github.com/turnout-proxy/turnout/internal/model"
)

var _ control.Daemon = (*daemon)(nil)

// Status implements control.Daemon.
func (d *daemon) Status(ctx context.Context) (answer.Status, error) {
	s := answer.Status{
		Version: d.version, Mode: string(d.chosen.mode), Node: d.cfg.NodeName, PID: os.Getpid(),
		Started: d.started,
	}
	err := d.loop.Do(ctx, func(v loop.View) {
		s.Synced, s.Services, s.Findings = v.Synced, v.Services, len(v.Findings)
		for i := range v.Families {
			s.Families = append(s.Families, familyAnswer(&v.Families[i]))
		}
	})
	return s, err
}

func familyAnswer(f *loop.FamilyView) answer.Family {
	return answer.Family{
		Family: f.Family.String(), LastSync: f.Stats.LastSync, Error: f.Err, Drifts: f.Stats.DriftRepairs,
		Ports: f.Table.Len(), Failed: len(f.Ports),
	}
}

// A moment is what the loop knew at one time; it stays good when the loop goes on.
type moment struct {
	synced   bool
	findings []model.Finding
	families []momentFamily
}

type momentFamily struct {
	family  model.Family
	answer  answer.Family
	ports   []*forward.Port
	trouble []loop.PortStatus
}

func (d *daemon) moment(ctx context.Context) (*moment, error) {
	m := &moment{}
	err := d.loop.Do(ctx, func(v loop.View) {
		m.synced, m.findings = v.Synced, v.Findings
		for i := range v.Families {
			f := &v.Families[i]
			m.families = append(m.families, momentFamily{f.Family, familyAnswer(f), answer.Ports(f.Table), f.Ports})
		}
	})
	return m, err
}

// Listing implements control.Daemon. What is wanted is taken before the kernel is read: a change in between shows as
// drift, which the next look does not.
func (d *daemon) Listing(ctx context.Context) (answer.Listing, error) {
	l := answer.Listing{Source: answer.FromDaemon, Mode: string(d.chosen.mode), Node: d.cfg.NodeName, Rows: []answer.Row{}}
	m, err := d.moment(ctx)
	if err != nil {
		return l, err
	}
	l.Findings = answer.Findings(m.findings)
	if d.chosen.why != nil {
		l.Notes = append(l.Notes, fmt.Sprintf("Mode %s stands in for mode %s: %v", d.chosen.mode, d.cfg.Mode, d.chosen.why))
	}
	if !m.synced {
		l.Notes = append(l.Notes, "The sources are not complete yet: this is what the kernel holds from before.")
	}
	for i := range m.families {
		f := &m.families[i]
		read, err := d.loop.Inspect(ctx, f.family)
		if err != nil {
			// The other family can still be read, and what is wanted of this one is known.
			f.answer.Error = cmp.Or(f.answer.Error, err.Error())
			l.Rows = append(l.Rows, answer.Wanted(f.family, f.ports)...)
		} else {
			f.answer.Objects, f.answer.Pending = read.Observed.Objects(), read.Drift
			l.Rows = append(l.Rows, f.rows(&read, m.synced)...)
		}
		l.Families = append(l.Families, f.answer)
	}
	return l, nil
}

// rows compares what is wanted with the kernel. Where the backend finds nothing to do, nothing differs.
func (f *momentFamily) rows(read *loop.ReadBack, synced bool) []answer.Row {
	want := answer.Wanted(f.family, f.ports)
	if !synced {
		return answer.Held(f.family, read.Observed.Rows())
	}
	have := answer.Collapse(want, answer.Held(f.family, read.Observed.Rows()))
	if read.Drift == 0 {
		for i := range want {
			want[i].Drift = answer.DriftNone
		}
	} else {
		want = answer.Compare(want, have)
	}
	answer.Enliven(want, have)
	for _, p := range f.trouble {
		drift, why := answer.DriftMissing, "refused by the kernel: "+p.Err
		switch {
		case p.Served:
			drift, why = answer.DriftChanged, p.Err
		case p.Unsupported != "":
			why = p.Unsupported
		}
		answer.Blame(want, p.Port, drift, why)
	}
	return want
}

// Trace implements control.Daemon.
func (d *daemon) Trace(ctx context.Context, p forward.Packet) (answer.Trace, error) {
	family := model.FamilyOf(p.Dst.Addr())
	var tr answer.Trace
	var wanted forward.Outcome
	served := false
	err := d.loop.Do(ctx, func(v loop.View) {
		for i := range v.Families {
			if f := &v.Families[i]; f.Family == family {
				served, p = true, answer.Placed(p, f.Table.Context.HostAddrs)
				tr, wanted = answer.Explain(f.Table, p), forward.Lookup(f.Table, p)
			}
		}
	})
	if err != nil {
		return tr, err
	}
	if !served {
		return tr, fmt.Errorf("%s is not served on this node; see the start of the daemon's log", family)
	}
	bt, err := d.loop.Trace(ctx, family, p)
	if err != nil {
		return tr, err
	}
	tr.Source, tr.Mode, tr.Node = answer.FromDaemon, string(d.chosen.mode), d.cfg.NodeName
	tr.Witness(wanted, bt)
	return tr, nil
}

// Table implements control.Daemon.
func (d *daemon) Table(ctx context.Context, w io.Writer) error {
	var text bytes.Buffer
	var failed error
	err := d.loop.Do(ctx, func(v loop.View) {
		for i := range v.Families {
			if err := forward.Format(&text, v.Families[i].Table); err != nil {
				failed = err
			}
		}
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return err
	}
	return written(w.Write(text.Bytes()))
}
