package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// An input is a running node on whose directory bad files are inflicted while the Service web has traffic.
type input struct {
	*site
	*node
	s1, s2 *netns.Host
	port   corev1.ServicePort
}

func TestBadObjectsAreNamedAndHarmNobodyElse(t *testing.T) {
	for _, flavour := range bothFlavours(t) {
		t.Run(flavour, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, netns.Topology{Nodes: 2, Crowd: true})
			in := &input{
				site: s, node: s.node("na", flavourFlag(flavour)), s1: s.lab.Host("s1"), s2: s.lab.Host("s2"),
				port: tcpPort(80, 0),
			}
			for _, host := range []string{"s1", "s2", "crowd1", "crowd2"} {
				serve(t, s.lab.Host(host), model.TCP, webPort)
			}
			s.writeWeb(in.s1, in.s2)
			in.start()
			in.pool(in.s1, in.s2)
			l := s.load([]route{{"c1", webIP4 + ":80", 40, 5}, {"out", webLB4 + ":80", 20, 5}}, "s1", "s2")
			// The cases share the daemon and the traffic, so each must leave things as they were.
			for name, c := range map[string]func(*input){
				"YAML that cannot be parsed":            malformed,
				"an IPv6 address in an IPv4 slice":      wrongFamily,
				"a port 0":                              portZero,
				"names of 253 characters":               longNames,
				"5000 endpoints in one Service":         manyEndpoints,
				"a cluster IP of None":                  headless,
				"the same addresses in several slices":  duplicates,
				"an endpoint on 127.0.0.1":              loopback,
				"an endpoint on 127.0.0.1 and no other": onlyLoopback,
			} {
				t.Run(name, func(t *testing.T) {
					one := *in
					one.site = &site{t: t, lab: in.lab, manifests: in.manifests}
					n := *in.node
					one.node, n.t = &n, t
					c(&one)
					one.noFindings()
					one.pool(in.s1, in.s2)
				})
			}
			l.t = t
			l.stop()
		})
	}
}

// A complaint is what must be said about a bad object: by ls, as a value and as text, by the log and by a metric.
type complaint struct {
	severity, kind, object, reason string
	// file is where the object is described; the message begins with it and a line.
	file string
	// says is part of the message.
	says string
}

// complains waits for a finding in ls, and looks for it in the text of ls and in the log.
func (in *input) complains(c complaint) {
	in.t().Helper()
	var found answer.Finding
	eventually(in.t(), "a finding on "+c.object, func() error {
		l, err := in.ls()
		if err != nil {
			return err
		}
		for _, f := range l.Findings {
			if f.Object == c.object && f.Reason == c.reason {
				found = f
				return nil
			}
		}
		return fmt.Errorf("ls has the findings %v", l.Findings)
	})
	place := regexp.MustCompile("^" + regexp.QuoteMeta(filepath.Join(in.manifests, c.file)) + `:[1-9]\d*: `)
	if found.Severity != c.severity || found.Kind != c.kind || !place.MatchString(found.Message) ||
		!strings.Contains(found.Message, c.says) {
		in.t().Errorf("got %+v, want %+v", found, c)
	}
	series := fmt.Sprintf("turnout_findings{reason=%q,severity=%q}", c.reason, c.severity)
	if got := in.metric(series); got == "0" || got == "absent" {
		in.t().Errorf("metric %s is %s", series, got)
	}
	if text := in.ask("ls").stdout; !strings.Contains(text, c.object) || !strings.Contains(text, found.Message) {
		in.t().Errorf("ls does not show the finding %+v:\n%s", found, text)
	}
	said := false
	for line := range strings.Lines(in.log.String()) {
		said = said || strings.Contains(line, c.object) && strings.Contains(line, c.reason)
	}
	if !said {
		in.t().Errorf("the log does not name %s and %s", c.object, c.reason)
	}
}

func (in *input) t() *testing.T { return in.site.t }

// ls runs the command and reads its JSON.
func (in *input) ls() (answer.Listing, error) {
	var l answer.Listing
	got := in.ask("ls", "-o", "json")
	if got.status != 0 {
		return l, fmt.Errorf("ls: status %d: %s", got.status, got.stderr)
	}
	return l, json.Unmarshal([]byte(got.stdout), &l)
}

// noFindings waits until nothing is wrong any more.
func (in *input) noFindings() {
	in.t().Helper()
	eventually(in.t(), "no findings", func() error {
		l, err := in.listing()
		if err == nil && len(l.Findings) > 0 {
			err = fmt.Errorf("findings %v", l.Findings)
		}
		return err
	})
}

// answers waits until an address is answered by each of these servers and then makes sure that nobody else answers.
func (in *input) answers(to string, servers ...string) {
	in.t().Helper()
	eventually(in.t(), to+" is answered", func() error {
		got := map[string]int{}
		for range 12 * len(servers) {
			r := in.lab.Host("c1").TCP(to)
			if r.Kind != netns.OK {
				return fmt.Errorf("%s: %v", to, r)
			}
			got[r.Server]++
		}
		for _, s := range servers {
			if got[s] == 0 {
				return fmt.Errorf("answers from %v, want %v", got, servers)
			}
			delete(got, s)
		}
		if len(got) > 0 {
			return fmt.Errorf("answers from %v too, want %v only", got, servers)
		}
		return nil
	})
}

