package ipvs_test

import (
	"context"
	"errors"
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
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestConforms(t *testing.T) { backendtest.Run(t, mode()) }

func FuzzBackendsAgree(f *testing.F) { backendtest.Fuzz(f, mode()) }

func mode() backendtest.Mode {
	return backendtest.Mode{
		Name: "ipvs", Families: []model.Family{model.IPv4, model.IPv6}, Gradual: true, OwnsAddresses: true,
		NoLoopback: true,
		Fake:       func(_ testing.TB, f model.Family) backendtest.Kernel { return newFake(f) },
	}
}

// fake lends the fakes of all edges to the suite, as one kernel.
type fake struct {
	family  model.Family
	rules   *xtables.Fake
	sets    *ipset.Fake
	servers *edge.Fake
	routes  *route.Fake
}

func newFake(f model.Family) *fake {
	k := &fake{
		family: f, rules: xtables.NewFake(f, xtables.Legacy), sets: ipset.NewFake(), servers: edge.NewFake("rr"),
		routes: route.NewFake(nil),
	}
	k.rules.Sets(k.sets.Has)
	k.sets.Used(k.rules.Names)
	return k
}

func (k *fake) Open() backend.Backend {
	return ipvs.New(ipvs.Kernel{Rules: k.rules, Sets: k.sets, Servers: k.servers, Routes: k.routes},
		ipvs.Options{Family: k.family, Masquerading: ruleset.Masquerading{Bit: 14}})
}

func (k *fake) Fail(ask func(op string) error) {
	k.sets.Fail(ask)
	k.servers.Fail(ask)
	k.routes.Fail(ask)
	if ask == nil {
		k.rules.Fail(nil)
		return
	}
	k.rules.Fail(func(op string, _ int) error { return ask(op) })
}

// Dump gives all objects. An empty table of rules counts as none: the tools make one by looking.
func (k *fake) Dump() (string, error) {
	var text strings.Builder
	for _, table := range []string{"filter", "nat", "mangle"} {
		data, err := k.rules.Save(context.Background(), table)
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
	return text.String() + k.sets.Dump() + k.servers.Dump() + k.routes.Dump(), nil
}

// foreignServers are those of a load balancer on the node, one of a mark.
func (k *fake) foreignServers() []edge.Key {
	addr := "192.0.2.200:8443"
	if k.family == model.IPv6 {
		addr = "[2001:db8:200::8]:8443"
	}
	return []edge.Key{
		{Family: k.family, Proto: model.TCP, Addr: netip.MustParseAddrPort(addr)}, {Family: k.family, Mark: 77},
	}
}

func (k *fake) AddForeign() error {
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
	k.routes.SetForeign(k.foreignServers()[0].Addr.Addr())
	return errors.Join(append(append(k.servers.Apply(ctx, ops), k.sets.Apply(ctx, []ipset.Op{{Verb: ipset.Create, Set: mine}})...),
		k.rules.Restore(ctx, []byte(`*filter
:MY-CHAIN - [0:0]
-A FORWARD -j MY-CHAIN
-A MY-CHAIN -m set --match-set MY-SET src -j RETURN
COMMIT
`)))...)
}

func (k *fake) RemoveForeign() error {
	ctx := context.Background()
	err := k.rules.Restore(ctx, []byte("*filter\n-D FORWARD -j MY-CHAIN\n-F MY-CHAIN\n-X MY-CHAIN\nCOMMIT\n"))
	k.routes.SetForeign()
	var ops []edge.Op
	for _, key := range k.foreignServers() {
		ops = append(ops, edge.Op{Verb: edge.RemoveServer, Key: key})
	}
	gone := []ipset.Op{{Verb: ipset.Destroy, Set: ipset.Set{Name: "MY-SET"}}}
	return errors.Join(append(append(k.servers.Apply(ctx, ops), k.sets.Apply(ctx, gone)...), err)...)
}

// Damage takes away jumps, as a firewall does that flushes its tables, and virtual servers, as "ipvsadm -C" does.
func (k *fake) Damage() error {
	ctx := context.Background()
	data, err := k.rules.Save(ctx, "nat")
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
	servers, err := k.servers.List(ctx, k.family)
	if err != nil {
		return err
	}
	var ops []edge.Op
	for _, s := range servers {
		ops = append(ops, edge.Op{Verb: edge.RemoveServer, Key: s.Key})
	}
	return errors.Join(append(k.servers.Apply(ctx, ops), k.rules.Restore(ctx, []byte(payload+"COMMIT\n")))...)
}
