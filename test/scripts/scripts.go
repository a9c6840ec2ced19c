// Package scripts holds the conformance scripts: one behaviour of Service proxying a file, named by its file, in the
// language that README.md describes. Package backendtest runs them against every mode. It decides nothing and imports
// nothing of this repository.
package scripts

import "embed"

// files are the scripts; the embed directive needs a variable of the package.
//
//go:embed *.txtar
var files embed.FS

// Files gives the scripts.
func Files() embed.FS { return files }
