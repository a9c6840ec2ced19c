package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
)

// ErrNoDaemon tells that nobody answers on the socket: it is absent, or was left by a dead process.
var ErrNoDaemon = errors.New("no daemon answers")

const (
	dialTimeout = 2 * time.Second
	// maxAnswerBytes bounds what is read: 10,000 Services with 10 endpoints are some 20 MiB.
	maxAnswerBytes = 512 << 20
)

// A Client asks the daemon behind a socket. It keeps nothing open between questions.
type Client struct {
	path string
	http *http.Client
}

// NewClient gives a client for the daemon behind a socket. Nothing is asked yet.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialTimeout}
		return d.DialContext(ctx, "unix", path)
	}
	return &Client{path: path, http: &http.Client{
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true, DisableCompression: true},
		Timeout:   dialTimeout + headerTimeout + answerTimeout,
	}}
}

// Status asks how the daemon is. All methods give ErrNoDaemon if nobody answers.
func (c *Client) Status(ctx context.Context) (answer.Status, error) {
	var s answer.Status
	return s, c.ask(ctx, "status", nil, &s)
}

// Listing asks for every frontend.
func (c *Client) Listing(ctx context.Context) (answer.Listing, error) {
	var l answer.Listing
	return l, c.ask(ctx, "ls", nil, &l)
}

// Trace asks what happens to a packet.
func (c *Client) Trace(ctx context.Context, p forward.Packet) (answer.Trace, error) {
	packet := answer.PacketOf(p)
	q := url.Values{"src": {packet.Src}, "dst": {packet.Dst + "/" + packet.Proto}}
	if p.In != "" {
		q.Set("in", p.In)
	}
	var t answer.Trace
	return t, c.ask(ctx, "trace", q, &t)
}

// Table copies the text of the daemon's forwarding tables.
func (c *Client) Table(ctx context.Context, w io.Writer) error {
	body, err := c.get(ctx, "table", nil)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	if _, err = io.Copy(w, body); err != nil {
		return fmt.Errorf("copy the table of the daemon on %s: %w", c.path, err)
	}
	return nil
}

func (c *Client) ask(ctx context.Context, what string, q url.Values, into any) error {
	body, err := c.get(ctx, what, q)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	if err := json.NewDecoder(body).Decode(into); err != nil {
		return fmt.Errorf("answer of the daemon on %s about %s: %w", c.path, what, err)
	}
	return nil
}

func (c *Client) get(ctx context.Context, what string, q url.Values) (io.ReadCloser, error) {
	address := url.URL{Scheme: "http", Host: "turnout", Path: "/v1/" + what, RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("ask the daemon about %s: %w", what, err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	body := struct {
		io.Reader
		io.Closer
	}{io.LimitReader(resp.Body, maxAnswerBytes), resp.Body}
	if resp.StatusCode == http.StatusOK {
		return body, nil
	}
	defer func() { _ = resp.Body.Close() }()
	var f failure
	if err := json.NewDecoder(body).Decode(&f); err != nil || f.Error == "" {
		f.Error = strings.ToLower(http.StatusText(resp.StatusCode))
	}
	return nil, fmt.Errorf("daemon on %s: %s", c.path, f.Error)
}

// explain drops what the HTTP client adds, which says nothing about a socket.
func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("socket %s: %w", c.path, ErrNoDaemon)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("socket %s: permission denied; run as root", c.path)
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("socket %s: the daemon hung up; run as root", c.path)
	}
	return fmt.Errorf("ask the daemon on %s: %w", c.path, err)
}
