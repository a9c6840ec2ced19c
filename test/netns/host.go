package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A kind tells what part of the cluster a Host plays.
type kind uint8

const (
	kindWire kind = iota + 1
	kindRouter
	kindNode
	kindPod
	kindClient
)

// A Host is one network namespace of a Lab: a node, a pod, or a client.
type Host struct {
	// Name is unique in the Lab.
	Name string

	lab    *Lab
	kind   kind
	number int // of a node, from 1; otherwise 0
	node   *Host
	addr   pair
	crowd  []netip.Prefix
	file   *os.File
	link   *netlink.Handle
}

// Addr4 gives the host's IPv4 address.
func (h *Host) Addr4() netip.Addr { return h.addr.v4 }

// Addr6 gives the host's IPv6 address.
func (h *Host) Addr6() netip.Addr { return h.addr.v6 }

// Node gives the node that a pod is on, and nil for another host.
func (h *Host) Node() *Host { return h.node }

// PodCIDRs gives the pod range of a node, IPv4 first, and nil for another host.
func (h *Host) PodCIDRs() []netip.Prefix {
	if h.kind != kindNode {
		return nil
	}
	return podRange(h.number)
}

// Addresses gives n addresses that the host answers on, of one family. For a crowd these are n different ones out of its
// range; any other host has only one.
func (h *Host) Addresses(n int, is4 bool) []netip.Addr {
	if h.crowd == nil {
		return []netip.Addr{h.addr.of(is4)}[:min(n, 1)]
	}
	prefix := h.crowd[0]
	if !is4 {
		prefix = h.crowd[1]
	}
	list := make([]netip.Addr, 0, n)
	last := prefix.Addr().Next()
	for ; len(list) < n && prefix.Contains(last.Next()); last = last.Next() {
		list = append(list, last)
	}
	return list
}

// Path names the namespace as a file, as long as this process lives. It serves "nsenter --net=PATH COMMAND".
func (h *Host) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), h.file.Fd()) }

// Do runs f inside the host's namespace, on the calling goroutine. Goroutines that f starts are outside, but a socket
// stays where it was made.
func (h *Host) Do(f func() error) (err error) {
	runtime.LockOSThread()
	back, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open this thread's network namespace: %w", err)
	}
	defer func() { _ = back.Close() }() // it was only read
	if err := enter(h.file); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter the namespace of %s: %w", h.Name, err)
	}
	defer func() {
		if backErr := enter(back); backErr != nil {
			// The thread stays locked, so that it ends with its goroutine and nobody else runs in the wrong namespace.
			err = errors.Join(err, fmt.Errorf("leave the namespace of %s: %w", h.Name, backErr))
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}

func enter(ns *os.File) error {
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	return nil
}

// Sysctl sets a kernel setting of the host's namespace, given with dots or slashes ("net.ipv4.ip_forward").
func (h *Host) Sysctl(name, value string) error {
	path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
	return h.Do(func() error {
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return fmt.Errorf("set %s of %s: %w", name, h.Name, err)
		}
		return nil
	})
}

// addHost makes a host that Lab.Host finds.
func (l *Lab) addHost(name string, k kind) (*Host, error) {
	h, err := l.newHost(name, k)
	if err != nil {
		return nil, err
	}
	l.hosts = append(l.hosts, h)
	return h, nil
}

// newHost makes a namespace with its loopback link up and the settings that its part needs.
func (l *Lab) newHost(name string, k kind) (*Host, error) {
	file, err := newNamespace()
	if err != nil {
		return nil, fmt.Errorf("make the namespace of %s: %w", name, err)
	}
	h := &Host{Name: name, lab: l, kind: k, file: file}
	l.atClose(file.Close)
	err = h.Do(func() error {
		handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open a netlink socket in %s: %w", name, err)
		}
		h.link = handle
		l.atClose(func() error { handle.Close(); return nil })
		return h.settings()
	})
	if err != nil {
		return nil, err
	}
	lo, err := h.link.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find the loopback link of %s: %w", name, err)
	}
	if err := h.link.LinkSetUp(lo); err != nil {
		return nil, fmt.Errorf("set the loopback link of %s up: %w", name, err)
	}
	return h, nil
}

// newNamespace gives a new network namespace as an open file; the calling thread stays where it is.
func newNamespace() (*os.File, error) {
	type result struct {
		file *os.File
		err  error
	}
	done := make(chan result)
	go func() {
		// The thread is never unlocked: it ends with the goroutine instead of going back to the pool.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{nil, err}
			return
		}
		file, err := os.Open("/proc/thread-self/ns/net")
		done <- result{file, err}
	}()
	r := <-done
	return r.file, r.err
}

// A setting is one kernel setting of a namespace. Those that older kernels do not have per namespace are optional.
type setting struct {
	name, value string
	optional    bool
}

// settings writes the kernel settings of the host; it must run inside the namespace.
func (h *Host) settings() error {
	list := []setting{
		{"ipv4/conf/all/rp_filter", "0", false},
		{"ipv4/conf/default/rp_filter", "0", false},
		{"ipv6/conf/all/disable_ipv6", "0", false},
		{"ipv6/conf/default/disable_ipv6", "0", false},
		// An IPv6 address is usable at once, not after a second of duplicate detection.
		{"ipv6/conf/all/accept_dad", "0", false},
		{"ipv6/conf/default/accept_dad", "0", false},
		{"ipv6/conf/default/accept_ra", "0", false},
		{"ipv4/conf/all/accept_redirects", "0", false},
		{"ipv4/conf/default/accept_redirects", "0", false},
		{"ipv4/conf/all/send_redirects", "0", false},
		{"ipv4/conf/default/send_redirects", "0", false},
		// Every rejected packet is answered: by default the kernel answers one a second and client.
		{"ipv4/icmp_ratelimit", "0", false},
		{"ipv6/icmp/ratelimit", "0", false},
		{"ipv4/icmp_msgs_per_sec", "1000000", true},
		{"ipv4/icmp_msgs_burst", "100000", true},
	}
	switch h.kind {
	case kindNode, kindRouter:
		// ip_forward comes first: writing it resets others.
		list = append([]setting{{"ipv4/ip_forward", "1", false}, {"ipv6/conf/all/forwarding", "1", false}}, list...)
	case kindPod, kindClient:
		list = append(list,
			setting{"ipv4/ip_local_port_range", "10000 60999", false},
			setting{"ipv4/tcp_tw_reuse", "1", true})
	case kindWire:
		list = append(list,
			setting{"bridge/bridge-nf-call-iptables", "0", true},
			setting{"bridge/bridge-nf-call-ip6tables", "0", true})
	}
	for _, s := range list {
		err := os.WriteFile("/proc/sys/net/"+s.name, []byte(s.value), 0)
		if s.optional && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission)) {
			continue
		}
		if err != nil {
			return fmt.Errorf("set net/%s of %s to %q: %w", s.name, h.Name, s.value, err)
		}
	}
	return nil
}
