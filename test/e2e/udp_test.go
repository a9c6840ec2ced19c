package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/turnout-proxy/turnout/internal/flow"
	"github.com/turnout-proxy/turnout/internal/kernel/conntrack"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// followWithin is how long a sender that never closes may stay with an endpoint that is gone.
const followWithin = 2 * time.Second

// A stream is one sender, and the Service that it sends to: each has its own, with a port of its own on the servers, so
// that they can be told apart behind the masquerading of the node.
type stream struct {
	name, from, to string
	service        *corev1.Service
	port           corev1.ServicePort
	slice          func(service string, port corev1.ServicePort, pods ...*netns.Host) *discoveryv1.EndpointSlice
}

func udpPort(number, target, nodePort int32) corev1.ServicePort {
	return corev1.ServicePort{
		Name: "stats", Protocol: corev1.ProtocolUDP, Port: number,
		TargetPort: intstr.FromInt32(target), NodePort: nodePort,
	}
}

// streams are one for each kind of address, and one of IPv6. The node port of the second is the Service port of another Service below.
func streams(lab *netns.Lab) []stream {
	list := []stream{
		{name: "cluster-ip", from: "c1", to: "10.96.3.1:8125", port: udpPort(8125, 8131, 0)},
		{
			name: "node-port", from: "out", port: udpPort(8125, 8132, 30123),
			to: netip.AddrPortFrom(lab.Host("na").Addr4(), 30123).String(),
		},
		{name: "load-balancer", from: "out", to: "192.0.2.20:8125", port: udpPort(8125, 8133, 30126)},
	}
	for i := range list {
		st := &list[i]
		st.service = service(st.name, st.port, fmt.Sprintf("10.96.3.%d", i+1))
		st.slice = slice4
		if st.port.NodePort != 0 {
			st.service.Spec.Type = corev1.ServiceTypeNodePort
		}
	}
	list[2].service.Spec.Type = corev1.ServiceTypeLoadBalancer
	list[2].service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.20"}}
	six := stream{name: "ipv6", from: "c1", to: "[fd00:96::3:1]:8125", port: udpPort(8125, 8134, 0), slice: slice6}
	six.service = service(six.name, six.port, "fd00:96::3:1")
	return append(list, six)
}

func TestAOneWayUDPSenderFollowsItsServiceAndOthersKeepTheirFlows(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, netns.Topology{Nodes: 2})
			s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
			list := streams(s.lab)
			received := map[*netns.Host][]*netns.Server{}
			for _, h := range []*netns.Host{s1, s2} {
				for _, st := range list {
					server, err := h.ServeSilently(uint16(st.port.TargetPort.IntVal))
					if err != nil {
						t.Fatal(err)
					}
					received[h] = append(received[h], server)
				}
			}
			move := func(to *netns.Host) {
				var objects []any
				for _, st := range list {
					objects = append(objects, st.service, st.slice(st.name, st.port, to))
				}
				s.write("streams.yaml", objects...)
			}
			move(s1)
			n := s.node("na", flavourFlag(flavour))
			others := newOthers(s)
			n.start()
			n.ready()
			others.open()
			for i, st := range list {
				send(t, s.lab.Host(st.from), uint16(40001+i), st.to)
			}
			awaitDatagrams(t, received[s1], "s1 before the first change")
			before := others.ids(n.host)
			var slowest time.Duration
			for round, to := range []*netns.Host{s2, s1, s2, s1, s2} {
				start := time.Now()
				move(to)
				for i, st := range list {
					took := follows(t, received[to][i], fmt.Sprintf("round %d, %s", round+1, st.name), start)
					slowest = max(slowest, took)
				}
				n.ready()
			}
			t.Logf("20 changes of a one-way sender's endpoint: the slowest took %v", slowest.Round(time.Millisecond))
			for i := range list {
				leftAlone(t, received[s1][i], list[i].name+" at s1")
			}
			s.remove("streams.yaml")
			n.ready()
			for i := range list {
				leftAlone(t, received[s2][i], list[i].name+" at s2")
			}
			if diff := cmp.Diff(before, others.ids(n.host)); diff != "" {
				t.Errorf("flows of others, with their ids (-before +after):\n%s", diff)
			}
			if got := n.metric(`turnout_flow_cleanup_failures_total{ip_family="IPv4"}`); got != "0" {
				t.Errorf("%s clean-ups of flows have failed", got)
			}
			others.ping()
		})
	}
}

