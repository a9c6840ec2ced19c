package xtables

import (
	"bytes"
	"strings"

	"github.com/turnout-proxy/turnout/internal/kernel"
)

// statusResource is the tools' exit status for a lock or a resource that they did not get (iptables(8), EXIT STATUS).
const statusResource = 4

// maxReason bounds the reason of an error, in bytes.
const maxReason = 1000

// digest gives what a tool said on one line, without its advice how to call it, and the payload line that it names,
// 0 if it names none.
func digest(reply string) (reason string, line int) {
	var kept []string
	for text := range strings.Lines(reply) {
		text = strings.TrimSpace(text)
		if n := lineNumber(text); n > 0 {
			line = n
		}
		text = withoutProgram(text)
		switch {
		case text == "", strings.HasPrefix(text, "Try `"), strings.HasPrefix(text, "Error occurred at line"),
			strings.HasPrefix(text, "# Warning"):
		case strings.HasPrefix(text, "line ") && strings.HasSuffix(text, " failed"):
		default:
			kept = append(kept, text)
		}
	}
	reason = strings.Join(kept, "; ")
	return strings.ToValidUTF8(reason[:min(len(reason), maxReason)], ""), line
}

// withoutProgram drops the tool's name and version from the start of a message, as often as they are there.
func withoutProgram(text string) string {
	for {
		head, rest, ok := strings.Cut(text, ":")
		if !ok || !strings.Contains(head, "tables") || strings.ContainsAny(head, "`'\"") {
			return text
		}
		if name, _, _ := strings.Cut(head, " "); !strings.HasSuffix(name, "tables") && !strings.Contains(name, "tables-") {
			return text
		}
		text = strings.TrimSpace(rest)
	}
}

// lineNumber finds the payload line in one of the forms "line 5 failed", "Error occurred at line: 5", "COMMIT expected
// at line 5" and "line 5: RULE_APPEND failed".
func lineNumber(text string) int {
	const word = "line"
	for rest := text; ; {
		i := strings.Index(rest, word)
		if i < 0 {
			return 0
		}
		rest = rest[i+len(word):]
		n := 0
		for _, r := range strings.TrimLeft(rest, ": ") {
			if r < '0' || r > '9' || n > 1<<30 {
				break
			}
			n = n*10 + int(r-'0')
		}
		if n > 0 {
			return n
		}
	}
}

// locate gives the table that a payload line belongs to and the line itself, cut. Both are empty if the payload has no
// such line.
func locate(payload []byte, line int) (table, text string) {
	if line <= 0 {
		return "", ""
	}
	n := 0
	for raw := range bytes.Lines(payload) {
		n++
		raw = bytes.TrimRight(raw, "\r\n")
		if len(raw) > 1 && raw[0] == '*' {
			table = string(raw[1:])
		}
		if n == line {
			return table, kernel.Quote(string(raw))
		}
	}
	return "", ""
}

// classify sorts a refusal into a class by exit status and words. The nft flavour exits with 4 for every refusal of the
// kernel, so there the words decide.
func classify(flavour Flavour, status int, reply string) error {
	has := func(words ...string) bool {
		for _, w := range words {
			if strings.Contains(reply, w) {
				return true
			}
		}
		return false
	}
	switch {
	case has("holding the xtables lock", "Can't lock", "Resource temporarily unavailable", "Interrupted system call",
		"No buffer space", "Cannot allocate memory"):
		return ErrBusy
	case has("missing kernel module", "Couldn't load match", "Table does not exist (do you need to insmod?)",
		"unable to initialize table", "Permission denied", "Operation not permitted", "can't open lock file",
		"Protocol not supported", "Operation not supported"):
		return ErrUnsupported
	case has("is incompatible", "Device or resource busy"):
		return ErrConflict
	case flavour == Legacy && status == statusResource:
		return ErrBusy
	case status > 0:
		return ErrInvalid
	}
	return nil
}
