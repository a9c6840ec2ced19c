package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/backendtest"
	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/kernel/ipset"
	edge "github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/kernel/route"
	"github.com/turnout-proxy/turnout/internal/kernel/sysctl"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestConforms(t *testing.T) { backendtest.Run(t, mode()) }

// With the addresses on a device, as kube-proxy has them, all is the same.
func TestConformsOnADevice(t *testing.T) {
	m := mode()
	m.Name, m.Real, m.Families = "ipvs on a device", nil, []model.Family{model.IPv4}
	m.Fake = func(_ testing.TB, f model.Family) backendtest.Kernel {
		k := newFake(f)
		k.Former, k.Routes = k.Routes, route.NewFakeDummy()
		return k
	}
	backendtest.Run(t, m)
}

func FuzzBackendsAgree(f *testing.F) { backendtest.Fuzz(f, mode()) }

func mode() backendtest.Mode {
	return backendtest.Mode{
		Name: "ipvs", Families: []model.Family{model.IPv4, model.IPv6}, Gradual: true, OwnsAddresses: true,
		NoLoopback: true,
		Exceptions: map[string]string{
			"deleted-service-keeps-live-connections": "connections end with their virtual server, and nothing of a deleted " +
				"Service may stay (B005)",
			"session-affinity-expires": "the kernel remembers a client until its last connection has been forgotten, " +
				"TIME_WAIT included, and for the timeout from then on (B013)",
		},
		Fake: func(_ testing.TB, f model.Family) backendtest.Kernel { return newFake(f) },
		Real: func(_ testing.TB, f model.Family) (backendtest.Kernel, error) { return newReal(f) },
	}
}

// kernel lends the edges to the suite, as one kernel.
type kernel struct {
	ipvs.Kernel
	family model.Family
	// fail sets the faults of fakes; nil for real edges.
	fail func(ask func(op string) error)
}

func newFake(f model.Family) *kernel {
	rules, sets := xtables.NewFake(f, xtables.Legacy), ipset.NewFake()
	servers, routes := edge.NewFake("rr", "sh"), route.NewFake(nil)
	rules.Sets(sets.Has)
	sets.Used(rules.Names)
	return &kernel{
		Kernel: ipvs.Kernel{Rules: rules, Sets: sets, Servers: servers, Routes: routes}, family: f,
		fail: func(ask func(op string) error) {
			sets.Fail(ask)
			servers.Fail(ask)
			routes.Fail(ask)
			if ask == nil {
				rules.Fail(nil)
				return
			}
			rules.Fail(func(op string, _ int) error { return ask(op) })
		},
	}
}

// newReal opens the edges of the kernel itself, and sets what the mode needs of it.
func newReal(f model.Family) (*kernel, error) {
	ctx := context.Background()
	servers, err := edge.Open(ctx)
	if err != nil {
		return nil, err
	}
	rules, err := xtables.Open(f, xtables.Legacy)
	if err != nil {
		return nil, err
	}
	tree := sysctl.New(sysctl.ProcSys)
	for _, name := range []string{"conntrack", "expire_nodest_conn", "expire_quiescent_template"} {
		if _, err := tree.Ensure("net/ipv4/vs/"+name, "1"); err != nil {
			return nil, err
		}
	}
	return &kernel{
		Kernel: ipvs.Kernel{Rules: rules, Sets: ipset.NewKernel(), Servers: servers, Routes: route.Kernel{}}, family: f,
	}, nil
}

func (k *kernel) Open() backend.Backend {
	return ipvs.New(k.Kernel, ipvs.Options{Family: k.family, Masquerading: ruleset.Masquerading{Bit: 14}})
}

func (k *kernel) Fail(ask func(op string) error) {
	if k.fail != nil {
		k.fail(ask)
	}
}

