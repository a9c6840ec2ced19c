// Command apiserver-build builds programs of the Kubernetes release that tests and comparisons run against, and prints
// where they are. Without arguments it builds kube-apiserver. It decides nothing: see package cluster.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/turnout-proxy/turnout/test/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	names := os.Args[1:]
	if len(names) == 0 {
		names = []string{cluster.APIServer}
	}
	for _, name := range names {
		path, err := cluster.Binary(ctx, name, os.Stderr)
		if err != nil {
			fmt.Fprintf(os.Stderr, "apiserver-build: %s: %v\n", name, err)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stdout, path)
	}
}
