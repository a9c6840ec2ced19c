# Each target is one command that can also be typed by hand. "make help" lists them.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

GO      ?= go
MODE    ?= iptables
FUZZTIME ?= 60s
N       ?= 500
P       ?= ./...
B       ?= .
BASE    ?= main
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LINT    := CGO_ENABLED=0 $(GO) tool -modfile=tools/go.mod golangci-lint
LDFLAGS := -s -w -X main.version=$(VERSION)
# The race detector needs a C compiler and a C library to link with.
RACE    := $(shell echo 'int main(void) { return 0; }' | $${CC:-gcc} -x c -o /dev/null - 2>/dev/null && echo -race)
# What needs root, or a user namespace of its own.
NETNS_PACKAGES := ./test/netns/... ./test/demo/... ./internal/kernel/... ./internal/backend/... ./internal/cli/...
# What is tested on other kernels than this machine's, in a virtual machine: not what starts programs by the thousand.
VM_PACKAGES := $(addprefix ./internal/kernel/,conntrack ipset ipvs route)
# The ipvs mode's conformance suite and the built daemon, on a kernel that has IPVS. In "make test" the suite leaves out
# what takes minutes when emulated, and of IPv6 runs what differs most from IPv4.
IN_VM    = -exec '$(CURDIR)/bin/vm -kernel $(KERNEL) -timeout 60m --'
VM_E2E   = TURNOUT_E2E_BINARY='$(CURDIR)/bin/turnout' $(GO) test -json -count=1 -timeout 60m -run IPVS $(IN_VM) ./test/e2e
VM_SUITE = $(GO) test -json -count=1 -timeout 60m $(IN_VM) ./internal/backend/ipvs
VM_IPV6  := cluster-ip|dual-stack|matrix-.*|source-.*|external-.*|session-.*|removal-.*|restart-.*|pod-.*
KERNEL  ?= 6.1
KERNELS ?= 6.1 6.12
SERVICES ?= 1000
# Packages with files that a test can write anew.
GOLDEN_PACKAGES = $(shell grep -rl --include='*_test.go' TURNOUT_UPDATE_GOLDEN . | xargs -r -n1 dirname | sort -u)

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18
	@echo
	@echo 'Variables: MODE=$(MODE) KERNEL=$(KERNEL) FUZZTIME=$(FUZZTIME) N=$(N) P=package T=test B=benchmark BASE=$(BASE)'

.PHONY: build
build: ## Build bin/turnout
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/turnout ./cmd/turnout

.PHONY: demo
demo: build ## Show a small cluster with traffic on this machine, in less than a minute (root; MODE=iptables)
	@$(GO) build -o bin/demo ./test/demo
	@bin/demo -turnout bin/turnout -mode '$(MODE)'

.PHONY: test
test: bin/vm build ## Everything: lint, a short fuzz, all tests (the product's with the race detector, the long suites without); says what could not run
	@status=0; \
	$(MAKE) --no-print-directory lint || { echo 'make lint: failed'; status=1; }; \
	$(MAKE) --no-print-directory fuzz FUZZTIME=5s || { echo 'make fuzz: failed'; status=1; }; \
	{ $(GO) test -json $(RACE) -short -shuffle=on -timeout 30m ./cmd/... ./internal/...; \
	  $(GO) test -json -count=1 -p 1 -timeout 30m ./internal/backend/... ./test/...; \
	  ! bin/vm -check || { $(GO) test -json -count=1 -p 1 -timeout 30m $(IN_VM) $(VM_PACKAGES); $(VM_E2E); \
	    $(VM_SUITE) -run 'TestConforms/kernel/IPv4|TestKernel' -skip 'TestConforms/kernel/IPv4/(a-thousand-services|five-thousand-.*|twelve-hundred-.*)$$'; \
	    $(VM_SUITE) -run 'TestConforms/kernel/IPv6/($(VM_IPV6))$$'; }; \
	} | $(GO) run ./test/report || status=1; \
	if [ -z '$(RACE)' ]; then echo 'No C compiler, so no race detector: install gcc and libc6-dev.'; [ "$$CI" != true ] || status=1; fi; \
	if [ "$$(id -u)" != 0 ]; then echo 'Not root: to run the tests with namespaces too: sudo make test'; fi; \
	exit $$status

