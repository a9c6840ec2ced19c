package manifest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A scope says what a reading looks at.
type scope struct {
	// full means the whole directory, otherwise only the named files are looked at.
	full bool
	// force means that files are read even if they look unchanged; named files always are.
	force bool
	names map[string]bool
}

// A directory is the last known state of the manifests, and of what was sent of them.
type directory struct {
	path   string
	reader *reader
	now    func() time.Time
	files  map[string]*file
	index  *index
	// pending are files that must be looked at again soon.
	pending map[string]bool
	// crowded tells that some object found no room in the index.
	crowded bool
	// unreadable is what is wrong with the directory itself, unwatched why the kernel does not report on it.
	unreadable, unwatched *model.Finding
	// unreported are the files whose findings may have changed; reported are the findings that the receiver knows.
	unreported map[string]bool
	reported   map[string][]model.Finding
}

// A file is the last good state of one file and what is wrong with its present state.
type file struct {
	signature signature
	// settled tells that the signature was taken so long after the last write that a later write must change it.
	settled bool
	// heldSince is when the reading was first put off; zero while it is not.
	heldSince time.Time
	cache     map[[sha256.Size]byte]*decoded
	// objects are what the file describes, claimed those that found room in the index.
	objects, claimed []placed
	findings         report
	notes            map[key][]note
}

// setNotes replaces the notes on one object.
func (f *file) setNotes(k key, list []note) {
	if len(list) == 0 {
		delete(f.notes, k)
		return
	}
	if f.notes == nil {
		f.notes = map[key][]note{}
	}
	f.notes[k] = list
}

// A signature changes whenever a file's content may have changed.
type signature struct {
	dev, inode        uint64
	size              int64
	modified, changed int64 // unix nanoseconds
}

// settleTime is above the granularity of any file system's times: a file that was written less than this ago may be
// written again without a trace in its signature. It also is how long an emptied file may wait for its new content.
const settleTime = 250 * time.Millisecond

// holdAtMost is how long a file may be written to without a pause before it is read as it is.
const holdAtMost = 5 * time.Second

func newDirectory(path, nodeName string) *directory {
	return &directory{
		path: path, reader: newReader(nodeName), now: time.Now, files: map[string]*file{}, index: newIndex(),
		pending: map[string]bool{}, unreported: map[string]bool{}, reported: map[string][]model.Finding{},
	}
}

// notWatched notes why the kernel does not report changes; nil says that it does.
func (d *directory) notWatched(err error) {
	d.unwatched = nil
	if err != nil {
		d.unwatched = &model.Finding{
			Severity: model.Warning, Kind: "File", Object: d.path, Reason: NotWatched,
			Message: fmt.Sprintf("changes cannot be watched (%v), the directory is read every %v instead: "+
				"raise fs.inotify.max_user_instances or max_user_watches", err, poll),
		}
	}
}

// scan reads the files that changed and gives the events that bring the receiver up to date, and when to look again at
// the latest at those that were not at rest (0: there are none).
func (d *directory) scan(s scope) ([]model.Event, time.Duration) {
	look := map[string]bool{}
	maps.Copy(look, s.names)
	maps.Copy(look, d.pending)
	clear(d.pending)
	found, err := d.find(s.full)
	d.unreadable = nil
	if err != nil {
		d.unreadable = &model.Finding{
			Severity: model.Error, Kind: "File", Object: d.path, Reason: Unreadable,
			Message: fmt.Sprintf("%v: the objects last read from the directory stay in force: put it back", err),
		}
		return d.report(nil), poll
	}
	if s.full {
		for name := range d.files {
			if !found[name] {
				d.drop(name)
			}
		}
		look = found
	}
	var again time.Duration
	for _, name := range slices.Sorted(maps.Keys(look)) {
		if wait := d.visit(name, s.force || s.names[name]); wait > 0 {
			d.pending[name] = true
			if again == 0 || wait < again {
				again = wait
			}
		}
	}
	d.makeRoom()
	return d.report(d.settle()), again
}

