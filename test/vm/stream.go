package vm

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
)

// A stream takes apart what comes from the guest: what the program prints, and the words of the guest's first program,
// which are lines that begin with a nonce. Nobody can print such a line by accident, as the nonce is new for each guest.
type stream struct {
	nonce []byte
	out   io.Writer
	// ready is called when the program is about to start.
	ready func()

	held  []byte // read but not yet passed on: it may be the beginning of a word
	ended bool
	// status is the exit status of the program, once it has ended.
	status int
}

// copy passes on what the guest says until the program has ended or the guest is gone, and tells whether it has ended.
func (s *stream) copy(in io.Reader) (bool, error) {
	const size = 64 << 10
	buf := make([]byte, size)
	for !s.ended {
		n, err := in.Read(buf)
		s.held = append(s.held, buf[:n]...)
		if takeErr := s.take(); takeErr != nil {
			return false, takeErr
		}
		if err != nil {
			if !s.ended {
				_, _ = s.out.Write(s.held)
			}
			break // the guest's end of the pipe is closed
		}
	}
	return s.ended, nil
}

// take deals with all of what is held but for the beginning of a word.
func (s *stream) take() error {
	for !s.ended {
		at := bytes.Index(s.held, s.nonce)
		if at < 0 {
			return s.pass(len(s.held) - overlap(s.held, s.nonce))
		}
		if err := s.pass(at); err != nil {
			return err
		}
		line, rest, whole := bytes.Cut(s.held, []byte("\n"))
		if !whole {
			return nil
		}
		if err := s.word(string(bytes.TrimPrefix(line, s.nonce))); err != nil {
			return err
		}
		s.held = append([]byte(nil), rest...)
	}
	return nil
}

// pass hands on the first n bytes of what is held.
func (s *stream) pass(n int) error {
	if n == 0 {
		return nil
	}
	if _, err := s.out.Write(s.held[:n]); err != nil {
		return fmt.Errorf("pass on what the guest prints: %w", err)
	}
	s.held = append(s.held[:0], s.held[n:]...)
	return nil
}

// word is " ready" or " exit N".
func (s *stream) word(text string) error {
	if text == " ready" {
		s.ready()
		return nil
	}
	number, is := bytes.CutPrefix([]byte(text), []byte(" exit "))
	status, err := strconv.Atoi(string(number))
	if !is || err != nil {
		return fmt.Errorf("the guest says %q, which is not a word between it and its host", text)
	}
	s.ended, s.status = true, status
	return nil
}

// overlap gives the length of the longest end of a that is a beginning of b.
func overlap(a, b []byte) int {
	for n := min(len(a), len(b)); n > 0; n-- {
		if bytes.HasSuffix(a, b[:n]) {
			return n
		}
	}
	return 0
}
