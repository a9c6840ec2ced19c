package kernel

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAStepErrorTellsWhatWasTriedWhereAndWhyNot(t *testing.T) {
	tests := map[string]struct {
		err  StepError
		want string
	}{
		"all that can be known": {
			StepError{
				Op: "restore", Object: "table nat", Line: 3, Text: "-A X", Reason: "no chain X", Class: ErrInvalid, Err: io.EOF,
			},
			`restore table nat, line 3 "-A X": no chain X`,
		},
		"only a cause":           {StepError{Op: "list", Object: "flows", Err: io.EOF, Class: ErrBusy}, "list flows: EOF"},
		"only a class":           {StepError{Op: "list", Object: "flows", Class: ErrBusy}, "list flows: busy"},
		"nothing but the object": {StepError{Op: "list", Object: "flows"}, "list flows"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, tc.err.Error()); diff != "" {
				t.Errorf("message (-want +got):\n%s", diff)
			}
			for _, target := range []error{tc.err.Err, tc.err.Class} {
				if target != nil && !errors.Is(&tc.err, target) {
					t.Errorf("%v is not found in it", target)
				}
			}
			if errors.Is(&tc.err, ErrConflict) {
				t.Error("it is of a class that nobody gave it")
			}
		})
	}
}

func TestQuoteCutsBetweenCharacters(t *testing.T) {
	for name, line := range map[string]string{
		"one byte each":  strings.Repeat("x", MaxText+1),
		"two bytes each": strings.Repeat("é", MaxText),
		"shifted by one": "x" + strings.Repeat("é", MaxText),
	} {
		t.Run(name, func(t *testing.T) {
			got := Quote(line)
			if len(got) > MaxText || strings.ToValidUTF8(got, "") != got || !strings.HasSuffix(got, "...") {
				t.Errorf("%d bytes: %q", len(got), got)
			}
		})
	}
	if line := strings.Repeat("x", MaxText); Quote(line) != line {
		t.Error("a line that fits was changed")
	}
}
