package loop

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A kind is the kind of an object in the inbox.
type kind uint8

const (
	serviceKind kind = iota + 1
	sliceKind
	nodeKind
	cidrKind
	fileKind
)

// An objectKey identifies what an event is about. A file has its path as Name, a Node no namespace.
type objectKey struct {
	kind kind
	name model.Name
}

// An item is the latest event about one object.
type item struct {
	event model.Event
	// trigger is the earliest trigger time of the slice's events that were merged into this one; zero if none has any.
	trigger time.Time
}

// A batch is what an inbox held.
type batch struct {
	items map[objectKey]item
	// synced counts the sources that reported to be complete.
	synced int
	// host are this machine's addresses; meaningful if hostSet.
	host    []netip.Addr
	hostSet bool
}

// An inbox takes events from any number of goroutines and keeps the latest about each object, so that its size is
// bounded by the number of objects however many events come in.
type inbox struct {
	// wake holds a token while there is something to take.
	wake chan struct{}

	mu  sync.Mutex
	now batch
}

func newInbox() *inbox { return &inbox{wake: make(chan struct{}, 1)} }

// put adds events in the order in which they happened. It never blocks for longer than another put or take.
func (b *inbox) put(events ...model.Event) {
	if len(events) == 0 {
		return
	}
	b.mu.Lock()
	for i := range events {
		b.add(events[i])
	}
	b.mu.Unlock()
	b.signal()
}

func (b *inbox) add(e model.Event) {
	key, ok := keyOf(&e)
	if !ok {
		if e.Synced {
			b.now.synced++
		}
		return
	}
	it := item{event: e}
	if e.Slice != nil && !e.Delete {
		// A slice that was deleted in between starts anew: the old trigger says nothing about the new slice.
		it.trigger = e.Slice.Trigger
		if old, waiting := b.now.items[key]; waiting && !old.event.Delete {
			it.trigger = earliest(old.trigger, it.trigger)
		}
	}
	if b.now.items == nil {
		b.now.items = map[objectKey]item{}
	}
	b.now.items[key] = it
}

func keyOf(e *model.Event) (objectKey, bool) {
	switch {
	case e.Service != nil:
		return objectKey{serviceKind, e.Service.Name}, true
	case e.Slice != nil:
		return objectKey{sliceKind, e.Slice.Name}, true
	case e.Node != nil:
		return objectKey{nodeKind, model.Name{Name: e.Node.Name}}, true
	case e.ServiceCIDR != nil:
		return objectKey{cidrKind, model.Name{Name: e.ServiceCIDR.Name}}, true
	case e.File != "":
		return objectKey{fileKind, model.Name{Name: e.File}}, true
	}
	return objectKey{}, false
}

// setHost replaces the addresses of this machine.
func (b *inbox) setHost(addrs []netip.Addr) {
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.Addr.Compare)
	b.mu.Lock()
	b.now.host, b.now.hostSet = addrs, true
	b.mu.Unlock()
	b.signal()
}

func (b *inbox) signal() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// take empties the inbox.
func (b *inbox) take() batch {
	b.mu.Lock()
	defer b.mu.Unlock()
	got := b.now
	b.now = batch{}
	return got
}