// find lists the files that count, or only makes sure that the directory is there.
func (d *directory) find(full bool) (map[string]bool, error) {
	if !full {
		_, err := os.Stat(d.path)
		return nil, err //nolint:wrapcheck // the error names operation and path, and becomes a finding
	}
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return nil, err //nolint:wrapcheck // as above
	}
	found := map[string]bool{}
	for _, e := range entries {
		if isManifest(e.Name()) {
			found[e.Name()] = true
		}
	}
	return found, nil
}

// claim files what a file describes now.
func (d *directory) claim(name string, f *file) {
	before := f.claimed
	refused := d.index.replace(name, before, f.objects)
	f.claimed = f.objects
	for k := range f.notes {
		f.setNotes(k, nil)
		d.index.touched[k] = struct{}{}
	}
	d.unreported[name] = true
	if len(refused) == 0 {
		return
	}
	d.crowded = true
	f.claimed = slices.DeleteFunc(slices.Clone(f.objects), func(p placed) bool { return slices.Contains(refused, p) })
	at := place{file: filepath.Join(d.path, name), line: refused[0].line}
	f.setNotes(key{}, []note{noteAt(model.Error, TooManyObjects, at, fmt.Sprintf(
		"more than %d objects, %d of this file are ignored", d.index.room, len(refused)))})
}

// makeRoom files what found no room earlier, if there is some now.
func (d *directory) makeRoom() {
	if !d.crowded || len(d.index.claims) >= d.index.room {
		return
	}
	d.crowded = false
	for _, name := range slices.Sorted(maps.Keys(d.files)) {
		if f := d.files[name]; len(f.claimed) < len(f.objects) {
			d.claim(name, f)
		}
	}
}

// drop forgets a file that is gone.
func (d *directory) drop(name string) {
	f := d.files[name]
	if f == nil {
		return
	}
	d.index.replace(name, f.claimed, nil)
	delete(d.files, name)
	d.unreported[name] = true
}

// report adds what changed in the findings on files to the events.
func (d *directory) report(events []model.Event) []model.Event {
	now := map[string][]model.Finding{d.path: nil}
	for _, f := range []*model.Finding{d.unreadable, d.unwatched} {
		if f != nil {
			now[d.path] = append(now[d.path], *f)
		}
	}
	for name := range d.unreported {
		now[filepath.Join(d.path, name)] = nil
		if f := d.files[name]; f != nil {
			now[filepath.Join(d.path, name)] = f.report()
		}
	}
	clear(d.unreported)
	for _, path := range slices.Sorted(maps.Keys(now)) {
		if slices.Equal(d.reported[path], now[path]) {
			continue
		}
		events = append(events, model.Event{File: path, Findings: now[path]})
		d.reported[path] = now[path]
		if len(now[path]) == 0 {
			delete(d.reported, path)
		}
	}
	return events
}

// isManifest tells by its name whether a file counts. Hidden files, editors' backups and half-written files do not, nor
// does the hidden directory behind the symbolic links of a mounted ConfigMap.
func isManifest(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(name, ".")
	}
	return false
}

// visit brings one file up to date and tells when it must be looked at again (0: when something happens).
func (d *directory) visit(name string, force bool) (again time.Duration) {
	path := filepath.Join(d.path, name)
	info, err := os.Stat(path) // follows symbolic links
	if errors.Is(err, os.ErrNotExist) {
		// If it is the directory that went meanwhile, its files keep their last state.
		if _, err := os.Stat(d.path); err == nil {
			d.drop(name)
		}
		return 0
	}
	f := d.files[name]
	if f == nil {
		f = &file{}
		d.files[name] = f
	}
	switch {
	case err != nil:
		f.refuse(path, Unreadable, err.Error())
		d.unreported[name] = true
		return 0
	case info.IsDir():
		d.drop(name)
		return 0
	case !info.Mode().IsRegular():
		f.refuse(path, Unreadable, "it is neither a file nor a link to one")
		d.unreported[name] = true
		return 0
	}
	sig := signatureOf(info)
	if sig == f.signature && f.settled && !force {
		return 0
	}
	now := d.now()
	age := now.Sub(info.ModTime()).Abs()
	if wait := f.hold(sig.size, age, now); wait > 0 {
		return wait
	}
	data, err := readFile(path)
	d.unreported[name] = true
	switch {
	case errors.Is(err, errTooLarge):
		f.refuse(path, TooLarge, err.Error())
	case err != nil:
		f.refuse(path, Unreadable, err.Error())
	default:
		f.update(path, data, d.reader)
		d.claim(name, f)
		f.signature, f.settled = sig, age >= settleTime
		if !f.settled {
			return settleTime
		}
	}
	return 0
}

