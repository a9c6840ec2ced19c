// Package ipvs makes and lists the kernel's virtual servers (IPVS) over generic netlink. It decides nothing: which
// servers there are, and which of them are ours, is for the modes to say.
//
// Read Table first, then Engine, which is about IPVS as a whole; Kernel is the real thing, Fake the one for tests, and one
// contract test runs on both. Changes go out in batches, each with its own answer. Nothing here removes what it was not
// told to: there is no way to flush.
package ipvs

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"time"

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
	// Timeout is how long a client without connections stays at its destination, if Persistent is set: whole seconds, at
	// most maxTimeout. It is 0 otherwise.
	Timeout time.Duration
	// Prefix is how many leading bits of an address make one client, if Persistent is set: 1 to 31 in IPv4, 1 to 127 in
	// IPv6. 0 stands for all of them. A listing gives OddPrefix for a server of others with a mask that has no length.
	Prefix uint8
}

// OddPrefix stands for a mask that is no prefix, or an empty one, which the kernel takes in IPv4.
const OddPrefix = 255

// maxTimeout is the longest time that every kernel keeps. It counts ticks in 32 bits, up to 1000 a second, and of a longer
// time it takes the remainder without a word.
const maxTimeout = math.MaxUint32 / 1000 * time.Second

// String gives the properties as ipvsadm(8) names them.
func (p Properties) String() string {
	text := p.Scheduler
	if p.Flags&Persistent != 0 {
		text += " persistent " + strconv.Itoa(int(p.Timeout/time.Second))
	}
	if p.Prefix != 0 {
		text += " prefix " + strconv.Itoa(int(p.Prefix))
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

// A Method is how packets come to a destination. Source: linux/ip_vs.h, IP_VS_CONN_F_FWD_MASK.
type Method uint8

// Masquerade translates the address, Tunnel wraps the packet, Route sends it as it is. The others can be met at servers of
// others, but not asked for: the kernel takes any number without a word.
const (
	Masquerade Method = 0
	LocalNode  Method = 1
	Tunnel     Method = 2
	Route      Method = 3
	Bypass     Method = 4
)

// String gives the words of dumps and messages.
func (m Method) String() string {
	names := [...]string{"masquerade", "local", "tunnel", "route", "bypass"}
	if int(m) < len(names) {
		return names[m]
	}
	return "method-" + strconv.Itoa(int(m))
}

// A Destination is one real server of a virtual server.
type Destination struct {
	// Addr may be of the other family than the server's if Method is Tunnel.
	Addr netip.AddrPort
	// Weight is the share of new connections; 0 gets none. A listing gives 65535 for what is more.
	Weight uint16
	Method Method
	// Upper is the number of connections from which on it gets no new ones, 0 for no bound; Lower the number below which
	// it gets some again, at most Upper, 0 for three quarters of that. Both are at most maxThreshold.
	Upper, Lower uint32
	// Active and Inactive count the kernel's connections to it, Persistent its clients that stay.
	Active, Inactive, Persistent uint32
}

// String gives the address, the weight, and of the rest what is not the default, but no counts.
func (d Destination) String() string {
	text := d.Addr.String() + " weight " + strconv.Itoa(int(d.Weight))
	if d.Method != Masquerade {
		text += " " + d.Method.String()
	}
	if d.Upper != 0 || d.Lower != 0 {
		text += fmt.Sprintf(" upper %d lower %d", d.Upper, d.Lower)
	}
	return text
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
	names := [...]string{
		"do nothing", "add virtual server", "change virtual server", "remove virtual server", "add destination",
		"change destination", "remove destination",
	}
	if int(v) < len(names) {
		return names[v]
	}
	return names[0]
}

// An Op is one change. Properties are used by AddServer and EditServer, To by those of destinations, and what follows by
// AddDestination and EditDestination; it means what it means in Destination.
type Op struct {
	Verb       Verb
	Key        Key
	Properties Properties
	To         netip.AddrPort
	Weight     uint16
	Method     Method
	// Upper and Lower are set to what is given, 0 included.
	Upper, Lower uint32
}

func (o Op) object() string {
	switch o.Verb {
	case AddServer, EditServer:
		return o.Key.String() + " " + o.Properties.String()
	case AddDestination, EditDestination, RemoveDestination:
		return o.Key.String() + " -> " + o.To.String()
	case RemoveServer:
	}
	return o.Key.String()
}

// Table is the virtual servers of a network namespace.
type Table interface {
	// List gives the servers of a family with their destinations, whoever made them, sorted by Key and by address. It
	// costs one message, one for each server, and one more if a server has no destination. A server that vanishes
	// meanwhile is left out. The kernel does not tell when its table changes while it is listed: one that is changed by
	// others may then be missing, and is found the next time.
	List(ctx context.Context, family model.Family) ([]Server, error)

	// Servers gives them without destinations, for one message.
	Servers(ctx context.Context, family model.Family) ([]Server, error)

	// Destinations gives those of one server, sorted by address, and none if there is no such server.
	Destinations(ctx context.Context, k Key) ([]Destination, error)

	// Apply carries out changes in their order and tells what became of each: nil, or an error of type *StepError. An Op
	// that fails does not stop the ones after it. Each costs one message, and up to 500 go out with one system call.
	Apply(ctx context.Context, ops []Op) []error

	// Connections hands over the connections of both families until yield says false, in no order and in memory that
	// does not grow with their number. What comes or goes meanwhile may be missing or be there twice.
	Connections(ctx context.Context, yield func(Connection) bool) error
}
