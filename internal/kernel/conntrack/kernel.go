package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

const (
	// batch is how many deletions go into one system call. Their answers, one for each that fails, must fit into the
	// socket's buffer at once.
	batch = 500
	// bufferBytes is the size asked for the socket's receive buffer.
	bufferBytes = 4 << 20
	// readBytes is the size of one read. The kernel fills at most 32 KiB of a dump at a time.
	readBytes = 64 << 10
	// attempts is how often a listing is started anew when the kernel says that it was disturbed.
	attempts = 3
	// patience is how long the kernel may take to answer.
	patience = 10 * time.Second
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
		case errors.Is(err, errDisturbed) && n < attempts:
		case errors.Is(err, errDisturbed):
			return nil
		case filter && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)):
			filter = false
			n--
		default:
			return refusal("list", object, err)
		}
	}
}

// errDisturbed tells that a listing is complete but may lack entries or hold some twice.
var errDisturbed = errors.New("the table changed while it was listed")

func list(
	ctx context.Context, family model.Family, proto model.Protocol, filter bool, yield func(flow.Flow) bool,
) error {
	s, err := dial()
	if err != nil {
		return err
	}
	defer s.close() // ends a listing that is not read to its end
	var w writer
	w.dump(1, family, proto, filter)
	if err := s.send(w.buf); err != nil {
		return err
	}
	disturbed := false
	for {
		if err := ctx.Err(); err != nil {
			return err //nolint:wrapcheck // List does
		}
		done, err := s.receive(func(m message) (bool, error) {
			disturbed = disturbed || m.flags&unix.NLM_F_DUMP_INTR != 0
			switch m.kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return true, m.failure()
			case unix.NFNL_SUBSYS_CTNETLINK<<8 | msgNew:
				if f, ok := read(m.data, proto); ok && !yield(f) {
					return true, nil
				}
			}
			return false, nil
		})
		switch {
		case errors.Is(err, unix.ENOBUFS):
			return errDisturbed
		case err != nil:
			return err
		case done && disturbed:
			return errDisturbed
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
	s, err := dial()
	if err != nil {
		return 0, refusal("delete", object, err)
	}
	defer s.close()
	flows, first := wellFormed(flows)
	deleted := 0
	var w writer
	for at := 0; at < len(flows); at += batch {
		if err := ctx.Err(); err != nil {
			return deleted, refusal("delete", object, err)
		}
		part := flows[at:min(at+batch, len(flows))]
		n, failed, err := s.remove(&w, part)
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
func (s *socket) remove(w *writer, part []flow.Flow) (deleted int, failed, err error) {
	w.buf = w.buf[:0]
	for i, f := range part {
		flags := uint16(0)
		if i == len(part)-1 {
			flags = unix.NLM_F_ACK // its answer comes last and tells that all are done
		}
		w.remove(uint32(i+1), f, flags)
	}
	if err := s.send(w.buf); err != nil {
		return 0, nil, err
	}
	deleted = len(part)
	for {
		done, err := s.receive(func(m message) (bool, error) {
			if m.kind != unix.NLMSG_ERROR || m.seq == 0 || int(m.seq) > len(part) {
				return false, nil
			}
			cause := m.failure()
			if cause != nil {
				deleted--
			}
			if cause != nil && !errors.Is(cause, unix.ENOENT) && failed == nil {
				failed = failure(part[m.seq-1], cause)
			}
			return int(m.seq) == len(part), nil
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

// A socket is one netlink socket.
type socket struct {
	fd  int
	buf []byte
}

func dial() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	s := &socket{fd: fd, buf: make([]byte, readBytes)}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		s.close()
		return nil, fmt.Errorf("bind a netlink socket: %w", err)
	}
	// Each only makes the work cheaper or safer, so a refusal is no reason to stop: a bigger buffer than users may
	// have, and answers that do not repeat the whole request.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bufferBytes); err != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, bufferBytes)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	wait := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		s.close()
		return nil, fmt.Errorf("bound the wait of a netlink socket: %w", err)
	}
	return s, nil
}

func (s *socket) close() { _ = unix.Close(s.fd) } // nothing is buffered for writing: no failure could lose anything

func (s *socket) send(b []byte) error {
	for {
		err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return err //nolint:wrapcheck // the caller's StepError names the operation
		}
	}
}

// A message is one netlink message as it was received; data is valid until the next one.
type message struct {
	kind, flags uint16
	seq         uint32
	data        []byte
}

// failure gives the error that a message of kind error or done carries.
func (m message) failure() error {
	if len(m.data) < 4 {
		return nil
	}
	if code := int32(binary.NativeEndian.Uint32(m.data)); code < 0 {
		return unix.Errno(-code) //nolint:wrapcheck // the caller's StepError names the operation
	}
	return nil
}

// receive reads once and hands over each message, until each tells that it is done or fails.
func (s *socket) receive(each func(message) (done bool, err error)) (bool, error) {
	n, err := unix.Read(s.fd, s.buf) // not Recvfrom, which makes an address for each read
	if err != nil {
		if errors.Is(err, unix.EINTR) { // a signal; the runtime sends itself some
			return false, nil
		}
		return false, err //nolint:wrapcheck // the caller's StepError names the operation
	}
	for b := s.buf[:n]; len(b) >= headerLen; {
		size := int(binary.NativeEndian.Uint32(b))
		if size < headerLen || size > len(b) {
			return false, fmt.Errorf("a netlink message of %d bytes in %d", size, len(b))
		}
		done, err := each(message{
			kind: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]),
			seq: binary.NativeEndian.Uint32(b[8:]), data: b[headerLen:size],
		})
		if done || err != nil {
			return done, err
		}
		b = b[min(align(size), len(b)):]
	}
	return false, nil
}
