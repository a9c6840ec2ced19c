package convert

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/turnout-proxy/turnout/internal/model"
)

// EndpointSlice gives the part of an EndpointSlice that forwarding depends on. It is nil if the object cannot be used
// at all, for want of a Service's name or because its addresses are not IP addresses; the findings then say why.
func EndpointSlice(s *discoveryv1.EndpointSlice) (*model.EndpointSlice, []model.Finding) {
	f := &findings{kind: "EndpointSlice", object: s.Namespace + "/" + s.Name}
	name, ok := f.objectName(s.Namespace, s.Name)
	if !ok {
		return nil, f.result()
	}
	service := s.Labels[discoveryv1.LabelServiceName]
	if service == "" {
		f.add(model.Error, NoServiceName, "label %s is missing, the slice is ignored: set it to the name of the Service",
			discoveryv1.LabelServiceName)
		return nil, f.result()
	}
	out := &model.EndpointSlice{Name: name, Service: intern(service)}
	switch s.AddressType {
	case discoveryv1.AddressTypeIPv4:
		out.Family = model.IPv4
	case discoveryv1.AddressTypeIPv6:
		out.Family = model.IPv6
	default:
		f.add(model.Warning, UnsupportedAddressType,
			"addressType: %s cannot be forwarded to, the slice is ignored: use IPv4 or IPv6",
			quote(string(s.AddressType)))
		return nil, f.result()
	}
	out.Ports = f.slicePorts(s.Ports)
	out.Endpoints = f.endpoints(s.Endpoints, out.Family)
	if at, ok := s.Annotations[corev1.EndpointsLastChangeTriggerTime]; ok {
		// A time that does not parse only leaves one measurement out; it is not worth a finding at each change.
		out.Trigger, _ = time.Parse(time.RFC3339Nano, at)
	}
	out.Weight = f.weight(s.Annotations)
	return out, f.result()
}

// weight reads the annotation that says how many connections the endpoints of a slice get.
func (f *findings) weight(annotations map[string]string) uint16 {
	text, has := annotations[weightAnnotation]
	if !has {
		return 0
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		f.add(model.Warning, InvalidValue, "annotation %s: %s is not a number from 1 to 65535, it is ignored: correct it",
			weightAnnotation, quote(text))
		return 0
	}
	return uint16(n)
}

// weightAnnotation is for EndpointSlices.
const weightAnnotation = annotationDomain + "weight"

// slicePorts reads the ports. An absent name is the empty one and an absent protocol TCP, which are the API's
// defaults; an absent number means "every port" in the API, which no Service proxy offers.
func (f *findings) slicePorts(list []discoveryv1.EndpointPort) []model.SlicePort {
	out := make([]model.SlicePort, 0, len(list))
	for i, p := range list {
		field := fmt.Sprintf("ports[%d]", i)
		if p.Port == nil {
			f.add(model.Warning, InvalidPort, "%s.port is not set, the entry is ignored: give the number", field)
			continue
		}
		var protocol, portName string
		if p.Protocol != nil {
			protocol = string(*p.Protocol)
		}
		if p.Name != nil {
			portName = *p.Name
		}
		if sp, ok := f.slicePort(field, portName, protocol, *p.Port); ok {
			out = append(out, sp)
		}
	}
	return out
}

func (f *findings) slicePort(field, name, protocol string, number int32) (model.SlicePort, bool) {
	proto, err := model.ParseProtocol(protocol)
	if err != nil {
		f.add(model.Error, InvalidProtocol, "%s.protocol: %s is not TCP, UDP or SCTP, the entry is ignored: correct it",
			field, quote(protocol))
		return model.SlicePort{}, false
	}
	if number < 1 || number > math.MaxUint16 {
		f.add(model.Error, InvalidPort, "%s.port: %d is not in 1..65535, the entry is ignored: correct it", field, number)
		return model.SlicePort{}, false
	}
	return model.SlicePort{Name: intern(name), Protocol: proto, Port: uint16(number)}, true
}

func (f *findings) endpoints(list []discoveryv1.Endpoint, family model.Family) []model.Endpoint {
	out := make([]model.Endpoint, 0, len(list))
	var zones, nodes hints
	for i := range list {
		e := &list[i]
		field := fmt.Sprintf("endpoints[%d].addresses", i)
		if len(e.Addresses) == 0 {
			f.add(model.Error, NoAddress, "%s is empty, the endpoint is ignored: give one address", field)
			continue
		}
		addr, ok := f.endpointAddr(field+"[0]", e.Addresses[0], family)
		if !ok {
			continue
		}
		ep := model.Endpoint{
			Addr:        addr,
			Ready:       e.Conditions.Ready == nil || *e.Conditions.Ready,
			Serving:     e.Conditions.Serving == nil || *e.Conditions.Serving,
			Terminating: e.Conditions.Terminating != nil && *e.Conditions.Terminating,
		}
		if e.NodeName != nil {
			ep.Node = intern(*e.NodeName)
		}
		if e.Zone != nil {
			ep.Zone = intern(*e.Zone)
		}
		if e.Hints != nil {
			ep.ZoneHints = zones.share(len(e.Hints.ForZones), func(i int) string { return e.Hints.ForZones[i].Name })
			ep.NodeHints = nodes.share(len(e.Hints.ForNodes), func(i int) string { return e.Hints.ForNodes[i].Name })
		}
		out = append(out, ep)
	}
	return out
}

// endpointAddr reads an endpoint's address, which must be of the family and lead to another host's or pod's socket.
func (f *findings) endpointAddr(field, s string, family model.Family) (netip.Addr, bool) {
	a, ok := parseAddr(s)
	if !ok {
		f.add(model.Error, InvalidIP, "%s: %s is not an IP address, the endpoint is ignored: correct or remove it", field,
			quote(s))
		return a, false
	}
	if model.FamilyOf(a) != family {
		f.add(model.Error, WrongFamily, "%s: %s is not an %s address, the endpoint is ignored: move it to a slice of "+
			"addressType %s",
			field, a, family, model.FamilyOf(a))
		return a, false
	}
	if class := forbidden(a); class != "" {
		f.add(model.Error, ForbiddenAddress,
			"%s: %s is %s, the endpoint is ignored: give an address that other machines reach",
			field, a, class)
		return a, false
	}
	return a, true
}

// hints shares equal lists between endpoints that follow each other, as most of a slice has the same ones.
type hints struct{ last []string }

func (h *hints) share(n int, at func(int) string) []string {
	if n == 0 {
		return nil
	}
	if len(h.last) == n {
		same := true
		for i := range n {
			same = same && h.last[i] == at(i)
		}
		if same {
			return h.last
		}
	}
	list := make([]string, n)
	for i := range n {
		list[i] = intern(at(i))
	}
	h.last = slices.Clip(list)
	return h.last
}
