package forward

import (
	"net/netip"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Packet is the first packet of a connection, as the node sees it before any translation.
type Packet struct {
	Src, Dst netip.AddrPort
	Proto    model.Protocol
	// In is the name of the interface it came in on; empty for a packet that this machine sends itself.
	In string
}

// An Outcome is what a table does with a packet. Where the endpoint is chosen at random it holds every possible choice.
type Outcome struct {
	Do     Verdict
	Reason Reason
	// Port and Frontend tell which frontend decided; Port is zero when Do is Pass.
	Port     PortName
	Frontend Frontend
	// From is the class of client whose route was taken; 0 if no route was.
	From SourceClass
	// Choices are the endpoints that the connection may go to, in the pool's order.
	Choices []Choice
}

// A Choice is one endpoint that a connection may be sent to.
type Choice struct {
	Endpoint netip.AddrPort
	// SNAT tells that the endpoint sees this node's address instead of the client's.
	SNAT bool
}
