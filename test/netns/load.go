package netns

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Load is steady traffic to one address.
type Load struct {
	To    netip.AddrPort
	Proto model.Protocol // TCP if not set
	// Rate is how many new connections (for UDP: exchanges from new ports) a second are opened; 0 is none.
	Rate int
	// Long is how many connections are kept open, each with a ping every Heartbeat (0 is 100 ms). One that ends is
	// counted and opened again.
	Long      int
	Heartbeat time.Duration
	// Timeout is for each attempt and each ping; 0 is DefaultTimeout.
	Timeout time.Duration
	// Expect are the servers that may answer; empty is any. Traffic.Expect changes it.
	Expect []string
}

// Traffic is a running Load.
type Traffic struct {
	load    Load
	from    *Host
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu     sync.Mutex
	tally  Tally
	expect map[string]struct{}
}

// A Tally counts what became of a Load's attempts and pings.
type Tally struct {
	// Opened are the attempts that have ended, OK those that an expected server answered.
	Opened, OK int
	// ByServer counts the answers by server.
	ByServer map[string]int
	// Failed counts the attempts that got no answer, by kind; Misdirected those that another server answered.
	Failed      map[Kind]int
	Misdirected int
	// Pings are those answered; Broken counts the long connections that ended by kind and server.
	Pings  int
	Broken map[Break]int
	// Late are new connections that the generator could not start in time, as the machine was busy.
	Late int
	// Slowest is the longest attempt that was answered.
	Slowest time.Duration
	// First are the first failures, at most ten, for a message.
	First []Failure
}

// A Break is how a long connection ended, and whom it was with.
type Break struct {
	Server string
	Kind   Kind
}

// A Failure is one attempt or ping that went wrong.
type Failure struct {
	At   time.Time
	What string
}

// Load starts steady traffic from a host. It ends with Stop, or with the Lab.
func (h *Host) Load(l Load) *Traffic {
	if l.Heartbeat == 0 {
		l.Heartbeat = 100 * time.Millisecond
	}
	if l.Timeout == 0 {
		l.Timeout = DefaultTimeout
	}
	ctx, cancel := context.WithCancel(context.Background())
	t := &Traffic{load: l, from: h, cancel: cancel, tally: Tally{
		ByServer: map[string]int{}, Failed: map[Kind]int{}, Broken: map[Break]int{},
	}}
	t.Expect(l.Expect...)
	if l.Rate > 0 {
		t.running.Go(func() { t.open(ctx) })
	}
	for range l.Long {
		t.running.Go(func() { t.keepOpen(ctx) })
	}
	h.lab.atClose(func() error { t.Stop(); return nil })
	return t
}

// Expect changes which servers may answer from now on; none is any.
func (t *Traffic) Expect(servers ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expect = map[string]struct{}{}
	for _, s := range servers {
		t.expect[s] = struct{}{}
	}
}

// Stop ends the traffic, waits for the attempts under way and gives the final count.
func (t *Traffic) Stop() Tally {
	t.cancel()
	t.running.Wait()
	return t.Tally()
}

// Tally gives the count so far.
func (t *Traffic) Tally() Tally {
	t.mu.Lock()
	defer t.mu.Unlock()
	copied := t.tally
	copied.ByServer, copied.Failed = maps.Clone(t.tally.ByServer), maps.Clone(t.tally.Failed)
	copied.Broken, copied.First = maps.Clone(t.tally.Broken), slices.Clone(t.tally.First)
	return copied
}

// Failures gives the number of attempts that failed or were misdirected, and of long connections that broke with a server
// that is not among those gone.
func (t Tally) Failures(gone ...string) int {
	n := t.Misdirected
	for _, c := range t.Failed {
		n += c
	}
	for b, c := range t.Broken {
		if !slices.Contains(gone, b.Server) {
			n += c
		}
	}
	return n
}

