package xtables

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
)

// TestFakeAndKernelAgreeOnRandomPayloads gives both the same payloads, one after the other, and wants the same answers
// and the same tables all along. Payloads are such that a good part of them is refused.
func TestFakeAndKernelAgreeOnRandomPayloads(t *testing.T) {
	const payloads = 100
	forEachKind(t, func(t *testing.T, family model.Family, flavour Flavour) {
		t.Helper()
		kernel, fake := openKernel(t, family, flavour), NewFake(family, flavour)
		refusals := 0
		for seed := range uint64(payloads) {
			g := generator{rand.New(rand.NewPCG(seed, uint64(family))), family}
			payload := g.payload()
			got, want := kernel.Restore(t.Context(), []byte(payload)), fake.Restore(t.Context(), []byte(payload))
			if (got == nil) != (want == nil) {
				t.Fatalf("payload %d:\n%s\nthe kernel says %v, the fake %v", seed, payload, got, want)
			}
			if got != nil {
				refusals++
			}
			if errors.Is(got, ErrBusy) {
				t.Fatalf("payload %d:\n%s\n%v: of class busy", seed, payload, got)
			}
			for _, table := range []string{"nat", "filter"} {
				if diff := cmp.Diff(saved(t, kernel, table), saved(t, fake, table)); diff != "" {
					t.Fatalf("payload %d:\n%s\n(kernel: %v)\ntable %s (-kernel +fake):\n%s", seed, payload, got, table, diff)
				}
			}
		}
		if refusals < payloads/10 || refusals > payloads*9/10 {
			t.Errorf("%d of %d payloads were refused, so the test says little", refusals, payloads)
		}
	})
}

// A generator makes payloads. Chains only jump to chains with a later name, so there are no circles, which the fake
// refuses earlier than the kernel; nothing is deleted by number, which the nft flavour does not always get right.
type generator struct {
	*rand.Rand
	family model.Family
}

const chains = 6

func (g generator) chain(from int) string { return fmt.Sprintf("KUBE-C%d", from+g.IntN(chains-from)) }

func (g generator) pick(of ...string) string { return of[g.IntN(len(of))] }

func (g generator) everyone() string {
	if g.family == model.IPv6 {
		return "::/0"
	}
	return "0.0.0.0/0"
}

func (g generator) payload() string {
	var b strings.Builder
	for _, table := range []string{"nat", "filter"} {
		if g.IntN(3) == 0 {
			continue
		}
		fmt.Fprintf(&b, "*%s\n", table)
		for i := range chains {
			if g.IntN(2) == 0 {
				fmt.Fprintf(&b, ":KUBE-C%d - [0:0]\n", i)
			}
		}
		for range g.IntN(5) {
			b.WriteString(g.line(table))
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

func (g generator) line(table string) string {
	switch g.IntN(24) {
	case 0:
		return "-X " + g.chain(0) + "\n"
	case 1:
		return "-F " + g.chain(0) + "\n"
	case 2:
		return "-N " + g.chain(0) + "\n"
	case 4:
		from := g.IntN(chains)
		return fmt.Sprintf("-D KUBE-C%d %s\n", from, g.rule(table, from))
	case 5:
		from := g.IntN(chains)
		return fmt.Sprintf("-I KUBE-C%d %s\n", from, g.rule(table, from))
	case 6, 7:
		base := BaseChains(table)
		return fmt.Sprintf("-A %s -j %s\n", base[g.IntN(len(base))], g.chain(0))
	}
	from := g.IntN(chains)
	return fmt.Sprintf("-A KUBE-C%d %s\n", from, g.rule(table, from))
}

// rule makes a rule of chain number from.
func (g generator) rule(table string, from int) string {
	var parts []string
	add := func(chance int, text string) {
		if g.IntN(chance) == 0 {
			parts = append(parts, text)
		}
	}
	add(3, g.pick("-s $A", "! -s $N", "-d $B", "-d $C ! -s $A", "-s "+g.everyone(), "-d "+g.everyone()))
	add(6, g.pick("-i eth0", "! -i cali+"))
	port := g.pick("-p tcp -m tcp --dport 80", "-p udp --dport 53", "-p sctp -m sctp --dport 9:99", "-p tcp", "-m udp -p udp",
		"-p icmp", "-p tcp -m tcp --sport 1")
	add(2, port)
	add(3, g.pick(`-m comment --comment "a b"`, "-m comment --comment x", `-m comment --comment "q\"q'"`))
	add(4, g.pick("-m mark --mark 0x4000/0x4000", "-m mark ! --mark 1", "-m addrtype --dst-type LOCAL",
		"-m addrtype ! --src-type LOCAL", "-m conntrack --ctstate NEW,RELATED", "-m conntrack ! --ctstate INVALID"))
	add(5, g.pick("-m statistic --mode random --probability 0.25", "-m statistic --mode random --probability 0.0000001",
		"-m statistic --mode random --probability 1.01", "-m recent --name X --rcheck --seconds 5 --reap",
		"-m recent --name Y --set", "-m recent --name Z --update --seconds 7"))
	switch target := g.IntN(12); {
	case target < 4 && from < chains-1:
		parts = append(parts, "-j "+g.chain(from+1))
	case target == 4 && from < chains-1:
		parts = append(parts, "-g "+g.chain(from+1))
	case target == 5:
		parts = append(parts, "-j KUBE-MISSING")
	case target == 6 && table == "nat":
		parts = append(parts, g.pick("-j DNAT --to-destination $M", "-j DNAT --to-destination $A", "-j MASQUERADE",
			"-j MASQUERADE --random-fully"))
	case target == 7:
		parts = append(parts, g.pick("-j MARK --or-mark 0x4000", "-j MARK --xor-mark 0x10", "-j MARK --set-xmark 0x1/0xff"))
	case target == 8 && table == "filter":
		parts = append(parts, g.pick("-j REJECT", "-j REJECT --reject-with tcp-reset", "-j REJECT --reject-with $R"))
	case target == 9:
	default:
		parts = append(parts, "-j "+g.pick("ACCEPT", "ACCEPT", "RETURN", "RETURN", "DROP"))
	}
	return fill(g.family, strings.Join(parts, " "))
}
