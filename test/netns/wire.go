package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// podPrefix starts the names of the links that lead from a node to its pods.
const podPrefix = "pod-"

// fromRouteTable is the routing table for what comes in on one link; any free number does.
const fromRouteTable = 100

// PodInterfacePrefix starts the names of a node's links to its pods, as detectLocal.interfaceNamePrefix takes it.
func PodInterfacePrefix() string { return podPrefix }

// plug connects the host's eth0 with a new link of another host. A master other than 0 is the index of the bridge that
// the new link joins.
func (h *Host) plug(other *Host, name string, master int, addr pair, bits4, bits6 int) error {
	link := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: name, MasterIndex: master, Flags: net.FlagUp},
		PeerName:      "eth0",
		PeerNamespace: netlink.NsFd(h.file.Fd()),
	}
	if other.kind == kindNode {
		link.HardwareAddr, link.PeerHardwareAddr = nodeSideMAC(), podMAC(addr)
	}
	if err := other.link.LinkAdd(link); err != nil {
		return fmt.Errorf("add link %s of %s: %w", name, other.Name, err)
	}
	h.lab.pending = append(h.lab.pending, pending{host: other, link: name}, pending{host: h, link: "eth0"})
	eth0, err := h.link.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find link eth0 of %s: %w", h.Name, err)
	}
	return h.addAddresses(eth0, addr, bits4, bits6)
}

// A pending thing is a link's end or an IPv6 address that was set up and is not known to be in operation.
type pending struct {
	host *Host
	link string     // empty for an address
	addr netip.Addr // invalid for a link
}

func (p pending) String() string {
	if p.link != "" {
		return fmt.Sprintf("link %s of %s", p.link, p.host.Name)
	}
	return fmt.Sprintf("address %s of %s", p.addr, p.host.Name)
}

// ready tells that the kernel has activated the link, or has the address among the local ones.
func (p pending) ready() (bool, error) {
	if p.link != "" {
		link, err := p.host.link.LinkByName(p.link)
		if err != nil {
			return false, fmt.Errorf("find %s: %w", p, err)
		}
		return link.Attrs().OperState == netlink.OperUp, nil
	}
	routes, err := p.host.link.RouteGet(p.addr.AsSlice())
	// An error means that there is no route yet.
	return err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL, nil
}

// settle waits until everything set up since the last call is in operation. The kernel activates links and IPv6 addresses
// some time later, from work queues, and until then loses what is sent over them without a word.
func (l *Lab) settle() error {
	const patience, interval = 10 * time.Second, time.Millisecond
	deadline := time.Now().Add(patience)
	for _, p := range l.pending {
		for {
			ready, err := p.ready()
			if err != nil {
				return err
			}
			if ready {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%s is not in operation after %v", p, patience)
			}
			time.Sleep(interval)
		}
	}
	l.pending = nil
	return nil
}

// addAddresses gives a link its addresses and sets it up.
func (h *Host) addAddresses(link netlink.Link, addr pair, bits4, bits6 int) error {
	for _, p := range []netip.Prefix{netip.PrefixFrom(addr.v4, bits4), netip.PrefixFrom(addr.v6, bits6)} {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := h.link.AddrAdd(link, a); err != nil {
			return fmt.Errorf("add address %s to %s: %w", p, h.Name, err)
		}
	}
	h.lab.pending = append(h.lab.pending, pending{host: h, addr: addr.v6})
	if err := h.link.LinkSetUp(link); err != nil {
		return fmt.Errorf("set link %s of %s up: %w", link.Attrs().Name, h.Name, err)
	}
	return nil
}

// AddAddress gives the host one more address, on its link to the others.
func (h *Host) AddAddress(p netip.Prefix) error {
	eth0, err := h.link.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find link eth0 of %s: %w", h.Name, err)
	}
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := h.link.AddrAdd(eth0, a); err != nil {
		return fmt.Errorf("add address %s to %s: %w", p, h.Name, err)
	}
	h.lab.pending = append(h.lab.pending, pending{host: h, addr: p.Addr()})
	return h.lab.settle()
}

// Route sends a range to a neighbour, in place of a route to the same range.
func (h *Host) Route(to netip.Prefix, via netip.Addr) error {
	if err := h.link.RouteReplace(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route %s via %s on %s: %w", to, via, h.Name, err)
	}
	return nil
}

func (h *Host) routeAll(ranges []netip.Prefix, via pair) error {
	for _, p := range ranges {
		if err := h.Route(p, via.of(p.Addr().Is4())); err != nil {
			return err
		}
	}
	return nil
}

// routeFrom routes ranges for what comes in on one link only.
func (h *Host) routeFrom(link string, ranges []netip.Prefix, via pair) error {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rule := netlink.NewRule()
		rule.Family, rule.IifName, rule.Table = family, link, fromRouteTable
		if err := h.link.RuleAdd(rule); err != nil {
			return fmt.Errorf("add a routing rule for link %s of %s: %w", link, h.Name, err)
		}
	}
	for _, p := range ranges {
		gw := via.of(p.Addr().Is4())
		r := &netlink.Route{Dst: ipNet(p), Gw: gw.AsSlice(), Table: fromRouteTable}
		if err := h.link.RouteReplace(r); err != nil {
			return fmt.Errorf("route %s via %s on %s for link %s: %w", p, gw, h.Name, link, err)
		}
	}
	return nil
}

