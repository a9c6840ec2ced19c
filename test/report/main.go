// Command report reads what "go test -json" prints, shows it as a person wants to see it, and counts: one line for each
// package, the whole output of each failed test, what was skipped and why, and as the last line "N passed, N failed, N
// skipped". It decides whether a run counts as good; it must not import anything of this repository.
//
// A test that is skipped for want of something says "needs ..." and how to get it. With -strict, or in an environment with
// CI=true, such a skip is a failure: there everything is to be installed.
//
// Exit status: 0 good, 1 something failed, 2 the input is not of "go test -json".
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	strict := flag.Bool("strict", os.Getenv("CI") == "true", "fail when a test was skipped for want of something")
	flag.Parse()
	r := newReport(*strict)
	if err := r.read(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	if !r.summary(os.Stdout) {
		os.Exit(1)
	}
}

// An event is one line of "go test -json" (go doc test2json).
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Output      string
	FailedBuild string
}

// A report counts tests and keeps what is to be told of them. Tests are leaves: of a test with subtests these count alone.
type report struct {
	strict bool
	// output is what a test or package printed, until it has passed.
	output map[string][]string
	// parents are tests that have subtests.
	parents map[string]bool
	// bad are the packages in which a test has failed.
	bad map[string]bool

	passed, failed, skipped int
	missing                 []string
	other                   map[string]int
}

func newReport(strict bool) *report {
	return &report{
		strict: strict, output: map[string][]string{}, parents: map[string]bool{}, bad: map[string]bool{},
		other: map[string]int{},
	}
}

// read takes the events in and writes as they come.
func (r *report) read(in io.Reader, out io.Writer) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			if lineErr := r.line(line, out); lineErr != nil {
				return lineErr
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the test output: %w", err)
		}
	}
}

func (r *report) line(line []byte, out io.Writer) error {
	if line[0] != '{' {
		// What the go command says itself, such as a failure to resolve a package.
		_, _ = out.Write(line) // a lost line on a closed terminal has no reader
		return nil
	}
	var e event
	if err := json.Unmarshal(line, &e); err != nil {
		return fmt.Errorf("a line is not of go test -json: %w", err)
	}
	r.take(e, out)
	return nil
}

func (r *report) take(e event, out io.Writer) {
	key := e.Package + "\x00" + e.Test
	switch e.Action {
	case "output":
		r.output[key] = append(r.output[key], e.Output)
	case "build-output":
		_, _ = io.WriteString(out, e.Output) // a lost line on a closed terminal has no reader
	case "run":
		if parent := parentOf(e.Test); parent != "" {
			r.parents[e.Package+"\x00"+parent] = true
		}
	case "pass":
		r.end(e, key, &r.passed)
		if e.Test == "" {
			r.print(out, r.output[key], isVerdict)
		}
		delete(r.output, key)
	case "skip":
		r.skip(e, key)
	case "fail":
		r.fail(e, key, out)
	}
}

// parentOf gives the test that a subtest belongs to.
func parentOf(test string) string {
	if i := strings.LastIndexByte(test, '/'); i >= 0 {
		return test[:i]
	}
	return ""
}

// end counts a test that has no subtests.
func (r *report) end(e event, key string, counter *int) {
	if e.Test != "" && !r.parents[key] {
		*counter++
	}
}

func (r *report) fail(e event, key string, out io.Writer) {
	r.end(e, key, &r.failed)
	if e.Test == "" && !r.bad[e.Package] {
		r.failed++ // a package that did not build, or whose process ended early
	}
	r.bad[e.Package] = true
	r.print(out, r.output[key], func(string) bool { return true })
	delete(r.output, key)
}

// skip remembers why. A package without tests is "skipped" too, which is no news.
func (r *report) skip(e event, key string) {
	if e.Test == "" {
		return
	}
	r.skipped++
	reason := "no reason given"
	for _, line := range r.output[key] {
		if text, ok := reasonIn(line); ok {
			reason = text
			break
		}
	}
	delete(r.output, key)
	short := e.Package[strings.LastIndexByte(e.Package, '/')+1:] + "." + e.Test
	if strings.HasPrefix(reason, "needs ") {
		r.missing = append(r.missing, short+": "+reason)
		return
	}
	r.other[reason]++
}

// reasonIn takes the message out of a line such as "    lab_test.go:12: needs root".
func reasonIn(line string) (string, bool) {
	line = strings.TrimSpace(line)
	place, text, ok := strings.Cut(line, ": ")
	return text, ok && strings.Contains(place, ".go:")
}

// isVerdict tells the go command's line on a package, and those that tests of speed print.
func isVerdict(line string) bool {
	return strings.HasPrefix(line, "ok ") || strings.HasPrefix(line, "Benchmark")
}

func (r *report) print(out io.Writer, lines []string, wanted func(string) bool) {
	for _, l := range lines {
		if wanted(l) {
			_, _ = io.WriteString(out, l) // a lost line on a closed terminal has no reader
		}
	}
}

// summary prints what was skipped and the totals, and tells whether the run was good: one without a single test was not.
func (r *report) summary(out io.Writer) bool {
	var b strings.Builder
	if len(r.other) > 0 {
		b.WriteString("\nSkipped, as it does not apply here:\n")
		reasons := make([]string, 0, len(r.other))
		for reason, n := range r.other {
			reasons = append(reasons, fmt.Sprintf("  %4d x %s\n", n, reason))
		}
		slices.Sort(reasons)
		b.WriteString(strings.Join(reasons, ""))
	}
	if len(r.missing) > 0 {
		b.WriteString("\nNot run, as something is missing:\n")
		for _, m := range r.missing {
			b.WriteString("  " + m + "\n")
		}
		if r.strict {
			fmt.Fprintf(&b, "In CI this counts as a failure.\n")
			r.failed += len(r.missing)
			r.skipped -= len(r.missing)
		}
	}
	fmt.Fprintf(&b, "\n%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
	_, _ = io.WriteString(out, b.String()) // a lost line on a closed terminal has no reader
	return r.failed == 0 && r.passed > 0
}
