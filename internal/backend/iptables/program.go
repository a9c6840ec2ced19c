package iptables

import "github.com/turnout-proxy/turnout/internal/backend/ruleset"

// The tables that this mode writes.
const (
	tableFilter = ruleset.Filter
	tableNAT    = ruleset.NAT
	// tableMangle holds nothing of ours; a canary chain of upstream's may be there to clean up.
	tableMangle = ruleset.Mangle
)
