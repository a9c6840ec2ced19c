package convert

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/turnout-proxy/turnout/internal/model"
)

// annotationDomain is the prefix of the annotations that the model keeps.
const annotationDomain = "turnout.dev/"

// The bounds and the default of a session affinity timeout, in whole seconds.
// Source: the Service API, spec.sessionAffinityConfig.clientIP.timeoutSeconds.
const (
	minAffinitySeconds     = 1
	maxAffinitySeconds     = 86400
	defaultAffinitySeconds = 10800
)

// maxServiceName is the longest Service name that an API server accepts, in bytes.
const maxServiceName = 63

// Service gives the part of a Service that forwarding depends on. It is nil if the object cannot be used at all; the
// findings then say why.
func Service(s *corev1.Service) (*model.Service, []model.Finding) {
	f := &findings{kind: "Service", object: s.Namespace + "/" + s.Name}
	name, ok := f.objectName(s.Namespace, s.Name)
	if !ok {
		return nil, f.result()
	}
	if len(s.Name) > maxServiceName {
		f.add(model.Warning, InvalidName, "metadata.name has %d characters and is used as it is, but an API server would "+
			"refuse more than %d: shorten it", len(s.Name), maxServiceName)
	}
	out := &model.Service{
		Name:          name,
		Created:       s.CreationTimestamp.Time,
		Type:          f.serviceType(s.Spec.Type),
		Headless:      s.Spec.ClusterIP == corev1.ClusterIPNone,
		Ports:         f.servicePorts(s.Spec.Ports),
		ExternalIPs:   f.addrs("spec.externalIPs", s.Spec.ExternalIPs),
		Ingress:       f.ingress(s.Status.LoadBalancer.Ingress),
		Affinity:      f.affinity(&s.Spec),
		ExternalLocal: f.local("spec.externalTrafficPolicy", string(s.Spec.ExternalTrafficPolicy)),
		Annotations:   annotations(s.Annotations),
	}
	if p := s.Spec.InternalTrafficPolicy; p != nil {
		out.InternalLocal = f.local("spec.internalTrafficPolicy", string(*p))
	}
	if !out.Headless {
		out.ClusterIPs = f.clusterIPs(&s.Spec, out.Type)
	}
	out.SourceRanges, out.BadSourceRanges = f.sourceRanges(s.Spec.LoadBalancerSourceRanges)
	if p := s.Spec.HealthCheckNodePort; p != 0 {
		out.HealthCheckNodePort, _ = f.port("spec.healthCheckNodePort", p, "no health check is offered for the Service")
	}
	return out, f.result()
}

func (f *findings) serviceType(t corev1.ServiceType) model.ServiceType {
	switch t {
	case "", corev1.ServiceTypeClusterIP:
		return model.ClusterIP
	case corev1.ServiceTypeNodePort:
		return model.NodePort
	case corev1.ServiceTypeLoadBalancer:
		return model.LoadBalancer
	case corev1.ServiceTypeExternalName:
		return model.ExternalName
	}
	f.add(model.Error, InvalidValue,
		"spec.type: %s is not a type of Service, ClusterIP is assumed: use ClusterIP, NodePort, "+
			"LoadBalancer or ExternalName", quote(string(t)))
	return model.ClusterIP
}

// clusterIPs gives at most one address per family. spec.clusterIP is the older field and repeats the first entry of
// spec.clusterIPs; an API server keeps both in step, a manifest may have either.
func (f *findings) clusterIPs(spec *corev1.ServiceSpec, t model.ServiceType) []netip.Addr {
	list, field := spec.ClusterIPs, "spec.clusterIPs"
	if len(list) == 0 && spec.ClusterIP != "" {
		list, field = []string{spec.ClusterIP}, "spec.clusterIP"
	}
	if len(list) > 0 && spec.ClusterIP != "" && list[0] != spec.ClusterIP {
		f.add(model.Warning, InvalidValue,
			"spec.clusterIP %s differs from spec.clusterIPs[0] %s, which is used: make them equal",
			quote(spec.ClusterIP), quote(list[0]))
	}
	var out []netip.Addr
	for _, a := range f.addrs(field, list) {
		if slices.ContainsFunc(out, func(have netip.Addr) bool { return model.FamilyOf(have) == model.FamilyOf(a) }) {
			f.add(model.Error, WrongFamily,
				"%s: %s is a second %s address, it is ignored: give at most one address per family",
				field, a, model.FamilyOf(a))
			continue
		}
		out = append(out, a)
	}
	if len(list) == 0 && t != model.ExternalName {
		f.add(model.Warning, NoClusterIP,
			"spec.clusterIP is not set, the Service gets no traffic: set an address, or None for "+
				"a headless Service")
	}
	return out
}

