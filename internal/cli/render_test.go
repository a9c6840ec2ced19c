package cli

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/turnout-proxy/turnout/internal/control/answer"
)

// listing has every state that a row can be in.
func listing() *answer.Listing {
	one := []answer.Endpoint{{Addr: "10.60.1.11:8080", Share: 1}}
	many := make([]answer.Endpoint, 1000)
	for i := range many {
		many[i] = answer.Endpoint{Addr: "10.60.1.11:1", Share: 0.001}
	}
	row := answer.Row{
		Family: "IPv4", Service: "a/one", Kind: "cluster-ip", Frontend: "10.70.0.1:80", Proto: "tcp",
		Do: "forward", Endpoints: one, Drift: answer.DriftNone,
	}
	rows := []answer.Row{row, row, row, row, row, row}
	rows[1].Drift = answer.DriftMissing
	rows[2].Drift, rows[2].Detail = answer.DriftChanged, "the kernel has it without 10.60.1.11:8080"
	rows[3] = answer.Row{Family: "IPv4", Frontend: "10.70.0.9:80", Proto: "sctp", Do: "drop", Drift: answer.DriftExtra}
	rows[4].Drift, rows[4].Detail = answer.DriftMissing, "refused by the kernel: no room"
	rows[4].Filtered = true
	rows[5].Endpoints, rows[5].AffinitySeconds, rows[5].Family, rows[5].Frontend = many[:3], 90, "IPv6", "*:30080"
	rows = append(rows, answer.Row{
		Family: "IPv4", Service: "a/many", Kind: "cluster-ip", Frontend: "10.70.0.2:80",
		Proto: "udp", Do: "forward", Endpoints: many[:2], Drift: "",
	})
	return &answer.Listing{
		Source: answer.FromDaemon, Rows: rows,
		Notes: []string{"The sources are not complete yet: this is what the kernel holds from before."},
		Families: []answer.Family{
			{Family: "IPv4", Pending: 1},
			{Family: "IPv6", Pending: 2, Error: "no room"},
			{Family: "IPv9"},
		},
		Findings: []answer.Finding{
			{Severity: "error", Kind: "Service", Object: "a/b", Reason: "FrontendConflict", Message: "a message"},
			{Severity: "warning", Kind: "Node", Object: "n", Reason: "R", Message: "another message"},
		},
	}
}

func TestAListingIsAlignedAndSaysWhatDiffers(t *testing.T) {
	none := func(s string, _ shade) string { return s }
	marked := func(s string, c shade) string {
		if c == plain {
			return s
		}
		return map[shade]string{red: "<red>", green: "<green>", yellow: "<yellow>", faint: "<faint>"}[c] + s + "</>"
	}
	for name, tc := range map[string]struct {
		wide bool
		p    paint
	}{"drift.txt": {false, none}, "drift-wide.txt": {true, none}, "drift-colour.txt": {false, marked}} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := renderListing(&out, listing(), tc.wide, tc.p); err != nil {
				t.Fatal(err)
			}
			golden(t, name, out.String())
		})
	}
}

func TestAnEmptyListingStillSaysWhatIsWrong(t *testing.T) {
	l := listing()
	l.Rows = nil
	var out bytes.Buffer
	if err := renderListing(&out, l, false, colour(&out)); err != nil {
		t.Fatal(err)
	}
	golden(t, "drift-empty.txt", out.String())
}

func TestATraceShowsWhereTheRulesDisagree(t *testing.T) {
	var out bytes.Buffer
	tr := answer.Trace{
		Source: answer.FromKernel, Packet: answer.Packet{Src: "10.60.1.5", Dst: "10.70.0.1:80", Proto: "tcp"},
		Verdict: "forward", Explanation: "the connection goes on", Client: "node", Service: "a/one",
		Frontend: "10.70.0.1:80",
		Filtered: true, Choices: []answer.Choice{{Endpoint: "10.60.1.11:8080", Share: 0.0004, SNAT: true, Local: true}},
		Steps: []answer.Step{{Where: "nat X", What: "jump"}}, Disagreement: "the rules do something else",
	}
	if err := renderTrace(&out, &tr, colour(&out)); err != nil {
		t.Fatal(err)
	}
	golden(t, "trace-disagreement.txt", out.String())
}

func TestOfManyEndpointsATraceShowsSome(t *testing.T) {
	for n, want := range map[int]struct {
		lines int
		last  string
	}{
		10: {10, "10.60.0.9:80"}, 11: {11, "10.60.0.10:80"}, 12: {11, "and 2 more, which -o json lists"},
		1000: {11, "and 990 more, which -o json lists"},
	} {
		tr := answer.Trace{Verdict: "forward"}
		for i := range n {
			tr.Choices = append(tr.Choices, answer.Choice{Endpoint: fmt.Sprintf("10.60.0.%d:80", i)})
		}
		var out bytes.Buffer
		if err := renderTrace(&out, &tr, colour(&out)); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		_, list, _ := strings.Cut(out.String(), "endpoints")
		if got := strings.Count(list, "\n"); got != want.lines || !strings.Contains(lines[len(lines)-1], want.last) {
			t.Errorf("of %d endpoints %d lines are shown, the last one %q; want %d and %q",
				n, got, lines[len(lines)-1], want.lines, want.last)
		}
	}
}

func TestColoursAreForTerminalsOnly(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]paint{"a file": colour(file), "a buffer": colour(&bytes.Buffer{})} {
		if got := p("text", red); got != "text" {
			t.Errorf("%s gets %q", name, got)
		}
	}
	tty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("needs /dev/ptmx, for a terminal")
	}
	t.Cleanup(func() { _ = tty.Close() })
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	if got := colour(tty)("text", red); got != "\x1b[31mtext\x1b[0m" {
		t.Errorf("a terminal gets %q", got)
	}
	if got := colour(tty)("text", plain); got != "text" {
		t.Errorf("plain text on a terminal is %q", got)
	}
	t.Setenv("NO_COLOR", "1")
	if got := colour(tty)("text", red); strings.Contains(got, "\x1b") {
		t.Errorf("with NO_COLOR a terminal gets %q", got)
	}
}

func TestSharesHaveAsManyDigitsAsSaySomething(t *testing.T) {
	for share, want := range map[float64]string{
		1: "100%", 0.9999: "100%", 0.5: "50.0%", 1.0 / 3: "33.3%", 0.001: "0.100%",
		0.00002: "0.002%",
	} {
		if got := percent(share); got != want {
			t.Errorf("percent(%v) = %s, want %s", share, got, want)
		}
	}
}

func TestAffinityIsWrittenShort(t *testing.T) {
	for seconds, want := range map[int]string{
		0: "-", 5: "5s", 60: "1m", 90: "1m30s", 3600: "1h", 10800: "3h", 3660: "1h1m",
		86400: "24h", 3605: "1h0m5s",
	} {
		if got := affinityText(seconds); got != want {
			t.Errorf("affinityText(%d) = %s, want %s", seconds, got, want)
		}
	}
}
