// Package health answers the health questions of load balancers and of the node's own supervisor: whether the proxy
// keeps up (/healthz, /livez), and how many endpoints of a Service are on this node (health check node ports). It
// decides what healthy means; it must not import loop, backend or Kubernetes types.
package health

import "github.com/turnout-proxy/turnout/internal/model"

// A Service is one that has a health check port.
type Service struct {
	Name model.Name
	// Port is spec.healthCheckNodePort.
	Port uint16
	// LocalReady counts the addresses on this node that have a ready endpoint, of one IP family.
	LocalReady int
}
