package iptables

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// What the kernel holds must list each frontend that forwards, with everything that a person asks about it, in both
// layouts and above and below the thresholds of the trees.
func TestRowsSayWhatTheTableSays(t *testing.T) {
	for seed := range uint64(40) {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			table := gen.Table(seed, family)
			for name, opt := range layouts(family) {
				b := New(xtables.NewFake(family, xtables.Legacy), opt)
				if problems := b.Compile(table, all(table)); len(problems) > 0 {
					t.Fatalf("seed %d: problems %v", seed, problems)
				}
				apply(t, b)
				have, err := b.Observe(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(forwardingRows(table), rowsThatForward(have.Rows())); diff != "" {
					t.Fatalf("seed %d %s %s: rows (-table +kernel):\n%s", seed, family, name, diff)
				}
			}
		}
	}
}

// A told row is what both sides of the comparison can say of a frontend.
type told struct {
	Service, Frontend, Proto, Kind string
	Affinity                       time.Duration
	Allow, Endpoints               []string
}

func rowsThatForward(rows []backend.Row) map[string]told {
	out := map[string]told{}
	for _, r := range rows {
		if r.Do != "forward" {
			continue
		}
		row := told{Service: r.Service, Frontend: r.Frontend, Proto: r.Proto, Kind: r.Kind, Affinity: r.Affinity}
		for _, a := range r.Allow {
			row.Allow = append(row.Allow, a.String())
		}
		slices.Sort(row.Allow)
		seen := map[netip.AddrPort]bool{}
		for _, list := range [][]backend.RowEndpoint{r.Endpoints, r.LocalEndpoints} {
			for _, ep := range list {
				// Within 0.1 % of an equal share.
				if fair := 1 / float64(len(list)); math.Abs(ep.Share-fair) > fair/1000 {
					row.Endpoints = append(row.Endpoints, fmt.Sprintf("%v has a share of %v of %d", ep.Addr, ep.Share, len(list)))
				} else if !seen[ep.Addr] {
					row.Endpoints = append(row.Endpoints, ep.Addr.String())
				}
				seen[ep.Addr] = true
			}
		}
		slices.Sort(row.Endpoints)
		key := row.Frontend + "/" + row.Proto
		if before, ok := out[key]; ok {
			row.Service = "twice: " + before.Service + " and " + row.Service
		}
		out[key] = row
	}
	return out
}

func forwardingRows(table *forward.Table) map[string]told {
	out := map[string]told{}
	for _, n := range table.Names() {
		port := table.Port(n)
		for _, f := range port.Frontends {
			row := told{Service: n.Service(), Proto: n.Proto.String(), Kind: f.Kind.String(), Affinity: port.Affinity}
			row.Frontend = "*:" + strconv.Itoa(int(f.Port))
			if f.Addr.IsValid() {
				row.Frontend = netip.AddrPortFrom(f.Addr, f.Port).String()
			}
			pools := map[forward.Pool]bool{}
			for _, r := range f.Routes {
				if r.Do == forward.Forward {
					pools[r.Pool] = true
				}
			}
			seen := map[netip.AddrPort]bool{}
			for pool := range pools {
				for _, ep := range port.Endpoints(pool) {
					if !seen[ep.AddrPort] {
						row.Endpoints = append(row.Endpoints, ep.AddrPort.String())
					}
					seen[ep.AddrPort] = true
				}
			}
			if len(row.Endpoints) == 0 || f.Filtered && len(f.Allow) == 0 {
				continue
			}
			for _, a := range f.Allow {
				row.Allow = append(row.Allow, a.String())
			}
			slices.Sort(row.Allow)
			slices.Sort(row.Endpoints)
			out[row.Frontend+"/"+row.Proto] = row
		}
	}
	return out
}

// Upstream's own rules are read as well, as after a take-over that did not come to its first sync.
func TestRowsOfUpstreamsRules(t *testing.T) {
	const rules = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SEP-BBBBBBBBBBBBBBBB - [0:0]
-A KUBE-SERVICES -d 10.70.1.10/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-AAAAAAAAAAAAAAAA -m comment --comment "shop/web:http -> 10.60.1.11:8080" -m recent --rcheck --seconds 600 --reap --name KUBE-SEP-AAAAAAAAAAAAAAAA --mask 255.255.255.255 --rsource -j KUBE-SEP-AAAAAAAAAAAAAAAA
-A KUBE-SVC-AAAAAAAAAAAAAAAA -m comment --comment "shop/web:http -> 10.60.1.11:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-AAAAAAAAAAAAAAAA
-A KUBE-SVC-AAAAAAAAAAAAAAAA -m comment --comment "shop/web:http -> 10.60.1.12:8080" -j KUBE-SEP-BBBBBBBBBBBBBBBB
-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -m comment --comment "shop/web:http" -m recent --set --name KUBE-SEP-AAAAAAAAAAAAAAAA --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination 10.60.1.11:8080
-A KUBE-SEP-BBBBBBBBBBBBBBBB -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.60.1.12:8080
COMMIT
*filter
:KUBE-SERVICES - [0:0]
-A KUBE-SERVICES -d 10.70.1.11/32 -p tcp -m comment --comment "shop/old has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
COMMIT
`
	kernel := xtables.NewFake(model.IPv4, xtables.Legacy)
	if err := kernel.Restore(t.Context(), []byte(rules)); err != nil {
		t.Fatal(err)
	}
	have, err := New(kernel, layouts(model.IPv4)["classic"]).Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []backend.Row{
		{Service: "shop/old", Frontend: "10.70.1.11:80", Proto: "tcp", Do: "reject", Reason: "NoEndpoints"},
		{
			Service: "shop/web:http", Kind: "cluster-ip", Frontend: "10.70.1.10:80", Proto: "tcp", Do: "forward",
			Affinity: 10 * time.Minute, Endpoints: []backend.RowEndpoint{
				{Addr: netip.MustParseAddrPort("10.60.1.11:8080"), Share: 0.5},
				{Addr: netip.MustParseAddrPort("10.60.1.12:8080"), Share: 0.5},
			},
		},
	}
	if diff := cmp.Diff(want, have.Rows(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}
