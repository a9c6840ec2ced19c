package backendtest

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/scripts"
)

// A script is one conformance script, read but not yet run.
type script struct {
	name     string
	commands []command
	// files hold manifests by name.
	files map[string]string
	// only is the one family that the script is about; 0 is both.
	only model.Family
	// big tells that it takes seconds, as there are a thousand Services or endpoints in it.
	big bool
}

// A command is one line of a script with the indented lines below it.
type command struct {
	line int
	name string
	args []string
	want []string
}

// String gives the command as it was written, roughly.
func (c command) String() string {
	return fmt.Sprintf("line %d: %s %s", c.line, c.name, strings.Join(c.args, " "))
}

// commandRules say for each command how many arguments it takes and whether lines below it are needed (1), allowed (0)
// or wrong (-1). Max < 0 is no bound.
func commandRules() map[string]struct{ min, max, below int } {
	return map[string]struct{ min, max, below int }{
		"set":     {1, -1, -1},
		"apply":   {1, -1, -1},
		"delete":  {1, -1, -1},
		"edit":    {3, 3, -1},
		"crowd":   {4, 4, -1},
		"fleet":   {2, 2, -1},
		"nofleet": {2, 2, -1},
		"packet":  {2, 3, 1},
		"table":   {0, 0, 1},
		"context": {0, 0, 1},
		"find":    {1, 2, -1},
		"nofind":  {0, 2, -1},
		"observe": {0, 0, -1},
		"restart": {0, 0, -1},
		"foreign": {0, 0, -1},
		"damage":  {0, 0, -1},
		"cleanup": {0, 0, -1},
		"flows":   {0, 0, 1},
		"open":    {3, 3, -1},
		"ping":    {1, 2, -1},
		"stray":   {1, 1, -1},
		"expires": {3, 3, -1},
	}
}

// parseScript reads a script.
func parseScript(name string, data []byte) (*script, error) {
	archive := txtar.Parse(data)
	s := &script{name: name, files: map[string]string{}}
	for _, f := range archive.Files {
		if _, twice := s.files[f.Name]; twice {
			return nil, fmt.Errorf("file %s is there twice", f.Name)
		}
		s.files[f.Name] = string(f.Data)
	}
	described := false
	for i, line := range strings.Split(string(archive.Comment), "\n") {
		trimmed := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "#"):
			described = described || i == 0
		case trimmed == "":
		case line[0] == ' ' || line[0] == '\t':
			if len(s.commands) == 0 {
				return nil, fmt.Errorf("line %d: indented, but below no command", i+1)
			}
			last := &s.commands[len(s.commands)-1]
			last.want = append(last.want, trimmed)
		default:
			words, err := splitWords(trimmed)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", i+1, err)
			}
			s.commands = append(s.commands, command{line: i + 1, name: words[0], args: words[1:]})
		}
	}
	if !described {
		return nil, fmt.Errorf("line 1: must be a comment that says which behaviour this is, and its KEP or report")
	}
	return s, s.check()
}

// bigNumber of Services or endpoints make a script one that short test runs leave out.
const bigNumber = 1000

// check finds mistakes that do not need a run.
func (s *script) check() error {
	rules := commandRules()
	for _, c := range s.commands {
		rule, ok := rules[c.name]
		switch {
		case !ok:
			return fmt.Errorf("%s: there is no such command", c)
		case len(c.args) < rule.min || rule.max >= 0 && len(c.args) > rule.max:
			return fmt.Errorf("%s: wrong number of arguments", c)
		case rule.below > 0 && len(c.want) == 0:
			return fmt.Errorf("%s: needs indented lines below it", c)
		case rule.below < 0 && len(c.want) > 0:
			return fmt.Errorf("%s: takes no indented lines below it", c)
		}
		if c.name == "fleet" || c.name == "crowd" {
			n, err := strconv.Atoi(c.args[len(c.args)-1])
			s.big = s.big || err == nil && n >= bigNumber
		}
		if c.name != "set" {
			continue
		}
		for _, a := range c.args {
			switch a {
			case "only=IPv4":
				s.only = model.IPv4
			case "only=IPv6":
				s.only = model.IPv6
			}
		}
	}
	return nil
}

// splitWords separates a line at its blanks; a part in single or double quotes may contain some.
func splitWords(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	quote, inWord := rune(0), false
	for _, r := range line {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote == 0 && (r == '\'' || r == '"'):
			quote, inWord = r, true
		case quote == 0 && (r == ' ' || r == '\t'):
			if inWord {
				words = append(words, word.String())
				word.Reset()
			}
			inWord = false
		default:
			word.WriteRune(r)
			inWord = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("quote %c has no end", quote)
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}

// loadScripts reads all scripts, in the order of their names, each in the forms that it is run in: as it is, and where it
// speaks of IPv4 alone, its twin for IPv6.
func loadScripts(t testing.TB) []*script {
	t.Helper()
	files := scripts.Files()
	names, err := fs.Glob(files, "*.txtar")
	if err != nil {
		t.Fatalf("list scripts: %v", err)
	}
	slices.Sort(names)
	list := make([]*script, 0, 2*len(names))
	for _, file := range names {
		data, err := files.ReadFile(file)
		if err != nil {
			t.Fatalf("read script: %v", err)
		}
		name := strings.TrimSuffix(path.Base(file), ".txtar")
		s, err := parseScript(name, data)
		if err != nil {
			t.Errorf("script %s: %v", name, err)
			continue
		}
		list = append(list, s)
		twin := mirror(string(data))
		if s.only != 0 || twin == "" {
			continue
		}
		m, err := parseScript(name, []byte(twin))
		if err != nil {
			t.Errorf("script %s, IPv6 twin: %v", name, err)
			continue
		}
		s.only, m.only = model.IPv4, model.IPv6
		list = append(list, m)
	}
	return list
}
