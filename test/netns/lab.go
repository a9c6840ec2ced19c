// Package netns builds a small cluster out of network namespaces, for tests and demonstrations that need a real kernel:
// nodes on one segment, pods behind each, a client beside the nodes and one behind a router, all with both IP families.
// It gives them servers that tell who answered and whom they saw, clients that tell how an attempt ended, and a load
// generator that counts failures by kind.
//
// A Lab needs root. Its namespaces have no name and are held by open files alone, so that the kernel removes them, and
// everything in them, when the process ends in whatever way. Two Labs never meet, in one process or in two.
//
// The package knows nothing of Services and must not import anything of this repository but internal/model. Read lab.go,
// then host.go and client.go.
package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A Topology says how large a Lab is.
type Topology struct {
	// Nodes is the number of nodes, 1..8; 0 is 2. They are called na, nb, nc, ...; each has the pods s1 and c1, s2 and
	// c2, ... (a server and a client by custom; they do not differ).
	Nodes int
	// Crowd gives every node one more pod, crowd1, crowd2, ..., which answers on thousands of addresses: see
	// Host.Addresses.
	Crowd bool
}

// A Lab is a cluster in network namespaces. Several goroutines may use it; what adds to it (AddPod, Host.AddAddress) must
// not run beside anything else.
type Lab struct {
	wire    *Host
	hosts   []*Host
	pending []pending
	// lockFile is a file without a name that the iptables tools started in this Lab lock instead of the machine's.
	lockFile *os.File

	mu       sync.Mutex
	closers  []func() error
	commands map[*Cmd]struct{}
}

// Start builds a Lab for a test and removes it at the test's end. Without root it skips the test.
func Start(tb testing.TB, topology Topology) *Lab {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("needs root for network namespaces; run it with: make test-netns (as root), or go test -exec sudo")
	}
	lab, err := New(topology)
	if err != nil {
		tb.Fatalf("build the lab: %v", err)
	}
	tb.Cleanup(func() {
		if err := lab.Close(); err != nil {
			tb.Errorf("remove the lab: %v", err)
		}
	})
	return lab
}

// New builds a Lab. The caller closes it. On an error nothing is left.
func New(topology Topology) (*Lab, error) {
	if topology.Nodes == 0 {
		topology.Nodes = 2
	}
	if topology.Nodes < 1 || topology.Nodes > maxNodes {
		return nil, fmt.Errorf("a lab of %d nodes: the number must be 1..%d", topology.Nodes, maxNodes)
	}
	lab := &Lab{commands: map[*Cmd]struct{}{}}
	if err := lab.build(topology); err != nil {
		return nil, errors.Join(err, lab.Close())
	}
	return lab, nil
}

func (l *Lab) build(topology Topology) error {
	fd, err := unix.MemfdCreate("xtables.lock", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("create a lock file in memory: %w", err)
	}
	l.lockFile = os.NewFile(uintptr(fd), "xtables.lock")
	l.atClose(l.lockFile.Close)
	if err := l.buildSegment(topology.Nodes); err != nil {
		return err
	}
	if err := l.buildFar(); err != nil {
		return err
	}
	for i := 1; i <= topology.Nodes; i++ {
		node := l.Host(nodeName(i))
		for _, pod := range []struct {
			name string
			host int
		}{{fmt.Sprintf("s%d", i), serverHost}, {fmt.Sprintf("c%d", i), clientHost}} {
			if _, err := l.addPod(node, pod.name, pod.host); err != nil {
				return err
			}
		}
		if topology.Crowd {
			if err := l.addCrowd(node); err != nil {
				return err
			}
		}
	}
	return l.settle()
}

// buildSegment makes the nodes, the router and the client "out", joined by one switch.
func (l *Lab) buildSegment(nodes int) error {
	wire, err := l.newHost("wire", kindWire)
	if err != nil {
		return err
	}
	l.wire = wire
	off := false
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}, MulticastSnooping: &off}
	if err := wire.link.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add the bridge of the nodes' segment: %w", err)
	}
	if err := wire.link.LinkSetUp(bridge); err != nil {
		return fmt.Errorf("set the bridge of the nodes' segment up: %w", err)
	}
	join := func(name string, kind kind, addr pair) (*Host, error) {
		h, err := l.addHost(name, kind)
		if err != nil {
			return nil, err
		}
		h.addr = addr
		return h, h.plug(wire, "w-"+name, bridge.Attrs().Index, addr, 24, 64)
	}
	router, err := join("router", kindRouter, routerPair())
	if err != nil {
		return err
	}
	for i := 1; i <= nodes; i++ {
		node, err := join(nodeName(i), kindNode, nodePair(i))
		if err != nil {
			return err
		}
		node.number = i
	}
	out, err := join("out", kindClient, outPair())
	if err != nil {
		return err
	}
	for _, h := range l.hosts {
		if h == router {
			continue
		}
		if err := h.routeAll(defaults(), routerPair()); err != nil {
			return err
		}
	}
	if err := out.routeAll(virtual(), nodePair(1)); err != nil {
		return err
	}
	return l.routePods(nodes)
}

// routePods tells everybody on the segment which node the pods are behind.
func (l *Lab) routePods(nodes int) error {
	for _, h := range l.hosts {
		for i := 1; i <= nodes; i++ {
			if h.number == i {
				continue
			}
			if err := h.routeAll(slices.Concat(podRange(i), crowdRange(i)), nodePair(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// buildFar makes the client "far" behind the router. The router knows the way to the Services only for what comes from
// there: a packet to a Service that a node gives back, as nothing there takes it, is answered with "unreachable" at once.
func (l *Lab) buildFar() error {
	router := l.Host("router")
	far, err := l.addHost("far", kindClient)
	if err != nil {
		return err
	}
	far.addr = farPair()
	if err := far.plug(router, "far0", 0, far.addr, 24, 64); err != nil {
		return err
	}
	side, err := router.link.LinkByName("far0")
	if err != nil {
		return fmt.Errorf("find link far0 of the router: %w", err)
	}
	if err := router.addAddresses(side, farRouterPair(), 24, 64); err != nil {
		return err
	}
	if err := far.routeAll(defaults(), farRouterPair()); err != nil {
		return err
	}
	return router.routeFrom("far0", virtual(), nodePair(1))
}

// Host gives a host by its name: a node (na, nb, ...), a pod (s1, c1, s2, ...), "out", "far" or "router". It panics if
// there is none, as the name is a literal in the caller's code.
func (l *Lab) Host(name string) *Host {
	for _, h := range l.hosts {
		if h.Name == name {
			return h
		}
	}
	panic(fmt.Sprintf("the lab has no host %q", name))
}

// Nodes gives the nodes in order.
func (l *Lab) Nodes() []*Host {
	var nodes []*Host
	for _, h := range l.hosts {
		if h.kind == kindNode {
			nodes = append(nodes, h)
		}
	}
	return nodes
}

// Close stops what runs in the Lab, child processes included, and lets go of the namespaces. It may be called twice.
func (l *Lab) Close() error {
	l.mu.Lock()
	closers, commands := l.closers, l.commands
	l.closers, l.commands = nil, map[*Cmd]struct{}{}
	l.mu.Unlock()
	var errs []error
	for c := range commands {
		c.stop()
	}
	for _, f := range slices.Backward(closers) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// atClose registers something to be undone by Close, in reverse order.
func (l *Lab) atClose(f func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closers = append(l.closers, f)
}

func nodeName(i int) string { return "n" + string(rune('a'+i-1)) }

func defaults() []netip.Prefix { return prefixes("0.0.0.0/0", "::/0") }