// hold tells how long to wait with a file that seems to be half written: what is not in it yet would count as removed.
// A file that never comes to rest is read after holdAtMost.
func (f *file) hold(size int64, age time.Duration, now time.Time) time.Duration {
	var wait time.Duration
	switch {
	case len(f.objects) == 0:
	case size == 0 && age < settleTime:
		wait = settleTime
	case age < quiet:
		wait = quiet
	}
	if wait == 0 || !f.heldSince.IsZero() && now.Sub(f.heldSince) > holdAtMost {
		f.heldSince = time.Time{}
		return 0
	}
	if f.heldSince.IsZero() {
		f.heldSince = now
	}
	return wait
}

// signatureOf takes what the kernel tells of a file's identity and its last change.
func signatureOf(info os.FileInfo) signature {
	sig := signature{size: info.Size(), modified: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		sig.dev, sig.inode, sig.changed = st.Dev, st.Ino, st.Ctim.Nano()
	}
	return sig
}

var errTooLarge = fmt.Errorf("it is larger than %d MiB: split it", maxFileBytes>>20)

// readFile reads a whole file, or nothing of one that is too large.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err //nolint:wrapcheck // the error names operation and file, and becomes a finding
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err //nolint:wrapcheck // as above
	}
	if len(data) > maxFileBytes {
		return nil, errTooLarge
	}
	return data, nil
}

// refuse keeps a file's last good objects and says why its present content is not used.
func (f *file) refuse(path, reason, why string) {
	f.signature, f.settled = signature{}, false
	f.findings = report{}
	f.findings.add(model.Finding{
		Severity: model.Error, Kind: "File", Object: path, Reason: reason,
		Message: path + ": " + why + "; the objects last read from it stay in force",
	})
}

// update takes a file's new content. Objects of documents that cannot be read keep their last good state.
func (f *file) update(path string, data []byte, r *reader) {
	last, cache := f.objects, f.cache
	f.objects, f.findings, f.cache = nil, report{}, map[[sha256.Size]byte]*decoded{}
	present, broken := map[key]bool{}, map[key]bool{}
	unknown := false
	for _, doc := range documents(data) {
		sum := sha256.Sum256(doc.text)
		dec := cache[sum]
		if dec == nil {
			dec = r.decode(doc.text)
		}
		f.cache[sum] = dec
		for _, o := range dec.objects {
			f.objects = append(f.objects, placed{object: o, line: doc.line})
			present[o.key] = true
		}
		for _, k := range dec.broken {
			broken[k] = true
		}
		unknown = unknown || dec.unknown
		for _, p := range dec.problems {
			f.note(path, p, doc.line)
		}
	}
	for _, o := range last {
		if !present[o.key] && (unknown || broken[o.key]) {
			f.objects = append(f.objects, o)
		}
	}
}

// note adds a document's problem to the file's findings.
func (f *file) note(path string, p problem, line int) {
	message := fmt.Sprintf("%s:%d: %s", path, line+p.line, p.message)
	if p.severity == model.Error {
		message += "; what was last read of it stays in force"
	}
	f.findings.add(model.Finding{Severity: p.severity, Kind: "File", Object: path, Reason: p.reason, Message: message})
}
