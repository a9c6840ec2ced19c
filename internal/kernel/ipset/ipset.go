// Package ipset makes, fills and lists the kernel's IP sets over netlink. It decides nothing: what a set means is for
// the modes whose rules name it.
//
// Read Table first; Kernel is the real thing, Fake the one for tests, and one contract test runs on both. Of the many
// types of set it knows the few that modes use. Sets of others cost no memory and are never changed.
package ipset

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Type says what the entries of a set are made of, by the kernel's name for it. Source: ipset(8).
type Type string

// The types that are known. The network of HashIPPortNet has 1 to 32 (or 128) bits.
const (
	HashIP        Type = "hash:ip"
	HashIPPort    Type = "hash:ip,port"
	HashIPPortNet Type = "hash:ip,port,net"
	BitmapPort    Type = "bitmap:port" // all ports from 0 to 65535
)

// MaxName is the longest name that the kernel takes for a set, in bytes: IPSET_MAXNAMELEN less the zero byte.
const MaxName = 31

// A Set is a set without its entries.
type Set struct {
	Name string
	Type Type
	// Family is that of the addresses; 0 for BitmapPort.
	Family model.Family
	// MaxElem bounds the number of entries; 0 for BitmapPort.
	MaxElem uint32
	// Marks tells that each entry may keep a packet mark (extension skbinfo).
	Marks bool
}

// String gives the set as ipset(8) would make it.
func (s Set) String() string {
	text := s.Name + " " + string(s.Type)
	switch s.Family {
	case model.IPv4:
		text += " family inet"
	case model.IPv6:
		text += " family inet6"
	}
	if s.MaxElem != 0 {
		text += " maxelem " + strconv.FormatUint(uint64(s.MaxElem), 10)
	}
	if s.Marks {
		text += " skbinfo"
	}
	return text
}

// An Entry is one entry of a set, without its mark. The set's type says which fields are used; the others are zero.
type Entry struct {
	Addr  netip.Addr
	Proto model.Protocol
	Port  uint16
	Net   netip.Prefix
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
		parts = append(parts, e.Addr.String())
	}
	switch {
	case e.Proto != 0:
		parts = append(parts, e.Proto.String()+":"+strconv.Itoa(int(e.Port)))
	case e.Port != 0 || !e.Addr.IsValid():
		parts = append(parts, strconv.Itoa(int(e.Port)))
	}
	if e.Net.IsValid() {
		text := e.Net.String()
		if e.Net.IsSingleIP() {
			text = e.Net.Addr().String()
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ",")
}

// A Verb says what an Op does.
type Verb uint8

// Create makes a set; one that is there with the same properties is left alone, and another one of that name is
// ErrConflict. Destroy takes a set away that no rule names; none there is no error. Add puts an entry in with its mark, or
// changes its mark; Remove takes one out; neither minds if it is so already. Swap exchanges the entries and properties
// of two sets of one type, in one moment.
const (
	Create Verb = iota + 1
	Destroy
	Add
	Remove
	Swap
)

// String gives the words of messages.
func (v Verb) String() string {
	return [...]string{"nothing", "create set", "destroy set", "add to set", "remove from set", "swap set"}[v]
}

// An Op is one change. Of Set all but its name is used by Create alone, except that Add and Remove need its type and
// family.
type Op struct {
	Verb  Verb
	Set   Set
	Entry Entry
	// Mark is kept with an added entry, if the set keeps marks.
	Mark uint32
	// With is the name of the other set of Swap.
	With string
}

func (o Op) object() string {
	switch o.Verb {
	case Add, Remove:
		return o.Set.Name + ": " + o.Entry.String()
	case Swap:
		return o.Set.Name + " and " + o.With
	case Create:
		return o.Set.String()
	case Destroy:
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
	// Read gives those of the named sets that are there. A set of a type that is not known has a type and no entries.
	Read(ctx context.Context, names []string) ([]Content, error)

	// Apply carries out changes in their order and tells what became of each: nil, or an error of type *StepError. An Op
	// that fails does not stop the ones after it.
	Apply(ctx context.Context, ops []Op) []error
}

// StepError is how every function here reports a refusal.
type StepError = kernel.StepError

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

// check tells what is wrong with an Op before the kernel sees it; nil if nothing is.
func (o Op) check() error {
	if n := len(o.Set.Name); n == 0 || n > MaxName || strings.ContainsAny(o.Set.Name, "\x00") {
		return fmt.Errorf("a set's name has 1 to %d bytes", MaxName)
	}
	if o.Verb == Swap && (o.With == "" || len(o.With) > MaxName) {
		return fmt.Errorf("a set's name has 1 to %d bytes", MaxName)
	}
	if o.Verb != Add && o.Verb != Remove {
		return nil
	}
	t, e := o.Set.Type, o.Entry
	wantAddr, wantProto, wantNet := t != BitmapPort, t == HashIPPort || t == HashIPPortNet, t == HashIPPortNet
	switch {
	case wantAddr != e.Addr.IsValid(), wantProto != (e.Proto != 0), wantNet != e.Net.IsValid():
		return fmt.Errorf("an entry of %s has another form", t)
	case wantAddr && (e.Addr.Zone() != "" || model.FamilyOf(e.Addr) != o.Set.Family):
		return fmt.Errorf("the set is one of %s", o.Set.Family)
	case wantNet && (e.Net.Bits() == 0 || model.FamilyOf(e.Net.Addr()) != o.Set.Family || e.Net != e.Net.Masked()):
		return fmt.Errorf("the network must be one of %s with at least 1 bit and no host bits", o.Set.Family)
	}
	return nil
}