func (f *findings) servicePorts(list []corev1.ServicePort) []model.ServicePort {
	out := make([]model.ServicePort, 0, len(list))
	for i := range list {
		p := &list[i]
		field := fmt.Sprintf("spec.ports[%d]", i)
		if !validPortName(p.Name) {
			f.add(model.Error, InvalidName,
				"%s.name: %s is not a valid port name, the port is ignored: use up to %d lower-case "+
					"letters, digits and '-'", field, quote(p.Name), maxPortName)
			continue
		}
		proto, err := model.ParseProtocol(string(p.Protocol))
		if err != nil {
			f.add(model.Error, InvalidProtocol, "%s.protocol: %s is not TCP, UDP or SCTP, the port is ignored: correct it",
				field, quote(string(p.Protocol)))
			continue
		}
		port, ok := f.port(field+".port", p.Port, "the port is ignored")
		if !ok {
			continue
		}
		sp := model.ServicePort{Name: intern(p.Name), Protocol: proto, Port: port}
		if p.NodePort != 0 {
			sp.NodePort, _ = f.port(field+".nodePort", p.NodePort, "the port gets no node port")
		}
		if slices.ContainsFunc(out, func(o model.ServicePort) bool { return o.Name == sp.Name && o.Protocol == proto }) {
			f.add(model.Error, DuplicatePort,
				"%s: another port before it has name %s and protocol %s, this one is ignored: "+
					"give each port its own name", field, quote(p.Name), proto)
			continue
		}
		out = append(out, sp)
	}
	return out
}

// port reads a port number that must be in 1..65535.
func (f *findings) port(field string, p int32, consequence string) (uint16, bool) {
	if p < 1 || p > math.MaxUint16 {
		f.add(model.Error, InvalidPort, "%s: %d is not in 1..65535, %s: correct it", field, p, consequence)
		return 0, false
	}
	return uint16(p), true
}

// ingress gives the load balancer's addresses. Those with ipMode Proxy are meant to be reached through the load
// balancer only: they are left out and that is no finding.
func (f *findings) ingress(list []corev1.LoadBalancerIngress) []netip.Addr {
	var out []netip.Addr
	for i, in := range list {
		if in.IP == "" || in.IPMode != nil && *in.IPMode == corev1.LoadBalancerIPModeProxy {
			continue
		}
		field := fmt.Sprintf("status.loadBalancer.ingress[%d]", i)
		if in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP {
			f.add(model.Error, InvalidValue, "%s.ipMode: %s is not VIP or Proxy, the address is ignored: correct it",
				field, quote(string(*in.IPMode)))
			continue
		}
		if a, ok := f.addr(field+".ip", in.IP); ok && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// sourceRanges gives the parsable ranges, and how many could not be parsed.
func (f *findings) sourceRanges(list []string) (out []netip.Prefix, bad int) {
	for i, s := range list {
		p, ok := parsePrefix(s)
		if !ok {
			bad++
			f.add(model.Error, InvalidCIDR,
				"spec.loadBalancerSourceRanges[%d]: %s is not an address range, it admits nobody: "+
					"write it as address/bits", i, quote(s))
			continue
		}
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out, bad
}

func (f *findings) affinity(spec *corev1.ServiceSpec) time.Duration {
	switch spec.SessionAffinity {
	case "", corev1.ServiceAffinityNone:
		return 0
	case corev1.ServiceAffinityClientIP:
	default:
		f.add(model.Error, InvalidValue, "spec.sessionAffinity: %s is not None or ClientIP, None is assumed: correct it",
			quote(string(spec.SessionAffinity)))
		return 0
	}
	seconds := int32(defaultAffinitySeconds)
	if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	if seconds < minAffinitySeconds || seconds > maxAffinitySeconds {
		f.add(model.Error, InvalidValue, "spec.sessionAffinityConfig.clientIP.timeoutSeconds: %d is not in %d..%d, "+
			"%d is assumed: correct it", seconds, minAffinitySeconds, maxAffinitySeconds, defaultAffinitySeconds)
		seconds = defaultAffinitySeconds
	}
	return time.Duration(seconds) * time.Second
}

// local reads a traffic policy.
func (f *findings) local(field, policy string) bool {
	switch policy {
	case "Local":
		return true
	case "", "Cluster":
		return false
	}
	f.add(model.Error, InvalidValue, "%s: %s is not Cluster or Local, Cluster is assumed: correct it", field, quote(policy))
	return false
}

func annotations(all map[string]string) map[string]string {
	var out map[string]string
	for k, v := range all {
		if !strings.HasPrefix(k, annotationDomain) {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[k] = v
	}
	return out
}
