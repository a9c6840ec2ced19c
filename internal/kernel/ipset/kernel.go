package ipset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
)

// attempts is how often a listing is started anew when the kernel says that it was disturbed.
const attempts = 5

// Kernel is the kernel's table. Its methods act in the network namespace of the calling thread, and may be called by
// several goroutines.
type Kernel struct {
	mu sync.Mutex
	// version is that of the protocol; 0 until it is known.
	version uint8
	// revisions has what Create takes for each type that was asked for.
	revisions map[Type]uint8
	sent      atomic.Int64
}

var _ Table = (*Kernel)(nil)

// NewKernel gives the kernel's table. It asks nothing yet.
func NewKernel() *Kernel { return &Kernel{revisions: map[Type]uint8{}} }

// Sent counts the messages of Read, List and Apply, one for each name, listing and Op, but not those that find out what
// the kernel speaks.
func (k *Kernel) Sent() int { return int(k.sent.Load()) }

// A session is a socket and what is said over it.
type session struct {
	*netlink.Socket
	writer
}

// open opens a socket and finds out, once, which version of the protocol the kernel speaks.
func (k *Kernel) open(ctx context.Context) (*session, error) {
	socket, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, refusal("open", "a socket for IP sets", err, explain)
	}
	s := &session{Socket: socket}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.version == 0 {
		if k.version, err = s.negotiate(ctx); err != nil {
			s.Close()
			return nil, refusal("ask for the version of", "IP sets", err, explain)
		}
	}
	s.version = k.version
	return s, nil
}

// negotiate gives the newest version that both sides speak.
func (s *session) negotiate(ctx context.Context) (uint8, error) {
	s.version = protocolMax // the kernel looks at none of it here
	var common uint8
	err := s.Ask(ctx, s.message(cmdProtocol, 0, func() {}), func(m netlink.Message) error {
		oldest, newest, err := versions(m.Data, attrProtocol)
		if err != nil {
			return err
		}
		common, err = agree(oldest, newest)
		return err
	})
	if err == nil && common == 0 {
		err = errMalformed
	}
	return common, err
}

// agree gives the newest version that this side and one from oldest to newest speak; 0 for oldest is not known.
func agree(oldest, newest uint8) (uint8, error) {
	if oldest > protocolMax || newest < protocolMin {
		return 0, &StepError{
			Op: "ask for the version of", Object: "IP sets", Class: kernel.ErrUnsupported,
			Reason: fmt.Sprintf("the kernel speaks versions %d to %d of the protocol, Turnout %d to %d",
				oldest, newest, protocolMin, protocolMax),
		}
	}
	return min(newest, protocolMax), nil
}

