package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/turnout-proxy/turnout/internal/model"
)

// script makes an executable in a directory.
func script(t *testing.T, dir, name, body string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// tools makes a pair of programs that name a version and else run body.
func tools(t *testing.T, dir, name, version, body string) {
	t.Helper()
	for _, suffix := range []string{"-restore", "-save"} {
		script(t, dir, name+suffix, `if [ "$1" = --version ]; then echo "`+version+`"; exit 0; fi`+"\n"+body)
	}
}

func TestOpenFindsTheToolsOfAFlavour(t *testing.T) {
	const old, legacy, nft = "iptables-restore v1.6.1", "iptables-restore v1.8.9 (legacy)", "iptables-restore v1.8.9 (nf_tables)"
	tests := map[string]struct {
		have    map[string]string // name to version
		family  model.Family
		flavour Flavour
		want    string // the restore program, or what the error says
	}{
		"by the flavour's own name":  {map[string]string{"iptables-nft": nft, "iptables": nft}, model.IPv4, NFT, "iptables-nft-restore"},
		"by the plain name":          {map[string]string{"iptables": nft}, model.IPv4, NFT, "iptables-restore"},
		"the other family's":         {map[string]string{"iptables": legacy, "ip6tables": legacy}, model.IPv6, Legacy, "ip6tables-restore"},
		"from before flavours":       {map[string]string{"iptables": old}, model.IPv4, Legacy, "iptables-restore"},
		"a plain name that misleads": {map[string]string{"iptables": nft}, model.IPv4, Legacy, "iptables-restore is of the nft flavour): install iptables"},
		"nothing at all":             {nil, model.IPv4, Legacy, "iptables-legacy-restore and -save are not on the PATH: install iptables"},
		"only the other family's":    {map[string]string{"iptables": nft}, model.IPv6, NFT, "ip6tables-nft-restore and -save are not on the PATH: install iptables"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for name, version := range tc.have {
				tools(t, dir, name, version, "")
			}
			c, err := open(t.Context(), tc.family, tc.flavour, []string{dir})
			if err != nil {
				if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v, want one of class %v that says %q", err, ErrUnsupported, tc.want)
				}
				return
			}
			if diff := cmp.Diff(tc.want, filepath.Base(c.restore)); diff != "" {
				t.Errorf("program (-want +got):\n%s", diff)
			}
			if c.Flavour() != tc.flavour || c.Family() != tc.family || c.Version() == "" {
				t.Errorf("opened %s %s, version %q", c.Family(), c.Flavour(), c.Version())
			}
		})
	}
}

