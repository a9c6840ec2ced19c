package repo

import (
	"bufio"
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// module is the path of this module.
const module = "github.com/turnout-proxy/turnout/"

// A source is one Go file.
type source struct {
	// path is relative to the repository's root, dir its directory, both with slashes.
	path, dir string
	test      bool
	lines     int
	imports   []string
	// comment is the package comment, empty if the file has none.
	comment string
}

// root is the repository's root directory as seen from here.
const root = "../.."

// skipDirs hold nothing of ours.
func skipDir(name string) bool {
	return name == "testdata" || name == "vendor" || name == "bin" || name == "dist" ||
		strings.HasPrefix(name, ".") && name != "." && name != ".." && name != ".ci" && name != ".github"
}

// files gives every regular file of the repository but what the go command leaves behind, with its path relative to the root. With data it looks into testdata.
func files(t *testing.T, data bool) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if path != root && skipDir(d.Name()) && (!data || d.Name() != "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		rel, err := filepath.Rel(root, path)
		if d.Type().IsRegular() && !strings.HasSuffix(path, ".test") && !strings.HasSuffix(path, ".out") {
			list = append(list, filepath.ToSlash(rel))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// sources reads every Go file of the repository.
func sources(t *testing.T) []source {
	t.Helper()
	var list []source
	for _, path := range files(t, false) {
		if !strings.HasSuffix(path, ".go") {
			continue
		}
		text := read(t, path)
		f, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		s := source{
			path: path, dir: filepath.ToSlash(filepath.Dir(path)), test: strings.HasSuffix(path, "_test.go"),
			lines: bytes.Count(text, []byte("\n")),
		}
		if f.Doc != nil {
			s.comment = f.Doc.Text()
		}
		s.imports = imports(f)
		list = append(list, s)
	}
	if len(list) == 0 {
		t.Fatal("no Go files were found")
	}
	return list
}

// imports gives the imported paths, those of this module without its name.
func imports(f *ast.File) []string {
	list := make([]string, 0, len(f.Imports))
	for _, i := range f.Imports {
		path := strings.Trim(i.Path.Value, `"`)
		list = append(list, strings.TrimPrefix(path, module))
	}
	return list
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestEveryPackageHasOneComment(t *testing.T) {
	comments, packages := map[string][]string{}, map[string]bool{}
	for _, s := range sources(t) {
		if s.test {
			continue
		}
		packages[s.dir] = true
		if s.comment == "" {
			continue
		}
		comments[s.dir] = append(comments[s.dir], s.path)
		if len(strings.Fields(s.comment)) < 12 {
			t.Errorf("%s: the package comment does not say what the package decides and must not import", s.path)
		}
	}
	for dir := range packages {
		if n := len(comments[dir]); n != 1 {
			t.Errorf("package %s has %d package comments, want one: %v", dir, n, comments[dir])
		}
	}
}

func TestNoFileIsTooLarge(t *testing.T) {
	const maxLines, maxBytes = 600, 500_000
	for _, s := range sources(t) {
		if s.lines > maxLines {
			t.Errorf("%s has %d lines, want at most %d: a second subject wants a file of its own", s.path, s.lines, maxLines)
		}
	}
	for _, path := range files(t, true) {
		info, err := os.Stat(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > maxBytes {
			t.Errorf("%s has %d bytes, want at most %d", path, info.Size(), maxBytes)
		}
	}
}

func TestNothingNamesAPlaceOnSomebodysMachine(t *testing.T) {
	// The words are put together here, so that this file does not have them.
	words := []string{"/wo" + "rk/", "../sha" + "red", "/sha" + "red/", "/ro" + "ot/", "/ho" + "me/"}
	for _, path := range files(t, true) {
		text := read(t, path)
		if bytes.IndexByte(text, 0) >= 0 {
			t.Errorf("%s is not a text", path)
			continue
		}
		lines := bufio.NewScanner(bytes.NewReader(text))
		lines.Buffer(nil, 1<<20)
		for n := 1; lines.Scan(); n++ {
			for _, w := range words {
				if strings.Contains(lines.Text(), w) {
					t.Errorf("%s:%d names %q", path, n, w)
				}
			}
		}
	}
}

func TestTheModuleReplacesNothing(t *testing.T) {
	for line := range strings.Lines(string(read(t, "go.mod"))) {
		if strings.HasPrefix(strings.TrimSpace(line), "replace") {
			t.Errorf("go.mod: %q: whoever installs the module gets another one", strings.TrimSpace(line))
		}
	}
}

func TestScriptsStopAtTheFirstError(t *testing.T) {
	for _, path := range files(t, false) {
		text := string(read(t, path))
		if !strings.HasPrefix(text, "#!") || !strings.Contains(text[:min(len(text), 40)], "sh\n") {
			continue
		}
		if !strings.Contains(text, "\nset -euo pipefail\n") && !strings.Contains(text, "\nset -eu\n") {
			t.Errorf("%s lacks set -euo pipefail", path)
		}
		info, err := os.Stat(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode()&0o111 == 0 {
			t.Errorf("%s is not executable", path)
		}
	}
}

func TestTheREADMEsKeepStep(t *testing.T) {
	if _, err := os.Stat(filepath.Join(root, "README.md")); err != nil {
		t.Skip("there is no README.md yet")
	}
	english, chinese := outline(read(t, "README.md")), outline(read(t, "README.zh-CN.md"))
	if !slices.Equal(english, chinese) {
		t.Errorf("README.md and README.zh-CN.md differ in headings, tables or commands:\n%s\n%s",
			strings.Join(english, "\n"), strings.Join(chinese, "\n"))
	}
}

// outline gives what two translations of a document must share: the levels of its headings, the number of rows of its
// tables, and the commands in its code blocks.
func outline(text []byte) []string {
	var list []string
	code := false
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "```"):
			code = !code
			list = append(list, line)
		case code:
			command, _, _ := strings.Cut(line, "#") // comments are translated
			if c := strings.TrimSpace(command); isCommand(c) {
				list = append(list, c)
			}
		case strings.HasPrefix(line, "#"):
			level, _, _ := strings.Cut(line, " ")
			list = append(list, level)
		case strings.HasPrefix(line, "|"):
			list = append(list, "table row")
		}
	}
	return list
}

// isCommand tells a line that a reader would type from a picture or an output.
func isCommand(line string) bool {
	for _, start := range []string{"make ", "turnout ", "bin/turnout ", "sudo ", "kubectl ", "helm ", "go ", "git "} {
		if strings.HasPrefix(line, start) {
			return true
		}
	}
	return false
}
