package manifest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deadline is how long a test waits for what must come.
const deadline = 10 * time.Second

// A receiver keeps what a source sent, in one line per event.
type receiver struct {
	mu      sync.Mutex
	lines   []string
	changed chan struct{}
}

func (r *receiver) sink(events ...model.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range events {
		r.lines = append(r.lines, line(e)...)
	}
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// line describes an event, and its findings on lines of their own.
func line(e model.Event) []string {
	verb := "put"
	if e.Delete {
		verb = "delete"
	}
	var out []string
	switch {
	case e.Service != nil:
		out = append(out, fmt.Sprintf("%s service %s %v", verb, e.Service.Name, e.Service.ClusterIPs))
	case e.Slice != nil:
		var addrs []string
		for _, ep := range e.Slice.Endpoints {
			addrs = append(addrs, ep.Addr.String())
		}
		out = append(out, fmt.Sprintf("%s slice %s of %s %v", verb, e.Slice.Name, e.Slice.Service, addrs))
	case e.Node != nil:
		out = append(out, fmt.Sprintf("%s node %s %s", verb, e.Node.Name, e.Node.Zone))
	case e.Synced:
		out = append(out, "synced")
	case e.File != "" && len(e.Findings) == 0:
		out = append(out, "good again: "+filepath.Base(e.File))
	}
	for _, f := range e.Findings {
		message := strings.ReplaceAll(f.Message, filepath.Dir(e.File)+string(filepath.Separator), "")
		out = append(out, fmt.Sprintf("%s %s %s: %s", f.Severity, f.Kind, f.Reason, message))
	}
	return out
}

// take waits until a line contains each of the wanted texts, in any order, and forgets all lines so far.
func (r *receiver) take(t *testing.T, want ...string) []string {
	t.Helper()
	timeout := time.After(deadline)
	for {
		r.mu.Lock()
		lines := slices.Clone(r.lines)
		if missing := absent(lines, want); missing == "" {
			r.lines = nil
			r.mu.Unlock()
			return lines
		}
		r.mu.Unlock()
		select {
		case <-r.changed:
		case <-timeout:
			t.Fatalf("nothing contained %q; received:\n%s", absent(lines, want), strings.Join(lines, "\n"))
		}
	}
}

func absent(lines, want []string) string {
	for _, w := range want {
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, w) }) {
			return w
		}
	}
	return ""
}

// watch runs Watch on a directory until the test ends, and gives what it sends after the first reading.
func watch(t *testing.T, dir string) *receiver {
	t.Helper()
	r := &receiver{changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Watch(ctx, dir, "n1", r.sink) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("watch ended with %v", err)
		}
	})
	return r
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	must(t, writeFile(dir, name, content))
}

func writeFile(dir, name, content string) error {
	return os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644)
}

// service and slice give small manifests.
func service(name, clusterIP string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata: {name: %s, namespace: shop}
spec: {clusterIP: %s, ports: [{port: 80}]}
`, name, clusterIP)
}

func slice(name, serviceName, addr string) string {
	return fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %s, namespace: shop, labels: {kubernetes.io/service-name: %s}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [%s]}]
`, name, serviceName, addr)
}

func TestEverythingIsSentOnceAndThenOnlyWhatChanges(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("web", "10.96.0.1")+slice("web-1", "web", "10.0.0.1"))
	write(t, dir, "b.json",
		`{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1","labels":{"topology.kubernetes.io/zone":"z1"}}}`)
	write(t, dir, "c.yml", "apiVersion: v1\nkind: Node\nmetadata: {name: other}\n")
	r := watch(t, dir)
	want := []string{
		"put slice shop/web-1 of web [10.0.0.1]", "put node n1 z1", "put service shop/web [10.96.0.1]",
		"synced",
	}
	got := r.take(t, "synced")
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("first reading (-want +got):\n%s", diff)
	}

	write(t, dir, "a.yaml", service("web", "10.96.0.1")+slice("web-1", "web", "10.0.0.2"))
	if diff := cmp.Diff([]string{"put slice shop/web-1 of web [10.0.0.2]"}, r.take(t, "10.0.0.2")); diff != "" {
		t.Errorf("after a change (-want +got):\n%s", diff)
	}

	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	want = []string{"delete slice shop/web-1 of  []", "delete service shop/web []"}
	if diff := cmp.Diff(want, r.take(t, "delete service")); diff != "" {
		t.Errorf("after the file went (-want +got):\n%s", diff)
	}
}

func TestABrokenDocumentIsReportedWithItsLineAndKeepsItsObjects(t *testing.T) {
	tests := map[string]struct {
		content string
		want    []string
	}{
		"a syntax error hides which object it was, so all absent ones stay": {
			service("web", "10.96.0.9") + "---\nkind: Service\n  bad: [\n",
			[]string{"put service shop/web [10.96.0.9]", "error File InvalidDocument: a.yaml:8: "},
		},
		"a wrong type keeps the object and lets an absent one go": {
			strings.Replace(service("web", "10.96.0.1"), "port: 80", "port: eighty", 1),
			[]string{"delete service shop/dns []", "error File InvalidDocument: a.yaml:2: Service shop/web: "},
		},
		"a document without a kind": {
			"a: b\n",
			[]string{"error File InvalidDocument: a.yaml:1: kind or apiVersion is missing"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, "a.yaml", service("web", "10.96.0.1")+service("dns", "10.96.0.2"))
			r := watch(t, dir)
			r.take(t, "synced")
			write(t, dir, "a.yaml", tc.content)
			got := r.take(t, tc.want...)
			if len(got) != len(tc.want) {
				t.Errorf("got %d lines, want %d:\n%s", len(got), len(tc.want), strings.Join(got, "\n"))
			}
			write(t, dir, "a.yaml", service("web", "10.96.0.1")+service("dns", "10.96.0.2"))
			r.take(t, "good again: a.yaml")
		})
	}
}

