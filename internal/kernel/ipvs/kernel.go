package ipvs

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync/atomic"

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
	// family is the number of the generic netlink family, which the kernel gives out when IPVS is loaded.
	family uint16
	sent   atomic.Int64
}

var (
	_ Table  = (*Kernel)(nil)
	_ Engine = (*Kernel)(nil)
)

// Open asks the kernel whether it has IPVS. The question makes the kernel load the module by its alias
// net-pf-16-proto-16-family-IPVS, if there is one. The error is of class kernel.ErrUnsupported if it has none. What Open
// gives is of no use once the module was unloaded.
func Open(ctx context.Context) (*Kernel, error) {
	k := &Kernel{}
	ae := attr.NewAttributeEncoder()
	ae.String(unix.CTRL_ATTR_FAMILY_NAME, familyName)
	data, err := ae.Encode()
	if err != nil {
		return nil, opening(err)
	}
	r := netlink.Request{
		Kind: unix.GENL_ID_CTRL, Data: append([]byte{unix.CTRL_CMD_GETFAMILY, version, 0, 0}, data...),
	}
	err = k.session(func(s *netlink.Socket) error {
		return s.Ask(ctx, r, func(m netlink.Message) error {
			return walk(m.Data, func(typ uint16, b []byte) {
				if typ == unix.CTRL_ATTR_FAMILY_ID {
					k.family = uint16(number(b))
				}
			})
		})
	})
	if err == nil && k.family == 0 {
		err = errMalformed
	}
	if err != nil {
		return nil, opening(err)
	}
	return k, nil
}

func opening(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return &StepError{
			Op: "open", Object: "the kernel's virtual servers", Err: err, Class: kernel.ErrUnsupported,
			Reason: "the kernel has no IPVS: load the module ip_vs, or use another mode",
		}
	}
	return failure("open", "the kernel's virtual servers", err)
}

// Sent counts the messages that were sent, answers not included.
func (k *Kernel) Sent() int { return int(k.sent.Load()) }

// session runs do with a socket of the calling thread's network namespace.
func (k *Kernel) session(do func(*netlink.Socket) error) error {
	s, err := netlink.Dial(unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	defer func() {
		k.sent.Add(int64(s.Sent()))
		s.Close()
	}()
	return do(s)
}

// List implements Table.
func (k *Kernel) List(ctx context.Context, family model.Family) ([]Server, error) {
	var out []Server
	err := k.session(func(s *netlink.Socket) (err error) {
		out, err = gather(
			func() ([]Server, error) { return k.servers(ctx, s, family) },
			func(key Key) ([]Destination, error) { return k.destinations(ctx, s, key) })
		return err
	})
	if err != nil {
		return nil, failure("list", "virtual servers of "+family.String(), err)
	}
	return out, nil
}

// gather lists servers and then the destinations of each. The kernel gives no destinations, and no error, for a server that
// vanished in between. So if one has none, the servers are listed again, and those that are gone are left out.
func gather(servers func() ([]Server, error), destinations func(Key) ([]Destination, error)) ([]Server, error) {
	out, err := servers()
	if err != nil {
		return nil, err
	}
	empty := false
	for i := range out {
		if out[i].Destinations, err = destinations(out[i].Key); err != nil {
			return nil, err
		}
		empty = empty || len(out[i].Destinations) == 0
	}
	if !empty {
		return out, nil
	}
	now, err := servers()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(out, func(s Server) bool {
		_, there := slices.BinarySearchFunc(now, s.Key, func(n Server, k Key) int { return n.Compare(k) })
		return !there
	}), nil
}

// Servers implements Table.
func (k *Kernel) Servers(ctx context.Context, family model.Family) ([]Server, error) {
	var out []Server
	err := k.session(func(s *netlink.Socket) (err error) {
		out, err = k.servers(ctx, s, family)
		return err
	})
	if err != nil {
		return nil, failure("list", "virtual servers of "+family.String(), err)
	}
	return out, nil
}

// servers gives those of a family, sorted. The kernel's place in a listing shifts when others change the table, so that
// one may come twice.
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
	slices.SortFunc(out, func(a, b Server) int { return a.Compare(b.Key) })
	return slices.CompactFunc(out, func(a, b Server) bool { return a.Key == b.Key }), err
}

