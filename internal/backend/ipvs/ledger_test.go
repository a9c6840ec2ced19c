package ipvs

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// Whatever happens, what a ledger says of the kernel is what the kernel was told, and its differences are exactly those.
func TestALedgerKnowsWhatDiffers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := newLedger[int, int]()
		want, kernel := map[int]int{}, map[int]int{}
		key, value := rapid.IntRange(0, 5), rapid.IntRange(1, 3)
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				k, v := key.Draw(t, "key"), value.Draw(t, "value")
				l.set(k, v)
				want[k] = v
			},
			"drop": func(t *rapid.T) {
				k := key.Draw(t, "key")
				l.drop(k)
				delete(want, k)
			},
			"apply one": func(t *rapid.T) {
				k := key.Draw(t, "key")
				now := l.wanted(k)
				if now.there {
					kernel[k] = now.value
				} else {
					delete(kernel, k)
				}
				l.acknowledge(k, now)
			},
			"others change the kernel, and it is read": func(t *rapid.T) {
				kernel[key.Draw(t, "key")] = value.Draw(t, "value")
				delete(kernel, key.Draw(t, "gone"))
				l.observe(kernel)
			},
			"clear": func(*rapid.T) {
				l.clear()
				clear(want)
			},
			"": func(t *rapid.T) {
				if diff := cmp.Diff(want, l.want); diff != "" {
					t.Fatalf("wanted (-want +got):\n%s", diff)
				}
				for k := range 6 {
					v, there := kernel[k]
					if got := l.has(k); got != (state[int]{v, there}) {
						t.Fatalf("the kernel's %d is %v, %v; the ledger says %v", k, v, there, got)
					}
					_, differs := l.held[k]
					w, wanted := want[k]
					if differs != (wanted != there || w != v) {
						t.Fatalf("key %d: differs is %v", k, differs)
					}
				}
			},
		})
	})
}