func TestAFileThatDoesNotRunIsNoTool(t *testing.T) {
	dir := t.TempDir()
	for _, suffix := range []string{"-restore", "-save"} {
		if err := os.WriteFile(filepath.Join(dir, "iptables"+suffix), []byte("not a program"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := open(t.Context(), model.IPv4, Legacy, []string{dir}); !errors.Is(err, ErrUnsupported) {
		t.Errorf("got %v, want one of class %v", err, ErrUnsupported)
	}
}

const payload = "*nat\n:KUBE-A - [0:0]\n-A KUBE-A -s 1.2.3.400 -j ACCEPT\nCOMMIT\n"

type refusalCase struct {
	flavour Flavour
	reply   string
	status  int
	want    string
	class   error
}

// What the tools of versions 1.8.4 to 1.8.9 say, and what is made of it.
func refusals() map[string]refusalCase {
	return map[string]refusalCase{
		"a bad rule": {
			Legacy, "iptables-restore v1.8.9 (legacy): host/network `1.2.3.400' not found\nError occurred at line: 3\n" +
				"Try `iptables-restore -h' or 'iptables-restore --help' for more information.\n", 2,
			"restore IPv4 table nat, line 3 \"-A KUBE-A -s 1.2.3.400 -j ACCEPT\": host/network `1.2.3.400' not found", ErrInvalid,
		},
		"a refusal of the kernel, legacy": {
			Legacy, "iptables-restore: line 4 failed\n", 1,
			`restore IPv4 table nat, line 4 "COMMIT": the kernel refused the section (exit status 1)`, ErrInvalid,
		},
		"a refusal of the kernel, nft": {
			NFT, "iptables-nft-restore v1.8.9 (nf_tables): \nline 3: RULE_APPEND failed (Invalid argument): rule in chain KUBE-A\n", 4,
			`restore IPv4 table nat, line 3 "-A KUBE-A -s 1.2.3.400 -j ACCEPT": line 3: RULE_APPEND failed (Invalid argument): rule in chain KUBE-A`,
			ErrInvalid,
		},
		"a command that failed, nft": {
			NFT, "iptables-nft-restore: line 2 failed: No chain/target/match by that name.\n", 1,
			`restore IPv4 table nat, line 2 ":KUBE-A - [0:0]": line 2 failed: No chain/target/match by that name.`, ErrInvalid,
		},
		"a chain in use, nft": {
			NFT, "iptables-nft-restore v1.8.9 (nf_tables): \nline 2: CHAIN_DEL failed (Device or resource busy): chain KUBE-A\n", 4,
			`restore IPv4 table nat, line 2 ":KUBE-A - [0:0]": line 2: CHAIN_DEL failed (Device or resource busy): chain KUBE-A`, ErrConflict,
		},
		"no COMMIT": {
			Legacy, "iptables-restore: COMMIT expected at line 5\n", 1,
			"restore IPv4 tables, line 5: COMMIT expected at line 5", ErrInvalid,
		},
		"the lock": {
			Legacy, "Another app is currently holding the xtables lock. Stopped waiting after 5s.\n", 4,
			"restore IPv4 tables: Another app is currently holding the xtables lock. Stopped waiting after 5s.", ErrBusy,
		},
		"a shortage, without a word": {Legacy, "", 4, "restore IPv4 tables: exit status 4", ErrBusy},
		"a full buffer, nft": {
			NFT, "iptables-nft-restore v1.8.4 (nf_tables): \nline 4: TABLE_ADD failed (No buffer space available): table nat\n", 4,
			`restore IPv4 table nat, line 4 "COMMIT": line 4: TABLE_ADD failed (No buffer space available): table nat`, ErrBusy,
		},
		"another change at the same time, nft": {
			NFT, "iptables-nft-restore: Could not fetch rule set generation id: Resource temporarily unavailable\n", 4,
			"restore IPv4 tables: Could not fetch rule set generation id: Resource temporarily unavailable", ErrBusy,
		},
		"a match that is not installed": {
			Legacy, "iptables-restore v1.8.9 (legacy): Couldn't load match `foo':No such file or directory\n\nError occurred at line: 3\n", 2,
			"restore IPv4 table nat, line 3 \"-A KUBE-A -s 1.2.3.400 -j ACCEPT\": Couldn't load match `foo':No such file or directory", ErrUnsupported,
		},
		"a match that the kernel lacks": {
			NFT, "Warning: Extension bpf revision 0 not supported, missing kernel module?\niptables-nft-restore: line 3 failed\n", 1,
			`restore IPv4 table nat, line 3 "-A KUBE-A -s 1.2.3.400 -j ACCEPT": Warning: Extension bpf revision 0 not supported, missing kernel module?`,
			ErrUnsupported,
		},
		"a table that the kernel lacks": {
			Legacy, "iptables-restore v1.8.9 (legacy): iptables-restore: unable to initialize table 'nat'\nError occurred at line: 1\n", 2,
			`restore IPv4 table nat, line 1 "*nat": unable to initialize table 'nat'`, ErrUnsupported,
		},
		"no permission": {
			Legacy, "iptables-restore v1.8.9 (legacy): Permission denied (you must be root)\n", 4,
			"restore IPv4 tables: Permission denied (you must be root)", ErrUnsupported,
		},
		"a line that the payload does not have": {
			Legacy, "iptables-restore: line 77 failed\n", 1, "restore IPv4 tables, line 77: exit status 1", ErrInvalid,
		},
	}
}

func TestRefusalsNameTheLineTheReasonAndTheClass(t *testing.T) {
	for name, tc := range refusals() {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "reply"), []byte(tc.reply), 0o644); err != nil {
				t.Fatal(err)
			}
			tools(t, dir, "iptables", map[Flavour]string{Legacy: "(legacy)", NFT: "(nf_tables)"}[tc.flavour],
				fmt.Sprintf("cat %s/reply >&2; exit %d", dir, tc.status))
			c, err := open(t.Context(), model.IPv4, tc.flavour, []string{dir})
			if err != nil {
				t.Fatal(err)
			}
			err = c.Restore(t.Context(), []byte(payload))
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(tc.want, err.Error()); diff != "" {
				t.Errorf("message (-want +got):\n%s", diff)
			}
			for _, class := range []error{ErrBusy, ErrUnsupported, ErrConflict, ErrInvalid} {
				if got := errors.Is(err, class); got != errors.Is(tc.class, class) {
					t.Errorf("is of class %v: %v", class, got)
				}
			}
		})
	}
}

