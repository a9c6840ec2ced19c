package iptables

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// forest is what a tree has written: its chains, the root's among them.
type forest map[string]ruleset.Body

func (f forest) flush(t *tree) {
	root, changed := t.flush(func(name string, b ruleset.Body) { f[name] = b }, func(name string) { delete(f, name) })
	if changed {
		f[t.root] = ruleset.BodyOf(root...)
	}
}

// find follows a packet from the root and counts the rules that it is compared with.
func (f forest) find(tb testing.TB, family model.Family, root string, k forward.Key) (target string, rules int) {
	tb.Helper()
	for chain := root; ; {
		next := ""
		for text := range f[chain].Rules() {
			rules++
			r, err := xtables.ParseRule(family, text)
			if err != nil {
				tb.Fatal(err)
			}
			w := ruleset.Walker{Family: family, Packet: forward.Packet{Proto: k.Proto}}
			hit, _, err := w.Matches(r, ruleset.Way{Dst: netip.AddrPortFrom(k.Addr, k.Port)})
			if err != nil {
				tb.Fatal(err)
			}
			if hit {
				next = r.Target.Name
				break
			}
		}
		if _, more := f[next]; !more {
			return next, rules
		}
		chain = next
	}
}

func ruleFor(k forward.Key, target string) string {
	r := renderer{port: &forward.Port{Name: forward.PortName{Proto: k.Proto}}, proto: k.Proto.String()}
	return r.at(&forward.Frontend{Addr: k.Addr, Port: k.Port}, "x", "-j "+target)
}

func TestUpToFiftyFrontendsStandInTheRootChain(t *testing.T) {
	tree, f := newTree(tableNAT, chainServices, model.IPv4, true), forest{}
	for i := range rootMax {
		k := forward.Key{Addr: netip.AddrFrom4([4]byte{10, 70, 0, byte(i)}), Port: 80, Proto: model.TCP}
		tree.set(keyOf(k), ruleFor(k, fmt.Sprint("T", i)))
	}
	f.flush(tree)
	if len(f) != 1 {
		t.Errorf("%d chains for %d frontends, want the root alone", len(f), rootMax)
	}
}

func TestDispatchTreeFindsEveryFrontendInFewRules(t *testing.T) {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		tree, f := newTree(tableNAT, chainServices, family, true), forest{}
		keys := map[forward.Key]string{}
		draw := rand.New(rand.NewPCG(1, 2))
		for i := range 10000 {
			k := forward.Key{Addr: bigAddr(family, i), Port: 80, Proto: model.TCP}
			switch {
			case i%10 == 0: // many ports and protocols on one address
				k = forward.Key{Addr: bigAddr(family, 1<<18), Port: uint16(1 + draw.IntN(65535)), Proto: []model.Protocol{model.TCP, model.UDP, model.SCTP}[i%3]}
			case i%7 == 0:
				k.Addr = bigAddr(family, draw.IntN(1<<20))
			}
			target := fmt.Sprint("T", i)
			tree.set(keyOf(k), ruleFor(k, target))
			keys[k] = target
		}
		f.flush(tree)
		worst := 0
		for k, want := range keys {
			got, rules := f.find(t, family, chainServices, k)
			if got != want {
				t.Fatalf("%s: %v leads to %q, want %s", family, k, got, want)
			}
			worst = max(worst, rules)
		}
		// Seven levels of 16 rules are the bound for this set: four of addresses, one of protocols, two of ports.
		if worst > 7*leafMax {
			t.Errorf("%s: a packet passes %d rules", family, worst)
		}
		for name, b := range f {
			if n := len(slices.Collect(b.Rules())); n > leafMax {
				t.Errorf("%s: chain %s has %d rules", family, name, n)
			}
		}
	}
}

