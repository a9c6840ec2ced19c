package kube

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// The plural names of what is followed.
const (
	servicesResource = "services"
	slicesResource   = "endpointslices"
	nodesResource    = "nodes"
	cidrsResource    = "servicecidrs"
)

// protobuf is the content type that costs the least to read.
const protobuf = runtime.ContentTypeProtobuf

// Connection says how to reach an API server. The fields are those of clientConnection in a KubeProxyConfiguration,
// and the --master flag.
type Connection struct {
	// Kubeconfig is a file's path; empty means that the process runs in a pod of the cluster, unless Master is set.
	Kubeconfig string
	// Master is the server's URL; it overrides the one in the kubeconfig.
	Master string
	// AcceptContentTypes and ContentType are media types; empty means protobuf first, then JSON.
	AcceptContentTypes, ContentType string
	// QPS and Burst bound the requests per second; 0 means the client library's default, below 0 no bound.
	QPS   float32
	Burst int
	// UserAgent names the program to the server; empty means the client library's default.
	UserAgent string
}

// A Server says how an API server is reached, in the client library's form.
type Server = rest.Config

// RESTConfig gives the configuration of clients for a connection.
func RESTConfig(c Connection) (*rest.Config, error) {
	cfg, err := c.load()
	if err != nil {
		return nil, err
	}
	cfg.ContentType, cfg.AcceptContentTypes = c.ContentType, c.AcceptContentTypes
	if cfg.ContentType == "" {
		cfg.ContentType = protobuf
	}
	if cfg.AcceptContentTypes == "" {
		cfg.AcceptContentTypes = protobuf + "," + runtime.ContentTypeJSON
	}
	cfg.QPS, cfg.Burst = c.QPS, c.Burst
	if c.UserAgent != "" {
		cfg.UserAgent = c.UserAgent
	}
	return cfg, nil
}

func (c Connection) load() (*rest.Config, error) {
	if c.Kubeconfig == "" && c.Master == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case errors.Is(err, rest.ErrNotInCluster):
			return nil, errors.New("no API server is known, and this is not a pod of a cluster: " +
				"set clientConnection.kubeconfig, or --kubeconfig, or --master")
		case err != nil:
			return nil, fmt.Errorf("read the pod's credentials for the API server: %w", err)
		}
		return cfg, nil
	}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: c.Kubeconfig},
		&clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: c.Master}},
	).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig %q: %w", c.Kubeconfig, err)
	}
	return cfg, nil
}

// clients reach the API groups over one connection.
type clients struct {
	core, discovery, networking rest.Interface

	params runtime.ParameterCodec
	decode func([]byte) (runtime.Object, error)
	// close ends connections that no request uses.
	close func()
}

// newClients uses a scheme of its own with the kinds that are followed. The ready-made clientset brings every kind that
// Kubernetes has, which costs several megabytes of memory for nothing.
func newClients(base *rest.Config) (clients, error) {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Service{}, &corev1.ServiceList{}, &corev1.Node{},
		&corev1.NodeList{})
	scheme.AddKnownTypes(discoveryv1.SchemeGroupVersion, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
	scheme.AddKnownTypes(networkingv1.SchemeGroupVersion, &networkingv1.ServiceCIDR{}, &networkingv1.ServiceCIDRList{})
	metav1.AddToGroupVersion(scheme, networkingv1.SchemeGroupVersion)
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	metav1.AddToGroupVersion(scheme, discoveryv1.SchemeGroupVersion)
	factory := serializer.NewCodecFactory(scheme)
	codecs := factory.WithoutConversion()
	http, err := rest.HTTPClientFor(base)
	if err != nil {
		return clients{}, fmt.Errorf("prepare the connection to the API server: %w", err)
	}
	client := func(gv schema.GroupVersion, path string) (rest.Interface, error) {
		cfg := rest.CopyConfig(base)
		cfg.GroupVersion, cfg.APIPath, cfg.NegotiatedSerializer = &gv, path, codecs
		c, err := rest.RESTClientForConfigAndClient(cfg, http)
		if err != nil {
			return nil, fmt.Errorf("prepare a client for %s at the API server: %w", gv, err)
		}
		return c, nil
	}
	core, err := client(corev1.SchemeGroupVersion, "/api")
	if err != nil {
		return clients{}, err
	}
	discovery, err := client(discoveryv1.SchemeGroupVersion, "/apis")
	if err != nil {
		return clients{}, err
	}
	networking, err := client(networkingv1.SchemeGroupVersion, "/apis")
	if err != nil {
		return clients{}, err
	}
	return clients{
		core: core, discovery: discovery, networking: networking, params: runtime.NewParameterCodec(scheme),
		decode: func(data []byte) (runtime.Object, error) {
			o, _, err := factory.UniversalDeserializer().Decode(data, nil, nil)
			return o, err //nolint:wrapcheck // it names what it could not read
		},
		close: http.CloseIdleConnections,
	}, nil
}
