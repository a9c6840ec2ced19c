package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/netutil"
)

// The limits of every server here. Anybody who can reach the node can connect, so each is small: a health check is one
// short request.
const (
	requestTimeout = 5 * time.Second
	idleTimeout    = 30 * time.Second
	maxHeaderBytes = 8 << 10
	maxConnections = 256
	// retryListen is the time between tries to open an address.
	retryListen = 5 * time.Second
)

func newServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: requestTimeout, ReadTimeout: requestTimeout, WriteTimeout: requestTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
	}
}

// A Server is one HTTP server at a fixed address, which is tried again for as long as it cannot be opened.
type Server struct {
	// Addr is "address:port".
	Addr    string
	Handler http.Handler
	// WriteTimeout bounds an answer. Default 5 s; a server of profiles needs more.
	WriteTimeout time.Duration
	// Strict makes Run return with the first error instead of trying again.
	Strict bool
	// Report is told of the first failure in a row, and with nil when the address is open again; may be nil.
	Report func(err error)
	// Ready is told of the address once it is open; may be nil.
	Ready func(net.Addr)
}

// Run serves until the context ends and then gives nil.
func (s *Server) Run(ctx context.Context) error {
	failed := false
	for {
		err := s.serve(ctx, func(a net.Addr) {
			if failed && s.Report != nil {
				s.Report(nil)
			}
			failed = false
			if s.Ready != nil {
				s.Ready(a)
			}
		})
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end was asked for, whatever it broke
		}
		if s.Strict {
			return err
		}
		if !failed && s.Report != nil {
			s.Report(err)
		}
		failed = true
		if !pause(ctx, retryListen) {
			return nil
		}
	}
}

func (s *Server) serve(ctx context.Context, opened func(net.Addr)) error {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", s.Addr)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", s.Addr, err)
	}
	opened(l.Addr())
	server := newServer(s.Handler)
	if s.WriteTimeout > 0 {
		server.WriteTimeout = s.WriteTimeout
	}
	// Closing also ends the connections that wait for a next request.
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(netutil.LimitListener(l, maxConnections)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", s.Addr, err)
	}
	return nil
}

// pause waits; it gives false if the context ended first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// writeJSON answers with a value, indented if indent is set.
func writeJSON(w http.ResponseWriter, status int, value any, indent string) {
	var body []byte
	var err error
	if indent == "" {
		body, err = json.Marshal(value)
	} else {
		body, err = json.MarshalIndent(value, "", indent)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	// A client that is gone gets no answer.
	_, _ = w.Write(body)
}
