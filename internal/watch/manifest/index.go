package manifest

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/convert"
)

// An index knows for each object which files describe it, and what was sent of it. A change of one file costs what that
// file costs, whatever the others hold.
type index struct {
	// claims are in the order in which they count: by file name, then by place in the file. The first one wins.
	claims map[key][]claim
	// sliced counts the EndpointSlices in force for each Service.
	sliced map[model.Name]int
	// sent is what the receiver knows; derived are the slices that it knows of each Endpoints object.
	sent    map[key]model.Event
	derived map[key][]key
	// touched are the objects to be decided again.
	touched map[key]struct{}
	// room is how many objects are taken at most.
	room int
}

// A placed object is one with its 1-based line in a file.
type placed struct {
	*object
	line int
}

// A claim is a file's description of an object.
type claim struct {
	file string // its name
	placed
}

func newIndex() *index {
	return &index{
		claims: map[key][]claim{}, sliced: map[model.Name]int{}, sent: map[key]model.Event{}, derived: map[key][]key{},
		touched: map[key]struct{}{}, room: maxObjects,
	}
}

// replace takes what a file describes now in place of what it did. It gives what there is no room for.
func (x *index) replace(name string, was, now []placed) (refused []placed) {
	if slices.Equal(was, now) {
		return nil
	}
	before, after := byKey(was), byKey(now)
	for k := range before {
		if _, ok := after[k]; !ok {
			x.claim(k, name, nil)
		}
	}
	for _, p := range now {
		list := after[p.key]
		switch {
		case list == nil || slices.Equal(list, before[p.key]):
		case x.claims[p.key] == nil && len(x.claims) >= x.room:
			refused = append(refused, list...)
		default:
			x.claim(p.key, name, list)
		}
		delete(after, p.key) // once is enough
	}
	return refused
}

func byKey(list []placed) map[key][]placed {
	m := make(map[key][]placed, len(list))
	for _, p := range list {
		m[p.key] = append(m[p.key], p)
	}
	return m
}

// claim sets what one file says about one object.
func (x *index) claim(k key, name string, list []placed) {
	claims := slices.DeleteFunc(slices.Clone(x.claims[k]), func(c claim) bool { return c.file == name })
	for _, p := range list {
		claims = append(claims, claim{file: name, placed: p})
	}
	slices.SortStableFunc(claims, func(a, b claim) int { return cmp.Compare(a.file, b.file) })
	x.touched[k] = struct{}{}
	if len(claims) == 0 {
		delete(x.claims, k)
		return
	}
	x.claims[k] = claims
}

// settle decides the touched objects and gives the events that bring the receiver up to date. Endpoints come last, as
// they depend on the slices.
func (d *directory) settle() []model.Event {
	x := d.index
	var events []model.Event
	for _, endpoints := range []bool{false, true} {
		for _, k := range slices.SortedFunc(maps.Keys(x.touched), compareKeys) {
			if (k.kind == kindEndpoints) == endpoints {
				events = append(events, d.settleOne(k)...)
			}
		}
	}
	x.touched = map[key]struct{}{} // clearing costs what the map ever held
	return events
}

// settleOne decides one object.
func (d *directory) settleOne(k key) []model.Event {
	x := d.index
	want := map[key]model.Event{}
	notes := map[string][]note{}
	claims := x.claims[k]
	for i, c := range claims {
		at := d.place(c)
		if i > 0 {
			notes[c.file] = append(notes[c.file], noteAt(model.Error, DuplicateObject, at, fmt.Sprintf(
				"%s is already described at %s, which is used: remove one", k, d.place(claims[0]))))
			continue
		}
		want, notes[c.file] = x.meaning(c.object, at)
	}
	for name, list := range notes {
		d.files[name].setNotes(k, list)
		d.unreported[name] = true
	}
	if k.kind == kindSlice {
		x.count(k, want[k])
	}
	return x.send(k, want)
}

// place tells where a claim is made.
func (d *directory) place(c claim) place {
	return place{file: filepath.Join(d.path, c.file), line: c.line}
}

