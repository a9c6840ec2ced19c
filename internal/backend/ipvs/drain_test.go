package ipvs_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	edge "github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/route"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A drainLab is one backend on fakes with a clock that is set by hand.
type drainLab struct {
	t       *testing.T
	rules   *xtables.Fake
	sets    *ipset.Fake
	servers *edge.Fake
	routes  *route.Fake
	now     time.Time
	b       *ipvs.Backend
}

func newDrainLab(t *testing.T) *drainLab {
	t.Helper()
	l := &drainLab{
		t: t, rules: xtables.NewFake(model.IPv4, xtables.Legacy), sets: ipset.NewFake(), servers: edge.NewFake("rr", "sh"),
		routes: route.NewFake(nil), now: time.Date(2026, time.March, 1, 0, 0, 0, 0, time.UTC),
	}
	l.rules.Sets(l.sets.Has)
	l.restart()
	return l
}

// restart begins with a process that knows nothing.
func (l *drainLab) restart() {
	l.b = ipvs.New(ipvs.Kernel{Rules: l.rules, Sets: l.sets, Servers: l.servers, Routes: l.routes}, ipvs.Options{
		Family: model.IPv4, Masquerading: ruleset.Masquerading{Bit: 14}, Drain: time.Minute, Now: func() time.Time { return l.now },
	})
}

// web gives the table of a Service with the given endpoints; none at all is no Service.
func web(proto model.Protocol, endpoints ...string) *forward.Table {
	s := model.NewSnapshot()
	var d model.Dirty
	name := model.Name{Namespace: "shop", Name: "web"}
	part := &model.EndpointSlice{
		Name: name, Service: name.Name, Family: model.IPv4, Ports: []model.SlicePort{{Protocol: proto, Port: 8080}},
	}
	for _, e := range endpoints {
		part.Endpoints = append(part.Endpoints, model.Endpoint{Addr: netip.MustParseAddr(e), Ready: true, Serving: true})
	}
	if len(endpoints) > 0 {
		s.Apply(model.Event{Service: &model.Service{
			Name: name, Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.70.0.1")},
			Ports: []model.ServicePort{{Protocol: proto, Port: 80}},
		}}, &d)
		s.Apply(model.Event{Slice: part}, &d)
	}
	host := forward.Host{Addrs: []netip.Addr{netip.MustParseAddr("10.20.0.11")}}
	table, _ := forward.Build(forward.Config{Family: model.IPv4, NodeName: "na"}, s, host)
	return table
}

// sync applies a table as a loop does; with read it starts from what the kernel holds.
func (l *drainLab) sync(table *forward.Table, read bool) {
	l.t.Helper()
	names := table.Names()
	if len(names) == 0 {
		names = []forward.PortName{{Name: model.Name{Namespace: "shop", Name: "web"}, Proto: model.TCP}}
	}
	l.b.Compile(table, forward.Delta{Ports: names, Context: true})
	plan := l.b.Diff(nil)
	if read {
		have, err := l.b.Observe(l.t.Context())
		if err != nil {
			l.t.Fatal(err)
		}
		plan = l.b.Diff(have)
	}
	if r := l.b.Apply(l.t.Context(), plan); !r.OK() {
		l.t.Fatal(r.Err, r.Failed)
	}
}

// expect checks the servers' destinations, as "ADDRESS weight N".
func (l *drainLab) expect(when string, want ...string) {
	l.t.Helper()
	var got []string
	for line := range strings.Lines(l.servers.Dump()) {
		if after, ok := strings.CutPrefix(strings.TrimSpace(line), "-> "); ok {
			at, _, _ := strings.Cut(after, " upper ")
			got = append(got, at)
		}
	}
	if strings.Join(got, ", ") != strings.Join(want, ", ") {
		l.t.Errorf("%s: destinations %v, want %v", when, got, want)
	}
	if p := l.b.Diff(nil); !p.Empty() {
		l.t.Errorf("%s: the next plan is not empty:\n%s", when, p)
	}
}

func (l *drainLab) connect(endpoint string, active, inactive uint32) {
	l.t.Helper()
	k := edge.Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.MustParseAddrPort("10.70.0.1:80")}
	if err := l.servers.Connect(k, netip.MustParseAddrPort(endpoint), active, inactive); err != nil {
		l.t.Fatal(err)
	}
}

const (
	first, second = "10.60.1.11", "10.60.1.12"
	atFirst       = first + ":8080"
	serving       = " weight 1"
	draining      = " weight 0"
	atSecond      = second + ":8080"
)

func TestAnEndpointKeepsItsConnectionsUntilTheyEnd(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first, second), true)
	l.connect(atFirst, 3, 1)
	l.sync(web(model.TCP, second), false)
	l.expect("with connections", atFirst+draining, atSecond+serving)
	l.connect(atFirst, 0, 0)
	if wake := l.b.Wake(); wake.IsZero() || wake.After(l.now.Add(time.Minute)) {
		t.Errorf("to be woken at %s, want within a minute", wake)
	}
	l.now = l.b.Wake()
	l.sync(web(model.TCP, second), false)
	l.expect("when they had ended", atSecond+serving)
	if wake := l.b.Wake(); !wake.IsZero() {
		t.Errorf("to be woken at %s when nothing drains", wake)
	}
}

func TestDrainingHasAnEnd(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first, second), true)
	l.connect(atFirst, 1, 0)
	for range 10 {
		l.sync(web(model.TCP, second), false)
		l.now = l.now.Add(10 * time.Second)
	}
	l.sync(web(model.TCP, second), false)
	l.expect("after its time", atSecond+serving)
}

