package xtables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// pulseTables are the tables that a Service proxy writes; changes of others are of no interest.
func pulseTables() []string { return []string{"filter", "nat"} }

// Pulse implements Tables. With the nft flavour it is the number of the rule set's generation, which every change of
// any nftables object in the network namespace raises; with legacy it is made from each table's header.
func (c *Command) Pulse(ctx context.Context) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("read the pulse of the %s tables: %w", c.family, err)
	}
	pulse := nftPulse
	if c.flavour == Legacy {
		pulse = func() (string, error) { return legacyPulse(c.family) }
	}
	got, err := pulse()
	if err != nil {
		return "", &StepError{
			Op: "read", Object: fmt.Sprintf("pulse of the %s tables (%s)", c.family, c.flavour), Err: err,
			Class: classOf(err),
		}
	}
	return got, nil
}

// classOf sorts a system call's error.
func classOf(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPROTONOSUPPORT),
		errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL),
		errors.Is(err, unix.ENOPROTOOPT):
		return ErrUnsupported
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS),
		errors.Is(err, unix.ENOMEM):
		return ErrBusy
	}
	return nil
}

// tableExists tells whether the kernel holds a table, without making it. The tools cannot be asked: some of them create
// the table that they are to print.
func tableExists(family model.Family, flavour Flavour, table string) (bool, error) {
	list := nftTables
	if flavour == Legacy {
		list = legacyTables
	}
	names, err := list(family)
	return slices.Contains(names, table), err
}

// legacyTables gives the legacy tables that exist in the calling thread's network namespace.
func legacyTables(family model.Family) ([]string, error) {
	// Not /proc/net: that is the namespace of the process's first thread.
	path := "/proc/thread-self/net/ip_tables_names"
	if family == model.IPv6 {
		path = "/proc/thread-self/net/ip6_tables_names"
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // x_tables is absent or not loaded: nothing can be in it
	}
	if err != nil {
		return nil, fmt.Errorf("list legacy tables: %w", err)
	}
	return strings.Fields(string(text)), nil
}

// tableHeader is the kernel's struct ipt_getinfo and ip6t_getinfo, which are alike.
type tableHeader struct {
	name       [32]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	entries    uint32
	size       uint32
}

// soGetInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO. Source: linux/netfilter_ipv4/ip_tables.h, ip6_tables.h.
const soGetInfo = 64

func legacyPulse(family model.Family) (string, error) {
	names, err := legacyTables(family)
	if err != nil {
		return "", err
	}
	domain, level := unix.AF_INET, unix.SOL_IP
	if family == model.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return "", fmt.Errorf("open a raw socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written: a failing close loses nothing

	var b strings.Builder
	b.WriteString("legacy")
	for _, table := range pulseTables() {
		if !slices.Contains(names, table) {
			fmt.Fprintf(&b, " %s=absent", table)
			continue
		}
		h, err := readHeader(fd, level, table)
		if err != nil {
			return "", fmt.Errorf("read the header of table %s: %w", table, err)
		}
		fmt.Fprintf(&b, " %s=%d/%d/%x/%x", table, h.entries, h.size, h.hookEntry, h.underflow)
	}
	return b.String(), nil
}

func readHeader(fd, level int, table string) (tableHeader, error) {
	var h tableHeader
	copy(h.name[:], table)
	size := uint32(unsafe.Sizeof(h))
	//nolint:gosec // The kernel writes at most size bytes into h, which stays alive until the call is over.
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), soGetInfo,
		uintptr(unsafe.Pointer(&h)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return h, errno //nolint:wrapcheck // the caller names the table
	}
	return h, nil
}

// The parts of nf_tables' netlink interface that are used here. Source: linux/netfilter/nf_tables.h.
const (
	nftMsgGetTable = 1
	nftMsgGetGen   = 16
	nftaTableName  = 1
	nftaGenID      = 1
)

// nftRequest sends one nf_tables request and gives the attributes of each reply.
func nftRequest(family uint8, kind uint16, flags netlink.HeaderFlags) ([][]byte, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open a netfilter socket: %w", err)
	}
	defer func() { _ = conn.Close() }() // nothing was written: a failing close loses nothing
	req := netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind),
			Flags: netlink.Request | flags,
		},
		Data: []byte{family, unix.NFNETLINK_V0, 0, 0},
	}
	replies, err := conn.Execute(req)
	if err != nil {
		return nil, fmt.Errorf("ask nf_tables: %w", err)
	}
	var out [][]byte
	for _, r := range replies {
		if len(r.Data) >= 4 {
			out = append(out, r.Data[4:])
		}
	}
	return out, nil
}

func nftPulse() (string, error) {
	replies, err := nftRequest(unix.AF_UNSPEC, nftMsgGetGen, 0)
	if err != nil {
		return "", err
	}
	for _, attrs := range replies {
		ad, err := netlink.NewAttributeDecoder(attrs)
		if err != nil {
			return "", fmt.Errorf("read the generation: %w", err)
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			if ad.Type() == nftaGenID {
				return fmt.Sprintf("nft generation %d", ad.Uint32()), nil
			}
		}
	}
	return "", errors.New("nf_tables told no generation")
}

// nftTables gives the nf_tables tables of the family in the calling thread's network namespace.
func nftTables(family model.Family) ([]string, error) {
	af := uint8(unix.AF_INET) // NFPROTO_IPV4 and NFPROTO_IPV6 equal the address families
	if family == model.IPv6 {
		af = unix.AF_INET6
	}
	replies, err := nftRequest(af, nftMsgGetTable, netlink.Dump)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, attrs := range replies {
		ad, err := netlink.NewAttributeDecoder(attrs)
		if err != nil {
			return nil, fmt.Errorf("read a table: %w", err)
		}
		for ad.Next() {
			if ad.Type() == nftaTableName {
				names = append(names, ad.String())
			}
		}
	}
	return names, nil
}

// isPermission tells whether a system call was refused for lack of a right.
func isPermission(err error) bool { return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) }
