package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestARunIsCountedAndJudged(t *testing.T) {
	const (
		passing = `{"Action":"run","Package":"x/a","Test":"TestA"}
{"Action":"output","Package":"x/a","Test":"TestA","Output":"noise\n"}
{"Action":"pass","Package":"x/a","Test":"TestA"}
{"Action":"output","Package":"x/a","Output":"ok  \tx/a\t0.1s\n"}
{"Action":"pass","Package":"x/a"}
`
		failing = `{"Action":"run","Package":"x/b","Test":"TestB"}
{"Action":"run","Package":"x/b","Test":"TestB/one"}
{"Action":"output","Package":"x/b","Test":"TestB/one","Output":"    b_test.go:1: wrong\n"}
{"Action":"fail","Package":"x/b","Test":"TestB/one"}
{"Action":"fail","Package":"x/b","Test":"TestB"}
{"Action":"output","Package":"x/b","Output":"FAIL\tx/b\t0.1s\n"}
{"Action":"fail","Package":"x/b"}
`
		missing = `{"Action":"run","Package":"x/c","Test":"TestC"}
{"Action":"output","Package":"x/c","Test":"TestC","Output":"    c_test.go:1: needs root: run it with sudo\n"}
{"Action":"skip","Package":"x/c","Test":"TestC"}
`
		inapplicable = `{"Action":"run","Package":"x/d","Test":"TestD"}
{"Action":"output","Package":"x/d","Test":"TestD","Output":"    d_test.go:1: this kernel has no SCTP\n"}
{"Action":"skip","Package":"x/d","Test":"TestD"}
`
		broken = `{"ImportPath":"x/e","Action":"build-output","Output":"e.go:1: syntax error\n"}
{"Action":"output","Package":"x/e","Output":"FAIL\tx/e [build failed]\n"}
{"Action":"fail","Package":"x/e","FailedBuild":"x/e"}
`
	)
	tests := map[string]struct {
		input  string
		strict bool
		good   bool
		want   string
	}{
		"a passing package is one line": {
			passing, false, true, "ok  \tx/a\t0.1s\n\n1 passed, 0 failed, 0 skipped\n",
		},
		"a failed subtest counts once and shows its output": {
			passing + failing, false, false,
			"ok  \tx/a\t0.1s\n    b_test.go:1: wrong\nFAIL\tx/b\t0.1s\n\n1 passed, 1 failed, 0 skipped\n",
		},
		"a missing prerequisite is told and passes": {
			passing + missing, false, true, "ok  \tx/a\t0.1s\n" +
				"\nNot run, as something is missing:\n  c.TestC: needs root: run it with sudo\n" +
				"\n1 passed, 0 failed, 1 skipped\n",
		},
		"a missing prerequisite fails in CI": {
			missing, true, false,
			"\nNot run, as something is missing:\n  c.TestC: needs root: run it with sudo\n" +
				"In CI this counts as a failure.\n\n0 passed, 1 failed, 0 skipped\n",
		},
		"what does not apply passes in CI": {
			passing + inapplicable, true, true, "ok  \tx/a\t0.1s\n" +
				"\nSkipped, as it does not apply here:\n     1 x this kernel has no SCTP\n\n1 passed, 0 failed, 1 skipped\n",
		},
		"a run without a test is not good": {"", false, false, "\n0 passed, 0 failed, 0 skipped\n"},
		"each package that fails without a failed test counts": {
			failing + broken, false, false, "    b_test.go:1: wrong\nFAIL\tx/b\t0.1s\n" +
				"e.go:1: syntax error\nFAIL\tx/e [build failed]\n\n0 passed, 2 failed, 0 skipped\n",
		},
		"a package that does not build fails": {
			broken, false, false, "e.go:1: syntax error\nFAIL\tx/e [build failed]\n\n0 passed, 1 failed, 0 skipped\n",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			r := newReport(tc.strict)
			if err := r.read(strings.NewReader(tc.input), &out); err != nil {
				t.Fatal(err)
			}
			good := r.summary(&out)
			if good != tc.good {
				t.Errorf("good is %v, want %v", good, tc.good)
			}
			if diff := cmp.Diff(tc.want, out.String()); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
		})
	}
}

func TestInputThatIsNotOfGoTestIsAnError(t *testing.T) {
	if err := newReport(false).read(strings.NewReader("{broken\n"), &strings.Builder{}); err == nil {
		t.Error("got no error")
	}
}
