package ipvs_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	edge "github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestSchedulersAreReadAsWritten(t *testing.T) {
	tests := map[string]struct {
		want ipvs.Scheduler
		err  string
	}{
		"":                       {ipvs.Scheduler{Name: "rr"}, ""},
		"wlc":                    {ipvs.Scheduler{Name: "wlc"}, ""},
		"sh":                     {ipvs.Scheduler{Name: "sh"}, ""},
		"sh,sh-port":             {ipvs.Scheduler{Name: "sh", Flags: edge.Scheduler2}, ""},
		"sh, sh-fallback":        {ipvs.Scheduler{Name: "sh", Flags: edge.Scheduler1}, ""},
		"mh":                     {ipvs.Scheduler{Name: "mh", Flags: edge.Scheduler2}, ""},
		"mh,mh-fallback":         {ipvs.Scheduler{Name: "mh", Flags: edge.Scheduler1}, ""},
		"mh,mh-port,mh-fallback": {ipvs.Scheduler{Name: "mh", Flags: edge.Scheduler1 | edge.Scheduler2}, ""},
		",sh-port":               {err: "begins with a comma"},
		"sh,mh-port":             {err: `scheduler sh has no flag "mh-port"`},
		"rr,rr-port":             {err: `scheduler rr has no flag "rr-port"`},
		"sh,":                    {err: `scheduler sh has no flag ""`},
		"no such":                {err: "no name of a scheduler"},
		"../../x":                {err: "no name of a scheduler"},
		"a-name-that-is-long":    {err: "no name of a scheduler"},
	}
	for text, tc := range tests {
		got, err := ipvs.ParseScheduler(text)
		switch {
		case tc.err == "" && (err != nil || got != tc.want):
			t.Errorf("%q: got %+v, %v; want %+v", text, got, err, tc.want)
		case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
			t.Errorf("%q: error %v, want one with %q", text, err, tc.err)
		}
	}
}

// chosen gives the table of a Service with an annotation, with two endpoints, the first of weight 3.
func chosen(scheduler string) *forward.Table {
	name := forward.PortName{Name: model.Name{Namespace: "shop", Name: "web"}, Proto: model.TCP}
	text := "context IPv4 node=na\n  pods unknown\n  host 10.20.0.11\n  node-ports all\n\nport " + name.String()
	if scheduler != "" {
		text += " scheduler=" + scheduler
	}
	text += "\n  frontend cluster-ip 10.70.0.1:80\n    from any forward cluster snat=hairpin\n" +
		"  cluster 10.60.1.11:8080*3 10.60.1.12:8080\n"
	t, err := forward.Parse(strings.NewReader(text))
	if err != nil {
		panic(err)
	}
	return t
}

// program compiles and applies a table, and gives the lines of the only virtual server.
func (l *drainLab) program(table *forward.Table) (problems []backend.Problem, dump string) {
	l.t.Helper()
	problems = l.b.Compile(table, forward.Delta{Ports: table.Names(), Context: true})
	r := l.b.Apply(l.t.Context(), l.b.Diff(nil))
	if !r.OK() {
		l.t.Fatal(r.Err, r.Failed)
	}
	return append(problems, r.Problems...), l.servers.Dump()
}

func TestAServiceChoosesItsSchedulerAndWeights(t *testing.T) {
	l := newDrainLab(t)
	problems, dump := l.program(chosen("sh,sh-port"))
	for _, want := range []string{"10.70.0.1:80/tcp sh flags 0x10", "10.60.1.11:8080 weight 3", "10.60.1.12:8080 weight 1"} {
		if !strings.Contains(dump, want) {
			t.Errorf("no %q in\n%s", want, dump)
		}
	}
	if len(problems) > 0 {
		t.Errorf("problems: %v", problems)
	}
	if _, dump := l.program(chosen("")); !strings.Contains(dump, "10.70.0.1:80/tcp rr\n") {
		t.Errorf("without the annotation:\n%s", dump)
	}
}

// B044.
func TestAServiceWhoseSchedulerIsMissingStaysOnTheDefault(t *testing.T) {
	tests := map[string]string{
		"sed":  "the kernel lacks the scheduler sed: load the module ip_vs_sed, or choose another one; endpoints are chosen by rr",
		"S!":   `"S!" is no name of a scheduler`,
		"rr,x": `scheduler rr has no flag "x"`,
	}
	for scheduler, want := range tests {
		t.Run(scheduler, func(t *testing.T) {
			l := newDrainLab(t)
			table := chosen(scheduler)
			for _, when := range []string{"at first", "again"} {
				problems, dump := l.program(table)
				if !strings.Contains(dump, "10.70.0.1:80/tcp rr\n") || !strings.Contains(dump, "10.60.1.11:8080 weight 3") {
					t.Errorf("%s it is not served by the default:\n%s", when, dump)
				}
				if len(problems) != 1 || problems[0].Reason != "SchedulerUnavailable" || !strings.Contains(problems[0].Err.Error(), want) {
					t.Errorf("%s the problems are %v, want one with %q", when, problems, want)
				}
				if p := l.b.Diff(nil); !p.Empty() {
					t.Errorf("%s the next plan is not empty:\n%s", when, p)
				}
			}
		})
	}
}

