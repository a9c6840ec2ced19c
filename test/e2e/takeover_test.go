package e2e

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/cluster"
	"github.com/turnout-proxy/turnout/test/netns"
)

// capture writes the rules of kube-proxy, as iptables-save prints them, to testdata anew.
var capture = flag.Bool("capture", false, "write testdata/kube-proxy-*.rules anew, from a real kube-proxy")

// families are the tools of both IP families.
func families() []string { return []string{"iptables", "ip6tables"} }

// catalogue gives Services of every kind, and their slices, for pods s1 and s2. The last of them has a large pool and
// others are many, so that our rules have the chains that kube-proxy does not know.
func catalogue(s *site, many, pool int) (services []*corev1.Service, parts []*discoveryv1.EndpointSlice) {
	s1, s2 := s.lab.Host("s1"), s.lab.Host("s2")
	add := func(svc *corev1.Service, pods ...*netns.Host) {
		services = append(services, svc)
		parts = append(parts, slice4(svc.Name, svc.Spec.Ports[0], pods...))
	}
	add(web(), s1, s2)
	parts = append(parts, slice6("web", web().Spec.Ports[0], s1, s2))
	sticky := service("sticky", tcpPort(80, 0), "10.96.6.1")
	seconds := int32(600)
	sticky.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	sticky.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
		ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds},
	}
	add(sticky, s1, s2)
	local := service("local", tcpPort(80, 30081), "10.96.6.2")
	local.Spec.Type, local.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
	local.Spec.HealthCheckNodePort = 30091
	local.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.12"}}
	add(local, s1, s2)
	ranged := service("ranged", tcpPort(80, 30082), "10.96.6.3")
	ranged.Spec.Type, ranged.Spec.LoadBalancerSourceRanges = corev1.ServiceTypeLoadBalancer, []string{"10.20.0.0/24"}
	ranged.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.13"}}
	add(ranged, s1)
	external := service("external", tcpPort(80, 0), "10.96.6.4")
	external.Spec.ExternalIPs = []string{"203.0.113.4"}
	add(external, s2)
	none := service("none", tcpPort(80, 30083), "10.96.6.5")
	none.Spec.Type = corev1.ServiceTypeNodePort
	add(none)
	add(service("datagrams", udpPort(53, 5353, 0), "10.96.6.6"), s1)
	for i := range many {
		add(service(fmt.Sprintf("small-%d", i), tcpPort(80, 0), fmt.Sprintf("10.96.7.%d", i+1)), s1)
	}
	if pool > 0 {
		port := tcpPort(80, 0)
		services = append(services, service("big", port, "10.96.6.7"))
		const perSlice = 1000
		for i, a := range s.lab.Host("crowd1").Addresses(pool, true) {
			if i%perSlice == 0 {
				parts = append(parts, slice4("big", port))
				parts[len(parts)-1].Name = fmt.Sprintf("big-%d", i)
			}
			last := parts[len(parts)-1]
			last.Endpoints = append(last.Endpoints, endpoint(a.String(), "na"))
		}
	}
	return services, parts
}

// newCatalogueSite gives a site with a catalogue's servers; its objects are written by the caller.
func newCatalogueSite(t *testing.T) *site {
	t.Helper()
	s := newSite(t, netns.Topology{Nodes: 2, Crowd: true})
	for _, h := range []string{"s1", "s2", "crowd1"} {
		serve(t, s.lab.Host(h), model.TCP, webPort)
	}
	serve(t, s.lab.Host("s1"), model.UDP, 5353)
	return s
}

