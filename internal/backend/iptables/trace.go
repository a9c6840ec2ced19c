package iptables

import (
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
)

// Trace implements backend.Backend.
func (b *Backend) Trace(p forward.Packet) (backend.Trace, error) {
	return trace(b.c.want, b.c.opt, &b.c.ctx, p)
}

// Trace follows a packet through the tables as they were read from the kernel. Of c it needs the host's addresses.
func (o *Observation) Trace(c *forward.Context, p forward.Packet) (backend.Trace, error) {
	return trace(o.Program(), o.opt, c, p)
}

func trace(p ruleset.Program, opt Options, c *forward.Context, packet forward.Packet) (backend.Trace, error) {
	w := ruleset.Walker{
		Program: p, Family: opt.Family, Packet: packet, In: packet.In, Host: c.IsHost,
		Admits: func(chain string) bool { return strings.HasPrefix(chain, prefixFirewall) },
	}
	hook := "PREROUTING"
	if packet.In == "" {
		hook = "OUTPUT"
	}
	ways, err := w.Hook(tableNAT, hook, []ruleset.Way{{Dst: packet.Dst}})
	if err != nil {
		return backend.Trace{}, err
	}
	var done []ruleset.Way
	for _, way := range ways {
		on, err := filterAndPost(&w, way)
		if err != nil {
			return backend.Trace{}, err
		}
		done = append(done, on...)
	}
	return ruleset.Result(packet, done)
}

// filterAndPost takes a packet from its routing decision on.
func filterAndPost(k *ruleset.Walker, w ruleset.Way) ([]ruleset.Way, error) {
	toHost := k.Host(w.Dst.Addr())
	hooks := []string{"FORWARD"}
	switch {
	case k.Packet.In == "" && toHost:
		hooks = []string{"OUTPUT", "INPUT"}
	case k.Packet.In == "":
		hooks = []string{"OUTPUT"}
	case toHost:
		hooks = []string{"INPUT"}
	}
	ways := []ruleset.Way{w}
	for _, hook := range hooks {
		k.In = k.Packet.In
		if hook == "INPUT" && k.In == "" {
			k.In = "lo" // the machine's own packets to itself come in there
		}
		var err error
		if ways, err = k.Hook(tableFilter, hook, ways); err != nil {
			return nil, err
		}
	}
	if toHost && k.Packet.In != "" {
		return ways, nil // delivered here: it does not pass POSTROUTING
	}
	return k.Hook(tableNAT, "POSTROUTING", ways)
}