func TestALongLineIsQuotedInPart(t *testing.T) {
	dir := t.TempDir()
	tools(t, dir, "iptables", "(legacy)", "echo 'iptables-restore: line 1 failed' >&2; exit 1")
	c, err := open(t.Context(), model.IPv4, Legacy, []string{dir})
	if err != nil {
		t.Fatal(err)
	}
	err = c.Restore(t.Context(), []byte("*"+strings.Repeat("é", 10000)+"\n"))
	step, ok := errors.AsType[*StepError](err)
	if !ok {
		t.Fatalf("got %v, want a *StepError", err)
	}
	if len(step.Text) > 300 || !strings.HasSuffix(step.Text, "é...") {
		t.Errorf("quoted %d bytes, the end is %q", len(step.Text), step.Text[len(step.Text)-10:])
	}
}

func TestWhatAToolSaysIsBounded(t *testing.T) {
	dir := t.TempDir()
	tools(t, dir, "iptables", "(legacy)", "yes 'a line of noise' | head -c 3000000 >&2; exit 1")
	c, err := open(t.Context(), model.IPv4, Legacy, []string{dir})
	if err != nil {
		t.Fatal(err)
	}
	err = c.Restore(t.Context(), nil)
	if err == nil || len(err.Error()) > 4096 {
		t.Errorf("a message of %d bytes", len(fmt.Sprint(err)))
	}
}

func TestATableThatCannotBePrintedIsAConflict(t *testing.T) {
	for name, where := range map[string]string{"on standard output": "1", "on standard error": "2"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			tools(t, dir, "iptables", "(legacy)", "echo \"# Table \\`nat' is incompatible, use 'nft' tool.\" >&"+where)
			c, err := open(t.Context(), model.IPv4, Legacy, []string{dir})
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.print(t.Context(), "nat")
			if !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "is incompatible, use 'nft' tool") {
				t.Errorf("got %v, want one of class %v", err, ErrConflict)
			}
		})
	}
}

func TestACommentAboutIncompatibilityIsNoConflict(t *testing.T) {
	const save = "*nat\n:KUBE-A - [0:0]\n-A KUBE-A -m comment --comment \"table `nat' is incompatible\" -j ACCEPT\nCOMMIT\n"
	if got := incompatible(save, "nat"); got != "" {
		t.Errorf("got %q", got)
	}
}

func TestAStoppedToolIsKilled(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "started")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	// The child of the tool keeps its output open, which must not keep the call waiting for ever.
	tools(t, dir, "iptables", "(legacy)", "sleep 60 & echo $! > "+fifo+"; wait")
	c, err := open(t.Context(), model.IPv4, Legacy, []string{dir})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Restore(ctx, []byte(payload)) }()
	text, err := os.ReadFile(fifo) // until the tool runs
	if err != nil {
		t.Fatal(err)
	}
	var child int
	if _, err := fmt.Sscan(string(text), &child); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Kill(child, unix.SIGKILL) }) // a failure means that it is gone
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want %v", err, context.Canceled)
		}
	case <-time.After(30 * time.Second):
		t.Error("still waiting 30 s after the context ended")
	}
}

