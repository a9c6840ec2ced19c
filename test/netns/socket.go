package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// SCTP tells whether this kernel has SCTP sockets.
func SCTP() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return false
	}
	// Nothing was sent over it.
	_ = unix.Close(fd)
	return true
}

// socket makes a non-blocking socket in the host's namespace. From then on it may be used from anywhere: a socket belongs
// to the namespace that it was made in. An address of either family decides the socket's family.
func (h *Host) socket(proto model.Protocol, is4 bool) (fd int, err error) {
	family, kind := unix.AF_INET6, unix.SOCK_STREAM
	if is4 {
		family = unix.AF_INET
	}
	if proto == model.UDP {
		kind = unix.SOCK_DGRAM
	}
	doErr := h.Do(func() error {
		fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(proto))
		return nil
	})
	if err := errors.Join(doErr, err); err != nil {
		return -1, fmt.Errorf("open a %s socket in %s: %w", proto, h.Name, err)
	}
	return fd, nil
}

// listen binds a socket to a port on every address of one family.
func (h *Host) listen(proto model.Protocol, is4 bool, port uint16) (*os.File, error) {
	fd, err := h.socket(proto, is4)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), fmt.Sprintf("%s %s:%d", h.Name, proto, port))
	any6 := netip.AddrPortFrom(netip.IPv6Unspecified(), port)
	any4 := netip.AddrPortFrom(netip.IPv4Unspecified(), port)
	addr, level, info := any6, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	if is4 {
		addr, level, info = any4, unix.IPPROTO_IP, unix.IP_PKTINFO
	}
	err = setOptions(fd, []option{
		{unix.SOL_SOCKET, unix.SO_REUSEADDR, true},
		{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, !is4},
		{level, info, proto == model.UDP},
	})
	if err == nil {
		err = unix.Bind(fd, sockaddr(addr))
	}
	if err == nil && proto != model.UDP {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		// The first error counts; nothing was written.
		_ = f.Close()
		return nil, fmt.Errorf("listen on %s port %d in %s: %w", proto, port, h.Name, err)
	}
	return f, nil
}

// backlog is how many connections may wait to be accepted.
const backlog = 4096

// An option is a socket option to be switched on, if wanted.
type option struct {
	level, name int
	wanted      bool
}

func setOptions(fd int, options []option) error {
	for _, o := range options {
		if !o.wanted {
			continue
		}
		if err := unix.SetsockoptInt(fd, o.level, o.name, 1); err != nil {
			return fmt.Errorf("set socket option %d of level %d: %w", o.name, o.level, err)
		}
	}
	return nil
}

// connect opens a connection and waits until it stands; for UDP it only fixes the addresses.
func (h *Host) connect(proto model.Protocol, from, to netip.AddrPort, deadline time.Time) (net.Conn, error) {
	fd, err := h.socket(proto, to.Addr().Is4())
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), fmt.Sprintf("%s %s", h.Name, to))
	// FileConn works on a copy of the descriptor.
	defer func() { _ = f.Close() }()
	if from.IsValid() {
		err = setOptions(fd, []option{
			{unix.SOL_SOCKET, unix.SO_REUSEADDR, from.Port() != 0},
			{unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, from.Port() == 0 && from.Addr().Is4()},
		})
		if err == nil {
			err = unix.Bind(fd, sockaddr(from))
		}
		if err != nil {
			return nil, fmt.Errorf("bind to %s in %s: %w", from, h.Name, err)
		}
	}
	if err := unix.Connect(fd, sockaddr(to)); err != nil && err != unix.EINPROGRESS {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	if err := awaitConnected(f, deadline); err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("use the connection to %s: %w", to, err)
	}
	return c, nil
}

// awaitConnected waits until a socket is writable and gives its error.
func awaitConnected(f *os.File, deadline time.Time) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("use the socket: %w", err)
	}
	if err := f.SetWriteDeadline(deadline); err != nil {
		return fmt.Errorf("set the deadline: %w", err)
	}
	var state error
	err = raw.Write(func(fd uintptr) bool {
		var done bool
		done, state = connected(int(fd))
		return done
	})
	if err != nil {
		return fmt.Errorf("wait: %w", err)
	}
	return state
}

// connected tells whether an attempt to connect has ended, and how.
func connected(fd int) (bool, error) {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return true, fmt.Errorf("read the state of the socket: %w", err)
	}
	if code != 0 {
		return true, unix.Errno(code) //nolint:wrapcheck // it is the answer; the caller says to what
	}
	// The poller may wake up early: the socket has a peer only once it is connected.
	_, err = unix.Getpeername(fd)
	return err == nil, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// addrPortOf gives a socket address of the net package with IPv4 in its short form.
func addrPortOf(a net.Addr) netip.AddrPort {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
