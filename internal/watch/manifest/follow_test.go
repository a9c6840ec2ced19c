package manifest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func TestAnAtomicRenameIsOneChange(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("web", "10.96.0.1"))
	r := watch(t, dir)
	r.take(t, "synced")
	for n := 2; n < 6; n++ {
		write(t, dir, ".a.yaml.new", service("web", fmt.Sprintf("10.96.0.%d", n)))
		must(t, os.Rename(filepath.Join(dir, ".a.yaml.new"), filepath.Join(dir, "a.yaml")))
		want := fmt.Sprintf("put service shop/web [10.96.0.%d]", n)
		if diff := cmp.Diff([]string{want}, r.take(t, want)); diff != "" {
			t.Errorf("change %d (-want +got):\n%s", n, diff)
		}
	}
}

func TestEditorsFilesAreNotRead(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("web", "10.96.0.1"))
	for _, name := range []string{
		".a.yaml.swp", "a.yaml~", ".#a.yaml", "#a.yaml#", "4913", ".hidden.yaml", "a.yaml.tmp",
		"a.txt", "yaml",
	} {
		write(t, dir, name, service("other", "10.96.0.2"))
	}
	must(t, os.Mkdir(filepath.Join(dir, "dir.yaml"), 0o755))
	write(t, filepath.Join(dir, "dir.yaml"), "b.yaml", service("other", "10.96.0.2"))
	r := watch(t, dir)
	if diff := cmp.Diff([]string{"put service shop/web [10.96.0.1]", "synced"}, r.take(t, "synced")); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	// An editor moves the old version aside, writes the new one and removes the old.
	must(t, os.Rename(filepath.Join(dir, "a.yaml"), filepath.Join(dir, "a.yaml~")))
	write(t, dir, "a.yaml", service("web", "10.96.0.3"))
	must(t, os.Remove(filepath.Join(dir, "a.yaml~")))
	if diff := cmp.Diff([]string{"put service shop/web [10.96.0.3]"},
		r.take(t, "put service shop/web [10.96.0.3]")); diff != "" {
		t.Errorf("after a save (-want +got):\n%s", diff)
	}
}

func TestAMountedConfigMapIsFollowedThroughItsLinks(t *testing.T) {
	dir := t.TempDir()
	version := func(name, content string) {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		write(t, filepath.Join(dir, name), "a.yaml", content)
		must(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("..1", service("web", "10.96.0.1"))
	must(t, os.Symlink("..data/a.yaml", filepath.Join(dir, "a.yaml")))
	must(t, os.Symlink("..data/gone.yaml", filepath.Join(dir, "gone.yaml")))
	r := watch(t, dir)
	r.take(t, "put service shop/web [10.96.0.1]", "synced")
	version("..2", service("web", "10.96.0.2"))
	must(t, os.RemoveAll(filepath.Join(dir, "..1")))
	if diff := cmp.Diff([]string{"put service shop/web [10.96.0.2]"},
		r.take(t, "put service shop/web [10.96.0.2]")); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestADirectoryThatVanishesKeepsItsObjectsUntilItIsBack(t *testing.T) {
	tests := map[string]func(dir string) error{
		"removed": os.RemoveAll,
		"moved":   func(dir string) error { return os.Rename(dir, dir+".old") },
	}
	for name, remove := range tests {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "d")
			must(t, os.Mkdir(dir, 0o755))
			write(t, dir, "a.yaml", service("web", "10.96.0.1")+service("dns", "10.96.0.2"))
			r := watch(t, dir)
			r.take(t, "synced")
			must(t, remove(dir))
			got := r.take(t, "error File Unreadable: ")
			if slices.ContainsFunc(got, func(l string) bool { return strings.HasPrefix(l, "delete") }) {
				t.Errorf("objects were deleted: %q", got)
			}
			must(t, os.Mkdir(dir, 0o755))
			write(t, dir, "b.yaml", service("web", "10.96.0.1"))
			r.take(t, "delete service shop/dns []", "good again: d")
			write(t, dir, "b.yaml", service("web", "10.96.0.9"))
			r.take(t, "put service shop/web [10.96.0.9]")
		})
	}
}

func TestADirectoryReplacedAtOnceIsFollowed(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "d")
	must(t, os.Mkdir(dir, 0o755))
	write(t, dir, "a.yaml", service("web", "10.96.0.1"))
	r := watch(t, dir)
	r.take(t, "synced")
	next := filepath.Join(base, "next")
	must(t, os.Mkdir(next, 0o755))
	write(t, next, "a.yaml", service("web", "10.96.0.2"))
	must(t, os.Rename(dir, filepath.Join(base, "old")))
	must(t, os.Rename(next, dir))
	r.take(t, "put service shop/web [10.96.0.2]")
	write(t, dir, "a.yaml", service("web", "10.96.0.3"))
	r.take(t, "put service shop/web [10.96.0.3]")
}

