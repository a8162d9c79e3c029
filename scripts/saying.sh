#!/usr/bin/env bash
# Runs a command that says little or nothing, and says every two seconds how far it is; if it fails, all it said.
#   scripts/saying.sh "installing into .venv" pip install ...
set -euo pipefail

what=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "$what"
"$@" > "$log" 2>&1 &
running=$!
trap 'kill "$running" 2> /dev/null; exit 130' INT TERM HUP

shown=0
while kill -0 "$running" 2> /dev/null; do
    sleep 0.2
    if ((SECONDS >= shown + 2)); then
        shown=$SECONDS
        echo "$what, $shown s so far: $(tail -n 1 "$log" | tr -d '\r' | cut -c 1-90)"
    fi
done
wait "$running" || { status=$?; cat "$log" >&2; exit "$status"; }