// String gives a line of counts and, if something failed, the first failures below.
func (t Tally) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d new connections, %d ok, %d misdirected", t.Opened, t.OK, t.Misdirected)
	for _, k := range slices.Sorted(maps.Keys(t.Failed)) {
		fmt.Fprintf(&b, ", %d %s", t.Failed[k], k)
	}
	fmt.Fprintf(&b, "; %d pings", t.Pings)
	broken := make([]string, 0, len(t.Broken))
	for k, n := range t.Broken {
		broken = append(broken, fmt.Sprintf(", %d long connections with %s broken (%s)", n, k.Server, k.Kind))
	}
	slices.Sort(broken)
	b.WriteString(strings.Join(broken, ""))
	for _, f := range t.First {
		fmt.Fprintf(&b, "\n  %s %s", f.At.Format("15:04:05.000"), f.What)
	}
	return b.String()
}

// open starts new connections at the wanted rate. What could not be started in time is left out, not caught up with: a
// burst after a pause would be another load than the one asked for.
func (t *Traffic) open(ctx context.Context) {
	interval := time.Second / time.Duration(t.load.Rate)
	next := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		behind := time.Since(next)
		if skip := int(behind/(10*interval)) * 10; skip > 0 {
			next = next.Add(time.Duration(skip) * interval)
			t.late(skip)
		}
		for ; !next.After(time.Now()); next = next.Add(interval) {
			t.running.Go(func() { t.attempt(ctx) })
		}
		timer.Reset(time.Until(next))
	}
}

func (t *Traffic) late(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tally.Late += n
}

func (t *Traffic) call() Call {
	return Call{To: t.load.To, Proto: t.load.Proto, Timeout: t.load.Timeout}
}

func (t *Traffic) attempt(ctx context.Context) {
	r := t.from.Dial(t.call())
	if ctx.Err() != nil && r.Kind != OK {
		return // the lab may be on its way down
	}
	t.record(r)
}

func (t *Traffic) record(r Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tally.Opened++
	if r.Kind != OK {
		t.tally.Failed[r.Kind]++
		t.note(fmt.Sprintf("new connection from %s: %s", r.Local, r))
		return
	}
	t.tally.ByServer[r.Server]++
	t.tally.Slowest = max(t.tally.Slowest, r.Took)
	if _, fine := t.expect[r.Server]; !fine && len(t.expect) > 0 {
		t.tally.Misdirected++
		t.note(fmt.Sprintf("new connection from %s: answered by %s", r.Local, r.Server))
		return
	}
	t.tally.OK++
}

// keepOpen holds one long connection, and opens the next when it breaks.
func (t *Traffic) keepOpen(ctx context.Context) {
	for ctx.Err() == nil {
		conn, r := t.from.Open(t.call())
		t.record(r)
		if conn == nil {
			if !pause(ctx, t.load.Heartbeat) {
				return
			}
			continue
		}
		t.heartbeat(ctx, conn)
		conn.Close()
	}
}

// heartbeat pings until the connection breaks or the load ends.
func (t *Traffic) heartbeat(ctx context.Context, c *Conn) {
	for pause(ctx, t.load.Heartbeat) {
		kind, err := c.Ping(t.load.Timeout)
		if kind != OK && ctx.Err() != nil {
			return
		}
		t.mu.Lock()
		if kind == OK {
			t.tally.Pings++
			t.mu.Unlock()
			continue
		}
		t.tally.Broken[Break{c.Server, kind}]++
		if errors.Is(err, errOtherServer) {
			t.tally.Misdirected++
		}
		t.note(fmt.Sprintf("long connection with %s: %v", c.Server, err))
		t.mu.Unlock()
		return
	}
}

// note keeps the first failures; t.mu is held.
func (t *Traffic) note(what string) {
	const most = 10
	if len(t.tally.First) < most {
		t.tally.First = append(t.tally.First, Failure{time.Now(), what})
	}
}

// pause waits, and tells whether the context still stands.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
