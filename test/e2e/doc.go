// Package e2e runs the real program, as it is built and shipped, on nodes made of network namespaces, and asks of it what
// an operator relies on: that traffic goes on whatever happens to the daemon, that bad objects harm nobody but themselves,
// and that what others write, and what kube-proxy left, is treated with care. Everything here is a test; what a single
// part of the program decides is tested next to that part.
//
// It must not look into the program: it knows the command line, the control socket, the log and the kernel. The nodes are
// those of package netns, the API server is that of package cluster.
//
// Everything needs root. Read site_test.go first, then load_test.go and steady_test.go.
package e2e