func TestForeignRulesInTheTableAreAConflictOnTheKernel(t *testing.T) {
	nft, err := exec.LookPath("nft")
	if err != nil {
		t.Skip("needs nft to write rules that iptables cannot print: install nftables")
	}
	c := openKernel(t, model.IPv4, NFT)
	restore(t, c, head2+"COMMIT\n")
	foreign := exec.Command(nft, "add rule ip nat KUBE-A numgen random mod 2 vmap { 0 : accept, 1 : drop }")
	if out, err := foreign.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, err := c.Save(t.Context(), "nat"); !errors.Is(err, ErrConflict) {
		t.Errorf("got %q, %v; want an error of class %v", got, err, ErrConflict)
	}
}

// A held lock is waited for, then reported as busy. It is the tools' own lock, so the test uses one of its own.
func TestAHeldLockIsBusyOnTheKernel(t *testing.T) {
	c := openKernel(t, model.IPv4, Legacy)
	path := filepath.Join(t.TempDir(), "lock")
	t.Setenv("XTABLES_LOCKFILE", path)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err = c.Restore(t.Context(), []byte(head2+"COMMIT\n"))
	if !errors.Is(err, ErrBusy) {
		t.Errorf("got %v, want one of class %v", err, ErrBusy)
	}
	if waited := time.Since(start); waited < time.Second {
		t.Errorf("waited only %v", waited)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	restore(t, c, head2+"COMMIT\n")
}

// many gives a payload of a size that clusters with ten thousand Services have.
func many(services, endpoints int) []byte {
	var chains, rules bytes.Buffer
	chains.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n")
	for s := range services {
		fmt.Fprintf(&chains, ":KUBE-SVC-%08d - [0:0]\n", s)
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -d 10.%d.%d.%d/32 -p tcp -m comment --comment \"ns/svc-%d:http cluster IP\" "+
			"-m tcp --dport 80 -j KUBE-SVC-%08d\n", 96+s>>16, s>>8&255, s&255, s, s)
		for e := range endpoints {
			fmt.Fprintf(&rules, "-A KUBE-SVC-%08d -p tcp -m statistic --mode random --probability %s -j DNAT "+
				"--to-destination 10.244.%d.%d:8080\n", s, Probability(1/float64(endpoints-e)), s&255, e)
		}
	}
	chains.Write(rules.Bytes())
	chains.WriteString("COMMIT\n")
	return chains.Bytes()
}

func BenchmarkKernel(b *testing.B) {
	for _, flavour := range []Flavour{Legacy, NFT} {
		b.Run(string(flavour), func(b *testing.B) {
			c := openKernel(b, model.IPv4, flavour)
			payload := many(10000, 11)
			start := time.Now()
			if err := c.Restore(b.Context(), payload); err != nil {
				b.Fatal(err)
			}
			b.Logf("restore of 120000 rules, %d bytes: %v", len(payload), time.Since(start))
			start = time.Now()
			text, err := c.Save(b.Context(), "nat")
			if err != nil {
				b.Fatal(err)
			}
			b.Logf("save of 120000 rules, %d bytes: %v", len(text), time.Since(start))
			for b.Loop() {
				if _, err := c.Pulse(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkFake(b *testing.B) {
	payload := many(10000, 11)
	f := NewFake(model.IPv4, NFT)
	b.Run("restore of 120000 rules", func(b *testing.B) {
		for b.Loop() {
			if err := f.Restore(b.Context(), payload); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("restore of one rule into 120000", func(b *testing.B) {
		for b.Loop() {
			if err := f.Restore(b.Context(), []byte("*nat\n:KUBE-SVC-00000001 - [0:0]\nCOMMIT\n")); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("save", func(b *testing.B) {
		for b.Loop() {
			if _, err := f.Save(b.Context(), "nat"); err != nil {
				b.Fatal(err)
			}
		}
	})
}
