// Package conntrack lists and deletes the kernel's connection tracking entries over netlink. It decides nothing: which
// entries must go is the business of package flow, whose Flow it uses and which is all that it knows of Services.
//
// Read Table first; Kernel is the real thing, Fake the one for tests, and one contract test runs on both. The netlink
// messages are written and read by hand: a table can hold a million entries, of which only a few are ours, so foreign
// ones must cost no memory, and deletions go out in batches.
package conntrack

import (
	"context"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Table is the connection tracking table of a network namespace.
type Table interface {
	// List hands every entry of a family and a protocol to yield, until yield returns false. Entries that come and go
	// meanwhile may be missed, and one entry may be handed over twice. yield must not call the table.
	List(ctx context.Context, family model.Family, proto model.Protocol, yield func(flow.Flow) bool) error

	// Delete removes entries and tells how many of them it removed. An entry that is gone already, or was replaced by
	// another one with the same addresses, is passed over without an error. If entries fail for other reasons the rest
	// is still deleted; the error is about the first that failed.
	Delete(ctx context.Context, flows []flow.Flow) (int, error)
}

// portion bounds how many entries Forget remembers at a time: 15 MB of them.
const portion = 100_000

// Forget deletes all entries of a family and the given protocols that stale says yes to, and tells how many it deleted.
func Forget(
	ctx context.Context, t Table, family model.Family, protos []model.Protocol, stale func(flow.Flow) bool,
) (int, error) {
	return forget(ctx, t, family, protos, stale, portion)
}

func forget(
	ctx context.Context, t Table, family model.Family, protos []model.Protocol, stale func(flow.Flow) bool, limit int,
) (int, error) {
	deleted := 0
	var gone []flow.Flow
	for _, p := range protos {
		for more := true; more; {
			gone = gone[:0]
			err := t.List(ctx, family, p, func(f flow.Flow) bool {
				if stale(f) {
					gone = append(gone, f)
				}
				return len(gone) < limit
			})
			if err != nil {
				return deleted, err
			}
			n, err := t.Delete(ctx, gone)
			deleted += n
			if err != nil {
				return deleted, err
			}
			// A portion of which nothing was there any more must not be listed for ever.
			more = len(gone) == limit && n > 0
		}
	}
	return deleted, nil
}

// A StepError is how every function here reports a refusal.
type StepError = kernel.StepError
