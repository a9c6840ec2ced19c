package backendtest

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// A conversation is a connection that a script keeps open, or for UDP a client that keeps its port.
type conversation struct {
	host *netns.Host
	call netns.Call
	conn *netns.Conn
	// first is what the connection began with.
	first netns.Result
}

// conversationPort is the first source port of UDP clients that keep theirs; it is outside of what the kernel gives out
// in the lab.
const conversationPort = 61000

// conversation carries out "open" and "ping".
func (p *prober) conversation(r *run, c command) error {
	r.t.Helper()
	name := c.args[0]
	switch c.name {
	case "expires":
		return p.expires(r, c)
	case "open":
		k, err := parsePacket(c.args[1:])
		if err != nil || model.FamilyOf(k.Dst.Addr()) != r.family {
			return err
		}
		return p.open(name, k)
	}
	talk := p.conversations[name]
	switch {
	case talk == nil && r.script.only == 0:
		return nil // it belongs to the other family's run
	case talk == nil:
		return fmt.Errorf("%s was not opened", name)
	case c.name == "stray":
		return p.stray(talk)
	}
	server, err := talk.ping()
	if err != nil {
		return err
	}
	if len(c.args) > 1 && server != c.args[1] {
		return fmt.Errorf("%s answers, want %s", server, c.args[1])
	}
	return nil
}

// ping makes sure that the conversation can go on, and tells with whom.
func (c *conversation) ping() (server string, err error) {
	if c.conn == nil {
		got := c.host.Dial(c.call)
		if got.Kind != netns.OK {
			return "", fmt.Errorf("the kernel: %s", got)
		}
		return got.Server, nil
	}
	if kind, err := c.conn.Ping(answerWithin); kind != netns.OK {
		return "", fmt.Errorf("the connection is %s: %w", kind, err)
	}
	return c.conn.Server, nil
}

func (p *prober) open(name string, k forward.Packet) error {
	host, err := p.site.host(k.Src.Addr())
	if err != nil {
		return err
	}
	talk := &conversation{host: host, call: netns.Call{
		To: k.Dst, Proto: k.Proto, From: netip.AddrPortFrom(k.Src.Addr(), 0), Timeout: answerWithin,
	}}
	p.conversations[name] = talk
	if k.Proto == model.UDP {
		talk.call.From = netip.AddrPortFrom(k.Src.Addr(), uint16(conversationPort+len(p.conversations)))
		first := talk.call
		first.Timeout = silenceAfter
		host.Dial(first) // whatever comes of it: connection tracking now knows the client
		return nil
	}
	conn, got := host.Open(talk.call)
	if conn == nil {
		return fmt.Errorf("the kernel: %s", got)
	}
	talk.conn, talk.first = conn, got
	return nil
}

// close ends what a script left open.
func (p *prober) close() {
	for _, talk := range p.conversations {
		if talk.conn != nil {
			talk.conn.Close()
		}
	}
}

// maxExpiries bounds how often an expired affinity may happen to choose the same endpoint again: with three endpoints,
// eight times in a row happen once in 6,561.
const maxExpiries = 8

// expires waits until session affinity is over, SRC DST:PORT/PROTO TIMEOUT, and looks whether another endpoint comes.
func (p *prober) expires(r *run, c command) error {
	k, err := parsePacket(c.args[:2])
	if err != nil || model.FamilyOf(k.Dst.Addr()) != r.family {
		return err
	}
	timeout, err := time.ParseDuration(c.args[2])
	if err != nil {
		return fmt.Errorf("timeout: %w", err)
	}
	first := p.dial(k, answerWithin)
	for range maxExpiries {
		// Affinity is renewed by each connection, so there is nothing to poll: it ends if nobody asks.
		time.Sleep(timeout + time.Second)
		got := p.dial(k, answerWithin)
		if got.Kind != netns.OK || first.Kind != netns.OK {
			return fmt.Errorf("the kernel: %s, then %s", first, got)
		}
		if got.Server != first.Server {
			return nil
		}
	}
	return fmt.Errorf("after %d times %s without a connection the client still is led to %s", maxExpiries, timeout,
		first.Server)
}
