package vm

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// limit is how long a guest of these tests may live, on a machine that does much else.
const limit = 4 * time.Minute

// inGuest runs a program in a guest, and skips the test where there is none.
func inGuest(t *testing.T, c Config, argv ...string) (status int, output string, err error) {
	t.Helper()
	var out, progress bytes.Buffer
	c.Output, c.Progress = &out, &progress
	if c.Timeout == 0 {
		c.Timeout = limit
	}
	status, err = Run(t.Context(), c, argv...)
	if errors.Is(err, ErrUnavailable) {
		t.Skipf("needs a virtual machine: %v", err)
	}
	t.Log(progress.String())
	return status, out.String(), err
}

// shell runs a script that has to come to its end.
func shell(t *testing.T, c Config, script string, args ...string) (status int, output string) {
	t.Helper()
	status, out, err := inGuest(t, c, append([]string{"sh", "-c", script, "sh"}, args...)...)
	if err != nil {
		t.Fatalf("%v; output:\n%s", err, out)
	}
	return status, out
}

// logOf takes the name of the kept log out of an error, sees that it is there and removes it.
func logOf(t *testing.T, err error) string {
	t.Helper()
	_, path, is := strings.Cut(err.Error(), "what its kernel said is in ")
	if !is {
		t.Errorf("the error %q names no log", err)
		return ""
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	_ = os.Remove(path)
	return string(text)
}

func TestAGuestIsWhatWasAskedFor(t *testing.T) {
	t.Setenv("TURNOUT_SAMPLE", "it's two words")
	t.Setenv("SECRET_OF_THE_HOST", "x")
	dir := t.TempDir()
	c := Config{Dir: dir, Env: []string{"WORD=$HOME"}, CPUs: 1, Memory: 1024}
	_, out := shell(t, c, `
		uname -r; pwd; id -u; nproc; echo "$TURNOUT_SAMPLE" "$TURNOUT_REQUIRE_IPVS" "$WORD" "${SECRET_OF_THE_HOST-none}" "$1"
		test "$(awk '/^MemTotal/ { print $2 }' /proc/meminfo)" -lt 1048576 && echo small
		echo to the standard error >&2; echo opened anew >/dev/stdout; ls /sys/class/net | grep -v lo`, "an 'argument'")
	want := c
	if err := want.setDefaults(); err != nil {
		t.Fatal(err)
	}
	version, rest, _ := strings.Cut(out, "\n")
	if !strings.HasPrefix(version, want.Kernel+".") {
		t.Errorf("the kernel is %s, want a %s", version, want.Kernel)
	}
	if diff := cmp.Diff(dir+"\n0\n1\nit's two words 1 $HOME none an 'argument'\nsmall\nto the standard error\nopened anew\n", rest); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
}

func TestTheStatusComesBackWithAllOfTheOutput(t *testing.T) {
	// Ten times what a pipe holds, without an end of line; and a process that is left behind does not hold up the end.
	status, out := shell(t, Config{}, `sleep 1000 & head -c 655360 /dev/zero | tr '\0' x; exit 3`)
	if status != 3 || out != strings.Repeat("x", 655360) {
		t.Errorf("status %d with %d bytes, want 3 with 655360 times x", status, len(out))
	}
}

func TestWhatTheGuestWritesStaysThere(t *testing.T) {
	dir := t.TempDir()
	mine := filepath.Join(dir, "mine")
	if err := os.WriteFile(mine, []byte("the host's"), 0o600); err != nil {
		t.Fatal(err)
	}
	status, out := shell(t, Config{}, `set -e
		echo "the guest's" >"$1/mine"; echo new >"$1/new"; cat "$1/mine" "$1/new"; rm "$1/mine"
		# The host's file system itself, without the layer above it.
		mkdir /tmp/below; mount -t 9p -o trans=virtio,version=9p2000.L root /tmp/below || exit 0
		! echo "the guest's" >"/tmp/below$1/mine" || exit 1`, dir)
	if status != 0 || !strings.HasPrefix(out, "the guest's\nnew\n") {
		t.Errorf("status %d, output:\n%s", status, out)
	}
	if text, err := os.ReadFile(mine); err != nil || string(text) != "the host's" {
		t.Errorf("the host's file is %q, %v", text, err)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
		t.Errorf("the host's directory has %v, %v; want one file", list, err)
	}
}

// Nothing is loaded beforehand: what a test asks the kernel for brings its module.
func TestTheKernelLoadsWhatItIsAskedFor(t *testing.T) {
	status, out := shell(t, Config{}, `
		try() { "$@" >/tmp/said 2>&1 || { echo "$*: $(cat /tmp/said)"; bad=1; }; }
		bad=
		for tool in ipvsadm ipset iptables-legacy iptables-nft nft conntrack ip; do
			command -v $tool >/dev/null || { echo "lacks $tool"; exit 77; }
		done
		# Every scheduler that the kernel has, at least a dozen.
		n=0
		for m in /lib/modules/$(uname -r)/kernel/net/netfilter/ipvs/ip_vs_*.ko*; do
			s=${m##*/ip_vs_}; s=${s%%.*}
			case $s in ftp | pe_sip) continue ;; esac
			n=$((n + 1))
			try ipvsadm -A -t 192.0.2.1:$n -s $s
		done
		test $n -ge 12 || { echo "$n schedulers"; bad=1; }
		test "$(ipvsadm -Ln | grep -c '^TCP')" = $n || { ipvsadm -Ln; bad=1; }
		try ip link add name dummy9 type dummy
		try ip link add name veth9 type veth peer name veth8
		for t in hash:ip hash:ip,port hash:ip,port,ip hash:ip,port,net bitmap:port; do
			range=; [ $t != bitmap:port ] || range='range 0-65535'
			try ipset create $t $t $range
		done
		for f in legacy nft; do
			try iptables-$f -A INPUT -m set --match-set hash:ip src -j ACCEPT
			try iptables-$f -A INPUT -m ipvs --ipvs -j ACCEPT
			try iptables-$f -A INPUT -m bpf --bytecode '1,6 0 0 65535' -j ACCEPT
			try iptables-$f -A INPUT -p sctp --dport 80 -m conntrack --ctstate NEW -m comment --comment c -j MARK --set-mark 1
			try iptables-$f -t nat -A POSTROUTING -m statistic --mode random --probability 0.5 -j MASQUERADE --random-fully
			try iptables-$f -A INPUT -m recent --name r --rcheck --seconds 10 -m addrtype --dst-type LOCAL -j REJECT
			try ip6tables-$f -t nat -A POSTROUTING -j MASQUERADE
		done
		try nft 'add table ip t; add map ip t m { type ipv4_addr . inet_service : verdict; }; add chain ip t c { numgen random mod 2 1; }'
		try conntrack -L
		try perl -e 'use Socket; socket(S, AF_INET, SOCK_STREAM, 132) or die $!'
		test -z "$bad"`)
	if status == 77 {
		t.Skipf("needs tools to ask the kernel with, see .ci/run: %s", out)
	}
	if status != 0 {
		t.Errorf("status %d:\n%s", status, out)
	}
}

func TestAGuestThatDoesNotComeToTheEndIsAnError(t *testing.T) {
	tests := map[string]struct {
		script string
		want   error
		log    string
	}{
		"its kernel panics": {
			"echo before; echo c >/proc/sysrq-trigger; sleep 1000", ErrPanicked, "sysrq triggered crash",
		},
		// A guest that goes off takes along what it has printed just before.
		"it goes off": {"echo before; sleep 5; echo o >/proc/sysrq-trigger; sleep 1000", ErrPoweredOff, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, out, err := inGuest(t, Config{}, "sh", "-c", tc.script)
			if !errors.Is(err, tc.want) {
				t.Fatalf("error %v, want %v", err, tc.want)
			}
			if text := logOf(t, err); !strings.Contains(text, tc.log) || !strings.Contains(err.Error(), tc.log) {
				t.Errorf("error %q and log do not tell %q:\n%s", err, tc.log, text)
			}
			if out != "before\n" {
				t.Errorf("output %q, want what was printed before", out)
			}
		})
	}
}