func TestTheFirstFileByNameWinsAndTheOtherIsReported(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "b.yaml", service("web", "10.96.0.1"))
	r := watch(t, dir)
	r.take(t, "synced")
	write(t, dir, "a.yaml", service("web", "10.96.0.2"))
	r.take(t, "put service shop/web [10.96.0.2]",
		"error File DuplicateObject: b.yaml:2: Service shop/web is already described at ")
	write(t, dir, "c.yaml", service("web", "10.96.0.3"))
	r.take(t, "error File DuplicateObject: c.yaml:2: ")
	must(t, os.Remove(filepath.Join(dir, "a.yaml")))
	r.take(t, "put service shop/web [10.96.0.1]", "good again: b.yaml")
}

func TestABrokenFileDoesNotStopTheOthers(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", "{{{\n")
	write(t, dir, "b.yaml", service("web", "10.96.0.1"))
	write(t, dir, "c.json", `{"apiVersion": "v1", "kind": "Service",`)
	r := watch(t, dir)
	r.take(t, "put service shop/web [10.96.0.1]", "error File InvalidDocument: a.yaml:",
		"error File InvalidDocument: c.json:", "synced")
}

func TestAFileThatIsTooLargeKeepsItsObjects(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("web", "10.96.0.1"))
	r := watch(t, dir)
	r.take(t, "synced")
	write(t, dir, "a.yaml.new", service("web", "10.96.0.2")+"#"+strings.Repeat("x", maxFileBytes))
	must(t, os.Rename(filepath.Join(dir, "a.yaml.new"), filepath.Join(dir, "a.yaml")))
	got := r.take(t, "error File TooLarge: ")
	if len(got) != 1 || !strings.Contains(got[0], "larger than 16 MiB: split it") {
		t.Errorf("got %q, want the one finding", got)
	}
	write(t, dir, "a.yaml", service("web", "10.96.0.3"))
	r.take(t, "put service shop/web [10.96.0.3]", "good again: a.yaml")
}

func TestMoreObjectsThanTheBoundAreReportedAndIgnored(t *testing.T) {
	d := newDirectory(t.TempDir(), "n1")
	if d.index.room != 100_000 {
		t.Errorf("there is room for %d objects, want 100000", d.index.room)
	}
	d.index.room = 20
	for i := range 3 {
		var docs strings.Builder
		for j := range 10 {
			docs.WriteString(service(fmt.Sprintf("s%d-%d", i, j), "None"))
		}
		write(t, d.path, fmt.Sprintf("f%d.yaml", i), docs.String())
	}
	events, _ := d.scan(scope{full: true, force: true})
	var got []string
	objects := 0
	for _, e := range events {
		if e.Service != nil {
			objects++
			continue
		}
		got = append(got, line(e)...)
	}
	want := []string{"error File TooManyObjects: f2.yaml:2: more than 20 objects, 10 of this file are ignored"}
	if diff := cmp.Diff(want, got); diff != "" || objects != 20 {
		t.Errorf("%d objects were sent, want 20; findings (-want +got):\n%s", objects, diff)
	}
}

func TestAFloodOfFindingsIsBounded(t *testing.T) {
	d := newDirectory(t.TempDir(), "n1")
	write(t, d.path, "a.yaml", strings.Repeat("---\nkind: Pod\napiVersion: v1\n", 1000))
	events, _ := d.scan(scope{full: true, force: true})
	if len(events) != 1 || len(events[0].Findings) != maxFindings+1 {
		t.Fatalf("got %d events, want one with %d findings", len(events), maxFindings+1)
	}
	if last := events[0].Findings[maxFindings].Message; !strings.HasPrefix(last, "950 more findings on ") {
		t.Errorf("last finding %q, want the count of the rest", last)
	}
}

func TestSpecialFilesAreNeverOpened(t *testing.T) {
	dir := t.TempDir()
	must(t, syscall.Mkfifo(filepath.Join(dir, "a.yaml"), 0o644)) // opening it would wait for a writer
	write(t, dir, "b.yaml", service("web", "10.96.0.1"))
	r := watch(t, dir)
	r.take(t, "error File Unreadable: a.yaml: it is neither a file nor a link to one", "put service shop/web [10.96.0.1]",
		"synced")
}

func TestABurstOfWritesIsReadOnceItEnds(t *testing.T) {
	dir := t.TempDir()
	r := watch(t, dir)
	r.take(t, "synced")
	for i := range 200 {
		write(t, dir, fmt.Sprintf("f%03d.yaml", i), service(fmt.Sprintf("s%03d", i), "10.96.0.1"))
	}
	r.take(t, "put service shop/s000 ", "put service shop/s199 ")
}

func TestAFileThatIsBeingWrittenIsReadWhenItRestsOrAfterAWhile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	d := newDirectory(dir, "n1")
	now := time.Now()
	d.now = func() time.Time { return now }
	step := func(content string, age time.Duration, wantWait time.Duration, want ...string) {
		t.Helper()
		write(t, dir, "a.yaml", content)
		must(t, os.Chtimes(path, now.Add(-age), now.Add(-age)))
		events, wait := d.scan(scope{full: true, force: true})
		var got []string
		for _, e := range events {
			got = append(got, line(e)...)
		}
		if diff := cmp.Diff(want, got); diff != "" || wait != wantWait {
			t.Errorf("another look in %v, want %v; events (-want +got):\n%s", wait, wantWait, diff)
		}
	}
	web, dns := service("web", "10.96.0.1"), service("dns", "10.96.0.2")
	step(web+dns, 0, settleTime, "put service shop/dns [10.96.0.2]", "put service shop/web [10.96.0.1]")
	step(web, quiet/2, quiet)
	step("", settleTime/2, settleTime)
	step(web, quiet, settleTime, "delete service shop/dns []")
	step("", 0, settleTime)
	now = now.Add(holdAtMost)
	step("", 0, settleTime)
	now = now.Add(time.Millisecond)
	step("", 0, settleTime, "delete service shop/web []")
	step("", settleTime, 0)
}

func TestAnUnchangedFileIsNotReadAgain(t *testing.T) {
	dir := t.TempDir()
	d := newDirectory(dir, "n1")
	write(t, dir, "a.yaml", service("web", "10.96.0.1"))
	old := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(filepath.Join(dir, "a.yaml"), old, old))
	d.scan(scope{full: true, force: true})
	f := d.files["a.yaml"]
	before := f.objects[0].object
	d.scan(scope{full: true})
	if !f.settled {
		t.Fatal("an old file is not settled")
	}
	f.objects = nil // would be put back by a reading
	d.scan(scope{full: true})
	if f.objects != nil {
		t.Error("the unchanged file was read")
	}
	d.scan(scope{full: true, force: true})
	if f.objects[0].object != before {
		t.Error("the unchanged document was decoded again")
	}
}

