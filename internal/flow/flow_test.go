package flow

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Two endpoints serve, the first of them is not chosen for new connections. The node port answers on two addresses.
const table = `context IPv4 node=na zone=z1
  pods cidr=10.60.0.0/16
  host 10.20.0.11 127.0.0.1 192.168.7.1
  node-ports all

port net/dns:udp/udp
  frontend cluster-ip 10.70.0.53:53
    from any forward cluster snat=hairpin
  frontend external-ip 203.0.113.53:53
    from any forward cluster snat=always
  frontend load-balancer 192.0.2.20:53
    from any forward cluster snat=always
  frontend node-port *:30053
    from any forward cluster snat=always
  cluster 10.60.2.9:5353
  serving 10.60.1.7:5353 10.60.2.9:5353

port net/empty/udp
  frontend cluster-ip 10.70.0.99:53
    from any reject reason=NoEndpoints
  frontend node-port *:30099
    from any reject reason=NoEndpoints

port net/other/udp
  frontend cluster-ip 10.70.0.77:30053
    from any forward cluster snat=hairpin
  cluster 10.60.3.3:30053

port net/sig/sctp
  frontend cluster-ip 10.70.0.36:36412
    from any forward cluster snat=hairpin
  cluster 10.60.2.9:36412

port net/web/tcp
  frontend cluster-ip 10.70.0.53:53
    from any forward cluster snat=hairpin
  cluster 10.60.2.9:5353
`

func parse(tb testing.TB, text string) *forward.Table {
	tb.Helper()
	tbl, err := forward.Parse(strings.NewReader(text))
	if err != nil {
		tb.Fatal(err)
	}
	return tbl
}

// flow makes an entry of a client that sent to dst and gets its answers from replies.
func flow(proto model.Protocol, dst, replies string) Flow {
	client := netip.MustParseAddrPort("10.60.5.5:4000")
	if strings.HasPrefix(dst, "[") {
		client = netip.MustParseAddrPort("[fd00:60::5]:4000")
	}
	return Flow{
		Proto: proto, OrigSrc: client, OrigDst: netip.MustParseAddrPort(dst),
		ReplySrc: netip.MustParseAddrPort(replies), ReplyDst: client, ID: 7,
	}
}

