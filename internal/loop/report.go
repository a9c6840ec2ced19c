package loop

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/logkey"
	"github.com/turnout-proxy/turnout/internal/model"
)

// portStates are the ports of a family that do not work.
type portStates struct {
	// failed are those that the kernel refuses, unsupported those that the mode cannot express.
	failed      map[forward.PortName]*portFailure
	unsupported map[forward.PortName]backend.Problem
	// tried are refused ports that were part of work since the last that took effect.
	tried map[forward.PortName]struct{}
	// next is when the first of the refused is to be tried again; zero if none is refused.
	next time.Time
}

// A portFailure is an episode in which the kernel refuses a port.
type portFailure struct {
	err         error
	since, next time.Time
	// tries counts every round that was refused, retry only those that were due.
	tries int
	retry backoff
}

func newPortStates() portStates {
	return portStates{
		failed: map[forward.PortName]*portFailure{}, unsupported: map[forward.PortName]backend.Problem{},
		tried: map[forward.PortName]struct{}{},
	}
}

// retryWith adds the refused ports whose time has come to a delta: a backend may leave out a refused port until it is
// named again. It notes which refused ports the delta names.
func (s *portStates) retryWith(d forward.Delta, now time.Time) forward.Delta {
	if len(s.failed) == 0 {
		return d
	}
	named := make(map[forward.PortName]struct{}, len(d.Ports))
	for _, n := range d.Ports {
		named[n] = struct{}{}
	}
	for n, p := range s.failed {
		_, has := named[n]
		if !has && !now.Before(p.next) {
			d.Ports = append(d.Ports, n)
			has = true
		}
		if has || d.Context {
			s.tried[n] = struct{}{}
		}
	}
	slices.SortFunc(d.Ports, forward.PortName.Compare)
	return d
}

// refused gives the Services that have a refused port.
func (s *portStates) refused() map[model.Name]struct{} {
	if len(s.failed) == 0 {
		return nil
	}
	names := make(map[model.Name]struct{}, len(s.failed))
	for n := range s.failed {
		names[n.Name] = struct{}{}
	}
	return names
}

// takePorts takes over which ports the kernel refused in work that took effect otherwise. A port that was tried and is
// not among them works again.
func (l *Loop) takePorts(f *family, refused map[forward.PortName]error, now time.Time) {
	s := &f.ports
	if len(s.failed) == 0 && len(refused) == 0 {
		return
	}
	for n, p := range s.failed {
		_, tried := s.tried[n]
		if _, still := refused[n]; still || !tried {
			continue
		}
		delete(s.failed, n)
		if f.Builder.Table().Port(n) != nil {
			l.line(now).Info("Service port works again", logkey.Family, f.name(), logkey.PortName, n.String(),
				logkey.Attempt, p.tries+1, logkey.Since, now.Sub(p.since))
		}
	}
	clear(s.tried)
	s.next = time.Time{}
	for _, n := range slices.SortedFunc(maps.Keys(refused), forward.PortName.Compare) {
		l.takeRefusal(f, n, refused[n], now)
	}
	for _, p := range s.failed {
		s.next = earliest(s.next, p.next)
	}
	l.cfg.Metrics.Ports(f.Family.Family, len(s.failed), len(s.unsupported))
}

func (l *Loop) takeRefusal(f *family, n forward.PortName, err error, now time.Time) {
	p := f.ports.failed[n]
	first := p == nil
	if first {
		p = &portFailure{since: now, retry: backoff{start: time.Second, max: l.cfg.SyncPeriod}}
		f.ports.failed[n] = p
	}
	p.err = err
	p.tries++
	if !now.Before(p.next) {
		p.next = now.Add(p.retry.fail(l.cfg.Jitter()))
	}
	if !first {
		return
	}
	l.line(now).Error("Service port was refused, kept trying", logkey.Family, f.name(), logkey.PortName, n.String(),
		logkey.Err, errText(err))
	l.publish(model.Finding{
		Severity: model.Error, Kind: "Service", Object: n.Name.String(), Reason: "PortRefused",
		Message: fmt.Sprintf("port %s (%s) is not in effect on this node, trying again: %s", n, f.name(), errText(err)),
	})
}

