package ipvs

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// The kernel takes much that cannot work, and says nothing: any protocol, any mask, a server for all ports that keeps no
// client, destinations with methods that do not exist. So an Op is checked before it is sent, by the Fake and by the
// Kernel alike. A listing still gives whatever others made.

// maxScheduler is the longest name of a scheduler: IP_VS_SCHEDNAME_MAXLEN less the zero byte.
const maxScheduler = 15

// maxThreshold is the highest that Linux 6.1 and 6.12 take.
const maxThreshold = math.MaxInt32

// check tells what is wrong with an Op; nil if nothing is.
func (o Op) check() error {
	if err := o.Key.check(); err != nil {
		return err
	}
	switch o.Verb {
	case AddServer, EditServer:
		return o.Properties.check(o.Key)
	case AddDestination, EditDestination:
		if err := o.checkTo(); err != nil {
			return err
		}
		return o.checkMethod()
	case RemoveDestination:
		return o.checkTo()
	case RemoveServer:
		return nil
	}
	return errors.New("there is no such change")
}

func (k Key) check() error {
	if k.Family != model.IPv4 && k.Family != model.IPv6 {
		return errors.New("the family is missing")
	}
	if k.Mark != 0 {
		if k.Addr != (netip.AddrPort{}) || k.Proto != 0 {
			return errors.New("a server has a mark or an address, not both")
		}
		return nil
	}
	switch k.Proto {
	case model.TCP, model.UDP, model.SCTP:
	default:
		return fmt.Errorf("%s is not TCP, UDP or SCTP, or a mark is missing", k.Proto)
	}
	if !plain(k.Addr.Addr()) || model.FamilyOf(k.Addr.Addr()) != k.Family {
		return fmt.Errorf("a server of %s needs an address of that family, without a zone", k.Family)
	}
	return nil
}

// plain tells whether an address has one of the two forms that go to the kernel. Of an IPv4 address in the form of IPv6 it
// would read the first four bytes, which are zero.
func plain(a netip.Addr) bool { return a.IsValid() && !a.Is4In6() && a.Zone() == "" }

func (p Properties) check(k Key) error {
	if err := checkScheduler(p.Scheduler); err != nil {
		return err
	}
	udp := k.Mark != 0 || k.Proto == model.UDP
	persistent := p.Flags&Persistent != 0
	switch {
	case p.Flags&^allFlags != 0:
		return fmt.Errorf("flags 0x%x are unknown", uint32(p.Flags&^allFlags))
	case p.Flags&OnePacket != 0 && !udp:
		return errors.New("scheduling each packet by itself is for UDP")
	case !persistent && (p.Timeout != 0 || p.Prefix != 0):
		return errors.New("a timeout and a prefix need the flag Persistent")
	case persistent && (p.Timeout < time.Second || p.Timeout > maxTimeout || p.Timeout%time.Second != 0):
		return fmt.Errorf("the timeout %s is not 1 to %d whole seconds", p.Timeout, maxTimeout/time.Second)
	case int(p.Prefix) >= bits(k.Family):
		return fmt.Errorf("the prefix %d is not below %d; 0 stands for all bits", p.Prefix, bits(k.Family))
	case k.Mark == 0 && k.Addr.Port() == 0 && !persistent:
		return errors.New("a server for all ports needs the flag Persistent")
	}
	return nil
}

// bits is the length of an address.
func bits(f model.Family) int {
	if f == model.IPv4 {
		return 32
	}
	return 128
}

// checkScheduler refuses what cannot be the end of a module's name. A server with "none" would answer nobody.
func checkScheduler(name string) error {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
	if name == "" || name == "none" || len(name) > maxScheduler || strings.Trim(name, allowed) != "" {
		return fmt.Errorf("the scheduler %.20q is not a name of 1 to %d letters and digits", name, maxScheduler)
	}
	return nil
}

// checkTo tells what is wrong with the address of a destination. The kernel refuses most of these, too, but not with the
// address of another family when it is to be removed.
func (o Op) checkTo() error {
	a := o.To.Addr()
	switch {
	case !plain(a):
		return errors.New("a destination needs an address, without a zone")
	case a.IsUnspecified(), a.IsMulticast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}), a.Is6() && a.IsLinkLocalUnicast():
		return fmt.Errorf("%s is not the address of one machine", a)
	case o.To.Port() == 0 && o.Key.Mark == 0 && o.Key.Addr.Port() != 0:
		return errors.New("only at a server of a mark or for all ports can a destination keep the port")
	}
	return nil
}

func (o Op) checkMethod() error {
	switch {
	case o.Method != Masquerade && o.Method != Tunnel && o.Method != Route:
		return fmt.Errorf("the method %s cannot be asked for", o.Method)
	case o.Method != Tunnel && model.FamilyOf(o.To.Addr()) != o.Key.Family:
		return fmt.Errorf("a destination of another family than %s can only be reached through a tunnel", o.Key.Family)
	case o.Lower > o.Upper:
		return fmt.Errorf("the lower threshold %d is above the upper one %d", o.Lower, o.Upper)
	case o.Upper > maxThreshold:
		return fmt.Errorf("the upper threshold %d is above %d", o.Upper, maxThreshold)
	}
	return nil
}
