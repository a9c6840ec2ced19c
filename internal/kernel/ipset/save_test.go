package ipset

import (
	"errors"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
	"github.com/turnout-proxy/turnout/internal/model"
)

// tool runs the program ipset in the test's namespace, and skips the test where there is none.
func tool(t *testing.T, input string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath("ipset")
	if err != nil {
		t.Skip("needs the program ipset to compare with: apt-get install ipset")
	}
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("ipset %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// plain sorts lines, and takes out what a Set leaves out and how long an entry will stay.
func plain(text string) []string {
	text = regexp.MustCompile(` hashsize \d+| bucketsize \d+| initval 0x[0-9a-f]+| packets \d+ bytes \d+`).ReplaceAllString(text, "")
	text = regexp.MustCompile(`(?m)^(add .*) timeout \d+`).ReplaceAllString(text, "$1")
	lines := strings.Split(strings.TrimSpace(text), "\n")
	slices.Sort(lines)
	return lines
}

// What the program saves is the fake's dump, and what it restores from that is read as what the fake holds.
func TestTextIsThatOfTheProgram(t *testing.T) {
	kerneltest.Isolate(t)
	k, f, want := NewKernel(), NewFake(), sets()
	fill(t, k, want)
	fill(t, f, want)
	if diff := cmp.Diff(plain(tool(t, "", "save")), plain(f.Dump())); diff != "" {
		t.Errorf("text (-program +ours):\n%s", diff)
	}
	tool(t, "", "destroy")
	tool(t, f.Dump(), "restore")
	expect(t, k, names(want), want...)
	fill(t, k, want) // sets of the program's, of another revision, are the same
}

// A set that holds what is not known here is told from one that does not, and a swap makes it right.
func TestWhatIsNotKnownMakesASetForeign(t *testing.T) {
	ip := Set{Name: "X", Type: HashIP, Family: model.IPv4, MaxElem: DefaultMaxElem}
	marked, nets := ip, ip
	marked.Marks, nets.Type = true, HashNet
	tests := map[string]struct {
		commands string
		want     Set // but for Foreign
		inHeader bool
		entries  int
	}{
		"forceadd":      {"create X hash:ip forceadd", ip, true, 0},
		"a netmask":     {"create X hash:ip netmask 24\nadd X 10.0.0.0", ip, true, 1},
		"some ports":    {"create X bitmap:port range 1-1023\nadd X 80", Set{Name: "X", Type: BitmapPort}, true, 1},
		"nomatch":       {"create X hash:net\nadd X 10.0.0.0/8 nomatch", nets, false, 1},
		"a mark's mask": {"create X hash:ip skbinfo\nadd X 10.0.0.1 skbmark 0x1/0xff", marked, false, 1},
		"a priority":    {"create X hash:ip skbinfo\nadd X 10.0.0.1 skbprio 1:10", marked, false, 1},
		"a queue":       {"create X hash:ip skbinfo\nadd X 10.0.0.1 skbqueue 3", marked, false, 1},
		"another type":  {"create X list:set\ncreate Z hash:ip\nadd X Z", Set{Name: "X", Type: "list:set", Foreign: true}, true, 0},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			kerneltest.Isolate(t)
			k := NewKernel()
			tool(t, tc.commands+"\n", "restore")
			got := mustRead(t, k, "X")
			want := tc.want
			want.Foreign = true
			if len(got) != 1 || got[0].Set != want || len(got[0].Entries) != tc.entries {
				t.Errorf("read %v, want %v with %d entries", got, want, tc.entries)
			}
			list, err := k.List(t.Context(), nil)
			if err != nil || len(list) == 0 || list[0].Foreign != tc.inHeader {
				t.Errorf("listed %v, error %v; want Foreign %v", list, err, tc.inHeader)
			}
			if want.Type == "list:set" {
				return
			}
			want.Foreign = false
			beside := want
			beside.Name = "Y"
			do(t, k, Op{Verb: Create, Set: beside}, Op{Verb: Swap, Set: want, With: "Y"}, Op{Verb: Destroy, Set: beside})
			expect(t, k, []string{"X"}, Content{want, map[Entry]uint32{}})
		})
	}
}

// A set with timeouts, comments and counters of somebody else's is read as what it is.
func TestExtensionsOfEntriesAreReadOver(t *testing.T) {
	kerneltest.Isolate(t)
	tool(t, "create X hash:ip timeout 600 counters comment skbinfo\n"+
		"add X 10.0.0.1 timeout 60 packets 5 bytes 500 comment \"a comment\" skbmark 0x7\n", "restore")
	c := Content{sets()[0].Set, map[Entry]uint32{{Addr: addr("10.0.0.1")}: 7}}
	c.Name, c.MaxElem = "X", DefaultMaxElem
	c.Timeouts, c.Timeout, c.Counters, c.Comments, c.Marks = true, 600e9, true, true, true
	expect(t, NewKernel(), []string{"X"}, c)
}

// Entries of protocols and ports that the Service API does not know can be read and taken out.
func TestStrangeEntriesCanBeTakenOut(t *testing.T) {
	kerneltest.Isolate(t)
	k := NewKernel()
	tool(t, "create X hash:ip,port\nadd X 10.0.0.1,icmp:8/0\nadd X 10.0.0.1,udplite:5\nadd X 10.0.0.1,47:0\n", "restore")
	s := Set{Name: "X", Type: HashIPPort, Family: model.IPv4, MaxElem: DefaultMaxElem}
	got := mustRead(t, k, "X")
	if len(got) != 1 || len(got[0].Entries) != 3 {
		t.Fatalf("read %v, want 3 entries", got)
	}
	for e := range got[0].Entries {
		do(t, k, Op{Verb: Remove, Set: s, Entry: e, Strict: true})
	}
	expect(t, k, []string{"X"}, Content{s, map[Entry]uint32{}})
}

// A rule keeps its set as a set of sets does, and sees the other one after a swap.
func TestARuleKeepsItsSet(t *testing.T) {
	kerneltest.Isolate(t)
	path, err := exec.LookPath("iptables-legacy")
	if err != nil {
		t.Skip("needs iptables-legacy for a rule that uses a set: apt-get install iptables")
	}
	k := NewKernel()
	old, next := Set{Name: "X", Type: HashIP, Family: model.IPv4}, Set{Name: "Y", Type: HashIP, Family: model.IPv4}
	do(t, k, Op{Verb: Create, Set: old}, Op{Verb: Create, Set: next})
	cmd := exec.CommandContext(t.Context(), path, "-w", "-A", "INPUT", "-m", "set", "--match-set", "X", "src", "-j", "ACCEPT")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("add a rule: %v\n%s", err, out)
	}
	for i, err := range k.Apply(t.Context(), []Op{{Verb: Destroy, Set: old}, {Verb: Rename, Set: old, With: "Z"}}) {
		if !errors.Is(err, ErrInUse) {
			t.Errorf("op %d: error %v, want one that the set is in use", i, err)
		}
	}
	do(t, k, Op{Verb: Swap, Set: old, With: "Y"}, Op{Verb: Destroy, Set: next})
}
