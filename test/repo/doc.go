// Package repo tests the repository itself: who may import whom and why not, one package comment for each package, the size
// of files, that nothing names a place on somebody's machine, that the documents in two languages keep step. It has no code
// but tests and must not import anything of the repository.
package repo
