package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A paint colours a text, or leaves it as it is.
type paint func(text string, c shade) string

// A shade is an SGR colour (ECMA-48).
type shade int

const (
	plain  shade = 0
	red    shade = 31
	green  shade = 32
	yellow shade = 33
	faint  shade = 2
)

// colour gives a paint for a stream: colours only where a person looks, and never with NO_COLOR set.
func colour(w io.Writer) paint {
	f, ok := w.(*os.File)
	if ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			return func(text string, c shade) string {
				if c == plain || text == "" {
					return text
				}
				return fmt.Sprintf("\x1b[%dm%s\x1b[0m", c, text)
			}
		}
	}
	return func(text string, _ shade) string { return text }
}

// A cell is one field of a table.
type cell struct {
	text  string
	shade shade
}

// writeTable aligns the columns; the last one is not padded.
func writeTable(w io.Writer, rows [][]cell, p paint) error {
	var widths []int
	for _, row := range rows {
		for i, c := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
		}
	}
	var out bytes.Buffer
	for _, row := range rows {
		for i, c := range row {
			out.WriteString(p(c.text, c.shade))
			if i < len(row)-1 {
				out.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+2))
			}
		}
		out.WriteByte('\n')
	}
	return written(w.Write(out.Bytes()))
}

// renderListing prints a listing for people.
func renderListing(w io.Writer, l *answer.Listing, wide bool, p paint) error {
	if len(l.Rows) == 0 {
		if err := written(fmt.Fprintln(w, "No Services.")); err != nil {
			return err
		}
		return renderNotes(w, l, p)
	}
	scheduled := slices.ContainsFunc(l.Rows, func(r answer.Row) bool { return r.Scheduler != "" })
	head := []string{"SERVICE", "KIND", "FRONTEND", "PROTO", "DO"}
	if scheduled {
		head = append(head, "SCHEDULER", "ACTIVE", "INACTIVE")
	}
	if wide {
		head = append(head, "AFFINITY", "ALLOW")
	}
	rows := [][]cell{cells(append(head, "ENDPOINTS", "DRIFT"))}
	for i := range l.Rows {
		rows = append(rows, listingRow(&l.Rows[i], scheduled, wide))
	}
	if err := writeTable(w, rows, p); err != nil {
		return err
	}
	return renderNotes(w, l, p)
}

func cells(texts []string) []cell {
	out := make([]cell, len(texts))
	for i, t := range texts {
		out[i] = cell{text: t}
	}
	return out
}

func listingRow(r *answer.Row, scheduled, wide bool) []cell {
	do := cell{text: r.Do}
	if r.Do != forward.Forward.String() {
		do.shade = yellow
		if r.Reason != "" {
			do.text += " " + r.Reason
		}
	}
	row := []cell{{text: orDash(r.Service)}, {text: orDash(r.Kind)}, {text: frontendText(r)}, {text: r.Proto}, do}
	if scheduled {
		active, inactive := connectionCounts(r)
		row = append(row, cell{text: orDash(r.Scheduler)}, cell{text: active}, cell{text: inactive})
	}
	if wide {
		return append(row, cell{text: affinityText(r.AffinitySeconds)}, cell{text: allowText(r.Filtered, r.Allow)},
			cell{text: allEndpoints(r)}, driftCell(r))
	}
	return append(row, cell{text: someEndpoints(r)}, driftCell(r))
}

// connectionCounts adds up a frontend's connections, those that drain included.
func connectionCounts(r *answer.Row) (active, inactive string) {
	a, i := 0, 0
	for _, e := range slices.Concat(r.Endpoints, r.LocalEndpoints, r.Draining) {
		a += e.Active
		i += e.Inactive
	}
	return strconv.Itoa(a), strconv.Itoa(i)
}

