package loop

import "time"

// A Clock tells the time to a Loop, so that tests can drive it.
type Clock interface {
	Now() time.Time
	// NewTimer gives a timer that fires once, after d.
	NewTimer(d time.Duration) Timer
}

// A Timer fires once after each Reset. A Reset or Stop discards what has not been received yet.
type Timer interface {
	C() <-chan time.Time
	Reset(d time.Duration)
	Stop()
}

// SystemClock gives the machine's clock.
func SystemClock() Clock { return systemClock{} }

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) NewTimer(d time.Duration) Timer { return systemTimer{time.NewTimer(d)} }

type systemTimer struct{ t *time.Timer }

func (t systemTimer) C() <-chan time.Time   { return t.t.C }
func (t systemTimer) Reset(d time.Duration) { t.t.Reset(d) }
func (t systemTimer) Stop()                 { t.t.Stop() }
