package manifest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A scope says which files are to be read even if they look unchanged.
type scope struct {
	all   bool
	names map[string]bool
}

// A directory is the last known state of the manifests, and of what was sent of them.
type directory struct {
	path   string
	reader *reader
	now    func() time.Time
	files  map[string]*file
	// unreadable is what is wrong with the directory itself, unwatched why the kernel does not report on it.
	unreadable, unwatched *model.Finding
	sent                  map[key]model.Event
	sentFiles             map[string][]model.Finding
}

// A file is the last good state of one file and what is wrong with its present state.
type file struct {
	signature signature
	// settled tells that the signature was taken so long after the last write that a later write must change it.
	settled bool
	// heldSince is when the reading was first put off; zero while it is not.
	heldSince time.Time
	cache     map[[sha256.Size]byte]*decoded
	objects   []object
	findings  report
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
		path:      path,
		reader:    newReader(nodeName),
		now:       time.Now,
		files:     map[string]*file{},
		sent:      map[key]model.Event{},
		sentFiles: map[string][]model.Finding{},
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

// scan reads the files that changed and gives the events that bring the receiver up to date, and when to scan again if
// that must be soon (0: no need).
func (d *directory) scan(force scope) ([]model.Event, time.Duration) {
	var again time.Duration
	entries, err := os.ReadDir(d.path)
	d.unreadable = nil
	if err != nil {
		d.unreadable = &model.Finding{
			Severity: model.Error, Kind: "File", Object: d.path, Reason: Unreadable,
			Message: fmt.Sprintf("%v: the objects last read from the directory stay in force: put it back", err),
		}
		return d.changes(), poll
	}
	seen := map[string]bool{}
	for _, e := range entries {
		if name := e.Name(); isManifest(name) {
			seen[name] = true
			if soon := d.visit(name, force.all || force.names[name]); soon > 0 && (again == 0 || soon < again) {
				again = soon
			}
		}
	}
	for name := range d.files {
		if !seen[name] {
			delete(d.files, name)
		}
	}
	return d.changes(), again
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
		delete(d.files, name)
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
		return 0
	case info.IsDir():
		delete(d.files, name)
		return 0
	case !info.Mode().IsRegular():
		f.refuse(path, Unreadable, "it is neither a file nor a link to one")
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
	switch {
	case errors.Is(err, errTooLarge):
		f.refuse(path, TooLarge, err.Error())
	case err != nil:
		f.refuse(path, Unreadable, err.Error())
	default:
		f.update(path, data, d.reader)
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
			o.line = doc.line
			f.objects = append(f.objects, o)
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
