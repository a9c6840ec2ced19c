package cluster_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/kube"
	"github.com/turnout-proxy/turnout/test/cluster"
)

// deadline is how long a test waits for what must come; the machine may be busy.
const deadline = time.Minute

// A view is a snapshot that a source feeds.
type view struct {
	mu       sync.Mutex
	snapshot *model.Snapshot
	synced   int
	failures int
	changed  chan struct{}
	stop     func() // ends the source and waits for its end
}

// follow runs a source against the cluster until it is stopped or the test ends, with the rights of a Service proxy.
func follow(tb testing.TB, c *cluster.Cluster) *view {
	tb.Helper()
	rest, err := kube.RESTConfig(kube.Connection{Kubeconfig: c.Kubeconfig})
	if err != nil {
		tb.Fatal(err)
	}
	v := &view{snapshot: model.NewSnapshot(), changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- kube.Run(ctx, kube.Config{REST: rest, NodeName: "n1", OnStatus: v.status}, v.sink)
	}()
	v.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			tb.Errorf("run ended with %v", err)
		}
	})
	tb.Cleanup(v.stop)
	return v
}

func (v *view) sink(events ...model.Event) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var d model.Dirty
	for _, e := range events {
		v.snapshot.Apply(e, &d)
		if e.Synced {
			v.synced++
		}
	}
	v.wake()
}

func (v *view) status(_ string, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err != nil {
		v.failures++
	}
	v.wake()
}

func (v *view) wake() {
	select {
	case v.changed <- struct{}{}:
	default:
	}
}

// until waits until the condition holds for the snapshot.
func (v *view) until(tb testing.TB, what string, condition func(*model.Snapshot) bool) {
	tb.Helper()
	timeout := time.After(deadline)
	for {
		v.mu.Lock()
		ok := condition(v.snapshot)
		state := fmt.Sprintf("services %v, slices %v, node %+v, synced %d, failures %d",
			v.snapshot.Services, v.snapshot.Slices, v.snapshot.Node, v.synced, v.failures)
		v.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-v.changed:
		case <-timeout:
			tb.Fatalf("waited in vain until %s: %s", what, state)
		}
	}
}

// has tells whether the Service is known and its slices have exactly these addresses.
func has(service string, addrs ...string) func(*model.Snapshot) bool {
	return func(s *model.Snapshot) bool {
		name := model.Name{Namespace: "default", Name: service}
		var got []string
		for _, slice := range s.Slices[name] {
			for _, e := range slice.Endpoints {
				got = append(got, e.Addr.String())
			}
		}
		slices.Sort(got)
		return s.Services[name] != nil && slices.Equal(got, addrs)
	}
}

func lacks(service string) func(*model.Snapshot) bool {
	return func(s *model.Snapshot) bool {
		name := model.Name{Namespace: "default", Name: service}
		return s.Services[name] == nil && len(s.Slices[name]) == 0
	}
}

// must ends the test on an error of a call whose result does not matter.
func must[T any](t *testing.T) func(T, error) T {
	t.Helper()
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func service(name string, change ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}
	for _, f := range change {
		f(s)
	}
	return s
}

func slice(name, service string, addrs ...string) *discoveryv1.EndpointSlice {
	port, proto, portName := int32(8080), corev1.ProtocolTCP, ""
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: "IPv4", Ports: []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &proto}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

// create makes objects in the namespace default.
func create(tb testing.TB, client kubernetes.Interface, objects ...any) {
	tb.Helper()
	for _, o := range objects {
		var err error
		switch o := o.(type) {
		case *corev1.Service:
			_, err = client.CoreV1().Services(o.Namespace).Create(tb.Context(), o, metav1.CreateOptions{})
		case *discoveryv1.EndpointSlice:
			_, err = client.DiscoveryV1().EndpointSlices(o.Namespace).Create(tb.Context(), o, metav1.CreateOptions{})
		case *corev1.Node:
			_, err = client.CoreV1().Nodes().Create(tb.Context(), o, metav1.CreateOptions{})
		default:
			err = fmt.Errorf("cannot create %T", o)
		}
		if err != nil {
			tb.Fatal(err)
		}
	}
}

