package e2e

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// repairWithin is how long a repair may take.
const repairWithin = 5 * time.Second

// A damage is what somebody does to the rules.
type damage struct {
	what string
	// family is iptables or ip6tables, commands are its arguments.
	family   string
	commands func(d *drift) [][]string
	// foreign tells that the damage takes the foreign rules of table nat with it.
	foreign bool
}

func damages() []damage {
	fixed := func(commands ...string) func(*drift) [][]string {
		return func(*drift) [][]string {
			var all [][]string
			for _, c := range commands {
				all = append(all, strings.Fields(c))
			}
			return all
		}
	}
	return []damage{
		{what: "a jump is deleted", family: "iptables", commands: func(d *drift) [][]string {
			return [][]string{append([]string{"-t", "nat", "-D"}, d.ruleWith("iptables", "nat", "-A PREROUTING", "-j KUBE-SERVICES")...)}
		}},
		{what: "a chain is emptied", family: "iptables", commands: fixed("-t nat -F KUBE-SERVICES")},
		{what: "somebody bypasses all Services", family: "iptables", commands: fixed("-t nat -I KUBE-SERVICES 1 -j RETURN")},
		{what: "a chain of table filter is emptied", family: "iptables", commands: fixed("-t filter -F KUBE-FORWARD")},
		{
			what: "table nat is flushed and its chains are deleted", family: "iptables", foreign: true,
			commands: fixed("-t nat -F", "-t nat -X"),
		},
		{
			what: "IPv6 table nat is flushed and its chains are deleted", family: "ip6tables", foreign: true,
			commands: fixed("-t nat -F", "-t nat -X"),
		},
	}
}

// A drift is one node with foreign rules beside ours.
type drift struct {
	*node
	flavour string
}

func TestWhatOthersChangeInTheRulesIsRepaired(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, netns.Topology{Nodes: 2})
			s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
			serve(t, s1, model.TCP, webPort)
			serve(t, s2, model.TCP, webPort)
			s.writeWeb(s1, s2)
			d := &drift{s.node("na", flavourFlag(flavour)), flavour}
			for _, family := range []string{"iptables", "ip6tables"} {
				d.addForeign(family)
			}
			foreign := d.foreignRules()
			d.start()
			d.pool(s1, s2)
			expect := map[string]int{"iptables": 0, "ip6tables": 0}
			for _, damage := range damages() {
				d.repairs(damage, expect)
				for _, to := range []string{webIP4 + ":80", "[" + webIP6 + "]:80"} {
					if r := s.lab.Host("c1").TCP(to); r.Kind != netns.OK {
						t.Errorf("after %s: c1 -> %s: %v", damage.what, to, r)
					}
				}
				if damage.foreign {
					foreign = slices.DeleteFunc(foreign, func(rule string) bool { return strings.HasPrefix(rule, damage.family+" nat") })
				}
				if diff := cmp.Diff(foreign, d.foreignRules()); diff != "" {
					t.Errorf("after %s: rules of others (-want +got):\n%s", damage.what, diff)
				}
			}
			// An episode of drift is one line, however often somebody comes back: one for each IP family.
			const line = "Repaired kernel objects that others had changed"
			if got := d.log.count(line); got != 2 {
				t.Errorf("the log has %d lines %q, want one for each IP family", got, line)
			}
			if status := d.end(15); status != 0 {
				t.Errorf("status %d", status)
			}
		})
	}
}

// addForeign writes rules of others: before, within and behind the place of ours.
func (d *drift) addForeign(family string) {
	d.t.Helper()
	addr := map[string]string{"iptables": "192.0.2.77/32", "ip6tables": "2001:db8:2::77/128"}[family]
	tool := family + "-" + d.flavour
	for _, c := range []string{
		"-t nat -N OTHERS", "-t nat -A OTHERS -s " + addr + " -j ACCEPT", "-t nat -A PREROUTING -s " + addr + " -j OTHERS",
		"-t nat -A POSTROUTING -s " + addr + " -j ACCEPT", "-t filter -A FORWARD -s " + addr + " -j ACCEPT",
		"-t mangle -A FORWARD -s " + addr + " -j ACCEPT",
	} {
		d.tool(tool, strings.Fields(c)...)
	}
}

// foreignRules gives all rules and chains that are not ours, each with family and table.
func (d *drift) foreignRules() []string {
	d.t.Helper()
	var list []string
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, table := range []string{"nat", "filter", "mangle"} {
			for _, rule := range d.rules(family, d.flavour, table) {
				if strings.HasPrefix(rule, "-A") && !strings.Contains(rule, "KUBE-") || strings.HasPrefix(rule, ":OTHERS") {
					list = append(list, fmt.Sprint(family, " ", table, " ", rule))
				}
			}
		}
	}
	return list
}

// everything gives the rules that a family has in the tables that we write to.
func (d *drift) everything(family string) []string {
	d.t.Helper()
	return append(d.rules(family, d.flavour, "nat"), d.rules(family, d.flavour, "filter")...)
}

// ruleWith finds the one rule with all of the texts, and gives the arguments that delete it, without the -A.
func (d *drift) ruleWith(family, table string, texts ...string) []string {
	d.t.Helper()
	for _, rule := range d.rules(family, d.flavour, table) {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(rule, text) }) {
			return words(strings.TrimPrefix(rule, "-A "))
		}
	}
	d.t.Fatalf("no rule of %s has %q", table, texts)
	return nil
}

// words splits a rule as a shell does; double quotes are all that it knows of quoting.
func words(rule string) []string {
	var list []string
	for i, part := range strings.Split(rule, `"`) {
		if i%2 == 1 {
			list = append(list, part)
		} else {
			list = append(list, strings.Fields(part)...)
		}
	}
	return list
}

// repairs does a damage, and waits for its repair, in the kernel and in the count. Expect is how many repairs each family
// has had.
func (d *drift) repairs(damage damage, expect map[string]int) {
	d.t.Helper()
	want := d.everything(damage.family)
	if damage.foreign {
		want = slices.DeleteFunc(want, func(rule string) bool {
			return strings.Contains(rule, "OTHERS") || strings.HasPrefix(rule, "-A POSTROUTING") && !strings.Contains(rule, "KUBE-")
		})
	}
	for _, command := range damage.commands(d) {
		d.tool(damage.family+"-"+d.flavour, command...)
	}
	slices.Sort(want)
	var diff string
	took, err := within(repairWithin, func() error {
		got := d.everything(damage.family)
		slices.Sort(got)
		if diff = cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("rules (-want +got):\n%s", diff)
		}
		return nil
	})
	if err != nil {
		d.t.Fatalf("%s: not repaired within %v: %v", damage.what, repairWithin, err)
	}
	expect[damage.family]++
	series := fmt.Sprintf("turnout_drift_repairs_total{ip_family=%q}", map[string]string{"iptables": "IPv4", "ip6tables": "IPv6"}[damage.family])
	eventually(d.t, "the count of repairs", func() error {
		if got := d.metric(series); got != strconv.Itoa(expect[damage.family]) {
			return fmt.Errorf("after %s: %s is %s, want %d", damage.what, series, got, expect[damage.family])
		}
		return nil
	})
	d.t.Logf("%s: repaired after %v", damage.what, took.Round(time.Millisecond))
}