func TestOddDocumentsAreReportedAndTheRestIsUsed(t *testing.T) {
	tests := map[string]struct {
		content string
		want    []string
	}{
		"unknown field": {
			strings.Replace(service("web", "10.96.0.1"), "clusterIP", "sessionAfinity: ClientIP, clusterIP", 1),
			[]string{
				"put service shop/web [10.96.0.1]",
				`warning File UnknownField: a.yaml:2: Service shop/web: unknown field "spec.sessionAfinity"`,
			},
		},
		"key given twice": {
			"kind: Service\n" + strings.TrimPrefix(service("web", "10.96.0.1"), "---\n"),
			[]string{
				"put service shop/web [10.96.0.1]",
				`warning File UnknownField: a.yaml:3: key "kind" already set in map`,
			},
		},
		"foreign kind": {
			service("web", "10.96.0.1") + "---\n# a comment\napiVersion: apps/v1\nkind: Deployment\n",
			[]string{"put service shop/web [10.96.0.1]", "warning File IgnoredKind: a.yaml:8: kind Deployment of apps/v1"},
		},
		"no cluster IP": {
			strings.Replace(service("web", ""), "clusterIP: , ", "", 1),
			[]string{"put service shop/web []", "warning Service NoClusterIP: "},
		},
		"service of another proxy": {
			strings.Replace(service("web", "10.96.0.1"), "namespace: shop",
				"labels: {service.kubernetes.io/service-proxy-name: ''}", 1),
			nil,
		},
		"unusable slice": {
			strings.Replace(slice("web-1", "web", "10.0.0.1"), "addressType: IPv4", "addressType: FQDN", 1),
			[]string{"delete slice shop/web-1 of  []", "warning EndpointSlice UnsupportedAddressType: "},
		},
		"default namespace": {
			strings.Replace(service("web", "10.96.0.1"), ", namespace: shop", "", 1),
			[]string{"put service default/web [10.96.0.1]"},
		},
		"list": {
			"apiVersion: v1\nkind: List\nitems:\n" +
				"- {apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.1}}\n" +
				"- {apiVersion: v1, kind: Service, metadata: {name: dns}, spec: {clusterIP: 10.96.0.2}}\n",
			[]string{"put service default/dns [10.96.0.2]", "put service default/web [10.96.0.1]"},
		},
		"typed list": {
			"apiVersion: v1\nkind: ServiceList\nmetadata: {}\nitems:\n" +
				"- {metadata: {name: web}, spec: {clusterIP: 10.96.0.1}}\n",
			[]string{"put service default/web [10.96.0.1]"},
		},
		"endpoints": {
			service("web", "10.96.0.1") + "---\napiVersion: v1\nkind: Endpoints\nmetadata: {name: web, namespace: shop}\n" +
				"subsets: [{addresses: [{ip: 10.0.0.1}, {ip: 'fd00::1'}], ports: [{port: 80}]}]\n",
			[]string{
				"put service shop/web [10.96.0.1]", "put slice shop/web/endpoints-0-IPv4 of web [10.0.0.1]",
				"put slice shop/web/endpoints-0-IPv6 of web [fd00::1]",
			},
		},
		"endpoints beside a slice": {
			slice("web-1", "web", "10.0.0.1") +
				"---\napiVersion: v1\nkind: Endpoints\nmetadata: {name: web, namespace: shop}\n" +
				"subsets: [{addresses: [{ip: 10.0.0.2}], ports: [{port: 80}]}]\n",
			[]string{
				"put slice shop/web-1 of web [10.0.0.1]",
				"warning File EndpointsIgnored: a.yaml:9: Endpoints shop/web is ignored",
			},
		},
		"same object twice": {
			service("web", "10.96.0.1") + service("web", "10.96.0.2"),
			[]string{
				"put service shop/web [10.96.0.1]",
				"error File DuplicateObject: a.yaml:7: Service shop/web is already described at ",
			},
		},
		"windows line ends and a byte order mark": {
			"\xef\xbb\xbf" + strings.ReplaceAll(service("web", "10.96.0.1"), "\n", "\r\n"),
			[]string{"put service shop/web [10.96.0.1]"},
		},
		"name that would break a rule": {
			"apiVersion: v1\nkind: Service\nmetadata: {name: \"a\\\" -j DROP\"}\nspec: {clusterIP: 10.96.0.1}\n",
			[]string{"error Service InvalidName: "},
		},
		"empty file":    {"", nil},
		"only comments": {"# nothing\n---\n# here\n", nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, "a.yaml", tc.content)
			events, err := Load(dir, "n1")
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range events {
				got = append(got, line(e)...)
			}
			if missing := absent(got, tc.want); missing != "" || len(got) != len(tc.want) {
				t.Errorf("missing %q, want %d lines, got:\n%s", missing, len(tc.want), strings.Join(got, "\n"))
			}
		})
	}
}
