package xtables

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
)

// What the fake accepts it prints, and takes again to the same effect.
func FuzzFakeRestore(f *testing.F) {
	f.Add(fill(model.IPv4, corpus))
	for _, payload := range refusedPayloads() {
		f.Add(fill(model.IPv4, payload))
	}
	f.Fuzz(func(t *testing.T, payload string) {
		fake := NewFake(model.IPv4, NFT)
		if err := fake.Restore(t.Context(), []byte(payload)); err != nil && err.Error() == "" {
			t.Error("an error without a word")
		}
		again := NewFake(model.IPv4, NFT)
		for _, table := range []string{"nat", "filter", "mangle", "raw", "security"} {
			want := saved(t, fake, table)
			if err := again.Restore(t.Context(), []byte(want)); err != nil {
				t.Fatalf("%v, in\n%s", err, want)
			}
			if diff := cmp.Diff(want, saved(t, again, table)); diff != "" {
				t.Errorf("table %s (-want +got):\n%s", table, diff)
			}
		}
	})
}

func FuzzDigest(f *testing.F) {
	for _, tc := range refusals() {
		f.Add(tc.reply)
	}
	f.Fuzz(func(t *testing.T, reply string) {
		reason, line := digest(reply)
		if line < 0 || len(reason) > maxReason || strings.Contains(reason, "\n") {
			t.Errorf("line %d, reason %q", line, reason)
		}
		locate([]byte(payload), line)
	})
}