// steady repeats a listing that was disturbed. Kernels up to 6.12 never say so of virtual servers.
func steady(list func() error) error {
	for n := 1; ; n++ {
		if err := list(); !errors.Is(err, netlink.ErrDisturbed) || n == attempts {
			return err
		}
	}
}

// Destinations implements Table.
func (k *Kernel) Destinations(ctx context.Context, key Key) ([]Destination, error) {
	var out []Destination
	err := k.session(func(s *netlink.Socket) (err error) {
		out, err = k.destinations(ctx, s, key)
		return err
	})
	if err != nil {
		return nil, failure("list", "destinations of "+key.String(), err)
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
	slices.SortFunc(out, func(a, b Destination) int { return a.Addr.Compare(b.Addr) })
	return slices.CompactFunc(out, func(a, b Destination) bool { return a.Addr == b.Addr }), err
}

// Apply implements Table.
func (k *Kernel) Apply(ctx context.Context, ops []Op) []error {
	out := make([]error, len(ops))
	var requests []netlink.Request
	var of []int // the op that each request is for
	for i, o := range ops {
		r, err := netlink.Request{}, o.check()
		if err == nil {
			r, err = encode(k.family, o)
		}
		if err != nil {
			out[i] = invalid(o, err)
			continue
		}
		requests, of = append(requests, r), append(of, i)
	}
	if len(requests) == 0 {
		return out
	}
	outcome := make([]error, len(requests))
	err := k.session(func(s *netlink.Socket) error {
		outcome, _ = s.Batch(ctx, requests) // whatever ended it stands in the outcomes, too
		return nil
	})
	for n := range outcome {
		if err != nil { // there was no socket
			outcome[n] = err
		}
		if outcome[n] != nil {
			out[of[n]] = explain(ops[of[n]], outcome[n])
		}
	}
	return out
}

// Connections implements Table.
func (k *Kernel) Connections(ctx context.Context, yield func(Connection) bool) error {
	const object = "connections of virtual servers"
	f, err := os.Open(connectionFile)
	if err != nil {
		return failure("list", object, err)
	}
	defer func() { _ = f.Close() }() // it was only read
	if err := (&connectionReader{}).read(ctx, f, yield); err != nil {
		return failure("list", object, err)
	}
	return nil
}

// Info implements Engine.
func (k *Kernel) Info(ctx context.Context) (Info, error) {
	var out Info
	err := k.ask(ctx, cmdGetInfo, func(*attr.AttributeEncoder) {}, func(data []byte) (err error) {
		out, err = decodeInfo(data)
		return err
	})
	if err != nil {
		return out, failure("ask for", "the version of IPVS", err)
	}
	return out, nil
}

// TryScheduler implements Engine.
func (k *Kernel) TryScheduler(ctx context.Context, name string) error { return try(ctx, k, name) }

// Timeouts implements Engine.
func (k *Kernel) Timeouts(ctx context.Context) (Timeouts, error) {
	var out Timeouts
	err := k.ask(ctx, cmdGetConfig, func(*attr.AttributeEncoder) {}, func(data []byte) (err error) {
		out, err = decodeTimeouts(data)
		return err
	})
	if err != nil {
		return out, failure("ask for", timeoutsObject, err)
	}
	return out, nil
}

const timeoutsObject = "the timeouts of IPVS"

// SetTimeouts implements Engine.
func (k *Kernel) SetTimeouts(ctx context.Context, t Timeouts) error {
	if err := t.check(); err != nil {
		return &StepError{Op: "set", Object: timeoutsObject, Reason: err.Error(), Class: kernel.ErrInvalid}
	}
	err := k.ask(ctx, cmdSetConfig, func(ae *attr.AttributeEncoder) { putTimeouts(ae, t) }, func([]byte) error { return nil })
	if err != nil {
		return failure("set", timeoutsObject, err)
	}
	return nil
}

// ask sends one message and hands over the data of its answer.
func (k *Kernel) ask(ctx context.Context, cmd uint8, fill func(*attr.AttributeEncoder), read func([]byte) error) error {
	r, err := request(k.family, cmd, fill)
	if err != nil {
		return err
	}
	return k.session(func(s *netlink.Socket) error {
		return s.Ask(ctx, r, func(m netlink.Message) error { return read(m.Data) })
	})
}
