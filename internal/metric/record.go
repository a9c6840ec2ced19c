package metric

import (
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Result says how a sync of one family ended.
type Result string

// OK: everything took effect. Partial: the kernel refused some ports. Failed: the sync as a whole took no effect.
const (
	OK      Result = "ok"
	Partial Result = "partial"
	Failed  Result = "failed"
)

// A Round is one sync of one family.
type Round struct {
	Family model.Family
	Result Result
	// Full tells that everything was compared with the kernel, not only what changed.
	Full bool
	// Took is the time from the start of compiling to the end of applying.
	Took time.Duration
	// End is when it ended.
	End time.Time
	// Steps counts kernel objects written or removed, Bytes what was handed to the kernel or its tool.
	Steps, Bytes int
	// Restore tells that the sync was to be carried out by iptables-restore.
	Restore bool
}

// Round records a sync.
func (m *Metrics) Round(r Round) {
	l := r.Family.String()
	m.syncDuration.WithLabelValues(l).Observe(r.Took.Seconds())
	if r.Full {
		m.fullDuration.WithLabelValues(l).Observe(r.Took.Seconds())
	} else {
		m.partialDuration.WithLabelValues(l).Observe(r.Took.Seconds())
	}
	m.rounds.WithLabelValues(string(r.Result), l).Inc()
	m.steps.WithLabelValues(l).Add(float64(r.Steps))
	m.bytes.WithLabelValues(l).Add(float64(r.Bytes))
	if r.Result != Failed {
		m.syncTimestamp.WithLabelValues(l).Set(seconds(r.End))
		return
	}
	if !r.Restore {
		return
	}
	m.restoreFailures.WithLabelValues(l).Inc()
	if !r.Full {
		m.partialRestoreFailures.WithLabelValues(l).Inc()
	}
}

// Event records what became of an Event.
func (m *Metrics) Event(result string) { m.events.WithLabelValues(result).Inc() }

// Fallback records whether another mode stands in for the one that was asked for.
func (m *Metrics) Fallback(asked, mode string, stands bool) {
	value := 0.0
	if stands {
		value = 1
	}
	m.fallback.WithLabelValues(asked, mode).Set(value)
}

// Queued records that a sync was asked for.
func (m *Metrics) Queued(f model.Family, at time.Time) {
	m.queuedTimestamp.WithLabelValues(f.String()).Set(seconds(at))
}

// Programmed records that the change which an EndpointSlice recorded at trigger is in effect since now. A trigger from
// before the start of the daemon says nothing about it and is left out.
func (m *Metrics) Programmed(f model.Family, trigger, now time.Time) {
	if trigger.Before(m.start) {
		return
	}
	m.programming.WithLabelValues(f.String()).Observe(max(now.Sub(trigger), 0).Seconds())
}

// Seen counts events of sources as they come in.
func (m *Metrics) Seen(services, slices int) {
	m.serviceChanges.Add(float64(services))
	m.endpointChanges.Add(float64(slices))
}

// Pending tells how many changed Services and EndpointSlices are not in effect yet.
func (m *Metrics) Pending(services, slices int) {
	m.servicePending.Set(float64(services))
	m.endpointPending.Set(float64(slices))
}

// Healthz counts an answer to /healthz by its HTTP status, Livez one to /livez.
func (m *Metrics) Healthz(status int) { m.healthz.WithLabelValues(code(status)).Inc() }

// Livez counts an answer to /livez by its HTTP status.
func (m *Metrics) Livez(status int) { m.livez.WithLabelValues(code(status)).Inc() }

// NoLocalEndpoints tells how many Service ports with traffic policy Local have endpoints, but none on this node.
func (m *Metrics) NoLocalEndpoints(f model.Family, internal, external int) {
	m.noLocalEndpoints.WithLabelValues("internal", f.String()).Set(float64(internal))
	m.noLocalEndpoints.WithLabelValues("external", f.String()).Set(float64(external))
}

// Rules tells how many iptables rules are wanted in the kernel and how many the last sync wrote, by table.
func (m *Metrics) Rules(f model.Family, total, last map[string]int) {
	for table, n := range total {
		m.rulesTotal.WithLabelValues(table, f.String()).Set(float64(n))
	}
	for table, n := range last {
		m.rulesLast.WithLabelValues(table, f.String()).Set(float64(n))
	}
}

// FlowsCleaned records a clean-up of stale UDP flows and how many it deleted. One that failed may have deleted some.
func (m *Metrics) FlowsCleaned(f model.Family, took time.Duration, deleted int, ok bool) {
	l := f.String()
	m.flowDuration.WithLabelValues(l).Observe(took.Seconds())
	m.flowsDeleted.WithLabelValues(l).Add(float64(deleted))
	m.flowsDeletedUpstream.WithLabelValues(l).Add(float64(deleted))
	if !ok {
		m.flowFailures.WithLabelValues(l).Inc()
	}
}

// ReadBack records a comparison of everything wanted with the kernel.
func (m *Metrics) ReadBack(f model.Family, took time.Duration, result string) {
	m.readBacks.WithLabelValues(result, f.String()).Inc()
	m.readBackDuration.WithLabelValues(f.String()).Observe(took.Seconds())
}

// DriftRepaired counts that something which others changed was put right.
func (m *Metrics) DriftRepaired(f model.Family) { m.drift.WithLabelValues(f.String()).Inc() }

// Panicked counts a panic that was caught.
func (m *Metrics) Panicked(f model.Family) { m.panics.WithLabelValues(f.String()).Inc() }

// Ports tells how many Service ports the kernel refuses and how many the mode cannot express.
func (m *Metrics) Ports(f model.Family, failed, unsupported int) {
	m.failedPorts.WithLabelValues(f.String()).Set(float64(failed))
	m.unsupportedPorts.WithLabelValues(f.String()).Set(float64(unsupported))
}

// Findings shows what is wrong with objects now; a reason that is no longer among them disappears. The map's keys are
// the pairs of reason and severity.
func (m *Metrics) Findings(counts map[[2]string]int) {
	m.findings.Reset()
	for k, n := range counts {
		m.findings.WithLabelValues(k[0], k[1]).Set(float64(n))
	}
}

// Conflicts tells how many frontends are not served because an older object has the same address.
func (m *Metrics) Conflicts(f model.Family, n int) {
	m.conflicts.WithLabelValues(f.String()).Set(float64(n))
}

// Suppressed counts log lines that were left out.
func (m *Metrics) Suppressed(n int) { m.suppressed.Add(float64(n)) }

// HealthPorts tells how many Service health check ports are open and how many could not be opened.
func (m *Metrics) HealthPorts(open, failed int) {
	m.healthPorts.WithLabelValues("open").Set(float64(open))
	m.healthPorts.WithLabelValues("failed").Set(float64(failed))
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / float64(time.Second) }
