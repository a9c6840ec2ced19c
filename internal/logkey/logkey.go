// Package logkey names the keys of log lines, one for each concept, so that a search finds every line about a thing
// whichever part wrote it. It decides nothing else and must not import any other package of the product.
package logkey

// The keys. A value under the same key has the same form everywhere: Service is "namespace/name", PortName
// "namespace/name:port/protocol", Family "IPv4" or "IPv6", Duration a time.Duration, Err an error.
const (
	Service   = "service"
	PortName  = "portName"
	Frontend  = "frontend"
	Endpoint  = "endpoint"
	Backend   = "backend"
	Family    = "family"
	Node      = "node"
	Kind      = "kind"
	Object    = "object"
	Step      = "step"
	Steps     = "steps"
	Revision  = "revision"
	Attempt   = "attempt"
	Duration  = "duration"
	Reason    = "reason"
	Message   = "message"
	Err       = "err"
	Count     = "count"
	Bytes     = "bytes"
	Ports     = "ports"
	Address   = "address"
	Path      = "path"
	Plan      = "plan"
	Stack     = "stack"
	Version   = "version"
	Retry     = "retryIn"
	Since     = "since"
	Component = "component"
)