// Read implements Table.
func (k *Kernel) Read(ctx context.Context, names []string) ([]Content, error) {
	for _, name := range names {
		if err := checkName(name); err != nil {
			return nil, invalid("list", "IP set "+name, err)
		}
	}
	if len(names) == 0 {
		return nil, nil
	}
	s, err := k.open(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var out []Content
	for _, name := range names {
		var c Content
		k.sent.Add(1)
		err := s.list(ctx, s.message(cmdList, 0, func() { s.text(attrSetName, name) }),
			func() { c = Content{} },
			func(m netlink.Message) error { return decode(m.Data, &c) })
		switch {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			return nil, refusal("list", "IP set "+name, err, explain)
		default:
			out = append(out, c)
		}
	}
	return out, nil
}

// list asks for a listing, again if it was disturbed, and begins each time with start.
func (s *session) list(ctx context.Context, r netlink.Request, start func(), each func(netlink.Message) error) error {
	for n := 1; ; n++ {
		start()
		err := s.Dump(ctx, r, each)
		if !errors.Is(err, netlink.ErrDisturbed) || n == attempts {
			return err
		}
	}
}

// List implements Table.
func (k *Kernel) List(ctx context.Context, want func(name string) bool) ([]Set, error) {
	s, err := k.open(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var out []Set
	k.sent.Add(1)
	err = s.list(ctx, s.message(cmdList, 0, func() { s.put32(attrFlags, flagHeaderOnly) }),
		func() { out = out[:0] },
		func(m netlink.Message) error {
			called, err := name(m.Data)
			if err != nil || want != nil && !want(string(called)) {
				return err
			}
			var c Content
			err = decode(m.Data, &c)
			out = append(out, c.Set)
			return err
		})
	if err != nil {
		return nil, refusal("list", "IP sets", err, explain)
	}
	slices.SortFunc(out, func(a, b Set) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Apply implements Table.
func (k *Kernel) Apply(ctx context.Context, ops []Op) []error {
	out := make([]error, len(ops))
	if len(ops) == 0 {
		return out
	}
	s, err := k.open(ctx)
	if err != nil {
		for i := range ops {
			out[i] = err
		}
		return out
	}
	defer s.Close()
	requests := make([]netlink.Request, 0, len(ops))
	of := make([]int, 0, len(ops)) // the op that each request is for
	for i, o := range ops {
		if err := o.check(); err != nil {
			out[i] = invalid(o.Verb.String(), o.object(), err)
			continue
		}
		revision := uint8(0)
		if o.Verb == Create {
			if revision, err = k.revision(ctx, s, o.Set.Type); err != nil {
				out[i] = o.refusal(err)
				continue
			}
		}
		requests, of = append(requests, s.op(o, revision)), append(of, i)
	}
	k.sent.Add(int64(len(requests)))
	outcome, _ := s.Batch(ctx, requests) // whatever ended it stands in the outcomes, too
	for n, err := range outcome {
		o := ops[of[n]]
		if err = o.settle(err); err != nil {
			out[of[n]] = o.refusal(err)
		}
	}
	return out
}

// settle makes of the kernel's answer what the contract says, where kernels differ.
func (o Op) settle(err error) error {
	switch {
	case o.Verb == Destroy && !o.Strict && errors.Is(err, unix.ENOENT):
		return nil // newer ones do not mind by themselves
	case o.Verb == Remove && o.Entry.Addr.IsValid() && o.Entry.Addr.IsUnspecified() &&
		(errors.Is(err, unix.EINVAL) || errors.Is(err, unix.Errno(errHashElem))):
		if o.Strict { // what cannot be in the set is not in it
			return unix.Errno(errExist) //nolint:wrapcheck // refusal does
		}
		return nil
	}
	return err
}

// revision finds out, once, which revision of a type Create takes.
func (k *Kernel) revision(ctx context.Context, s *session, t Type) (uint8, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r, known := k.revisions[t]; known {
		return r, nil
	}
	family := uint8(unix.AF_INET) // each type of addresses is for both
	if t == BitmapPort {
		family = unix.AF_UNSPEC
	}
	answered, oldest, newest := false, uint8(0), uint8(0)
	err := s.Ask(ctx, s.message(cmdType, 0, func() {
		s.text(attrTypeName, string(t))
		s.put8(attrFamily, family)
	}), func(m netlink.Message) (err error) {
		oldest, newest, err = versions(m.Data, attrRevision)
		answered = true
		return err
	})
	switch {
	case err != nil:
		return 0, err
	case !answered:
		return 0, errMalformed
	}
	k.revisions[t] = min(max(t.wanted(), oldest), newest)
	return k.revisions[t], nil
}

// Probe implements Table.
func (k *Kernel) Probe(ctx context.Context) (Support, error) {
	s, err := k.open(ctx)
	if err != nil {
		return Support{}, err
	}
	defer s.Close()
	out := Support{Protocol: s.version, Types: map[Type]uint8{}}
	for _, t := range Types() {
		r, err := k.revision(ctx, s, t)
		switch {
		case errors.Is(err, unix.Errno(errFindType)):
		case err != nil:
			return Support{}, refusal("ask for type of set", string(t), err, explain)
		default:
			out.Types[t] = r
		}
	}
	return out, nil
}
