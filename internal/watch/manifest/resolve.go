package manifest

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A place is where an object is described.
type place struct {
	file string
	line int
}

func (p place) String() string { return fmt.Sprintf("%s:%d", p.file, p.line) }

// maxFindings is how many findings on one file are kept.
const maxFindings = 50

// A report is the findings on one file, of which a bounded number is kept.
type report struct {
	list    []model.Finding
	omitted int
}

func (r *report) add(list ...model.Finding) {
	for _, f := range list {
		if len(r.list) < maxFindings {
			r.list = append(r.list, f)
		} else {
			r.omitted++
		}
	}
}

// result gives the findings; the last one counts those that were not kept.
func (r *report) result() []model.Finding {
	if r.omitted == 0 {
		return r.list
	}
	last := r.list[len(r.list)-1]
	last.Message = fmt.Sprintf("%d more findings on %s", r.omitted, last.Object)
	return append(slices.Clip(r.list), last)
}

// resolved is what the manifests say as a whole.
type resolved struct {
	events map[key]model.Event
	files  map[string]*report
	// winners tells where each object is described that counts, sliced which Services have EndpointSlices.
	winners map[key]place
	sliced  map[model.Name]bool
}

// file gives the report on a file.
func (r *resolved) file(path string) *report {
	if r.files[path] == nil {
		r.files[path] = &report{}
	}
	return r.files[path]
}

// changes gives the events that lead from what was sent to what the manifests say now, and counts them as sent.
func (d *directory) changes() []model.Event {
	want := d.resolve()
	files := map[string][]model.Finding{}
	for name, r := range want.files {
		files[name] = r.result()
	}
	var events []model.Event
	for _, k := range slices.SortedFunc(maps.Keys(want.events), compareKeys) {
		if e := want.events[k]; !sameEvent(d.sent[k], e) {
			events = append(events, e)
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(d.sent), compareKeys) {
		if _, ok := want.events[k]; !ok {
			events = append(events, gone(k))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !slices.Equal(d.sentFiles[name], files[name]) {
			events = append(events, model.Event{File: name, Findings: files[name]})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.sentFiles)) {
		if _, ok := files[name]; !ok {
			events = append(events, model.Event{File: name})
		}
	}
	d.sent, d.sentFiles = want.events, files
	return events
}

// resolve decides which description of each object counts: the first one, by the file's name and then by its place in
// the file.
func (d *directory) resolve() resolved {
	r := resolved{events: map[key]model.Event{}, files: map[string]*report{}}
	for _, f := range []*model.Finding{d.unreadable, d.unwatched} {
		if f != nil {
			r.file(d.path).add(*f)
		}
	}
	r.winners, r.sliced = map[key]place{}, map[model.Name]bool{}
	var endpoints []object
	for _, name := range slices.Sorted(maps.Keys(d.files)) {
		f, path := d.files[name], filepath.Join(d.path, name)
		if len(f.findings.list) > 0 {
			r.files[path] = &report{list: slices.Clip(f.findings.list), omitted: f.findings.omitted}
		}
		endpoints = append(endpoints, r.takeFile(path, f.objects)...)
	}
	for _, o := range endpoints {
		r.endpoints(o)
	}
	return r
}

// takeFile adds the objects of one file that nobody described before, except for the Endpoints among them, which it
// gives back: they count only if no file has slices of the same Service.
func (r *resolved) takeFile(path string, objects []object) (endpoints []object) {
	for _, o := range objects {
		at := place{file: path, line: o.line}
		if first, taken := r.winners[o.key]; taken {
			r.note(model.Error, DuplicateObject, at,
				fmt.Sprintf("%s is already described at %s, which is used: remove one", o.key, first))
			continue
		}
		if len(r.winners) >= maxObjects {
			r.note(model.Error, TooManyObjects, at,
				fmt.Sprintf("more than %d objects, this one and the rest are ignored", maxObjects))
			break
		}
		r.winners[o.key] = at
		if o.key.kind == "Endpoints" {
			endpoints = append(endpoints, o)
			continue
		}
		r.object(o, at)
		if len(o.slices) > 0 {
			r.sliced[model.Name{Namespace: o.key.name.Namespace, Name: o.slices[0].Service}] = true
		}
	}
	return endpoints
}

// object adds what a Service, EndpointSlice or Node says. An object that is not for this proxy and has no findings
// gives nothing.
func (r *resolved) object(o object, at place) {
	e := model.Event{Service: o.service, Node: o.node}
	if len(o.slices) > 0 {
		e.Slice = o.slices[0]
	}
	if e.Service == nil && e.Slice == nil && e.Node == nil {
		if len(o.findings) == 0 {
			return
		}
		e = gone(o.key)
	}
	e.Findings = located(o.findings, at)
	r.events[o.key] = e
}

// endpoints adds the slices that an Endpoints object stands for, unless the Service has real ones. What was found about
// the object is filed under its file, as it may stand for several slices or none.
func (r *resolved) endpoints(o object) {
	at := r.winners[o.key]
	if r.sliced[o.key.name] {
		r.note(model.Warning, EndpointsIgnored, at,
			fmt.Sprintf("%s is ignored, as there are EndpointSlices of that Service: "+
				"remove one of the two", o.key))
		return
	}
	for _, s := range o.slices {
		r.events[key{kind: "EndpointSlice", name: s.Name}] = model.Event{Slice: s}
	}
	if len(o.findings) > 0 {
		r.file(at.file).add(located(o.findings, at)...)
	}
}

// note adds a finding on a file.
func (r *resolved) note(s model.Severity, reason string, at place, message string) {
	r.file(at.file).add(model.Finding{
		Severity: s, Kind: "File", Object: at.file, Reason: reason, Message: at.String() + ": " + message,
	})
}

// located adds the place to the findings on an object, so that they can be found without a search.
func located(list []model.Finding, at place) []model.Finding {
	if len(list) == 0 {
		return nil
	}
	out := slices.Clone(list)
	for i := range out {
		out[i].Message = at.String() + ": " + out[i].Message
	}
	return out
}

// gone is the event that an object is not there.
func gone(k key) model.Event {
	switch k.kind {
	case "Service":
		return model.Event{Service: &model.Service{Name: k.name}, Delete: true}
	case "Node":
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
