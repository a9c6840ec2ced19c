package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// width is how wide lines may be; longer ones are cut.
const width = 116

// A screen prints the story: numbered sections, short explanations, and promises that were kept or not.
type screen struct {
	out      io.Writer
	colour   bool
	sections int
	promises int
	failed   int
	start    time.Time
}

func newScreen(out io.Writer, colour bool) *screen {
	return &screen{out: out, colour: colour, start: time.Now()}
}

// isTerminal tells whether colours make sense.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// The colours that are used, as terminals number them.
const (
	bold  = "1"
	red   = "31"
	green = "32"
	blue  = "36"
	faint = "2"
)

func (s *screen) paint(colour, text string) string {
	if !s.colour || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func (s *screen) line(text string) {
	// There is nobody left to tell if the terminal is gone.
	_, _ = fmt.Fprintln(s.out, text)
}

func (s *screen) title(text string) {
	s.line(s.paint(bold, text))
	s.line(strings.Repeat("=", len(text)))
}

func (s *screen) section(heading string) {
	s.sections++
	s.line("")
	s.line(s.paint(bold, fmt.Sprintf("%d. %s", s.sections, heading)))
}

func (s *screen) say(lines ...string) {
	for _, l := range lines {
		s.line(strings.TrimRight("   "+l, " "))
	}
}

// command shows what a user would type.
func (s *screen) command(text string) {
	s.line("")
	s.line("   " + s.paint(blue, "$ "+text))
}

// output shows what a command printed, with long lines cut.
func (s *screen) output(text string) {
	for l := range strings.Lines(text) {
		l = strings.TrimRight(l, "\n")
		if r := []rune(l); len(r) > width {
			l = string(r[:width-3]) + "..."
		}
		s.line("   " + l)
	}
}

// promise shows something that must hold, and remembers if it does not.
func (s *screen) promise(kept bool, what string) {
	s.promises++
	mark := s.paint(green, "[ok]  ")
	if !kept {
		s.failed++
		mark = s.paint(red, "[FAIL]")
	}
	s.line("   " + mark + " " + what)
}

func (s *screen) broken() int { return s.failed }

// bars shows which share of the answers each server gave.
func (s *screen) bars(label string, servers []string, answers map[string]int, failed int) {
	total := 0
	for _, n := range answers {
		total += n
	}
	const barWidth = 24
	parts := make([]string, 0, len(servers))
	for _, name := range servers {
		share := 0.0
		if total > 0 {
			share = float64(answers[name]) / float64(total)
		}
		filled := int(share*barWidth + 0.5)
		if share > 0 && filled == 0 {
			filled = 1
		}
		parts = append(parts, fmt.Sprintf("%s %s%s %3.0f %%", name, s.paint(green, strings.Repeat("#", filled)),
			s.paint(faint, strings.Repeat(".", barWidth-filled)), share*100))
	}
	count := fmt.Sprintf("%d answered, %d failed", total, failed)
	if failed > 0 {
		count = s.paint(red, count)
	}
	s.line("")
	s.line("   " + s.paint(bold, label) + "   " + count)
	for _, p := range parts {
		s.line("      " + p)
	}
}
