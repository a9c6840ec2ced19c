// Package metric holds what the daemon counts: kube-proxy's own metrics under their own names and labels, so that
// dashboards and alerts keep working, and Turnout's under the prefix turnout_ with a unit suffix. It decides names,
// labels and buckets, knows nothing of Services or backends, and must not import any package but model.
//
// There is no global state: New makes a registry of its own and Handler serves it.
package metric

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/turnout-proxy/turnout/internal/model"
)

// The labels that kube-proxy uses.
const (
	familyLabel = "ip_family"
	tableLabel  = "table"
	policyLabel = "traffic_policy"
	codeLabel   = "code"
)

// Metrics are all metrics of one daemon. The zero value is not usable; New makes one. It is safe for concurrent use.
type Metrics struct {
	registry *prometheus.Registry
	start    time.Time

	syncDuration, fullDuration, partialDuration *prometheus.HistogramVec
	syncTimestamp, queuedTimestamp              *prometheus.GaugeVec
	programming                                 *prometheus.HistogramVec
	endpointPending, servicePending             prometheus.Gauge
	endpointChanges, serviceChanges             prometheus.Counter
	healthz, livez                              *prometheus.CounterVec
	noLocalEndpoints                            *prometheus.GaugeVec
	restoreFailures, partialRestoreFailures     *prometheus.CounterVec
	rulesTotal, rulesLast                       *prometheus.GaugeVec
	flowDuration                                *prometheus.HistogramVec
	flowsDeletedUpstream                        *prometheus.CounterVec

	rounds, drift, panics, readBacks *prometheus.CounterVec
	flowFailures, flowsDeleted       *prometheus.CounterVec
	suppressed                       prometheus.Counter
	failedPorts, unsupportedPorts    *prometheus.GaugeVec
	steps, bytes                     *prometheus.CounterVec
	readBackDuration                 *prometheus.HistogramVec
	findings                         *prometheus.GaugeVec
	conflicts                        *prometheus.GaugeVec
	mode                             *prometheus.GaugeVec
	healthPorts                      *prometheus.GaugeVec
	events                           *prometheus.CounterVec
	fallback                         *prometheus.GaugeVec
}

// New makes the metrics of a daemon that started at the given time. The build information is exposed as labels of
// turnout_build_info.
func New(start time.Time, version string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), start: start}
	m.upstream()
	m.own()
	build := m.gauge("turnout_build_info", "Build information; the value is always 1.", "version")
	build.WithLabelValues(version).Set(1)
	m.registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the metrics in the Prometheus formats.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
}

// Register adds a collector that another part of the daemon owns. It fails if the name is taken.
func (m *Metrics) Register(c prometheus.Collector) error {
	if err := m.registry.Register(c); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	return nil
}

// Gatherer gives read access to the metrics, for tests and for the control socket.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// upstream registers what kube-proxy 1.37 has and what makes sense here.
func (m *Metrics) upstream() {
	exp := prometheus.ExponentialBuckets(0.001, 2, 15)
	const p = "kubeproxy_"
	const s = p + "sync_proxy_rules_"
	m.syncDuration = m.histogram(s+"duration_seconds", "Duration of a sync of one IP family.", exp, familyLabel)
	m.fullDuration = m.histogram(p+"sync_full_proxy_rules_duration_seconds",
		"Duration of a sync that compared everything with the kernel.", exp, familyLabel)
	m.partialDuration = m.histogram(p+"sync_partial_proxy_rules_duration_seconds",
		"Duration of a sync that looked at changes only.", exp, familyLabel)
	m.syncTimestamp = m.gauge(s+"last_timestamp_seconds", "When a sync last took effect.", familyLabel)
	m.queuedTimestamp = m.gauge(s+"last_queued_timestamp_seconds", "When a sync was last asked for.", familyLabel)
	m.programming = m.histogram(p+"network_programming_duration_seconds",
		"Time from the change of a pod or Service that an EndpointSlice records to its effect on this node.",
		programmingBuckets(), familyLabel)
	m.endpointPending = m.plainGauge(s+"endpoint_changes_pending", "EndpointSlice changes that are not yet in effect.")
	m.endpointChanges = m.counter(s+"endpoint_changes_total", "EndpointSlice events seen.")
	m.servicePending = m.plainGauge(s+"service_changes_pending", "Service changes that are not yet in effect.")
	m.serviceChanges = m.counter(s+"service_changes_total", "Service events seen.")
	m.healthz = m.counters(p+"proxy_healthz_total", "Answers to /healthz.", codeLabel)
	m.livez = m.counters(p+"proxy_livez_total", "Answers to /livez.", codeLabel)
	m.noLocalEndpoints = m.gauge(s+"no_local_endpoints_total",
		"Service ports with traffic policy Local and usable endpoints, none of them on this node.",
		policyLabel, familyLabel)
	m.restoreFailures = m.counters(s+"iptables_restore_failures_total",
		"Syncs that iptables-restore refused.", familyLabel)
	m.partialRestoreFailures = m.counters(s+"iptables_partial_restore_failures_total",
		"Syncs of changes only that iptables-restore refused.", familyLabel)
	m.rulesTotal = m.gauge(s+"iptables_total", "Rules wanted in the kernel.", tableLabel, familyLabel)
	m.rulesLast = m.gauge(s+"iptables_last", "Rules written by the last sync.", tableLabel, familyLabel)
	m.flowDuration = m.histogram(p+"conntrack_reconciler_sync_duration_seconds",
		"Duration of a clean-up of stale UDP flows.", exp, familyLabel)
	m.flowsDeletedUpstream = m.counters(p+"conntrack_reconciler_deleted_entries_total",
		"Conntrack entries deleted because their endpoint is gone.", familyLabel)
}

