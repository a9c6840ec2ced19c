package manifest

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A mirror is what a receiver knows after it took all events.
type mirror map[string][]string

func (m mirror) take(events []model.Event) {
	for _, e := range events {
		id := e.File
		switch {
		case e.Service != nil:
			id = "service " + e.Service.Name.String()
		case e.Slice != nil:
			id = "slice " + e.Slice.Name.String()
		case e.Node != nil:
			id = "node " + e.Node.Name
		}
		m[id] = line(e)
		if len(e.Findings) == 0 && (e.Delete || e.File != "") {
			delete(m, id)
		}
	}
}

// documentPool has documents that meet each other in every way: the same object twice, Endpoints beside slices, slices
// that move between Services, objects of others, and names that nothing can be filed under.
func documentPool() []string {
	endpoints := func(name, addr string) string {
		return fmt.Sprintf("---\napiVersion: v1\nkind: Endpoints\nmetadata: {name: %s, namespace: shop}\n"+
			"subsets: [{addresses: [{ip: '%s'}, {ip: 'fd00::1'}], ports: [{port: 80}]}]\n", name, addr)
	}
	foreign := "metadata: {labels: {service.kubernetes.io/service-proxy-name: x},"
	return []string{
		service("web", "10.96.0.1"), service("web", "10.96.0.2"), service("dns", "10.96.0.3"), service("dns", "x"),
		strings.Replace(service("web", "10.96.0.1"), "metadata: {", foreign, 1),
		slice("s-1", "web", "10.0.0.1"), slice("s-1", "dns", "10.0.0.2"), slice("s-2", "web", "127.0.0.1"),
		strings.Replace(slice("s-2", "web", "10.0.0.3"), "addressType: IPv4", "addressType: FQDN", 1),
		endpoints("web", "10.0.0.8"), endpoints("web", "10.0.0.9"), endpoints("dns", "::1"), endpoints("a_b", "10.0.0.7"),
		service("A", "10.96.0.4"), "---\napiVersion: v1\nkind: Node\nmetadata: {name: n1}\n", "---\napiVersion: v1\nkind: Pod\n",
	}
}

func TestReadingStepByStepGivesTheSameAsReadingAllAtOnce(t *testing.T) {
	pool := documentPool()
	rapid.Check(t, func(rt *rapid.T) {
		dir := t.TempDir()
		later := func() time.Time { return time.Now().Add(time.Hour) } // all files are at rest
		d := newDirectory(dir, "n1")
		d.now = later
		have := mirror{}
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			name := rapid.SampledFrom([]string{"a.yaml", "b.yaml", "c.yaml"}).Draw(rt, "file")
			if rapid.IntRange(0, 4).Draw(rt, "remove") == 0 {
				_ = os.Remove(filepath.Join(dir, name)) // it need not be there
			} else {
				docs := rapid.SliceOfN(rapid.SampledFrom(pool), 0, 6).Draw(rt, "documents")
				must(t, writeFile(dir, name, strings.Join(docs, "")))
			}
			events, _ := d.scan(scope{full: rapid.Bool().Draw(rt, "full"), names: map[string]bool{name: true}})
			have.take(events)

			fresh := newDirectory(dir, "n1")
			fresh.now = later
			want := mirror{}
			events, _ = fresh.scan(scope{full: true, force: true})
			want.take(events)
			if diff := cmp.Diff(want, have); diff != "" {
				rt.Fatalf("known after a step (-all at once +step by step):\n%s", diff)
			}
		}
		for _, e := range []string{"a.yaml", "b.yaml", "c.yaml"} {
			_ = os.Remove(filepath.Join(dir, e)) // it need not be there
		}
		events, _ := d.scan(scope{full: true})
		have.take(events)
		if len(have) > 0 || len(d.index.sent)+len(d.index.sliced)+len(d.index.derived)+len(d.index.claims) > 0 {
			rt.Fatalf("an empty directory leaves %v and %+v", slices.Sorted(maps.Keys(have)), d.index)
		}
	})
}

func TestRoomThatBecomesFreeIsGivenToWhatFoundNone(t *testing.T) {
	d := newDirectory(t.TempDir(), "n1")
	d.now = func() time.Time { return time.Now().Add(time.Hour) }
	d.index.room = 1
	must(t, writeFile(d.path, "a.yaml", service("web", "10.96.0.1")))
	must(t, writeFile(d.path, "b.yaml", service("dns", "10.96.0.2")+service("web", "10.96.0.3")))
	have := mirror{}
	events, _ := d.scan(scope{full: true, force: true})
	have.take(events)
	b := filepath.Join(d.path, "b.yaml")
	if have["service shop/dns"] != nil || !strings.Contains(strings.Join(have[b], "\n"), "1 of this file are ignored") {
		t.Errorf("without room: %v", have)
	}
	must(t, os.Remove(filepath.Join(d.path, "a.yaml")))
	events, _ = d.scan(scope{full: true})
	have.take(events)
	if have["service shop/web"][0] != "put service shop/web [10.96.0.3]" || have["service shop/dns"] != nil {
		t.Errorf("the other description of an object that has room: %v", have)
	}
	d.index.room = 2
	events, _ = d.scan(scope{full: true})
	have.take(events)
	if have["service shop/dns"] == nil || have[b] != nil {
		t.Errorf("with room: %v", have)
	}
}
