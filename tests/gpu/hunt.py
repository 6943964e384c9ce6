# SPDX-License-Identifier: MIT
"""Where do rare wrong bits come from? The same long prompt read again and again in several ways, each for some seconds:
how often the result differs, and of those traced which step of which chunk was the first that did, in which pieces (of
32) of its rows and columns.

    hunt.py BUILD [NAME...]

HUNT_S: seconds a way (12). EXPERTD_DEVICE, EXPERTD_LONG as in the other tests. Ways: as it is, without steps traced;
steps traced; slots compared with the arena too; experts all resident, no link; copies one by one; without the
attention's shared items, without Hopper's attention, without Hopper's products. Exit status 1 when any differed.
"""
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

BUILD = pathlib.Path(sys.argv[1]).resolve()
os.environ.setdefault("EXPERTD_BUILD", str(BUILD))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_kit import DEVICE, MKMODEL, SERVER, Reader, World, options_of  # noqa: E402

# An emulated GPU is far too slow for the shape that failed.
SMALL = DEVICE.startswith("host") or "EXPERTD_CUDA_LIBRARY" in os.environ
LONG = int(os.environ.get("EXPERTD_LONG", "45" if SMALL else "4608"))
SHAPE = (["--preset=tiny", "--vocab=2048", "--head-dim=64"] if SMALL else ["--preset=qwen3-30b-a3b", "--layers=3", "--vocab=4096"])

SECONDS = float(os.environ.get("HUNT_S", 12))
EXPERTS = 16 if SMALL else 128
TRACED, CHECKED = {"EXPERTD_TRACE_STEPS": "trace"}, {"EXPERTD_TRACE_STEPS": "trace", "EXPERTD_TRACE_SLOTS": "1"}
AS_IT_FAILED = {"ring": 2 * EXPERTS + 5, "floor": 1024, "stream": "full", "order": "index", "depth": 16, "chunk": LONG * 2 // 9}
# name: (environment, options of the worker, expertd)
WAYS = {
    "plain": ({}, ["--poison"], "b8"),
    "traced": (TRACED, ["--poison"], "b8"),
    "slots": (CHECKED, ["--poison"], "b8"),
    "resident": (TRACED, ["--resident", EXPERTS], "b8"),
    "one-by-one": (CHECKED, ["--poison"], "b1"),
    "whole-items": ({**TRACED, "EXPERTD_WITHOUT": "shared_items"}, ["--poison"], "b8"),
    "no-attn_sm90": ({**TRACED, "EXPERTD_WITHOUT": "attn_sm90"}, ["--poison"], "b8"),
    "no-experts_sm90": ({**TRACED, "EXPERTD_WITHOUT": "experts_sm90"}, ["--poison"], "b8"),
}


def pieces(a, b):
    """Which of 32 differ, as "3-5,9"."""
    at = [i for i in range(len(a)) if a[i] != b[i]]
    runs = []
    for i in at:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(x) if x == y else f"{x}-{y}" for x, y in runs)


def first_difference(want, got):
    """Of two reads' chunks: the first wrong step and where."""
    for n, (a, b) in enumerate(zip(want, got)):
        steps = dict(a["steps"])
        for name, sums in b["steps"]:
            if steps[name] != sums:
                x, y = steps[name].split(), sums.split()
                return f"chunk {n} layer {name}: rows {pieces(x[:32], y[:32])}, columns {pieces(x[32:], y[32:])} of 32"
    return "no step differs: the head or what is behind it"


def slots_of(chunks):
    return [f"chunk {n}: {c['slots']['bad']} pieces wrong: {'; '.join(c['slots']['notes'][:4])}"
            for n, c in enumerate(chunks) if c.get("slots") and (c["slots"]["bad"] or c["slots"]["notes"])]


class Hunt:
    def __init__(self, world, prompt):
        self.world, self.prompt = world, prompt
        self.any = False

    def way(self, name):
        env, options, instance = WAYS[name]
        trace = self.world.path / "trace"
        trace.unlink(missing_ok=True)
        env = {**env, "EXPERTD_TRACE_STEPS": str(trace)} if "EXPERTD_TRACE_STEPS" in env else env
        old = dict(os.environ)
        os.environ.update(env)
        try:
            reader = Reader(self.world, "--hash", "--prompt-file", self.prompt, "--chunk", AS_IT_FAILED["chunk"], *options,
                            instance=instance)
        finally:
            os.environ.clear()
            os.environ.update(old)
        hashes, kept, first, slots, streams = collections.Counter(), {}, None, [], 0
        start = None
        while start is None or time.monotonic() - start < SECONDS:
            r = reader.ask(*options_of(AS_IT_FAILED))
            start = start or time.monotonic()  # the first one is slower, and sums up the arena
            hashes[r["hash"]] += 1
            streams += r["stream"]["chunks"]
            if trace.exists():
                chunks = [json.loads(line) for line in trace.read_text().splitlines()]
                os.truncate(trace, 0)
                slots += [f"read {sum(hashes.values())} {r['hash']}: {s}" for s in slots_of(chunks)]
                if r["hash"] not in kept:
                    kept[r["hash"]] = chunks
        reader.end()
        right = hashes.most_common(1)[0][0]
        wrong = sum(hashes.values()) - hashes[right]
        print(f"{name:16} {sum(hashes.values()):5} reads {streams:6} streams {wrong:4} wrong  {time.monotonic() - start:5.1f} s"
              f"  hash {right}", flush=True)
        for other, chunks in kept.items():
            if other != right:
                print(f"    {other} ({hashes[other]}x): {first_difference(kept[right], chunks)}", flush=True)
        for s in slots[:8]:
            print("    slots:", s, flush=True)
        self.any |= wrong > 0 or bool(slots)


def main():
    names = sys.argv[2:] or list(WAYS)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="xd-") as d:
        world = World(pathlib.Path(d))
        try:
            model, prompt = world.path / "model.gguf", world.path / "prompt.txt"
            subprocess.run([str(MKMODEL), *SHAPE, str(model)], check=True, stdout=subprocess.DEVNULL)
            prompt.write_text(subprocess.run([str(MKMODEL), *SHAPE, f"--text={LONG}"], check=True, capture_output=True,
                                             text=True).stdout)
            for instance, options in {"b8": [], "b1": ["--batch", "1"]}.items():
                if any(WAYS[n][2] == instance for n in names):
                    world.expertd(*SERVER, *options, instance=instance, model=model)
            hunt = Hunt(world, prompt)
            for name in names:
                try:
                    hunt.way(name)
                except AssertionError as e:
                    print(f"{name:16} FAILED: {str(e)[-600:]}", flush=True)
                    hunt.any = True
        finally:
            world.close()
    return hunt.any


if __name__ == "__main__":
    sys.exit(main())