func TestAnEndpointThatComesBackIsRaisedInPlace(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first, second), true)
	l.connect(atFirst, 1, 0)
	l.sync(web(model.TCP, second), false)
	l.sync(web(model.TCP, first, second), false)
	l.expect("back", atFirst+serving, atSecond+serving)
	l.now = l.now.Add(time.Hour)
	l.expect("later", atFirst+serving, atSecond+serving)
}

func TestARestartedProcessGoesOnWithWhatDrains(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first, second), true)
	l.connect(atFirst, 1, 0)
	l.sync(web(model.TCP, second), false)
	for range 2 {
		l.restart()
		l.sync(web(model.TCP, second), true)
		l.expect("after a restart", atFirst+draining, atSecond+serving)
	}
	l.connect(atFirst, 0, 0)
	l.now = l.b.Wake()
	l.sync(web(model.TCP, second), true)
	l.expect("when they had ended", atSecond+serving)
}

// B005, B006.
func TestAServiceThatGoesTakesEverythingAlong(t *testing.T) {
	for name, drainsBefore := range map[string]bool{"with connections": false, "while an endpoint drains": true} {
		t.Run(name, func(t *testing.T) {
			l := newDrainLab(t)
			l.sync(web(model.TCP, first, second), true)
			l.connect(atFirst, 2, 0)
			if drainsBefore {
				l.sync(web(model.TCP, second), false)
				l.expect("with connections", atFirst+draining, atSecond+serving)
			}
			l.sync(web(model.TCP), false)
			l.expect("gone")
			if text := l.servers.Dump() + l.routes.Dump(); text != "" {
				t.Errorf("left of the Service:\n%s", text)
			}
			if text := l.sets.Dump(); strings.Contains(text, "10.70.0.1") {
				t.Errorf("left of the Service:\n%s", text)
			}
			if wake := l.b.Wake(); !wake.IsZero() {
				t.Errorf("to be woken at %s when nothing drains", wake)
			}
		})
	}
}

// A process that was started in the middle of a drain does not begin the time anew.
func TestTheTimeOfDrainingSurvivesRestarts(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first, second), true)
	l.connect(atFirst, 1, 0)
	l.sync(web(model.TCP, second), false)
	for range 5 {
		l.now = l.now.Add(10 * time.Second)
		l.restart()
		l.sync(web(model.TCP, second), true)
		l.expect("after a restart", atFirst+draining, atSecond+serving)
	}
	l.now = l.now.Add(10 * time.Second)
	l.restart()
	l.sync(web(model.TCP, second), true)
	l.expect("after its time", atSecond+serving)
}

// What went while no process ran drains as well.
func TestWhatWentUnseenDrains(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first, second), true)
	l.connect(atFirst, 1, 0)
	l.restart()
	l.sync(web(model.TCP, second), true)
	l.expect("after a restart", atFirst+draining, atSecond+serving)
}

// B001.
func TestAnEndpointThatCameBackUnseenServes(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first), true)
	l.connect(atFirst, 1, 0)
	l.sync(web(model.TCP, second), false)
	l.restart()
	l.sync(web(model.TCP, first), true)
	l.expect("back", atFirst+serving)
}

// What drains is repaired like anything else that somebody removes.
func TestWhatDrainsIsMadeAnewWhenOthersRemoveIt(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first, second), true)
	l.connect(atFirst, 1, 0)
	l.sync(web(model.TCP, second), false)
	k := edge.Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.MustParseAddrPort("10.70.0.1:80")}
	if err := l.servers.Apply(t.Context(), []edge.Op{{Verb: edge.RemoveServer, Key: k}})[0]; err != nil {
		t.Fatal(err)
	}
	have, err := l.b.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if text := l.b.Diff(have).String(); !strings.Contains(text, first+":8080 weight 0") {
		t.Errorf("the repair leaves out what drains:\n%s", text)
	}
}

// Others may change how packets come to an endpoint, or bound its connections.
func TestAnEndpointThatOthersChangedIsPutRight(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.TCP, first), true)
	k := edge.Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.MustParseAddrPort("10.70.0.1:80")}
	for name, o := range map[string]edge.Op{
		"method": {Weight: 1, Method: edge.Route}, "bounds": {Weight: 1, Upper: 5, Lower: 3}, "weight": {Weight: 9},
	} {
		o.Verb, o.Key, o.To = edge.EditDestination, k, netip.MustParseAddrPort(atFirst)
		if err := l.servers.Apply(t.Context(), []edge.Op{o})[0]; err != nil {
			t.Fatal(err)
		}
		l.sync(web(model.TCP, first), true)
		if dump := l.servers.Dump(); !strings.Contains(dump, "-> "+atFirst+" weight 1\n") {
			t.Errorf("%s: not put right:\n%s", name, dump)
		}
	}
}

func TestUDPEndpointsGoAtOnce(t *testing.T) {
	l := newDrainLab(t)
	l.sync(web(model.UDP, first, second), true)
	k := edge.Key{Family: model.IPv4, Proto: model.UDP, Addr: netip.MustParseAddrPort("10.70.0.1:80")}
	if err := l.servers.Connect(k, netip.MustParseAddrPort(atFirst), 5, 5); err != nil {
		t.Fatal(err)
	}
	l.sync(web(model.UDP, second), false)
	l.expect("at once", atSecond+serving)
}