.PHONY: test-unit
test-unit: ## The tests of the product's packages, with the race detector
	$(GO) test $(RACE) -shuffle=on ./cmd/... ./internal/...

.PHONY: test-netns
test-netns: ## The tests that need network namespaces, as root or in a user namespace
	@run=; if [ "$$(id -u)" != 0 ]; then run='unshare -rn'; fi; \
	$$run $(GO) test -shuffle=on $(NETNS_PACKAGES)

.PHONY: test-cluster
test-cluster: cluster-tools ## The tests against a real API server
	TURNOUT_REQUIRE_CLUSTER=1 $(GO) test ./test/cluster/...

.PHONY: cluster-tools
cluster-tools: ## Build kube-apiserver and kube-proxy for the tests (10 minutes, once; kept in the user's cache directory)
	$(GO) run ./test/cluster/cmd/apiserver-build kube-apiserver kube-proxy

.PHONY: test-ipvs
test-ipvs: bin/vm build ## All that needs a kernel with IPVS, in a virtual machine (KERNEL=6.1): edges, conformance, daemon; half an hour
	{ $(GO) test -json -count=1 -timeout 60m -p 1 $(IN_VM) $(VM_PACKAGES); $(VM_E2E); $(VM_SUITE) -run 'TestConforms/kernel|TestKernel'; } | \
	  $(GO) run ./test/report
	TURNOUT_VM_KERNEL=$(KERNEL) $(GO) test -json -count=1 -timeout 60m ./test/vm/... | $(GO) run ./test/report

.PHONY: race-ipvs
race-ipvs: build cluster-tools ## Mode ipvs beside kube-proxy in one virtual machine (SERVICES=1000): first sync, changes, processor, memory
	$(GO) test -count=1 -timeout 120m -v ./test/race -services $(SERVICES)

.PHONY: test-kernels
test-kernels: ## The same with each of KERNELS
	@for k in $(KERNELS); do $(MAKE) --no-print-directory test-ipvs KERNEL=$$k || exit; done

.PHONY: bin/vm
bin/vm:
	@CGO_ENABLED=0 $(GO) build -o bin/vm ./test/vm/cmd/vm

.PHONY: golden
golden: ## Write the expected outputs anew and show what changed
	TURNOUT_UPDATE_GOLDEN=1 $(GO) test $(GOLDEN_PACKAGES)
	git --no-pager diff --stat -- '*/testdata/*'

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME
	@tools/fuzz.sh '$(FUZZTIME)'

.PHONY: stress
stress: ## Run the test T of package P N times
	@test -n '$(T)' || { echo 'make stress T=TestName [P=./internal/loop] [N=500]'; exit 2; }
	$(GO) test -run '^$(T)$$' -count='$(N)' -failfast -timeout 60m $(P)

.PHONY: bench
bench: ## Run the benchmarks that match B
	$(GO) test -run '^$$' -bench '$(B)' -benchmem ./internal/...

.PHONY: bench-compare
bench-compare: ## Compare the benchmarks that match B with those of the commit BASE, ten runs each
	@tools/bench-compare.sh '$(BASE)' '$(B)'

.PHONY: lint
lint: ## Run the linters
	$(LINT) run --allow-parallel-runners ./...

.PHONY: fmt
fmt: ## Format the code
	$(LINT) fmt ./...

.PHONY: verify
verify: ## What must hold before a commit is pushed: formatted, vetted, tidy, nothing left over
	$(LINT) fmt --diff ./...
	$(GO) vet ./...
	$(GO) mod tidy -diff
	@test -z "$$(git status --porcelain)" || { git status --short; echo 'the work tree is not clean'; exit 1; }

.PHONY: clean
clean: ## Remove what was built here
	rm -rf bin
