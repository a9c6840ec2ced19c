package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// A Cmd is an exec.Cmd whose process runs in a host's namespace. Use its own methods to start it; the fields are those of
// exec.Cmd. The process is killed when the context ends, when the Lab is closed, or when this process dies.
type Cmd struct {
	*exec.Cmd
	host *Host

	once sync.Once
	// thread ends the goroutine whose thread is the process's parent.
	thread chan struct{}
	// exited is closed once Wait has returned.
	exited chan struct{}
	err    error
}

// Command prepares a program to be run in the host's namespace. Its environment has XTABLES_LOCKFILE set to a file of the
// Lab, so that iptables commands in two Labs do not wait for each other.
func (h *Host) Command(ctx context.Context, name string, args ...string) *Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.Env = append(os.Environ(), fmt.Sprintf("XTABLES_LOCKFILE=/proc/%d/fd/%d", os.Getpid(), h.lab.lockFile.Fd()))
	return &Cmd{Cmd: c, host: h, thread: make(chan struct{}), exited: make(chan struct{})}
}

// Start starts the process. Wait must be called afterwards.
func (c *Cmd) Start() error {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started := make(chan error)
	go func() {
		// The kernel sends the death signal when the thread that started the process ends, so this one must stay.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.host.Do(c.Cmd.Start)
		started <- err
		if err == nil {
			<-c.thread
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s on %s: %w", c.Path, c.host.Name, err)
	}
	c.host.lab.mu.Lock()
	defer c.host.lab.mu.Unlock()
	c.host.lab.commands[c] = struct{}{}
	return nil
}

// Wait waits for the process to end. It may be called by several goroutines, once the process was started.
func (c *Cmd) Wait() error {
	c.once.Do(func() {
		c.err = c.Cmd.Wait()
		close(c.thread)
		c.host.lab.mu.Lock()
		delete(c.host.lab.commands, c)
		c.host.lab.mu.Unlock()
		close(c.exited)
	})
	<-c.exited
	return c.err
}

// Run starts the process and waits for it.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// CombinedOutput runs the process and gives what it wrote on standard output and standard error.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	if c.Stdout != nil || c.Stderr != nil {
		return nil, errors.New("standard output or standard error is set already")
	}
	var b bytes.Buffer
	c.Stdout, c.Stderr = &b, &b
	err := c.Run()
	return b.Bytes(), err
}

// Output runs the process and gives what it wrote on standard output. Standard error is part of the error, if there is one.
func (c *Cmd) Output() ([]byte, error) {
	if c.Stdout != nil || c.Stderr != nil {
		return nil, errors.New("standard output or standard error is set already")
	}
	var out, diagnosis bytes.Buffer
	c.Stdout, c.Stderr = &out, &diagnosis
	if err := c.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("%w: %s", err, bytes.TrimSpace(diagnosis.Bytes()))
	}
	return out.Bytes(), nil
}

// stop kills the process and waits for its end.
func (c *Cmd) stop() {
	// An error means that it has ended already; Wait gives the process's own error to whoever asks.
	_ = c.Process.Kill()
	_ = c.Wait()
}
