// Command vm runs a program inside a virtual machine with a kernel of Debian's; package vm and its README tell more:
//
//	go run ./test/vm/cmd/vm -- ipvsadm -Ln
//	go build -o bin/vm ./test/vm/cmd/vm
//	go test -exec "$PWD/bin/vm -kernel 6.12 --" ./internal/kernel/ipvs
//
// It ends with the program's exit status, or with 125 if the program did not come to its end. It decides nothing but how
// the flags are called, and must not import the product.
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

// failed is the exit status when the program did not come to its end.
const failed = 125

func main() { os.Exit(run()) }

func run() int {
	c := vm.Config{Output: os.Stdout, Progress: os.Stderr}
	flag.StringVar(&c.Kernel, "kernel", "", "`series` of the kernel, such as 6.12; default $"+vm.KernelEnv+" or 6.1")
	flag.StringVar(&c.Accel, "accel", "", "kvm or tcg; default KVM if it works")
	flag.IntVar(&c.Memory, "memory", 0, "memory in `MiB`; default 2048")
	flag.IntVar(&c.CPUs, "cpus", 0, "`number` of processors; default 2")
	flag.DurationVar(&c.Timeout, "timeout", 0, "how long the guest may live; default 10m")
	flag.BoolVar(&c.Network, "net", false, "give the guest an interface; the host's loopback is 10.0.2.2")
	flag.Func("env", "`NAME=value` for the program; may be given again", func(v string) error {
		c.Env = append(c.Env, v)
		return nil
	})
	check := flag.Bool("check", false, "run nothing, but fetch what is needed and say what is missing")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	var status int
	var err error
	switch {
	case *check:
		err = vm.Check(ctx, c)
	case flag.NArg() == 0:
		fmt.Fprintln(os.Stderr, "usage: vm [flags] -- PROGRAM [ARGUMENT...]")
		flag.PrintDefaults()
		return failed
	default:
		status, err = vm.Run(ctx, c, flag.Args()...)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		return failed
	}
	return status
}
