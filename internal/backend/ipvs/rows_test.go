package ipvs_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
)

const rowsTable = `context IPv4 node=na
  pods cidr=10.60.0.0/16
  host 10.20.0.11
  node-ports all

port shop/web/tcp affinity=1m0s scheduler=sh
  frontend cluster-ip 10.70.0.1:80
    from pod forward cluster snat=hairpin
    from any forward cluster snat=always
  frontend load-balancer 192.0.2.10:80
    allow 198.51.100.0/24
    from pod forward cluster snat=hairpin
    from node forward cluster snat=always
    from any forward local snat=hairpin
  frontend load-balancer 192.0.2.11:80
    allow none
    from any forward cluster snat=always
  cluster 10.60.1.11:8080(local)*3 10.60.2.11:8080
  local 10.60.1.11:8080(local)*3

port shop/drop/tcp
  frontend external-ip 203.0.113.9:80
    from pod forward cluster snat=hairpin
    from node forward cluster snat=always
    from any drop reason=NoLocalEndpoints
  cluster 10.60.2.11:8080

port shop/none/tcp
  frontend cluster-ip 10.70.0.2:80
    from any reject reason=NoEndpoints
`

// What a listing without a daemon says of the kernel's objects.
func TestRowsTellWhatTheObjectsSay(t *testing.T) {
	l := newDrainLab(t)
	table, err := forward.Parse(strings.NewReader(rowsTable))
	if err != nil {
		t.Fatal(err)
	}
	l.program(table)
	l.connect(atFirst, 0, 0)
	have, err := l.b.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort
	heavy := backend.RowEndpoint{Addr: at("10.60.1.11:8080"), Share: 0.75, Weight: 3}
	light := backend.RowEndpoint{Addr: at("10.60.2.11:8080"), Share: 0.25, Weight: 1}
	alone, only := heavy, light
	alone.Share, only.Share = 1, 1
	both := []backend.RowEndpoint{heavy, light}
	want := []backend.Row{
		{Frontend: "10.70.0.1:80", Do: "forward", Affinity: time.Minute, Scheduler: "sh", Endpoints: both},
		{Frontend: "10.70.0.2:80", Do: "reject", Reason: "NoEndpoints", Scheduler: "rr"},
		{
			Frontend: "192.0.2.10:80", Do: "forward", Affinity: time.Minute, Scheduler: "sh", Endpoints: both,
			LocalEndpoints: []backend.RowEndpoint{alone}, Allow: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		},
		{
			Frontend: "192.0.2.11:80", Do: "drop", Reason: "SourceNotAllowed", Affinity: time.Minute, Scheduler: "sh",
			Endpoints: both,
		},
		{Frontend: "203.0.113.9:80", Do: "forward", Scheduler: "rr", Endpoints: []backend.RowEndpoint{only}},
	}
	for i := range want {
		want[i].Proto = "tcp"
	}
	compare := cmp.Options{cmpopts.EquateComparable(netip.AddrPort{}, netip.Prefix{}), cmpopts.EquateEmpty()}
	if diff := cmp.Diff(want, have.Rows(), compare); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

func TestRowsTellOfConnectionsAndOfWhatDrains(t *testing.T) {
	l := newDrainLab(t)
	table, err := forward.Parse(strings.NewReader(strings.ReplaceAll(rowsTable, " affinity=1m0s scheduler=sh", "")))
	if err != nil {
		t.Fatal(err)
	}
	l.program(table)
	l.connect(atFirst, 2, 5)
	without := strings.NewReplacer("10.60.1.11:8080(local)*3 10.60.2.11:8080", "10.60.2.11:8080",
		"  local 10.60.1.11:8080(local)*3\n", "", "from any forward local snat=hairpin", "from any forward cluster snat=always",
		" affinity=1m0s scheduler=sh", "").Replace(rowsTable)
	if table, err = forward.Parse(strings.NewReader(without)); err != nil {
		t.Fatal(err)
	}
	l.program(table)
	have, err := l.b.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	row := have.Rows()[0]
	want := []backend.RowEndpoint{{Addr: netip.MustParseAddrPort(atFirst), Active: 2, Inactive: 5}}
	if diff := cmp.Diff(want, row.Draining, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Errorf("%s: what drains (-want +got):\n%s", row.Frontend, diff)
	}
	if len(row.Endpoints) != 1 || row.Endpoints[0].Share != 1 {
		t.Errorf("endpoints %v, want one with all of the share", row.Endpoints)
	}
}
