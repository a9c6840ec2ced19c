// Package event posts what is found about objects to the API server as Events, where those who own the objects look. It
// decides which findings are told, how often the same is repeated, and what becomes of those that cannot be delivered.
// Events are a courtesy: whatever happens to them, the data plane goes on, so everything here is bounded in memory and
// in time, and what does not fit is dropped and counted.
//
// It must not import package forward or a backend, and it does not log: trouble with the server goes to Config.Report.
// Read Publisher first, then post.go.
package event

import (
	"context"
	"hash/fnv"
	"math"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/clock"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Result is what became of an Event.
type Result string

// Posted: the server has it. Dropped: the queue was full. Failed: the server refused it, or did not answer in time.
const (
	Posted  Result = "posted"
	Dropped Result = "dropped"
	Failed  Result = "failed"
)

// Config says where Events go and who posts them. REST and NodeName are required.
type Config struct {
	// REST reaches the server. Its bounds on requests per second do not count here; this package has its own.
	REST *rest.Config
	// NodeName is the name of this machine's Node, which Events name as their origin.
	NodeName string
	// Clock tells the time; default the machine's.
	Clock clock.Clock
	// Count, if set, is told what became of each Event. It is called from several goroutines and must not block.
	Count func(Result)
	// Report, if set, is told why Events do not get through: each kind of trouble once in 10 minutes. It is called from
	// Run's goroutine.
	Report func(error)
}

// controller is the name under which Events are posted. It is kube-proxy's, as people filter by it.
const controller = "kube-proxy"

// The actions that Events name: what was tried when the finding was made.
const (
	programAction = "Program"
	startAction   = "StartKubeProxy" // upstream's word
)

// The bounds of what is kept and sent.
const (
	queueLength = 256
	rateQPS     = 1 // Events per second, after the first rateBurst
	rateBurst   = 25
	maxNote     = 1024 // bytes; the server refuses more
	maxWord     = 128  // bytes of a reason or of the reporting instance; the server refuses more
	maxName     = 253  // bytes of an object's name
)

// A Publisher posts Events. Make one with New and call Run once; Publish and Node may be called from any goroutine, also
// before Run, and do nothing on a nil Publisher.
type Publisher struct {
	cfg   Config
	clock clock.Clock
	queue chan entry
	limit flowcontrol.PassiveRateLimiter
	post  *poster

	mu   sync.Mutex
	seen memory

	// reported is when each kind of trouble was last reported. It belongs to Run.
	reported map[trouble]time.Time
}

// An entry is an Event that waits to be posted.
type entry struct {
	event *eventsv1.Event
	key   uint64 // under which it is remembered
}

// New gives a publisher. Nothing is sent before Run. It is an error if the REST configuration cannot be used.
func New(cfg Config) (*Publisher, error) {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.Count == nil {
		cfg.Count = func(Result) {}
	}
	if cfg.Report == nil {
		cfg.Report = func(error) {}
	}
	post, err := newPoster(cfg.REST)
	if err != nil {
		return nil, err
	}
	return &Publisher{
		cfg: cfg, clock: cfg.Clock, queue: make(chan entry, queueLength), post: post, seen: newMemory(),
		limit:    flowcontrol.NewTokenBucketPassiveRateLimiterWithClock(rateQPS, rateBurst, cfg.Clock),
		reported: map[trouble]time.Time{},
	}, nil
}

// Publish posts a Warning about a finding's object before long. Findings about what the server does not have as a
// Service, EndpointSlice or Node are passed over, and so is one that was published in the last 10 minutes. It does not
// block: what finds the queue full is dropped.
func (p *Publisher) Publish(f model.Finding) {
	if p == nil {
		return
	}
	if ref, ok := reference(f.Kind, f.Object); ok {
		p.put(ref, corev1.EventTypeWarning, f.Reason, programAction, f.Message)
	}
}

// Node posts an Event about this machine's Node before long, for what happens while the daemon starts: a Warning, or
// else a Normal one. The reason is one word in CamelCase, the note one line, which may be empty. As with Publish, it does
// not block, and the same is not posted twice within 10 minutes.
func (p *Publisher) Node(reason, note string, warning bool) {
	if p == nil {
		return
	}
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	if ref, ok := reference("Node", p.cfg.NodeName); ok {
		p.put(ref, kind, reason, startAction, note)
	}
}

// reference gives what an Event refers to.
func reference(kind, object string) (corev1.ObjectReference, bool) {
	ref := corev1.ObjectReference{Kind: kind, APIVersion: corev1.SchemeGroupVersion.String()}
	switch kind {
	case "Node":
		// kubectl describe looks for Events of a Node by its name in place of the UID.
		ref.Name, ref.UID = object, types.UID(object)
		return ref, object != ""
	case "EndpointSlice":
		ref.APIVersion = discoveryv1.SchemeGroupVersion.String()
	case "Service":
	default:
		return ref, false
	}
	ref.Namespace, ref.Name, _ = strings.Cut(object, "/")
	return ref, ref.Namespace != "" && ref.Name != ""
}

// put queues an Event unless the same was queued lately.
func (p *Publisher) put(ref corev1.ObjectReference, kind, reason, action, note string) {
	now := p.clock.Now()
	key := keyOf(p.cfg.NodeName, ref.Kind, ref.Namespace, ref.Name, kind, reason, note)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seen.has(key, now) {
		return
	}
	namespace := ref.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	e := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: eventName(ref.Name, key, now)},
		EventTime:  metav1.NewMicroTime(now), Type: kind, Reason: clip(reason, maxWord), Action: action,
		Note: clip(note, maxNote), Regarding: ref,
		ReportingController: controller, ReportingInstance: clip(p.cfg.NodeName, maxWord),
	}
	select {
	case p.queue <- entry{e, key}:
		p.seen.add(key, now)
	default:
		p.cfg.Count(Dropped)
	}
}