// send starts a sender that never listens and keeps its port: 50 datagrams a second until the test ends.
func send(t *testing.T, from *netns.Host, port uint16, to string) {
	t.Helper()
	var conn *net.UDPConn
	err := from.Do(func() (err error) {
		conn, err = net.DialUDP("udp", &net.UDPAddr{Port: int(port)}, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			// A refusal that came back earlier is reported here; the sender does not care.
			_, _ = conn.Write([]byte("1\n"))
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		_ = conn.Close() // nothing is buffered
	})
}

func awaitDatagrams(t *testing.T, servers []*netns.Server, what string) {
	t.Helper()
	eventually(t, "datagrams at "+what, func() error {
		for _, s := range servers {
			if n, _ := s.Received(); n < 5 {
				return fmt.Errorf("port %d: %d", s.Port, n)
			}
		}
		return nil
	})
}

// follows waits until a server gets more datagrams, and tells how long after the start that was.
func follows(t *testing.T, server *netns.Server, what string, start time.Time) time.Duration {
	t.Helper()
	before, _ := server.Received()
	_, err := within(patience, func() error {
		if now, _ := server.Received(); now < before+2 {
			return fmt.Errorf("%s: %d datagrams", what, now-before)
		}
		return nil
	})
	took := time.Since(start)
	switch {
	case err != nil:
		t.Fatalf("%s: after %v the new endpoint still gets nothing: %v", what, took, err)
	case took > followWithin:
		t.Errorf("%s: the sender moved to the new endpoint after %v, want at most %v", what, took, followWithin)
	}
	return took
}

// leftAlone waits until a server gets no datagram any more.
func leftAlone(t *testing.T, server *netns.Server, what string) {
	t.Helper()
	last, at := 0, time.Now()
	eventually(t, what+": no datagrams", func() error {
		if n, _ := server.Received(); n != last {
			last, at = n, time.Now()
		}
		if since := time.Since(at); since < quiet {
			return fmt.Errorf("the last one came %v ago", since)
		}
		return nil
	})
}

// Others are UDP conversations that the changes do not concern: with another Service, whose port is the node port of a
// changed one, and with an outside host at that same port number.
type others struct {
	site  *site
	conns []*netns.Conn
}

const otherIP = "10.96.3.9"

func newOthers(s *site) *others {
	port := udpPort(30123, 8139, 0)
	s.write("other.yaml", service("other", port, otherIP), slice4("other", port, s.lab.Host("s2")))
	serve(s.t, s.lab.Host("s2"), model.UDP, 8139)
	serve(s.t, s.lab.Host("out"), model.UDP, 30123)
	return &others{site: s}
}

func (o *others) destinations() []netip.AddrPort {
	return []netip.AddrPort{
		netip.AddrPortFrom(netip.MustParseAddr(otherIP), 30123),
		netip.AddrPortFrom(o.site.lab.Host("out").Addr4(), 30123),
	}
}

func (o *others) open() {
	o.site.t.Helper()
	for _, to := range o.destinations() {
		conn, r := o.site.lab.Host("c1").Open(netns.Call{To: to, Proto: model.UDP})
		if conn == nil {
			o.site.t.Fatalf("c1 -> %s: %v", to, r)
		}
		o.site.t.Cleanup(conn.Close)
		o.conns = append(o.conns, conn)
	}
}

// ping makes sure that the same server still answers.
func (o *others) ping() {
	o.site.t.Helper()
	for _, c := range o.conns {
		if kind, err := c.Ping(netns.DefaultTimeout); kind != netns.OK {
			o.site.t.Errorf("conversation with %s at %s: %v", c.Server, c.To, err)
		}
	}
}

// ids gives the identity of each conversation's flow on a node.
func (o *others) ids(node *netns.Host) map[string]uint32 {
	o.site.t.Helper()
	ids := map[string]uint32{}
	err := node.Do(func() error {
		return conntrack.Kernel{}.List(context.Background(), model.IPv4, model.UDP, func(f flow.Flow) bool {
			for _, to := range o.destinations() {
				if f.OrigDst == to {
					ids[fmt.Sprint(f.OrigSrc, " -> ", to)] = f.ID
				}
			}
			return true
		})
	})
	if err != nil || len(ids) != len(o.conns) {
		o.site.t.Fatalf("flows of others: %v, %v", ids, err)
	}
	return ids
}
