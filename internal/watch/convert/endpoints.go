package convert

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/turnout-proxy/turnout/internal/model"
)

// Endpoints gives the slices that a v1 Endpoints object stands for: one for each subset and IP family that has usable
// addresses. Their names contain a slash, which no real slice's name can, so they never clash with one.
//
//nolint:staticcheck // the kind is deprecated, which is why people still have it in files
func Endpoints(e *corev1.Endpoints) ([]*model.EndpointSlice, []model.Finding) {
	f := &findings{kind: "Endpoints", object: e.Namespace + "/" + e.Name}
	name, ok := f.objectName(e.Namespace, e.Name)
	if !ok {
		return nil, f.result()
	}
	trigger, _ := time.Parse(time.RFC3339Nano, e.Annotations[corev1.EndpointsLastChangeTriggerTime])
	var out []*model.EndpointSlice
	for i := range e.Subsets {
		subset := &e.Subsets[i]
		ports := f.subsetPorts(i, subset.Ports)
		byFamily := map[model.Family][]model.Endpoint{}
		f.subsetAddresses(fmt.Sprintf("subsets[%d].addresses", i), subset.Addresses, true, byFamily)
		f.subsetAddresses(fmt.Sprintf("subsets[%d].notReadyAddresses", i), subset.NotReadyAddresses, false, byFamily)
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			if len(byFamily[family]) == 0 {
				continue
			}
			out = append(out, &model.EndpointSlice{
				Name: model.Name{
					Namespace: name.Namespace,
					Name:      fmt.Sprintf("%s/endpoints-%d-%s", name.Name, i, family),
				},
				Service:   name.Name,
				Family:    family,
				Ports:     ports,
				Endpoints: byFamily[family],
				Trigger:   trigger,
			})
		}
	}
	return out, f.result()
}

func (f *findings) subsetPorts(subset int, list []corev1.EndpointPort) []model.SlicePort {
	out := make([]model.SlicePort, 0, len(list))
	for i, p := range list {
		field := fmt.Sprintf("subsets[%d].ports[%d]", subset, i)
		if sp, ok := f.slicePort(field, p.Name, string(p.Protocol), p.Port); ok {
			out = append(out, sp)
		}
	}
	return out
}

func (f *findings) subsetAddresses(
	field string, list []corev1.EndpointAddress, ready bool, byFamily map[model.Family][]model.Endpoint,
) {
	for i, a := range list {
		at := fmt.Sprintf("%s[%d].ip", field, i)
		family := model.IPv4
		if addr, ok := parseAddr(a.IP); ok {
			family = model.FamilyOf(addr)
		}
		addr, ok := f.endpointAddr(at, a.IP, family)
		if !ok {
			continue
		}
		ep := model.Endpoint{Addr: addr, Ready: ready, Serving: ready}
		if a.NodeName != nil {
			ep.Node = intern(*a.NodeName)
		}
		byFamily[family] = append(byFamily[family], ep)
	}
}
