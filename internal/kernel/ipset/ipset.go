// Package ipset makes, fills and lists the kernel's IP sets over netlink. It decides nothing: what a set means is for
// the modes whose rules name it.
//
// Read Table first; Kernel is the real thing, Fake the one for tests, and one contract test runs on both. Of the many
// types of set it knows the few that modes use. Entries of other sets are never read or changed.
package ipset

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Type says what the entries of a set are made of, by the kernel's name for it. Source: ipset(8).
type Type string

// The types that are known. A network has 1 to 32 (or 128) bits; see Networks.
const (
	HashIP        Type = "hash:ip"
	HashIPPort    Type = "hash:ip,port"
	HashIPPortIP  Type = "hash:ip,port,ip"
	HashIPPortNet Type = "hash:ip,port,net"
	HashNet       Type = "hash:net"
	BitmapPort    Type = "bitmap:port" // all ports from 0 to 65535
)

// Types gives those that are known.
func Types() []Type {
	return []Type{HashIP, HashIPPort, HashIPPortIP, HashIPPortNet, HashNet, BitmapPort}
}

// MaxName is the longest name that the kernel takes for a set, in bytes: IPSET_MAXNAMELEN less the zero byte.
const MaxName = 31

// DefaultMaxElem is how many entries the kernel lets a set of a hash type have where nothing else was asked for.
const DefaultMaxElem = 65536

// MaxTimeout is the longest time that the kernel keeps an entry of a set with timeouts. Source: ipset(8).
const MaxTimeout = 2147483 * time.Second

// A Set is a set without its entries: what makes it the same set in the kernel's eyes, so that two can be compared. How
// many buckets a hash has is none of it, as the kernel changes that.
type Set struct {
	Name string
	Type Type
	// Family is that of the addresses; 0 for BitmapPort.
	Family model.Family
	// MaxElem bounds the number of entries; 0 for BitmapPort. Create takes 0 for DefaultMaxElem. The kernel counts
	// exactly only while the hash has up to 1024 buckets; then a few more may fit.
	MaxElem uint32
	// Marks tells that each entry may keep a packet mark (extension skbinfo).
	Marks bool
	// Counters tells that each entry counts its packets (extension counters).
	Counters bool
	// Comments tells that each entry may have a comment (extension comment).
	Comments bool
	// Timeouts tells that entries go by themselves: after Timeout, in whole seconds up to MaxTimeout, or never if that
	// is 0 (extension timeout).
	Timeouts bool
	Timeout  time.Duration
	// Foreign tells of a set that was read that it is one which this package would not make: of another type, with a
	// property that is not known here (as forceadd, a netmask, a range of ports), or with an entry that is not (nomatch,
	// a mark for some bits only, a priority or a queue). Create refuses it. Swapping another set in gets rid of it.
	Foreign bool
}

// String gives the set in the words of ipset(8), as the program saves it, less what Set leaves out.
func (s Set) String() string {
	var b strings.Builder
	b.WriteString(s.Name + " " + string(s.Type))
	switch {
	case s.Family == model.IPv4:
		b.WriteString(" family inet")
	case s.Family == model.IPv6:
		b.WriteString(" family inet6")
	case s.Type == BitmapPort && !s.Foreign:
		b.WriteString(" range 0-65535")
	}
	if s.MaxElem != 0 {
		b.WriteString(" maxelem " + strconv.FormatUint(uint64(s.MaxElem), 10))
	}
	if s.Timeouts {
		b.WriteString(" timeout " + strconv.FormatInt(int64(s.Timeout/time.Second), 10))
	}
	for _, x := range []struct {
		has  bool
		word string
	}{{s.Counters, " counters"}, {s.Comments, " comment"}, {s.Marks, " skbinfo"}, {s.Foreign, " (not all is known)"}} {
		if x.has {
			b.WriteString(x.word)
		}
	}
	return b.String()
}

// An Entry is one entry of a set, without its mark. The set's type says which fields are used; the others are zero.
type Entry struct {
	Addr  netip.Addr
	Proto model.Protocol
	Port  uint16
	// Net is the network of HashNet and HashIPPortNet, and the second address of HashIPPortIP as one of all its bits.
	Net netip.Prefix
}

// Compare orders by address, protocol, port and network.
func (e Entry) Compare(o Entry) int {
	return cmp.Or(e.Addr.Compare(o.Addr), cmp.Compare(e.Proto, o.Proto), cmp.Compare(e.Port, o.Port),
		e.Net.Addr().Compare(o.Net.Addr()), cmp.Compare(e.Net.Bits(), o.Net.Bits()))
}

