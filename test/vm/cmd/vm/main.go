// Command vm runs a program inside a virtual machine with a kernel of Debian's:
//
//	go run ./test/vm/cmd/vm -- ipvsadm -Ln
//	go run ./test/vm/cmd/vm -kernel 6.12 -- ./ipvs.test -test.v
//
// It ends with the program's exit status, or with 125 if the program could not be run.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/turnout-proxy/turnout/test/vm"
)

// failed is the exit status when the program could not be run.
const failed = 125

func main() { os.Exit(run()) }

func run() int {
	c := vm.Config{Output: os.Stdout, Progress: os.Stderr}
	flag.StringVar(&c.Kernel, "kernel", "6.1", "series of the kernel: 6.1 or 6.12")
	flag.IntVar(&c.Memory, "memory", 0, "memory in MiB; default 2048")
	flag.IntVar(&c.CPUs, "cpus", 0, "processors; default 2")
	flag.DurationVar(&c.Timeout, "timeout", 0, "end of the guest's life; default 10 minutes")
	flag.BoolVar(&c.Network, "net", false, "give the guest an interface; the host's loopback is 10.0.2.2")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: vm [flags] -- PROGRAM [ARGUMENT...]")
		return failed
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	status, err := vm.Run(ctx, c, flag.Args()...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return failed
	}
	return status
}
