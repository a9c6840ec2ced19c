package iptables_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/backendtest"
	"github.com/turnout-proxy/turnout/internal/backend/iptables"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The suite runs in both layouts of the program, and with small sections as the nft flavour has them.
func TestClassicLayoutConforms(t *testing.T) {
	backendtest.Run(t, mode(xtables.Legacy, iptables.Options{CompactAbove: 1 << 30}))
}

func TestCompactLayoutConforms(t *testing.T) {
	backendtest.Run(t, mode(xtables.NFT, iptables.Options{CompactAbove: -1, SectionChains: 3}))
}

func FuzzBackendsAgree(f *testing.F) {
	backendtest.Fuzz(f, mode(xtables.Legacy, iptables.Options{CompactAbove: 1 << 30}),
		mode(xtables.NFT, iptables.Options{CompactAbove: -1, SectionChains: 3}))
}

func mode(flavour xtables.Flavour, opt iptables.Options) backendtest.Mode {
	opt.MasqueradeBit = 14
	of := func(f model.Family) iptables.Options {
		opt := opt // subtests run at the same time
		opt.Family = f
		return opt
	}
	return backendtest.Mode{
		Name:     "iptables " + string(flavour),
		Families: []model.Family{model.IPv4, model.IPv6},
		Fake: func(_ testing.TB, f model.Family) backendtest.Kernel {
			fake := xtables.NewFake(f, flavour)
			return &kernel{tables: fake, fake: fake, opt: of(f)}
		},
		Real: func(_ testing.TB, f model.Family) (backendtest.Kernel, error) {
			tables, err := xtables.Open(f, flavour)
			if err != nil {
				return nil, err
			}
			return &kernel{tables: tables, opt: of(f)}, nil
		},
	}
}

// kernel lends the tables of one family to the suite.
type kernel struct {
	tables xtables.Tables
	fake   *xtables.Fake // nil for real ones
	opt    iptables.Options
}

func (k *kernel) Open() backend.Backend { return iptables.New(k.tables, k.opt) }

func (k *kernel) Fail(ask func(op string) error) {
	if k.fake == nil {
		return
	}
	if ask == nil {
		k.fake.Fail(nil)
		return
	}
	k.fake.Fail(func(op string, _ int) error { return ask(op) })
}

// Dump gives the three tables that this mode looks at. An empty table counts as none: the tools make one by looking.
func (k *kernel) Dump() (string, error) {
	var text strings.Builder
	for _, table := range []string{"filter", "nat", "mangle"} {
		data, err := k.tables.Save(context.Background(), table)
		if err != nil {
			return "", err
		}
		chains, err := xtables.ParseSave(table, data, nil)
		if err != nil {
			return "", err
		}
		text.WriteString("*" + table + "\n")
		for _, c := range chains {
			if len(c.Rules) > 0 || !isBase(table, c.Name) {
				text.WriteString(":" + c.Name + "\n")
			}
			for _, r := range c.Rules {
				text.WriteString("-A " + c.Name + " " + r + "\n")
			}
		}
	}
	return text.String(), nil
}

func isBase(table, chain string) bool { return slices.Contains(xtables.BaseChains(table), chain) }

// foreign are the rules of a firewall, a CNI plugin and the kubelet.
const foreign = `*filter
:KUBE-FIREWALL - [0:0]
:MY-CHAIN - [0:0]
-A INPUT -j KUBE-FIREWALL
-A FORWARD -j MY-CHAIN
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
-A MY-CHAIN -j RETURN
COMMIT
*nat
:CNI-MASQ - [0:0]
-A POSTROUTING -j CNI-MASQ
-A CNI-MASQ -j RETURN
COMMIT
*mangle
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
`

func (k *kernel) AddForeign() error { return k.tables.Restore(context.Background(), []byte(foreign)) }

func (k *kernel) RemoveForeign() error {
	const payload = `*filter
-D INPUT -j KUBE-FIREWALL
-D FORWARD -j MY-CHAIN
-F KUBE-FIREWALL
-F MY-CHAIN
-X KUBE-FIREWALL
-X MY-CHAIN
COMMIT
*nat
-D POSTROUTING -j CNI-MASQ
-F CNI-MASQ
-X CNI-MASQ
COMMIT
*mangle
-X KUBE-KUBELET-CANARY
COMMIT
`
	return k.tables.Restore(context.Background(), []byte(payload))
}

// Damage empties chains as a firewall does that flushes a table: the jumps into ours are gone, and a chain is empty.
func (k *kernel) Damage() error {
	data, err := k.tables.Save(context.Background(), "nat")
	if err != nil {
		return err
	}
	chains, err := xtables.ParseSave("nat", data, nil)
	if err != nil {
		return err
	}
	payload := "*nat\n"
	for _, c := range chains {
		if isBase("nat", c.Name) {
			for _, r := range c.Rules {
				payload += "-D " + c.Name + " " + r + "\n"
			}
		}
		if c.Name == "KUBE-SERVICES" {
			payload += "-F " + c.Name + "\n"
		}
	}
	return k.tables.Restore(context.Background(), []byte(payload+"COMMIT\n"))
}