func TestStaleFlows(t *testing.T) {
	const udp, tcp, sctp = model.UDP, model.TCP, model.SCTP
	tests := map[string]struct {
		flow Flow
		want bool
	}{
		"to a cluster IP, from a removed endpoint":                  {flow(udp, "10.70.0.53:53", "10.60.1.11:5353"), true},
		"to an external IP, from a removed endpoint":                {flow(udp, "203.0.113.53:53", "10.60.1.11:5353"), true},
		"to a load balancer address, from a removed endpoint":       {flow(udp, "192.0.2.20:53", "10.60.1.11:5353"), true},
		"to a node port, from a removed endpoint":                   {flow(udp, "10.20.0.11:30053", "10.60.1.11:5353"), true},
		"to a node port on another address, from a removed one":     {flow(udp, "192.168.7.1:30053", "10.60.1.11:5353"), true},
		"to a cluster IP, from a chosen endpoint":                   {flow(udp, "10.70.0.53:53", "10.60.2.9:5353"), false},
		"to a cluster IP, from one that serves but is not chosen":   {flow(udp, "10.70.0.53:53", "10.60.1.7:5353"), false},
		"to a node port, from one that serves but is not chosen":    {flow(udp, "10.20.0.11:30053", "10.60.1.7:5353"), false},
		"to a cluster IP, from another port of a serving pod":       {flow(udp, "10.70.0.53:53", "10.60.2.9:5354"), true},
		"to a cluster IP, from an endpoint of another Service":      {flow(udp, "10.70.0.53:53", "10.60.3.3:30053"), true},
		"untranslated to a cluster IP":                              {flow(udp, "10.70.0.53:53", "10.70.0.53:53"), true},
		"untranslated to a node port":                               {flow(udp, "10.20.0.11:30053", "10.20.0.11:30053"), true},
		"untranslated to a frontend that rejects":                   {flow(udp, "10.70.0.99:53", "10.70.0.99:53"), true},
		"translated, to a frontend that rejects by now":             {flow(udp, "10.70.0.99:53", "10.60.1.11:5353"), true},
		"untranslated to a node port that rejects":                  {flow(udp, "10.20.0.11:30099", "10.20.0.11:30099"), true},
		"to a node port's number at another machine":                {flow(udp, "198.51.100.4:30053", "198.51.100.4:30053"), false},
		"to a rejecting node port's number at another machine":      {flow(udp, "198.51.100.4:30099", "198.51.100.4:30099"), false},
		"to a node port's number at another Service, well led":      {flow(udp, "10.70.0.77:30053", "10.60.3.3:30053"), false},
		"to a node port's number at another Service, astray":        {flow(udp, "10.70.0.77:30053", "10.60.2.9:5353"), true},
		"to a node port at a loopback address that is not in scope": {flow(udp, "127.0.0.1:30053", "127.0.0.1:30053"), false},
		"to another port of a cluster IP":                           {flow(udp, "10.70.0.53:54", "10.70.0.53:54"), false},
		"to an address of no Service":                               {flow(udp, "8.8.8.8:53", "8.8.8.8:53"), false},
		"to the endpoint itself":                                    {flow(udp, "10.60.1.11:5353", "10.60.1.11:5353"), false},
		"of SCTP, from a removed endpoint":                          {flow(sctp, "10.70.0.36:36412", "10.60.1.11:36412"), true},
		"of SCTP, from a serving endpoint":                          {flow(sctp, "10.70.0.36:36412", "10.60.2.9:36412"), false},
		"of SCTP, to a UDP frontend's address":                      {flow(sctp, "10.70.0.53:53", "10.60.1.11:5353"), false},
		"of TCP, from a removed endpoint":                           {flow(tcp, "10.70.0.53:53", "10.60.1.11:5353"), false},
		"of TCP, untranslated":                                      {flow(tcp, "10.70.0.53:53", "10.70.0.53:53"), false},
		"of the other family":                                       {flow(udp, "[fd00::53]:53", "[fd00::9]:53"), false},
	}
	tbl := parse(t, table)
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var want []Flow
			if tc.want {
				want = []Flow{tc.flow}
			}
			got := Stale(tbl, slices.Values([]Flow{tc.flow}))
			if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
				t.Errorf("stale flows (-want +got):\n%s", diff)
			}
		})
	}
}

func TestNodePortScopeBoundsStaleFlows(t *testing.T) {
	tests := map[string]struct {
		scope, dst string
		want       bool
	}{
		"an address in the list":                    {"10.20.0.11", "10.20.0.11:30053", true},
		"an address of this node that is not in it": {"10.20.0.11", "192.168.7.1:30053", false},
		"loopback, served":                          {"all loopback", "127.0.0.1:30053", true},
		"loopback that no interface has, served":    {"all loopback", "127.0.0.9:30053", true},
		"loopback, not served":                      {"all", "127.0.0.1:30053", false},
		"loopback in the list":                      {"10.20.0.11 127.0.0.1 loopback", "127.0.0.1:30053", true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			tbl := parse(t, strings.Replace(table, "node-ports all", "node-ports "+tc.scope, 1))
			f := flow(model.UDP, tc.dst, "10.60.1.11:5353")
			if got := NewIndex(tbl).Stale(f); got != tc.want {
				t.Errorf("flow to %s is stale: %v, want %v", tc.dst, got, tc.want)
			}
			packet := forward.Packet{Src: f.OrigSrc, Dst: f.OrigDst, Proto: f.Proto}
			if got := forward.Lookup(tbl, packet).Do != forward.Pass; got != tc.want {
				t.Errorf("the table serves %s: %v, so the flow must not be judged otherwise than the packet", tc.dst, got)
			}
		})
	}
}