// checkCatalogue tries what the catalogue promises, besides web.
func (s *site) checkCatalogue(t *testing.T) {
	t.Helper()
	for _, c := range []struct {
		from, to string
		want     netns.Kind
	}{
		{"c1", "10.96.6.1:80", netns.OK},
		{"c1", "10.96.6.2:80", netns.OK},
		{"out", "192.0.2.12:80", netns.OK},
		{"out", "192.0.2.13:80", netns.OK},
		{"far", "192.0.2.13:80", netns.Timeout},
		{"out", "203.0.113.4:80", netns.OK},
		{"c1", "10.96.6.5:80", netns.Refused},
		{"out", "10.20.0.11:30083", netns.Refused},
	} {
		call := netns.Call{To: netip.MustParseAddrPort(c.to)}
		if c.want == netns.Timeout {
			call.Timeout = 300 * time.Millisecond
		}
		if r := s.lab.Host(c.from).Dial(call); r.Kind != c.want {
			t.Errorf("%s -> %s: %v, want %s", c.from, c.to, r, c.want)
		}
	}
	if r := s.lab.Host("c1").UDP("10.96.6.6:53"); r.Kind != netns.OK {
		t.Errorf("c1 -> 10.96.6.6:53/udp: %v", r)
	}
}

// naRoutes are the ways to web that lead over node na, at 200 new connections a second.
func naRoutes(lab *netns.Lab) []route {
	all := webRoutes(lab)
	return []route{all[0], {"c1", all[1].to, all[1].rate, all[1].long}, all[2], all[4]}
}

func TestRulesThatKubeProxyLeftAreTakenOverInPlace(t *testing.T) {
	if *capture {
		captureRules(t)
	}
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s := newCatalogueSite(t)
			services, parts := catalogue(s, 2, 0)
			s.writeCatalogue(services, parts)
			n := &drift{s.node("na", flavourFlag(flavour)), flavour}
			for _, family := range families() {
				n.addForeign(family)
			}
			before := n.all()
			for _, family := range families() {
				n.restore(family, filepath.Join("testdata", "kube-proxy-"+family+".rules"))
			}
			s.works(t)
			s.checkCatalogue(t)
			l := s.load(naRoutes(s.lab), "s1", "s2")
			start := time.Now()
			n.start()
			n.ready()
			t.Logf("taken over %v after the start", time.Since(start).Round(time.Millisecond))
			l.flow(20)
			s.works(t)
			s.checkCatalogue(t)
			taken := n.all()
			l.stop()
			n.end(syscall.SIGTERM)
			if got := n.ask("cleanup"); got.status != 0 {
				t.Errorf("cleanup: %+v", got)
			}
			// These belong to the kubelet too, and were there before us.
			kubelets := func(rule string) bool {
				return strings.Contains(rule, "KUBE-FIREWALL") || strings.Contains(rule, "KUBE-PROXY-CANARY")
			}
			if diff := cmp.Diff(before, slices.DeleteFunc(n.all(), kubelets)); diff != "" {
				t.Errorf("rules before kube-proxy and after cleanup (-before +after):\n%s", diff)
			}
			n.start()
			n.ready()
			fresh := n.all()
			slices.Sort(fresh)
			taken = slices.DeleteFunc(taken, kubelets)
			fresh = slices.DeleteFunc(fresh, kubelets)
			slices.Sort(taken)
			if diff := cmp.Diff(fresh, taken); diff != "" {
				t.Errorf("rules after a start on an empty node and after the take-over (-fresh +taken over):\n%s", diff)
			}
		})
	}
}

// writeCatalogue puts a catalogue into the directory.
func (s *site) writeCatalogue(services []*corev1.Service, parts []*discoveryv1.EndpointSlice) {
	s.t.Helper()
	s.writeText("catalogue.yaml", catalogueText(s.t, services, parts))
}

func catalogueText(t *testing.T, services []*corev1.Service, parts []*discoveryv1.EndpointSlice) string {
	t.Helper()
	var objects []any
	for _, o := range services {
		objects = append(objects, o)
	}
	for _, o := range parts {
		objects = append(objects, o)
	}
	return marshal(t, objects...)
}

// all gives the rules of all tables of both families, each with its family and table.
func (d *drift) all() []string {
	d.t.Helper()
	var list []string
	for _, family := range families() {
		for _, table := range []string{"nat", "filter", "mangle"} {
			for _, rule := range d.rules(family, d.flavour, table) {
				list = append(list, family+" "+table+" "+rule)
			}
		}
	}
	return list
}

