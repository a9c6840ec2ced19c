package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// The line that operators look for when mode ipvs cannot be used.
const lacksModules = "IPVS proxier will not be used because the following required kernel modules are not loaded: [ip_vs"

// lackIPVS ends a test that needs a kernel without IPVS.
func lackIPVS(t *testing.T) {
	t.Helper()
	needRoot(t)
	if _, err := ipvs.Open(t.Context()); !errors.Is(err, kernel.ErrUnsupported) {
		t.Skipf("this kernel has IPVS, so nothing falls back (%v)", err)
	}
}

func TestWithoutIPVSModeIPTablesStandsInAndSaysSo(t *testing.T) {
	lackIPVS(t)
	t.Parallel()
	s := newSite(t, netns.Topology{Nodes: 2})
	s1 := s.lab.Host("s1")
	serve(t, s1, model.TCP, webPort)
	s.writeWeb(s1)
	na := s.node("na", "--proxy-mode=ipvs")
	na.start()
	na.pool(s1)
	for _, line := range []string{lacksModules, "Fell back to mode iptables", "Using iptables Proxier"} {
		if na.log.count(line) == 0 {
			t.Errorf("the log has no line with %q", line)
		}
	}
	if got := na.metric(`turnout_proxy_mode_fallback{asked="ipvs",mode="iptables"}`); got != "1" {
		t.Errorf("the metric of the fallback is %s, want 1", got)
	}
	if _, body, err := na.get("http://127.0.0.1:10249/proxyMode"); err != nil || body != "iptables" {
		t.Errorf("/proxyMode gives %q, %v", body, err)
	}
	list, err := na.listing()
	if err != nil || list.Mode != "iptables" {
		t.Errorf("ls gives mode %q, %v", list.Mode, err)
	}
	if said := fmt.Sprint(list.Notes); !strings.Contains(said, "ipvs") {
		t.Errorf("ls does not tell that another mode was asked for: %s", said)
	}
}

func TestWithoutIPVSAStrictDaemonEndsWithTheSameWords(t *testing.T) {
	lackIPVS(t)
	t.Parallel()
	s := newSite(t, netns.Topology{Nodes: 2})
	na := s.node("na", "--proxy-mode=ipvs", "--strict-proxy-mode")
	na.start()
	status, ended := na.ended(patience)
	if !ended || status != 1 {
		t.Errorf("ended %v with status %d, want 1", ended, status)
	}
	if na.log.count(lacksModules) == 0 || na.log.count("--strict-proxy-mode") == 0 {
		t.Error("it did not say why, or what to do")
	}
	for _, flavour := range []string{"nft", "legacy"} {
		for _, line := range na.rules("iptables", flavour, "nat") {
			if strings.Contains(line, "KUBE-") {
				t.Errorf("it wrote rules: %s", line)
			}
		}
	}
}

// What operators and owners of Services must know reaches them as Events.
func TestEventsArriveAtTheAPIServer(t *testing.T) {
	lackIPVS(t)
	t.Parallel()
	s := newSite(t, netns.Topology{Nodes: 2})
	a := s.startAPI()
	s1 := s.lab.Host("s1")
	serve(t, s1, model.TCP, webPort)
	n := s.node("na")
	n.args = []string{"proxy", "--config", a.configFor("ipvs"), "--socket", n.socket}
	bad := service("bad", tcpPort(80, 0), "10.96.1.40")
	bad.Annotations = map[string]string{"turnout.dev/topology-weights": "node=many"}
	a.service(bad)
	a.service(web())
	a.webEndpoints(s1)
	n.start()
	n.pool(s1)
	for _, want := range []struct{ namespace, kind, name, reason, note string }{
		{"default", "Node", "na", "Starting", ""},
		{"default", "Node", "na", "ProxyModeFallback", "mode iptables stands in for mode ipvs"},
		{namespace, "Service", "bad", "InvalidAnnotation", "node=many"},
	} {
		eventually(t, "an Event "+want.reason, func() error {
			list, err := a.client.EventsV1().Events(want.namespace).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				return err
			}
			for i := range list.Items {
				e := &list.Items[i]
				if e.Reason == want.reason && e.Regarding.Kind == want.kind && e.Regarding.Name == want.name &&
					strings.Contains(e.Note, want.note) {
					return nil
				}
			}
			return fmt.Errorf("none of %d Events in %s", len(list.Items), want.namespace)
		})
	}
	if got := n.metric(`turnout_events_total{result="posted"}`); got == "absent" || got == "0" {
		t.Errorf("the metric of posted Events is %s", got)
	}
}
