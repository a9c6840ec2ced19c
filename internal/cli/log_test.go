package cli

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"k8s.io/klog/v2"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/logkey"
)

// asLogger makes the test binary log the lines of logLines and end; its value is the configuration. A process of its own
// is needed, as klog has one state for the whole process.
const asLogger = "TURNOUT_TEST_LOGGER"

func logLines() int {
	var c config.Log
	if err := json.Unmarshal([]byte(os.Getenv(asLogger)), &c); err != nil {
		panic(err)
	}
	log, err := newLogger(c, os.Stderr)
	if err != nil {
		_, _ = os.Stderr.WriteString("error: " + err.Error() + "\n")
		return 1
	}
	log.Info("Something happened", logkey.Service, "shop/web", logkey.Count, 3)
	log.Warn("Something was odd")
	log.Error("Something failed", logkey.Err, errors.New("no room"))
	log.Debug("Level four")
	log.Log(context.Background(), slog.Level(-2), "Level two")
	klog.V(2).InfoS("Library level two")
	klog.InfoS("Library line", "key", "value")
	return 0
}

func logged(t *testing.T, c config.Log) []string {
	t.Helper()
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), asLogger+"="+string(text))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

// compareLines wants each line to match its pattern, and no more lines.
func compareLines(t *testing.T, want, got []string) {
	t.Helper()
	for i := range max(len(want), len(got)) {
		switch {
		case i >= len(got):
			t.Errorf("no line %d, want %s", i+1, want[i])
		case i >= len(want):
			t.Errorf("line %d is too many: %s", i+1, got[i])
		case !regexp.MustCompile("^" + want[i] + "$").MatchString(got[i]):
			t.Errorf("line %d is\n  %s\nwhich does not match\n  %s", i+1, got[i], want[i])
		}
	}
}

func TestTheLogHasTheFormThatOperatorsKnow(t *testing.T) {
	const head = `\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ log_test\.go:\d+\] `
	info := "I" + head + `"Something happened" service="shop/web" count=3`
	warn, fail := "W"+head+`"Something was odd"`, "E"+head+`"Something failed" err="no room"`
	library := "I" + head + `"Library line" key="value"`
	two, four, libraryTwo := "I"+head+`"Level two"`, "I"+head+`"Level four"`, "I"+head+`"Library level two"`
	tests := map[string]struct {
		c    config.Log
		want []string
	}{
		"by default": {config.Log{Format: "text"}, []string{info, warn, fail, library}},
		"with -v=2":  {config.Log{Format: "text", Verbosity: 2}, []string{info, warn, fail, two, libraryTwo, library}},
		"with -v=4":  {config.Log{Format: "text", Verbosity: 4}, []string{info, warn, fail, four, two, libraryTwo, library}},
		"with a level for this file": {
			config.Log{Format: "text", VModule: "log_test=4"},
			[]string{info, warn, fail, four, two, libraryTwo, library},
		},
		"with a level for another file": {
			config.Log{Format: "text", VModule: "proxy=4"},
			[]string{info, warn, fail, library},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) { compareLines(t, tc.want, logged(t, tc.c)) })
	}
}

func TestTheLogCanBeJSON(t *testing.T) {
	const head = `\{"ts":1\d{12}\.?\d*(e\+12)?,`
	const caller = `"caller":"log_test\.go:\d+",`
	want := []string{
		head + `"v":0,` + caller + `"msg":"Something happened","service":"shop/web","count":3\}`,
		head + `"v":0,` + caller + `"msg":"Something was odd"\}`,
		head + caller + `"msg":"Something failed","err":"no room"\}`,
		head + `"v":2,` + caller + `"msg":"Level two"\}`,
		head + `"v":\d,"caller":"[\w.]+:\d+","msg":"Library level two"\}`,
		head + `"v":0,"caller":"[\w.]+:\d+","msg":"Library line","key":"value"\}`,
	}
	got := logged(t, config.Log{Format: "json", Verbosity: 2})
	compareLines(t, want, got)
	for _, line := range got {
		if !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
}
