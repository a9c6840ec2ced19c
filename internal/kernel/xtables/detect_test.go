package xtables

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestDetectFollowsTheHostsOtherTools(t *testing.T) {
	const (
		hint     = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"
		canary   = "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
		services = "*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n"
		firewall = "*filter\n:KUBE-FIREWALL - [0:0]\n:KUBE-FORWARD - [0:0]\nCOMMIT\n"
		rules    = "*filter\n-A INPUT -j ACCEPT\n-A INPUT -j ACCEPT\nCOMMIT\n"
		rule     = "*nat\n-A OUTPUT -j ACCEPT\nCOMMIT\n"
		probe    = "*nat\n:KUBE-TURNOUT-PROBE - [0:0]\nCOMMIT\n"
	)
	tests := map[string]struct {
		nft, legacy string
		plain       Flavour
		broken      []Flavour
		want        string
	}{
		"the kubelet's hint":                    {legacy: hint, want: "legacy: the kubelet made chain KUBE-IPTABLES-HINT there"},
		"an older kubelet's canary":             {nft: canary, want: "nft: the kubelet made chain KUBE-KUBELET-CANARY there"},
		"the hint against chains elsewhere":     {nft: services + firewall, legacy: hint, want: "legacy: the kubelet made chain KUBE-IPTABLES-HINT there"},
		"a proxy's chains":                      {legacy: services, plain: NFT, want: "legacy: 1 chains of Kubernetes are there"},
		"more chains against fewer":             {nft: services, legacy: firewall, want: "legacy: 2 chains of Kubernetes are there"},
		"chains against rules":                  {nft: rules, legacy: services, want: "legacy: 1 chains of Kubernetes are there"},
		"chains alike, then rules":              {nft: services + rule, legacy: services, want: "nft: 1 rules are there, more than in the other flavour"},
		"more rules against fewer":              {nft: rule, legacy: rules, plain: NFT, want: "legacy: 2 rules are there, more than in the other flavour"},
		"rules alike, then the plain command":   {nft: rule, legacy: rule, plain: Legacy, want: "legacy: the plain iptables command is of that flavour"},
		"our own leftover tells nothing":        {nft: probe, plain: Legacy, want: "legacy: the plain iptables command is of that flavour"},
		"nothing at all":                        {want: "nft: nothing else tells, and it works"},
		"nothing at all, and nft does not work": {broken: []Flavour{NFT}, want: "legacy: nothing else tells, and it works"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			found := []candidate{}
			for flavour, payload := range map[Flavour]string{NFT: tc.nft, Legacy: tc.legacy} {
				f := NewFake(model.IPv4, flavour)
				restore(t, f, payload)
				c := candidate{flavour: flavour, tables: f, works: func(context.Context) error { return nil }}
				for _, b := range tc.broken {
					if b == flavour {
						c.works = func(context.Context) error { return ErrUnsupported }
					}
				}
				found = append(found, c)
			}
			if found[0].flavour == Legacy {
				found[0], found[1] = found[1], found[0]
			}
			flavour, reason, err := detect(t.Context(), found, tc.plain)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, string(flavour)+": "+reason); diff != "" {
				t.Errorf("flavour and reason (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDetectFailsIfNothingWorks(t *testing.T) {
	broken := func(context.Context) error { return &StepError{Op: "probe", Object: "x", Class: ErrUnsupported} }
	found := []candidate{{NFT, NewFake(model.IPv4, NFT), broken}, {Legacy, NewFake(model.IPv4, Legacy), broken}}
	if _, _, err := detect(t.Context(), found, ""); !errors.Is(err, ErrUnsupported) {
		t.Errorf("got %v, want an error of class %v", err, ErrUnsupported)
	}
}

func TestDetectReadsAroundATableThatCannotBePrinted(t *testing.T) {
	nft, legacy := NewFake(model.IPv4, NFT), NewFake(model.IPv4, Legacy)
	nft.Fail(func(op string, _ int) error {
		if op == "save" {
			return ErrConflict
		}
		return nil
	})
	restore(t, legacy, "*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
	works := func(context.Context) error { return nil }
	flavour, _, err := detect(t.Context(), []candidate{{NFT, nft, works}, {Legacy, legacy, works}}, NFT)
	if err != nil || flavour != Legacy {
		t.Errorf("got %s, %v; want %s", flavour, err, Legacy)
	}
}

func TestDetectStopsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	found := []candidate{{NFT, NewFake(model.IPv4, NFT), func(context.Context) error { return nil }}}
	if _, _, err := detect(ctx, found, NFT); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func TestDetectOnTheKernelLeavesNoTableBehind(t *testing.T) {
	forEachKind(t, func(t *testing.T, family model.Family, flavour Flavour) {
		t.Helper()
		tables := openKernel(t, family, flavour)
		restore(t, tables, "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n")
		got, reason, err := Detect(t.Context(), family)
		if err != nil {
			t.Fatal(err)
		}
		if got != flavour || !strings.Contains(reason, "KUBE-IPTABLES-HINT") {
			t.Errorf("got %s (%s), want %s", got, reason, flavour)
		}
		other := map[Flavour]Flavour{Legacy: NFT, NFT: Legacy}[flavour]
		for kind, want := range map[Flavour][]string{flavour: {"mangle"}, other: nil} {
			list := nftTables
			if kind == Legacy {
				list = legacyTables
			}
			have, err := list(family)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Join(have, " ") != strings.Join(want, " ") {
				t.Errorf("%s tables %q, want %q", kind, have, want)
			}
		}
	})
}

func TestProbeOnTheKernelLeavesNoChainBehind(t *testing.T) {
	forEachKind(t, func(t *testing.T, family model.Family, flavour Flavour) {
		t.Helper()
		tables := openKernel(t, family, flavour)
		for f, err := range Probe(t.Context(), tables, family, Features()...) {
			if err != nil && !errors.Is(err, ErrUnsupported) {
				t.Errorf("%s: %v", f, err)
			}
			t.Logf("%s: %v", f, err)
		}
		for _, f := range []Feature{FeatureDNAT, FeatureReject, FeatureStatistic} {
			if err := Probe(t.Context(), tables, family, f)[f]; err != nil {
				t.Errorf("%s: %v", f, err)
			}
		}
		if err := Supported(t.Context(), family, flavour); err != nil {
			t.Error(err)
		}
		for _, table := range []string{"nat", "filter"} {
			if got := saved(t, tables, table); strings.Contains(got, probeChain) {
				t.Errorf("table %s:\n%s", table, got)
			}
		}
	})
}

func TestProbeGivesThreeAnswers(t *testing.T) {
	t.Run("all work, with one attempt", func(t *testing.T) {
		f := NewFake(model.IPv4, Legacy)
		for feature, err := range Probe(t.Context(), f, model.IPv4, Features()...) {
			if err != nil {
				t.Errorf("%s: %v", feature, err)
			}
		}
		if n := f.Counts().Restores; n != 2 {
			t.Errorf("%d restores, want one to try and one to clean up", n)
		}
	})
	t.Run("only what is lacking is a no", func(t *testing.T) {
		f := NewFake(model.IPv6, NFT)
		f.Lack("bpf", "MASQUERADE --random-fully")
		for feature, err := range Probe(t.Context(), f, model.IPv6, Features()...) {
			lacks := feature == FeatureBPF || feature == FeatureRandomFully
			if lacks != errors.Is(err, ErrUnsupported) || !lacks && err != nil {
				t.Errorf("%s: %v", feature, err)
			}
		}
		for _, table := range []string{"nat", "filter"} {
			if got := saved(t, f, table); strings.Contains(got, probeChain) {
				t.Errorf("table %s:\n%s", table, got)
			}
		}
	})
	t.Run("a held lock tells nothing", func(t *testing.T) {
		f, restores := NewFake(model.IPv4, Legacy), 0
		f.Fail(func(op string, _ int) error {
			if op == "restore" {
				restores++
				return ErrBusy
			}
			return nil
		})
		for feature, err := range Probe(t.Context(), f, model.IPv4, FeatureDNAT, FeatureReject, FeatureBPF) {
			if err == nil || errors.Is(err, ErrUnsupported) || !errors.Is(err, ErrBusy) {
				t.Errorf("%s: got %v, want an error of class %v", feature, err, ErrBusy)
			}
		}
		if restores != 1 {
			t.Errorf("%d attempts, each of which waits for the lock; want one", restores)
		}
	})
	t.Run("a missing right tells nothing", func(t *testing.T) {
		f := NewFake(model.IPv4, Legacy)
		f.Fail(func(string, int) error {
			return &StepError{Op: "x", Object: "y", Err: errPermission(), Class: ErrUnsupported}
		})
		err := Probe(t.Context(), f, model.IPv4, FeatureBPF)[FeatureBPF]
		if err == nil || errors.Is(err, ErrUnsupported) {
			t.Errorf("got %v, want an error of no class", err)
		}
	})
}

func errPermission() error { return unix.EPERM }
