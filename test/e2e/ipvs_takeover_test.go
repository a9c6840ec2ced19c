package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A piece is one sort of the kernel objects of mode ipvs: how they are saved and restored.
type piece struct {
	file          string
	save, restore []string
	// clean takes out of the saved text what differs each time.
	clean func(string) string
}

// upstreamPieces are what kube-proxy leaves in mode ipvs, in the order in which they can be restored.
func upstreamPieces() []piece {
	counters := regexp.MustCompile(`\[\d+:\d+\]`)
	rules := func(text string) string {
		var b strings.Builder
		for line := range strings.Lines(counters.ReplaceAllString(text, "[0:0]")) {
			if !strings.HasPrefix(line, "#") {
				b.WriteString(line)
			}
		}
		return b.String()
	}
	same := func(text string) string { return text }
	return []piece{
		{"kube-proxy-ipvs.sets", []string{"ipset", "save"}, []string{"ipset", "restore"}, same},
		{"kube-proxy-ipvs.iptables", []string{"iptables-legacy-save"}, []string{"iptables-legacy-restore", "--noflush"}, rules},
		{"kube-proxy-ipvs.ip6tables", []string{"ip6tables-legacy-save"}, []string{"ip6tables-legacy-restore", "--noflush"}, rules},
		{"kube-proxy-ipvs.servers", []string{"ipvsadm", "-Sn"}, []string{"ipvsadm", "-R"}, same},
	}
}

// The device of kube-proxy, and the file with its addresses, one on a line.
const (
	upstreamDevice    = "kube-ipvs0"
	upstreamAddresses = "kube-proxy-ipvs.addresses"
)

// feed restores a piece from testdata.
func (n *node) feed(p piece) {
	n.t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", p.file))
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := n.command(p.restore[0], p.restore[1:]...)
	cmd.Stdin = bytes.NewReader(text)
	if got := n.run(cmd); got.status != 0 {
		n.t.Fatalf("restore %s: %+v", p.file, got)
	}
}

// addresses gives those of kube-proxy's device.
func (n *node) deviceAddresses() []string {
	n.t.Helper()
	var list []string
	for line := range strings.Lines(n.tool("ip", "-o", "addr", "show", "dev", upstreamDevice)) {
		if f := strings.Fields(line); len(f) > 3 && !strings.HasPrefix(f[3], "fe80:") {
			list = append(list, f[3])
		}
	}
	slices.Sort(list)
	return list
}

// Run with -capture, in a virtual machine, to have testdata/kube-proxy-ipvs.* printed anew; what a guest writes is gone
// with it.
func TestIPVSKubeProxyIsTakenOverInPlace(t *testing.T) {
	needIPVS(t)
	if *capture {
		captureIPVS(t)
		return
	}
	s := newCatalogueSite(t)
	services, parts := catalogue(s, 2, 0)
	s.writeCatalogue(services, parts)
	na := s.ipvsNode("na", flavourFlag("legacy"))
	na.tool("ip", "link", "add", upstreamDevice, "type", "dummy")
	text, err := os.ReadFile(filepath.Join("testdata", upstreamAddresses))
	if err != nil {
		t.Fatal(err)
	}
	for a := range strings.FieldsSeq(string(text)) {
		na.tool("ip", "addr", "add", a, "dev", upstreamDevice, "nodad")
	}
	for _, p := range upstreamPieces() {
		na.feed(p)
	}
	for name, value := range map[string]string{"vs/conntrack": "1", "vs/expire_nodest_conn": "1", "vs/expire_quiescent_template": "1"} {
		if err := na.host.Sysctl("net.ipv4."+name, value); err != nil {
			t.Fatal(err)
		}
	}
	s.works(t)
	l := s.load(gently(naRoutes(s.lab)), "s1", "s2")
	start := time.Now()
	na.start()
	na.ready()
	t.Logf("taken over %v after the start", time.Since(start).Round(time.Millisecond))
	l.flow(10)
	s.works(t)
	s.checkCatalogue(t)
	if out := na.tool("ip", "-o", "link"); strings.Contains(out, upstreamDevice) {
		t.Errorf("kube-proxy's device is still there:\n%s", out)
	}
	l.stop()
	taken := na.everything()
	na.end(syscall.SIGTERM)
	if got := na.turnout("cleanup", "--socket", na.socket); got.status != 0 {
		t.Errorf("cleanup: %+v", got)
	}
	na.start()
	na.ready()
	if diff := cmp.Diff(na.everything(), taken); diff != "" {
		t.Errorf("objects after a start on an empty node and after the take-over (-fresh +taken over):\n%s", diff)
	}
}

// everything gives the objects of mode ipvs, sorted, endpoints that drain aside.
func (n *node) everything() []string {
	n.t.Helper()
	var list []string
	for _, p := range upstreamPieces() {
		for line := range strings.Lines(p.clean(n.tool(p.save[0], p.save[1:]...))) {
			line = strings.TrimSpace(line)
			// How many buckets a hash has depends on what was in it, and its seed is drawn.
			line = regexp.MustCompile(` (hashsize|bucketsize|initval) \S+`).ReplaceAllString(line, "")
			if line != "" && !strings.HasSuffix(line, " -w 0") && !strings.Contains(line, "KUBE-FIREWALL") {
				list = append(list, p.file+": "+line)
			}
		}
	}
	for _, family := range []string{"-4", "-6"} {
		for line := range strings.Lines(n.tool("ip", family, "route", "show", "table", "local", "proto", "84")) {
			list = append(list, "route "+strings.TrimSpace(line))
		}
	}
	slices.Sort(list)
	return list
}

// captureIPVS prints what a real kube-proxy writes in mode ipvs.
func captureIPVS(t *testing.T) {
	t.Helper()
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
	n := s.node("na")
	u := &upstream{
		t: t, node: n, program: program, config: a.configFor("ipvs"), tools: plainTools(t, "legacy"), log: &transcript{},
	}
	u.start()
	s.works(t)
	show := func(file, text string) { t.Logf("testdata/%s:\n%s", file, text) }
	for _, p := range upstreamPieces() {
		show(p.file, p.clean(n.tool(p.save[0], p.save[1:]...)))
	}
	show(upstreamAddresses, strings.Join(n.deviceAddresses(), "\n")+"\n")
	u.stop()
}

// The addresses of Services move between the device and routes, without a failure either way. B028.
func TestIPVSAddressesMoveBetweenDeviceAndRoutes(t *testing.T) {
	s, s1, s2, na := ipvsSite(t)
	routes := na.args
	onDevice := append(slices.Clone(routes), "--ipvs-addresses=device")
	na.args = onDevice
	na.start()
	na.pool(s1, s2)
	s.works(t)
	l := s.load(gently(naRoutes(s.lab)), "s1", "s2")
	for turn, args := range [][]string{routes, onDevice, routes} {
		na.end(syscall.SIGTERM)
		na.args = args
		na.start()
		na.pool(s1, s2)
		l.flow(5)
		s.works(t)
		local := na.tool("ip", "route", "show", "table", "local", "proto", "84")
		device := strings.Contains(na.tool("ip", "-o", "link"), upstreamDevice)
		if onDevice := turn == 1; device != onDevice || strings.Contains(local, webIP4) == onDevice {
			t.Errorf("turn %d: the device is there: %v; routes:\n%s", turn+1, device, local)
		}
	}
	l.stop()
}
