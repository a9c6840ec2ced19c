package loop

import (
	"maps"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A family is the state of one IP family. It belongs to the Run goroutine.
type family struct {
	Family
	lane chan job
	// busy tells that the lane works on a job.
	busy bool
	// interrupt ends the read-back that the lane is at; nil if what it is at must not be ended.
	interrupt *interrupt
	// interrupted counts the read-backs in a row that were ended for a change.
	interrupted int

	// changed tells that dirty or hostChanged has something; gathered is when what belongs together has come in.
	changed     bool
	gathered    time.Time
	dirty       model.Dirty
	hostChanged bool
	// changes are those that no round has taken, underway those of the round that runs or has failed.
	changes, underway changes
	bucket            bucket

	// updated tells that the builder has seen the snapshot at least once.
	updated bool
	// started tells that a round has taken effect, so that what the kernel holds is ours.
	started bool
	// compiled tells that the backend knows the whole table; if not it gets every port.
	compiled bool
	// failing tells that the last round as a whole failed: what the kernel holds is unknown, and retryAt is when the
	// next may try.
	failing bool
	retryAt time.Time
	since   time.Time
	lastErr error
	retry   backoff

	// wake is when the backend has something to do though nothing changed; zero is never.
	wake time.Time

	ports  portStates
	watch  watch
	follow follow
	stats  Stats

	// queries wait for the lane; lastQuery tells that the last job was one.
	queries   []job
	lastQuery bool
}

func newFamily(f Family, cfg *Config, now time.Time) *family {
	return &family{
		Family: f, lane: make(chan job, 1),
		bucket:  newBucket(cfg.Burst, cfg.MinSyncPeriod, now),
		retry:   backoff{start: 100 * time.Millisecond, max: 30 * time.Second},
		ports:   newPortStates(),
		changes: newChanges(), underway: newChanges(),
		follow: newFollow(cfg.SyncPeriod),
		watch:  watch{budget: newBucket(readBackBurst, leastReadBack, now)},
		stats:  Stats{Started: now},
	}
}

// mark adds to what the next round has to look at.
func (f *family) mark(d model.Dirty) {
	for n := range d.Services {
		f.dirty.Add(n)
	}
	f.dirty.Node = f.dirty.Node || d.Node
}

// roundDue gives the time at which a round may start; ok is false if there is nothing to do.
func (f *family) roundDue(now time.Time) (at time.Time, ok bool) {
	if f.failing {
		return f.retryAt, true
	}
	if !f.started {
		return now, true
	}
	if f.changed {
		at = f.gathered
		if pace := f.bucket.next(now); pace.After(at) {
			at = pace
		}
	}
	at = earliest(earliest(at, f.ports.next), f.wake)
	return at, !at.IsZero()
}

// dispatchFamily starts the most urgent job that is due, if the lane is free, and gives the time at which to look again.
func (l *Loop) dispatchFamily(now time.Time, f *family) time.Time {
	next := f.watch.endEpisode(l, f, now)
	if f.busy {
		return earliest(next, f.interruptFor(now, l.missing == 0))
	}
	at, due := f.roundDue(now)
	due = due && l.missing == 0
	if due && !at.After(now) && (f.lastQuery || len(f.queries) == 0) {
		f.lastQuery = false
		l.startRound(f, now)
		if f.busy {
			return next
		}
		// The update changed nothing for this family.
		at, due = f.roundDue(now)
	}
	if len(f.queries) > 0 {
		f.lastQuery = true
		f.start(f.queries[0])
		f.queries = f.queries[1:]
		return next
	}
	if due {
		next = earliest(next, at)
	}
	if !f.started || f.failing {
		return next
	}
	return earliest(next, l.dispatchWatch(now, f))
}

// interruptFor ends a read-back when a change has become due; a change must not wait for a check. After a few times
// the check has its turn.
func (f *family) interruptFor(now time.Time, synced bool) time.Time {
	if f.interrupt == nil || f.interrupted >= maxInterrupts || !synced {
		return time.Time{}
	}
	at, due := f.roundDue(now)
	if !due {
		return time.Time{}
	}
	if at.After(now) {
		return at
	}
	f.interrupt.fire()
	f.interrupt = nil
	return time.Time{}
}

// maxInterrupts is how many read-backs in a row may be ended for changes.
const maxInterrupts = 3

// start gives the lane a job. The lane must be free.
func (f *family) start(j job) {
	f.busy = true
	f.lane <- j
}

// free notes that the lane is done.
func (f *family) free() {
	f.busy, f.interrupt = false, nil
}

// everything gives a delta that names all ports of the table.
func everything(t *forward.Table) forward.Delta {
	return forward.Delta{Ports: t.Names(), Context: true}
}

// changes are Services and slices whose change is not in effect yet.
type changes struct {
	services map[model.Name]struct{}
	slices   map[model.Name]sliceChange
}

// A sliceChange remembers for which Service a slice changed and the earliest trigger, zero if it has none.
type sliceChange struct {
	service model.Name
	trigger time.Time
}

func newChanges() changes {
	return changes{services: map[model.Name]struct{}{}, slices: map[model.Name]sliceChange{}}
}

// add notes what changed. A slice of another family is not this one's; a deleted slice's family may be unknown.
func (c *changes) add(family model.Family, key objectKey, it item) {
	switch key.kind {
	case serviceKind:
		c.services[key.name] = struct{}{}
	case sliceKind:
		s := it.event.Slice
		if s.Family != family && s.Family != 0 {
			return
		}
		next := sliceChange{service: model.Name{Namespace: s.Namespace, Name: s.Service}, trigger: it.trigger}
		if !it.event.Delete {
			next.trigger = earliest(c.slices[key.name].trigger, it.trigger)
		}
		c.slices[key.name] = next
	case nodeKind, cidrKind, fileKind:
	}
}

// merge adds what is in o and empties it.
func (c *changes) merge(o *changes) {
	maps.Copy(c.services, o.services)
	for name, s := range o.slices {
		s.trigger = earliest(c.slices[name].trigger, s.trigger)
		c.slices[name] = s
	}
	*o = newChanges()
}

// settle takes out everything whose Service is not among those that the kernel refuses, and gives the triggers of it.
func (c *changes) settle(refused map[model.Name]struct{}) []time.Time {
	var triggers []time.Time
	for name, s := range c.slices {
		if _, held := refused[s.service]; held {
			continue
		}
		if !s.trigger.IsZero() {
			triggers = append(triggers, s.trigger)
		}
		delete(c.slices, name)
	}
	maps.DeleteFunc(c.services, func(n model.Name, _ struct{}) bool {
		_, held := refused[n]
		return !held
	})
	slices.SortFunc(triggers, time.Time.Compare)
	return triggers
}

// reportPending publishes how many changes are not in effect; of two families the one that is behind counts.
func (l *Loop) reportPending() {
	services, parts := 0, 0
	for _, f := range l.families {
		services = max(services, len(f.changes.services)+len(f.underway.services))
		parts = max(parts, len(f.changes.slices)+len(f.underway.slices))
	}
	l.cfg.Metrics.Pending(services, parts)
}
