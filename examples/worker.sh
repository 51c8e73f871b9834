#!/bin/sh
# A worker as a shell script: it takes one job at a time and adds it to a file that others write too.
# Start several of them. One that is killed loses nothing: its job comes again when the lease is over.
set -eu
export TRUNKLINE_URL="${TRUNKLINE_URL:-file:.bus}" TRUNKLINE_ACTOR="${TRUNKLINE_ACTOR:-worker-$$}"

while :; do
    code=0
    job=$(trunkline take jobs --group workers --lease 5m --wait "${1:-55s}") || code=$?
    [ "$code" -ne 3 ] || exit 0 # 3: no job came
    [ "$code" -eq 0 ] || exit "$code"
    handle=$(printf '%s' "$job" | sed 's/.*"handle":"\([^"]*\)".*/\1/')

    # The claim is held while cat runs, and released behind it. The file gets whole lines.
    if printf '%s\n' "$job" | trunkline claim done.ndjson --wait 1m -- sh -c 'cat >> done.ndjson'; then
        trunkline ack -q "$handle"
    else
        trunkline nack -q "$handle" --delay 5s --reason "done.ndjson was not written"
    fi
done
