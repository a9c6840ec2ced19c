package forward_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The world of these tests: this node is na (10.20.0.11, pods 10.60.1.0/24, zone z1), nb and nc are others; pods are in
// 10.60.0.0/16, cluster IPs in 10.70.0.0/16, load balancer addresses in 192.0.2.0/24, outside clients in
// 198.51.100.0/24. IPv6 has the same in fd20, fd60, fd70, fd88 and fd99.

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func ips(list ...string) []netip.Addr {
	out := make([]netip.Addr, len(list))
	for i, s := range list {
		out[i] = ip(s)
	}
	return out
}

func cidrs(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

func name(s string) model.Name {
	namespace, n, _ := strings.Cut(s, "/")
	return model.Name{Namespace: namespace, Name: n}
}

func portName(s string) forward.PortName {
	n, err := forward.ParsePortName(s)
	if err != nil {
		panic(err)
	}
	return n
}

// config is that of node na with pods told by address.
func config() forward.Config {
	return forward.Config{
		Family: model.IPv4, NodeName: "na", ClusterCIDRs: cidrs("10.60.0.0/16", "fd60::/16"),
	}
}

func config6() forward.Config {
	c := config()
	c.Family = model.IPv6
	return c
}

func host() forward.Host {
	return forward.Host{Addrs: ips("127.0.0.1", "10.20.0.11", "::1", "fd20::11")}
}

func nodeNA() *model.Node {
	return &model.Node{
		Name: "na", Zone: "z1", Addresses: ips("10.20.0.11", "fd20::11"), PodCIDRs: cidrs("10.60.1.0/24", "fd60:1::/64"),
	}
}

// tcp80 is the one port of most Services here.
func tcp80() []model.ServicePort { return []model.ServicePort{{Protocol: model.TCP, Port: 80}} }

// slice gives a slice shop/web-1 of shop/web with port 8080.
func slice(endpoints ...model.Endpoint) *model.EndpointSlice {
	return &model.EndpointSlice{
		Name: name("shop/web-1"), Service: "web", Family: model.IPv4,
		Ports: []model.SlicePort{{Protocol: model.TCP, Port: 8080}}, Endpoints: endpoints,
	}
}

func readyOn(node, addr string) model.Endpoint {
	return model.Endpoint{Addr: ip(addr), Ready: true, Serving: true, Node: node}
}

func terminatingOn(node, addr string) model.Endpoint {
	return model.Endpoint{Addr: ip(addr), Serving: true, Terminating: true, Node: node}
}

func goneOn(node, addr string) model.Endpoint {
	return model.Endpoint{Addr: ip(addr), Terminating: true, Node: node}
}

func notReadyOn(node, addr string) model.Endpoint {
	return model.Endpoint{Addr: ip(addr), Serving: true, Node: node}
}

// snapshot holds the given Services, slices and Node.
func snapshot(objects ...any) *model.Snapshot {
	s := model.NewSnapshot()
	var d model.Dirty
	for _, o := range objects {
		s.Apply(event(o), &d)
	}
	return s
}

func event(o any) model.Event {
	switch o := o.(type) {
	case *model.Service:
		return model.Event{Service: o}
	case *model.EndpointSlice:
		return model.Event{Slice: o}
	case *model.Node:
		return model.Event{Node: o}
	}
	panic("not an object")
}

func build(cfg forward.Config, objects ...any) *forward.Table {
	t, _ := forward.Build(cfg, snapshot(objects...), host())
	return t
}

// wantPort compares the text of a port; nothing wanted means that there is no such port.
func wantPort(t *testing.T, table *forward.Table, port, want string) {
	t.Helper()
	got := ""
	if p := table.Port(portName(port)); p != nil {
		got = p.String()
	}
	if diff := cmp.Diff(trimLines(want), trimLines(got)); diff != "" {
		t.Errorf("port %s (-want +got):\n%s", port, diff)
	}
}

// trimLines takes indentation and empty lines away.
func trimLines(s string) []string {
	var lines []string
	for line := range strings.SplitSeq(s, "\n") {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// packet reads "SRC DST:PORT[/PROTO] [IN]".
func packet(s string) forward.Packet {
	words := strings.Fields(s)
	dst, proto, _ := strings.Cut(words[1], "/")
	p := forward.Packet{Src: netip.AddrPortFrom(ip(words[0]), 40000), Dst: netip.MustParseAddrPort(dst), Proto: model.TCP}
	if proto != "" {
		var err error
		if p.Proto, err = model.ParseProtocol(proto); err != nil {
			panic(err)
		}
	}
	if len(words) > 2 {
		p.In = words[2]
	}
	return p
}

// wantOutcomes compares what Lookup says about packets.
func wantOutcomes(t *testing.T, table *forward.Table, want map[string]string) {
	t.Helper()
	got := map[string]string{}
	for p := range want {
		got[p] = forward.Lookup(table, packet(p)).String()
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s\ntable:\n%s", diff, table)
	}
}

// wantFindings compares "Kind object: Reason" of all findings, and that each message is one line.
func wantFindings(t *testing.T, got []model.Finding, want ...string) {
	t.Helper()
	var lines []string
	for _, f := range got {
		lines = append(lines, f.Kind+" "+f.Object+": "+f.Reason)
		if f.Message == "" || strings.Contains(f.Message, "\n") || f.Severity == 0 {
			t.Errorf("finding %q has no severity, or no message of one line", f)
		}
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
}

const hour = time.Hour
