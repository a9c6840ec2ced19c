package kube

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// A fakeServer speaks as much of the API server's list and watch protocol as a reflector uses: versions, history that
// is compacted, streamed lists, bookmarks. It does not evaluate selectors, it only records them.
type fakeServer struct {
	t    *testing.T
	addr string

	mu        sync.Mutex
	server    *http.Server
	objects   map[string]map[string]runtime.Object // by resource, then by namespace/name
	history   []change
	version   int
	compacted int           // versions below are forgotten
	changed   chan struct{} // closed at the next change
	streaming bool          // whether a list can be had as a watch
	forbidden map[string]bool
	requests  []string // "list services", "watch services", "stream services"
	queries   map[string]url.Values
}

// A change is one entry of the history.
type change struct {
	version  int
	resource string
	kind     string // ADDED, MODIFIED, DELETED, BOOKMARK or ERROR
	object   any
}

func newFakeServer(t *testing.T) *fakeServer {
	t.Helper()
	f := &fakeServer{
		t: t, objects: map[string]map[string]runtime.Object{}, changed: make(chan struct{}), version: 1, streaming: true,
		forbidden: map[string]bool{}, queries: map[string]url.Values{}, addr: "127.0.0.1:0",
	}
	f.up()
	t.Cleanup(f.down)
	return f
}

// up starts listening, at the same address as before.
func (f *fakeServer) up() {
	f.t.Helper()
	l, err := net.Listen("tcp", f.addr)
	if err != nil {
		f.t.Fatal(err)
	}
	server := &http.Server{Handler: f, ReadHeaderTimeout: time.Minute}
	f.mu.Lock()
	f.addr, f.server = l.Addr().String(), server
	f.mu.Unlock()
	go func() { _ = server.Serve(l) }()
}

// down ends all connections and refuses new ones.
func (f *fakeServer) down() {
	f.mu.Lock()
	server := f.server
	f.mu.Unlock()
	_ = server.Close()
}

// put creates or changes an object; with gone set it deletes it.
func (f *fakeServer) put(resource string, o runtime.Object, gone ...bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	m, ok := o.(metav1.Object)
	if !ok {
		f.t.Fatalf("%T has no metadata", o)
	}
	m.SetResourceVersion(strconv.Itoa(f.version))
	key := m.GetNamespace() + "/" + m.GetName()
	if f.objects[resource] == nil {
		f.objects[resource] = map[string]runtime.Object{}
	}
	kind := "ADDED"
	if _, ok := f.objects[resource][key]; ok {
		kind = "MODIFIED"
	}
	f.objects[resource][key] = o.DeepCopyObject()
	if len(gone) > 0 {
		kind = "DELETED"
		delete(f.objects[resource], key)
	}
	f.tell(change{f.version, resource, kind, o.DeepCopyObject()})
}

// bookmark tells watchers of a resource the present version, after changes elsewhere have moved it on.
func (f *fakeServer) bookmark(resource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version += 10
	f.tell(change{f.version, resource, "BOOKMARK", map[string]any{
		"kind": kinds[resource], "apiVersion": groupVersion(resource),
		"metadata": map[string]any{"resourceVersion": strconv.Itoa(f.version)},
	}})
}

// expire sends the error that ends a watch whose version the server no longer has.
func (f *fakeServer) expire(resource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	f.tell(change{f.version, resource, "ERROR", expired})
}

// compact forgets all history.
func (f *fakeServer) compact() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.compacted = f.version
}

func (f *fakeServer) tell(c change) {
	f.history = append(f.history, c)
	close(f.changed)
	f.changed = make(chan struct{})
}

// asked tells how often a request was made.
func (f *fakeServer) asked(request string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, r := range f.requests {
		if r == request {
			n++
		}
	}
	return n
}

func (f *fakeServer) query(resource string) url.Values {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.queries[resource]
}

var expired = map[string]any{
	"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": http.StatusGone,
	"message": "too old resource version",
}

var kinds = map[string]string{
	servicesResource: "Service", slicesResource: "EndpointSlice", nodesResource: "Node", cidrsResource: "ServiceCIDR",
}

func groupVersion(resource string) string {
	switch resource {
	case slicesResource:
		return "discovery.k8s.io/v1"
	case cidrsResource:
		return "networking.k8s.io/v1"
	}
	return "v1"
}

func (f *fakeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	q := r.URL.Query()
	w.Header().Set("Content-Type", "application/json")
	f.mu.Lock()
	verb := "list"
	switch {
	case q.Get("watch") == "true" && q.Get("sendInitialEvents") == "true":
		verb = "stream"
	case q.Get("watch") == "true":
		verb = "watch"
	}
	f.requests = append(f.requests, verb+" "+resource)
	f.queries[resource] = q
	from, _ := strconv.Atoi(q.Get("resourceVersion"))
	old := verb == "watch" && from < f.compacted
	refused, streaming, version := f.forbidden[resource], f.streaming, f.version
	var items []runtime.Object
	for _, key := range slices.Sorted(maps.Keys(f.objects[resource])) {
		items = append(items, f.objects[resource][key])
	}
	f.mu.Unlock()

	switch {
	case refused:
		fail(w, http.StatusForbidden, map[string]any{
			"kind": "Status", "apiVersion": "v1", "status": "Failure",
			"reason": "Forbidden", "code": 403,
		})
	case old:
		fail(w, http.StatusGone, expired)
	case verb == "stream" && !streaming:
		fail(w, http.StatusUnprocessableEntity, map[string]any{
			"kind": "Status", "apiVersion": "v1", "status": "Failure",
			"reason": "Invalid", "code": 422,
		})
	case verb == "list":
		_ = json.NewEncoder(w).Encode(map[string]any{
			"kind": kinds[resource] + "List", "apiVersion": groupVersion(resource), "items": items,
			"metadata": map[string]any{"resourceVersion": strconv.Itoa(version)},
		})
	default:
		if verb == "stream" {
			f.initial(w, resource, version, items)
			from = version
		}
		f.follow(w, r, resource, from)
	}
}

func fail(w http.ResponseWriter, code int, status map[string]any) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(status)
}

// initial sends a list as a stream, closed by the bookmark that says so.
func (f *fakeServer) initial(w http.ResponseWriter, resource string, version int, items []runtime.Object) {
	for _, o := range items {
		send(w, "ADDED", o)
	}
	send(w, "BOOKMARK", map[string]any{
		"kind": kinds[resource], "apiVersion": groupVersion(resource),
		"metadata": map[string]any{
			"resourceVersion": strconv.Itoa(version),
			"annotations":     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		},
	})
}

// follow sends the changes after a version until the client or the server goes away.
func (f *fakeServer) follow(w http.ResponseWriter, r *http.Request, resource string, from int) {
	flush(w)
	for {
		f.mu.Lock()
		var news []change
		for _, c := range f.history {
			if c.version > from && c.resource == resource {
				news = append(news, c)
			}
		}
		changed := f.changed
		f.mu.Unlock()
		for _, c := range news {
			send(w, c.kind, c.object)
			from = c.version
			if c.kind == "ERROR" {
				return
			}
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

func send(w http.ResponseWriter, kind string, object any) {
	raw, err := json.Marshal(map[string]any{"type": kind, "object": object})
	if err != nil {
		panic(fmt.Sprintf("encode %T: %v", object, err))
	}
	_, _ = w.Write(append(raw, '\n'))
	flush(w)
}

func flush(w http.ResponseWriter) {
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
}
