// Package netlink sends messages to the kernel and reads its answers, many at a time: a thousand requests in two system
// calls, each with its own answer, and listings of any length in bounded memory. It knows no protocol: what a message
// says is for the packages that use it.
//
// It exists because the well-kept libraries read one answer for one request: they stop at the first error of a batch.
// For attributes they are used.
package netlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// HeaderLen is the length of a message's header in bytes.
	HeaderLen = unix.NLMSG_HDRLEN
	// batch is how many requests go into one system call. Their answers, one for each that fails, must fit into the
	// socket's buffer at once.
	batch = 500
	// batchBytes bounds the same in bytes: the kernel copies what is sent into one buffer.
	batchBytes = 128 << 10
	// bufferBytes is the size asked for the socket's receive buffer.
	bufferBytes = 4 << 20
	// readBytes is the size of one read. The kernel fills at most 32 KiB of a dump at a time.
	readBytes = 64 << 10
	// patience is how long the kernel may take to answer.
	patience = 10 * time.Second
)

// ErrDisturbed tells that a listing came to its end but may lack objects or hold some twice, as they changed meanwhile.
var ErrDisturbed = errors.New("the kernel's objects changed while they were listed")

// A Socket is one netlink socket. It belongs to one goroutine, and to the network namespace in which it was opened.
type Socket struct {
	fd  int
	buf []byte
	// sent counts the requests of Batch and Dump.
	sent int
}

// Dial opens a socket for a protocol, as unix.NETLINK_NETFILTER.
func Dial(protocol int) (*Socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	s := &Socket{fd: fd, buf: make([]byte, readBytes)}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		s.Close()
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
		s.Close()
		return nil, fmt.Errorf("bound the wait of a netlink socket: %w", err)
	}
	return s, nil
}

// Close ends the socket, and with it a listing that was not read to its end.
func (s *Socket) Close() { _ = unix.Close(s.fd) } // nothing is buffered for writing: no failure could lose anything

// Strict asks the kernel to heed what a listing's request says of the objects that are wanted. Kernels before 4.20
// refuse.
func (s *Socket) Strict() error {
	//nolint:wrapcheck // the caller goes without it
	return unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
}

// Sent tells how many requests Batch and Dump have sent.
func (s *Socket) Sent() int { return s.sent }

// Send hands bytes over as they are.
func (s *Socket) Send(b []byte) error {
	for {
		err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return err //nolint:wrapcheck // the caller's StepError names the operation
		}
	}
}

// A Message is one netlink message as it was received; Data is valid until the next one.
type Message struct {
	Kind, Flags uint16
	Seq         uint32
	Data        []byte
}

// Failure gives the error that a message of kind error or done carries.
func (m Message) Failure() error {
	if len(m.Data) < 4 {
		return nil
	}
	if code := int32(binary.NativeEndian.Uint32(m.Data)); code < 0 {
		return unix.Errno(-code) //nolint:wrapcheck // the caller's StepError names the operation
	}
	return nil
}

// Receive reads once and hands over each message, until each tells that it is done or fails.
func (s *Socket) Receive(each func(Message) (done bool, err error)) (bool, error) {
	n, err := unix.Read(s.fd, s.buf) // not Recvfrom, which makes an address for each read
	if err != nil {
		if errors.Is(err, unix.EINTR) { // a signal; the runtime sends itself some
			return false, nil
		}
		return false, err //nolint:wrapcheck // the caller's StepError names the operation
	}
	for b := s.buf[:n]; len(b) >= HeaderLen; {
		size := int(binary.NativeEndian.Uint32(b))
		if size < HeaderLen || size > len(b) {
			return false, fmt.Errorf("a netlink message of %d bytes in %d", size, len(b))
		}
		done, err := each(Message{
			Kind: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
			Seq: binary.NativeEndian.Uint32(b[8:]), Data: b[HeaderLen:size],
		})
		if done || err != nil {
			return done, err
		}
		b = b[min(Align(size), len(b)):]
	}
	return false, nil
}

// Align rounds a length up to where the next message or attribute begins.
func Align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }

// A Request is one message to the kernel.
type Request struct {
	Kind uint16
	// Flags are those besides NLM_F_REQUEST and NLM_F_ACK.
	Flags uint16
	Data  []byte
}

