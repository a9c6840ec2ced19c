// Command turnout is the Service proxy and its tools. It decides nothing but the exit status: see internal/cli.
package main

import (
	"os"

	"github.com/turnout-proxy/turnout/internal/cli"
)

// version is set at link time: -ldflags "-X main.version=v1.2.3".
var version string

func main() {
	os.Exit(cli.Main(os.Args, os.Stdout, os.Stderr, version))
}
