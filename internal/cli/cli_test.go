package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// asTurnout makes the test binary be the command, so that tests meet real processes with real exit statuses.
const asTurnout = "TURNOUT_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asTurnout) != "" {
		os.Exit(Main(os.Args, os.Stdout, os.Stderr, "v0.0.0-test"))
	}
	if os.Getenv(asLogger) != "" {
		os.Exit(logLines())
	}
	os.Exit(m.Run())
}

// A result is what a process printed, and its status.
type result struct {
	stdout, stderr string
	status         int
}

// run carries a command line out in this process.
func run(t *testing.T, name string, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status := Main(append([]string{name}, args...), &stdout, &stderr, "v0.0.0-test")
	return result{stdout.String(), stderr.String(), status}
}

// start carries a command line out in a process of its own.
func start(t *testing.T, name string, args ...string) result {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Args[0] = name
	cmd.Env = append(os.Environ(), asTurnout+"=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// golden compares with a file of testdata/golden; with TURNOUT_UPDATE_GOLDEN set it writes the file instead.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "golden", name)
	if os.Getenv("TURNOUT_UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; make it with TURNOUT_UPDATE_GOLDEN=1 go test ./internal/cli", err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// ofShop are the flags that make a command look at the shop of testdata from node na.
func ofShop(args ...string) []string {
	return append(args, "--manifests", "testdata/shop", "--node", "na", "--cluster-cidr", "10.60.0.0/16,fd60::/16")
}

func TestTheOfflineListShowsWhatWouldBeProgrammed(t *testing.T) {
	tests := map[string][]string{
		"ls.txt":            ofShop("ls"),
		"ls-wide.txt":       ofShop("ls", "-o", "wide"),
		"ls.json":           ofShop("ls", "-o", "json", "shop/web"),
		"ls.yaml":           ofShop("ls", "-o", "yaml", "shop/empty"),
		"ls-namespace.txt":  ofShop("ls", "-n", "kube-system"),
		"ls-service.txt":    ofShop("ls", "web"),
		"ls-port.txt":       ofShop("ls", "kube-system/dns:dns"),
		"ls-other-node.txt": append(ofShop("ls", "shop/web"), "--node", "nb"),
		"ls-no-cidr.txt":    {"ls", "shop/web", "--manifests", "testdata/shop", "--node", "na"},
	}
	for name, args := range tests {
		t.Run(name, func(t *testing.T) {
			got := run(t, "turnout", args...)
			if got.status != 0 || got.stderr != "" {
				t.Errorf("status %d, stderr %q", got.status, got.stderr)
			}
			golden(t, name, got.stdout)
		})
	}
}

func TestWhatIsWrongWithObjectsStandsBelowTheList(t *testing.T) {
	got := run(t, "turnout", "ls", "--manifests", "testdata/broken", "--node", "na")
	if got.status != 0 || got.stderr != "" {
		t.Errorf("status %d, stderr %q", got.status, got.stderr)
	}
	golden(t, "ls-broken.txt", got.stdout)
}

func TestAListOfNothingSaysSo(t *testing.T) {
	for name, args := range map[string][]string{
		"an empty directory":   {"ls", "--manifests", "testdata/empty", "--node", "na"},
		"a Service unheard of": ofShop("ls", "shop/nothing"),
	} {
		t.Run(name, func(t *testing.T) {
			if got := run(t, "turnout", args...); got != (result{stdout: "No Services.\n"}) {
				t.Errorf("got %+v", got)
			}
		})
	}
	t.Run("as JSON", func(t *testing.T) {
		got := run(t, "turnout", ofShop("ls", "shop/nothing", "-o", "json")...)
		var l struct{ Rows []any }
		if err := json.Unmarshal([]byte(got.stdout), &l); err != nil || l.Rows == nil || len(l.Rows) != 0 {
			t.Errorf("rows are %v, %v; want an empty list", l.Rows, err)
		}
	})
}

func TestJSONAndYAMLSayTheSame(t *testing.T) {
	var fromJSON, fromYAML any
	if err := json.Unmarshal([]byte(run(t, "turnout", ofShop("ls", "-o", "json")...).stdout), &fromJSON); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(run(t, "turnout", ofShop("ls", "-o", "yaml")...).stdout), &fromYAML); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(fromJSON, fromYAML); diff != "" {
		t.Errorf("documents differ (-JSON +YAML):\n%s", diff)
	}
}

func TestTheOfflineTraceSaysWhatHappensAndWhy(t *testing.T) {
	tests := map[string]struct {
		args   []string
		status int
	}{
		"trace-pod.txt":          {ofShop("trace", "10.60.1.21", "10.70.0.10:80", "--in", "veth1"), 0},
		"trace-hairpin.txt":      {ofShop("trace", "10.60.1.11", "10.70.0.10:80", "--in", "veth1"), 0},
		"trace-loadbalancer.txt": {ofShop("trace", "198.51.100.7:40000", "192.0.2.10:80", "--in", "eth0"), 0},
		"trace-node.txt":         {ofShop("trace", "10.20.0.11", "10.70.0.53:53/udp"), 0},
		"trace-nodeport-v6.txt":  {ofShop("trace", "2001:db8::7", "[fd20::11]:30080", "--in", "eth0"), 3},
		"trace-filter.txt":       {ofShop("trace", "8.8.8.8", "192.0.2.10:80", "--in", "eth0"), 3},
		"trace-reject.txt":       {ofShop("trace", "10.60.1.21", "10.70.0.11:80"), 3},
		"trace-pass.txt":         {ofShop("trace", "10.60.1.21", "10.70.0.12:80"), 4},
		"trace-pod.json":         {ofShop("trace", "10.60.1.21", "10.70.0.53:53", "-o", "json"), 0},
		"trace-drop.json":        {ofShop("trace", "8.8.8.8", "192.0.2.10:80", "--in", "eth0", "-o", "json"), 3},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got := run(t, "turnout", tc.args...)
			if got.status != tc.status || got.stderr != "" {
				t.Errorf("status %d, want %d; stderr %q", got.status, tc.status, got.stderr)
			}
			golden(t, name, got.stdout)
		})
	}
}

