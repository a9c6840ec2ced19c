package conntrack

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

const (
	// batch is how many deletions go into one system call. Their answers, one for each that fails, must fit into the
	// socket's buffer at once.
	batch = 500
	// attempts is how often a listing is started anew when the kernel says that it was disturbed.
	attempts = 3
)

// Kernel is the kernel's table. It has no state and may be used by several goroutines. Its methods act in the network
// namespace of the calling thread.
type Kernel struct{}

var _ Table = Kernel{}

// List implements Table. A listing that the kernel reports as disturbed is repeated, so that entries may be handed over
// again; after three attempts the last one counts as it is.
func (Kernel) List(
	ctx context.Context, family model.Family, proto model.Protocol, yield func(flow.Flow) bool,
) error {
	object := fmt.Sprintf("%s conntrack entries of %s", family, proto)
	// The kernel sorts out the other protocols if it can. Older ones either ignore that wish or refuse it.
	filter := true
	for n := 1; ; n++ {
		err := list(ctx, family, proto, filter, yield)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, netlink.ErrDisturbed) && n < attempts:
		case errors.Is(err, netlink.ErrDisturbed):
			return nil
		case filter && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)):
			filter = false
			n--
		default:
			return refusal("list", object, err)
		}
	}
}

func list(
	ctx context.Context, family model.Family, proto model.Protocol, filter bool, yield func(flow.Flow) bool,
) error {
	s, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer s.Close() // ends a listing that is not read to its end
	var w writer
	w.dump(1, family, proto, filter)
	if err := s.Send(w.buf); err != nil {
		return err
	}
	disturbed := false
	for {
		if err := ctx.Err(); err != nil {
			return err //nolint:wrapcheck // List does
		}
		done, err := s.Receive(func(m netlink.Message) (bool, error) {
			disturbed = disturbed || m.Flags&unix.NLM_F_DUMP_INTR != 0
			switch m.Kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return true, m.Failure()
			case unix.NFNL_SUBSYS_CTNETLINK<<8 | msgNew:
				if f, ok := read(m.Data, proto); ok && !yield(f) {
					return true, nil
				}
			}
			return false, nil
		})
		switch {
		case errors.Is(err, unix.ENOBUFS):
			return netlink.ErrDisturbed
		case err != nil:
			return err
		case done && disturbed:
			return netlink.ErrDisturbed
		case done:
			return nil
		}
	}
}

// Delete implements Table.
func (Kernel) Delete(ctx context.Context, flows []flow.Flow) (int, error) {
	if len(flows) == 0 {
		return 0, nil
	}
	object := fmt.Sprintf("%d conntrack entries", len(flows))
	s, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, refusal("delete", object, err)
	}
	defer s.Close()
	flows, first := wellFormed(flows)
	deleted := 0
	var w writer
	for at := 0; at < len(flows); at += batch {
		if err := ctx.Err(); err != nil {
			return deleted, refusal("delete", object, err)
		}
		part := flows[at:min(at+batch, len(flows))]
		n, failed, err := remove(s, &w, part)
		deleted += n
		if err != nil {
			return deleted, refusal("delete", object, err)
		}
		if first == nil {
			first = failed
		}
	}
	if first != nil {
		return deleted, refusal("delete", object, first)
	}
	return deleted, nil
}

// wellFormed leaves out entries that no message can be about; the error is about the first of them.
func wellFormed(flows []flow.Flow) ([]flow.Flow, error) {
	bad := slices.IndexFunc(flows, malformed)
	if bad < 0 {
		return flows, nil
	}
	return slices.DeleteFunc(slices.Clone(flows), malformed), failure(flows[bad], kernel.ErrInvalid)
}

func malformed(f flow.Flow) bool {
	src, dst := f.OrigSrc.Addr(), f.OrigDst.Addr()
	return !src.IsValid() || !dst.IsValid() || src.Is4() != dst.Is4()
}

func failure(f flow.Flow, cause error) error {
	return fmt.Errorf("%s from %s to %s: %w", f.Proto, f.OrigSrc, f.OrigDst, cause)
}

// remove deletes one batch: it tells how many were deleted and the first entry's failure. err ends the work.
func remove(s *netlink.Socket, w *writer, part []flow.Flow) (deleted int, failed, err error) {
	w.buf = w.buf[:0]
	for i, f := range part {
		flags := uint16(0)
		if i == len(part)-1 {
			flags = unix.NLM_F_ACK // its answer comes last and tells that all are done
		}
		w.remove(uint32(i+1), f, flags)
	}
	if err := s.Send(w.buf); err != nil {
		return 0, nil, err
	}
	deleted = len(part)
	for {
		done, err := s.Receive(func(m netlink.Message) (bool, error) {
			if m.Kind != unix.NLMSG_ERROR || m.Seq == 0 || int(m.Seq) > len(part) {
				return false, nil
			}
			cause := m.Failure()
			if cause != nil {
				deleted--
			}
			if cause != nil && !errors.Is(cause, unix.ENOENT) && failed == nil {
				failed = failure(part[m.Seq-1], cause)
			}
			return int(m.Seq) == len(part), nil
		})
		if done || err != nil {
			return deleted, failed, err
		}
	}
}

// refusal gives an error its object and its class.
func refusal(op, object string, err error) error {
	step := &StepError{Op: op, Object: object, Err: err}
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		step.Class = kernel.ErrUnsupported
		step.Reason = fmt.Sprintf("%v: the capability NET_ADMIN is missing", err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EINVAL),
		errors.Is(err, unix.EOPNOTSUPP):
		step.Class = kernel.ErrUnsupported
		step.Reason = fmt.Sprintf("%v: load the module nf_conntrack_netlink", err)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBUSY), errors.Is(err, unix.ENOBUFS),
		errors.Is(err, unix.ENOMEM):
		step.Class = kernel.ErrBusy
	}
	return step
}
