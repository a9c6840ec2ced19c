package iptables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// maxRefusals bounds how many ports one Apply takes out one after the other before it gives up.
const maxRefusals = 8

// Apply implements backend.Backend. When the tool names the line that it refuses, the Service port that the line belongs
// to is left out and the rest is tried again.
func (b *Backend) Apply(ctx context.Context, p backend.Plan) backend.Report {
	start := time.Now()
	report := backend.Report{}
	next, ok := p.(*plan)
	if !ok {
		report.Err = fmt.Errorf("plan of type %T is not one of this mode", p)
		return report
	}
	for {
		payload := next.payload()
		report.Steps, report.Bytes = report.Steps+next.Steps(), report.Bytes+len(payload)
		if len(payload) > 0 {
			report.Err = b.tables.Restore(ctx, payload)
		}
		if report.Err == nil {
			b.c.acknowledge()
			b.jumps = b.c.want.Jumps
			b.last = next.Rules()
			break
		}
		name, found := b.blame(payload, report.Err)
		if !found || len(report.Failed) >= maxRefusals {
			break
		}
		if report.Failed == nil {
			report.Failed = map[forward.PortName]error{}
		}
		report.Failed[name] = report.Err
		b.c.refuse(name, report.Err)
		have, err := observe(ctx, b.tables, b.c.opt, false)
		if err != nil {
			report.Err = err
			break
		}
		report.Err = nil
		next = b.plan(b.diffObserved(have))
	}
	report.Took = time.Since(start)
	return report
}

// blame finds the Service port whose line the tool refused.
func (b *Backend) blame(payload []byte, err error) (forward.PortName, bool) {
	var step *xtables.StepError
	if !errors.As(err, &step) || step.Line == 0 || errors.Is(err, xtables.ErrBusy) {
		return forward.PortName{}, false
	}
	id, rule := ruleset.LineAt(payload, step.Line)
	return b.c.owner(id, rule)
}
