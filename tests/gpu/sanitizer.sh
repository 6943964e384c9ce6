#!/bin/bash
# SPDX-License-Identifier: MIT
# sanitizer.sh BUILD [TOOL...]: compute-sanitizer (memcheck, racecheck, synccheck) over the kernels' parity test in its
# small sizes and over a whole worker that reads a prompt (streamed, resident, chunked, decoding) beside an expertd
# without it. racecheck is slow: each kernel's test is a process of its own, and the worker reads four tokens. One line
# a tool and program with what was found and the seconds; the runs go side by side. LIMIT_S bounds each (240). Exit
# status 1: something was found or a run did not end; 77: there is no compute-sanitizer.
set -uo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "$1" && pwd) || exit 2
shift
tools=${*:-memcheck racecheck synccheck}
limit=${LIMIT_S:-240}
cs=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
[ -n "$cs" ] || { echo "sanitizer.sh: no compute-sanitizer: it comes with the CUDA Toolkit" >&2; exit 77; }
run=$(mktemp -d /dev/shm/xd-XXXXXX) || exit 1
daemon=
cleanup() {
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null
    wait
    rm -rf "$run"
}
trap cleanup EXIT

"$build"/tools/mkmodel --preset=tiny --text=24 >"$run/text" || exit 1
worker="$build/inferd/inferd logits --runtime-dir $run --device cuda --raw --positions none --hash --floor 1 --ctx 256
    --watchdog $limit --resident 3"
"$build"/expertd/expertd --model "$top"/tools/model/story-q4_k.gguf --device cuda --runtime-dir "$run" --arena-dir "$run" \
    --no-keep --watchdog-ms $((limit * 1000)) 2>"$run/expertd.log" &
daemon=$!
# What a worker does: below and above the floor, both policies, a follow-up turn, decoding.
cat >"$run/reads" <<'END'
--stream full --ring 16
--order predicted --depth 4
--keep -n 3
--floor 5000 --chunk 7
END
echo "--stream full --ring 48 -n 2" >"$run/read"
for ((i = 0; i < 400; i++)); do
    "$build"/tools/expertctl status --runtime-dir "$run" >/dev/null 2>&1 && break
    sleep 0.05
done

one() { # TOOL NAME PROGRAM...: one line, exit status 0 if clean
    local tool=$1 name=$2 log=$run/$1-$2.log start=$SECONDS status what
    shift 2
    timeout -k 5 "$limit" "$cs" --tool "$tool" --error-exitcode 9 --print-limit 20 "$@" >"$log" 2>&1
    status=$?
    what=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')
    [ $status -ne 124 ] && [ $status -ne 137 ] || what="not done within $limit s"
    printf '%-10s %-9s exit status %d, %s, %d s\n' "$tool" "$name" "$status" "${what:-no summary}" $((SECONDS - start))
    [ $status -eq 0 ] || grep -vE '^(ok|\{)' "$log" | cut -c1-200 | head -n 30
    return $status
}

pids=
for tool in $tools; do
    if [ "$tool" = racecheck ]; then
        one "$tool" worker $worker --chunk 4 --ids 1,2,3,4 --reads "$run/read" &
        pids+=" $!"
        for name in ${KERNELS:-$(grep -o '{"[a-z_]*", test_' "$top"/tests/gpu/t_cu_kernels.c | cut -d'"' -f2)}; do
            one "$tool" "$name" "$build"/tests/gpu/t_cu_kernels --small "$name" &
            pids+=" $!"
        done
        continue
    fi
    one "$tool" kernels "$build"/tests/gpu/t_cu_kernels --small &
    pids+=" $!"
    one "$tool" worker $worker --chunk 64 --prompt-file "$run/text" --reads "$run/reads" &
    pids+=" $!"
done
worst=0
for pid in $pids; do
    wait "$pid" || worst=1
done
hashes=$(grep -ho '"hash":"[0-9a-f]*"' "$run"/{memcheck,synccheck}-worker.log 2>/dev/null | sort | uniq -c)
[ -n "$hashes" ] || exit $worst
printf 'hashes of the workers (each of the reads, once a tool):\n%s\n' "$hashes"
[ "$(wc -l <<<"$hashes")" -eq 2 ] || { echo "other hashes than one for the prompt and one for the follow-up" >&2; worst=1; }
exit $worst
