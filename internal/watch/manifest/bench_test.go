package manifest

import (
	"fmt"
	"strings"
	"testing"
)

// BenchmarkDirectory tells what it costs to read a large directory for the first time, and to read it again when one
// of its objects has changed: in a file of its own, and in a file that holds everything.
func BenchmarkDirectory(b *testing.B) {
	const services, addrs = 10_000, 10
	objects := func(n int, last string) string {
		list := make([]string, addrs)
		for i := range list {
			list[i] = fmt.Sprintf("{addresses: [10.%d.%d.%d]}", n>>8&0xff, n&0xff, i+1)
		}
		list = append(list, fmt.Sprintf("{addresses: [%s]}", last))
		name := fmt.Sprintf("s%05d", n)
		one := strings.Replace(slice(name+"-1", name, ""), "[{addresses: []}]", "["+strings.Join(list, ", ")+"]", 1)
		return service(name, fmt.Sprintf("10.96.%d.%d", n>>8, n&0xff)) + one
	}
	var all strings.Builder
	for n := range services - 1 {
		all.WriteString(objects(n, "10.250.0.1"))
	}
	fill := func(b *testing.B) *directory {
		b.Helper()
		d := newDirectory(b.TempDir(), "n1")
		must(b, writeFile(d.path, "all.yaml", all.String()))
		must(b, writeFile(d.path, "own.yaml", objects(services-1, "10.250.0.1")))
		return d
	}
	b.Run(fmt.Sprintf("first/services=%d", services), func(b *testing.B) {
		for b.Loop() {
			if events, _ := fill(b).scan(scope{full: true, force: true}); len(events) != 2*services {
				b.Fatalf("%d events, want %d", len(events), 2*services)
			}
		}
	})
	for name, file := range map[string]string{"own": "own.yaml", "shared": "all.yaml"} {
		b.Run(fmt.Sprintf("change=%s/services=%d", name, services), func(b *testing.B) {
			d := fill(b)
			d.scan(scope{full: true, force: true})
			for n := 0; b.Loop(); n++ {
				addr := fmt.Sprintf("10.251.%d.%d", n>>8&0xff, n&0xff)
				content := objects(services-1, addr)
				if file == "all.yaml" {
					content = strings.Replace(all.String(), "10.250.0.1", addr, 1)
				}
				must(b, writeFile(d.path, file, content))
				d.files[file].heldSince = d.now().Add(-2 * holdAtMost) // the file is written in one go here
				if events, _ := d.scan(scope{names: map[string]bool{file: true}}); len(events) != 1 {
					b.Fatalf("%d events, want 1", len(events))
				}
			}
		})
	}
}
