package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A rendering is what one Service port puts into the kernel.
type rendering struct {
	servers []server
	members []membership
	// locals are addresses that must become this machine's.
	locals []netip.Addr
}

// A server is a virtual server with its endpoints.
type server struct {
	key       ipvs.Key
	how       ipvs.Properties
	endpoints []forward.Endpoint
}

// A member is one entry of a set, which is named as in IPv4.
type member struct {
	set   string
	entry ipset.Entry
}

// A membership is a member with the mark that its set keeps for it.
type membership struct {
	member
	mark uint32
}

// A service is how a frontend serves its clients: which route each class of them gets.
type service struct {
	pod, node, any forward.Route
}

// serviceOf sorts a frontend's routes. Without a route of their own pods and this machine are treated as everybody is.
func serviceOf(f *forward.Frontend) (service, error) {
	var s service
	for _, r := range f.Routes {
		switch r.From {
		case forward.Pod:
			s.pod = r
		case forward.Node:
			s.node = r
		case forward.Any:
			s.any = r
		}
	}
	if s.any.Do == forward.Pass {
		return s, errors.New("clients from outside have no route")
	}
	if s.pod.Do == forward.Pass {
		s.pod = s.any
	}
	if s.node.Do == forward.Pass {
		s.node = s.any
	}
	return s, nil
}

// splits tells whether pods and this machine get another pool than everybody else.
func (s service) splits() bool { return differs(s.pod, s.any) || differs(s.node, s.any) }

func differs(a, b forward.Route) bool {
	return a.Do != b.Do || a.Do == forward.Forward && a.Pool != b.Pool
}

// inner gives the route of pods and this machine where they are split off.
func (s service) inner() forward.Route {
	if differs(s.pod, s.any) {
		return s.pod
	}
	return s.node
}

// masquerade gives the set that a frontend's clients are masqueraded by; "" if only hairpin connections are, or if the
// set of split frontends says so.
func (s service) masquerade() (string, error) {
	always := func(r forward.Route) bool { return r.Do == forward.Forward && r.SNAT == forward.Always }
	switch {
	case s.splits():
		in := s.inner()
		node := !differs(s.node, in) && always(s.node)
		pod := !differs(s.pod, s.any) || !differs(s.pod, in) && !always(s.pod)
		if always(s.any) || !node || !pod {
			return "", errors.New("pods and this machine must share a pool, and only the latter be masqueraded")
		}
		return "", nil
	case always(s.any) && always(s.node) && always(s.pod):
		return setAll, nil
	case always(s.any) && always(s.node):
		return setNotPods, nil
	case !always(s.any) && !always(s.node) && !always(s.pod):
		return "", nil
	}
	return "", errors.New("who is masqueraded has no form in this mode")
}

// renderer writes one Service port.
type renderer struct {
	opt Options
	ctx *forward.Context
	// table answers whose an address is.
	table *forward.Table
	// scheduler is the port's, sticky the one by which clients stay where the kernel cannot remember them.
	scheduler, sticky Scheduler
	mark              func(forward.Key) uint32
	port              *forward.Port
	out               rendering
}

// render gives what a Service port needs, or the reason why its routes cannot be expressed.
func (r *renderer) render() (rendering, error) {
	var errs []error
	for i := range r.port.Frontends {
		f := &r.port.Frontends[i]
		s, err := serviceOf(f)
		if err == nil {
			err = r.frontend(f, s)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %s: routes %v: %w", f.Kind, f.Addr, f.Routes, err))
		}
	}
	if hc := r.port.HealthCheckNodePort; hc != 0 {
		r.member(setHealth, ipset.Entry{Port: hc})
	}
	return r.out, errors.Join(errs...)
}

// frontend writes one frontend, once for each address that it answers on.
func (r *renderer) frontend(f *forward.Frontend, s service) error {
	masquerade, err := s.masquerade()
	if err != nil {
		return err
	}
	if f.Addr.IsValid() {
		if !r.ctx.IsHost(f.Addr) {
			r.out.locals = append(r.out.locals, f.Addr)
		}
		return r.address(f, s, f.Addr, masquerade)
	}
	for _, a := range r.nodeAddresses() {
		key := forward.Key{Addr: a, Port: f.Port, Proto: r.port.Name.Proto}
		if _, taken := r.table.Owner(key); !taken { // else it is an external address of a Service
			if err := r.address(f, s, a, masquerade); err != nil {
				return err
			}
		}
	}
	return nil
}