// programmingBuckets are kube-proxy's: a quarter and a half second, each second of the first minute, each five of the
// second, each thirty up to five minutes.
func programmingBuckets() []float64 {
	buckets := append([]float64{0.25, 0.5}, prometheus.LinearBuckets(1, 1, 59)...)
	buckets = append(buckets, prometheus.LinearBuckets(60, 5, 12)...)
	return append(buckets, prometheus.LinearBuckets(120, 30, 7)...)
}

// own registers what only Turnout counts.
func (m *Metrics) own() {
	exp := prometheus.ExponentialBuckets(0.001, 2, 15)
	m.rounds = m.counters("turnout_rounds_total", "Syncs by result: ok, partial (some ports refused), failed.",
		"result", familyLabel)
	m.drift = m.counters("turnout_drift_repairs_total",
		"Times that kernel objects changed by others were put right.", familyLabel)
	m.panics = m.counters("turnout_panics_total", "Panics that were caught.", familyLabel)
	m.readBacks = m.counters("turnout_read_backs_total",
		"Comparisons of everything wanted with the kernel, by result: clean, drift, failed.", "result", familyLabel)
	m.readBackDuration = m.histogram("turnout_read_back_duration_seconds",
		"Duration of reading back everything of ours in the kernel.", exp, familyLabel)
	m.failedPorts = m.gauge("turnout_failed_ports", "Service ports that the kernel refuses at the moment.", familyLabel)
	m.unsupportedPorts = m.gauge("turnout_unsupported_ports",
		"Service ports that the mode cannot serve as asked.", familyLabel)
	m.steps = m.counters("turnout_written_objects_total", "Kernel objects written or removed.", familyLabel)
	m.bytes = m.counters("turnout_written_bytes_total", "Bytes handed to the kernel or its tool.", familyLabel)
	m.flowsDeleted = m.counters("turnout_flows_deleted_total",
		"Conntrack entries deleted because their endpoint is gone.", familyLabel)
	m.flowFailures = m.counters("turnout_flow_cleanup_failures_total",
		"Clean-ups of stale UDP flows that failed.", familyLabel)
	m.findings = m.gauge("turnout_findings", "What is wrong with objects at the moment, by reason.", "reason", "severity")
	m.conflicts = m.gauge("turnout_conflicting_frontends",
		"Frontends that are not served because an older object has the same address.", familyLabel)
	m.suppressed = m.counter("turnout_suppressed_log_lines_total", "Log lines left out because there were too many.")
	m.mode = m.gauge("turnout_mode", "The mode in use; the value is always 1.", "mode", familyLabel)
	m.events = m.counters("turnout_events_total",
		"Events by result: posted, dropped (too many at once), failed (the API server did not take them).", "result")
	m.fallback = m.gauge("turnout_proxy_mode_fallback",
		"1 while another mode stands in for the one that was asked for, else 0.", "asked", "mode")
	m.healthPorts = m.gauge("turnout_health_check_ports",
		"Service health check ports by state: open, failed.", "state")
}

// Families makes the series of both results exist from the start for each family, so that a rate over them is right
// from the first event on.
func (m *Metrics) Families(mode string, families ...model.Family) {
	for _, f := range families {
		l := f.String()
		m.mode.WithLabelValues(mode, l).Set(1)
		for _, c := range []*prometheus.CounterVec{
			m.drift, m.panics, m.restoreFailures, m.partialRestoreFailures, m.flowsDeleted, m.flowsDeletedUpstream,
			m.flowFailures, m.steps, m.bytes,
		} {
			c.WithLabelValues(l)
		}
		for _, g := range []*prometheus.GaugeVec{m.failedPorts, m.unsupportedPorts, m.conflicts} {
			g.WithLabelValues(l)
		}
		for _, result := range []Result{OK, Partial, Failed} {
			m.rounds.WithLabelValues(string(result), l)
		}
		m.programming.WithLabelValues(l)
		m.NoLocalEndpoints(f, 0, 0)
	}
}

func (m *Metrics) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) plainGauge(name, help string) prometheus.Gauge {
	v := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) counters(name, help string, labels ...string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) counter(name, help string) prometheus.Counter {
	v := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	m.registry.MustRegister(v)
	return v
}

// Code is a label value for an HTTP status.
func code(status int) string { return strconv.Itoa(status) }