func TestTheNodesAddressesCanBeGiven(t *testing.T) {
	// Without them and without a Node object, nothing but loopback is this node's.
	other := []string{"trace", "8.8.8.8", "172.16.0.1:30080", "--in", "eth0", "--manifests", "testdata/shop", "--node", "nb"}
	if got := run(t, "turnout", other...); got.status != statusPass {
		t.Errorf("without --host-address the status is %d, want %d\n%s%s", got.status, statusPass, got.stdout, got.stderr)
	}
	if got := run(t, "turnout", append(other, "--host-address=172.16.0.1,172.16.0.2")...); got.status != statusOK {
		t.Errorf("with --host-address the status is %d, want 0\n%s%s", got.status, got.stdout, got.stderr)
	}
}

func TestMistakesEndInOneClearLine(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "none.sock")
	config := filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: fast\nbindAddress: x\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		args   []string
		status int
		want   string
	}{
		"an unknown command": {[]string{"prxy"}, 2, `unknown command "prxy"; did you mean proxy?`},
		"one like no other":  {[]string{"frobnicate"}, 2, `unknown command "frobnicate"; see turnout --help`},
		"an unknown flag":    {[]string{"ls", "--namespce=x"}, 2, "unknown flag --namespce; did you mean --namespace?"},
		"a flag like no other": {
			[]string{"ls", "--frobnicate"},
			2,
			"unknown flag --frobnicate; see turnout ls --help",
		},
		"an unknown short flag": {[]string{"ls", "-z"}, 2, "unknown shorthand flag: 'z' in -z"},
		"a flag without value":  {[]string{"ls", "--node"}, 2, "flag needs an argument: --node"},
		"a value of the wrong type": {
			[]string{"proxy", "--iptables-masquerade-bit=x"},
			2,
			`invalid argument "x" for "--iptables-masquerade-bit" flag: must be an integer`,
		},
		"arguments of proxy": {[]string{"proxy", "foo"}, 2, `"turnout proxy" does not take any arguments, got ["foo"]`},
		"arguments of cleanup": {
			[]string{"cleanup", "a", "b"},
			2,
			`"turnout cleanup" does not take any arguments, got ["a" "b"]`,
		},
		"too many Services": {[]string{"ls", "a", "b"}, 2, `turnout ls takes at most one Service, got ["a" "b"]`},
		"trace of half a packet": {
			[]string{"trace", "10.0.0.1"},
			2,
			`turnout trace takes a source and a destination, got ["10.0.0.1"]; for example: ` +
				`turnout trace 10.244.1.5 10.96.0.1:443`,
		},
		"trace to no port": {
			[]string{"trace", "10.0.0.1", "10.96.0.1"},
			2,
			`destination "10.96.0.1" is not ADDRESS:PORT, as in 10.96.0.1:443 or [fd00::1]:443`,
		},
		"a host address that is none": {
			ofShop("trace", "10.0.0.1", "10.96.0.1:1", "--host-address=x"), 2,
			`--host-address "x" is not an IP address`,
		},
		"an unknown form": {[]string{"ls", "-o", "xml"}, 2, `output form "xml" is not table, wide, json or yaml`},
		"an unknown form of the version": {
			[]string{"version", "-o", "yaml"},
			2,
			`output form "yaml" is not text or json`,
		},
		"an unknown flavour": {
			[]string{"cleanup", "--iptables-flavour=old"},
			2,
			`--iptables-flavour "old" is not auto, legacy or nft`,
		},
		"a mode of a later version": {
			[]string{"proxy", "--proxy-mode", "nftables"},
			1,
			`proxy mode "nftables" is not available in this version; use iptables or ipvs`,
		},
		"a directory that is absent": {
			[]string{"ls", "--manifests", "/does/not/exist"},
			1,
			"--manifests: stat /does/not/exist: no such file or directory",
		},
		"a configuration with mistakes": {
			[]string{"proxy", "--config", config, "--socket", socket},
			1,
			`invalid configuration: [KubeProxyConfiguration.Mode.ProxyMode: Invalid value: "fast": must be iptables, ` +
				`ipvs, nftables or blank (blank means the best-available proxy [currently iptables]), ` +
				`KubeProxyConfiguration.BindAddress: Invalid value: "x": not a valid textual representation of ` +
				`an IP address]`,
		},
		"no API server": {
			[]string{"proxy", "--kubeconfig", "/does/not/exist", "--socket", socket, "--iptables-flavour=x"},
			1,
			`--iptables-flavour "x" is not auto, legacy or nft`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			want := result{stderr: "turnout: " + tc.want + "\n", status: tc.status}
			if got := run(t, "turnout", tc.args...); got != want {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

func TestAProcessEndsWithTheStatusOfItsAnswer(t *testing.T) {
	tests := map[string]struct {
		name string
		args []string
		want int
	}{
		"done":                   {"turnout", []string{"version"}, 0},
		"forwarded":              {"turnout", ofShop("trace", "10.60.1.21", "10.70.0.10:80"), 0},
		"failed":                 {"turnout", []string{"ls", "--manifests", "/does/not/exist"}, 1},
		"wrong use":              {"turnout", []string{"ls", "--what"}, 2},
		"rejected":               {"turnout", ofShop("trace", "10.60.1.21", "10.70.0.11:80"), 3},
		"no Service":             {"turnout", ofShop("trace", "10.60.1.21", "10.70.0.12:80"), 4},
		"wrong use, as upstream": {"/usr/local/bin/kube-proxy", []string{"--what"}, 1},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got := start(t, tc.name, tc.args...)
			if got.status != tc.want || (got.stderr == "") != (tc.want == 0 || tc.want > 2) {
				t.Errorf("got %+v, want status %d", got, tc.want)
			}
		})
	}
}

func TestUnderTheNameKubeProxyTheLineBelongsToTheDaemon(t *testing.T) {
	tests := map[string]struct {
		args []string
		want result
	}{
		"arguments": {
			[]string{"foo"},
			result{stderr: `turnout: "kube-proxy" does not take any arguments, got ["foo"]` + "\n", status: 1},
		},
		"a command's name is an argument like any other": {
			[]string{"ls"},
			result{stderr: `turnout: "kube-proxy" does not take any arguments, got ["ls"]` + "\n", status: 1},
		},
		"an unknown flag": {
			[]string{"--proxy-mod=iptables"},
			result{stderr: "turnout: unknown flag --proxy-mod; did you mean --proxy-mode?\n", status: 1},
		},
		"a mode of a later version": {
			[]string{"--proxy_mode=nftables"},
			result{stderr: "turnout: proxy mode \"nftables\" is not available in this version; use iptables or ipvs\n", status: 1},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := run(t, "/usr/local/bin/kube-proxy", tc.args...); got != tc.want {
				t.Errorf("got  %+v\nwant %+v", got, tc.want)
			}
		})
	}
	for _, args := range [][]string{{"--version"}, {"--version=raw"}} {
		got := run(t, "kube-proxy", args...)
		if got.status != 0 || !strings.HasPrefix(got.stdout, "turnout v0.0.0-test (in place of kube-proxy v1.37.2, ") {
			t.Errorf("%s: %+v", args, got)
		}
	}
}

