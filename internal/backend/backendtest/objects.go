package backendtest

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/convert"
)

// readObjects turns manifests, separated by lines of "---", into events and what was found about them. With gone set
// the events say that the objects were deleted. The apiVersion may be left out.
func readObjects(text string, gone bool) ([]model.Event, error) {
	var events []model.Event
	for i, doc := range strings.Split("\n"+text, "\n---") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		list, err := readObject(doc, gone)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", i+1, err)
		}
		events = append(events, list...)
	}
	return events, nil
}

func readObject(doc string, gone bool) ([]model.Event, error) {
	// YAML takes a plain word that begins with a colon for a mistake, which IPv6 addresses may do.
	colons := regexp.MustCompile(`([\[,\s])(::[0-9a-fA-F:]*(?:/[0-9]+)?)`)
	raw, err := yaml.YAMLToJSONStrict(colons.ReplaceAll([]byte(doc), []byte(`$1"$2"`)))
	if err != nil {
		return nil, fmt.Errorf("not YAML: %w", err)
	}
	var head struct{ Kind string }
	if err := json.Unmarshal(raw, &head); err != nil {
		return nil, fmt.Errorf("no object: %w", err)
	}
	switch head.Kind {
	case "Service":
		return readService(raw, gone)
	case "EndpointSlice":
		return readSlice(raw, gone)
	case "Endpoints":
		var e corev1.Endpoints //nolint:staticcheck // see convert.Endpoints
		if err := yaml.UnmarshalStrict(raw, &e); err != nil {
			return nil, fmt.Errorf("read Endpoints: %w", err)
		}
		list, found := convert.Endpoints(&e)
		events := []model.Event{{Findings: found}}
		for _, s := range list {
			events = append(events, model.Event{Slice: s, Delete: gone})
		}
		return events, nil
	case "Node":
		var n corev1.Node
		if err := yaml.UnmarshalStrict(raw, &n); err != nil {
			return nil, fmt.Errorf("read Node: %w", err)
		}
		node, found := convert.Node(&n)
		return []model.Event{{Node: node, Delete: gone, Findings: found}}, nil
	}
	return nil, fmt.Errorf("kind %q is not Service, EndpointSlice, Endpoints or Node", head.Kind)
}

// readService gives a deletion also for a Service that is another proxy's, as the sources do.
func readService(raw []byte, gone bool) ([]model.Event, error) {
	var s corev1.Service
	if err := yaml.UnmarshalStrict(raw, &s); err != nil {
		return nil, fmt.Errorf("read Service: %w", err)
	}
	name := model.Name{Namespace: s.Namespace, Name: s.Name}
	if gone || convert.ServiceExcluded(s.Labels) {
		return []model.Event{{Service: &model.Service{Name: name}, Delete: true}}, nil
	}
	svc, found := convert.Service(&s)
	if svc == nil {
		return []model.Event{{Service: &model.Service{Name: name}, Delete: true, Findings: found}}, nil
	}
	return []model.Event{{Service: svc, Findings: found}}, nil
}

func readSlice(raw []byte, gone bool) ([]model.Event, error) {
	var s discoveryv1.EndpointSlice
	if err := yaml.UnmarshalStrict(raw, &s); err != nil {
		return nil, fmt.Errorf("read EndpointSlice: %w", err)
	}
	name := model.Name{Namespace: s.Namespace, Name: s.Name}
	if gone || convert.SliceExcluded(s.Labels) {
		return []model.Event{{Slice: &model.EndpointSlice{Name: name}, Delete: true}}, nil
	}
	slice, found := convert.EndpointSlice(&s)
	if slice == nil {
		return []model.Event{{Slice: &model.EndpointSlice{Name: name}, Delete: true, Findings: found}}, nil
	}
	return []model.Event{{Slice: slice, Findings: found}}, nil
}

// crowdSlices gives n ready endpoints of one Service port, out of the ranges that the nodes' crowds answer for, in slices
// of at most a thousand, as the API has them.
func crowdSlices(family model.Family, service model.Name, portName string, port uint16, n int) ([]model.Event, error) {
	const perSlice, perNode = 1000, 4000
	var events []model.Event
	for first := 0; first < n; first += perSlice {
		s := &model.EndpointSlice{
			Name:    model.Name{Namespace: service.Namespace, Name: fmt.Sprintf("%s-crowd-%s-%d", service.Name, family, first)},
			Service: service.Name, Family: family,
			Ports: []model.SlicePort{{Name: portName, Protocol: model.TCP, Port: port}},
		}
		for i := first; i < min(n, first+perSlice); i++ {
			node := i/perNode + 1
			if node > labNodes {
				return nil, fmt.Errorf("%d endpoints are more than the crowds have", n)
			}
			s.Endpoints = append(s.Endpoints, model.Endpoint{
				Addr: crowdAddr(family, node, i%perNode+2), Ready: true, Serving: true, Node: nodeName(node),
			})
		}
		events = append(events, model.Event{Slice: s})
	}
	return events, nil
}

// crowdAddr gives the i-th address of a node's crowd.
func crowdAddr(family model.Family, node, i int) netip.Addr {
	a := netip.AddrFrom4([4]byte{10, 60, byte(128 + 16*(node-1) + i/256), byte(i % 256)})
	if family == model.IPv6 {
		return netip.MustParseAddr(mirrorAddr(a))
	}
	return a
}

// fleetEvents give Services fleet/s0, fleet/s1, ... with one endpoint, s1 of the lab, and cluster IPs from 10.70.4.1 on,
// 200 in each range of 256.
func fleetEvents(family model.Family, first, n int, gone bool) []model.Event {
	const perRange = 200
	var events []model.Event
	for i := first; i < first+n; i++ {
		name := model.Name{Namespace: "fleet", Name: fmt.Sprintf("s%d", i)}
		ip := netip.AddrFrom4([4]byte{10, 70, byte(4 + i/perRange), byte(1 + i%perRange)})
		pod := netip.AddrFrom4([4]byte{10, 60, 1, 11})
		if family == model.IPv6 {
			ip, pod = netip.MustParseAddr(mirrorAddr(ip)), netip.MustParseAddr(mirrorAddr(pod))
		}
		events = append(events,
			model.Event{Delete: gone, Service: &model.Service{
				Name: name, ClusterIPs: []netip.Addr{ip}, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
			}},
			model.Event{Delete: gone, Slice: &model.EndpointSlice{
				Name: name, Service: name.Name, Family: family,
				Ports:     []model.SlicePort{{Protocol: model.TCP, Port: 8080}},
				Endpoints: []model.Endpoint{{Addr: pod, Ready: true, Serving: true, Node: nodeName(1)}},
			}})
	}
	return events
}
