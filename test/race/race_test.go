// Package race measures Turnout beside kube-proxy in mode ipvs, both in one virtual machine, against a real API server
// outside of it: "make race-ipvs". It decides how large the cluster is and what either proxy is told; what is measured is
// decided in guest.
package race

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/turnout-proxy/turnout/test/cluster"
	"github.com/turnout-proxy/turnout/test/vm"
)

var (
	services  = flag.Int("services", 0, "number of Services; 0 leaves the race out")
	endpoints = flag.Int("endpoints", 10, "endpoints of each")
	changes   = flag.Int("changes", 30, "changes that are measured")
	order     = flag.String("order", "kube-proxy,turnout", "which proxies run, in this order")
	turnout   = flag.String("turnout", "../../bin/turnout", "the program")
)

// A figure is what the guest measured of one proxy; see there.
type figure struct {
	Name                            string  `json:"name"`
	Endpoints                       float64 `json:"endpointsSeconds"`
	FirstSync                       float64 `json:"firstSyncSeconds"`
	EffectP50, EffectP90, EffectMax float64
	CPUPerChange, CPUGross          float64
	CPUAtRest, StartCPU, PeakMemory float64
}

func TestIPVSBesideKubeProxy(t *testing.T) {
	if *services == 0 {
		t.Skip("takes 10 minutes: make race-ipvs, or -services 1000")
	}
	ctx := t.Context()
	theirs, err := cluster.Binary(ctx, cluster.UpstreamProxy, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := filepath.Abs(*turnout)
	if err != nil {
		t.Fatal(err)
	}
	guest := filepath.Join(t.TempDir(), "guest")
	build := exec.CommandContext(ctx, "go", "build", "-o", guest, "./guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest's program: %v: %s", err, out)
	}
	c := cluster.Start(t)
	fill(t, c.Client())
	server := inGuest(t, c.Admin.Host)
	config := configure(t, c, server)
	programs := map[string]string{
		"kube-proxy": "kube-proxy;" + theirs + " --cleanup --config " + config + ";" + theirs + " --config " + config,
		"turnout": "turnout;" + ours + " cleanup --force --socket /tmp/t.sock;" +
			ours + " proxy --strict-proxy-mode --socket /tmp/t.sock --config " + config,
	}
	argv := []string{
		guest, "-server", server, "-token", c.Admin.BearerToken, "-services", fmt.Sprint(*services),
		"-endpoints", fmt.Sprint(*endpoints), "-changes", fmt.Sprint(*changes),
	}
	for name := range strings.SplitSeq(*order, ",") {
		argv = append(argv, programs[name])
	}
	var out bytes.Buffer
	status, err := vm.Run(ctx, vm.Config{
		Network: true, Memory: 4096, Output: io.MultiWriter(&out, os.Stderr), Progress: os.Stderr, Timeout: time.Hour,
	}, argv...)
	if errors.Is(err, vm.ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil || status != 0 {
		t.Fatalf("status %d, %v", status, err)
	}
	report(t, out.String())
}

// report prints the figures, and how ours compare with kube-proxy's.
func report(t *testing.T, out string) {
	t.Helper()
	found := map[string]figure{}
	for line := range strings.Lines(out) {
		text, is := strings.CutPrefix(line, "FIGURE ")
		if !is {
			continue
		}
		var f figure
		if err := json.Unmarshal([]byte(text), &f); err != nil {
			t.Fatal(err)
		}
		found[f.Name] = f
		t.Logf("%s: endpoints %.2f s, first sync %.2f s (%.1f s of processor), change in effect p50 %.0f p90 %.0f max %.0f ms, processor a change "+
			"%.1f ms (%.1f gross), at rest %.1f ms a second, peak memory %.0f MB", f.Name, f.Endpoints, f.FirstSync, f.StartCPU, f.EffectP50,
			f.EffectP90, f.EffectMax, f.CPUPerChange, f.CPUGross, f.CPUAtRest, f.PeakMemory)
	}
	us, them := found["turnout"], found["kube-proxy"]
	if us.Name == "" || them.Name == "" {
		return
	}
	t.Logf("ratios, kube-proxy to turnout: endpoints %.1f, first sync %.1f, effect %.1f, processor a change %.1f, memory %.1f",
		them.Endpoints/us.Endpoints, them.FirstSync/us.FirstSync, them.EffectP50/us.EffectP50, them.CPUPerChange/us.CPUPerChange, them.PeakMemory/us.PeakMemory)
}

// inGuest gives the URL by which a server on this machine's loopback is reached from the guest.
func inGuest(t *testing.T, server string) string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = net.JoinHostPort("10.0.2.2", u.Port())
	return u.String()
}

// configure writes the file that both proxies get.
func configure(t *testing.T, c *cluster.Cluster, server string) string {
	t.Helper()
	dir := t.TempDir()
	file := clientcmdapi.NewConfig()
	// The certificate is for the name that the server has on its own machine.
	file.Clusters["race"] = &clientcmdapi.Cluster{
		Server: server, CertificateAuthorityData: c.Admin.CAData, TLSServerName: "127.0.0.1",
	}
	file.AuthInfos["proxy"] = &clientcmdapi.AuthInfo{Token: c.Proxy.BearerToken}
	file.Contexts["race"] = &clientcmdapi.Context{Cluster: "race", AuthInfo: "proxy"}
	file.CurrentContext = "race"
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := clientcmd.WriteToFile(*file, kubeconfig); err != nil {
		t.Fatal(err)
	}
	text := `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ipvs
clusterCIDR: 10.244.0.0/14
hostnameOverride: race
clientConnection: {kubeconfig: ` + kubeconfig + `}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`
	path := filepath.Join(dir, "config.conf")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// fill puts a Node and the Services with their endpoints into the API server.
func fill(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	ctx := t.Context()
	node, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "race"}, Spec: corev1.NodeSpec{PodCIDR: "10.244.0.0/24", PodCIDRs: []string{"10.244.0.0/24"}},
	}, metav1.CreateOptions{})
	if err == nil {
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.2.15"}}
		_, err = client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	numbers, failed := make(chan int), make(chan error, *services)
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for i := range numbers {
				if err := one(ctx, client, i); err != nil {
					failed <- err
				}
			}
		})
	}
	for i := range *services {
		numbers <- i
	}
	close(numbers)
	workers.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
}

// one makes a Service with its slice.
func one(ctx context.Context, client kubernetes.Interface, i int) error {
	name := fmt.Sprintf("svc-%d", i)
	_, err := client.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{
			ClusterIP: fmt.Sprintf("10.97.%d.%d", i>>8, i&255),
			Ports:     []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolTCP}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create a Service: %w", err)
	}
	port, proto, unnamed := int32(8080), corev1.ProtocolTCP, ""
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &unnamed, Port: &port, Protocol: &proto}},
	}
	for e := range *endpoints {
		n := i**endpoints + e
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 244+n>>16, n>>8&255, n&255)},
		})
	}
	if _, err := client.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create an EndpointSlice: %w", err)
	}
	return nil
}