func TestADirectoryThatCannotBeReadAtTheStartIsAnError(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "file", "")
	for path, want := range map[string]string{
		filepath.Join(dir, "absent"): "does not exist: create it or correct the path",
		filepath.Join(dir, "file"):   "is a file: name the directory that holds it",
	} {
		if _, err := Load(path, ""); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("load %s: error %v, want one with %q", path, err, want)
		}
		if err := Watch(t.Context(), path, "", nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("watch %s: error %v, want one with %q", path, err, want)
		}
	}
}

// FuzzAnyFileIsReadWithoutPanic also checks that the same content read twice gives the same.
func FuzzAnyFileIsReadWithoutPanic(f *testing.F) {
	f.Add([]byte(service("web", "10.96.0.1") + slice("web-1", "web", "10.0.0.1")))
	f.Add([]byte("---\n--- {}\n---x\n...\n"))
	f.Add([]byte("apiVersion: v1\nkind: ServiceList\nitems: [{kind: List, items: [null, 1, {}]}]\n"))
	f.Add([]byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"},
		"status":{"addresses":[{"type":"InternalIP"}]}}`))
	f.Add([]byte("apiVersion: v1\nkind: Endpoints\nmetadata: {name: a}\nsubsets: [{addresses: [{}], ports: [{}]}]\n"))
	f.Add([]byte("a: &a [x]\nb: [*a, *a]\n\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := newReader("n1")
		read := func() (lines []string) {
			f := &file{}
			f.update("a.yaml", data, r)
			d := newDirectory("/nonexistent", "n1")
			d.files["a.yaml"] = f
			d.claim("a.yaml", f)
			for _, e := range d.report(d.settle()) {
				lines = append(lines, line(e)...)
			}
			return lines
		}
		if diff := cmp.Diff(read(), read()); diff != "" {
			t.Errorf("two readings differ:\n%s", diff)
		}
		total := 0
		for _, doc := range documents(data) {
			total += len(doc.text)
			if n := bytes.Count(data, []byte("\n")) + 1; doc.line < 1 || doc.line > n {
				t.Errorf("a document starts at line %d of %d", doc.line, n)
			}
		}
		if total > len(data) {
			t.Errorf("documents have %d bytes of a file of %d", total, len(data))
		}
	})
}