// takeProblems takes over what the mode cannot express. Compile speaks about the ports that it was given.
func (l *Loop) takeProblems(f *family, w work, out outcome, now time.Time) {
	s := &f.ports
	old := s.unsupported
	if w.delta.Context {
		s.unsupported = map[forward.PortName]backend.Problem{}
	} else if len(old) > 0 {
		s.unsupported = maps.Clone(old)
		for _, n := range w.delta.Ports {
			delete(s.unsupported, n)
		}
	}
	for _, p := range out.problems {
		s.unsupported[p.Port] = p
		if was, known := old[p.Port]; known && was.Reason == p.Reason {
			continue
		}
		l.line(now).Error("Service port cannot be served as asked in this mode", logkey.Family, f.name(),
			logkey.PortName, p.Port.String(), logkey.Reason, p.Reason, logkey.Err, errText(p.Err))
		severity := model.Error
		if p.Served {
			severity = model.Warning
		}
		l.publish(model.Finding{
			Severity: severity, Kind: "Service", Object: p.Port.Name.String(), Reason: p.Reason,
			Message: fmt.Sprintf("port %s (%s) cannot be served as asked: %s", p.Port, f.name(), errText(p.Err)),
		})
	}
	if len(old) != len(s.unsupported) || len(out.problems) > 0 {
		l.cfg.Metrics.Ports(f.Family.Family, len(s.failed), len(s.unsupported))
	}
}

// findings are what is known to be wrong with objects, by where it was found.
type findings struct {
	from map[source][]model.Finding
	// standing counts how many places report the same; both families often do.
	standing map[model.Finding]int
	// fresh are those that nobody was told of, in the order in which they came.
	fresh   []model.Finding
	changed bool
}

// A source is where findings come from: an event about an object, or the builder of a family.
type source struct {
	object objectKey
	family model.Family
}

func newFindings() findings {
	return findings{from: map[source][]model.Finding{}, standing: map[model.Finding]int{}}
}

// set replaces what a source reports.
func (s *findings) set(from source, list []model.Finding) {
	old := s.from[from]
	if len(old) == 0 && len(list) == 0 || slices.Equal(old, list) {
		return
	}
	s.changed = true
	for _, f := range list {
		s.standing[f]++
		if s.standing[f] == 1 {
			s.fresh = append(s.fresh, f)
		}
	}
	for _, f := range old {
		if s.standing[f]--; s.standing[f] == 0 {
			delete(s.standing, f)
		}
	}
	setOrDelete(s.from, from, slices.Clone(list), len(list) > 0)
}

// all gives what stands, sorted and without duplicates.
func (s *findings) all() []model.Finding {
	return slices.SortedFunc(maps.Keys(s.standing), compareFindings)
}

// takeFindings takes over what a family's builder reports.
func (l *Loop) takeFindings(f *family, now time.Time) {
	var list []model.Finding
	conflicts := 0
	for _, found := range f.Builder.Findings() {
		list = append(list, found...)
	}
	for i := range list {
		if list[i].Reason == conflictReason {
			conflicts++
		}
	}
	slices.SortFunc(list, compareFindings)
	l.findings.set(source{family: f.Family.Family}, list)
	l.cfg.Metrics.Conflicts(f.Family.Family, conflicts)
	l.reportFindings(now)
}

// conflictReason is the reason of a finding of package forward about a frontend that an older object has.
const conflictReason = "FrontendConflict"

// reportFindings logs and publishes what is new.
func (l *Loop) reportFindings(now time.Time) {
	if !l.findings.changed {
		return
	}
	l.findings.changed = false
	for _, f := range l.findings.fresh {
		log := l.line(now)
		write := log.Warn
		if f.Severity == model.Error {
			write = log.Error
		}
		write("Found a problem with an object", logkey.Kind, f.Kind, logkey.Object, f.Object,
			logkey.Reason, f.Reason, logkey.Message, clip(f.Message))
		l.publish(f)
	}
	l.findings.fresh = nil
	counts := map[[2]string]int{}
	for f := range l.findings.standing {
		counts[[2]string{f.Reason, f.Severity.String()}]++
	}
	l.cfg.Metrics.Findings(counts)
}

func (l *Loop) publish(f model.Finding) {
	if l.cfg.Events != nil {
		l.cfg.Events.Publish(f)
	}
}

// line gives the log for a line about a single object, or one that discards it if there was too much of that in the
// last minute.
func (l *Loop) line(now time.Time) *slog.Logger {
	if l.lines.allow(now) {
		return l.log
	}
	return l.discard
}

// longest is how much of a text goes into a log line; errors of tools may carry their whole input.
const longest = 1000

func clip(s string) string {
	if len(s) <= longest {
		return s
	}
	return s[:longest] + " ..."
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return clip(err.Error())
}

// name is the family as logs and metrics have it.
func (f *family) name() string { return f.Family.Family.String() }
