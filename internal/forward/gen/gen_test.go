package gen_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/forward/gen"
	"github.com/turnout-proxy/turnout/internal/model"
)

func TestTheSameSeedGivesTheSameCase(t *testing.T) {
	for seed := range uint64(50) {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			a, b := gen.Table(seed, family), gen.Table(seed, family)
			if diff := cmp.Diff(a.String(), b.String()); diff != "" {
				t.Fatalf("seed %d %s, second table (-first +second):\n%s", seed, family, diff)
			}
			if p, q := gen.Packet(seed, a), gen.Packet(seed, b); p != q {
				t.Fatalf("seed %d %s: packets %v and %v differ", seed, family, p, q)
			}
		}
	}
}

func TestSeedsCoverEveryFeature(t *testing.T) {
	missing := map[string]bool{}
	for _, feature := range []string{
		"pass", "forward", "reject", "drop", "NoEndpoints", "NoLocalEndpoints", "SourceNotAllowed",
		"cluster-ip", "external-ip", "load-balancer", "node-port", "pod", "node", "any",
		"tcp", "udp", "sctp", "snat=no", "snat=mixed", "snat=always", "affinity", "health", "filter", "admits nobody",
		"loopback", "all addresses", "some addresses", "cidr", "interface", "prefix", "pods unknown", "conflict",
	} {
		missing[feature] = true
	}
	for seed := range uint64(400) {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			table, findings := forward.Build(gen.Config(seed, family), gen.Snapshot(seed), gen.Host(seed))
			for _, f := range findings {
				if f.Reason == "FrontendConflict" {
					delete(missing, "conflict")
				}
			}
			note(missing, table, forward.Lookup(table, gen.Packet(seed, table)))
		}
	}
	if len(missing) > 0 {
		t.Errorf("no seed gives %v", missing)
	}
}

// note strikes off what a table and an outcome show.
func note(missing map[string]bool, t *forward.Table, o forward.Outcome) {
	marks := map[string]bool{
		"loopback":       t.Context.NodePorts.Loopback,
		"all addresses":  t.Context.NodePorts.All,
		"some addresses": len(t.Context.NodePorts.Addrs) > 0,
		"cidr":           t.Context.Detector.CIDR.IsValid(),
		"interface":      t.Context.Detector.Interface != "",
		"prefix":         t.Context.Detector.InterfacePrefix != "",
		"pods unknown":   !t.Context.Detector.Known(),
		"filter":         o.Frontend.Filtered,
		"admits nobody":  o.Frontend.Filtered && len(o.Frontend.Allow) == 0,
	}
	for _, c := range o.Choices {
		marks["snat=always"] = true
		if !c.SNAT {
			marks["snat=no"], marks["snat=always"] = true, false
		}
	}
	if len(o.Choices) > 1 && o.Choices[0].SNAT != o.Choices[1].SNAT {
		marks["snat=mixed"] = true
	}
	if p := t.Port(o.Port); p != nil {
		marks["affinity"], marks["health"] = p.Affinity > 0, p.HealthCheckNodePort > 0
	}
	for feature, shown := range marks {
		if shown {
			delete(missing, feature)
		}
	}
	for _, word := range []string{
		o.Do.String(), o.Reason.String(), o.Frontend.Kind.String(), o.From.String(), o.Port.Proto.String(),
	} {
		delete(missing, word)
	}
}
