package backendtest

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// clientPort is the source port of packets that are only traced.
const clientPort = 40000

// parsePacket reads the arguments of the command "packet": SRC DST:PORT/PROTO [in=IFACE].
func parsePacket(args []string) (forward.Packet, error) {
	p := forward.Packet{Proto: model.TCP}
	dst := args[1]
	if at := strings.LastIndex(dst, "/"); at >= 0 {
		proto, err := model.ParseProtocol(dst[at+1:])
		if err != nil {
			return p, fmt.Errorf("packet to %s: %w", dst, err)
		}
		p.Proto, dst = proto, dst[:at]
	}
	to, err := netip.ParseAddrPort(dst)
	if err != nil {
		return p, fmt.Errorf("packet to %s: want ADDRESS:PORT/PROTOCOL", args[1])
	}
	p.Dst = to
	src, err := clientAddr(args[0], to.Addr().Is4())
	if err != nil {
		return p, fmt.Errorf("packet from %s: %w", args[0], err)
	}
	if src.Is4() != to.Addr().Is4() {
		return p, fmt.Errorf("packet from %s to %s: two families", src, to)
	}
	p.Src, p.In = netip.AddrPortFrom(src, clientPort), naturalInterface(src)
	if len(args) > 2 {
		in, ok := strings.CutPrefix(args[2], "in=")
		if !ok {
			return p, fmt.Errorf("packet: %q is not in=INTERFACE", args[2])
		}
		p.In = in
	}
	return p, nil
}

// naturalInterface tells on which link of node na packets of an address come in: its own on none, those of its pods on
// the pod's link, all others on the link to the other nodes.
func naturalInterface(a netip.Addr) string {
	if a.IsLoopback() || slices.Contains(nodeAddrs(), a) {
		return ""
	}
	if node, host := podNumbers(a); node == 1 {
		return "pod-" + podName(node, host)
	}
	return "eth0"
}

// podNumbers tells which node's pod an address is of and its number there; 0 if it is not a pod's.
func podNumbers(a netip.Addr) (node, host int) {
	if a.Is4() {
		b := a.As4()
		if b[0] == 10 && b[1] == 60 && b[2] < 128 {
			return int(b[2]), int(b[3])
		}
		return 0, 0
	}
	// Both parts are written as if they were decimal: fd60:1::21 is pod 21 of node 1.
	parts := strings.Split(a.String(), ":")
	if len(parts) == 4 && parts[0] == "fd60" && parts[2] == "" {
		node, err := strconv.Atoi(parts[1])
		host, err2 := strconv.Atoi(parts[3])
		if err == nil && err2 == nil && node < 100 {
			return node, host
		}
	}
	return 0, 0
}

// podName gives the lab's name of a pod.
func podName(node, host int) string {
	switch host {
	case 11:
		return fmt.Sprintf("s%d", node)
	case 21:
		return fmt.Sprintf("c%d", node)
	}
	return fmt.Sprintf("p%dx%d", node, host)
}

// An expectation is what a script says of a packet.
type expectation struct {
	outcome forward.Outcome
	// count replaces the choices where there are too many to be listed: "forward 5000 endpoints snat=no".
	count int
	snat  bool
}

func parseExpectation(lines []string) (expectation, error) {
	text := strings.Join(lines, " ")
	words := strings.Fields(text)
	if len(words) == 4 && words[0] == "forward" && words[2] == "endpoints" {
		n, err := strconv.Atoi(words[1])
		if err != nil || n < 1 {
			return expectation{}, fmt.Errorf("outcome %q: %q is no number of endpoints", text, words[1])
		}
		if words[3] != "snat=no" && words[3] != "snat=always" {
			return expectation{}, fmt.Errorf("outcome %q: want snat=no or snat=always at its end", text)
		}
		return expectation{outcome: forward.Outcome{Do: forward.Forward}, count: n, snat: words[3] == "snat=always"}, nil
	}
	o, err := forward.ParseOutcome(text)
	if err != nil {
		return expectation{}, err // quotes the outcome
	}
	return expectation{outcome: o}, nil
}

// met tells whether the oracle's answer is what the script says, exactly.
func (e expectation) met(o forward.Outcome) bool {
	if e.count == 0 {
		return o.Do == e.outcome.Do && o.Reason == e.outcome.Reason && sameChoices(o.Choices, e.outcome.Choices)
	}
	if o.Do != forward.Forward || len(o.Choices) != e.count {
		return false
	}
	return !slices.ContainsFunc(o.Choices, func(c forward.Choice) bool { return c.SNAT != e.snat })
}

func (e expectation) String() string {
	if e.count == 0 {
		return e.outcome.String()
	}
	return fmt.Sprintf("forward %d endpoints snat=%v", e.count, e.snat)
}

// sameChoices compares choices as sets.
func sameChoices(a, b []forward.Choice) bool {
	set := map[forward.Choice]bool{}
	for _, c := range a {
		set[c] = true
	}
	for _, c := range b {
		if !set[c] {
			return false
		}
	}
	other := map[forward.Choice]bool{}
	for _, c := range b {
		other[c] = true
	}
	return len(set) == len(other)
}

// agrees tells whether what objects do is what a table says: the same verdict, a reason that does not contradict, and
// all of the choices, no other.
func agrees(got, want forward.Outcome) bool {
	return want.Allows(got) && sameChoices(got.Choices, want.Choices)
}

// short prints an outcome on a line that stays readable with thousands of endpoints.
func short(o forward.Outcome) string {
	const most = 8
	if len(o.Choices) <= most {
		return o.String()
	}
	n := len(o.Choices)
	o.Choices = o.Choices[:most]
	return fmt.Sprintf("%s (and %d more)", o, n-most)
}