// Without sh, pods of a Service with affinity and policy Local are served all the same.
func TestWithoutShSplitServicesAreServed(t *testing.T) {
	l := newDrainLab(t)
	l.servers = edge.NewFake("rr")
	l.restart()
	text := "context IPv4 node=na\n  pods cidr=10.60.0.0/16\n  host 10.20.0.11\n  node-ports all\n\n" +
		"port shop/web:/tcp affinity=1m0s\n  frontend external-ip 203.0.113.9:80\n" +
		"    from pod forward cluster snat=hairpin\n    from node forward cluster snat=always\n    from any forward local snat=hairpin\n" +
		"  cluster 10.60.1.11:8080(local) 10.60.2.11:8080\n  local 10.60.1.11:8080(local)\n"
	table, err := forward.Parse(strings.NewReader(strings.ReplaceAll(text, "shop/web:/tcp", "shop/web/tcp")))
	if err != nil {
		t.Fatal(err)
	}
	problems, dump := l.program(table)
	if len(problems) != 1 || !strings.Contains(problems[0].Err.Error(), "keep no endpoint") {
		t.Errorf("problems: %v", problems)
	}
	if n := strings.Count(dump, " rr"); n != 3 {
		t.Errorf("%d servers, want 3:\n%s", n, dump)
	}
}

// B037: what is at an excluded address is others', also where a set of kube-proxy's seems to say that it is ours.
func TestExcludedAddressesAreOthers(t *testing.T) {
	l := newDrainLab(t)
	l.b = ipvs.New(ipvs.Kernel{Rules: l.rules, Sets: l.sets, Servers: l.servers, Routes: l.routes}, ipvs.Options{
		Family: model.IPv4, Masquerading: ruleset.Masquerading{Bit: 14},
		Exclude: []netip.Prefix{netip.MustParsePrefix("10.20.0.77/32")},
	})
	for _, addr := range []string{"10.20.0.77:6443", "10.20.0.78:6443"} {
		k := edge.Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.MustParseAddrPort(addr)}
		ops := []edge.Op{
			{Verb: edge.AddServer, Key: k, Properties: edge.Properties{Scheduler: "rr"}},
			{Verb: edge.AddDestination, Key: k, To: netip.MustParseAddrPort("10.20.0.5:6443"), Weight: 7},
		}
		for _, err := range l.servers.Apply(t.Context(), ops) {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	upstreamNodePort(t, l, 6443)
	l.sync(web(model.TCP, first), true)
	dump := l.servers.Dump()
	if !strings.Contains(dump, "10.20.0.77:6443") || !strings.Contains(dump, "10.20.0.5:6443 weight 7") {
		t.Errorf("the server at an excluded address was touched:\n%s", dump)
	}
	if strings.Contains(dump, "10.20.0.78:6443") {
		t.Errorf("kube-proxy's server for a node port was not taken over:\n%s", dump)
	}
}

// upstreamNodePort makes the set by which kube-proxy knows its TCP node ports.
func upstreamNodePort(t *testing.T, l *drainLab, port uint16) {
	t.Helper()
	set := ipset.Set{Name: "KUBE-NODE-PORT-TCP", Type: ipset.BitmapPort}
	ops := []ipset.Op{{Verb: ipset.Create, Set: set}, {Verb: ipset.Add, Set: set, Entry: ipset.Entry{Port: port}}}
	for _, err := range l.sets.Apply(t.Context(), ops) {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// B015: a virtual server that somebody else made at an address of ours costs that Service alone, and only there.
func TestAServerOfOthersAtOurAddressStopsNoOther(t *testing.T) {
	l := newDrainLab(t)
	taken := edge.Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.MustParseAddrPort("10.70.0.1:80")}
	if err := l.servers.Apply(t.Context(), []edge.Op{
		{Verb: edge.AddServer, Key: taken, Properties: edge.Properties{Scheduler: "lc"}},
	})[0]; !errors.Is(err, edge.ErrScheduler) {
		t.Fatal(err) // the fake has rr and sh
	}
	if err := l.servers.Apply(t.Context(), []edge.Op{
		{Verb: edge.AddServer, Key: taken, Properties: edge.Properties{Scheduler: "sh"}},
	})[0]; err != nil {
		t.Fatal(err)
	}
	text := "context IPv4 node=na\n  pods unknown\n  host 10.20.0.11\n  node-ports all\n\n"
	for i, name := range []string{"shop/web", "shop/x", "shop/y"} {
		text += fmt.Sprintf("port %s/tcp\n  frontend cluster-ip 10.70.0.%d:80\n    from any forward cluster snat=hairpin\n"+
			"  cluster 10.60.1.%d:8080\n\n", name, i+1, i+1)
	}
	table, err := forward.Parse(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	l.b.Compile(table, forward.Delta{Ports: table.Names(), Context: true})
	have, err := l.b.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r := l.b.Apply(t.Context(), l.b.Diff(have))
	if r.Err != nil || len(r.Failed) != 1 {
		t.Errorf("report %v, failed %v; want one port that failed", r.Err, r.Failed)
	}
	for name, err := range r.Failed {
		if name.Name.Name != "web" || !strings.Contains(err.Error(), "made by others") {
			t.Errorf("%s: %v", name, err)
		}
	}
	dump := l.servers.Dump()
	for _, want := range []string{"10.70.0.1:80/tcp sh", "10.60.1.2:8080", "10.60.1.3:8080"} {
		if !strings.Contains(dump, want) {
			t.Errorf("no %s in\n%s", want, dump)
		}
	}
	if strings.Contains(dump, "10.60.1.1:8080") {
		t.Errorf("an endpoint was added to the server of others:\n%s", dump)
	}
	if text := l.sets.Dump(); strings.Contains(text, "10.70.0.1,") {
		t.Errorf("a set says that the server of others is ours:\n%s", text)
	}
	if p := l.b.Diff(nil); !p.Empty() {
		t.Errorf("the next plan is not empty:\n%s", p)
	}
}
