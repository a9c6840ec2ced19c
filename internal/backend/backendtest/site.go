package backendtest

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// A site is a lab whose node na runs the mode. All that is addressed to a Service comes by na, and so do answers from
// the other nodes to clients outside the cluster.
type site struct {
	lab  *netns.Lab
	node *netns.Host

	mu      sync.Mutex
	pods    map[string]*netns.Host
	servers map[serverKey]error
	added   []netip.Addr
}

type serverKey struct {
	host  string
	proto model.Protocol
	port  uint16
}

// newSite builds the lab, or skips the test where there is no root.
func newSite(t *testing.T) *site {
	t.Helper()
	// The legacy tools lock a file; with one of their own they wait for nobody else on this machine.
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "xtables.lock"))
	lab := netns.Start(t, netns.Topology{Nodes: labNodes, Crowd: true})
	s := &site{lab: lab, node: lab.Host("na"), pods: map[string]*netns.Host{}, servers: map[serverKey]error{}}
	virtual := slices.Concat(netns.ServiceCIDRs(), netns.LoadBalancerCIDRs(), netns.ExternalCIDRs())
	outside := []netip.Prefix{
		netip.MustParsePrefix("10.20.0.200/32"), netip.MustParsePrefix("fd20::200/128"),
		netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:100::/64"),
	}
	for _, node := range lab.Nodes() {
		if node == s.node {
			continue
		}
		for _, p := range slices.Concat(virtual, outside) {
			via := s.node.Addr4()
			if p.Addr().Is6() {
				via = s.node.Addr6()
			}
			if err := node.Route(p, via); err != nil {
				t.Fatalf("route by way of na: %v", err)
			}
		}
	}
	if err := s.node.Sysctl("net.ipv4.conf.all.route_localnet", "1"); err != nil {
		t.Fatalf("let the node route loopback addresses: %v", err)
	}
	return s
}

// kernel opens the mode's kernel on the node.
func (s *site) kernel(t *testing.T, m Mode, family model.Family) Kernel {
	t.Helper()
	var kernel Kernel
	err := s.node.Do(func() (err error) {
		kernel, err = m.Real(t, family)
		return err
	})
	if err != nil {
		t.Skip(skipText(m, family, err))
	}
	return kernel
}

// host gives the lab's host that owns an address.
func (s *site) host(a netip.Addr) (*netns.Host, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.IsLoopback() || slices.Contains(nodeAddrs(), a) || slices.Contains(s.added, a) {
		return s.node, nil
	}
	for _, name := range []string{"nb", "nc", "out", "far"} {
		if own, err := clientAddr(name, a.Is4()); err == nil && own == a {
			return s.lab.Host(name), nil
		}
	}
	for node := 1; node <= labNodes; node++ {
		if inCrowd(a, node) {
			return s.lab.Host(fmt.Sprintf("crowd%d", node)), nil
		}
	}
	node, number := podNumbers(a)
	if node < 1 || node > labNodes || number < 2 || number > 254 {
		return nil, fmt.Errorf("nobody in the lab has address %s", a)
	}
	return s.pod(node, number)
}

// pod gives a pod, which is made when it is first asked for.
func (s *site) pod(node, number int) (*netns.Host, error) {
	name := podName(node, number)
	if number == 11 || number == 21 {
		return s.lab.Host(name), nil
	}
	if p, ok := s.pods[name]; ok {
		return p, nil
	}
	p, err := s.lab.AddPod(s.lab.Host(nodeName(node)), name, number)
	if err != nil {
		return nil, fmt.Errorf("make a pod: %w", err)
	}
	s.pods[name] = p
	return p, nil
}

// inCrowd tells whether a node's crowd answers for an address.
func inCrowd(a netip.Addr, node int) bool {
	p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 60, byte(128 + 16*(node-1)), 0}), 20)
	if a.Is6() {
		p = netip.MustParsePrefix(fmt.Sprintf("fd60:10%d::/64", node))
	}
	return p.Contains(a)
}

// here tells whether a host is node na or on it.
func (s *site) here(h *netns.Host) bool { return h == s.node || h.Node() == s.node }

// returns tells whether what other nodes' pods answer to a client comes back by na.
func (s *site) returns(client *netns.Host) bool { return client.Name == "out" || client.Name == "far" }

// serve starts a server for an endpoint, once. An address that nobody has is none of its business.
func (s *site) serve(proto model.Protocol, ep netip.AddrPort) error {
	host, err := s.host(ep.Addr())
	if err != nil || proto == model.SCTP && !netns.SCTP() {
		return nil // whoever asks about that endpoint is told
	}
	key := serverKey{host.Name, proto, ep.Port()}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.servers[key]; !known {
		_, s.servers[key] = host.Serve(proto, ep.Port())
	}
	return s.servers[key]
}

// become gives the node the addresses that settings say it has.
func (s *site) become(next settings) error {
	for _, a := range nodeAddrs() {
		if !slices.Contains(next.host.Addrs, a) {
			return fmt.Errorf("the lab's node has address %s in any case", a)
		}
	}
	if err := s.restore(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range next.host.Addrs {
		if slices.Contains(nodeAddrs(), a) {
			continue
		}
		alone := netip.PrefixFrom(a, a.BitLen())
		if err := s.node.AddAddress(alone); err != nil {
			return fmt.Errorf("give the node an address: %w", err)
		}
		via := s.node.Addr4()
		if a.Is6() {
			via = s.node.Addr6()
		}
		if err := s.lab.Host("out").Route(alone, via); err != nil {
			return fmt.Errorf("tell a client of the node's address: %w", err)
		}
		s.added = append(s.added, a)
	}
	return nil
}

// restore takes back the addresses that become gave.
func (s *site) restore() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.added) == 0 {
		return nil
	}
	added := s.added
	s.added = nil
	return s.node.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open a netlink socket: %w", err)
		}
		defer h.Close()
		link, err := h.LinkByName("eth0")
		if err != nil {
			return fmt.Errorf("find link eth0: %w", err)
		}
		for _, a := range added {
			addr, err := netlink.ParseAddr(netip.PrefixFrom(a, a.BitLen()).String())
			if err != nil {
				return fmt.Errorf("address %s: %w", a, err)
			}
			if err := h.AddrDel(link, addr); err != nil {
				return fmt.Errorf("remove address %s: %w", a, err)
			}
		}
		return nil
	})
}