func TestTheVersionNamesTheBuild(t *testing.T) {
	text := regexp.MustCompile(`^turnout v0\.0\.0-test \(in place of kube-proxy v1\.37\.2, go[0-9.]+, linux/\w+\)\n$`)
	for _, args := range [][]string{{"version"}, {"--version"}, {"proxy", "--version"}} {
		if got := run(t, "turnout", args...); got.status != 0 || !text.MatchString(got.stdout) {
			t.Errorf("%s: %+v", args, got)
		}
	}
	var b build
	got := run(t, "turnout", "version", "-o", "json")
	if err := json.Unmarshal([]byte(got.stdout), &b); err != nil || b.Version != "v0.0.0-test" || b.Kubernetes != "v1.37.2" {
		t.Errorf("version -o json: %+v, %v", got, err)
	}
}

func TestEveryCommandHasHelpWithAnExampleAndItsExitStatuses(t *testing.T) {
	for _, args := range [][]string{{}, {"proxy"}, {"ls"}, {"trace"}, {"cleanup"}, {"version"}} {
		got := run(t, "turnout", append(args, "--help")...)
		if got.status != 0 || got.stderr != "" {
			t.Errorf("%s --help: status %d, stderr %q", args, got.status, got.stderr)
		}
		for _, part := range []string{"Usage:", "Examples:\n  turnout "} {
			if !strings.Contains(got.stdout, part) {
				t.Errorf("%s --help lacks %q", args, part)
			}
		}
		if !strings.Contains(got.stdout, "Exit status: 0") {
			t.Errorf("%s --help does not document its exit statuses", args)
		}
	}
}

