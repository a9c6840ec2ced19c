package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/cluster"
	"github.com/turnout-proxy/turnout/test/netns"
)

// An api is a real API server on the loopback of node na, where the daemon of that node reaches it.
type api struct {
	t       *testing.T
	cluster *cluster.Cluster
	client  kubernetes.Interface
}

// startAPI starts the server with the Nodes and the namespace that everything here uses.
func (s *site) startAPI() *api {
	s.t.Helper()
	needTool(s.t, "nsenter", "util-linux")
	needTool(s.t, "curl", "curl")
	na := s.lab.Host("na")
	a := &api{t: s.t, cluster: cluster.Start(s.t, cluster.Inside("nsenter", "--net="+na.Path()))}
	config := rest.CopyConfig(a.cluster.Admin)
	config.Dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = na.Do(func() error {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
	var err error
	if a.client, err = kubernetes.NewForConfig(config); err != nil {
		s.t.Fatal(err)
	}
	for _, h := range s.lab.Nodes() {
		n := nodeObject(h)
		a.do("create a Node", func(ctx context.Context) error {
			created, err := a.client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			created.Status = n.Status
			_, err = a.client.CoreV1().Nodes().UpdateStatus(ctx, created, metav1.UpdateOptions{})
			return err
		})
	}
	a.do("create the namespace", func(ctx context.Context) error {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
		_, err := a.client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
		return err
	})
	return a
}

// do carries out a request; a server that has just started may need some tries.
func (a *api) do(what string, request func(context.Context) error) {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	eventually(a.t, what, func() error {
		err := request(ctx)
		switch {
		case apierrors.IsAlreadyExists(err):
			return nil // an earlier try has succeeded and only its answer was lost
		case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsNotFound(err), apierrors.IsForbidden(err):
			return stop(err)
		}
		return err
	})
}

// service creates a Service, with the load balancer addresses of its status.
func (a *api) service(s *corev1.Service) {
	a.t.Helper()
	a.do("create Service "+s.Name, func(ctx context.Context) error {
		_, err := a.client.CoreV1().Services(s.Namespace).Create(ctx, s, metav1.CreateOptions{})
		return err
	})
	if len(s.Status.LoadBalancer.Ingress) == 0 {
		return
	}
	a.do("set the load balancer addresses of "+s.Name, func(ctx context.Context) error {
		now, err := a.client.CoreV1().Services(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		now.Status = s.Status
		_, err = a.client.CoreV1().Services(s.Namespace).UpdateStatus(ctx, now, metav1.UpdateOptions{})
		return err
	})
}

// slice creates or replaces an EndpointSlice.
func (a *api) slice(s *discoveryv1.EndpointSlice) {
	a.t.Helper()
	client := a.client.DiscoveryV1().EndpointSlices(s.Namespace)
	a.do("write EndpointSlice "+s.Name, func(ctx context.Context) error {
		now, err := client.Get(ctx, s.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			_, err = client.Create(ctx, s, metav1.CreateOptions{})
			return err
		}
		if err != nil {
			return err
		}
		now.Endpoints = s.Endpoints
		_, err = client.Update(ctx, now, metav1.UpdateOptions{})
		return err
	})
}

// web writes the Service web's slices.
func (a *api) webEndpoints(pods ...*netns.Host) {
	a.t.Helper()
	port := web().Spec.Ports[0]
	a.slice(slice4("web", port, pods...))
	a.slice(slice6("web", port, pods...))
}

// configFile writes a KubeProxyConfiguration as a node's supervisor does, for the daemon and for kube-proxy alike.
func (a *api) configFile() string { return a.configFor("iptables") }

// configFor gives the configuration of a proxy on node na.
func (a *api) configFor(mode string) string {
	a.t.Helper()
	dir := a.t.TempDir()
	file := map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": mode,
		"clientConnection": map[string]any{"kubeconfig": a.cluster.Kubeconfig},
		"hostnameOverride": "na", "clusterCIDR": clusterCIDR(),
		// The numbers of tracked connections belong to the whole machine.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	}
	text, err := yaml.Marshal(file)
	if err != nil {
		a.t.Fatal(err)
	}
	path := filepath.Join(dir, "config.conf")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

func TestARealAPIServerIsFollowedAndMayGoAway(t *testing.T) {
	needRoot(t)
	t.Parallel()
	s := newSite(t, netns.Topology{Nodes: 2})
	a := s.startAPI()
	s1, s2, x1 := s.lab.Host("s1"), s.lab.Host("s2"), s.pod("na", "x1", 12)
	for _, p := range []*netns.Host{s1, s2, x1} {
		serve(t, p, model.TCP, webPort)
	}
	n := s.node("na")
	n.args = []string{"proxy", "--config", a.configFile(), "--socket", n.socket}
	a.service(web())
	a.webEndpoints(s1)
	n.start()
	n.pool(s1)
	s.works(t)
	routes := slices.DeleteFunc(webRoutes(s.lab), func(r route) bool { return r.from == "c2" || strings.HasPrefix(r.to, "10.20.0.12") })
	routes = append(routes, route{"c1", "[" + webIP6 + "]:80", 40, 10})
	l := s.load(routes, "s1")

	t.Run("an endpoint change takes effect", func(t *testing.T) {
		l.expect("s1", "s2")
		start := time.Now()
		a.webEndpoints(s1, s2)
		n.pool(s1, s2)
		t.Logf("in force within %v of the first request", time.Since(start).Round(time.Millisecond))
		eventually(t, "answers of s2", func() error {
			if l.byServer("s2") == 0 {
				return fmt.Errorf("none")
			}
			return nil
		})
	})
	t.Run("traffic goes on without the API server, and also without the daemon", func(t *testing.T) {
		a.cluster.StopServer()
		l.flow(20)
		eventually(t, "the log says that the API server is away", func() error {
			if n.log.count("The API server did not answer") == 0 {
				return fmt.Errorf("it does not")
			}
			return nil
		})
		if status := n.end(syscall.SIGKILL); status != -1 {
			t.Errorf("status %d", status)
		}
		l.flow(20)
		n.start() // it knows nothing now, and must remove nothing
		l.flow(20)
		if err := n.alive(); err != nil {
			t.Error(err)
		}
	})
	t.Run("what changes while a node is cut off takes effect when it is back", func(t *testing.T) {
		if err := a.cluster.StartServer(); err != nil {
			t.Fatal(err)
		}
		n.pool(s1, s2)
		// The daemon stops hearing, but the server and its clients go on.
		if err := n.daemon.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		l.expect("s1", "s2", "x1")
		a.webEndpoints(s1, x1)
		a.cluster.StopServer()
		if err := n.daemon.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		l.flow(20)
		if err := a.cluster.StartServer(); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		n.pool(s1, x1)
		t.Logf("in force %v after the API server was back", time.Since(start).Round(time.Millisecond))
		l.untilQuiet("s2", start)
		l.expect("s1", "x1")
		l.flow(20)
	})
	l.t = t
	l.stop()
	t.Run("a Service that is deleted while the daemon is down is gone after its start", func(t *testing.T) {
		const ip = "10.96.5.1"
		port := tcpPort(80, 0)
		a.service(service("doomed", port, ip))
		a.slice(slice4("doomed", port, s1))
		answered(t, s.lab.Host("c1"), ip+":80", netns.OK)
		n.end(syscall.SIGTERM)
		a.do("delete the Service", func(ctx context.Context) error {
			return a.client.CoreV1().Services(namespace).Delete(ctx, "doomed", metav1.DeleteOptions{})
		})
		answered(t, s.lab.Host("c1"), ip+":80", netns.OK) // nobody is there to take notice
		n.start()
		answered(t, s.lab.Host("c1"), ip+":80", netns.Unreachable)
		n.pool(s1, x1)
	})
	t.Run("a Service that is given to another proxy is let go", func(t *testing.T) {
		label := func(value *string) {
			a.do("label the Service", func(ctx context.Context) error {
				now, err := a.client.CoreV1().Services(namespace).Get(ctx, "web", metav1.GetOptions{})
				if err != nil {
					return err
				}
				delete(now.Labels, "service.kubernetes.io/service-proxy-name")
				if value != nil {
					now.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": *value}
				}
				_, err = a.client.CoreV1().Services(namespace).Update(ctx, now, metav1.UpdateOptions{})
				return err
			})
		}
		other := "other"
		label(&other)
		answered(t, s.lab.Host("c1"), webIP4+":80", netns.Unreachable)
		answered(t, s.lab.Host("far"), webLB4+":80", netns.Unreachable)
		answered(t, s.lab.Host("out"), netip.AddrPortFrom(s.lab.Host("na").Addr4(), webNodePort).String(), netns.Refused)
		label(nil)
		n.pool(s1, x1)
		s.works(t)
	})
}

// answered waits until an attempt ends in the wanted way.
func answered(t *testing.T, from *netns.Host, to string, want netns.Kind) {
	t.Helper()
	call := netns.Call{To: netip.MustParseAddrPort(to), Timeout: time.Second}
	eventually(t, fmt.Sprintf("%s -> %s is %s", from.Name, to, want), func() error {
		if r := from.Dial(call); r.Kind != want {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}