func TestAGuestWhoseTimeIsOverIsEnded(t *testing.T) {
	// No machine is so fast as to start the program in this time.
	_, out, err := inGuest(t, Config{Timeout: 50 * time.Millisecond}, "echo", "started")
	if !errors.Is(err, context.DeadlineExceeded) || out != "" {
		t.Errorf("error %v, output %q; want %v and none", err, out, context.DeadlineExceeded)
	}
	if err != nil && strings.Contains(err.Error(), "what its kernel said") {
		logOf(t, err)
	}
}

func TestAGuestThatDoesNotComeUpSaysWhatFailed(t *testing.T) {
	c := Config{Timeout: limit}
	if err := c.setDefaults(); err != nil {
		t.Fatal(err)
	}
	g, err := prepare(t.Context(), c)
	if errors.Is(err, ErrUnavailable) {
		t.Skipf("needs a virtual machine: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	g.dir, g.Accel = t.TempDir(), tcg
	if err := g.write(t.Context(), []string{"true"}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(g.dir, "modules"), []byte("/nowhere"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = g.run(t.Context())
	if !errors.Is(err, ErrNotBooted) || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("error %v, want %v with the name of what is not there", err, ErrNotBooted)
	}
}

func TestAGuestThatIsNotWantedAnyMoreIsEndedAndLeavesNothing(t *testing.T) {
	if err := Check(t.Context(), Config{}); errors.Is(err, ErrUnavailable) {
		t.Skipf("needs a virtual machine: %v", err)
	}
	t.Setenv("TMPDIR", t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	// The program's first words are when it is stopped.
	_, err := Run(ctx, Config{Timeout: limit, Output: writerFunc(cancel)}, "sh", "-c", "echo begun; sleep 1000")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
	if list, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(list) != 0 {
		t.Errorf("left behind: %v, %v", list, err)
	}
}

// A writerFunc is called when something is written.
type writerFunc func()

func (f writerFunc) Write(p []byte) (int, error) { f(); return len(p), nil }

func TestTheHostsLoopbackIsInReach(t *testing.T) {
	said := "hello from the host"
	server := serve(t, said)
	_, out := shell(t, Config{Network: true},
		`perl -MIO::Socket::INET -e 'print readline(IO::Socket::INET->new(PeerAddr => "10.0.2.2:$ARGV[0]", Timeout => 60) or die $@)' "$1"`, server)
	if out != said {
		t.Errorf("the guest heard %q, want %q", out, said)
	}
}

func TestWhatCannotBeRunIsRefusedWithAReason(t *testing.T) {
	tests := map[string]struct {
		c    Config
		argv []string
		want string
	}{
		"no program":            {Config{}, nil, "no program"},
		"an accelerator":        {Config{Accel: "warp"}, []string{"true"}, `accelerator "warp": want kvm or tcg`},
		"a kernel by its name":  {Config{Kernel: "newest"}, []string{"true"}, `kernel "newest": want a series such as 6.1`},
		"a kernel out of reach": {Config{Kernel: "../6.1"}, []string{"true"}, "want a series such as 6.1"},
		"a variable":            {Config{Env: []string{"A B=c"}}, []string{"true"}, `variable "A B=c": want NAME=value`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := inGuest(t, tc.c, tc.argv...)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestTheEnvironmentIsThatOfTheGuest(t *testing.T) {
	got := environment([]string{"CI=true", "PATH=/opt/tools", "TURNOUT_X=1", "AWS_KEY=k", "HOME=/h", "SHELL=/bin/fish"})
	want := []string{
		"CI=true", "TURNOUT_X=1", "HOME=/h", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/tools",
		"TURNOUT_REQUIRE_IPVS=1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("environment (-want +got):\n%s", cmp.Diff(want, got))
	}
}
