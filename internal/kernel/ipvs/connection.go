package ipvs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// connectionFile lists the connections of the reading thread's network namespace; /proc/net would be that of the process's
// first thread. IPVS has no way by netlink.
const connectionFile = "/proc/thread-self/net/ip_vs_conn"

// A Connection is one entry of IPVS's own table, which is not that of conntrack.
type Connection struct {
	// Proto is 0 for the template of a mark's server.
	Proto model.Protocol
	// Client, Virtual and Destination are the addresses before and after. A template has the client's address cut to the
	// server's prefix, and port 0 in the place of each port that does not matter.
	Client, Virtual, Destination netip.AddrPort
	// State is the kernel's word, as "ESTABLISHED", "UDP".
	State string
	// Expires is how long the entry is kept if no packet comes, in whole seconds.
	Expires time.Duration
	// Template is set for an entry that is no connection: it keeps a client at its destination.
	Template bool
	// Mark is that of the server whose template this is; Virtual is zero then. The connections themselves do not show it.
	Mark uint32
}

// The columns of a row; a row with a persistence engine's name and data has two more.
const (
	columnProto = iota
	columnClient
	columnClientPort
	columnVirtual
	columnVirtualPort
	columnDestination
	columnDestinationPort
	columnState
	columnExpires
	columns
)

const (
	// maxRow bounds a row. The longest that the kernel prints has three IPv6 addresses and 255 bytes of an engine's data.
	maxRow = 4096
	// maxStates bounds the words that are kept; the kernel has some thirty.
	maxStates = 64
	// askEvery is how many rows are read between looks at the context.
	askEvery = 1024
)

// A connectionReader reads rows and keeps the words for states, which are few.
type connectionReader struct {
	states map[string]string
}

// read hands over the connections of a listing, until yield says false.
func (c *connectionReader) read(ctx context.Context, r io.Reader, yield func(Connection) bool) error {
	c.states = map[string]string{}
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, maxRow), maxRow)
	for n := 0; lines.Scan(); n++ {
		if n%askEvery == 0 {
			if err := ctx.Err(); err != nil {
				return err //nolint:wrapcheck // the caller does
			}
		}
		line := lines.Bytes()
		if n == 0 && bytes.HasPrefix(line, []byte("Pro ")) {
			continue
		}
		conn, err := c.row(line)
		if err != nil {
			return fmt.Errorf("row %d: %w", n, err)
		}
		if !yield(conn) {
			return nil
		}
	}
	return lines.Err() //nolint:wrapcheck // the caller does
}

var errRow = errors.New("the kernel lists a connection in a form that is not known")

func (c *connectionReader) row(line []byte) (Connection, error) {
	var field [columns][]byte
	for i := range field {
		line = bytes.TrimLeft(line, " ")
		end := bytes.IndexByte(line, ' ')
		if end < 0 {
			end = len(line)
		}
		field[i], line = line[:end], line[end:]
	}
	var conn Connection
	proto, ok1 := protocol(field[columnProto])
	client, ok2 := endpoint(field[columnClient], field[columnClientPort])
	virtual, ok3 := endpoint(field[columnVirtual], field[columnVirtualPort])
	destination, ok4 := endpoint(field[columnDestination], field[columnDestinationPort])
	expires, ok5 := decimal(field[columnExpires])
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 {
		return conn, errRow
	}
	conn = Connection{
		Proto: proto, Client: client, Virtual: virtual, Destination: destination,
		State: c.word(field[columnState]), Expires: time.Duration(expires) * time.Second,
	}
	// The state tells nothing before Linux 4.19. An entry that FTP's helper makes beforehand has no client's port, either.
	conn.Template = client.Port() == 0 && conn.State != "LISTEN"
	if conn.Template && proto == 0 { // the kernel keeps the mark in the place of the address
		b := virtual.Addr().AsSlice()
		conn.Mark = uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
		conn.Virtual = netip.AddrPort{}
	}
	return conn, nil
}

// word gives a string that is made once for each word.
func (c *connectionReader) word(b []byte) string {
	if s, is := c.states[string(b)]; is {
		return s
	}
	s := string(b)
	if len(c.states) < maxStates {
		c.states[s] = s
	}
	return s
}

// protocol reads a name as the kernel prints it: "IP_50" for a number without one.
func protocol(b []byte) (model.Protocol, bool) {
	switch string(b) {
	case "TCP":
		return model.TCP, true
	case "UDP":
		return model.UDP, true
	case "SCTP":
		return model.SCTP, true
	case "IP":
		return 0, true
	case "ICMP":
		return unix.IPPROTO_ICMP, true
	case "ICMPv6":
		return unix.IPPROTO_ICMPV6, true
	}
	rest, numbered := bytes.CutPrefix(b, []byte("IP_"))
	n, ok := decimal(rest)
	return model.Protocol(n), numbered && ok && n <= 255
}

func decimal(b []byte) (uint32, bool) {
	var n uint64
	for _, c := range b {
		if c < '0' || c > '9' || n > 1<<32 {
			return 0, false
		}
		n = 10*n + uint64(c-'0')
	}
	return uint32(n), len(b) > 0 && n < 1<<32
}

// endpoint reads an address of eight hexadecimal digits, or of eight groups of four, and a port of four.
func endpoint(addr, port []byte) (netip.AddrPort, bool) {
	var p [2]byte
	if len(port) != 4 || !hexadecimal(p[:], port) {
		return netip.AddrPort{}, false
	}
	number := uint16(p[0])<<8 | uint16(p[1])
	switch len(addr) {
	case 8:
		var a [4]byte
		ok := hexadecimal(a[:], addr)
		return netip.AddrPortFrom(netip.AddrFrom4(a), number), ok
	case 39:
		var a [16]byte
		for i := range 8 {
			if i > 0 && addr[5*i-1] != ':' || !hexadecimal(a[2*i:2*i+2], addr[5*i:5*i+4]) {
				return netip.AddrPort{}, false
			}
		}
		return netip.AddrPortFrom(netip.AddrFrom16(a), number), true
	}
	return netip.AddrPort{}, false
}

// hexadecimal fills out from twice as many digits.
func hexadecimal(out, digits []byte) bool {
	for i := range out {
		high, ok1 := digit(digits[2*i])
		low, ok2 := digit(digits[2*i+1])
		if !ok1 || !ok2 {
			return false
		}
		out[i] = high<<4 | low
	}
	return true
}

func digit(c byte) (byte, bool) {
	switch {
	case c >= '0' && c <= '9':
		return c - '0', true
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10, true
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}
