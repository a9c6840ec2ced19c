package loop

import "time"

// A bucket limits how often changes are applied: burst rounds at once after a quiet time, then one a period. The time
// that a round itself takes earns nothing, so that slow rounds leave the machine a pause between them.
type bucket struct {
	burst  int
	period time.Duration
	tokens float64
	last   time.Time
}

func newBucket(burst int, period time.Duration, now time.Time) bucket {
	return bucket{burst: burst, period: period, tokens: float64(burst), last: now}
}

func (b *bucket) refill(now time.Time) {
	if b.period <= 0 {
		b.tokens = float64(b.burst)
	} else if d := now.Sub(b.last); d > 0 {
		b.tokens = min(float64(b.burst), b.tokens+float64(d)/float64(b.period))
	}
	b.last = now
}

// next gives the earliest time at which a round may start.
func (b *bucket) next(now time.Time) time.Time {
	b.refill(now)
	if b.tokens >= 1 {
		return now
	}
	// Rounding up keeps the loop from waking a nanosecond too early.
	return now.Add(time.Duration((1-b.tokens)*float64(b.period)) + 1)
}

// take pays for a round that starts now.
func (b *bucket) take(now time.Time) {
	b.refill(now)
	b.tokens = max(b.tokens-1, 0)
}

// done tells that the round has ended.
func (b *bucket) done(now time.Time) { b.last = now }

// A backoff is a delay that doubles with each failure.
type backoff struct {
	start, max time.Duration
	// tries counts the failures in a row.
	tries int
}

// fail counts a failure and gives the delay before the next try. The jitter, 0..1, spreads it over 80 to 120 %, so
// that nodes which failed together do not try again together.
func (b *backoff) fail(jitter float64) time.Duration {
	d := b.start
	for range b.tries {
		if d >= b.max {
			break
		}
		d *= 2
	}
	b.tries++
	d = min(d, b.max)
	return time.Duration(float64(d) * (0.8 + 0.4*jitter))
}

// reset forgets the failures.
func (b *backoff) reset() { b.tries = 0 }

// A limiter bounds the number of lines in each minute and counts the others.
type limiter struct {
	lines      int
	window     time.Time
	used, left int
}

// limitWindow is the time over which a limiter counts.
const limitWindow = time.Minute

// allow tells whether a line may be written now.
func (l *limiter) allow(now time.Time) bool {
	if now.Sub(l.window) >= limitWindow {
		l.window, l.used = now, 0
	}
	if l.used >= l.lines {
		l.left++
		return false
	}
	l.used++
	return true
}

// rollover gives, once after the end of a window, how many lines were left out in it; otherwise 0 and the time at which
// to ask again, which is zero if nothing was left out.
func (l *limiter) rollover(now time.Time) (left int, at time.Time) {
	if l.left == 0 {
		return 0, time.Time{}
	}
	if end := l.window.Add(limitWindow); now.Before(end) {
		return 0, end
	}
	left, l.left = l.left, 0
	return left, time.Time{}
}

// earliest gives the earlier of two times; a zero time stands for never.
func earliest(a, b time.Time) time.Time {
	switch {
	case a.IsZero():
		return b
	case b.IsZero() || a.Before(b):
		return a
	}
	return b
}