// meaning gives the events that an object stands for, and what is to be noted on its file.
func (x *index) meaning(o *object, at place) (map[key]model.Event, []note) {
	switch {
	case slices.ContainsFunc(o.findings, func(f model.Finding) bool { return f.Reason == convert.InvalidName }) && !o.usable():
		// It has no name that a receiver could file it under.
		return nil, notesOf(o, at)
	case o.key.kind == kindEndpoints && x.sliced[o.key.name] > 0:
		return nil, []note{noteAt(model.Warning, EndpointsIgnored, at, fmt.Sprintf(
			"%s is ignored, as there are EndpointSlices of that Service: remove one of the two", o.key))}
	case o.key.kind == kindEndpoints:
		events := map[key]model.Event{}
		for _, s := range o.slices {
			events[key{kind: kindSlice, name: s.Name}] = model.Event{Slice: s}
		}
		// They stand for several slices, or for none, so what was found is filed under the file.
		return events, notesOf(o, at)
	case o.usable():
		e := model.Event{Service: o.service, Node: o.node, Findings: located(o.findings, at)}
		if len(o.slices) > 0 {
			e.Slice = o.slices[0]
		}
		return map[key]model.Event{o.key: e}, nil
	case len(o.findings) > 0:
		e := gone(o.key)
		e.Findings = located(o.findings, at)
		return map[key]model.Event{o.key: e}, nil
	}
	return nil, nil // it is not for this proxy
}

// notesOf makes notes of an object's findings.
func notesOf(o *object, at place) []note {
	var notes []note
	for _, f := range located(o.findings, at) {
		notes = append(notes, note{line: at.line, Finding: f})
	}
	return notes
}

// count keeps track of how many slices a Service has, before a new state of one is sent. The first one puts the
// Service's Endpoints out of force, and the last one to go puts them back.
func (x *index) count(k key, now model.Event) {
	change := func(e model.Event, by int) {
		if e.Slice == nil || e.Delete {
			return
		}
		service := model.Name{Namespace: k.name.Namespace, Name: e.Slice.Service}
		had := x.sliced[service]
		x.sliced[service] = had + by
		if had+by == 0 {
			delete(x.sliced, service)
		}
		if endpoints := (key{kind: kindEndpoints, name: service}); (had == 0 || had+by == 0) && x.claims[endpoints] != nil {
			x.touched[endpoints] = struct{}{}
		}
	}
	change(now, 1)
	change(x.sent[k], -1)
}

// send gives the events by which the receiver learns what an object stands for now, and counts them as sent.
func (x *index) send(k key, want map[key]model.Event) []model.Event {
	var events []model.Event
	keys := slices.SortedFunc(maps.Keys(want), compareKeys)
	for _, e := range keys {
		if !sameEvent(x.sent[e], want[e]) {
			events = append(events, want[e])
		}
		x.sent[e] = want[e]
	}
	known := []key{k}
	if k.kind == kindEndpoints {
		known = x.derived[k]
		x.derived[k] = keys
		if len(keys) == 0 {
			delete(x.derived, k)
		}
	}
	for _, e := range known {
		_, had := x.sent[e]
		if _, ok := want[e]; had && !ok {
			events = append(events, gone(e))
			delete(x.sent, e)
		}
	}
	return events
}

// gone is the event that an object is not there.
func gone(k key) model.Event {
	switch k.kind {
	case kindService:
		return model.Event{Service: &model.Service{Name: k.name}, Delete: true}
	case kindNode:
		return model.Event{Node: &model.Node{Name: k.name.Name}, Delete: true}
	}
	return model.Event{Slice: &model.EndpointSlice{Name: k.name}, Delete: true}
}

// sameEvent tells that a receiver of the first would learn nothing from the second.
func sameEvent(a, b model.Event) bool {
	return a.Delete == b.Delete && a.Service.Equal(b.Service) && a.Slice.Equal(b.Slice) && a.Node.Equal(b.Node) &&
		slices.Equal(a.Findings, b.Findings)
}

func compareKeys(a, b key) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), a.name.Compare(b.name))
}
