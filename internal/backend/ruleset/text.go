package ruleset

import (
	"fmt"
	"net/netip"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
	"github.com/turnout-proxy/turnout/internal/model"
)

// Host gives an address as a rule shows it.
func Host(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }

// Comment gives the match that carries a text. A text that is too long for the kernel is cut in its middle: both ends
// of "namespace/name:port what for" say more than the middle does.
func Comment(text string) string {
	if over := len(text) - xtables.MaxComment; over > 0 {
		keep := (xtables.MaxComment - len("...")) / 2
		text = text[:keep] + "..." + text[len(text)-keep:]
	}
	return "-m comment --comment " + xtables.Quote(text) + " "
}

// HairpinMatch matches a packet whose source and destination are the same address, by a classic BPF program over its IP
// header: an endpoint that was handed its own connection.
//
// It loads each 32-bit word of the source (offset 12 in IPv4, 8 in IPv6) and compares it with the destination's
// (16 and 24). Instructions: 32 = load word at a fixed offset, 7 = copy A to X, 29 = jump if A equals X, 6 = return.
// Source: the kernel's Documentation/networking/filter.rst; iptables-extensions(8), "bpf".
func HairpinMatch(f model.Family) string {
	if f == model.IPv6 {
		return `-m bpf --bytecode "18,32 0 0 8,7 0 0 0,32 0 0 24,29 0 13 0,32 0 0 12,7 0 0 0,32 0 0 28,29 0 9 0,` +
			`32 0 0 16,7 0 0 0,32 0 0 32,29 0 5 0,32 0 0 20,7 0 0 0,32 0 0 36,29 0 1 0,6 0 0 65535,6 0 0 0" `
	}
	return `-m bpf --bytecode "6,32 0 0 12,7 0 0 0,32 0 0 16,29 0 1 0,6 0 0 65535,6 0 0 0" `
}

// FromPod gives the match of a detector; ok is false if it knows nothing.
func FromPod(d forward.Detector) (match string, ok bool) {
	switch {
	case d.CIDR.IsValid():
		return "-s " + d.CIDR.Masked().String() + " ", true
	case d.Interface != "":
		return "-i " + d.Interface + " ", true
	case d.InterfacePrefix != "":
		return "-i " + d.InterfacePrefix + "+ ", true
	}
	return "", false
}

// Masquerading says how connections are marked that are to be masqueraded, and how that is done.
type Masquerading struct {
	// Bit is the bit of the packet mark that asks for it, 0..31.
	Bit int
	// NoRandomFully tells that MASQUERADE cannot choose ports at random.
	NoRandomFully bool
}

// Mark gives the mark as rules show it.
func (m Masquerading) Mark() string { return fmt.Sprintf("0x%x", uint32(1)<<m.Bit) }

// Target gives the end of a rule that masquerades.
func (m Masquerading) Target() string {
	if m.NoRandomFully {
		return "-j MASQUERADE"
	}
	return "-j MASQUERADE --random-fully"
}

// SetMark gives the rule of the chain that asks for masquerading.
func (m Masquerading) SetMark() string { return "-j MARK --set-xmark " + m.Mark() + "/" + m.Mark() }

// Carry gives the rules that do what the mark asks for. The mark is taken off first, so that a packet which the kernel
// sends through the rules a second time, inside a tunnel, is not masqueraded again.
func (m Masquerading) Carry() []string {
	return []string{
		"-m mark ! --mark " + m.Mark() + "/" + m.Mark() + " -j RETURN",
		"-j MARK --set-xmark " + m.Mark() + "/0x0",
		Comment("kubernetes service traffic requiring SNAT") + m.Target(),
	}
}

// Forwarding gives the rules of the chain that lets Service traffic through a firewall's FORWARD chain.
func (m Masquerading) Forwarding() []string {
	return []string{
		Comment("kubernetes forwarding rules") + "-m mark --mark " + m.Mark() + "/" + m.Mark() + " -j ACCEPT",
		Comment("kubernetes forwarding conntrack rule") + "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
	}
}
