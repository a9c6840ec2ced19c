package loop

import (
	"context"
	"time"

	"github.com/turnout-proxy/turnout/internal/logkey"
)

// A watch looks for objects that others changed. It first looks at a cheap fingerprint; only a new one that is not our
// own work leads to reading everything back, and that seldom enough to stay cheap.
type watch struct {
	// pulse is the last fingerprint, empty if unknown, mark the place among our writes when it was taken, and pulseAt is
	// when to look again.
	pulse     string
	mark      int
	pulseAt   time.Time
	pulseErrs bool
	// suspect tells that somebody else changed something, and budget when that may be looked into.
	// drifted tells that a query has found drift, which may make the backend plan the repair with the next change.
	suspect bool
	drifted bool
	budget  bucket
	// verifyAt is when to read back in any case.
	verifyAt time.Time

	// An episode of drift starts with a repair that is logged and ends when none was needed for a while.
	episode bool
	repairs int
	began   time.Time
	until   time.Time
}

// The limits of read-backs keep them under 2 % of one processor, whatever a read-back costs: when others keep changing
// things one in 50 times its duration, after a burst that makes up for a quiet time, and without a reason one in 200
// times.
const (
	readBackBurst  = 3
	leastReadBack  = 2 * time.Second
	readBackShare  = 50
	verifyShare    = 200
	episodeSilence = time.Minute
)

// dispatchWatch starts the look that is due, and gives the time of the next.
func (l *Loop) dispatchWatch(now time.Time, f *family) time.Time {
	w := &f.watch
	mayReadBack := w.budget.next(now)
	switch {
	case w.suspect && !mayReadBack.After(now):
		w.budget.take(now)
		l.startVerify(f)
		return time.Time{}
	case !now.Before(w.verifyAt):
		l.startVerify(f)
		return time.Time{}
	case w.suspect:
		return earliest(mayReadBack, w.verifyAt)
	case !now.Before(w.pulseAt):
		l.startPulse(f)
		return time.Time{}
	}
	return earliest(w.pulseAt, w.verifyAt)
}

func (l *Loop) startVerify(f *family) {
	f.interrupt = &interrupt{}
	f.start(l.job(f, work{
		observe: true, interrupt: f.interrupt, verify: true, ours: true, drifted: f.watch.drifted,
		pulse: f.watch.pulse, mark: f.watch.mark,
	}))
}

func (l *Loop) startPulse(f *family) {
	f.start(func(ctx context.Context) func() {
		var pulse string
		var mark int
		err := guard(func() (err error) {
			pulse, mark, err = l.writes.sample(ctx, l.clock, f.Backend)
			return err
		})
		return func() {
			f.free()
			if ctx.Err() != nil {
				return
			}
			if w := &f.watch; w.pulse != "" && !l.writes.explain(f, w.mark, w.pulse, pulse) {
				w.suspect = true
			}
			l.takePulse(f, pulse, mark, err)
		}
	})
}

// takePulse remembers a fingerprint. Without one everything may have changed.
func (l *Loop) takePulse(f *family, pulse string, mark int, err error) {
	w := &f.watch
	w.pulse, w.mark, w.pulseAt = pulse, mark, l.clock.Now().Add(l.cfg.PulsePeriod)
	if err == nil {
		w.pulseErrs = false
		return
	}
	w.pulse, w.suspect = "", true
	if !w.pulseErrs {
		w.pulseErrs = true
		l.log.Warn("Could not tell whether others changed kernel objects, read everything back instead",
			logkey.Family, f.name(), logkey.Err, errText(err))
	}
}

// takeReadBack takes over what work tells about the kernel.
func (l *Loop) takeReadBack(f *family, w work, out outcome, now time.Time) {
	watch := &f.watch
	if out.interrupted {
		f.interrupted++
		watch.suspect = true
		return
	}
	if out.observed {
		f.interrupted = 0
		watch.suspect, watch.drifted = false, false
		watch.verifyAt = now.Add(max(l.cfg.VerifyPeriod, verifyShare*out.observeTook))
		watch.budget.period = max(leastReadBack, readBackShare*out.observeTook)
		result := "clean"
		if out.drift {
			result = "drift"
		}
		l.cfg.Metrics.ReadBack(f.Family.Family, out.observeTook, result)
		f.stats.LastVerified = now
	} else if w.observe {
		l.cfg.Metrics.ReadBack(f.Family.Family, out.observeTook, "failed")
	}
	if out.observed || out.applied {
		l.takePulse(f, out.pulse, out.mark, out.pulseErr)
	}
	watch.suspect = watch.suspect || out.foreign
}

// repaired notes that drift was put right. One line an episode says what it was, however often it comes back.
func (w *watch) repaired(l *Loop, f *family, out outcome, now time.Time) {
	l.cfg.Metrics.DriftRepaired(f.Family.Family)
	f.stats.DriftRepairs++
	f.stats.LastDrift = now
	w.repairs++
	w.until = now.Add(episodeSilence)
	if w.episode {
		return
	}
	w.episode, w.repairs, w.began = true, 1, now
	log := l.log
	if out.what != "" {
		log = log.With(logkey.Plan, clip(out.what))
	}
	log.Warn("Repaired kernel objects that others had changed", logkey.Family, f.name(),
		logkey.Backend, f.Backend.Mode(), logkey.Steps, out.planned, logkey.Duration, out.end.Sub(out.start))
}

// endEpisode closes an episode after a quiet time, and gives the time at which to look again.
func (w *watch) endEpisode(l *Loop, f *family, now time.Time) time.Time {
	if !w.episode {
		return time.Time{}
	}
	if now.Before(w.until) {
		return w.until
	}
	w.episode = false
	if w.repairs > 1 {
		l.log.Warn("Others have stopped changing kernel objects", logkey.Family, f.name(), logkey.Count, w.repairs,
			logkey.Since, now.Sub(w.began))
	}
	return time.Time{}
}
