package ipvs

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Engine is IPVS as a whole in a network namespace: what the kernel can do, and the settings that all servers share.
type Engine interface {
	// Info tells what the kernel has.
	Info(ctx context.Context) (Info, error)

	// TryScheduler gives nil if the kernel has a scheduler or could load its module, ErrScheduler if it has not. Any
	// other error leaves it open.
	TryScheduler(ctx context.Context, name string) error

	// Timeouts gives how long connections without packets are kept.
	Timeouts(ctx context.Context) (Timeouts, error)

	// SetTimeouts changes those that are not 0, for all servers of the namespace, also those of others.
	SetTimeouts(ctx context.Context, t Timeouts) error
}

// Info is what the kernel tells about IPVS.
type Info struct {
	// Version is that of the interface, as "1.2.1".
	Version string
	// Buckets is the size of the table of connections. It bounds how quickly one is found, not how many there can be.
	Buckets uint32
}

// Timeouts are how long a connection without packets is kept, in whole seconds from 1 to 2147483.
type Timeouts struct {
	// TCP is for established connections, TCPFin for those that are being closed. Kernel defaults: 15 and 2 minutes.
	TCP, TCPFin time.Duration
	// UDP has the kernel default of 5 minutes.
	UDP time.Duration
}

// longestTimeout is what every kernel takes: a signed number of 32 bits, counted in up to 1000 ticks a second.
const longestTimeout = math.MaxInt32 / 1000 * time.Second

func (t Timeouts) check() error {
	for _, d := range []time.Duration{t.TCP, t.TCPFin, t.UDP} {
		if d < 0 || d > longestTimeout || d%time.Second != 0 {
			return fmt.Errorf("the timeout %s is not 1 to %d whole seconds, or 0 to leave it", d, longestTimeout/time.Second)
		}
	}
	return nil
}

// trialPorts is how many keys a trial goes through if others have servers there.
const trialPorts = 16

// try finds out whether a kernel has a scheduler: only making a server with it tells. The server is at 0.0.0.0, which no
// packet is ever sent to (RFC 1122, 3.2.1.3; a connection to it goes to the loopback address), and is removed at once. If
// the process ends in between, it is left, and catches nothing.
func try(ctx context.Context, table Table, name string) error {
	if err := checkScheduler(name); err != nil {
		return trial(name, err.Error(), nil, kernel.ErrInvalid)
	}
	for port := range uint16(trialPorts) {
		k := Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.AddrPortFrom(netip.IPv4Unspecified(), port+1)}
		err := table.Apply(ctx, []Op{{Verb: AddServer, Key: k, Properties: Properties{Scheduler: name}}})[0]
		if errors.Is(err, ErrExists) { // somebody else's
			continue
		}
		if err != nil {
			return explainTrial(name, err)
		}
		err = table.Apply(context.WithoutCancel(ctx), []Op{{Verb: RemoveServer, Key: k}})[0]
		if err != nil && !errors.Is(err, ErrMissing) {
			return explainTrial(name, err)
		}
		return nil
	}
	reason := fmt.Sprintf("others have servers at the ports 1 to %d of 0.0.0.0: remove one", trialPorts)
	return trial(name, reason, ErrExists, kernel.ErrConflict)
}

// explainTrial gives the reason and the class of the step that failed.
func explainTrial(name string, err error) error {
	var step *StepError
	if !errors.As(err, &step) {
		return trial(name, "", err, nil)
	}
	reason := step.Reason
	if reason == "" {
		reason = step.Error()
	}
	return trial(name, reason, step.Err, step.Class)
}

func trial(name, reason string, err, class error) error {
	return &StepError{Op: "try", Object: fmt.Sprintf("scheduler %.20q", name), Reason: reason, Err: err, Class: class}
}
