package answer

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A Trace says what happens to the first packet of a connection, and why.
type Trace struct {
	// Source is one of the From constants.
	Source string `json:"source"`
	Mode   string `json:"mode,omitempty"`
	Node   string `json:"node,omitempty"`
	Packet Packet `json:"packet"`
	// Verdict is forward, reject, drop or pass; Reason is in the words of the forwarding table.
	Verdict string `json:"verdict"`
	Reason  string `json:"reason,omitempty"`
	// Explanation is the verdict in plain words.
	Explanation string `json:"explanation"`
	// The rest is empty where it does not apply, or is not known.
	Service  string `json:"service,omitempty"`
	Kind     string `json:"kind,omitempty"`
	Frontend string `json:"frontend,omitempty"`
	// Client is the class of client that the packet's source is in: pod, node or any.
	Client string `json:"client,omitempty"`
	// Policy is the traffic policy whose endpoints are used.
	Policy string `json:"policy,omitempty"`
	// Filtered and Allow are the sources that may come, as in a Row.
	Filtered        bool     `json:"filtered,omitempty"`
	Allow           []string `json:"allow,omitempty"`
	AffinitySeconds int      `json:"affinitySeconds,omitempty"`
	Choices         []Choice `json:"choices,omitempty"`
	// Steps are the kernel objects that the packet meets.
	Steps []Step `json:"steps,omitempty"`
	// Disagreement is set if the kernel objects do something else than what is wanted.
	Disagreement string `json:"disagreement,omitempty"`
}

// A Packet is what was asked about.
type Packet struct {
	Src   string `json:"src"`
	Dst   string `json:"dst"`
	Proto string `json:"proto"`
	In    string `json:"in,omitempty"`
}

// A Choice is one endpoint that the connection may go to.
type Choice struct {
	Endpoint string  `json:"endpoint"`
	Share    float64 `json:"share"`
	// SNAT tells that the endpoint sees this node's address instead of the client's.
	SNAT bool `json:"snat"`
	// Local tells that the endpoint is on this node.
	Local bool `json:"local,omitempty"`
}

// A Step is one kernel object that the packet meets.
type Step struct {
	Where string `json:"where"`
	What  string `json:"what"`
}

// elsewhere stands for the interface of a packet that came in, when nobody said on which. No interface has this name, as
// an interface's name in rules may not contain it.
const elsewhere = "?"

// Placed settles where a packet comes from if the interface was not given: it is this machine's own if its source is one
// of the machine's addresses.
func Placed(p forward.Packet, host []netip.Addr) forward.Packet {
	if p.In == "" && !p.Src.Addr().IsLoopback() && !slices.Contains(host, p.Src.Addr()) {
		p.In = elsewhere
	}
	return p
}

// PacketOf writes a packet down.
func PacketOf(p forward.Packet) Packet {
	src := p.Src.String()
	if p.Src.Port() == 0 {
		src = p.Src.Addr().String()
	}
	in := p.In
	if in == elsewhere {
		in = ""
	}
	return Packet{Src: src, Dst: p.Dst.String(), Proto: p.Proto.String(), In: in}
}

// Explain says what a table does with a packet.
func Explain(t *forward.Table, p forward.Packet) Trace {
	o := forward.Lookup(t, p)
	tr := explain(p, o)
	if o.Do == forward.Pass {
		return tr
	}
	tr.Service, tr.Kind, tr.Frontend = o.Port.Service(), o.Frontend.Kind.String(), FrontendText(&o.Frontend)
	tr.Filtered, tr.Allow = o.Frontend.Filtered, texts(o.Frontend.Allow)
	if o.From != 0 {
		tr.Client = o.From.String()
	}
	port := t.Port(o.Port)
	if port == nil {
		return tr
	}
	tr.AffinitySeconds = seconds(port.Affinity)
	for _, r := range o.Frontend.Routes {
		if r.From == o.From && o.Do == forward.Forward {
			tr.Policy = policyText(r.Pool)
			markLocal(tr.Choices, port.Endpoints(r.Pool))
			break
		}
	}
	tr.Explanation = sentence(p, o, tr.Service, tr.Allow)
	return tr
}

// Witness adds what the kernel objects of a mode do with the packet, and whether that is what the trace says.
func (tr *Trace) Witness(wanted forward.Outcome, bt backend.Trace) {
	tr.addSteps(bt)
	if !wanted.Allows(bt.Outcome) {
		tr.Disagreement = fmt.Sprintf("the rules do %q where %q is wanted", bt.Outcome, wanted)
	}
}

// FromObjects says what the kernel objects of a mode do with a packet, where nothing else is known. The rows are those of
// the same objects.
func FromObjects(p forward.Packet, bt backend.Trace, rows []Row) Trace {
	tr := explain(p, bt.Outcome)
	tr.addSteps(bt)
	if bt.Outcome.Do != forward.Pass && tr.name(rows) {
		tr.Explanation = sentence(p, bt.Outcome, tr.Service, tr.Allow)
	}
	return tr
}

func (tr *Trace) addSteps(bt backend.Trace) {
	for _, s := range bt.Steps {
		tr.Steps = append(tr.Steps, Step(s))
	}
}

