package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"github.com/turnout-proxy/turnout/test/netns"
)

const namespace = "shop"

// The addresses of the Service web, and the port that its pods listen on.
const (
	webIP4, webIP6 = "10.96.1.10", "fd00:96::110"
	webLB4, webLB6 = "192.0.2.10", "2001:db8:2::10"
	webNodePort    = 30080
	webPort        = 8080
)

// nodeObject gives the Node of a host.
func nodeObject(h *netns.Host) *corev1.Node {
	n := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: h.Name, Labels: map[string]string{"kubernetes.io/hostname": h.Name}},
	}
	for _, p := range h.PodCIDRs() {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
	}
	n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	for _, a := range []string{h.Addr4().String(), h.Addr6().String()} {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// service gives a Service with one port and the cluster IPs given.
func service(name string, port corev1.ServicePort, clusterIPs ...string) *corev1.Service {
	s := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, Ports: []corev1.ServicePort{port}, ClusterIPs: clusterIPs,
		},
	}
	if len(clusterIPs) > 0 {
		s.Spec.ClusterIP = clusterIPs[0]
	}
	return s
}

// tcpPort gives the port that most Services here have.
func tcpPort(number, nodePort int32) corev1.ServicePort {
	return corev1.ServicePort{
		Name: "http", Protocol: corev1.ProtocolTCP, Port: number,
		TargetPort: intstr.FromInt32(webPort), NodePort: nodePort,
	}
}

// web is reached in every way, with both IP families.
func web() *corev1.Service {
	s := service("web", tcpPort(80, webNodePort), webIP4, webIP6)
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	both := corev1.IPFamilyPolicyRequireDualStack
	s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = &both, []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: webLB4}, {IP: webLB6}}
	return s
}

// slice gives the EndpointSlice of a Service with one port and no endpoints.
func slice(service string, family discoveryv1.AddressType, port corev1.ServicePort) *discoveryv1.EndpointSlice {
	number := port.TargetPort.IntVal
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: service + "-" + map[discoveryv1.AddressType]string{"IPv4": "4", "IPv6": "6"}[family],
			Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: family,
		Ports:       []discoveryv1.EndpointPort{{Name: &port.Name, Protocol: &port.Protocol, Port: &number}},
	}
}

// slice4 gives the IPv4 slice of a Service with pods as endpoints.
func slice4(service string, port corev1.ServicePort, pods ...*netns.Host) *discoveryv1.EndpointSlice {
	s := slice(service, discoveryv1.AddressTypeIPv4, port)
	for _, p := range pods {
		s.Endpoints = append(s.Endpoints, endpoint(p.Addr4().String(), p.Node().Name))
	}
	return s
}

// slice6 is slice4 for IPv6.
func slice6(service string, port corev1.ServicePort, pods ...*netns.Host) *discoveryv1.EndpointSlice {
	s := slice(service, discoveryv1.AddressTypeIPv6, port)
	for _, p := range pods {
		s.Endpoints = append(s.Endpoints, endpoint(p.Addr6().String(), p.Node().Name))
	}
	return s
}

func endpoint(addr, node string) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{addr}, NodeName: &node}
}

// write puts objects into a file of the directory that the daemons read.
func (s *site) write(file string, objects ...any) {
	s.t.Helper()
	s.writeText(file, marshal(s.t, objects...))
}

// marshal gives objects as the documents of a file.
func marshal(t *testing.T, objects ...any) string {
	t.Helper()
	var text bytes.Buffer
	for _, o := range objects {
		one, err := yaml.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		text.WriteString("---\n")
		text.Write(one)
	}
	return text.String()
}

// writeText replaces a file in one step, as careful programs do.
func (s *site) writeText(file, text string) {
	s.t.Helper()
	hidden := filepath.Join(s.manifests, "."+file)
	err := os.WriteFile(hidden, []byte(text), 0o644)
	if err == nil {
		err = os.Rename(hidden, filepath.Join(s.manifests, file))
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// remove deletes a file.
func (s *site) remove(file string) {
	s.t.Helper()
	if err := os.Remove(filepath.Join(s.manifests, file)); err != nil {
		s.t.Fatal(err)
	}
}

// writeWeb describes the Service web with these pods as endpoints.
func (s *site) writeWeb(pods ...*netns.Host) {
	s.t.Helper()
	port := web().Spec.Ports[0]
	s.write("web.yaml", web(), slice4("web", port, pods...), slice6("web", port, pods...))
}