// restore adds the rules in a file.
func (d *drift) restore(family, file string) {
	d.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		d.t.Fatal(err)
	}
	// Its counters are objects of their own, which iptables cannot make.
	text = regexp.MustCompile(`-m nfacct --nfacct-name +\S+ `).ReplaceAll(text, nil)
	cmd := d.command(family+"-"+d.flavour+"-restore", "--noflush")
	cmd.Stdin = bytes.NewReader(text)
	if got := d.run(cmd); got.status != 0 {
		d.t.Fatalf("restore %s: %+v", file, got)
	}
}

func TestKubeProxyAndTurnoutReplaceEachOtherWithoutAFailedConnection(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			program := kubeProxy(t)
			s := newCatalogueSite(t)
			a := s.startAPI()
			services, parts := catalogue(s, 60, 1001)
			for _, svc := range services {
				a.service(svc)
			}
			for _, part := range parts {
				a.slice(part)
			}
			config := a.configFile()
			ours := &drift{s.node("na"), flavour}
			ours.args = []string{"proxy", "--config", config, "--socket", ours.socket, flavourFlag(flavour)}
			theirs := &upstream{t: t, node: ours.node, program: program, config: config, tools: plainTools(t, flavour), log: &transcript{}}
			for _, family := range families() {
				ours.addForeign(family)
			}
			foreign := ours.foreignRules()
			theirs.start()
			s.works(t)
			s.checkCatalogue(t)
			l := s.load(naRoutes(s.lab), "s1", "s2")
			for turn := range 2 {
				theirs.stop()
				l.flow(5)
				start := time.Now()
				ours.start()
				ours.ready()
				t.Logf("turn %d: Turnout has taken over %v after its start", turn+1, time.Since(start).Round(time.Millisecond))
				l.flow(10)
				s.works(t)
				s.checkCatalogue(t)
				ours.end(syscall.SIGTERM)
				l.flow(5)
				theirs.start()
				l.flow(10)
				s.works(t)
				s.checkCatalogue(t)
				if left := ours.strangers(); len(left) > 0 {
					t.Errorf("kube-proxy is back; packets still pass chains that it does not know: %v", left)
				}
				if diff := cmp.Diff(foreign, ours.foreignRules()); diff != "" {
					t.Errorf("rules of others (-want +got):\n%s", diff)
				}
			}
			l.stop()
			theirs.stop()
		})
	}
}

// kubeProxy gives the real program, if it is there or can be built.
func kubeProxy(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("needs kube-proxy, which takes minutes to build: run without -short")
	}
	program, err := cluster.Binary(t.Context(), cluster.UpstreamProxy, io.Discard)
	switch {
	case err != nil && os.Getenv(clusterEnv) == "1":
		t.Fatalf("needs kube-proxy: %v", err)
	case err != nil:
		t.Skipf("needs kube-proxy: %v", err)
	}
	return program
}