func TestAnEndpointAtTheFrontendsOwnAddressKeepsItsFlows(t *testing.T) {
	tbl := parse(t, `context IPv4 node=na
  pods unknown
  host 10.20.0.11
  node-ports all

port net/host/udp
  frontend external-ip 10.20.0.11:53
    from any forward cluster snat=always
  cluster 10.20.0.11:53(local)
`)
	if NewIndex(tbl).Stale(flow(model.UDP, "10.20.0.11:53", "10.20.0.11:53")) {
		t.Error("the flow leads to a serving endpoint, yet it is stale")
	}
}

func TestIPv6Flows(t *testing.T) {
	tbl := parse(t, `context IPv6 node=na
  pods unknown
  host ::1 fd00:20::b
  node-ports all

port net/dns/udp
  frontend cluster-ip [fd00:70::35]:53
    from any forward cluster snat=hairpin
  frontend node-port *:30053
    from any forward cluster snat=always
  cluster [fd00:60::9]:53
`)
	ix := NewIndex(tbl)
	for dst, want := range map[string]bool{"[fd00:70::35]:53": true, "[fd00:20::b]:30053": true, "[::1]:30053": false} {
		if got := ix.Stale(flow(model.UDP, dst, "[fd00:60::8]:53")); got != want {
			t.Errorf("flow to %s is stale: %v, want %v", dst, got, want)
		}
	}
}

func TestFlowsOfRemovedFrontends(t *testing.T) {
	before := parse(t, table)
	after := parse(t, table[:strings.Index(table, "port net/dns")]+table[strings.Index(table, "port net/empty"):])
	dns := forward.PortName{Name: model.Name{Namespace: "net", Name: "dns"}, Port: "udp", Proto: model.UDP}
	ix := NewIndex(after)
	ix.Remove(before.Port(dns))
	ix.Remove(nil)
	for name, tc := range map[string]struct {
		flow Flow
		want bool
	}{
		"one that the Service made":                   {flow(model.UDP, "10.70.0.53:53", "10.60.2.9:5353"), true},
		"one that the Service made, draining":         {flow(model.UDP, "10.70.0.53:53", "10.60.1.7:5353"), true},
		"one that its node port made":                 {flow(model.UDP, "10.20.0.11:30053", "10.60.2.9:5353"), true},
		"untranslated to the node port's number":      {flow(model.UDP, "10.20.0.11:30053", "10.20.0.11:30053"), false},
		"untranslated to the cluster IP":              {flow(model.UDP, "10.70.0.53:53", "10.70.0.53:53"), false},
		"plain traffic to the same number":            {flow(model.UDP, "198.51.100.4:30053", "198.51.100.4:30053"), false},
		"plain traffic to another machine's NodePort": {flow(model.UDP, "10.20.0.12:30053", "10.60.2.9:5353"), false},
		"another Service with the same number":        {flow(model.UDP, "10.70.0.77:30053", "10.60.3.3:30053"), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ix.Stale(tc.flow); got != tc.want {
				t.Errorf("stale: %v, want %v", got, tc.want)
			}
		})
	}
	if NewIndex(after).Stale(flow(model.UDP, "10.70.0.53:53", "10.60.2.9:5353")) {
		t.Error("stale although nobody told of the removal")
	}
}

func TestAFrontendReplacedTwiceRemembersBothPools(t *testing.T) {
	port := func(ep string) *forward.Port {
		return parse(t, strings.ReplaceAll(table, "10.60.1.7:5353", ep)).Port(forward.PortName{
			Name: model.Name{Namespace: "net", Name: "dns"}, Port: "udp", Proto: model.UDP,
		})
	}
	ix := NewIndex(parse(t, table[:strings.Index(table, "port net/dns")]))
	ix.Remove(port("10.60.1.1:5353"))
	ix.Remove(port("10.60.1.2:5353"))
	for _, ep := range []string{"10.60.1.1:5353", "10.60.1.2:5353"} {
		if !ix.Stale(flow(model.UDP, "192.0.2.20:53", ep)) {
			t.Errorf("the flow to %s is not stale", ep)
		}
	}
}

