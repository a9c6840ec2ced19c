// Package manifest reads Services, EndpointSlices, Endpoints and this machine's Node from a directory of YAML and JSON
// files, and watches it. It decides which files count, what of a broken file stays in force, and which of two
// documents that describe the same object wins; what an object means is for package convert to say.
//
// It must not import client-go or package forward, and it does not log: what a user should know is a Finding on the
// file or on the object. Read Watch first, then scan in directory.go and
// settle in index.go.
package manifest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/turnout-proxy/turnout/internal/model"
)

// The reasons of the findings on files.
const (
	// Unreadable: a file or the directory cannot be read.
	Unreadable = "Unreadable"
	// TooLarge: a file is larger than maxFileBytes.
	TooLarge = "TooLarge"
	// TooManyObjects: the directory holds more than maxObjects objects.
	TooManyObjects = "TooManyObjects"
	// InvalidDocument: a document is not YAML or JSON, or not of the form that its kind has.
	InvalidDocument = "InvalidDocument"
	// UnknownField: a document has a field that its kind does not know, or has one twice.
	UnknownField = "UnknownField"
	// IgnoredKind: a document is of a kind that a Service proxy does not read.
	IgnoredKind = "IgnoredKind"
	// DuplicateObject: an object is described more than once.
	DuplicateObject = "DuplicateObject"
	// EndpointsIgnored: a Service has both Endpoints and EndpointSlices.
	EndpointsIgnored = "EndpointsIgnored"
	// NotWatched: the kernel refuses to report changes, so they are found by looking at intervals.
	NotWatched = "NotWatched"
)

// The bounds of what is read.
const (
	maxFileBytes = 16 << 20
	maxObjects   = 100_000
)

// How long changes are collected and how often the directory is looked at without any.
const (
	// quiet is how long no further change may come before the directory is read; an editor's or a package manager's
	// writes come much closer together.
	quiet = 30 * time.Millisecond
	// patience is how long a steady stream of changes may hold the reading up.
	patience = 500 * time.Millisecond
	// rescan finds what no notification tells: changes behind symbolic links, on network file systems, or after the
	// kernel's queue overflowed.
	rescan = 10 * time.Second
	// poll replaces rescan while the directory is missing or cannot be watched.
	poll = 250 * time.Millisecond
)

// Load reads the directory once and gives what Watch would send first, without the Synced event. It is an error if the
// directory cannot be read; anything wrong inside it is a Finding.
func Load(dir, nodeName string) ([]model.Event, error) {
	d := newDirectory(dir, nodeName)
	if err := d.check(); err != nil {
		return nil, err
	}
	events, _ := d.scan(scope{full: true, force: true})
	return events, nil
}

// Watch reads the directory, sends everything in it followed by Synced, and then sends each object that changes or goes
// until the context is done. Only the Node with the given name is sent. All that one reading finds goes to the sink in
// one call.
//
// It is an error if the directory cannot be read at the start. Later that is a Finding, and what was known stays in
// force until the directory is back.
func Watch(ctx context.Context, dir, nodeName string, sink model.Sink) error {
	d := newDirectory(dir, nodeName)
	if err := d.check(); err != nil {
		return err
	}
	w := &watcher{directory: d, sink: sink}
	defer w.close()
	w.follow(&scope{})
	return w.run(ctx)
}

// A watcher joins the notifications of the kernel with the clock and decides when the directory is read.
type watcher struct {
	directory *directory
	sink      model.Sink
	notify    *fsnotify.Watcher // nil while the kernel refuses
	followed  os.FileInfo       // the directory that notify reports on; nil for none
	scanned   time.Time         // when the whole directory was last looked at
}

// run is the loop of Watch.
func (w *watcher) run(ctx context.Context) error {
	wait := time.NewTimer(w.read(scope{full: true, force: true}, true))
	defer wait.Stop()
	hint := scope{names: map[string]bool{}}
	var since time.Time // when the first change came that was not read yet; zero for none
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-wait.C:
			since = time.Time{}
			hint.full = hint.full || time.Since(w.scanned) >= rescan
			w.follow(&hint)
			wait.Reset(w.read(hint, false))
			hint = scope{names: map[string]bool{}}
			continue
		case e := <-w.events():
			if !hint.note(e.Name, w.directory.path) {
				continue
			}
		case err := <-w.errors():
			// Some notifications were lost, or there may be more wrong: whatever it is, a full reading makes up for it.
			_ = err
			hint.full, hint.force = true, true
		}
		if since.IsZero() {
			since = time.Now()
		}
		wait.Reset(min(quiet, max(0, patience-time.Since(since))))
	}
}

// note takes a notification and tells whether it matters.
func (s *scope) note(path, dir string) bool {
	name := filepath.Base(path)
	switch {
	case isManifest(name):
		s.names[name] = true
	case filepath.Clean(path) == filepath.Clean(dir), strings.HasPrefix(name, ".."):
		// The directory itself, or what is behind the symbolic links of a mounted ConfigMap.
		s.full = true
	default:
		return false
	}
	return true
}

// read looks at the directory, sends what changed and tells when to look again at the latest.
func (w *watcher) read(s scope, first bool) time.Duration {
	events, again := w.directory.scan(s)
	if s.full {
		w.scanned = time.Now()
	}
	if first {
		events = append(events, model.Event{Synced: true})
	}
	if len(events) > 0 {
		w.sink(events...)
	}
	next := max(0, rescan-time.Since(w.scanned))
	if w.followed == nil {
		next = poll
	}
	if again > 0 {
		next = min(next, again)
	}
	return next
}

// follow makes the kernel report on the directory that the path leads to now. If it may be another one than before, or
// if the kernel does not report, the next reading must be a full one.
func (w *watcher) follow(s *scope) {
	now, err := os.Stat(w.directory.path)
	if err == nil && w.followed != nil && os.SameFile(now, w.followed) {
		return
	}
	s.full = true
	if w.notify != nil && w.followed != nil {
		// The old directory may be gone, and its watch with it.
		_ = w.notify.Remove(w.directory.path)
	}
	w.followed = nil
	if err != nil {
		return
	}
	if w.notify == nil {
		if w.notify, err = fsnotify.NewWatcher(); err != nil {
			w.directory.notWatched(err)
			return
		}
	}
	if err := w.notify.Add(w.directory.path); err != nil {
		w.directory.notWatched(err)
		return
	}
	w.followed = now
	w.directory.notWatched(nil)
}

// events is never ready while there is nothing to be notified by.
func (w *watcher) events() <-chan fsnotify.Event {
	if w.notify == nil {
		return nil
	}
	return w.notify.Events
}

func (w *watcher) errors() <-chan error {
	if w.notify == nil {
		return nil
	}
	return w.notify.Errors
}

func (w *watcher) close() {
	if w.notify != nil {
		// Nothing is lost when closing fails: the process has no further use for the descriptor.
		_ = w.notify.Close()
	}
}

// check tells whether the directory can be read at all.
func (d *directory) check() error {
	info, err := os.Stat(d.path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("manifest directory %s does not exist: create it or correct the path", d.path)
	case err != nil:
		return fmt.Errorf("manifest directory: %w", err)
	case !info.IsDir():
		return fmt.Errorf("manifest directory %s is a file: name the directory that holds it", d.path)
	}
	if _, err := os.ReadDir(d.path); err != nil {
		return fmt.Errorf("manifest directory: %w", err)
	}
	return nil
}
