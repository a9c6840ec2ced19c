package control

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
)

// A Daemon answers questions about itself. Its methods may be called at the same time.
type Daemon interface {
	Status(ctx context.Context) (answer.Status, error)
	// Listing gives every frontend, compared with what the kernel holds at the moment.
	Listing(ctx context.Context) (answer.Listing, error)
	Trace(ctx context.Context, p forward.Packet) (answer.Trace, error)
	// Table writes the forwarding tables in their text form.
	Table(ctx context.Context, w io.Writer) error
}

// What a client may use up.
const (
	maxClients     = 16
	maxHeaderBytes = 8 << 10
	headerTimeout  = 2 * time.Second
	// answerTimeout is how long one question may take. Reading a big table back takes seconds, and on a busy machine many.
	answerTimeout = time.Minute
	// stopTimeout is how long answers that are under way may take when the daemon stops.
	stopTimeout = time.Second
)

// NewServer gives a server for Serve. Its ErrorLog is the caller's to set.
func NewServer(d Daemon) *http.Server {
	server := &http.Server{
		Handler: handler(d), MaxHeaderBytes: maxHeaderBytes,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: headerTimeout, IdleTimeout: headerTimeout,
		WriteTimeout: headerTimeout + answerTimeout,
	}
	// One question a connection: nobody keeps a place without asking.
	server.SetKeepAlivesEnabled(false)
	return server
}

// Serve answers on the listener until the context ends, and closes it. A server serves once.
func Serve(ctx context.Context, ln net.Listener, server *http.Server) error {
	server.BaseContext = func(net.Listener) context.Context { return ctx }
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(limit(ln, maxClients)) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := server.Shutdown(stop); err != nil {
		_ = server.Close()
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// handler is the interface on the socket.
func handler(d Daemon) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", reply(func(r *http.Request) (any, error) { return d.Status(r.Context()) }))
	mux.HandleFunc("GET /v1/ls", reply(func(r *http.Request) (any, error) { return d.Listing(r.Context()) }))
	mux.HandleFunc("GET /v1/trace", reply(func(r *http.Request) (any, error) {
		q := r.URL.Query()
		p, err := answer.ParsePacket(q.Get("src"), q.Get("dst"), q.Get("in"))
		if err != nil {
			return nil, &badRequestError{err}
		}
		return d.Trace(r.Context(), p)
	}))
	mux.HandleFunc("GET /v1/table", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		tw := &tracked{ResponseWriter: w}
		if err := d.Table(r.Context(), tw); err != nil && !tw.written {
			fail(w, http.StatusServiceUnavailable, err)
		}
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), answerTimeout)
		defer cancel()
		r.Body = http.MaxBytesReader(w, r.Body, 0)
		mux.ServeHTTP(w, r.WithContext(ctx))
	})
}

// A badRequestError is the client's fault.
type badRequestError struct{ error }

// reply sends a value as JSON, or the error in its place.
func reply(ask func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		value, err := ask(r)
		if err != nil {
			status := http.StatusServiceUnavailable
			if _, ok := errors.AsType[*badRequestError](err); ok {
				status = http.StatusBadRequest
			}
			fail(w, status, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		// Once the header is out an error has nowhere to go but to the client, who sees the answer end.
		_ = json.NewEncoder(w).Encode(value)
	}
}

// A failure is the body of an answer that is not one.
type failure struct {
	Error string `json:"error"`
}

func fail(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(failure{Error: err.Error()})
}

// tracked remembers whether anything was written.
type tracked struct {
	http.ResponseWriter
	written bool
}

func (t *tracked) Write(b []byte) (int, error) {
	t.written = true
	return t.ResponseWriter.Write(b) //nolint:wrapcheck // a writer hands on what the one below says
}

// limit lets at most n connections be open; more clients wait in the kernel's queue. The timeouts above bound the wait.
func limit(ln net.Listener, n int) net.Listener {
	return &limited{Listener: ln, places: make(chan struct{}, n), closed: make(chan struct{})}
}
