package forward

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Packet is the first packet of a connection, as the node sees it before any translation.
type Packet struct {
	Src, Dst netip.AddrPort
	Proto    model.Protocol
	// In is the name of the interface it came in on; empty for a packet that this machine sends itself.
	In string
}

// An Outcome is what a table does with a packet. Where the endpoint is chosen at random it holds every possible choice.
type Outcome struct {
	Do     Verdict
	Reason Reason
	// Port and Frontend tell which frontend decided; Port is zero when Do is Pass.
	Port     PortName
	Frontend Frontend
	// From is the class of client whose route was taken; 0 if no route was.
	From SourceClass
	// Choices are the endpoints that the connection may go to, in the pool's order.
	Choices []Choice
}

// A Choice is one endpoint that a connection may be sent to.
type Choice struct {
	Endpoint netip.AddrPort
	// SNAT tells that the endpoint sees this node's address instead of the client's.
	SNAT bool
}

// Lookup says what a table does with a packet: it is the meaning of a table, which every data plane must realise.
//
// The exact address of a frontend wins over a node port. A filter is looked at before the routes, except that a client
// who would be rejected is rejected in any case, which opens nothing. Session affinity is not looked at: it narrows the
// choice to one of those given.
func Lookup(t *Table, p Packet) Outcome {
	p.Src, p.Dst = unmap(p.Src), unmap(p.Dst)
	port, f := t.find(p)
	if f == nil {
		return Outcome{Do: Pass}
	}
	o := Outcome{Do: Drop, Port: port.Name, Frontend: *f}
	route := t.Context.route(f, p)
	filtered := f.Filtered && !slices.ContainsFunc(f.Allow, func(a netip.Prefix) bool { return a.Contains(p.Src.Addr()) })
	if filtered && route.Do != Reject {
		o.Reason = SourceNotAllowed
		return o
	}
	if route.Do == Pass {
		return o
	}
	o.Do, o.Reason, o.From = route.Do, route.Reason, route.From
	if o.Do != Forward {
		return o
	}
	for _, ep := range port.Endpoints(route.Pool) {
		src := p.Src.Addr()
		// A loopback source cannot leave the machine, so it is replaced even where the client's address is kept.
		snat := route.SNAT == Always || ep.Addr() == src || src.IsLoopback()
		// What comes in for an endpoint on this machine itself is delivered here: it is never sent on, so never masked.
		if p.In != "" && t.Context.IsHost(ep.Addr()) {
			snat = false
		}
		o.Choices = append(o.Choices, Choice{Endpoint: ep.AddrPort, SNAT: snat})
	}
	return o
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// find gives the frontend that a packet is for, or nil.
func (t *Table) find(p Packet) (*Port, *Frontend) {
	dst := p.Dst.Addr()
	if !dst.IsValid() || model.FamilyOf(dst) != t.Context.Family {
		return nil, nil
	}
	key := Key{Addr: dst, Port: p.Dst.Port(), Proto: p.Proto}
	name, ok := t.index[key]
	if !ok && t.Context.servesNodePorts(dst) {
		key.Addr = netip.Addr{}
		name, ok = t.index[key]
	}
	if !ok {
		return nil, nil
	}
	port := t.ports[name]
	for i := range port.Frontends {
		if f := &port.Frontends[i]; f.Key(name.Proto) == key {
			return port, f
		}
	}
	return nil, nil
}

// servesNodePorts tells whether an address is in the scope of node ports.
func (c *Context) servesNodePorts(dst netip.Addr) bool {
	switch {
	case !c.NodePorts.All:
		_, ok := slices.BinarySearchFunc(c.NodePorts.Addrs, dst, netip.Addr.Compare)
		return ok
	case dst.IsLoopback():
		return c.NodePorts.Loopback
	}
	return c.IsHost(dst)
}

// IsHost tells whether an address is this machine's. All loopback addresses are, also those that no interface lists.
func (c *Context) IsHost(a netip.Addr) bool {
	_, ok := slices.BinarySearchFunc(c.HostAddrs, a, netip.Addr.Compare)
	return ok || a.IsLoopback()
}

// route gives the first route that fits the packet's source, or a zero one.
func (c *Context) route(f *Frontend, p Packet) Route {
	for _, r := range f.Routes {
		switch r.From {
		case Pod:
			if c.Detector.matches(p) {
				return r
			}
		case Node:
			if c.IsHost(p.Src.Addr()) {
				return r
			}
		case Any:
			return r
		}
	}
	return Route{}
}

// matches tells whether a packet comes from a pod. A packet that the machine sends itself came in on no interface.
func (d Detector) matches(p Packet) bool {
	switch {
	case d.CIDR.IsValid():
		return d.CIDR.Contains(p.Src.Addr())
	case d.Interface != "":
		return p.In == d.Interface
	case d.InterfacePrefix != "":
		return strings.HasPrefix(p.In, d.InterfacePrefix)
	}
	return false
}

// Allows tells whether a data plane that does got does what o asks for: the same verdict, the same reason if got has
// one, and no endpoint or SNAT that is not among o's choices.
func (o Outcome) Allows(got Outcome) bool {
	if got.Do != o.Do || got.Reason != NoReason && got.Reason != o.Reason {
		return false
	}
	if o.Do == Forward && len(got.Choices) == 0 {
		return false
	}
	for _, c := range got.Choices {
		if !slices.Contains(o.Choices, c) {
			return false
		}
	}
	return true
}

// String gives one line:
//
//	pass
//	forward 10.60.1.11:8080 10.60.2.11:8080 snat=no
//	forward 10.60.1.11:8080(snat) 10.60.2.11:8080 snat=mixed
//	reject reason=NoEndpoints
//
// snat is "always" or "no" if it is the same for all endpoints. A reason that is not known is left out.
func (o Outcome) String() string {
	var b strings.Builder
	b.WriteString(o.Do.String())
	snat := o.snat()
	for _, c := range o.Choices {
		b.WriteByte(' ')
		b.WriteString(c.Endpoint.String())
		if c.SNAT && snat == snatMixed {
			b.WriteString(snatMark)
		}
	}
	if len(o.Choices) > 0 {
		b.WriteString(" " + snatField + snat)
	}
	if o.Reason != NoReason {
		b.WriteString(" " + reasonField + o.Reason.String())
	}
	return b.String()
}

// The words of an outcome's text form.
const (
	snatField   = "snat="
	snatNo      = "no"
	snatAlways  = "always"
	snatMixed   = "mixed"
	snatMark    = "(snat)"
	reasonField = "reason="
)

func (o Outcome) snat() string {
	n := 0
	for _, c := range o.Choices {
		if c.SNAT {
			n++
		}
	}
	switch n {
	case 0:
		return snatNo
	case len(o.Choices):
		return snatAlways
	}
	return snatMixed
}

// ParseOutcome reads what Outcome.String writes. Port, Frontend and From are not part of the text.
func ParseOutcome(s string) (Outcome, error) {
	words := strings.Fields(s)
	if len(words) == 0 {
		return Outcome{}, fmt.Errorf("outcome is empty; it starts with pass, forward, reject or drop")
	}
	do, err := parseVerdict(words[0])
	if err != nil {
		return Outcome{}, fmt.Errorf("outcome %q: %w", s, err)
	}
	o := Outcome{Do: do}
	snat := ""
	for _, w := range words[1:] {
		if err := o.parseWord(w, &snat); err != nil {
			return Outcome{}, fmt.Errorf("outcome %q: %w", s, err)
		}
	}
	if (do == Forward) != (len(o.Choices) > 0) {
		return Outcome{}, fmt.Errorf("outcome %q: forward, and nothing else, goes with endpoints", s)
	}
	if got := o.snat(); snat == snatMixed && got != snatMixed || do != Forward && snat != "" {
		return Outcome{}, fmt.Errorf("outcome %q: snat=%s does not fit its endpoints", s, snat)
	}
	if snat == snatAlways {
		for i := range o.Choices {
			o.Choices[i].SNAT = true
		}
	}
	return o, nil
}

// parseWord takes one word after the verdict.
func (o *Outcome) parseWord(w string, snat *string) error {
	if reason, ok := strings.CutPrefix(w, reasonField); ok {
		r, err := parseReason(reason)
		o.Reason = r
		return err
	}
	if mode, ok := strings.CutPrefix(w, snatField); ok {
		if mode != snatNo && mode != snatAlways && mode != snatMixed {
			return fmt.Errorf("snat %q is not no, always or mixed", mode)
		}
		*snat = mode
		return nil
	}
	addr, marked := strings.CutSuffix(w, snatMark)
	ep, err := netip.ParseAddrPort(addr)
	if err != nil {
		return fmt.Errorf("endpoint %q is not address:port", addr)
	}
	o.Choices = append(o.Choices, Choice{Endpoint: ep, SNAT: marked})
	return nil
}

// parse finds the value whose text is s among a closed list of values.
func parse[T fmt.Stringer](what, s string, values ...T) (T, error) {
	var zero T
	words := make([]string, 0, len(values))
	for _, v := range values {
		if v.String() == s {
			return v, nil
		}
		words = append(words, v.String())
	}
	return zero, fmt.Errorf("%s %q is not one of %s", what, s, strings.Join(words, ", "))
}

func parseVerdict(s string) (Verdict, error) { return parse("verdict", s, Pass, Forward, Reject, Drop) }

func parseReason(s string) (Reason, error) {
	return parse("reason", s, NoEndpoints, NoLocalEndpoints, SourceNotAllowed)
}
