package ipvs

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/netlink"
)

// What an Op may meet besides the classes of package kernel.
var (
	// ErrExists: there is such a server or destination.
	ErrExists = errors.New("it is there already")
	// ErrMissing: there is no such server or destination.
	ErrMissing = errors.New("there is none")
	// ErrScheduler: the kernel does not know the scheduler and could not load it.
	ErrScheduler = errors.New("the kernel lacks the scheduler")
)

// StepError is how every function here reports a refusal.
type StepError = kernel.StepError

// explain says what an errno means for an Op. The kernel answers ESRCH if there is no such server, and ENOENT for a
// destination that is missing and for a scheduler that it does not know.
func explain(o Op, err error) error {
	step := &StepError{Op: o.Verb.String(), Object: o.object(), Err: err}
	scheduled := o.Verb == AddServer || o.Verb == EditServer
	switch {
	case errors.Is(err, unix.EEXIST):
		step.Err, step.Class = ErrExists, kernel.ErrConflict
		step.Reason = "it is there already, made by others meanwhile: list it and change it if it is ours"
	case errors.Is(err, unix.ENOENT) && scheduled:
		name := o.Properties.Scheduler
		step.Err, step.Class = ErrScheduler, kernel.ErrUnsupported
		step.Reason = "the kernel lacks the scheduler " + name + ": load the module ip_vs_" + name + ", or choose another one"
	case errors.Is(err, unix.ENOENT):
		step.Err = ErrMissing
		step.Reason = "there is no such destination, others have removed it: list them and add it if it is wanted"
	case errors.Is(err, unix.ESRCH):
		step.Err = ErrMissing
		step.Reason = "there is no such virtual server, others have removed it: list them and add it if it is wanted"
	case errors.Is(err, unix.EAFNOSUPPORT):
		step.Class, step.Reason = kernel.ErrUnsupported, "the kernel has IPVS without IPv6: use another mode for IPv6"
	default:
		return failure(step.Op, step.Object, err)
	}
	return step
}

// invalid is the refusal of an Op by check.
func invalid(o Op, err error) error {
	return &StepError{Op: o.Verb.String(), Object: o.object(), Reason: err.Error(), Class: kernel.ErrInvalid}
}

// failure gives an error its object, and what can be told of it without knowing what was asked.
func failure(op, object string, err error) error {
	step := &StepError{Op: op, Object: object, Err: err}
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		step.Class, step.Reason = kernel.ErrUnsupported, "the capability NET_ADMIN is missing: run with it"
	case errors.Is(err, fs.ErrNotExist):
		step.Class, step.Reason = kernel.ErrUnsupported, "the kernel has no IPVS any more: load the module ip_vs and start again"
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE):
		step.Class = kernel.ErrInvalid
	case errors.Is(err, netlink.ErrDisturbed), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBUSY),
		errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		step.Class = kernel.ErrBusy
	}
	return step
}
