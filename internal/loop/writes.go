package loop

import (
	"context"
	"sync"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
)

// writes remembers what our own writing did to the kernel's fingerprint. Families may share one fingerprint, as with
// nftables, whose generation counts every change of the network namespace: without this, each write of one family would
// look like somebody else's to the other.
//
// So that the fingerprint before a write and the one after it enclose nothing of another family, families write one
// after the other. None waits long for that: what it costs to go ahead is a read-back that was not needed.
type writes struct {
	turn chan struct{}

	mu sync.Mutex
	// since is when the turn was taken; meaningful while it is.
	since time.Time
	// first is the number of the oldest entry in list.
	first int
	list  []ownWrite
}

type ownWrite struct {
	by            *family
	before, after string
}

const (
	// longestTurn is how long a family that writes may hold another.
	longestTurn = 200 * time.Millisecond
	// keptWrites bounds the memory for writes; a family looks at the fingerprint much more often.
	keptWrites = 1000
)

func newWrites() *writes { return &writes{turn: make(chan struct{}, 1)} }

// enter waits for the turn of a family, and gives a function that ends it. A turn that has lasted too long holds nobody.
func (w *writes) enter(ctx context.Context, clock Clock) (leave func()) {
	select {
	case w.turn <- struct{}{}:
		return w.begin(clock)
	default:
	}
	w.mu.Lock()
	rest := longestTurn - clock.Now().Sub(w.since)
	w.mu.Unlock()
	timer := clock.NewTimer(max(rest, 0))
	defer timer.Stop()
	select {
	case w.turn <- struct{}{}:
		return w.begin(clock)
	case <-timer.C():
	case <-ctx.Done():
	}
	return func() {}
}

func (w *writes) begin(clock Clock) (leave func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.since = clock.Now()
	return func() { <-w.turn }
}

// sample takes a fingerprint at a time when no family writes, and so between two writes that are both noted.
func (w *writes) sample(ctx context.Context, clock Clock, b backend.Backend) (pulse string, mark int, err error) {
	defer w.enter(ctx, clock)()
	mark = w.mark()
	pulse, err = b.Pulse(ctx)
	return pulse, mark, err
}

// add notes a write.
func (w *writes) add(by *family, before, after string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, ownWrite{by, before, after})
	if over := len(w.list) - keptWrites; over > 0 {
		w.list = append(w.list[:0], w.list[over:]...)
		w.first += over
	}
}

// mark gives the number that the next write will have.
func (w *writes) mark() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.first + len(w.list)
}

// explain tells whether a fingerprint that a family saw at a mark, and another that it sees now, differ by nothing but
// writes of other families in between. A family's own writes are known to it.
func (w *writes) explain(f *family, mark int, from, to string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if from == to {
		return true
	}
	for _, e := range w.list[min(max(mark-w.first, 0), len(w.list)):] {
		if e.by != f && e.before == from {
			from = e.after
		}
	}
	return from == to
}