// TestARealAPIServerIsFollowed shares one cluster between its parts, which follow each other.
func TestARealAPIServerIsFollowed(t *testing.T) {
	c := cluster.Start(t)
	client := c.Client()
	core, discovery := client.CoreV1().Services("default"), client.DiscoveryV1().EndpointSlices("default")
	create(t, client,
		service("web"), slice("web-1", "web", "10.0.0.1"),
		service("headless", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }),
		service("foreign", func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "x"}
		}),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{corev1.LabelTopologyZone: "z1"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}},
	)
	v := follow(t, c)
	v.until(t, "the first state is in", func(s *model.Snapshot) bool {
		return v.synced == 1 && has("web", "10.0.0.1")(s) && s.Node != nil && s.Node.Zone == "z1" && s.Node.Name == "n1"
	})

	t.Run("the ranges of cluster IPs are known", func(t *testing.T) {
		v.until(t, "the server's own ServiceCIDR is there", func(s *model.Snapshot) bool {
			return len(s.ServiceRanges(model.IPv4)) > 0
		})
	})

	t.Run("what selectors leave out does not come", func(t *testing.T) {
		v.until(t, "only the API server's own Service is there beside web", func(s *model.Snapshot) bool {
			own := s.Services[model.Name{Namespace: "default", Name: "kubernetes"}] != nil
			return own && len(s.Services) == 2 || !own && len(s.Services) == 1
		})
	})

	t.Run("changes come", func(t *testing.T) {
		create(t, client, service("dns"), slice("dns-1", "dns", "10.0.0.5"), slice("web-2", "web", "10.0.0.2", "10.0.0.3"))
		v.until(t, "new objects are known", func(s *model.Snapshot) bool {
			return has("dns", "10.0.0.5")(s) && has("web", "10.0.0.1", "10.0.0.2", "10.0.0.3")(s)
		})
		must[*corev1.Service](t)(core.Patch(t.Context(), "web", types.MergePatchType,
			[]byte(`{"spec":{"sessionAffinity":"ClientIP","internalTrafficPolicy":"Local"}}`), metav1.PatchOptions{}))
		v.until(t, "the patch is known", func(s *model.Snapshot) bool {
			web := s.Services[model.Name{Namespace: "default", Name: "web"}]
			return web.Affinity == 3*time.Hour && web.InternalLocal
		})
		if err := discovery.Delete(t.Context(), "web-2", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		v.until(t, "the slice is gone", has("web", "10.0.0.1"))
	})

	t.Run("an object whose labels leave the selector is gone, and comes back with them", func(t *testing.T) {
		label := func(label string) {
			must[*corev1.Service](t)(core.Patch(t.Context(), "dns", types.MergePatchType,
				[]byte(`{"metadata":{"labels":{"service.kubernetes.io/service-proxy-name":`+label+`}}}`),
				metav1.PatchOptions{}))
			must[*discoveryv1.EndpointSlice](t)(discovery.Patch(t.Context(), "dns-1", types.MergePatchType,
				[]byte(`{"metadata":{"labels":{"service.kubernetes.io/headless":`+label+`}}}`),
				metav1.PatchOptions{}))
		}
		label(`""`)
		v.until(t, "dns is gone", lacks("dns"))
		label(`null`)
		v.until(t, "dns is back", has("dns", "10.0.0.5"))
	})

	t.Run("a slice that moves to another Service is filed there", func(t *testing.T) {
		must[*discoveryv1.EndpointSlice](t)(discovery.Patch(t.Context(), "dns-1", types.MergePatchType,
			[]byte(`{"metadata":{"labels":{"kubernetes.io/service-name":"web"}}}`), metav1.PatchOptions{}))
		v.until(t, "web has both", func(s *model.Snapshot) bool {
			return has("web", "10.0.0.1", "10.0.0.5")(s) && has("dns")(s)
		})
	})

	t.Run("changes of the own Node come", func(t *testing.T) {
		must[*corev1.Node](t)(client.CoreV1().Nodes().Patch(t.Context(), "n1", types.MergePatchType,
			[]byte(`{"metadata":{"labels":{"topology.kubernetes.io/zone":"z2"}}}`), metav1.PatchOptions{}))
		must[*corev1.Node](t)(client.CoreV1().Nodes().Patch(t.Context(), "n1", types.MergePatchType,
			[]byte(`{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.7"}]}}`),
			metav1.PatchOptions{}, "status"))
		v.until(t, "zone and address are known", func(s *model.Snapshot) bool {
			return s.Node != nil && s.Node.Zone == "z2" && len(s.Node.Addresses) == 1
		})
		if err := client.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		v.until(t, "the Node is gone", func(s *model.Snapshot) bool { return s.Node == nil })
	})

	t.Run("what changed while the server was away is not lost", func(t *testing.T) {
		create(t, client, slice("web-3", "web", "10.0.0.7"))
		v.until(t, "the slice is known", has("web", "10.0.0.1", "10.0.0.5", "10.0.0.7"))
		c.StopServer()
		v.until(t, "requests fail", func(*model.Snapshot) bool { return v.failures > 0 })
		for _, key := range []string{"services/specs/default/dns", "endpointslices/default/web-3"} {
			if err := c.Erase(t.Context(), "/registry/"+key); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.StartServer(); err != nil {
			t.Fatal(err)
		}
		create(t, client, slice("web-4", "web", "10.0.0.9"))
		v.until(t, "all changes are known", func(s *model.Snapshot) bool {
			return lacks("dns")(s) && has("web", "10.0.0.1", "10.0.0.5", "10.0.0.9")(s)
		})
	})

	if v.synced != 1 {
		t.Errorf("synced came %d times, want once", v.synced)
	}
}

// TestAClusterCanBeInANetworkOfItsOwn also shows that readiness is asked for over there: nothing listens here.
func TestAClusterCanBeInANetworkOfItsOwn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: run it with sudo")
	}
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip("unshare is not in PATH: install util-linux")
	}
	// Two networks would not see each other, so a process in one is what both programs enter.
	holder := exec.Command("unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat")
	in, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = in.Close() // cat ends by it
		_ = holder.Wait()
	}()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("the network is not there: %q, %v", line, err)
	}
	c := cluster.Start(t, cluster.Inside("nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", holder.Process.Pid)))
	addr := strings.TrimPrefix(c.Admin.Host, "https://")
	if conn, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
		_ = conn.Close()
		t.Errorf("the API server listens on %s of this network", addr)
	}
}
