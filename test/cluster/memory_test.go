package cluster_test

import (
	"fmt"
	"runtime"
	"runtime/metrics"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/cluster"
)

// The size at which memory is judged.
const (
	manyServices = 10_000
	manyAddrs    = 10 // per Service
	loaders      = 16 // that create objects at the same time
)

// BenchmarkFirstStateOfALargeCluster tells what it costs to take in a large cluster: the time, the memory of the model
// that remains, and the most that the heap held meanwhile. Loading the cluster takes two minutes before it starts.
func BenchmarkFirstStateOfALargeCluster(b *testing.B) {
	c := cluster.Start(b)
	load(b, c.Client())
	for b.Loop() {
		before := heapAfterCollection()
		peak := watchHeap()
		v := follow(b, c)
		v.until(b, "the first state is in", func(*model.Snapshot) bool { return v.synced == 1 })
		most := peak()
		v.mu.Lock()
		if n := len(v.snapshot.Slices); n != manyServices {
			b.Errorf("%d Services have slices, want %d", n, manyServices)
		}
		v.mu.Unlock()
		const mb = 1 << 20
		b.ReportMetric(float64(heapAfterCollection()-before)/mb, "model-MB")
		b.ReportMetric(float64(most-before)/mb, "peak-MB")
		v.stop()
		v.snapshot = nil
	}
}

// load creates the Services and their slices.
func load(b *testing.B, client kubernetes.Interface) {
	b.Helper()
	numbers := make(chan int)
	var running sync.WaitGroup
	for range loaders {
		running.Go(func() {
			for n := range numbers {
				var addrs []string
				for i := range manyAddrs {
					k := n*manyAddrs + i
					addrs = append(addrs, fmt.Sprintf("10.%d.%d.%d", 100+k/62500, k/250%250, 1+k%250))
				}
				name := fmt.Sprintf("s-%05d", n)
				s := slice(name+"-abcde", name, addrs...)
				for i := range s.Endpoints {
					node := fmt.Sprintf("node-%04d", (n*7+i)%1000)
					s.Endpoints[i].NodeName = &node
				}
				create(b, client, service(name), s)
			}
		})
	}
	for n := range manyServices {
		numbers <- n
	}
	close(numbers)
	running.Wait()
}

func heapAfterCollection() uint64 {
	runtime.GC()
	return heap()
}

// heap gives the bytes of live objects and of those that were not collected yet.
func heap() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// watchHeap looks at the heap all the time until the function it gives is called, which gives the most it saw.
func watchHeap() (stop func() uint64) {
	var most uint64
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			most = max(most, heap())
			select {
			case <-tick.C:
			case <-end:
				return
			}
		}
	}()
	return func() uint64 {
		close(end)
		<-done
		return most
	}
}