func TestARemovedPortThatIsServedAgainIsJudgedByTheTable(t *testing.T) {
	tbl := parse(t, table)
	ix := NewIndex(tbl)
	ix.Remove(tbl.Port(forward.PortName{Name: model.Name{Namespace: "net", Name: "dns"}, Port: "udp", Proto: model.UDP}))
	if ix.Stale(flow(model.UDP, "10.70.0.53:53", "10.60.2.9:5353")) {
		t.Error("stale although the table forwards to this endpoint")
	}
}

func TestProtocolsWithoutFrontendsAreNotWanted(t *testing.T) {
	ix := NewIndex(parse(t, table))
	for p, want := range map[model.Protocol]bool{model.UDP: true, model.SCTP: true, model.TCP: false} {
		if got := ix.Wants(p); got != want {
			t.Errorf("%s is wanted: %v, want %v", p, got, want)
		}
	}
	if ix := NewIndex(parse(t, table[:strings.Index(table, "port net/dns")])); ix.Wants(model.UDP) {
		t.Error("UDP is wanted without any frontend")
	}
}

// big gives a table of n UDP ports with 10 endpoints each, and its flows: half of them stale, one in four foreign.
func big(tb testing.TB, n, flows int) (*forward.Table, []Flow) {
	tb.Helper()
	var b strings.Builder
	b.WriteString(table[:strings.Index(table, "port net/dns")])
	addr := func(first byte, i int) netip.Addr {
		return netip.AddrFrom4([4]byte{first, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	for i := range n {
		fmt.Fprintf(&b, "port ns/svc-%06d/udp\n  frontend cluster-ip %s:53\n", i, addr(10, i))
		b.WriteString("    from any forward cluster snat=hairpin\n  cluster")
		eps := make([]string, 0, 10)
		for e := range 10 {
			eps = append(eps, netip.AddrPortFrom(addr(11, i*10+e), 53).String())
		}
		slices.Sort(eps)
		b.WriteString(" " + strings.Join(eps, " ") + "\n\n")
	}
	out := make([]Flow, 0, flows)
	for i := range flows {
		svc := i % n
		f := Flow{
			Proto:    model.UDP,
			OrigSrc:  netip.AddrPortFrom(addr(12, i/50000), uint16(i%50000)+1),
			OrigDst:  netip.AddrPortFrom(addr(10, svc), 53),
			ReplySrc: netip.AddrPortFrom(addr(11, svc*10+i%10), 53),
		}
		switch i % 4 {
		case 0, 1:
			f.ReplySrc = netip.AddrPortFrom(addr(13, i), 53)
		case 2:
			f.OrigDst = netip.AddrPortFrom(addr(8, i), 53)
		}
		f.ReplyDst = f.OrigSrc
		out = append(out, f)
	}
	return parse(tb, b.String()), out
}

func TestManyFlowsAreJudgedWithoutAllocating(t *testing.T) {
	tbl, flows := big(t, 100, 20000)
	if got := len(Stale(tbl, slices.Values(flows[:10000]), slices.Values(flows[10000:]))); got != 10000 {
		t.Errorf("%d stale flows, want 10000", got)
	}
	ix := NewIndex(tbl)
	allocs := testing.AllocsPerRun(1, func() {
		for _, f := range flows {
			ix.Stale(f)
		}
	})
	if allocs > 0 {
		t.Errorf("%v allocations for %d flows", allocs, len(flows))
	}
}

func BenchmarkStale(b *testing.B) {
	tbl, flows := big(b, 10000, 500000)
	b.Run("index of 10000 ports with 10 endpoints", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			NewIndex(tbl)
		}
	})
	b.Run("500000 flows", func(b *testing.B) {
		ix := NewIndex(tbl)
		b.ReportAllocs()
		for b.Loop() {
			for _, f := range flows {
				ix.Stale(f)
			}
		}
	})
}