func TestShellsCompleteCommandsAndForms(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if got := run(t, "turnout", "completion", shell); got.status != 0 || len(got.stdout) < 1000 {
			t.Errorf("completion %s: status %d, %d bytes", shell, got.status, len(got.stdout))
		}
	}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"commands":                         {[]string{"__complete", "tr"}, "trace\t"},
		"no files where a Service belongs": {[]string{"__complete", "ls", ""}, ":4\n"},
		"directories of manifests":         {[]string{"__complete", "ls", "--manifests", ""}, ":16\n"},
		"forms":                            {[]string{"__complete", "ls", "-o", ""}, "table\nwide\njson\nyaml\n"},
	} {
		if got := run(t, "turnout", tc.args...); !strings.Contains(got.stdout, tc.want) {
			t.Errorf("%s: %q does not contain %q", name, got.stdout, tc.want)
		}
	}
}

func TestDistanceCountsLetters(t *testing.T) {
	for pair, want := range map[[2]string]int{
		{"", ""}: 0, {"abc", "abc"}: 0, {"abc", ""}: 3, {"", "ab"}: 2, {"prxy", "proxy"}: 1, {"kitten", "sitting"}: 3,
	} {
		if got := distance(pair[0], pair[1]); got != want {
			t.Errorf("distance%q = %d, want %d", pair, got, want)
		}
	}
}
