// Package link tells the addresses of this machine and their changes. It decides nothing: which of them NodePorts
// answer on is the business of package forward. Interfaces are never picked by their names.
package link

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	rtnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
)

const (
	// attempts is how often addresses are listed anew when they change meanwhile.
	attempts = 5
	// settle is how long changes are collected before the addresses are listed: interfaces get several at a time.
	settle = 50 * time.Millisecond
	// again is the wait after a listing that failed.
	again = time.Second
)

// A StepError is how every function here reports a refusal.
type StepError = kernel.StepError

// Addrs gives the addresses of all interfaces in the calling thread's network namespace, loopback and link-local ones
// included: sorted, each once, without zones.
func Addrs() ([]netip.Addr, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, refusal(fmt.Errorf("open a route socket: %w", err))
	}
	defer h.Close()
	addrs, err := list(h)
	if err != nil {
		return nil, refusal(err)
	}
	return addrs, nil
}

// serviceDevice has the addresses of Services where a proxy puts them on a device. They are not this machine's own.
const serviceDevice = "kube-ipvs0"

func list(h *netlink.Handle) ([]netip.Addr, error) {
	var raw []netlink.Addr
	var err error
	for range attempts {
		raw, err = h.AddrList(nil, netlink.FAMILY_ALL)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	// What changes all the time is better known in part than not at all; the next change lists it again.
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("ask for addresses: %w", err)
	}
	lent := 0
	if device, err := h.LinkByName(serviceDevice); err == nil {
		lent = device.Attrs().Index
	}
	out := make([]netip.Addr, 0, len(raw))
	for _, a := range raw {
		if a.IPNet == nil || lent != 0 && a.LinkIndex == lent {
			continue
		}
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			out = append(out, addr.Unmap())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

func refusal(err error) error {
	step := &StepError{Op: "list", Object: "addresses of this machine", Err: err}
	if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		step.Class = kernel.ErrBusy
	}
	return step
}

// Watch calls changed with the addresses as Addrs gives them: first with those of the moment, then after each change
// with all of them. It acts in the calling thread's network namespace and returns with nil when the context ends. An
// error means that it could not go on; the addresses may have changed unseen until it is called again.
func Watch(ctx context.Context, changed func([]netip.Addr)) error {
	w, err := newWatcher()
	if err != nil {
		return refusal(err)
	}
	return w.run(ctx, changed)
}

// A watcher is bound to the network namespace that it was made in.
type watcher struct {
	handle *netlink.Handle
	conn   *rtnl.Conn
	// receive waits for a message about a change.
	receive func() error
}

func newWatcher() (*watcher, error) {
	conn, err := rtnl.Dial(unix.NETLINK_ROUTE, &rtnl.Config{Groups: unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR})
	if err != nil {
		return nil, fmt.Errorf("subscribe to address changes: %w", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a route socket: %w", err), conn.Close())
	}
	receive := func() error {
		_, err := conn.Receive()
		return err //nolint:wrapcheck // run does
	}
	return &watcher{handle: h, conn: conn, receive: receive}, nil
}

// run lists the addresses at the start and after changes until the context ends.
func (w *watcher) run(ctx context.Context, changed func([]netip.Addr)) error {
	dirty := make(chan struct{}, 1)
	failed := make(chan error, 1)
	go func() { failed <- w.listen(dirty) }()
	defer func() {
		_ = w.conn.Close() // ends listen; only read from, so a failing close loses nothing
		w.handle.Close()
	}()
	var last []netip.Addr
	first := true
	for {
		wait := settle
		addrs, err := list(w.handle)
		switch {
		case err != nil && first:
			return refusal(err)
		case err != nil:
			wait = again
			mark(dirty)
		case first || !slices.Equal(addrs, last):
			first, last = false, addrs
			changed(slices.Clone(addrs))
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return refusal(err)
		case <-dirty:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		// What came in while waiting is seen by the listing that follows.
		select {
		case <-dirty:
		default:
		}
	}
}

// listen marks dirty after each message, until the socket fails or is closed. Messages that were lost count as one.
func (w *watcher) listen(dirty chan<- struct{}) error {
	for {
		err := w.receive()
		switch {
		case err == nil, errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EINTR):
			mark(dirty)
		case errors.Is(err, os.ErrClosed):
			return nil
		default:
			return fmt.Errorf("read address changes: %w", err)
		}
	}
}

func mark(dirty chan<- struct{}) {
	select {
	case dirty <- struct{}{}:
	default:
	}
}
