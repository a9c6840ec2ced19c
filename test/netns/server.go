package netns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Server answers on one port of every address of a host. To each TCP or SCTP connection, and to each UDP datagram, it
// says one line: its name, the port it listens on, and the client's address as it sees it ("s1 8080 10.20.0.200:41234").
// On a connection it then sends back every line that it gets, until the client closes.
type Server struct {
	// Name is what it calls itself. The servers of a crowd say the address they were reached on instead.
	Name  string
	Proto model.Protocol
	Port  uint16

	byAddress bool
	silent    bool
	running   sync.WaitGroup
	closed    sync.Once

	mu       sync.Mutex
	stopped  bool
	sockets  map[io.Closer]struct{}
	received map[netip.AddrPort]int
	total    int
}

// Serve starts a server on a host, for both IP families. It is stopped with the Lab, if not before.
func (h *Host) Serve(proto model.Protocol, port uint16) (*Server, error) {
	return h.serve(&Server{Name: h.Name, Proto: proto, Port: port, byAddress: h.crowd != nil})
}

// ServeSilently starts a UDP server that only counts what it receives.
func (h *Host) ServeSilently(port uint16) (*Server, error) {
	return h.serve(&Server{Name: h.Name, Proto: model.UDP, Port: port, silent: true})
}

func (h *Host) serve(s *Server) (*Server, error) {
	s.sockets, s.received = map[io.Closer]struct{}{}, map[netip.AddrPort]int{}
	for _, is4 := range []bool{true, false} {
		f, err := h.listen(s.Proto, is4, s.Port)
		if err == nil {
			err = s.start(f, is4)
		}
		if err != nil {
			s.Close()
			return nil, err
		}
	}
	h.lab.atClose(func() error { s.Close(); return nil })
	return s, nil
}

// start serves one socket. It takes the file over.
func (s *Server) start(f *os.File, is4 bool) error {
	defer func() { _ = f.Close() }() // what follows works on a copy
	if s.Proto == model.UDP {
		pc, err := net.FilePacketConn(f)
		if err != nil {
			return fmt.Errorf("use the socket %s: %w", f.Name(), err)
		}
		udp, ok := pc.(*net.UDPConn)
		if !ok {
			return fmt.Errorf("socket %s is no UDP socket", f.Name())
		}
		s.keep(udp)
		s.running.Go(func() { s.datagrams(udp, is4) })
		return nil
	}
	l, err := net.FileListener(f)
	if err != nil {
		return fmt.Errorf("use the socket %s: %w", f.Name(), err)
	}
	s.keep(l)
	s.running.Go(func() { s.accept(l) })
	return nil
}

// Close stops the server: it accepts nothing any more and its connections are closed. It may be called twice.
func (s *Server) Close() {
	s.closed.Do(func() {
		s.mu.Lock()
		s.stopped = true
		sockets := s.sockets
		s.sockets = nil
		s.mu.Unlock()
		for c := range sockets {
			// An error means that the peer was faster.
			_ = c.Close()
		}
	})
	s.running.Wait()
}

// Received tells how many connections or datagrams came in, and from which clients.
func (s *Server) Received() (total int, byClient map[netip.AddrPort]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total, maps.Clone(s.received)
}

// maxClients bounds what a server remembers of its clients, so that a long load does not fill the memory.
const maxClients = 10_000

func (s *Server) count(client netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total++
	if _, known := s.received[client]; known || len(s.received) < maxClients {
		s.received[client]++
	}
}

// keep remembers a socket for Close. On a stopped server it closes the socket at once and gives false.
func (s *Server) keep(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		_ = c.Close() // it is not wanted any more
		return false
	}
	s.sockets[c] = struct{}{}
	return true
}

func (s *Server) drop(c io.Closer) {
	s.mu.Lock()
	delete(s.sockets, c)
	s.mu.Unlock()
	_ = c.Close() // a second close, after Close, is harmless
}

func (s *Server) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // the client has gone before it was accepted
		}
		if !s.keep(c) {
			return
		}
		s.running.Go(func() {
			defer s.drop(c)
			s.converse(c)
		})
	}
}

// converse answers one connection.
func (s *Server) converse(c net.Conn) {
	client := addrPortOf(c.RemoteAddr())
	s.count(client)
	if _, err := io.WriteString(c, s.answer(addrPortOf(c.LocalAddr()).Addr(), client)); err != nil {
		return // the client has gone
	}
	lines := bufio.NewReader(c)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return
		}
		if _, err := c.Write(line); err != nil {
			return
		}
	}
}

func (s *Server) answer(local netip.Addr, client netip.AddrPort) string {
	name := s.Name
	if s.byAddress {
		name = local.String()
	}
	return fmt.Sprintf("%s %d %s\n", name, s.Port, client)
}

// datagrams answers what comes in on a UDP socket, from the address that it was sent to.
func (s *Server) datagrams(c *net.UDPConn, is4 bool) {
	buf, oob := make([]byte, 2048), make([]byte, 256)
	for {
		_, n, _, client, err := c.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error for an earlier answer
		}
		client = netip.AddrPortFrom(client.Addr().Unmap(), client.Port())
		s.count(client)
		local, info, err := destination(oob[:n], is4)
		if s.silent || err != nil {
			continue
		}
		// The client learns from its timeout if this fails.
		_, _, _ = c.WriteMsgUDPAddrPort([]byte(s.answer(local, client)), info, client)
	}
}

// destination reads from a datagram's control data which address it was sent to, and makes the control data for an answer
// from there.
func destination(oob []byte, is4 bool) (netip.Addr, []byte, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}, nil, fmt.Errorf("parse control data: %w", err)
	}
	// struct in_pktinfo is interface, local address, destination; struct in6_pktinfo is destination, interface (ip(7),
	// ipv6(7)).
	const info4Bytes, info6Bytes = 12, 20
	for _, m := range messages {
		switch {
		case is4 && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= info4Bytes:
			a := [4]byte(m.Data[8:info4Bytes])
			return netip.AddrFrom4(a), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a}), nil
		case !is4 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= info6Bytes:
			a := [16]byte(m.Data[:16])
			return netip.AddrFrom16(a), unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a}), nil
		}
	}
	return netip.Addr{}, nil, errors.New("the control data do not tell the destination")
}