// frontendText writes an IPv6 node port as "[*]:port", so that the families can be told apart.
func frontendText(r *answer.Row) string {
	if port, found := strings.CutPrefix(r.Frontend, "*:"); found && r.Family == model.IPv6.String() {
		return "[*]:" + port
	}
	return r.Frontend
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func driftCell(r *answer.Row) cell {
	switch r.Drift {
	case "":
		return cell{text: "-", shade: faint}
	case answer.DriftNone:
		return cell{text: r.Drift, shade: green}
	}
	text := r.Drift
	if r.Detail != "" {
		text += ": " + r.Detail
	}
	return cell{text: text, shade: red}
}

func affinityText(seconds int) string {
	if seconds == 0 {
		return "-"
	}
	text := (time.Duration(seconds) * time.Second).String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

func allowText(filtered bool, allow []string) string {
	switch {
	case !filtered:
		return "any"
	case len(allow) == 0:
		return "nobody"
	}
	return strings.Join(allow, ",")
}

// someEndpoints fits a column: all of a short list, the count of a long one.
func someEndpoints(r *answer.Row) string {
	text := pools(r, shortList)
	if n := len(r.Draining); n > 0 {
		text += fmt.Sprintf(" (%d draining)", n)
	}
	return text
}

// pools writes who gets which endpoints.
func pools(r *answer.Row, list func([]answer.Endpoint) string) string {
	text := list(r.Endpoints)
	if len(r.LocalEndpoints) > 0 {
		return list(r.LocalEndpoints) + " (for pods " + text + ")"
	}
	if len(r.Endpoints) > 0 && r.Do != forward.Forward.String() {
		return "for pods " + text
	}
	return text
}

func shortList(list []answer.Endpoint) string {
	const most = 2
	switch n := len(list); {
	case n == 0:
		return "-"
	case n <= most:
		return joinAddrs(list)
	default:
		return fmt.Sprintf("%d: %s,...", n, list[0].Addr)
	}
}

func joinAddrs(list []answer.Endpoint) string {
	addrs := make([]string, len(list))
	for i, e := range list {
		addrs[i] = e.Addr
	}
	return strings.Join(addrs, ",")
}

// allEndpoints lists everything, with shares.
func allEndpoints(r *answer.Row) string {
	text := pools(r, shares)
	if len(r.Draining) > 0 {
		text += " draining " + shares(r.Draining)
	}
	return text
}

func shares(list []answer.Endpoint) string {
	if len(list) == 0 {
		return "-"
	}
	parts := make([]string, len(list))
	for i, e := range list {
		parts[i] = e.Addr + "=" + percent(e.Share)
		if e.Weight > 0 || e.Active > 0 || e.Inactive > 0 {
			parts[i] += fmt.Sprintf("/w%d/%d+%d", e.Weight, e.Active, e.Inactive)
		}
	}
	return strings.Join(parts, ",")
}

// percent writes a share with as many digits as say something.
func percent(share float64) string {
	switch p := share * 100; {
	case p >= 99.95:
		return "100%"
	case p >= 1:
		return fmt.Sprintf("%.1f%%", p)
	default:
		return fmt.Sprintf("%.3f%%", p)
	}
}

func stepsText(n int) string {
	if n == 1 {
		return "1 change is needed"
	}
	return fmt.Sprintf("%d changes are needed", n)
}

// renderNotes prints below a table what does not fit into it.
func renderNotes(w io.Writer, l *answer.Listing, p paint) error {
	lines := l.Notes
	for _, f := range l.Families {
		if f.Error != "" {
			lines = append(lines, p(fmt.Sprintf("%s: not in effect: %s", f.Family, f.Error), red))
		}
		if f.Pending > 0 {
			lines = append(lines, p(fmt.Sprintf("%s: %s to make the kernel as wanted", f.Family, stepsText(f.Pending)), red))
		}
	}
	for _, f := range l.Findings {
		c := yellow
		if f.Severity == "error" {
			c = red
		}
		lines = append(lines, fmt.Sprintf("%s: %s %s: %s (%s)", p(f.Severity, c), f.Kind, f.Object, f.Message, f.Reason))
	}
	if len(lines) == 0 {
		return nil
	}
	return written(fmt.Fprintf(w, "\n%s\n", strings.Join(lines, "\n")))
}
