package kube

import (
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/convert"
)

// A store is where a reflector puts what the server sends. It converts at once and remembers names only.
type store struct {
	convert func(runtime.Object) model.Event
	gone    func(model.Name) model.Event
	sink    model.Sink
	listed  func() // called after each complete state was sent

	mu    sync.Mutex
	known map[model.Name]struct{}
}

var _ cache.TransformingStore = (*store)(nil)

// converted is an object on its way through the reflector.
type converted struct {
	name  model.Name
	event model.Event
}

// Transformer converts objects while the reflector still collects the first state, so that it collects model values
// and not API objects.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return s.toEvent(obj) }
}

// toEvent converts an object, unless that was done before.
func (s *store) toEvent(obj any) (*converted, error) {
	if c, ok := obj.(*converted); ok {
		return c, nil
	}
	o, ok := obj.(runtime.Object)
	if !ok {
		return nil, fmt.Errorf("unexpected %T in place of an API object", obj)
	}
	name, err := nameOf(o)
	if err != nil {
		return nil, err
	}
	return &converted{name: name, event: s.convert(o)}, nil
}

// Add takes an object that is new.
func (s *store) Add(obj any) error { return s.Update(obj) }

// Update takes an object that changed.
func (s *store) Update(obj any) error {
	c, err := s.toEvent(obj)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known == nil {
		s.known = map[model.Name]struct{}{}
	}
	s.known[c.name] = struct{}{}
	s.sink(c.event)
	return nil
}

// Delete takes an object that is gone, or that left the selectors.
func (s *store) Delete(obj any) error {
	o, ok := obj.(runtime.Object)
	if !ok {
		return fmt.Errorf("unexpected %T in place of an API object", obj)
	}
	name, err := nameOf(o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, name)
	s.sink(s.gone(name))
	return nil
}

// Replace takes the complete state. What was known and is not in it went while nobody watched.
func (s *store) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := make(map[model.Name]struct{}, len(list))
	events := make([]model.Event, 0, len(list))
	for i, obj := range list {
		c, err := s.toEvent(obj)
		if err != nil {
			return err
		}
		list[i] = nil // the list is ours, and its objects may go before it does
		known[c.name] = struct{}{}
		events = append(events, c.event)
	}
	for name := range s.known {
		if _, ok := known[name]; !ok {
			events = append(events, s.gone(name))
		}
	}
	s.known = known
	if len(events) > 0 {
		s.sink(events...)
	}
	s.listed()
	return nil
}

// Resync has nothing to do: there is no copy that could be delivered again.
func (s *store) Resync() error { return nil }

func nameOf(o runtime.Object) (model.Name, error) {
	m, err := meta.Accessor(o)
	if err != nil {
		return model.Name{}, fmt.Errorf("read the name of %T: %w", o, err)
	}
	return model.Name{Namespace: m.GetNamespace(), Name: m.GetName()}, nil
}

// serviceEvent, sliceEvent, nodeEvent and cidrEvent give the event for an object's new state. An object that cannot be used, and
// one that a server lets through although the selectors leave it out, counts as gone; the findings say why.

func serviceEvent(o runtime.Object) model.Event {
	s, ok := o.(*corev1.Service)
	if !ok {
		return model.Event{}
	}
	e := goneService(model.Name{Namespace: s.Namespace, Name: s.Name})
	if convert.ServiceExcluded(s.Labels) {
		return e
	}
	out, findings := convert.Service(s)
	if e.Findings = findings; out != nil {
		e.Service, e.Delete = out, false
	}
	return e
}

func sliceEvent(o runtime.Object) model.Event {
	s, ok := o.(*discoveryv1.EndpointSlice)
	if !ok {
		return model.Event{}
	}
	e := goneSlice(model.Name{Namespace: s.Namespace, Name: s.Name})
	if convert.SliceExcluded(s.Labels) {
		return e
	}
	out, findings := convert.EndpointSlice(s)
	if e.Findings = findings; out != nil {
		e.Slice, e.Delete = out, false
	}
	return e
}

func nodeEvent(o runtime.Object) model.Event {
	n, ok := o.(*corev1.Node)
	if !ok {
		return model.Event{}
	}
	e := goneNode(model.Name{Name: n.Name})
	out, findings := convert.Node(n)
	if e.Findings = findings; out != nil {
		e.Node, e.Delete = out, false
	}
	return e
}

func cidrEvent(o runtime.Object) model.Event {
	c, ok := o.(*networkingv1.ServiceCIDR)
	if !ok {
		return model.Event{}
	}
	e := goneCIDR(model.Name{Name: c.Name})
	out, findings := convert.ServiceCIDR(c)
	if e.Findings = findings; out != nil {
		e.ServiceCIDR, e.Delete = out, false
	}
	return e
}

func goneService(n model.Name) model.Event {
	return model.Event{Service: &model.Service{Name: n}, Delete: true}
}

func goneSlice(n model.Name) model.Event {
	return model.Event{Slice: &model.EndpointSlice{Name: n}, Delete: true}
}

func goneNode(n model.Name) model.Event {
	return model.Event{Node: &model.Node{Name: n.Name}, Delete: true}
}

func goneCIDR(n model.Name) model.Event {
	return model.Event{ServiceCIDR: &model.ServiceCIDR{Name: n.Name}, Delete: true}
}