// AddPod makes a pod on a node. The number is its place in the node's pod range, 2..254.
//
// Pods are joined to their node by a link each, without a bridge: every packet between two pods is routed by the node and
// so meets its rules, also on the way back.
func (l *Lab) AddPod(node *Host, name string, number int) (*Host, error) {
	pod, err := l.addPod(node, name, number)
	if err != nil {
		return nil, err
	}
	return pod, l.settle()
}

func (l *Lab) addPod(node *Host, name string, number int) (*Host, error) {
	if node.kind != kindNode || number < 2 || number > 254 {
		return nil, fmt.Errorf("add pod %s: %s must be a node and the number %d in 2..254", name, node.Name, number)
	}
	pod, err := l.addHost(name, kindPod)
	if err != nil {
		return nil, err
	}
	pod.node, pod.addr = node, podPair(node.number, number)
	if err := pod.plug(node, podPrefix+name, 0, pod.addr, 32, 128); err != nil {
		return nil, err
	}
	side, err := node.link.LinkByName(podPrefix + name)
	if err != nil {
		return nil, fmt.Errorf("find the link of pod %s: %w", name, err)
	}
	eth0, err := pod.link.LinkByName("eth0")
	if err != nil {
		return nil, fmt.Errorf("find link eth0 of pod %s: %w", name, err)
	}
	if err := errors.Join(node.reachPod(side, pod), pod.reachNode(eth0)); err != nil {
		return nil, err
	}
	return pod, nil
}

// reachPod tells a node the way to a pod's addresses.
func (h *Host) reachPod(side netlink.Link, pod *Host) error {
	for _, a := range []netip.Addr{pod.addr.v4, pod.addr.v6} {
		if err := h.neighbour(side, a, podMAC(pod.addr)); err != nil {
			return err
		}
		r := &netlink.Route{
			LinkIndex: side.Attrs().Index, Scope: unix.RT_SCOPE_LINK,
			Dst: ipNet(netip.PrefixFrom(a, a.BitLen())),
		}
		if err := h.link.RouteReplace(r); err != nil {
			return fmt.Errorf("route %s on %s: %w", a, h.Name, err)
		}
	}
	return nil
}

// reachNode makes the node the pod's way to everything. The gateway addresses exist only as neighbour entries, so that
// the node has no address that a real one would not have.
func (h *Host) reachNode(eth0 netlink.Link) error {
	gateway := pairOf(podGateway4, podGateway6)
	for _, p := range defaults() {
		gw := gateway.of(p.Addr().Is4())
		if err := h.neighbour(eth0, gw, nodeSideMAC()); err != nil {
			return err
		}
		r := &netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: ipNet(p), Gw: gw.AsSlice()}
		r.SetFlag(netlink.FLAG_ONLINK)
		if err := h.link.RouteReplace(r); err != nil {
			return fmt.Errorf("route %s via %s on pod %s: %w", p, gw, h.Name, err)
		}
	}
	return nil
}

// addCrowd makes the pod that answers on a whole range: its namespace treats the range as its own.
func (l *Lab) addCrowd(node *Host) error {
	pod, err := l.addPod(node, fmt.Sprintf("crowd%d", node.number), crowdHost)
	if err != nil {
		return err
	}
	pod.crowd = crowdRange(node.number)
	// With IPv6, unlike IPv4, a local route alone does not allow to send from an address.
	if err := pod.Sysctl("net.ipv6.ip_nonlocal_bind", "1"); err != nil {
		return err
	}
	side, err := node.link.LinkByName(podPrefix + pod.Name)
	if err != nil {
		return fmt.Errorf("find the link of pod %s: %w", pod.Name, err)
	}
	lo, err := pod.link.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback link of pod %s: %w", pod.Name, err)
	}
	for _, p := range pod.crowd {
		local := &netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: ipNet(p), Type: unix.RTN_LOCAL,
			Scope: unix.RT_SCOPE_HOST, Table: unix.RT_TABLE_LOCAL,
		}
		if err := pod.link.RouteReplace(local); err != nil {
			return fmt.Errorf("make %s local to pod %s: %w", p, pod.Name, err)
		}
		gw := pod.addr.of(p.Addr().Is4())
		way := &netlink.Route{LinkIndex: side.Attrs().Index, Dst: ipNet(p), Gw: gw.AsSlice()}
		way.SetFlag(netlink.FLAG_ONLINK)
		if err := node.link.RouteReplace(way); err != nil {
			return fmt.Errorf("route %s to pod %s: %w", p, pod.Name, err)
		}
	}
	return nil
}

// neighbour adds a permanent neighbour entry, so that no packet waits for an answer to "who has".
func (h *Host) neighbour(link netlink.Link, a netip.Addr, mac net.HardwareAddr) error {
	family := unix.AF_INET
	if a.Is6() {
		family = unix.AF_INET6
	}
	n := &netlink.Neigh{
		LinkIndex: link.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT,
		IP: a.AsSlice(), HardwareAddr: mac,
	}
	if err := h.link.NeighSet(n); err != nil {
		return fmt.Errorf("add neighbour %s of %s: %w", a, h.Name, err)
	}
	return nil
}

func nodeSideMAC() net.HardwareAddr { return net.HardwareAddr{0xee, 0xee, 0xee, 0xee, 0xee, 0xee} }

func podMAC(a pair) net.HardwareAddr {
	b := a.v4.As4()
	return net.HardwareAddr{0x0a, 0x58, b[0], b[1], b[2], b[3]}
}

// ipNet is the form that the netlink library takes.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
