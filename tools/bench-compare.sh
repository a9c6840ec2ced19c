#!/usr/bin/env bash
# Runs benchmarks ten times here and ten times at another commit, in turn, and compares them.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:?usage: bench-compare.sh COMMIT [REGEXP]}
pattern=${2:-.}
work=$(mktemp -d)
trap 'git worktree remove --force "$work/base" 2>/dev/null || true; rm -rf "$work"' EXIT
git worktree add --quiet --detach "$work/base" "$base"
for _ in $(seq 10); do
	(cd "$work/base" && go test -run '^$' -bench "$pattern" -benchmem ./internal/...) >>"$work/old.txt"
	go test -run '^$' -bench "$pattern" -benchmem ./internal/... >>"$work/new.txt"
done
go tool -modfile=tools/go.mod benchstat "$work/old.txt" "$work/new.txt"
