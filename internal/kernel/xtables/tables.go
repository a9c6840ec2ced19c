// Package xtables reads and writes the tables of iptables and ip6tables, in either flavour, through the tools that are
// installed; it knows their text and what the kernel refuses. It decides nothing about Services and must not import
// forward or a backend.
//
// Read Tables first; Command is the real thing, Fake the one for tests, and one contract test runs on both. Rule is the
// typed form of one rule.
package xtables

import (
	"context"
	"slices"

	"github.com/turnout-proxy/turnout/internal/kernel"
)

// A Flavour is one of the two kernel interfaces behind the iptables commands. Rules of one are invisible in the other,
// though packets meet both.
type Flavour string

// Legacy is the x_tables interface, NFT the nf_tables one.
const (
	Legacy Flavour = "legacy"
	NFT    Flavour = "nft"
)

// Tables is the kernel's tables of one IP family in one flavour.
type Tables interface {
	// Save prints one table in the format of iptables-save, without counters that mean anything. A table that does not
	// exist gives nothing, and is not created by asking. If part of a table cannot be printed, as other software wrote
	// it, the answer is an error of class ErrConflict.
	Save(ctx context.Context, table string) ([]byte, error)

	// Restore carries out a payload in the format of iptables-restore --noflush: one section for each table, which takes
	// effect as a whole or not at all. A section that fails ends the call; those before it stay. The error is a
	// *StepError.
	Restore(ctx context.Context, payload []byte) error

	// Pulse is a fingerprint of the tables that is cheap whatever their size. It stays the same as long as nobody
	// changes them. Legacy cannot see a change that keeps both the number of rules and their size.
	Pulse(ctx context.Context) (string, error)
}

// A StepError is how every function here reports a refusal.
type StepError = kernel.StepError

// The classes of failure, as in package kernel.
var (
	ErrBusy        = kernel.ErrBusy
	ErrUnsupported = kernel.ErrUnsupported
	ErrConflict    = kernel.ErrConflict
	ErrInvalid     = kernel.ErrInvalid
)

// What the kernel and the tools bound.
const (
	// MaxChainName is the longest chain name, in bytes. Source: XT_FUNCTION_MAXNAMELEN is 29 with its terminator.
	MaxChainName = 28
	// MaxComment is the longest comment, in bytes. Source: XT_MAX_COMMENT_LEN is 256 with its terminator.
	MaxComment = 255
	// MaxRecentName is the longest name of a `recent` list, in bytes. Source: XT_RECENT_NAME_LEN is 200 with its
	// terminator.
	MaxRecentName = 199
)

// BaseChains gives the built-in chains of a table in the order that iptables-save prints them; nil if there is no such
// table.
func BaseChains(table string) []string {
	switch table {
	case "filter":
		return []string{"INPUT", "FORWARD", "OUTPUT"}
	case "nat":
		return []string{"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"}
	case "mangle":
		return []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
	case "raw":
		return []string{"PREROUTING", "OUTPUT"}
	case "security":
		return []string{"INPUT", "FORWARD", "OUTPUT"}
	}
	return nil
}

// isBase tells whether a chain is a built-in one of the table.
func isBase(table, chain string) bool { return slices.Contains(BaseChains(table), chain) }
