package ipvs

import "maps"

// A ledger keeps what is wanted of one sort of kernel object, by key, and remembers what the kernel holds instead where
// the two differ. So the next plan costs what changed, and never what is there.
type ledger[K, V comparable] struct {
	want map[K]V
	// held has the kernel's state of every key that is wanted otherwise.
	held map[K]state[V]
}

// A state is one object as it is or was; not there is an object that does not exist.
type state[V comparable] struct {
	value V
	there bool
}

func newLedger[K, V comparable]() ledger[K, V] {
	return ledger[K, V]{want: map[K]V{}, held: map[K]state[V]{}}
}

// set wants an object; drop wants it gone.
func (l *ledger[K, V]) set(k K, v V) { l.change(k, state[V]{v, true}) }
func (l *ledger[K, V]) drop(k K)     { l.change(k, state[V]{}) }

func (l *ledger[K, V]) change(k K, next state[V]) {
	was := l.wanted(k)
	if was == next {
		return
	}
	held, differs := l.held[k]
	if !differs {
		held = was
	}
	l.hold(k, next, held)
	if next.there {
		l.want[k] = next.value
	} else {
		delete(l.want, k)
	}
}

func (l *ledger[K, V]) wanted(k K) state[V] {
	v, there := l.want[k]
	return state[V]{v, there}
}

// has gives what the kernel holds of a key, as far as it was told.
func (l *ledger[K, V]) has(k K) state[V] {
	if held, differs := l.held[k]; differs {
		return held
	}
	return l.wanted(k)
}

func (l *ledger[K, V]) hold(k K, want, held state[V]) {
	if want == held {
		delete(l.held, k)
	} else {
		l.held[k] = held
	}
}

// acknowledge notes what the kernel holds of a key now.
func (l *ledger[K, V]) acknowledge(k K, held state[V]) { l.hold(k, l.wanted(k), held) }

// observe replaces all that is remembered of the kernel by what was read from it.
func (l *ledger[K, V]) observe(have map[K]V) {
	clear(l.held)
	for k, v := range l.want {
		if got, there := have[k]; !there || got != v {
			l.held[k] = state[V]{got, there}
		}
	}
	for k, v := range have {
		if _, wanted := l.want[k]; !wanted {
			l.held[k] = state[V]{v, true}
		}
	}
}

// clear wants nothing.
func (l *ledger[K, V]) clear() {
	for k := range maps.Clone(l.want) {
		l.drop(k)
	}
}
