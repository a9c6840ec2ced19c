package control

import (
	"net"
	"testing"
	"testing/synctest"
)

// endless is a listener that always has a client waiting.
type endless struct{ net.Listener }

func (endless) Accept() (net.Conn, error) {
	conn, _ := net.Pipe()
	return conn, nil
}

func (endless) Close() error { return nil }

func TestALimitedListenerTakesNoMoreClientsThanItHasPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := limit(endless{}, 2)
		accepted := make(chan net.Conn, 10)
		ended := make(chan error, 1)
		go func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					ended <- err
					return
				}
				accepted <- conn
			}
		}()
		synctest.Wait()
		if n := len(accepted); n != 2 {
			t.Fatalf("%d clients were taken, want 2", n)
		}
		first := <-accepted
		for range 2 {
			// The second time gives no second place back.
			if err := first.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		}
		synctest.Wait()
		if n := len(accepted); n != 2 {
			t.Errorf("after one left there are %d, want 2", n)
		}
		if err := ln.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if err := <-ended; err == nil {
			t.Error("a closed listener accepts")
		}
		if err := ln.Close(); err != nil {
			t.Errorf("close again: %v", err)
		}
	})
}