func explain(p forward.Packet, o forward.Outcome) Trace {
	tr := Trace{
		Packet: PacketOf(p), Verdict: o.Do.String(), Reason: reasonText(o.Reason),
		Explanation: sentence(p, o, "", nil),
	}
	for _, c := range o.Choices {
		tr.Choices = append(tr.Choices, Choice{
			Endpoint: c.Endpoint.String(), Share: 1 / float64(len(o.Choices)),
			SNAT: c.SNAT,
		})
	}
	return tr
}

func markLocal(choices []Choice, pool []forward.Endpoint) {
	local := map[string]bool{}
	for _, e := range pool {
		local[e.AddrPort.String()] = e.Local
	}
	for i := range choices {
		choices[i].Local = local[choices[i].Endpoint]
	}
}

func policyText(p forward.Pool) string {
	if p == forward.LocalPool {
		return "Local"
	}
	return "Cluster"
}

// sentence puts an outcome into plain words. Without a Service's name it speaks of "the Service".
func sentence(p forward.Packet, o forward.Outcome, service string, allow []string) string {
	if service == "" {
		service = "the Service"
	}
	switch o.Do {
	case forward.Pass:
		return fmt.Sprintf("%s/%s is not an address of a Service on this node, so the packet is left alone", p.Dst, p.Proto)
	case forward.Forward:
		return forwarded(o.Choices)
	case forward.Reject, forward.Drop:
	}
	end := "the packet is dropped and the client waits until it gives up"
	if o.Do == forward.Reject {
		end = "the client is refused at once"
	}
	switch o.Reason {
	case forward.NoEndpoints:
		return fmt.Sprintf("%s has no usable endpoint anywhere in the cluster: %s", service, end)
	case forward.NoLocalEndpoints:
		return fmt.Sprintf("%s has usable endpoints, but none on this node, and its traffic policy is Local: %s",
			service, end)
	case forward.SourceNotAllowed:
		return fmt.Sprintf("%s is not in the source ranges of %s%s: %s", p.Src.Addr(), service, inBrackets(allow), end)
	case forward.NoReason:
	}
	return strings.ToUpper(end[:1]) + end[1:]
}

func inBrackets(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return " (" + strings.Join(list, ", ") + ")"
}

func forwarded(choices []forward.Choice) string {
	masked := 0
	for _, c := range choices {
		if c.SNAT {
			masked++
		}
	}
	seen := "which sees the client's own address"
	switch {
	case masked == len(choices):
		seen = "which sees this node's address as the client"
	case masked > 0:
		seen = "which sees the client's own address, unless it is the client itself"
	}
	if len(choices) == 1 {
		return fmt.Sprintf("the connection goes to %s, %s", choices[0].Endpoint, seen)
	}
	return fmt.Sprintf("the connection goes to one of %d endpoints, each as likely as the others, %s", len(choices), seen)
}

// ParsePacket reads what trace is asked: a source "ADDR" or "ADDR:PORT", and a destination "ADDR:PORT" or
// "ADDR:PORT/PROTO"; an IPv6 address with a port stands in brackets.
func ParsePacket(src, dst, in string) (forward.Packet, error) {
	p := forward.Packet{Proto: model.TCP, In: in}
	dst, proto, found := strings.Cut(dst, "/")
	if found {
		var err error
		if p.Proto, err = model.ParseProtocol(proto); err != nil || proto == "" {
			return p, fmt.Errorf("protocol %q of the destination is not tcp, udp or sctp", proto)
		}
	}
	var err error
	if p.Dst, err = netip.ParseAddrPort(dst); err != nil || p.Dst.Port() == 0 {
		return p, fmt.Errorf("destination %q is not ADDRESS:PORT, as in 10.96.0.1:443 or [fd00::1]:443", dst)
	}
	p.Dst = netip.AddrPortFrom(p.Dst.Addr().Unmap(), p.Dst.Port())
	if p.Src, err = parseSource(src); err != nil {
		return p, err
	}
	if p.Src.Addr().Is4() != p.Dst.Addr().Is4() {
		return p, fmt.Errorf("source %s and destination %s are of different IP families", p.Src.Addr(), p.Dst.Addr())
	}
	return p, nil
}

func parseSource(s string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil && a.Zone() == "" {
		return netip.AddrPortFrom(a.Unmap(), 0), nil
	}
	ap, err := netip.ParseAddrPort(s)
	if err != nil {
		return ap, fmt.Errorf("source %s is not ADDRESS or ADDRESS:PORT", strconv.Quote(s))
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

// name fills in the frontend from a node's rows: the one with the very address, else the node port.
func (tr *Trace) name(rows []Row) bool {
	port := tr.Packet.Dst[strings.LastIndexByte(tr.Packet.Dst, ':'):]
	for _, frontend := range []string{tr.Packet.Dst, "*" + port} {
		for i := range rows {
			if r := &rows[i]; r.Proto == tr.Packet.Proto && r.Frontend == frontend {
				tr.Service, tr.Kind, tr.Frontend = r.Service, r.Kind, r.Frontend
				tr.Filtered, tr.Allow, tr.AffinitySeconds = r.Filtered, r.Allow, r.AffinitySeconds
				return true
			}
		}
	}
	return false
}