// String gives the entry as ipset(8) prints it.
func (e Entry) String() string {
	var parts []string
	if e.Addr.IsValid() {
		parts = append(parts, addrText(e.Addr))
	}
	switch {
	case e.Proto != 0:
		parts = append(parts, e.Proto.String()+":"+strconv.Itoa(int(e.Port)))
	case e.Port != 0 || !e.Addr.IsValid() && !e.Net.IsValid():
		parts = append(parts, strconv.Itoa(int(e.Port)))
	}
	if e.Net.IsValid() {
		text := addrText(e.Net.Addr())
		if !e.Net.IsSingleIP() {
			text += "/" + strconv.Itoa(e.Net.Bits())
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ",")
}

// addrText writes an address as inet_ntop(3) does, which ends an IPv6 address of 96 zero bits like one of IPv4.
func addrText(a netip.Addr) string {
	if a.Is6() {
		if b := a.As16(); [12]byte(b[:12]) == [12]byte{} && (b[12] != 0 || b[13] != 0) {
			return "::" + netip.AddrFrom4([4]byte(b[12:])).String()
		}
	}
	return a.String()
}

// A Verb says what an Op does.
type Verb uint8

// Create makes a set; one that is there with the same properties is left alone, and another one of that name is
// ErrConflict, except that the kernel does not look at the family then. Destroy takes a set away that no rule names; none
// there is no error. Add puts an entry in with its mark, or changes its mark; Remove takes one out; neither minds if it is
// so already. Swap exchanges the entries and properties of two sets of one type, in one moment, while rules name them.
// Rename gives a set that no rule names the name With, which must be free. Flush takes all entries out.
const (
	Create Verb = iota + 1
	Destroy
	Add
	Remove
	Swap
	Rename
	Flush
)

// String gives the words of messages.
func (v Verb) String() string {
	words := [...]string{
		"nothing", "create set", "destroy set", "add to set", "remove from set", "swap set", "rename set", "flush set",
	}
	if int(v) >= len(words) {
		return "verb " + strconv.Itoa(int(v))
	}
	return words[v]
}

// An Op is one change. Of Set all but its name is used by Create alone, except that Add and Remove need its type and
// family.
type Op struct {
	Verb  Verb
	Set   Set
	Entry Entry
	// Mark is kept with an added entry, if the set keeps marks.
	Mark uint32
	// With is the name of the other set of Swap, the new name of Rename.
	With string
	// HashSize is how many buckets the hash of a created set has at first; 0 leaves it to the kernel, which takes 1024.
	// The kernel rounds it up to a power of 2 that is at least 64, and has more as the set grows.
	HashSize uint32
	// Strict makes Create and Add refuse what is there already (ErrExists), Destroy and Remove what is not (ErrMissing).
	Strict bool
}

func (o Op) object() string {
	switch o.Verb {
	case Add, Remove:
		return o.Set.Name + ": " + o.Entry.String()
	case Swap:
		return o.Set.Name + " and " + o.With
	case Rename:
		return o.Set.Name + " to " + o.With
	case Create:
		return o.Set.String()
	case Destroy, Flush:
	}
	return o.Set.Name
}

// A Content is a set with its entries, each with its mark.
type Content struct {
	Set
	Entries map[Entry]uint32
}

// Table is the IP sets of a network namespace.
type Table interface {
	// Read gives those of the named sets that are there, in the order of the names. A set of a type that is not known is
	// Foreign and has no entries.
	Read(ctx context.Context, names []string) ([]Content, error)

	// List gives all sets whose names are wanted, sorted by name; nil wants all. The kernel sends no entries for it, so
	// a set is Foreign here only for its type and properties, and others' sets cost neither time nor memory to speak of.
	List(ctx context.Context, want func(name string) bool) ([]Set, error)

	// Apply carries out changes in their order and tells what became of each: nil, or an error of type *StepError. An Op
	// that fails does not stop the ones after it.
	Apply(ctx context.Context, ops []Op) []error

	// Probe finds out what can be used here, and changes nothing. An error of class ErrUnsupported says that there are
	// no IP sets, or no right to use them; any other error that it could not be told.
	Probe(ctx context.Context) (Support, error)
}

// Support is what a kernel can do with IP sets.
type Support struct {
	// Protocol is the version of the protocol that is spoken.
	Protocol uint8
	// Types has the known types that sets can be made of, with the revision that Create takes for them.
	Types map[Type]uint8
}

// Missing gives those of the types that no set can be made of, in their order.
func (s Support) Missing(types ...Type) []Type {
	var out []Type
	for _, t := range types {
		if _, has := s.Types[t]; !has {
			out = append(out, t)
		}
	}
	return out
}

// StepError is how every function here reports a refusal.
type StepError = kernel.StepError

// What errors.Is finds in a StepError of Apply besides its class.
var (
	// ErrExists: the set or the entry is there already, perhaps with other properties.
	ErrExists = errors.New("it is there already")
	// ErrMissing: there is no such set or entry.
	ErrMissing = errors.New("there is none")
	// ErrInUse: a rule or another set uses the set.
	ErrInUse = errors.New("it is in use")
	// ErrFull: the set has as many entries as it may.
	ErrFull = errors.New("the set is full")
)

// Networks gives the networks that stand for one in a set: itself, or the two halves of everything, as the kernel takes
// no network of 0 bits.
func Networks(p netip.Prefix) []netip.Prefix {
	p = p.Masked()
	if p.Bits() != 0 {
		return []netip.Prefix{p}
	}
	var upper netip.Addr
	if p.Addr().Is4() {
		upper = netip.AddrFrom4([4]byte{0x80})
	} else {
		upper = netip.AddrFrom16([16]byte{0x80})
	}
	return []netip.Prefix{netip.PrefixFrom(p.Addr(), 1), netip.PrefixFrom(upper, 1)}
}
