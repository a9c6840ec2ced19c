package metric

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/turnout-proxy/turnout/internal/model"
)

// filled gives metrics in which everything has been recorded once.
func filled() *Metrics {
	now := time.Unix(2_000_000_000, 0)
	m := New(now.Add(-time.Hour), "v1.2.3")
	m.Families("iptables", model.IPv4)
	m.Round(Round{Family: model.IPv4, Result: OK, Full: true, Took: time.Second, End: now, Steps: 7, Bytes: 70})
	m.Round(Round{Family: model.IPv4, Result: Failed, Took: time.Second, End: now.Add(time.Minute), Restore: true})
	m.Round(Round{Family: model.IPv4, Result: Failed, Full: true, End: now.Add(time.Minute)})
	m.Queued(model.IPv4, now)
	m.Programmed(model.IPv4, now.Add(-2*time.Hour), now)
	m.Programmed(model.IPv4, now.Add(-time.Second), now)
	m.Seen(2, 3)
	m.Pending(4, 5)
	m.Healthz(200)
	m.Livez(503)
	m.NoLocalEndpoints(model.IPv4, 1, 2)
	m.Rules(model.IPv4, map[string]int{"nat": 11}, map[string]int{"nat": 3})
	m.FlowsCleaned(model.IPv4, time.Second, 6, false)
	m.ReadBack(model.IPv4, time.Second, "clean")
	m.DriftRepaired(model.IPv4)
	m.Panicked(model.IPv4)
	m.Ports(model.IPv4, 8, 9)
	m.Findings(map[[2]string]int{{"Gone", "error"}: 1})
	m.Findings(map[[2]string]int{{"Odd", "warning"}: 2})
	m.Conflicts(model.IPv4, 12)
	m.Suppressed(13)
	m.HealthPorts(14, 15)
	return m
}

func TestEveryMetricHasTheValueThatWasRecorded(t *testing.T) {
	w := httptest.NewRecorder()
	filled().Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	var got []string
	for line := range strings.Lines(w.Body.String()) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "#"), strings.Contains(line, "_bucket{"), strings.Contains(line, "_sum{"):
		case strings.HasPrefix(line, "kubeproxy_"), strings.HasPrefix(line, "turnout_"):
			got = append(got, line)
		}
	}
	want := []string{
		`kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 6`,
		`kubeproxy_conntrack_reconciler_sync_duration_seconds_count{ip_family="IPv4"} 1`,
		`kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"} 1`,
		`kubeproxy_proxy_healthz_total{code="200"} 1`,
		`kubeproxy_proxy_livez_total{code="503"} 1`,
		`kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"} 2`,
		`kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1`,
		`kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 3`,
		`kubeproxy_sync_proxy_rules_endpoint_changes_pending 5`,
		`kubeproxy_sync_proxy_rules_endpoint_changes_total 3`,
		`kubeproxy_sync_proxy_rules_iptables_last{ip_family="IPv4",table="nat"} 3`,
		`kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total{ip_family="IPv4"} 1`,
		`kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family="IPv4"} 1`,
		`kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv4",table="nat"} 11`,
		`kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 2e+09`,
		`kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 2e+09`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 2`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"} 1`,
		`kubeproxy_sync_proxy_rules_service_changes_pending 4`,
		`kubeproxy_sync_proxy_rules_service_changes_total 2`,
		`turnout_build_info{version="v1.2.3"} 1`,
		`turnout_conflicting_frontends{ip_family="IPv4"} 12`,
		`turnout_drift_repairs_total{ip_family="IPv4"} 1`,
		`turnout_failed_ports{ip_family="IPv4"} 8`,
		`turnout_findings{reason="Odd",severity="warning"} 2`,
		`turnout_flow_cleanup_failures_total{ip_family="IPv4"} 1`,
		`turnout_flows_deleted_total{ip_family="IPv4"} 6`,
		`turnout_health_check_ports{state="failed"} 15`,
		`turnout_health_check_ports{state="open"} 14`,
		`turnout_mode{ip_family="IPv4",mode="iptables"} 1`,
		`turnout_panics_total{ip_family="IPv4"} 1`,
		`turnout_read_back_duration_seconds_count{ip_family="IPv4"} 1`,
		`turnout_read_backs_total{ip_family="IPv4",result="clean"} 1`,
		`turnout_rounds_total{ip_family="IPv4",result="failed"} 2`,
		`turnout_rounds_total{ip_family="IPv4",result="ok"} 1`,
		`turnout_rounds_total{ip_family="IPv4",result="partial"} 0`,
		`turnout_suppressed_log_lines_total 13`,
		`turnout_unsupported_ports{ip_family="IPv4"} 9`,
		`turnout_written_bytes_total{ip_family="IPv4"} 70`,
		`turnout_written_objects_total{ip_family="IPv4"} 7`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

func TestOwnNamesFollowTheConventions(t *testing.T) {
	families, err := filled().Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		// kube-proxy's names are what they are.
		if strings.HasPrefix(p.Metric, "turnout_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

func TestTheProgrammingLatencyHasTheBucketsOfKubeProxy(t *testing.T) {
	got := programmingBuckets()
	if len(got) != 2+59+12+7 || got[0] != 0.25 || got[2] != 1 || got[60] != 59 || got[61] != 60 || got[72] != 115 ||
		got[73] != 120 || got[79] != 300 {
		t.Errorf("got %v, want 0.25, 0.5, 1..59 by 1, 60..115 by 5, 120..300 by 30", got)
	}
}