// eventName gives a name that no other Event has, of this node or of another. It is fixed before the first try, so that
// a repetition of a request whose answer was lost does not make a second Event.
func eventName(object string, key uint64, now time.Time) string {
	suffix := "." + hex(uint64(now.UnixNano())) + hex(key) //nolint:gosec // any number will do
	base := strings.TrimRight(object[:min(len(object), maxName-len(suffix))], ".-")
	return base + suffix
}

// Run posts what is published until the context is done; what is still queued then is lost. It gives no error.
func (p *Publisher) Run(ctx context.Context) error {
	defer p.post.close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-p.queue:
			if !p.admit(ctx) {
				return nil
			}
			p.deliver(ctx, e)
		}
	}
}

// admit waits until the rate allows another Event, and tells whether the context is still alive.
func (p *Publisher) admit(ctx context.Context) bool {
	for !p.limit.TryAccept() {
		if !p.wait(ctx, time.Second/rateQPS) {
			return false
		}
	}
	return true
}

// wait tells whether the context outlived the time.
func (p *Publisher) wait(ctx context.Context, d time.Duration) bool {
	t := p.clock.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C():
		return true
	}
}

// clip shortens a text to so many bytes without cutting a character, and replaces what is not UTF-8.
func clip(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= most {
		return s
	}
	const ellipsis = "..."
	end := most - len(ellipsis)
	for end > 0 && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + ellipsis
}

// repeatAfter is how long the same is not told again: neither an Event, nor that Events do not get through.
const repeatAfter = 10 * time.Minute

// maxSeen bounds how many Events are remembered.
const maxSeen = 4096

// A memory knows what was queued lately, by keys.
type memory struct {
	at map[uint64]time.Time
	// order has the keys as they came. One that was forgotten and came again is there twice.
	order []sighting
}

type sighting struct {
	key uint64
	at  time.Time
}

func newMemory() memory { return memory{at: map[uint64]time.Time{}} }

// has tells whether a key came in the last 10 minutes.
func (m *memory) has(key uint64, now time.Time) bool {
	at, ok := m.at[key]
	return ok && now.Sub(at) < repeatAfter
}

// add remembers a key, and forgets those that are too old and, if there are too many, the oldest.
func (m *memory) add(key uint64, now time.Time) {
	m.at[key] = now
	m.order = append(m.order, sighting{key, now})
	for len(m.order) > maxSeen || now.Sub(m.order[0].at) >= repeatAfter {
		first := m.order[0]
		m.order = m.order[1:]
		if m.at[first.key].Equal(first.at) {
			delete(m.at, first.key)
		}
	}
}

// forget lets a key count as new.
func (m *memory) forget(key uint64) { delete(m.at, key) }

// keyOf gives one number for several texts.
func keyOf(texts ...string) uint64 {
	h := fnv.New64a()
	for _, s := range texts {
		_, _ = h.Write([]byte(s))
		_, _ = h.Write([]byte{math.MaxUint8}) // no text in UTF-8 has this byte
	}
	return h.Sum64()
}
