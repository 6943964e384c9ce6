#!/bin/bash
# SPDX-License-Identifier: MIT
# run.sh [STAGE...]: builds and runs what needs a CUDA device, on a machine with one. Stages, by default all:
#
#   kernels    parity with the C reference, same bits repeatedly   goldens    reference outputs of the demo model
#   link       the link between two processes, kills, speed        bits       same bits under every setting
#   daemon     expertd against a worker's protocol                 settings   what only a GPU refuses or reports
#   stream     streams without compute, speed                      soak       10,000 streams with random settings
#   scale      real shapes against an independent float32 model    kills      kill -9 of either side, 100 times each
#   restart    worker and expertd killed: time by phase, residents, 36 GB of memory for a 17 GB model
#   hunt       where rare wrong bits come from: hunt.py, and kernels repeated beside copies; 150 s; not by default
#   sanitizer  compute-sanitizer: memcheck, racecheck, synccheck   two_gpus   one expertd, a worker on each GPU
#
# Prints each one's figures, then a table, last "N passed, N failed, N skipped". Exit status 1 when anything failed,
# 77 where there is no driver. BUILD_DIR: build-gpu. MESON_OPTIONS: for a first build, -Dgpu_arch=90 for instance.
# MODEL: a qwen3-30b-a3b model for `stream` that is there already. LIMIT_S: bound of one stage, 300.
set -uo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD_DIR:-$top/build-gpu}
limit=${LIMIT_S:-300}
all="kernels link daemon stream goldens bits settings soak kills scale restart sanitizer two_gpus"
stages=${*:-$all}
for stage in $stages; do
    case " $all hunt " in
    *" $stage "*) ;;
    *) echo "run.sh: unknown stage $stage: one of $all" >&2; exit 2 ;;
    esac
done
if ! ldconfig -p 2>/dev/null | grep -q libcuda.so.1 && ! nvidia-smi >/dev/null 2>&1; then
    echo "run.sh: no NVIDIA driver: nothing was tested" >&2
    exit 77
fi
# The system's Python may lack numpy or pytest; tools/check makes one that has them.
python=python3
"$python" -c 'import numpy, pytest' 2>/dev/null || python=$top/build-check/venv/bin/python
"$python" -c 'import numpy, pytest' || { echo "run.sh: python3 needs numpy and pytest" >&2; exit 1; }

targets="tests/gpu/t_cu_kernels tests/gpu/b_cu_kernels tests/gpu/g_poison tests/gpu/g_link tests/gpu/g_daemon tests/gpu/g_stream tests/gpu/g_batch expertd/expertd tools/mkmodel
    inferd/inferd tools/expertctl"
if [ ! -f "$build/build.ninja" ]; then
    meson setup "$build" "$top" -Dcuda=enabled ${MESON_OPTIONS:-} >"$build.log" 2>&1 || { tail -n 20 "$build.log"; exit 1; }
fi
ninja -C "$build" $targets >"$build.log" 2>&1 || { grep -E -A5 'error|FAILED' "$build.log" | head -40; exit 1; }
nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader 2>/dev/null
printf 'huge pages in shared memory: %s\n' "$(cat /sys/kernel/mm/transparent_hugepage/shmem_enabled 2>/dev/null)"
export EXPERTD_SRC=$top EXPERTD_BUILD=$build EXPERTD_MODELS=$build/models
export CUDA_MODULE_LOADING=EAGER

pytest() { # FILE...
    (cd "$top/tests/gpu" && "$python" -m pytest -q -s -p no:cacheprovider --tb=short -W ignore "$@")
    local status=$?
    [ $status -ne 5 ] || status=77 # nothing collected
    return $status
}

stage() {
    case $1 in
    kernels)
        "$build"/tests/gpu/t_cu_kernels && "$build"/tests/gpu/g_poison &&
            REPEAT=100 "$build"/tests/gpu/b_cu_kernels tokens dense attention
        ;;
    link) CUDA_DEVICE_MAX_CONNECTIONS=32 "$build"/tests/gpu/g_link ;;
    daemon) "$build"/tests/gpu/g_daemon "$build"/expertd/expertd "$top"/tools/model/story-q4_k.gguf ;;
    stream)
        local model=${MODEL:-$scratch}
        [ -f "$model" ] || "$build"/tools/mkmodel --preset=qwen3-30b-a3b --layers=16 "$model" >"$build.log" || return 1
        "$build"/tests/gpu/g_stream "$build"/expertd/expertd "$model"
        local status=$?
        [ -n "${MODEL:-}" ] || rm -f "$model"
        return $status
        ;;
    goldens)
        "$python" "$top"/tests/data/make_models.py "$build"/models >"$build.log" 2>&1 || tail -n 3 "$build.log"
        pytest test_goldens_gpu.py
        ;;
    bits | settings | soak | kills) pytest "test_$1_gpu.py" ;;
    hunt)
        "$python" "$top"/tests/gpu/hunt.py "$build"
        local status=$?
        REPEAT_S=${HUNT_KERNEL_S:-3} BESIDE=1 "$build"/tests/gpu/b_cu_kernels hunt || status=1
        return $status
        ;;
    scale) "$python" "$top"/tests/gpu/reference_torch.py "$build" ;;
    restart)
        local model=${MODEL:-$scratch}
        [ -f "$model" ] || "$build"/tools/mkmodel --preset=qwen3-30b-a3b "$model" >"$build.log" || return 1
        "$python" "$top"/tests/gpu/restart.py "$build" "$model"
        local status=$?
        [ -n "${MODEL:-}" ] || rm -f "$model"
        return $status
        ;;
    sanitizer) "$top"/tests/gpu/sanitizer.sh "$build" ;;
    two_gpus) "$python" "$top"/tests/gpu/two_gpus.py "$build" ;;
    esac
}
export -f stage pytest
scratch=/dev/shm/run-gpu-$$.gguf
export python top build scratch MODEL

table= passed=0 failed=0 skipped=0
for name in $stages; do
    printf '== %s\n' "$name"
    start=$SECONDS
    timeout -k 5 "$limit" bash -c 'stage "$1"' stage "$name"
    status=$?
    case $status in
    0) word=ok passed=$((passed + 1)) ;;
    77) word=skipped skipped=$((skipped + 1)) ;;
    124 | 137) word="FAILED (not done within $limit s)" failed=$((failed + 1)) ;;
    *) word="FAILED (exit status $status)" failed=$((failed + 1)) ;;
    esac
    table+=$(printf '%-10s %4d s  %s' "$name" $((SECONDS - start)) "$word")$'\n'
done
rm -f "$scratch"
printf '\n%s%d passed, %d failed, %d skipped\n' "$table" $passed $failed $skipped
[ $failed -eq 0 ]