func bigAddr(family model.Family, i int) netip.Addr {
	if family == model.IPv4 {
		return netip.AddrFrom4([4]byte{10, byte(96 + i>>16), byte(i >> 8), byte(i)})
	}
	return netip.AddrFrom16([16]byte{0xfd, 0x70, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
}

func TestDispatchTreeDependsOnItsKeysAlone(t *testing.T) {
	draw := rand.New(rand.NewPCG(3, 4))
	for round := range 40 {
		tree, f := newTree(tableNAT, chainNodePorts, model.IPv4, false), forest{}
		have := map[forward.Key]string{}
		for i := range 400 {
			k := forward.Key{Port: uint16(30000 + draw.IntN(200)), Proto: []model.Protocol{model.TCP, model.UDP}[draw.IntN(2)]}
			if draw.IntN(100) < 30+round {
				tree.set(keyOf(k), "")
				delete(have, k)
			} else {
				have[k] = ruleFor(k, fmt.Sprint("T", i))
				tree.set(keyOf(k), have[k])
			}
			if draw.IntN(4) == 0 {
				f.flush(tree)
			}
		}
		f.flush(tree)
		again, want := newTree(tableNAT, chainNodePorts, model.IPv4, false), forest{}
		for k, rule := range have {
			again.set(keyOf(k), rule)
		}
		want.flush(again)
		if diff := cmp.Diff(want, f); diff != "" {
			t.Fatalf("round %d: chains (-from scratch +step by step):\n%s", round, diff)
		}
	}
}

func TestAChangeInABigTreeTouchesAHandfulOfChains(t *testing.T) {
	tree, f := newTree(tableNAT, chainServices, model.IPv4, true), forest{}
	for i := range 20000 {
		k := forward.Key{Addr: bigAddr(model.IPv4, i), Port: 80, Proto: model.TCP}
		tree.set(keyOf(k), ruleFor(k, fmt.Sprint("T", i)))
	}
	f.flush(tree)
	for i := range 50 {
		k := forward.Key{Addr: bigAddr(model.IPv4, 30000+i*97), Port: 80, Proto: model.TCP}
		tree.set(keyOf(k), ruleFor(k, "NEW"))
		touched := 0
		tree.flush(func(string, ruleset.Body) { touched++ }, func(string) { touched++ })
		if touched > 10 {
			t.Errorf("one new frontend among 20,000 touches %d chains", touched)
		}
	}
}

func TestEachEndpointGetsItsShareWithinAThousandth(t *testing.T) {
	for _, n := range []int{1, 2, 3, 7, 16, 17, 50, 333, 1000} {
		members := make([]member, n)
		for i := range members {
			ep := netip.AddrPortFrom(bigAddr(model.IPv4, i*13), 8080)
			members[i] = member{endpoint: ep, before: "-p tcp ", after: "-j DNAT --to-destination " + ep.String()}
		}
		o := &Observation{
			&ruleset.Observation{Chains: map[ruleset.ID]ruleset.Body{}}, Options{Family: model.IPv4},
		}
		rules := choose("KUBE-SVC-X", members, nil, func(name string, b ruleset.Body) {
			o.Chains[ruleset.In(tableNAT, name)] = b
		})
		o.Chains[ruleset.In(tableNAT, "KUBE-SVC-X")] = ruleset.BodyOf(rules...)
		r := reader{o: o}
		got := r.pool("KUBE-SVC-X", 1, &backend.Row{})
		if len(got) != n {
			t.Fatalf("%d endpoints: %d are reachable", n, len(got))
		}
		for _, ep := range got {
			if off := ep.Share*float64(n) - 1; off > 0.001 || off < -0.001 {
				t.Errorf("%d endpoints: %s gets %.4f %% more than its share", n, ep.Addr, 100*off)
			}
		}
		for id, b := range o.Chains {
			if rules := len(slices.Collect(b.Rules())); rules > groupMax {
				t.Errorf("%d endpoints: chain %s has %d rules", n, id.Name, rules)
			}
		}
	}
}

// Upstream's chain names, as its own runs print them.
func TestChainNamesAreUpstreams(t *testing.T) {
	port := func(ns, name, port string) forward.PortName {
		return forward.PortName{Name: model.Name{Namespace: ns, Name: name}, Port: port, Proto: model.TCP}
	}
	for _, tc := range []struct{ got, want string }{
		{poolChain(port("ns1", "svc1", "p80"), forward.ClusterPool), "KUBE-SVC-XPGD46QRK7WJZT7O"},
		{poolChain(port("ns2", "svc2", "p80"), forward.LocalPool), "KUBE-SVL-GNZBNJ2PO5MGZ6GT"},
		{poolChain(port("ns5", "svc5", "p80"), forward.ClusterPool), "KUBE-SVC-NUKIZ6OKUXPJNT4C"},
		{poolChain(port("default", "kubernetes", "https"), forward.ClusterPool), "KUBE-SVC-NPX46M4PTMTKRN6Y"},
		{endpointChain(port("ns1", "svc1", "p80"), netip.MustParseAddrPort("10.180.0.1:80")), "KUBE-SEP-SXIVWICOYRO3J4NJ"},
		{endpointChain(port("ns4", "svc4", "p80"), netip.MustParseAddrPort("10.180.0.5:80")), "KUBE-SEP-C6EBXVWJJZMIWKLZ"},
	} {
		if tc.got != tc.want {
			t.Errorf("got %s, want %s", tc.got, tc.want)
		}
	}
}
