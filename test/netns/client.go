package netns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Kind tells how an attempt ended.
type Kind uint8

// The ways an attempt can end.
const (
	// OK: a server answered.
	OK Kind = iota + 1
	// Refused: an ICMP port-unreachable or a reset came back instead of a connection, as for a REJECT rule or a port that
	// nobody listens on.
	Refused
	// Timeout: nothing came back in time, as for a DROP rule.
	Timeout
	// Unreachable: the network said that there is no way, as for an address that no rule takes. The kernel's routing says so
	// to one address five times at once and then once a second; attempts in between time out.
	Unreachable
	// Reset: the connection stood and was reset.
	Reset
	// Closed: the connection was closed before an answer came.
	Closed
	// Failed: anything else; Result.Err tells.
	Failed
)

// String gives one lower-case word.
func (k Kind) String() string {
	switch k {
	case OK:
		return "ok"
	case Refused:
		return "refused"
	case Timeout:
		return "timeout"
	case Unreachable:
		return "unreachable"
	case Reset:
		return "reset"
	case Closed:
		return "closed"
	case Failed:
		return "failed"
	}
	return "unknown"
}

// DefaultTimeout is how long a Call waits if it does not say otherwise. Within a Lab an answer takes less than 10 ms; the
// rest is for busy machines.
const DefaultTimeout = 2 * time.Second

// A Call is one attempt to reach a server.
type Call struct {
	To netip.AddrPort
	// Proto is TCP if it is not set.
	Proto model.Protocol
	// From is the client's own address and port. A zero port is any free one; the zero value leaves both to the kernel.
	From netip.AddrPort
	// Timeout is for the whole attempt; 0 is DefaultTimeout.
	Timeout time.Duration
}

// A Result says how a Call ended.
type Result struct {
	Kind Kind
	// Server and Port are what the server calls itself and the port it listens on.
	Server string
	Port   uint16
	// ClientSeen is the client's address as the server sees it; Local is the client's own.
	ClientSeen, Local netip.AddrPort
	Took              time.Duration
	// Err is nil for OK only.
	Err error
}

// String gives one line.
func (r Result) String() string {
	if r.Kind == OK {
		return fmt.Sprintf("ok from %s:%d, which saw %s", r.Server, r.Port, r.ClientSeen)
	}
	return fmt.Sprintf("%s: %v", r.Kind, r.Err)
}

// Dial reaches a server, reads its answer and closes. For UDP it sends one datagram and waits for one.
func (h *Host) Dial(c Call) Result {
	conn, r := h.Open(c)
	if conn != nil {
		conn.Close()
	}
	return r
}

// TCP is Dial over TCP with no more than an address, such as "10.70.1.10:80"; it panics if the text is not one.
func (h *Host) TCP(to string) Result { return h.Dial(Call{To: netip.MustParseAddrPort(to)}) }

// UDP is Dial over UDP with no more than an address; it panics if the text is not one.
func (h *Host) UDP(to string) Result {
	return h.Dial(Call{To: netip.MustParseAddrPort(to), Proto: model.UDP})
}

// Open is Dial without the close: the connection is the caller's. It is nil unless the result is OK.
func (h *Host) Open(c Call) (*Conn, Result) {
	if c.Proto == 0 {
		c.Proto = model.TCP
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	start := time.Now()
	conn, r, err := h.open(c, start.Add(c.Timeout))
	r.Took = time.Since(start)
	if err != nil {
		r.Kind, r.Err = kindOf(err), err
		return nil, r
	}
	r.Kind = OK
	return conn, r
}

func (h *Host) open(c Call, deadline time.Time) (*Conn, Result, error) {
	socket, err := h.connect(c.Proto, c.From, c.To, deadline)
	if err != nil {
		return nil, Result{}, err
	}
	r := Result{Local: addrPortOf(socket.LocalAddr())}
	conn := &Conn{conn: socket, lines: bufio.NewReader(socket), Server: "", To: c.To}
	err = socket.SetDeadline(deadline)
	if err == nil && c.Proto == model.UDP {
		_, err = io.WriteString(socket, "hello\n")
	}
	var line string
	if err == nil {
		line, err = conn.lines.ReadString('\n')
	}
	if err == nil {
		err = r.parse(line)
	}
	if err != nil {
		conn.Close()
		return nil, r, fmt.Errorf("ask %s: %w", c.To, err)
	}
	conn.Server = r.Server
	return conn, r, nil
}

// parse reads a server's line.
func (r *Result) parse(line string) error {
	f := strings.Fields(line)
	if len(f) != 3 {
		return fmt.Errorf("answer %q is not of a server of this lab", line)
	}
	port, err := strconv.ParseUint(f[1], 10, 16)
	if err != nil {
		return fmt.Errorf("answer %q has no port: %w", line, err)
	}
	seen, err := netip.ParseAddrPort(f[2])
	if err != nil {
		return fmt.Errorf("answer %q has no client address: %w", line, err)
	}
	r.Server, r.Port, r.ClientSeen = f[0], uint16(port), seen
	return nil
}

func kindOf(err error) Kind {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ETIMEDOUT):
		return Timeout
	case errors.Is(err, unix.ECONNREFUSED):
		return Refused
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return Unreachable
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return Reset
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
		return Closed
	}
	return Failed
}

// A Conn is an open connection to a Server.
type Conn struct {
	// Server is who answered, To the address that was dialled.
	Server string
	To     netip.AddrPort

	conn  net.Conn
	lines *bufio.Reader
}

// Ping sends a line and waits until it comes back; OK means that the connection lives. A UDP "connection" is answered with
// the server's line instead, which must come from the same server.
func (c *Conn) Ping(timeout time.Duration) (Kind, error) {
	if err := c.ping(time.Now().Add(timeout)); err != nil {
		return kindOf(err), err
	}
	return OK, nil
}

func (c *Conn) ping(deadline time.Time) error {
	if err := c.conn.SetDeadline(deadline); err != nil {
		return fmt.Errorf("set the deadline of a connection: %w", err)
	}
	if _, err := io.WriteString(c.conn, "ping\n"); err != nil {
		return fmt.Errorf("ping %s: %w", c.To, err)
	}
	line, err := c.lines.ReadString('\n')
	if err != nil {
		return fmt.Errorf("ping %s: %w", c.To, err)
	}
	if line != "ping\n" && !strings.HasPrefix(line, c.Server+" ") {
		return fmt.Errorf("ping %s: %w: %s became %q", c.To, errOtherServer, c.Server, line)
	}
	return nil
}

// errOtherServer tells that a conversation went on with another server.
var errOtherServer = errors.New("another server answered")

// Close closes the connection.
func (c *Conn) Close() {
	// The peer may have closed before; there is nothing to be saved.
	_ = c.conn.Close()
}
