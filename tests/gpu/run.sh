#!/bin/bash
# SPDX-License-Identifier: MIT
# run.sh [MESON_OPTION...]: builds and runs what needs a CUDA device, on a machine with one: right between two
# processes, after kill -9 of either, and how fast. Prints each program's figures. BUILD_DIR: build-gpu.
# Exit status 77 where there is no driver.
set -uo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD_DIR:-$top/build-gpu}
targets="tests/gpu/g_link tests/gpu/g_daemon tests/gpu/g_stream expertd/expertd tools/mkmodel inferd/inferd tools/expertctl"
model=${MODEL:-/dev/shm/run-gpu-model.gguf} # MODEL names one that is there already
if [ ! -f "$build/build.ninja" ]; then
    meson setup "$build" "$top" -Dcuda=enabled "$@" >"$build.log" 2>&1 || { tail -n 20 "$build.log"; exit 1; }
fi
ninja -C "$build" $targets >"$build.log" 2>&1 || { grep -E -A5 'error|FAILED' "$build.log" | head -40; exit 1; }
nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader 2>/dev/null
printf 'huge pages in shared memory: %s\n' "$(cat /sys/kernel/mm/transparent_hugepage/shmem_enabled 2>/dev/null)"
worst=0
[ -f "$model" ] || { trap 'rm -f "$model"' EXIT; "$build"/tools/mkmodel --preset=qwen3-30b-a3b --layers=16 "$model" >"$build.log" || exit 1; }
for program in "g_link" "g_daemon $build/expertd/expertd $top/tools/model/story-q4_k.gguf" \
    "g_stream $build/expertd/expertd $model"; do
    printf '== %s\n' "${program%% *}"
    CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32 timeout 240 "$build"/tests/gpu/$program
    status=$?
    printf '== %s: exit status %d\n' "${program%% *}" "$status"
    [ "$status" -eq 0 ] || worst=$status
done
printf '== workers: reference outputs, bits, kill -9\n'
python3 "$top"/tests/data/make_models.py "$build"/models >"$build.log" 2>&1
EXPERTD_BUILD=$build timeout 400 python3 -m pytest -q -s -p no:cacheprovider "$top"/tests/gpu/test_worker_gpu.py
status=$?
printf '== workers: exit status %d\n' "$status"
[ "$status" -eq 0 ] || worst=$status
exit "$worst"
