package ipset

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A form says which fields the entries of a type have.
type form struct {
	addr, proto, port, net bool
	// single tells that the network is one address.
	single bool
}

// form gives that of a type; ok is false if the type is not known.
func (t Type) form() (f form, ok bool) {
	switch t {
	case HashIP:
		return form{addr: true}, true
	case HashIPPort:
		return form{addr: true, proto: true, port: true}, true
	case HashIPPortIP:
		return form{addr: true, proto: true, port: true, net: true, single: true}, true
	case HashIPPortNet:
		return form{addr: true, proto: true, port: true, net: true}, true
	case HashNet:
		return form{net: true}, true
	case BitmapPort:
		return form{port: true}, true
	}
	return form{}, false
}

// check tells what is wrong with an Op before the kernel sees it; nil if nothing is.
func (o Op) check() error {
	if err := checkName(o.Set.Name); err != nil {
		return err
	}
	switch o.Verb {
	case Create:
		return o.checkCreate()
	case Add:
		if o.Entry.Addr.IsValid() && o.Entry.Addr.IsUnspecified() {
			// By type and version, kernels take it, or refuse it in different ways.
			return errors.New("no set keeps an address of zeros")
		}
		return o.Set.checkEntry(o.Entry)
	case Remove:
		return o.Set.checkEntry(o.Entry)
	case Swap, Rename:
		return checkName(o.With)
	case Destroy, Flush:
		return nil
	}
	return fmt.Errorf("there is no verb %d", o.Verb)
}

func checkName(name string) error {
	if len(name) == 0 || len(name) > MaxName || strings.ContainsRune(name, 0) {
		return fmt.Errorf("a set's name has 1 to %d bytes, none of them 0", MaxName)
	}
	return nil
}

func (o Op) checkCreate() error {
	s := o.Set
	if _, known := s.Type.form(); !known {
		return fmt.Errorf("the type of set %q is not one that is known here", s.Type)
	}
	bitmap := s.Type == BitmapPort
	switch {
	case s.Foreign:
		return errors.New("not all of its properties are known here")
	case bitmap && (s.Family != 0 || s.MaxElem != 0 || o.HashSize != 0):
		return fmt.Errorf("a set of type %s has no family, maxelem or hashsize", s.Type)
	case !bitmap && s.Family != model.IPv4 && s.Family != model.IPv6:
		return fmt.Errorf("a set of type %s needs a family", s.Type)
	case !s.Timeouts && s.Timeout != 0:
		return errors.New("a timeout is given for a set without timeouts")
	case s.Timeout < 0 || s.Timeout > MaxTimeout || s.Timeout%time.Second != 0:
		return fmt.Errorf("a timeout is in whole seconds from 0 to %d", MaxTimeout/time.Second)
	}
	return nil
}

// checkEntry tells whether an entry has the form of the set's type and is of its family.
func (s Set) checkEntry(e Entry) error {
	want, known := s.Type.form()
	has := form{addr: e.Addr.IsValid(), proto: e.Proto != 0, port: want.port, net: e.Net.IsValid(), single: want.single}
	switch {
	case !known:
		return fmt.Errorf("the type of set %q is not one that is known here", s.Type)
	case has != want, !want.port && e.Port != 0:
		return fmt.Errorf("an entry of %s has another form", s.Type)
	case want.addr && !s.holds(e.Addr):
		return fmt.Errorf("the set is one of %s", s.Family)
	case !want.net:
		return nil
	case want.single && (!e.Net.IsSingleIP() || !s.holds(e.Net.Addr())):
		return fmt.Errorf("the second address must be one of %s", s.Family)
	case e.Net.Bits() == 0 || !s.holds(e.Net.Addr()) || e.Net != e.Net.Masked():
		return fmt.Errorf("the network must be one of %s with at least 1 bit and no host bits", s.Family)
	}
	return nil
}

// holds tells whether an address is of the set's family. One of IPv4 that is written in IPv6 is one of IPv6.
func (s Set) holds(a netip.Addr) bool {
	return a.Zone() == "" && (s.Family == model.IPv4 && a.Is4() || s.Family == model.IPv6 && a.Is6())
}
