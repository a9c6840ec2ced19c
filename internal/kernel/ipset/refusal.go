package ipset

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
)

// The kernel's errors of its own. Source: linux/netfilter/ipset/ip_set.h, ip_set_hash.h, ip_set_bitmap.h.
const (
	errPrivate       = 4096
	errProtocol      = errPrivate + 1
	errFindType      = errPrivate + 2
	errMaxSets       = errPrivate + 3
	errBusy          = errPrivate + 4
	errSecondName    = errPrivate + 5
	errTypeMismatch  = errPrivate + 6
	errExist         = errPrivate + 7
	errInvalidCIDR   = errPrivate + 8
	errInvalidFamily = errPrivate + 10
	errReferenced    = errPrivate + 12
	errIPv4          = errPrivate + 13
	errIPv6          = errPrivate + 14
	errMarks         = errPrivate + 18

	// These mean something else for each kind of type.
	errTypeSpecific = errPrivate + 256
	errHashFull     = errTypeSpecific
	errHashElem     = errTypeSpecific + 1
)

// A meaning is what an error of the kernel's says in words, with what to do about it.
type meaning struct {
	text  string
	class error
	// also is what else errors.Is finds; nil is nothing.
	also error
}

// explain says what an errno means for an Op.
func (o Op) explain(errno unix.Errno) meaning {
	switch errno { //nolint:exhaustive // of all errnos, those that depend on the Op
	case unix.EEXIST:
		text := "a set of that name is there with other properties: swap the two, or destroy it first"
		if o.Strict {
			text = "a set of that name is there already"
		}
		return meaning{text, kernel.ErrConflict, ErrExists}
	case errSecondName:
		if o.Verb == Rename {
			return meaning{
				"a set of the new name is there already: swap the two, or destroy it first", kernel.ErrConflict, ErrExists,
			}
		}
		return meaning{"there is no set " + o.With + ": create it first", nil, ErrMissing}
	case errExist:
		if o.Verb == Remove {
			return meaning{"the entry is not in the set", nil, ErrMissing}
		}
		return meaning{"the entry is in the set already", kernel.ErrConflict, ErrExists}
	case unix.EINVAL: // the version was agreed on, so there are IP sets
		return meaning{"the kernel does not take this", kernel.ErrInvalid, nil}
	case errProtocol:
		if o.Verb == Add || o.Verb == Remove { // what it needs is not in the message
			return meaning{"the set is of another type or family: swap the right one in", kernel.ErrConflict, nil}
		}
	case errTypeMismatch:
		return meaning{
			"the two sets are of different types or families: destroy one and create it anew", kernel.ErrConflict, nil,
		}
	case errTypeSpecific:
		if o.Set.Type == BitmapPort {
			return meaning{"the set has not all ports: swap one in that has", kernel.ErrConflict, nil}
		}
		return meaning{"the set is full: it has maxelem entries, swap a bigger one in", kernel.ErrInvalid, ErrFull}
	}
	return explain(errno)
}

// explain says what an errno means whatever was tried.
func explain(errno unix.Errno) meaning {
	switch errno { //nolint:exhaustive // of all errnos, those that are met here
	case unix.EPERM:
		return meaning{"the capability NET_ADMIN is missing: run as root, or with it", kernel.ErrUnsupported, nil}
	case unix.EPROTONOSUPPORT:
		return meaning{"the kernel has no nfnetlink: load the module nfnetlink", kernel.ErrUnsupported, nil}
	case unix.EINVAL:
		return meaning{"the kernel has no IP sets: load the module ip_set", kernel.ErrUnsupported, nil}
	case unix.ENOENT:
		return meaning{"there is no such set: create it first", nil, ErrMissing}
	case unix.EAGAIN:
		return meaning{"the kernel did not answer in time, or is growing the set: try again", kernel.ErrBusy, nil}
	case unix.EBUSY:
		return meaning{"the set is being listed or grown: try again", kernel.ErrBusy, nil}
	case unix.ENOMEM, unix.ENOBUFS:
		return meaning{"the kernel is out of memory: try again", kernel.ErrBusy, nil}
	case errProtocol:
		return meaning{"the kernel speaks another version of the protocol", kernel.ErrUnsupported, nil}
	case errFindType:
		return meaning{
			"the kernel lacks this type of set: load its module, ip_set_hash_* or ip_set_bitmap_port",
			kernel.ErrUnsupported, nil,
		}
	case errMaxSets:
		return meaning{"there are too many sets: raise max_sets of the module ip_set", nil, nil}
	case errBusy, errReferenced:
		return meaning{"a rule or another set uses it: remove that first", kernel.ErrConflict, ErrInUse}
	case errInvalidCIDR:
		return meaning{"the kernel does not take a network of that length", kernel.ErrInvalid, nil}
	case errInvalidFamily, errIPv4, errIPv6:
		return meaning{"the set is of another family", kernel.ErrInvalid, nil}
	case errMarks:
		return meaning{"the set keeps no marks: swap one in that does", kernel.ErrInvalid, nil}
	}
	if errno < errPrivate {
		return meaning{errno.Error(), nil, nil}
	}
	return meaning{fmt.Sprintf("error %d of the kernel's IP sets", int(errno)), nil, nil}
}

// invalid reports what is wrong with a request that the kernel was not asked.
func invalid(op, object string, err error) error {
	return &StepError{Op: op, Object: object, Reason: err.Error(), Class: kernel.ErrInvalid}
}

// refusal gives an error its object and its class.
func (o Op) refusal(err error) error { return refusal(o.Verb.String(), o.object(), err, o.explain) }

func refusal(op, object string, err error, explain func(unix.Errno) meaning) error {
	if _, told := errors.AsType[*StepError](err); told {
		return err
	}
	step := &StepError{Op: op, Object: object, Err: err}
	if errors.Is(err, netlink.ErrDisturbed) {
		step.Class = kernel.ErrBusy
	}
	errno, ok := errors.AsType[unix.Errno](err)
	if !ok {
		return step
	}
	m := explain(errno)
	step.Reason, step.Class = m.text, m.class
	if m.also != nil {
		step.Err = fmt.Errorf("%w: %w", m.also, err)
	}
	return step
}
