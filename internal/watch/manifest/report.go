package manifest

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/turnout-proxy/turnout/internal/model"
)

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

// A note is a finding on a file that depends on the other files, too.
type note struct {
	line int
	model.Finding
}

// noteAt makes a note about what is described at a place.
func noteAt(s model.Severity, reason string, at place, message string) note {
	return note{line: at.line, Finding: model.Finding{
		Severity: s, Kind: "File", Object: at.file, Reason: reason, Message: at.String() + ": " + message,
	}}
}

// report gives all findings on the file: on its documents, then on the objects in them by their place.
func (f *file) report() []model.Finding {
	r := report{list: slices.Clip(f.findings.list), omitted: f.findings.omitted}
	var notes []note
	for _, list := range f.notes {
		notes = append(notes, list...)
	}
	slices.SortFunc(notes, func(a, b note) int {
		return cmp.Or(cmp.Compare(a.line, b.line), cmp.Compare(a.Message, b.Message))
	})
	for _, n := range notes {
		r.add(n.Finding)
	}
	return r.result()
}

// A place is where an object is described.
type place struct {
	file string // its path
	line int
}

func (p place) String() string { return fmt.Sprintf("%s:%d", p.file, p.line) }

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
