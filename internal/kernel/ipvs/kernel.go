package ipvs

import (
	"context"
	"errors"
	"fmt"

	attr "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
	"github.com/turnout-proxy/turnout/internal/model"
)

// attempts is how often a listing is started anew when the kernel says that it was disturbed.
const attempts = 5

// Kernel is the kernel's table. Its methods act in the network namespace of the calling thread.
type Kernel struct {
	// family is the number of the generic netlink family.
	family uint16
}

var _ Table = (*Kernel)(nil)

// Open asks the kernel whether it has IPVS, which makes it load the module if it can. The error is of class
// kernel.ErrUnsupported if it has none.
func Open(ctx context.Context) (*Kernel, error) {
	s, err := netlink.Dial(unix.NETLINK_GENERIC)
	if err != nil {
		return nil, open(err)
	}
	defer s.Close()
	ae := attr.NewAttributeEncoder()
	ae.String(unix.CTRL_ATTR_FAMILY_NAME, familyName)
	data, err := ae.Encode()
	if err != nil {
		return nil, open(err)
	}
	k := &Kernel{}
	r := netlink.Request{
		Kind: unix.GENL_ID_CTRL, Data: append([]byte{unix.CTRL_CMD_GETFAMILY, version, 0, 0}, data...),
	}
	err = s.Ask(ctx, r, func(m netlink.Message) error {
		if len(m.Data) < genLen {
			return errMalformed
		}
		ad, err := attr.NewAttributeDecoder(m.Data[genLen:])
		if err != nil {
			return fmt.Errorf("decode: %w", err)
		}
		for ad.Next() {
			if ad.Type() == unix.CTRL_ATTR_FAMILY_ID {
				k.family = ad.Uint16()
			}
		}
		return ad.Err()
	})
	if err != nil {
		return nil, open(err)
	}
	return k, nil
}

func open(err error) error {
	step := &StepError{Op: "open", Object: "the kernel's virtual servers", Err: err}
	if errors.Is(err, unix.ENOENT) {
		step.Class, step.Reason = kernel.ErrUnsupported, "the kernel has no IPVS: load the module ip_vs"
	}
	return step
}

// List implements Table.
func (k *Kernel) List(ctx context.Context, family model.Family) ([]Server, error) {
	s, err := netlink.Dial(unix.NETLINK_GENERIC)
	if err != nil {
		return nil, listing(err)
	}
	defer s.Close()
	servers, err := k.servers(ctx, s, family)
	if err != nil {
		return nil, listing(err)
	}
	for i := range servers {
		if servers[i].Destinations, err = k.destinations(ctx, s, servers[i].Key); err != nil {
			return nil, listing(err)
		}
	}
	return servers, nil
}

func listing(err error) error {
	step := &StepError{Op: "list", Object: "virtual servers", Err: err}
	if errors.Is(err, unix.EPERM) {
		step.Class, step.Reason = kernel.ErrUnsupported, "the capability NET_ADMIN is missing"
	}
	return step
}

func (k *Kernel) servers(ctx context.Context, s *netlink.Socket, family model.Family) ([]Server, error) {
	r, err := request(k.family, cmdGetServer, func(*attr.AttributeEncoder) {})
	if err != nil {
		return nil, err
	}
	var out []Server
	err = steady(func() error {
		out = out[:0]
		return s.Dump(ctx, r, func(m netlink.Message) error {
			server, err := decodeServer(m.Data)
			if err == nil && server.Family == family {
				out = append(out, server)
			}
			return err
		})
	})
	return out, err
}

// steady repeats a listing that was disturbed; the last one counts as it is.
func steady(list func() error) error {
	for n := 1; ; n++ {
		if err := list(); !errors.Is(err, netlink.ErrDisturbed) || n == attempts {
			return err
		}
	}
}

// Destinations implements Table.
func (k *Kernel) Destinations(ctx context.Context, key Key) ([]Destination, error) {
	s, err := netlink.Dial(unix.NETLINK_GENERIC)
	if err != nil {
		return nil, listing(err)
	}
	defer s.Close()
	out, err := k.destinations(ctx, s, key)
	if err != nil {
		return nil, listing(err)
	}
	return out, nil
}

func (k *Kernel) destinations(ctx context.Context, s *netlink.Socket, key Key) ([]Destination, error) {
	r, err := request(k.family, cmdGetDest, func(ae *attr.AttributeEncoder) {
		nested(ae, attrServer, func(ae *attr.AttributeEncoder) { putKey(ae, key) })
	})
	if err != nil {
		return nil, err
	}
	var out []Destination
	err = steady(func() error {
		out = out[:0]
		return s.Dump(ctx, r, func(m netlink.Message) error {
			d, err := decodeDestination(m.Data, key.Family)
			if err == nil {
				out = append(out, d)
			}
			return err
		})
	})
	return out, err
}

// Apply implements Table.
func (k *Kernel) Apply(ctx context.Context, ops []Op) []error {
	out := make([]error, len(ops))
	if len(ops) == 0 {
		return out
	}
	s, err := netlink.Dial(unix.NETLINK_GENERIC)
	if err != nil {
		for i, o := range ops {
			out[i] = refusal(o.Verb, o.object(), err, "", nil)
		}
		return out
	}
	defer s.Close()
	var requests []netlink.Request
	var of []int // the op that each request is for
	for i, o := range ops {
		r, err := netlink.Request{}, o.check()
		if err == nil {
			r, err = encode(k.family, o)
		}
		if err != nil {
			out[i] = refusal(o.Verb, o.object(), nil, err.Error(), kernel.ErrInvalid)
			continue
		}
		requests, of = append(requests, r), append(of, i)
	}
	outcome, _ := s.Batch(ctx, requests) // whatever ended it stands in the outcomes, too
	for n, err := range outcome {
		if err != nil {
			out[of[n]] = explain(ops[of[n]], err)
		}
	}
	return out
}

// explain says what an errno means for an Op.
func explain(o Op, err error) error {
	add := o.Verb == AddServer || o.Verb == AddDestination
	scheduled := o.Verb == AddServer || o.Verb == EditServer
	switch {
	case errors.Is(err, unix.EEXIST) && add:
		return refusal(o.Verb, o.object(), ErrExists, "", kernel.ErrConflict)
	case errors.Is(err, unix.ENOENT) && scheduled:
		reason := "the kernel lacks the scheduler " + o.Properties.Scheduler + ": load the module ip_vs_" + o.Properties.Scheduler
		return refusal(o.Verb, o.object(), ErrScheduler, reason, kernel.ErrUnsupported)
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOENT):
		return refusal(o.Verb, o.object(), ErrMissing, "", nil)
	case errors.Is(err, unix.EPERM):
		return refusal(o.Verb, o.object(), err, "the capability NET_ADMIN is missing", kernel.ErrUnsupported)
	case errors.Is(err, unix.EAFNOSUPPORT):
		return refusal(o.Verb, o.object(), err, "the kernel has IPVS without IPv6", kernel.ErrUnsupported)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE):
		return refusal(o.Verb, o.object(), err, "", kernel.ErrInvalid)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBUSY), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		return refusal(o.Verb, o.object(), err, "", kernel.ErrBusy)
	}
	return refusal(o.Verb, o.object(), err, "", nil)
}
