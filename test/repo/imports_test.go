package repo

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A rule forbids imports. Paths stand for themselves and all that is below them.
type rule struct {
	// in are the directories that the rule is for, but not those in except.
	in, except []string
	// imports are the forbidden paths, but not those in allowed.
	imports, allowed []string
	reason           string
}

// rules are the import graph. Test files are free.
func rules() []rule {
	product := []string{"internal", "cmd"}
	testOnly := []string{"internal/backend/backendtest", "internal/kernel/kerneltest", "internal/forward/gen"}
	core := []string{"internal/model", "internal/forward", "internal/flow"}
	return []rule{
		{
			in: core, imports: []string{"k8s.io", "sigs.k8s.io"},
			reason: "API objects stop at internal/watch: policy is decided on plain values",
		},
		{
			in: core, imports: []string{"os", "syscall", "net", "net/http", "golang.org/x/sys", "internal/kernel"},
			allowed: []string{"net/netip"},
			reason:  "the core makes no system call: it gives the same answer everywhere",
		},
		{
			in: core, imports: []string{
				"internal/watch", "internal/backend", "internal/loop", "internal/config", "internal/cli", "internal/control",
				"internal/health", "internal/metric",
			},
			reason: "the core knows nobody who uses it",
		},
		{
			in: []string{"internal/model"}, imports: []string{"internal"},
			reason: "the model is what everything else is made of",
		},
		{
			in: product, except: append([]string{"internal/watch", "internal/config", "internal/cli"}, testOnly...),
			imports: []string{"k8s.io"},
			reason:  "only what reads objects or configuration knows Kubernetes' types",
		},
		{
			in: []string{"internal/config", "internal/cli"}, imports: []string{"k8s.io/client-go", "k8s.io/api"},
			reason: "only internal/watch talks to an API server or reads its objects",
		},
		{
			in: []string{"internal/cli"}, imports: []string{"k8s.io"},
			allowed: []string{"k8s.io/klog", "k8s.io/component-base/cli"},
			reason:  "the commands take their settings from internal/config",
		},
		{
			in: []string{"internal/watch"}, imports: []string{
				"internal/forward", "internal/backend", "internal/kernel", "internal/loop", "internal/config",
				"internal/cli",
			},
			reason: "a source turns objects into model values and decides no policy",
		},
		{
			in: []string{"internal/kernel"}, imports: []string{
				"internal/forward", "internal/backend", "internal/loop", "internal/watch", "internal/config", "internal/cli",
			},
			reason: "a kernel edge knows one kernel interface and nothing of Services",
		},
		{
			in: []string{"internal/backend"}, except: testOnly, imports: []string{
				"internal/watch", "internal/loop", "internal/config", "internal/cli", "internal/control", "internal/health",
			},
			reason: "a backend is a code generator: it gets a table and gives a plan",
		},
		{
			in: []string{"internal/backend/ruleset"}, imports: []string{
				"internal/backend/iptables", "internal/backend/ipvs", "internal/backend/userspace",
			},
			reason: "what modes share knows no mode",
		},
		{
			in: []string{"internal/loop"}, imports: []string{
				"internal/watch", "internal/kernel", "internal/config", "internal/cli", "internal/backend/iptables",
				"internal/backend/ipvs", "internal/backend/nftables", "internal/backend/userspace",
			},
			reason: "the loop works with any source and any backend; the commands wire them",
		},
		{
			in: product, except: append([]string{"internal/kernel"}, testOnly...),
			imports: []string{"github.com/vishvananda", "github.com/mdlayher", "github.com/ti-mo"},
			reason:  "only the kernel edges talk to the kernel",
		},
		{
			// The control socket asks who is at the other end, the commands ask how wide the terminal is.
			in: product, except: append([]string{"internal/kernel", "internal/control", "internal/cli"}, testOnly...),
			imports: []string{"golang.org/x/sys/unix"},
			reason:  "only the kernel edges make system calls",
		},
		{
			in: product, except: append([]string{"internal/kernel/xtables", "internal/kernel/module"}, testOnly...),
			imports: []string{"os/exec"},
			reason:  "iptables and modprobe are the only programs that are ever started",
		},
		{
			in: product, except: []string{"internal/loop", "internal/cli", "internal/logkey", "internal/control"},
			imports: []string{"log"},
			reason:  "only the loop and the commands log; others return errors and findings",
		},
		{
			in: product, except: []string{"cmd/turnout"}, imports: []string{"internal/cli"},
			reason: "the command line is nobody's library",
		},
		{
			in: []string{"cmd"}, imports: []string{"internal"}, allowed: []string{"internal/cli"},
			reason: "cmd holds the exit status and nothing else",
		},
		{
			in: product, except: testOnly, imports: append([]string{"testing", "test"}, testOnly...),
			reason: "the product carries no test code",
		},
		{
			in: []string{"test/vm"}, imports: []string{"internal", "cmd", "k8s.io"},
			reason: "a virtual machine knows nothing of what it runs",
		},
		{
			in: []string{"internal", "cmd", "test"}, imports: []string{
				"k8s.io/kubernetes", "github.com/moby/ipvs", "github.com/stretchr/testify",
			},
			reason: "too heavy, or not meant to be imported",
		},
	}
}

func TestTheImportGraphIsAsDrawn(t *testing.T) {
	for _, v := range violations(rules(), sources(t)) {
		t.Error(v)
	}
}

func TestAForbiddenImportIsFound(t *testing.T) {
	list := []source{
		{path: "internal/forward/a.go", dir: "internal/forward", imports: []string{"net/netip", "k8s.io/api/core/v1"}},
		{path: "internal/forward/a_test.go", dir: "internal/forward", test: true, imports: []string{"os"}},
		{path: "internal/forwarding/a.go", dir: "internal/forwarding", imports: []string{"os"}},
		{path: "internal/forward/gen/a.go", dir: "internal/forward/gen", imports: []string{"os"}},
	}
	got := violations([]rule{
		{in: []string{"internal/forward"}, imports: []string{"k8s.io", "net"}, allowed: []string{"net/netip"}, reason: "r1"},
		{
			in: []string{"internal/forward"}, except: []string{"internal/forward/gen"}, imports: []string{"os"},
			reason: "r2",
		},
	}, list)
	want := []string{"internal/forward/a.go imports k8s.io/api/core/v1: r1"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("violations (-want +got):\n%s", diff)
	}
}

// violations gives one line for each forbidden import.
func violations(rules []rule, list []source) []string {
	var found []string
	for _, s := range list {
		for _, r := range rules {
			if s.test || !below(s.dir, r.in) || below(s.dir, r.except) {
				continue
			}
			for _, path := range s.imports {
				if below(path, r.imports) && !below(path, r.allowed) {
					found = append(found, fmt.Sprintf("%s imports %s: %s", s.path, path, r.reason))
				}
			}
		}
	}
	return found
}

// below tells whether a path is one of those in the list, or under one of them.
func below(path string, list []string) bool {
	return slices.ContainsFunc(list, func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") })
}
