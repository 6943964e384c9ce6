#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""two_gpus.py BUILD [SECONDS]: one expertd, one worker on each GPU, all reading the same prompt again and again.
Prints tokens/s of the first GPU alone, of all together, their ratio, and how much host memory the experts take
(proportional set size of the arena in all processes, over its size). Hashes must be equal on all GPUs. MODEL, SHAPE
and TOKENS override the model and the prompt. Exit status 1: other hashes, a ratio below 0.95 for each GPU, or experts
held more than once; 77: fewer than two GPUs. EXPERTD_DEVICE=host tries it with two workers on the host.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

os.environ["EXPERTD_BUILD"] = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve())
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_kit import MKMODEL, ON_GPU, SERVER, Reader, World, in_parallel  # noqa: E402

SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
SHAPE = os.environ.get("SHAPE", "--preset=qwen3-30b-a3b --layers=12" if ON_GPU else "--preset=tiny").split()
TOKENS = int(os.environ.get("TOKENS", "2048" if ON_GPU else "200"))


def gpus():
    if not ON_GPU:
        return 2
    r = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = sum(line.startswith("GPU ") for line in r.stdout.splitlines())
    return min(count, len(seen.split(","))) if seen is not None else count


def arena_pss(pids, path):
    """Bytes of the arena that the processes account for together."""
    total, inside = 0, False
    for pid in pids:
        for line in open(f"/proc/{pid}/smaps"):
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                inside = str(path) in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def measure(readers, seconds):
    """Tokens/s of each. All begin together; each counts what it ended within the time."""
    begin = threading.Barrier(len(readers))

    def one(reader):
        begin.wait()
        start, n = time.monotonic(), 0
        reader.say()
        while True:
            reader.say()  # one ahead, so that the worker never waits for us
            r = reader.hear()
            assert "error" not in r, r
            n += len(r["ids"])
            if time.monotonic() - start >= seconds:
                rate = n / (time.monotonic() - start)
                reader.hear()
                return rate

    return in_parallel([lambda r=r: one(r) for r in readers])


def main():
    count = gpus()
    if count < 2:
        print(f"two_gpus.py: {count} GPU: two are needed")
        return 77
    with tempfile.TemporaryDirectory(prefix="xd-", dir="/dev/shm") as path:
        world = World(path)
        try:
            model = os.environ.get("MODEL") or f"{path}/model.gguf"
            if not os.path.exists(model):
                subprocess.run([str(MKMODEL), *SHAPE, model], check=True, stdout=subprocess.DEVNULL)
            text = world.path / "prompt.txt"
            text.write_text(subprocess.run([str(MKMODEL), *SHAPE, f"--text={TOKENS}"], check=True, capture_output=True,
                                           text=True).stdout)
            d = world.expertd(*SERVER, model=model)
            readers = []
            for n in range(count):
                device = ["--device", f"cuda:{n}"] if ON_GPU else ["--device", "host", "--threads", "1"]
                readers.append(Reader(world, "--prompt-file", text, "--floor", 1, device=device))
            first = {reader.ask("--hash")["hash"] for reader in readers}
            alone = []
            for _ in range(2):  # interleaved
                alone.append(measure(readers[:1], SECONDS / 2)[0])
                together = measure(readers, SECONDS / 2)
            alone = sum(alone) / len(alone)
            pids = [d.pid] + [r.process.pid for r in readers]
            held, size = arena_pss(pids, world.arena), sum(f.stat().st_size for f in world.arena.rglob("arena*") if f.is_file() and f.stat().st_size > 1 << 20)
            print(f"{count} GPUs, {TOKENS} tokens a read: one {alone:.0f} tokens/s, together "
                  f"{' + '.join(f'{x:.0f}' for x in together)} = {sum(together):.0f}, ratio {sum(together) / alone:.3f}; arena "
                  f"{size / 1e9:.2f} GB, held {held / 1e9:.2f} GB = {held / size:.3f} times by {len(pids)} processes; "
                  f"{len(first)} different results", flush=True)
            for reader in readers:
                reader.end()
            good = len(first) == 1 and held <= 1.01 * size and (not ON_GPU or sum(together) >= 0.95 * count * alone)
        finally:
            world.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