// ends waits until an attempt ends in some way.
func (in *input) ends(to string, want netns.Kind) {
	in.t().Helper()
	eventually(in.t(), to+" is "+want.String(), func() error {
		if r := in.lab.Host("c1").TCP(to); r.Kind != want {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}

func malformed(in *input) {
	t := in.t()
	const first, second, file = "10.96.2.1", "10.96.2.2", "broken.yaml"
	in.write(file, service("first", in.port, first), slice4("first", in.port, in.s1), service("second", in.port, second),
		slice4("second", in.port, in.s1))
	in.answers(first+":80", "s1")
	in.answers(second+":80", "s1")
	// The slice of first is broken; second moves to another endpoint in the same file.
	text := "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: first-4\n   namespace: shop\nendpoints: [\n---\n"
	in.writeText(file, text+marshal(t, service("second", in.port, second), slice4("second", in.port, in.s2)))
	path := filepath.Join(in.manifests, file)
	in.complains(complaint{"error", "File", path, "InvalidDocument", file, path + ":5: "})
	in.answers(second+":80", "s2")
	in.answers(first+":80", "s1")
	in.write(file, service("first", in.port, first), slice4("first", in.port, in.s2))
	in.answers(first+":80", "s2")
	in.remove(file)
	in.ends(first+":80", netns.Unreachable)
}

func wrongFamily(in *input) {
	const ip, file = "10.96.2.3", "family.yaml"
	bad := slice4("family", in.port, in.s1)
	bad.Endpoints = append(bad.Endpoints, endpoint(in.s2.Addr6().String(), "nb"))
	in.write(file, service("family", in.port, ip), bad)
	in.complains(complaint{"error", "EndpointSlice", "shop/family-4", "WrongFamily", file, in.s2.Addr6().String()})
	in.answers(ip+":80", "s1")
	in.write(file, service("family", in.port, ip), slice4("family", in.port, in.s1, in.s2))
	in.noFindings()
	in.answers(ip+":80", "s1", "s2")
	in.remove(file)
}

func portZero(in *input) {
	const ip, file = "10.96.2.4", "zero.yaml"
	bad := service("zero", in.port, ip)
	zero := in.port
	zero.Name, zero.Port = "none", 0
	bad.Spec.Ports = append(bad.Spec.Ports, zero)
	noPort := in.port
	noPort.TargetPort.IntVal = 0
	badSlice := slice4("zero", in.port, in.s1)
	badSlice.Ports = append(badSlice.Ports, slice4("zero", noPort).Ports...)
	in.write(file, bad, badSlice)
	in.complains(complaint{"error", "Service", "shop/zero", "InvalidPort", file, "spec.ports[1].port: 0"})
	in.complains(complaint{"error", "EndpointSlice", "shop/zero-4", "InvalidPort", file, "ports[1].port: 0"})
	in.answers(ip+":80", "s1")
	zero.Port = 81
	fixed := service("zero", in.port, ip)
	fixed.Spec.Ports = append(fixed.Spec.Ports, zero)
	parts := slice4("zero", in.port, in.s1)
	parts.Ports = append(parts.Ports, slice4("zero", zero).Ports...)
	in.write(file, fixed, parts)
	in.noFindings()
	in.answers(ip+":81", "s1")
	in.remove(file)
}

func longNames(in *input) {
	const ip, file = "10.96.2.5", "long.yaml"
	long := strings.Repeat("n", 253)
	svc, part := service(long, in.port, ip), slice4(long, in.port, in.s1)
	svc.Namespace, part.Namespace, part.Name = strings.Repeat("s", 253), strings.Repeat("s", 253), long
	svc.Spec.Ports[0].Name, part.Ports[0].Name = "", new(string)
	in.write(file, svc, part)
	in.complains(complaint{"warning", "Service", svc.Namespace + "/" + long, "InvalidName", file, "253 characters"})
	in.answers(ip+":80", "s1")
	eventually(in.t(), "the long name is in force", in.inForce)
	// One more character is more than any name may have, and hides nothing else in the file.
	svc.Name += "n"
	in.write(file, svc, part, service("short", in.port, "10.96.2.55"), slice4("short", in.port, in.s2))
	in.complains(complaint{"error", "Service", svc.Namespace + "/" + svc.Name, "InvalidName", file, "253"})
	in.answers("10.96.2.55:80", "s2")
	in.remove(file)
}

func manyEndpoints(in *input) {
	t := in.t()
	const ip, file, half = "10.96.2.6", "many.yaml", 2500
	list := []any{service("many", in.port, ip)}
	const perSlice = 1000
	part := slice4("many", in.port)
	for _, crowd := range []string{"crowd1", "crowd2"} {
		host := in.lab.Host(crowd)
		for i, a := range host.Addresses(half, true) {
			if i%perSlice == 0 {
				part = slice4("many", in.port)
				part.Name = fmt.Sprintf("many-%s-%d", crowd, i)
				list = append(list, part)
			}
			part.Endpoints = append(part.Endpoints, endpoint(a.String(), host.Node().Name))
		}
	}
	start := time.Now()
	in.write(file, list...)
	eventually(t, "5000 endpoints in force", func() error {
		l, err := in.listing()
		if err != nil {
			return err
		}
		l.Select(namespace, "many")
		if len(l.Rows) != 1 || len(l.Rows[0].Endpoints) != 2*half || l.Rows[0].Drift != answer.DriftNone {
			return fmt.Errorf("%d rows", len(l.Rows))
		}
		for _, e := range l.Rows[0].Endpoints {
			if math.Abs(e.Share*2*half-1) > 0.001 {
				return stop(fmt.Errorf("endpoint %s has a share of %v, want 1/5000 within 0.1 %%", e.Addr, e.Share))
			}
		}
		return nil
	})
	t.Logf("5000 endpoints in force within %v", time.Since(start).Round(time.Millisecond))
	seen := map[string]bool{}
	const attempts = 200
	for range attempts {
		r := in.lab.Host("c1").TCP(ip + ":80")
		if r.Kind != netns.OK {
			t.Fatalf("%s: %v", ip, r)
		}
		seen[r.Server] = true
	}
	// Of 200 draws out of 5000 some 4 hit an endpoint again.
	if len(seen) < attempts*9/10 {
		t.Errorf("%d connections met %d endpoints", attempts, len(seen))
	}
	in.write(file, service("many", in.port, ip), slice4("many", in.port, in.s1))
	in.answers(ip+":80", "s1")
	in.remove(file)
}

func headless(in *input) {
	t := in.t()
	const ip, file = "10.96.2.7", "none.yaml"
	svc := service("none", in.port, corev1.ClusterIPNone)
	in.write(file, svc, slice4("none", in.port, in.s1), service("beside", in.port, ip), slice4("beside", in.port, in.s2))
	in.answers(ip+":80", "s2")
	l, err := in.ls()
	if err != nil {
		t.Fatal(err)
	}
	l.Select(namespace, "none")
	if len(l.Rows) > 0 {
		t.Errorf("a headless Service is forwarded: %v", l.Rows)
	}
	in.remove(file)
	in.ends(ip+":80", netns.Unreachable)
	in.write(file, service("none", in.port, ip), slice4("none", in.port, in.s1))
	in.answers(ip+":80", "s1")
	in.remove(file)
}

func duplicates(in *input) {
	t := in.t()
	const ip, file = "10.96.2.8", "twice.yaml"
	list := []any{service("twice", in.port, ip)}
	for i := range 3 {
		part := slice4("twice", in.port, in.s1, in.s1)
		part.Name = fmt.Sprintf("twice-%d", i)
		list = append(list, part)
	}
	list = append(list, slice4("twice", in.port, in.s2))
	in.write(file, list...)
	in.answers(ip+":80", "s1", "s2")
	l, err := in.ls()
	if err != nil {
		t.Fatal(err)
	}
	l.Select(namespace, "twice")
	if len(l.Rows) != 1 || len(l.Rows[0].Endpoints) != 2 || math.Abs(l.Rows[0].Endpoints[0].Share-0.5) > 0.001 {
		t.Errorf("rows %+v, want two endpoints with half of the connections each", l.Rows)
	}
	// The first slices go: the endpoint stays for as long as one has it.
	in.write(file, list[0], list[3], list[4])
	in.answers(ip+":80", "s1", "s2")
	in.write(file, list[0], list[4])
	in.answers(ip+":80", "s2")
	in.remove(file)
}

func loopback(in *input) {
	const ip, file = "10.96.2.9", "loop.yaml"
	bad := slice4("loop", in.port, in.s1)
	bad.Endpoints = append(bad.Endpoints, endpoint("127.0.0.1", "na"))
	in.write(file, service("loop", in.port, ip), bad)
	in.complains(complaint{"error", "EndpointSlice", "shop/loop-4", "ForbiddenAddress", file, "127.0.0.1"})
	in.answers(ip+":80", "s1")
	in.remove(file)
}

func onlyLoopback(in *input) {
	const ip, file = "10.96.2.10", "only.yaml"
	bad := slice("only", discoveryv1.AddressTypeIPv4, in.port)
	bad.Endpoints = append(bad.Endpoints, endpoint("127.0.0.1", "na"))
	in.write(file, service("only", in.port, ip), bad)
	in.complains(complaint{"error", "EndpointSlice", "shop/only-4", "ForbiddenAddress", file, "127.0.0.1"})
	in.ends(ip+":80", netns.Refused)
	in.write(file, service("only", in.port, ip), slice4("only", in.port, in.s2))
	in.noFindings()
	in.answers(netip.MustParseAddrPort(ip+":80").String(), "s2")
	in.remove(file)
}
