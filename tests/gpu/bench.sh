#!/bin/bash
# SPDX-License-Identifier: MIT
# bench.sh [SECONDS_PER_READ]: the tables of the README on a GPU: builds, makes a synthetic model of the
# qwen3-30b-a3b shape (18 GB in /dev/shm; MODEL names one that is there), starts one expertd, and prints reads of
# 512 to 32,768 tokens and a turn under every setting, reads below the floor, decoding, and reads with all experts
# resident. BUILD_DIR: build-gpu. TABLES: which of "reads long short decode resident" (default: all). TRACE=FILE keeps
# what each chunk did when, for tools/timeline. Exit status 77 where there is no driver.
set -uo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD_DIR:-$top/build-gpu}
device=${EXPERTD_DEVICE:-cuda}
model=${MODEL:-/dev/shm/bench-$$.gguf}
seconds=${1:-9}
tables=${TABLES:-reads long short decode resident}
shape=(--preset=qwen3-30b-a3b ${SHAPE:-})
sizes=${SIZES:-512,1046,1979,2048,4096,8192}
turn=${TURN:-18800+1790}
long=${LONG:-32768}
[ "$device" != cuda ] || command -v nvidia-smi >/dev/null || exit 77
if [ ! -f "$build/build.ninja" ]; then
    meson setup "$build" "$top" -Dcuda=enabled >"$build.log" 2>&1 || { tail -n 20 "$build.log"; exit 1; }
fi
ninja -C "$build" expertd/expertd inferd/inferd tools/mkmodel tools/expert-bench tools/expertctl >"$build.log" 2>&1 ||
    { grep -E -A5 'error|FAILED' "$build.log" | head -40; exit 1; }
run=$(mktemp -d /dev/shm/bench-run-XXXXXX)
daemon=
cleanup() {
    [ -z "$daemon" ] || { kill "$daemon"; wait "$daemon"; } 2>/dev/null
    rm -rf "$run"
    [ -n "${MODEL:-}" ] || rm -f "$model"
}
trap cleanup EXIT
[ -f "$model" ] || "$build"/tools/mkmodel "${shape[@]}" "$model" >/dev/null || exit 1
"$build"/tools/mkmodel "${shape[@]}" --text="${WORDS:-33000}" >"$run/text" || exit 1
"$build"/expertd/expertd --device "$device" --model "$model" --runtime-dir "$run" --no-keep \
    ${TRACE:+--trace-file "$TRACE"} ${LINK:+--link-gbps "$LINK"} 2>"$run/log" &
daemon=$!
for ((i = 0; i < 600; i++)); do
    "$build"/tools/expertctl status --runtime-dir "$run" --json 2>/dev/null | grep -q '"serving"' && break
    kill -0 "$daemon" 2>/dev/null || { cat "$run/log"; exit 1; }
    sleep 0.1
done
nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader 2>/dev/null
worst=0
bench() { # TITLE ARGUMENT... $as: for bench_tables.py
    printf '\n### %s\n\n    expert-bench --ring %s --bits last' "$1" "${RING:-256}"
    shift
    printf ' %s' "$@"
    printf '\n\n'
    "$build"/tools/expert-bench --runtime-dir "$run" --prompt-file "$run/text" --ring "${RING:-256}" --bits last -q \
        --json "$@" >"$run/json" || { worst=$?; tail -n 5 "$run/log"; }
    [ ! -s "$run/json" ] || python3 "$top"/tests/gpu/bench_tables.py $as <"$run/json"
    as=
}
as=
orders="full routed/index/16 routed/recent routed/predicted oracle"
for table in $tables; do
    case $table in
    reads) bench "reads and a turn" --ctx 36864 --seconds "$seconds" -n 7 --tokens "$sizes,$turn" $orders ;;
    long) bench "a long read" --ctx 36864 -n 2 --tokens "$long" $orders ;;
    short) bench "below the floor: demand waits for the router, ahead does not" --ctx 4096 --seconds 3 -n 5 \
        --tokens "${SHORT:-256,512}" demand routed/predicted demand/index/1 full ahead ;;
    decode)
        as=decode
        bench "decoding, experts by demand" --ctx 4096 -n 3 --tokens "${SHORT:-256,512}" --generate 32 routed/predicted
        ;;
    resident) bench "every expert resident: computing alone" --ctx 36864 --resident 1024 -n 3 \
        --tokens "${RESIDENT:-1046,4096,8192,$long}" routed/predicted ;;
    esac
done
grep -E 'flag write|warning|error' "$run/log" | head -n 5
exit "$worst"
