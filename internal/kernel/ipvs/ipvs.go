// Package ipvs makes and lists the kernel's virtual servers (IPVS) over generic netlink. It decides nothing: which
// servers there are, and which of them are ours, is for the modes to say.
//
// Read Table first; Kernel is the real thing, Fake the one for tests, and one contract test runs on both. Changes go out
// in batches, each with its own answer.
package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Key is what makes a virtual server unique: a protocol and an address with its port, or a packet mark.
type Key struct {
	Family model.Family
	Proto  model.Protocol
	Addr   netip.AddrPort
	// Mark is not 0 for a server that takes the packets with that mark, whatever their address. Proto and Addr are then
	// zero. The kernel looks for a packet's mark first.
	Mark uint32
}

// Compare orders servers by address and port, then those of marks.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Family, o.Family), cmp.Compare(k.Mark, o.Mark), k.Addr.Compare(o.Addr),
		cmp.Compare(k.Proto, o.Proto))
}

// String gives "10.70.0.1:80/tcp" or "mark 0x1234 (IPv4)".
func (k Key) String() string {
	if k.Mark != 0 {
		return "mark 0x" + strconv.FormatUint(uint64(k.Mark), 16) + " (" + k.Family.String() + ")"
	}
	return k.Addr.String() + "/" + k.Proto.String()
}

// Flags are properties of a server. Source: linux/ip_vs.h.
type Flags uint32

// Persistent: a client stays at its destination. OnePacket: each packet is scheduled by itself (UDP). What the other
// three mean depends on the scheduler: for sh and mh the first is fallback to another destination when the chosen one
// is unavailable, the second that the client's port counts.
const (
	Persistent Flags = 0x1
	OnePacket  Flags = 0x4
	Scheduler1 Flags = 0x8
	Scheduler2 Flags = 0x10
	Scheduler3 Flags = 0x20

	allFlags = Persistent | OnePacket | Scheduler1 | Scheduler2 | Scheduler3
)

// Properties are how a virtual server serves.
type Properties struct {
	// Scheduler is the kernel's name for the way of choosing a destination, as "rr".
	Scheduler string
	Flags     Flags
	// Timeout is how long a client without connections stays at its destination, in whole seconds, if Persistent is set.
	Timeout time.Duration
}

// String gives the properties as ipvsadm(8) names them.
func (p Properties) String() string {
	text := p.Scheduler
	if p.Flags&Persistent != 0 {
		text += " persistent " + strconv.Itoa(int(p.Timeout/time.Second))
	}
	if rest := p.Flags &^ Persistent; rest != 0 {
		text += " flags 0x" + strconv.FormatUint(uint64(rest), 16)
	}
	return text
}

// A Server is a virtual server with its destinations.
type Server struct {
	Key
	Properties
	Destinations []Destination
}

// A Method is how packets come to a destination.
type Method uint8

// Masquerade translates the address; the others are met at servers of others only.
const (
	Masquerade Method = 0
	LocalNode  Method = 1
	Tunnel     Method = 2
	Route      Method = 3
	Bypass     Method = 4
)

// A Destination is one real server of a virtual server.
type Destination struct {
	Addr   netip.AddrPort
	Weight uint16 // 0 gets no new connections
	Method Method
	// Active and Inactive count the kernel's connections to it, Persistent its clients that stay.
	Active, Inactive, Persistent uint32
}

// A Verb says what an Op does.
type Verb uint8

// AddServer and AddDestination fail with ErrExists if it is there, the other verbs with ErrMissing if it is not.
// RemoveServer takes the destinations along.
const (
	AddServer Verb = iota + 1
	EditServer
	RemoveServer
	AddDestination
	EditDestination
	RemoveDestination
)

// String gives the words of messages.
func (v Verb) String() string {
	return [...]string{
		"nothing", "add virtual server", "change virtual server", "remove virtual server", "add destination",
		"change destination", "remove destination",
	}[v]
}

// An Op is one change. Properties are used by AddServer and EditServer, To and Weight by those of destinations; the
// method is always Masquerade.
type Op struct {
	Verb       Verb
	Key        Key
	Properties Properties
	To         netip.AddrPort
	Weight     uint16
}

func (o Op) object() string {
	switch o.Verb {
	case AddServer, EditServer:
		return o.Key.String() + " " + o.Properties.String()
	case RemoveServer:
		return o.Key.String()
	case AddDestination, EditDestination, RemoveDestination:
	}
	return o.Key.String() + " -> " + o.To.String()
}

// Table is the virtual servers of a network namespace.
type Table interface {
	// List gives the servers of a family with their destinations, whoever made them.
	List(ctx context.Context, family model.Family) ([]Server, error)

	// Destinations gives those of one server, none if there is no such server.
	Destinations(ctx context.Context, k Key) ([]Destination, error)

	// Apply carries out changes in their order and tells what became of each: nil, or an error of type *StepError. An Op
	// that fails does not stop the ones after it.
	Apply(ctx context.Context, ops []Op) []error
}

// What an Op may meet besides the classes of package kernel.
var (
	// ErrExists: there is such a server or destination.
	ErrExists = errors.New("it is there already")
	// ErrMissing: there is no such server or destination.
	ErrMissing = errors.New("there is none")
	// ErrScheduler: the kernel does not know the scheduler and could not load it.
	ErrScheduler = errors.New("the kernel lacks the scheduler")
)

// StepError is how every function here reports a refusal.
type StepError = kernel.StepError

// check tells what is wrong with an Op before the kernel sees it; nil if nothing is.
func (o Op) check() error {
	k := o.Key
	switch {
	case k.Family != model.IPv4 && k.Family != model.IPv6:
		return errors.New("the family is missing")
	case k.Mark != 0 && (k.Addr.IsValid() || k.Proto != 0):
		return errors.New("a server has a mark or an address")
	case k.Mark == 0 && (k.Proto == 0 || k.Addr.Port() == 0 || !k.Addr.IsValid() || model.FamilyOf(k.Addr.Addr()) != k.Family):
		return fmt.Errorf("a server needs a protocol and an address of %s with a port", k.Family)
	}
	switch o.Verb {
	case AddServer, EditServer:
		p := o.Properties
		persistent := p.Flags&Persistent != 0
		if p.Flags&^allFlags != 0 || persistent != (p.Timeout >= time.Second) || p.Timeout%time.Second != 0 {
			return errors.New("flags and timeout do not fit")
		}
		if p.Scheduler == "" || len(p.Scheduler) > maxScheduler {
			return fmt.Errorf("a scheduler's name has 1 to %d bytes", maxScheduler)
		}
	case AddDestination, EditDestination, RemoveDestination:
		a := o.To.Addr()
		if !a.IsValid() || model.FamilyOf(a) != k.Family || a.Zone() != "" || o.To.Port() == 0 {
			return fmt.Errorf("a destination needs an address of %s with a port", k.Family)
		}
	case RemoveServer:
	}
	return nil
}

// maxScheduler is the longest name of a scheduler: IP_VS_SCHEDNAME_MAXLEN less the zero byte.
const maxScheduler = 15

// refusal gives an error its object, its class and what to do about it.
func refusal(v Verb, object string, err error, reason string, class error) error {
	return &StepError{Op: v.String(), Object: object, Reason: reason, Class: class, Err: err}
}
