package backendtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// stray sends a segment from the server's side of a connection that is far ahead of what the client can take, but whose
// acknowledgement fits: were the client to reset what it does not know, the server would believe the reset.
//
// Segments that are too late rather than too early would not do: since Linux 6.0 connection tracking lets them pass.
func (p *prober) stray(talk *conversation) error {
	server := p.site.lab.Host(talk.first.Server)
	w := wire{from: netip.AddrPortFrom(server.Addr4(), talk.first.Port), to: talk.first.ClientSeen}
	if w.to.Addr().Is6() {
		w.from = netip.AddrPortFrom(server.Addr6(), talk.first.Port)
	}
	return server.Do(func() error {
		sniff, err := w.listen()
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(sniff) }() // it was only read
		if _, err := talk.ping(); err != nil {
			return err
		}
		seq, ack, err := w.sniff(sniff)
		if err != nil {
			return err
		}
		const ahead = 1 << 29
		return w.send(seq+ahead, ack)
	})
}

// A wire is one direction of a TCP connection.
type wire struct{ from, to netip.AddrPort }

// listen opens a socket that sees all packets of the family, those sent included.
func (w wire) listen() (int, error) {
	proto := uint16(unix.ETH_P_ALL)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(proto<<8|proto>>8))
	if err != nil {
		return -1, fmt.Errorf("open a packet socket: %w", err)
	}
	timeout := unix.NsecToTimeval(answerWithin.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return -1, errors.Join(fmt.Errorf("bound the time of a packet socket: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// sniff gives the next sequence number and the acknowledgement of the first segment of this direction that comes by.
func (w wire) sniff(fd int) (seq, ack uint32, err error) {
	buf := make([]byte, 65536)
	for deadline := time.Now().Add(answerWithin); time.Now().Before(deadline); {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return 0, 0, fmt.Errorf("wait for a segment from %s: %w", w.from, err)
		}
		tcp := w.segment(buf[:n])
		if tcp == nil {
			continue
		}
		payload := len(tcp) - int(tcp[12]>>4)*4
		return binary.BigEndian.Uint32(tcp[4:]) + uint32(payload), binary.BigEndian.Uint32(tcp[8:]), nil
	}
	return 0, 0, fmt.Errorf("no segment from %s came by", w.from)
}

// segment gives the TCP part of an IP packet of this direction, else nil.
func (w wire) segment(packet []byte) []byte {
	const v4Bytes, v6Bytes, tcpBytes = 20, 40, 20
	if len(packet) < v4Bytes+tcpBytes {
		return nil
	}
	head, end, proto := int(packet[0]&15)*4, int(binary.BigEndian.Uint16(packet[2:])), packet[9]
	if packet[0]>>4 == 6 {
		head, end, proto = v6Bytes, v6Bytes+int(binary.BigEndian.Uint16(packet[4:])), packet[6]
	}
	if proto != unix.IPPROTO_TCP || end > len(packet) || end < head+tcpBytes {
		return nil
	}
	tcp := packet[head:end]
	if binary.BigEndian.Uint16(tcp) != w.from.Port() || binary.BigEndian.Uint16(tcp[2:]) != w.to.Port() {
		return nil
	}
	return tcp
}

// send writes one segment past all sockets.
func (w wire) send(seq, ack uint32) error {
	family := unix.AF_INET6
	var dst unix.Sockaddr = &unix.SockaddrInet6{Addr: w.to.Addr().As16()}
	if w.to.Addr().Is4() {
		family, dst = unix.AF_INET, &unix.SockaddrInet4{Addr: w.to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }() // what was sent is on its way
	segment := make([]byte, 20)
	binary.BigEndian.PutUint16(segment, w.from.Port())
	binary.BigEndian.PutUint16(segment[2:], w.to.Port())
	binary.BigEndian.PutUint32(segment[4:], seq)
	binary.BigEndian.PutUint32(segment[8:], ack)
	const words, ackFlag, window = 5, 0x10, 1024
	segment[12], segment[13] = words<<4, ackFlag
	binary.BigEndian.PutUint16(segment[14:], window)
	binary.BigEndian.PutUint16(segment[16:], checksum(w.from.Addr(), w.to.Addr(), segment))
	if err := unix.Sendto(fd, segment, 0, dst); err != nil {
		return fmt.Errorf("send a stray segment to %s: %w", w.to, err)
	}
	return nil
}

// checksum is TCP's, over the pseudo header and the segment (RFC 9293, section 3.1), whose own field is zero.
func checksum(from, to netip.Addr, segment []byte) uint16 {
	sum := uint32(len(segment)) + unix.IPPROTO_TCP
	for _, part := range [][]byte{from.AsSlice(), to.AsSlice(), segment} {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