// plainTools makes a directory in which the plain names of the iptables tools are those of a flavour, as in the image of
// a cluster that uses it.
func plainTools(t *testing.T, flavour string) string {
	t.Helper()
	dir := t.TempDir()
	for _, family := range families() {
		for _, end := range []string{"", "-save", "-restore"} {
			program, err := exec.LookPath(family + "-" + flavour + end)
			if err == nil {
				program, err = filepath.EvalSymlinks(program)
			}
			if err == nil {
				err = os.Symlink(program, filepath.Join(dir, family+end))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// An upstream is the real kube-proxy on a node.
type upstream struct {
	t                      *testing.T
	node                   *node
	program, config, tools string
	cmd                    *netns.Cmd
	log                    *transcript
}

// start starts kube-proxy and waits until it has written its rules.
func (u *upstream) start() {
	u.t.Helper()
	u.cmd = u.node.command(u.program, "--config", u.config)
	u.cmd.Env = append(u.cmd.Env, "PATH="+u.tools+":"+os.Getenv("PATH"))
	u.cmd.Stdout, u.cmd.Stderr = u.log, u.log
	if err := u.cmd.Start(); err != nil {
		u.t.Fatal(err)
	}
	u.t.Cleanup(func() {
		if u.t.Failed() {
			u.t.Logf("kube-proxy said:\n%s", u.log)
		}
	})
	eventually(u.t, "kube-proxy has written its rules", func() error {
		_, body, err := u.node.get("http://127.0.0.1:10249/metrics")
		if err != nil {
			return err
		}
		for _, family := range []string{"IPv4", "IPv6"} {
			synced := regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds\{ip_family="` + family + `"\} [1-9]`)
			if !synced.MatchString(body) {
				return errors.New("no sync of " + family)
			}
		}
		return nil
	})
}

func (u *upstream) stop() {
	u.t.Helper()
	if err := u.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		u.t.Fatal(err)
	}
	_ = u.cmd.Wait() // it has no status of its own for a good end
}

// The chains that kube-proxy and the kubelet know.
var theirChain = regexp.MustCompile(`^KUBE-(SERVICES|EXTERNAL-SERVICES|NODEPORTS|FORWARD|PROXY-FIREWALL|FIREWALL|POSTROUTING|` +
	`MARK-MASQ|PROXY-CANARY|(SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16})$`)

// strangers gives the chains that packets reach and that kube-proxy does not know, rules of others aside.
func (d *drift) strangers() []string {
	d.t.Helper()
	found := map[string]bool{}
	for _, family := range families() {
		for _, table := range []string{"nat", "filter", "mangle"} {
			jumps := map[string][]string{}
			var open []string
			for _, rule := range d.rules(family, d.flavour, table) {
				if rest, isRule := strings.CutPrefix(rule, "-A "); isRule {
					from, _, _ := strings.Cut(rest, " ")
					_, to, _ := strings.Cut(rest, " -j ")
					to, _, _ = strings.Cut(to, " ")
					jumps[from] = append(jumps[from], to)
				} else if name, policy, _ := strings.Cut(strings.TrimPrefix(rule, ":"), " "); policy == "ACCEPT" {
					open = append(open, name)
				}
			}
			seen := map[string]bool{}
			for len(open) > 0 {
				chain := open[0]
				open = open[1:]
				for _, to := range jumps[chain] {
					if strings.HasPrefix(to, "KUBE-") && !theirChain.MatchString(to) {
						found[family+" "+table+" "+to] = true
					}
					if !seen[to] {
						seen[to] = true
						open = append(open, to)
					}
				}
			}
		}
	}
	var list []string
	for chain := range found {
		list = append(list, chain)
	}
	slices.Sort(list)
	return list
}

// captureRules writes the rules of a real kube-proxy to testdata.
func captureRules(t *testing.T) {
	t.Helper()
	needRoot(t)
	program := kubeProxy(t)
	s := newCatalogueSite(t)
	a := s.startAPI()
	services, parts := catalogue(s, 2, 0)
	for _, svc := range services {
		a.service(svc)
	}
	for _, part := range parts {
		a.slice(part)
	}
	const flavour = "legacy"
	n := s.node("na")
	u := &upstream{t: t, node: n, program: program, config: a.configFile(), tools: plainTools(t, flavour), log: &transcript{}}
	u.start()
	s.works(t)
	for _, family := range families() {
		var text strings.Builder
		for _, table := range []string{"mangle", "nat", "filter"} {
			text.WriteString(n.tool(family+"-"+flavour+"-save", "-t", table))
		}
		var clean strings.Builder
		for line := range strings.Lines(text.String()) {
			if !strings.HasPrefix(line, "#") {
				clean.WriteString(regexp.MustCompile(`\[\d+:\d+\]`).ReplaceAllString(line, "[0:0]"))
			}
		}
		if err := os.WriteFile(filepath.Join("testdata", "kube-proxy-"+family+".rules"), []byte(clean.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	u.stop()
}
