package health

import (
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A state is what is known of the proxy's progress. It has no clock: the time is an argument.
type state struct {
	// families holds those that have reported something.
	families map[model.Family]progress
	node     *model.Node
}

// progress is how far a family has come.
type progress struct {
	// lastUpdated is when a sync last took effect; pending since when one is overdue; zero for never and for none.
	lastUpdated, pending time.Time
}

func (s *state) queued(f model.Family, at time.Time) {
	p := s.families[f]
	if p.pending.IsZero() {
		p.pending = at
		s.families[f] = p
	}
}

func (s *state) updated(f model.Family, at time.Time) { s.families[f] = progress{lastUpdated: at} }

// healthy tells that the family has not waited for the timeout.
func (p progress) healthy(now time.Time, timeout time.Duration) bool {
	return p.pending.IsZero() || now.Sub(p.pending) < timeout
}

func (s *state) healthy(now time.Time, timeout time.Duration) bool {
	for _, p := range s.families {
		if !p.healthy(now, timeout) {
			return false
		}
	}
	return true
}

// eligible tells whether load balancers should send new connections to this node. One that is about to be removed
// keeps forwarding, but must lose its traffic before it goes.
func (s *state) eligible(optional bool) bool {
	if s.node == nil {
		return optional
	}
	return !s.node.Deleting
}

// A report is the body of an answer. Its fields are those of kube-proxy, in its order.
type report struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyReport `json:"status,omitempty"`
}

type familyReport struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// report gives the body, and whether the answer is good. When it is not, lastUpdated shows since when nothing took
// effect; otherwise it is the present time.
func (s *state) report(now time.Time, timeout time.Duration, withNode, nodeOptional bool) (report, bool) {
	r := report{CurrentTime: now, Healthy: s.healthy(now, timeout), Status: map[string]familyReport{}}
	for f, p := range s.families {
		r.Status[f.String()] = familyReport{p.lastUpdated, p.healthy(now, timeout)}
		if p.lastUpdated.After(r.LastUpdated) {
			r.LastUpdated = p.lastUpdated
		}
	}
	ok := r.Healthy
	if withNode {
		eligible := s.eligible(nodeOptional)
		r.NodeEligible = &eligible
		ok = ok && eligible
	}
	if ok {
		r.LastUpdated = now
	}
	return r, ok
}
