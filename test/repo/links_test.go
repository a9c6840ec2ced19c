package repo

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A link is one that a document has to something in the repository.
type link struct {
	from, to, anchor string
}

// links gives the links of a Markdown text that stay in the repository; code between fences has none.
func links(from string, text []byte) []link {
	target := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	var list []link
	fenced := false
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
		}
		if fenced {
			continue
		}
		for _, m := range target.FindAllStringSubmatch(line, -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			to := from
			if file != "" {
				to = path.Join(path.Dir(from), file)
			}
			list = append(list, link{from, to, anchor})
		}
	}
	return list
}

// anchors gives the names by which headings of a Markdown text can be linked to.
func anchors(text []byte) []string {
	dropped := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	var list []string
	for line := range strings.Lines(string(text)) {
		if head := strings.TrimLeft(line, "#"); head != line && strings.HasPrefix(head, " ") {
			name := dropped.ReplaceAllString(strings.ToLower(strings.TrimSpace(head)), "")
			list = append(list, strings.ReplaceAll(name, " ", "-"))
		}
	}
	return list
}

// documents gives the Markdown files of the repository.
func documents(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(files(t, false), func(p string) bool { return path.Ext(p) != ".md" })
}

func TestLinksInDocumentsLeadSomewhere(t *testing.T) {
	for _, doc := range documents(t) {
		for _, l := range links(doc, read(t, doc)) {
			if _, err := os.Stat(filepath.Join(root, l.to)); err != nil {
				t.Errorf("%s links to %s, which is not there", l.from, l.to)
				continue
			}
			if l.anchor != "" && !slices.Contains(anchors(read(t, l.to)), l.anchor) {
				t.Errorf("%s links to %s#%s, and there is no such heading", l.from, l.to, l.anchor)
			}
		}
	}
}

func TestLinksAndAnchorsAreFound(t *testing.T) {
	text := []byte("# What's `here`, now?\n\nSee [a](../b.md#c), [d](#e) and [f](https://example.org/).\n```\n[g](h)\n```\n")
	want := []link{{"docs/x.md", "b.md", "c"}, {"docs/x.md", "docs/x.md", "e"}}
	if diff := cmp.Diff(want, links("docs/x.md", text), cmp.AllowUnexported(link{})); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"whats-here-now"}, anchors(text)); diff != "" {
		t.Errorf("anchors (-want +got):\n%s", diff)
	}
}

func TestEveryConformanceScriptStandsInTheTable(t *testing.T) {
	const doc = "docs/CONFORMANCE.md"
	listed := map[string]int{}
	for _, l := range links(doc, read(t, doc)) {
		listed[l.to]++
	}
	for _, f := range files(t, false) {
		if path.Ext(f) == ".txtar" && path.Dir(f) == "test/scripts" && listed[f] != 1 {
			t.Errorf("%s stands %d times in %s; give it one row, in the words of its first comment", f, listed[f], doc)
		}
	}
}

func TestEveryReportThatTestsNameIsListed(t *testing.T) {
	const doc = "docs/REPORTS.md"
	number := regexp.MustCompile(`\bB\d{3}\b|Test(B\d{3})+`)
	rows := string(read(t, doc))
	for _, f := range files(t, false) {
		if ext := path.Ext(f); ext != ".txtar" && ext != ".go" || strings.HasPrefix(f, "test/repo/") {
			continue
		}
		for _, name := range number.FindAllString(string(read(t, f)), -1) {
			for _, b := range regexp.MustCompile(`B\d{3}`).FindAllString(name, -1) {
				if !strings.Contains(rows, "| "+b+" |") {
					t.Errorf("%s names report %s, which has no row in %s", f, b, doc)
				}
			}
		}
	}
}

func TestTestsThatDocumentsNameExist(t *testing.T) {
	declared := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	for _, f := range files(t, false) {
		if strings.HasSuffix(f, "_test.go") {
			for _, m := range function.FindAllSubmatch(read(t, f), -1) {
				declared[string(m[1])] = true
			}
		}
	}
	named := regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z0-9]\\w+)`")
	for _, doc := range documents(t) {
		for _, m := range named.FindAllSubmatch(read(t, doc), -1) {
			if !declared[string(m[1])] {
				t.Errorf("%s names %s, which does not exist", doc, m[1])
			}
		}
	}
}