// nodeAddresses gives the addresses that node ports answer on. Loopback addresses are left out: the kernel's virtual
// servers cannot lead from one to an endpoint elsewhere.
func (r *renderer) nodeAddresses() []netip.Addr {
	from := r.ctx.NodePorts.Addrs
	if r.ctx.NodePorts.All {
		from = r.ctx.HostAddrs
	}
	var out []netip.Addr
	for _, a := range from {
		if !a.IsLoopback() && model.FamilyOf(a) == r.opt.Family {
			out = append(out, a)
		}
	}
	return out
}

func (r *renderer) member(set string, e ipset.Entry) {
	r.out.members = append(r.out.members, membership{member: member{set, e}})
}

// address writes a frontend at one address.
func (r *renderer) address(f *forward.Frontend, s service, addr netip.Addr, masquerade string) error {
	proto := r.port.Name.Proto
	at := ipset.Entry{Addr: addr, Proto: proto, Port: f.Port}
	r.member(setServed, at)
	if masquerade != "" {
		r.member(masquerade, at)
	}
	if f.Filtered && s.any.Do != forward.Reject {
		r.filter(f, at)
	}
	key := ipvs.Key{Family: r.opt.Family, Proto: proto, Addr: netip.AddrPortFrom(addr, f.Port)}
	switch s.any.Do {
	case forward.Forward:
		r.serve(key, s.any.Pool)
	case forward.Reject:
		r.serve(key, 0) // without endpoints the kernel refuses
	default:
		r.member(setDropped, at)
		r.serve(key, 0) // it keeps the connections from before
	}
	if s.splits() {
		mark := r.mark(forward.Key{Addr: addr, Port: f.Port, Proto: proto})
		if mark == 0 {
			return errors.New("other virtual servers have all packet marks that it could have")
		}
		r.out.members = append(r.out.members, membership{member{setSplit, at}, mark})
		inner := s.inner()
		r.serve(ipvs.Key{Family: r.opt.Family, Mark: mark}, inner.Pool)
		// This machine's own packets bear the mark for masquerading besides.
		r.serve(ipvs.Key{Family: r.opt.Family, Mark: mark | 1<<r.opt.Masquerading.Bit}, inner.Pool)
	}
	return nil
}

// filter admits the sources of a filtered frontend and nobody else.
func (r *renderer) filter(f *forward.Frontend, at ipset.Entry) {
	for _, source := range f.Allow {
		for _, p := range ipset.Networks(source) {
			allowed := at
			allowed.Net = p
			r.member(setAllowed, allowed)
		}
	}
	r.member(setFiltered, at)
}

func (r *renderer) serve(key ipvs.Key, pool forward.Pool) {
	s := server{key: key, how: properties(r.port, key, r.scheduler, r.sticky)}
	if pool != 0 {
		s.endpoints = r.port.Endpoints(pool)
	}
	r.out.servers = append(r.out.servers, s)
}

// properties says how a virtual server of a port serves, given the port's scheduler and the sticky one.
func properties(p *forward.Port, k ipvs.Key, own, stays Scheduler) ipvs.Properties {
	switch {
	case p.Affinity > 0 && k.Mark != 0:
		// A server of a mark that remembers its clients sends them to the port that they dialled, not to the endpoint's.
		// So the client's address decides, and another endpoint takes over from one that drains.
		return ipvs.Properties{Scheduler: stays.Name, Flags: stays.Flags}
	case p.Affinity > 0:
		return ipvs.Properties{
			Scheduler: own.Name, Flags: own.Flags | ipvs.Persistent, Timeout: wholeSeconds(p.Affinity),
		}
	}
	return ipvs.Properties{Scheduler: own.Name, Flags: own.Flags}
}

// wholeSeconds rounds up: the kernel counts in seconds.
func wholeSeconds(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}
