package ipset

import (
	"testing"

	"github.com/turnout-proxy/turnout/internal/kernel/kerneltest"
)

const benchEntries = 10000

func addAll() []Op {
	ops := []Op{{Verb: Create, Set: big()}}
	for _, e := range lots(benchEntries) {
		ops = append(ops, Op{Verb: Add, Set: big(), Entry: e})
	}
	return ops
}

func apply(b *testing.B, k *Kernel, ops []Op) {
	b.Helper()
	for _, err := range k.Apply(b.Context(), ops) {
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkFill makes a set with 10,000 entries.
func BenchmarkFill(b *testing.B) {
	kerneltest.Isolate(b)
	k, ops := NewKernel(), addAll()
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		apply(b, k, []Op{{Verb: Destroy, Set: big()}})
		b.StartTimer()
		apply(b, k, ops)
	}
}

// BenchmarkAddOne adds one entry to a set with 10,000.
func BenchmarkAddOne(b *testing.B) {
	kerneltest.Isolate(b)
	k, ops := NewKernel(), addAll()
	apply(b, k, ops)
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		apply(b, k, []Op{{Verb: Remove, Set: big(), Entry: ops[1].Entry}})
		b.StartTimer()
		apply(b, k, ops[1:2])
	}
}

// BenchmarkRead reads a set with 10,000 entries.
func BenchmarkRead(b *testing.B) {
	kerneltest.Isolate(b)
	k := NewKernel()
	apply(b, k, addAll())
	b.ReportAllocs()
	for b.Loop() {
		got, err := k.Read(b.Context(), []string{"BIG"})
		if err != nil || len(got) != 1 || len(got[0].Entries) != benchEntries {
			b.Fatalf("read %d sets, error %v", len(got), err)
		}
	}
}
