// Package answer holds what ls and trace say, as values: made from forwarding tables, from what a backend read from the
// kernel, and from a backend's trace; printed by the command line, and sent as JSON by the daemon. It decides how the
// same fact is worded and compared whichever of those it comes from.
//
// It is pure, and must not import a backend, the loop or anything that touches the kernel. Read Listing and Trace, then
// rows.go and explain.go.
package answer

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// Where an answer comes from.
const (
	// FromDaemon is what the daemon wants, compared with what the kernel holds.
	FromDaemon = "daemon"
	// FromKernel is what the kernel holds; what is wanted is not known.
	FromKernel = "kernel"
	// FromManifests is what a daemon would write for the objects of a directory.
	FromManifests = "manifests"
)

// A Status says how a daemon is.
type Status struct {
	Version string    `json:"version"`
	Mode    string    `json:"mode"`
	Node    string    `json:"node"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	// Synced tells that the sources have delivered everything, so that the rules can be complete.
	Synced   bool     `json:"synced"`
	Families []Family `json:"families"`
	Services int      `json:"services"`
	Findings int      `json:"findings"`
}

// A Family says how one IP family is served.
type Family struct {
	Family string `json:"family"`
	// LastSync is the last time that everything wanted was in the kernel; zero for never.
	LastSync time.Time `json:"lastSync,omitzero"`
	// Error is why the last try as a whole did not take effect.
	Error string `json:"error,omitempty"`
	// Drifts counts how often somebody else's change was repaired.
	Drifts int `json:"drifts"`
	// Ports counts the Service ports, Failed those that are not in the kernel as wanted.
	Ports  int `json:"ports"`
	Failed int `json:"failed"`
	// Objects counts the kernel objects that are ours, by kind.
	Objects map[string]int `json:"objects,omitempty"`
	// Pending says what differs between the kernel and what is wanted beyond single frontends, as a count of steps.
	Pending int `json:"pendingSteps"`
}

// A Listing is every frontend of a node.
type Listing struct {
	// Source is one of the From constants.
	Source   string   `json:"source"`
	Mode     string   `json:"mode"`
	Node     string   `json:"node,omitempty"`
	Families []Family `json:"families,omitempty"`
	Rows     []Row    `json:"rows"`
	// Notes are sentences about the listing as a whole.
	Notes    []string  `json:"notes,omitempty"`
	Findings []Finding `json:"findings,omitempty"`
}

// A Row is one frontend.
type Row struct {
	Family string `json:"family"`
	// Service is "namespace/service:port", without ":port" for an unnamed one.
	Service string `json:"service"`
	// Kind, Do and Reason are in the words of the forwarding table. Kind is empty where the kernel does not tell it.
	Kind     string `json:"kind"`
	Frontend string `json:"frontend"`
	Proto    string `json:"proto"`
	// Do is what a client from outside gets.
	Do              string `json:"do"`
	Reason          string `json:"reason,omitempty"`
	AffinitySeconds int    `json:"affinitySeconds,omitempty"`
	// Allow are the only sources that may come; Filtered with an empty list admits nobody.
	Filtered  bool       `json:"filtered,omitempty"`
	Allow     []string   `json:"allow,omitempty"`
	Endpoints []Endpoint `json:"endpoints"`
	// LocalEndpoints are those for clients from outside under traffic policy Local, where they are others.
	LocalEndpoints []Endpoint `json:"localEndpoints,omitempty"`
	// Scheduler is the kernel's name for how endpoints are chosen, in modes where there is a choice.
	Scheduler string `json:"scheduler,omitempty"`
	// Draining are endpoints that get no new connections and keep those that they have.
	Draining []Endpoint `json:"draining,omitempty"`
	// Drift compares the kernel with what is wanted; see the Drift constants. Empty means that it is not known.
	Drift string `json:"drift,omitempty"`
	// Detail says what differs, or why the frontend is not served.
	Detail string `json:"detail,omitempty"`
}

// The values of Row.Drift.
const (
	// DriftNone: the kernel holds what is wanted.
	DriftNone = "none"
	// DriftMissing: wanted, and not in the kernel.
	DriftMissing = "missing"
	// DriftExtra: in the kernel, and not wanted.
	DriftExtra = "extra"
	// DriftChanged: in the kernel, but not as wanted.
	DriftChanged = "changed"
)

// An Endpoint is one place that a frontend forwards to. Share is its part of new connections, 0..1.
type Endpoint struct {
	Addr  string  `json:"addr"`
	Share float64 `json:"share"`
	// Weight and the numbers of connections are there in modes whose kernel objects have them.
	Weight   int `json:"weight,omitempty"`
	Active   int `json:"active,omitempty"`
	Inactive int `json:"inactive,omitempty"`
}

// Connections are what the kernel's virtual servers have connected, in mode ipvs.
type Connections struct {
	Connections []Connection `json:"connections"`
	// More tells that the list ends at the limit that was asked for.
	More bool `json:"more,omitempty"`
}

// A Connection is one of them, or, if Remembered is set, a client that stays at its endpoint without one.
type Connection struct {
	Service        string `json:"service,omitempty"`
	Proto          string `json:"proto"`
	State          string `json:"state"`
	ExpiresSeconds int    `json:"expiresSeconds"`
	Client         string `json:"client"`
	Frontend       string `json:"frontend"`
	Endpoint       string `json:"endpoint"`
	Remembered     bool   `json:"remembered,omitempty"`
}

// A Finding is something that a user should know about one object.
type Finding struct {
	Severity string `json:"severity"`
	Kind     string `json:"kind"`
	Object   string `json:"object"`
	Reason   string `json:"reason"`
	Message  string `json:"message"`
}

// Findings translates and sorts findings.
func Findings(list []model.Finding) []Finding {
	out := make([]Finding, 0, len(list))
	for _, f := range list {
		out = append(out, Finding{
			Severity: f.Severity.String(), Kind: f.Kind, Object: f.Object, Reason: f.Reason,
			Message: f.Message,
		})
	}
	slices.SortStableFunc(out, func(x, y Finding) int {
		return cmp.Or(cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.Object, y.Object), cmp.Compare(x.Reason, y.Reason),
			cmp.Compare(x.Message, y.Message))
	})
	return slices.Compact(out)
}

// Select leaves the rows and findings of one namespace, or of one Service. An empty argument does not restrict. The
// Service may be given as "service", "namespace/service" or either with ":port".
func (l *Listing) Select(namespace, service string) {
	if ns, rest, found := strings.Cut(service, "/"); found {
		namespace, service = ns, rest
	}
	if namespace == "" && service == "" {
		return
	}
	l.Rows = slices.DeleteFunc(l.Rows, func(r Row) bool { return !matches(r.Service, namespace, service) })
	l.Findings = slices.DeleteFunc(l.Findings, func(f Finding) bool {
		name, _, _ := strings.Cut(service, ":")
		return f.Kind == "Node" || f.Kind == "File" || !matches(f.Object, namespace, name)
	})
}

// matches tells whether "namespace/service:port" is what was asked for.
func matches(full, namespace, service string) bool {
	ns, rest, found := strings.Cut(full, "/")
	if !found || namespace != "" && ns != namespace {
		return false
	}
	name, _, _ := strings.Cut(rest, ":")
	return service == "" || rest == service || name == service
}

// Sort puts rows in the order in which they are shown: by Service, family and kind.
func (l *Listing) Sort() {
	kinds := []string{"cluster-ip", "external-ip", "load-balancer", "node-port"}
	slices.SortStableFunc(l.Rows, func(x, y Row) int {
		return cmp.Or(cmp.Compare(x.Service, y.Service), cmp.Compare(x.Family, y.Family),
			cmp.Compare(slices.Index(kinds, x.Kind), slices.Index(kinds, y.Kind)),
			cmp.Compare(x.Frontend, y.Frontend), cmp.Compare(x.Proto, y.Proto))
	})
}
