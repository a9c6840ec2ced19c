package ipset

import (
	"context"
	"errors"
	"fmt"
	"sync"

	attr "github.com/mdlayher/netlink"
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
	// revisions has the newest form of each type that this kernel knows.
	revisions map[Type]uint8
}

var _ Table = (*Kernel)(nil)

// NewKernel gives the kernel's table. It asks nothing yet.
func NewKernel() *Kernel { return &Kernel{revisions: map[Type]uint8{}} }

// Read implements Table.
func (*Kernel) Read(ctx context.Context, names []string) ([]Content, error) {
	s, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, refusal("list", "IP sets", err)
	}
	defer s.Close()
	var out []Content
	for _, name := range names {
		c, err := read(ctx, s, name)
		switch {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			return nil, refusal("list", "IP set "+name, err)
		default:
			out = append(out, c)
		}
	}
	return out, nil
}

func read(ctx context.Context, s *netlink.Socket, name string) (Content, error) {
	r, err := request(cmdList, 0, func(ae *attr.AttributeEncoder) { ae.String(attrSetName, name) })
	if err != nil {
		return Content{}, err
	}
	for n := 1; ; n++ {
		c := Content{Entries: map[Entry]uint32{}}
		err := s.Dump(ctx, r, func(m netlink.Message) error { return decode(m.Data, &c) })
		if !errors.Is(err, netlink.ErrDisturbed) || n == attempts {
			return c, err
		}
	}
}

// Apply implements Table.
func (k *Kernel) Apply(ctx context.Context, ops []Op) []error {
	out := make([]error, len(ops))
	if len(ops) == 0 {
		return out
	}
	s, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		for i, o := range ops {
			out[i] = refusal(o.Verb.String(), o.object(), err)
		}
		return out
	}
	defer s.Close()
	var requests []netlink.Request
	var of []int // the op that each request is for
	for i, o := range ops {
		r, err := k.request(ctx, s, o)
		if err != nil {
			out[i] = err
			continue
		}
		requests, of = append(requests, r), append(of, i)
	}
	outcome, _ := s.Batch(ctx, requests) // whatever ended it stands in the outcomes, too
	for n, err := range outcome {
		if i := of[n]; err != nil && (ops[i].Verb != Destroy || !errors.Is(err, unix.ENOENT)) {
			out[i] = refusal(ops[i].Verb.String(), ops[i].object(), err)
		}
	}
	return out
}

func (k *Kernel) request(ctx context.Context, s *netlink.Socket, o Op) (netlink.Request, error) {
	err := o.check()
	if err != nil {
		return netlink.Request{}, &StepError{
			Op: o.Verb.String(), Object: o.object(), Reason: err.Error(), Class: kernel.ErrInvalid,
		}
	}
	revision := uint8(0)
	if o.Verb == Create {
		if revision, err = k.revision(ctx, s, o.Set); err != nil {
			return netlink.Request{}, refusal("ask for set type", string(o.Set.Type), err)
		}
	}
	r, err := encode(o, revision)
	if err != nil {
		return r, refusal(o.Verb.String(), o.object(), err)
	}
	return r, nil
}

// revision asks once for the newest form of a type that the kernel knows.
func (k *Kernel) revision(ctx context.Context, s *netlink.Socket, set Set) (uint8, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r, known := k.revisions[set.Type]; known {
		return r, nil
	}
	r, err := request(cmdType, 0, func(ae *attr.AttributeEncoder) {
		ae.String(attrTypeName, string(set.Type))
		ae.Uint8(attrFamily, addressFamily(set.Family))
	})
	if err != nil {
		return 0, err
	}
	found := uint8(0)
	err = s.Ask(ctx, r, func(m netlink.Message) error {
		if len(m.Data) < genLen {
			return errShort
		}
		ad, err := attr.NewAttributeDecoder(m.Data[genLen:])
		if err != nil {
			return fmt.Errorf("decode: %w", err)
		}
		for ad.Next() {
			if ad.Type() == attrRevision {
				found = ad.Uint8()
			}
		}
		return ad.Err()
	})
	if err != nil {
		return 0, err
	}
	k.revisions[set.Type] = found
	return found, nil
}

// The kernel's errors of its own. Source: linux/netfilter/ipset/ip_set.h.
const (
	errPrivate       = 4096
	errProtocol      = errPrivate + 1
	errFindType      = errPrivate + 2
	errMaxSets       = errPrivate + 3
	errBusy          = errPrivate + 4
	errTypeMismatch  = errPrivate + 6
	errInvalidCIDR   = errPrivate + 8
	errInvalidFamily = errPrivate + 10
	errReferenced    = errPrivate + 12
	errMarks         = errPrivate + 18
	errTypeSpecific  = errPrivate + 256
	errHashFull      = errTypeSpecific
)

// meaning puts an error of the kernel's in words, with what to do about it.
func meaning(errno unix.Errno) (text string, class error) {
	switch errno { //nolint:exhaustive // of all errnos, those that are met here
	case unix.EPERM:
		return "the capability NET_ADMIN is missing", kernel.ErrUnsupported
	case unix.EEXIST:
		return "a set of that name is there with other properties", kernel.ErrConflict
	case unix.ENOENT:
		return "there is no such set", nil
	case unix.EINVAL:
		return "the kernel does not take such a message: load the module ip_set", kernel.ErrUnsupported
	case unix.EAGAIN:
		return "the kernel is growing the set", kernel.ErrBusy
	case unix.ENOMEM, unix.ENOBUFS:
		return "out of memory", kernel.ErrBusy
	case errProtocol:
		return "the kernel speaks another version of the protocol", kernel.ErrUnsupported
	case errFindType:
		return "the kernel lacks this type of set: load its module, ip_set_hash_* or ip_set_bitmap_port",
			kernel.ErrUnsupported
	case errMaxSets:
		return "there are too many sets: raise max_sets of the module ip_set", nil
	case errBusy, errReferenced:
		return "a rule or another set uses it", kernel.ErrConflict
	case errTypeMismatch:
		return "the two sets are of different types", kernel.ErrConflict
	case errInvalidCIDR:
		return "the kernel does not take a network of that length", kernel.ErrInvalid
	case errInvalidFamily:
		return "the type is not for that family", kernel.ErrInvalid
	case errMarks:
		return "the set keeps no marks", kernel.ErrInvalid
	case errHashFull:
		return "the set is full: it has maxelem entries", kernel.ErrInvalid
	}
	if errno < errPrivate {
		return errno.Error(), nil
	}
	return fmt.Sprintf("error %d of the kernel", int(errno)), nil
}

// refusal gives an error its object and its class.
func refusal(op, object string, err error) error {
	if _, told := errors.AsType[*StepError](err); told {
		return err
	}
	step := &StepError{Op: op, Object: object, Err: err}
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		step.Reason, step.Class = meaning(errno)
	}
	return step
}
