package backendtest

import (
	"testing"

	"github.com/turnout-proxy/turnout/internal/forward"
)

type prober struct{}

func (p *prober) conversation(r *run, c command) error { return nil }
func (p *prober) become(t testing.TB, s settings) error { return nil }
func (p *prober) serve(t *forward.Table)                {}
func (p *prober) forget(r *run)                         {}
func (p *prober) packet(r *run, c command, k forward.Packet, o forward.Outcome) {}
func runKernel(t *testing.T, m Mode)                    {}
