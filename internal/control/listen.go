// Package control is how ls and trace ask a running daemon: a unix socket for root alone, with a small HTTP and JSON
// interface on it. It decides who may ask, how much and for how long; the answers come from a Daemon.
//
// It must not import the loop, a backend or the command line. Read Listen, then server.go and client.go.
package control

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxPath is the longest path of a socket: what fits into the kernel's struct sockaddr_un (108 bytes with the final
// zero, see unix(7)), less the suffix under which it is made.
const maxPath = 107 - len(newSuffix)

// newSuffix is under what name a socket is made, before it takes its place with the right permissions.
const newSuffix = ".new"

// lockSuffix is added to the socket's name for the file that is locked.
const lockSuffix = ".lock"

// ErrInUse tells that another process answers on the socket.
var ErrInUse = errors.New("another daemon is running")

// A Listener is a socket that only root, or the user that runs this process, can talk to. Close removes it.
type Listener struct {
	*net.UnixListener
	path string
	lock *os.File
	once sync.Once
}

// Listen makes the socket, and its directory (mode 0700) if it is absent. A socket that a dead process left is
// replaced. If a live process holds it the error is ErrInUse.
func Listen(path string) (*Listener, error) {
	if len(path) > maxPath {
		return nil, fmt.Errorf("socket path %s has %d bytes, more than the %d that the system allows; give a shorter "+
			"--socket", path, len(path), maxPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the socket's directory: %w", err)
	}
	lock, err := acquire(path + lockSuffix)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	ln, err := bind(path)
	if err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return &Listener{UnixListener: ln, path: path, lock: lock}, nil
}

// How long, and how often, a lock that is held is tried for. A daemon that was killed while it started a tool leaves a
// process behind that shares the lock, and the socket too, until it has become the tool; that takes milliseconds.
const (
	lockPatience = 300 * time.Millisecond
	lockInterval = 10 * time.Millisecond
)

// acquire takes a lock that ends with the process: two daemons that start together cannot both replace a dead one's
// socket.
func acquire(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	deadline := time.Now().Add(lockPatience)
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		case time.Now().After(deadline):
			_ = f.Close()
			return nil, ErrInUse
		}
		time.Sleep(lockInterval)
	}
}

// bind puts a socket at path. It appears there complete, with its permissions, and replaces a dead one.
func bind(path string) (*net.UnixListener, error) {
	if err := checkPlace(path); err != nil {
		return nil, err
	}
	temporary := path + newSuffix
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("clear the way: %w", err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	ln.SetUnlinkOnClose(false)
	if err = os.Chmod(temporary, 0o600); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		_ = ln.Close()
		_ = os.Remove(temporary)
		return nil, fmt.Errorf("put in place: %w", err)
	}
	return ln, nil
}

// checkPlace refuses to replace what is not a socket, or a socket on which somebody answers without our lock.
func checkPlace(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look: %w", err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return errors.New("something that is not a socket is there; remove it or give another --socket")
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = conn.Close()
		return ErrInUse
	}
	return nil
}

// Accept waits for a client that may ask; others are hung up on.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return nil, err //nolint:wrapcheck // a listener hands on what the one below says
		}
		if allowed(conn) {
			return conn, nil
		}
		_ = conn.Close()
	}
}

// allowed tells whether the process at the other end belongs to root or to our own user. The permissions of the socket
// say the same, unless somebody changed them.
func allowed(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return false
	}
	return permitted(cred.Uid, os.Geteuid())
}

func permitted(peer uint32, own int) bool { return peer == 0 || int64(peer) == int64(own) }

// Close stops listening and removes the socket. It can be called again.
func (l *Listener) Close() error {
	var err error
	l.once.Do(func() {
		err = errors.Join(os.Remove(l.path), l.UnixListener.Close(), l.lock.Close())
	})
	return err
}