// appendTo writes the request as a message with a sequence number.
func (r Request) appendTo(b []byte, seq uint32, flags uint16) []byte {
	size := HeaderLen + len(r.Data)
	b = binary.NativeEndian.AppendUint32(b, uint32(size))
	b = binary.NativeEndian.AppendUint16(b, r.Kind)
	b = binary.NativeEndian.AppendUint16(b, r.Flags|flags|unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, r.Data...)
	for len(b) != Align(len(b)) {
		b = append(b, 0)
	}
	return b
}

// Batch sends requests and tells what became of each: nil, or the errno with which the kernel refused it. The kernel
// carries them out in order, and a refused one does not stop the rest. The second result ends the work: the kernel's
// answer to some is not known then, and what is not known has that error too.
func (s *Socket) Batch(ctx context.Context, requests []Request) ([]error, error) {
	outcome := make([]error, len(requests))
	var buf []byte
	for at := 0; at < len(requests); {
		if err := ctx.Err(); err != nil {
			return unknown(outcome, at, err), err
		}
		buf = buf[:0]
		end, last := at, 0
		for end < len(requests) && end-at < batch && len(buf) < batchBytes {
			last = len(buf)
			buf = requests[end].appendTo(buf, uint32(end+1), 0)
			end++
		}
		acknowledge(buf[last:]) // its answer comes last and tells that all are done
		s.sent += end - at
		if err := s.Send(buf); err != nil {
			return unknown(outcome, at, err), err
		}
		if err := s.answers(outcome, end); err != nil {
			return unknown(outcome, at, err), err
		}
		at = end
	}
	return outcome, nil
}

// acknowledge asks for an answer to a message also if it succeeds.
func acknowledge(message []byte) {
	flags := message[6:8]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
}

// answers reads what became of the requests up to the one with the sequence number last.
func (s *Socket) answers(outcome []error, last int) error {
	for {
		done, err := s.Receive(func(m Message) (bool, error) {
			if m.Kind != unix.NLMSG_ERROR || m.Seq == 0 || int(m.Seq) > last {
				return false, nil
			}
			outcome[m.Seq-1] = m.Failure()
			return int(m.Seq) == last, nil
		})
		if done || err != nil {
			return err
		}
	}
}

func unknown(outcome []error, from int, err error) []error {
	for i := from; i < len(outcome); i++ {
		outcome[i] = err
	}
	return outcome
}

// Ask sends one request that has one answer and hands that over. It gives the kernel's refusal or yield's error.
func (s *Socket) Ask(ctx context.Context, r Request, yield func(Message) error) error {
	s.sent++
	if err := s.Send(r.appendTo(nil, 1, unix.NLM_F_ACK)); err != nil {
		return err
	}
	for {
		if err := ctx.Err(); err != nil {
			return err //nolint:wrapcheck // the caller's StepError names the operation
		}
		done, err := s.Receive(func(m Message) (bool, error) {
			if m.Kind == unix.NLMSG_ERROR { // behind the answer, or in its place
				return true, m.Failure()
			}
			return false, yield(m)
		})
		if done || err != nil {
			return err
		}
	}
}

// Dump sends a request for a listing and hands over each message of the answer. It gives ErrDisturbed if the listing is
// not to be relied on, and otherwise the kernel's refusal or yield's error.
func (s *Socket) Dump(ctx context.Context, r Request, yield func(Message) error) error {
	s.sent++
	if err := s.Send(r.appendTo(nil, 1, unix.NLM_F_DUMP)); err != nil {
		return err
	}
	disturbed := false
	for {
		if err := ctx.Err(); err != nil {
			return err //nolint:wrapcheck // the caller's StepError names the operation
		}
		done, err := s.Receive(func(m Message) (bool, error) {
			disturbed = disturbed || m.Flags&unix.NLM_F_DUMP_INTR != 0
			if m.Kind == unix.NLMSG_DONE || m.Kind == unix.NLMSG_ERROR {
				return true, m.Failure()
			}
			return false, yield(m)
		})
		switch {
		case errors.Is(err, unix.ENOBUFS):
			return ErrDisturbed
		case err != nil:
			return err
		case done && disturbed:
			return ErrDisturbed
		case done:
			return nil
		}
	}
}
