package xtables

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
)

// The right-hand sides are what iptables-save 1.8.9 prints, in both flavours alike.
func TestRuleReadsBackAsTheToolsPrintIt(t *testing.T) {
	tests := map[string]struct {
		family   model.Family
		in, want string
	}{
		"a dispatch rule as upstream writes it": {
			model.IPv4,
			`-m comment --comment "a/b:c cluster IP" -m tcp -p tcp -d 10.96.0.1 --dport 80 -j KUBE-SVC-X`,
			`-d 10.96.0.1/32 -p tcp -m comment --comment "a/b:c cluster IP" -m tcp --dport 80 -j KUBE-SVC-X`,
		},
		"a port without its module":       {model.IPv4, `-p tcp --dport 80:95 -j X`, `-p tcp -m tcp --dport 80:95 -j X`},
		"an inverted address":             {model.IPv4, `-m addrtype --dst-type LOCAL ! -d 127.0.0.0/8 -j X`, `! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j X`},
		"a mark match":                    {model.IPv4, `-m mark ! --mark 0x00004000/0x00004000 -j RETURN`, `-m mark ! --mark 0x4000/0x4000 -j RETURN`},
		"or-mark":                         {model.IPv4, `-j MARK --or-mark 0x00004000`, `-j MARK --set-xmark 0x4000/0x4000`},
		"xor-mark":                        {model.IPv4, `-j MARK --xor-mark 0x4000`, `-j MARK --set-xmark 0x4000/0x0`},
		"a third":                         {model.IPv4, `-m statistic --mode random --probability 0.3333333333 -j X`, `-m statistic --mode random --probability 0.33333333349 -j X`},
		"recent rcheck":                   {model.IPv4, `-m recent --name S --rcheck --seconds 10 --reap -j S`, `-m recent --rcheck --seconds 10 --reap --name S --mask 255.255.255.255 --rsource -j S`},
		"recent set, IPv6":                {model.IPv6, `-m recent --name S --set -j S`, `-m recent --set --name S --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -j S`},
		"reject":                          {model.IPv4, `-j REJECT`, `-j REJECT --reject-with icmp-port-unreachable`},
		"reject, IPv6":                    {model.IPv6, `-j REJECT`, `-j REJECT --reject-with icmp6-port-unreachable`},
		"states in the order of printing": {model.IPv4, `-m conntrack ! --ctstate ESTABLISHED,RELATED,DNAT -j DROP`, `-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`},
		"a comment that needs no quotes":  {model.IPv4, `-m comment --comment "abc" -j X`, `-m comment --comment abc -j X`},
		"a comment with quotes in it":     {model.IPv4, `-m comment --comment "a \"b\" c\\d" -j X`, `-m comment --comment "a \"b\" c\\d" -j X`},
		"an interface prefix":             {model.IPv4, `! -i azv+ -j X`, `! -i azv+ -j X`},
		"every address":                   {model.IPv4, `-s 0.0.0.0/0 -j X`, `-j X`},
		"a rule without a target":         {model.IPv4, `-m comment --comment "a b"`, `-m comment --comment "a b"`},
		"bytecode":                        {model.IPv4, `-m bpf --bytecode "1,6 0 0 0" -j X`, `-m bpf --bytecode "1,6 0 0 0" -j X`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			r, err := ParseRule(tc.family, tc.in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, r.String()); diff != "" {
				t.Errorf("canonical text (-want +got):\n%s", diff)
			}
			again, err := ParseRule(tc.family, r.String())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(r.String(), again.String()); diff != "" {
				t.Errorf("the canonical text is not a fixed point (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMalformedRulesAreRefused(t *testing.T) {
	for name, text := range map[string]string{
		"an unclosed quote":            `-m comment --comment "a -j X`,
		"a wrong family":               `-d fd00::1 -j X`,
		"no address at all":            `-d tomorrow -j X`,
		"a stray word":                 `hello -j X`,
		"an option of no module":       `--name X -j X`,
		"a probability above one":      `-m statistic --mode random --probability 1.5 -j X`,
		"a mark that is no number":     `-m mark --mark blue -j X`,
		"nothing behind the last flag": `-p tcp -j`,
		"an inversion of nothing":      `-j X !`,
	} {
		t.Run(name, func(t *testing.T) {
			if r, err := ParseRule(model.IPv4, text); err == nil {
				t.Errorf("accepted as %q", r)
			}
		})
	}
}
