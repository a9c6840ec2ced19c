#!/usr/bin/env bash
# Runs every fuzz target of the repository, one after the other, for the given time each.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:?usage: fuzz.sh TIME, such as 60s}
count=0
while IFS=: read -r file target; do
	dir=./$(dirname "$file")
	echo "$dir $target"
	go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$dir"
	count=$((count + 1))
done < <(git ls-files --cached --others --exclude-standard -- '*_test.go' |
	xargs grep -oE '^func Fuzz[A-Za-z0-9_]*' | sed 's/func //' | sort)
echo "$count fuzz targets, $time each: no finding"