// Dump gives all objects. An empty table of rules counts as none: the tools make one by looking.
func (k *kernel) Dump() (string, error) {
	ctx := context.Background()
	var text strings.Builder
	var sets []string
	for _, table := range []string{"filter", "nat", "mangle"} {
		data, err := k.Rules.Save(ctx, table)
		if err != nil {
			return "", err
		}
		chains, err := xtables.ParseSave(table, data, nil)
		if err != nil {
			return "", err
		}
		for _, c := range chains {
			if len(c.Rules) == 0 && slices.Contains(xtables.BaseChains(table), c.Name) {
				continue
			}
			text.WriteString(table + " " + c.Name + "\n")
			for _, r := range c.Rules {
				text.WriteString("  " + r + "\n")
			}
		}
	}
	for _, name := range ipvs.SetNames(k.family) {
		sets = append(sets, name, "MY-SET")
	}
	slices.Sort(sets)
	contents, err := k.Sets.Read(ctx, slices.Compact(sets))
	if err != nil {
		return "", err
	}
	for _, c := range contents {
		text.WriteString("set " + c.Set.String() + "\n")
		for _, e := range slices.SortedFunc(maps.Keys(c.Entries), ipset.Entry.Compare) {
			fmt.Fprintf(&text, "  %s mark %#x\n", e, c.Entries[e])
		}
	}
	servers, err := k.Servers.List(ctx, k.family)
	if err != nil {
		return "", err
	}
	slices.SortFunc(servers, func(a, b edge.Server) int { return a.Compare(b.Key) })
	for _, s := range servers {
		fmt.Fprintf(&text, "server %s %s\n", s.Key, s.Properties)
		slices.SortFunc(s.Destinations, func(a, b edge.Destination) int { return a.Addr.Compare(b.Addr) })
		for _, d := range s.Destinations {
			if d.Weight > 0 || k.fail != nil { // else it drains on the real kernel, and may go at any moment
				fmt.Fprintf(&text, "  -> %s weight %d\n", d.Addr, d.Weight)
			}
		}
	}
	routes, err := k.Routes.List(ctx, k.family)
	fmt.Fprintf(&text, "routes %v\n", routes)
	return text.String(), err
}

// foreignServers are those of a load balancer on the node, one of a mark.
func (k *kernel) foreignServers() []edge.Key {
	addr := "192.0.2.200:8443"
	if k.family == model.IPv6 {
		addr = "[2001:db8:200::8]:8443"
	}
	return []edge.Key{
		{Family: k.family, Proto: model.TCP, Addr: netip.MustParseAddrPort(addr)}, {Family: k.family, Mark: 77},
	}
}

func (k *kernel) AddForeign() error {
	ctx := context.Background()
	var ops []edge.Op
	for _, key := range k.foreignServers() {
		ops = append(ops, edge.Op{Verb: edge.AddServer, Key: key, Properties: edge.Properties{Scheduler: "rr"}},
			edge.Op{Verb: edge.AddDestination, Key: key, To: key.Addr, Weight: 3})
		if key.Mark != 0 {
			ops = ops[:len(ops)-1]
		}
	}
	mine := ipset.Set{Name: "MY-SET", Type: ipset.HashIP, Family: k.family, MaxElem: 10}
	return errors.Join(append(append(k.Servers.Apply(ctx, ops), k.Sets.Apply(ctx, []ipset.Op{{Verb: ipset.Create, Set: mine}})...),
		k.Rules.Restore(ctx, []byte(`*filter
:MY-CHAIN - [0:0]
-A FORWARD -j MY-CHAIN
-A MY-CHAIN -m set --match-set MY-SET src -j RETURN
COMMIT
`)))...)
}

func (k *kernel) RemoveForeign() error {
	ctx := context.Background()
	err := k.Rules.Restore(ctx, []byte("*filter\n-D FORWARD -j MY-CHAIN\n-F MY-CHAIN\n-X MY-CHAIN\nCOMMIT\n"))
	var ops []edge.Op
	for _, key := range k.foreignServers() {
		ops = append(ops, edge.Op{Verb: edge.RemoveServer, Key: key})
	}
	gone := []ipset.Op{{Verb: ipset.Destroy, Set: ipset.Set{Name: "MY-SET"}}}
	return errors.Join(append(append(k.Servers.Apply(ctx, ops), k.Sets.Apply(ctx, gone)...), err)...)
}

// Damage takes away rules, as a firewall does that flushes its tables, and virtual servers, as "ipvsadm -C" does. It
// leaves those that have connections, as the kernel ends these with their server.
func (k *kernel) Damage() error {
	ctx := context.Background()
	data, err := k.Rules.Save(ctx, "nat")
	if err != nil {
		return err
	}
	chains, err := xtables.ParseSave("nat", data, nil)
	if err != nil {
		return err
	}
	payload := "*nat\n"
	for _, c := range chains {
		if strings.HasPrefix(c.Name, "KUBE-") {
			payload += "-F " + c.Name + "\n"
		}
	}
	servers, err := k.Servers.List(ctx, k.family)
	if err != nil {
		return err
	}
	var ops []edge.Op
	for _, s := range servers {
		busy := slices.ContainsFunc(s.Destinations, func(d edge.Destination) bool { return d.Active+d.Inactive > 0 })
		if !busy {
			ops = append(ops, edge.Op{Verb: edge.RemoveServer, Key: s.Key})
		}
	}
	return errors.Join(append(k.Servers.Apply(ctx, ops), k.Rules.Restore(ctx, []byte(payload+"COMMIT\n")))...)
}
