# SPDX-License-Identifier: MIT
"""What the tests of whole workers on a GPU share: long-lived workers that read one prompt after the other with
settings of their own, and what must not grow.

EXPERTD_DEVICE: cuda (default), cuda:N, or host, which tries the tests themselves without a GPU.
"""
import concurrent.futures
import itertools
import json
import os
import pathlib
import re
import select
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from conftest import (BUILD, EXPERTCTL, EXPERTD, INFERD, MKMODEL, SLOW, World, anonymous_bytes, process_facts,  # noqa: E402,F401
                      prompts, world)

DEVICE = os.environ.get("EXPERTD_DEVICE", "cuda")
ON_GPU = not DEVICE.startswith("host")
SERVER = ["--device", DEVICE.split(":")[0]]
WORKER = ["--device", DEVICE] + ([] if ON_GPU else ["--threads", "1"])
# Workers at once. On a GPU without MPS they take turns of 2 ms, and each hand-shake waits for its turn: one is fastest.
LANES = int(os.environ.get("EXPERTD_LANES", "1" if ON_GPU else "2"))
STORY_EXPERTS = 48  # of the demo model, a layer


class Reader:
    """inferd logits --reads on pipes."""

    def __init__(self, world, *options, instance="default", device=None):
        self.world = world
        argv = [INFERD, "logits", *world.where(instance), "--raw", "--positions", "none", "--reads", "-",
                *(WORKER if device is None else device), *map(str, options)]
        self.process = world.spawn(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.buffer = b""

    def say(self, *options):
        self.process.stdin.write((" ".join(map(str, options)) + "\n").encode())

    def hear(self, timeout=120):
        end = time.monotonic() + timeout * SLOW
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
            assert ready, f"no answer within {timeout * SLOW} s: {self.log()}"
            got = self.process.stdout.read(1 << 20)
            assert got, f"the worker has ended: {self.log()}"
            self.buffer += got
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, *options):
        self.say(*options)
        answer = self.hear()
        assert "error" not in answer, (options, answer)
        return answer

    def log(self):
        return self.process.log.read_text(errors="replace")

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(60 * SLOW) == 0, self.log()


def serve(world, instances, **kw):
    """One expertd for each {name: options}, started side by side. (By this thread: a child dies with the thread that
    began it.)"""
    daemons = {i: world.expertd(*SERVER, *o, instance=i, wait=False, **kw) for i, o in instances.items()}
    for i, d in daemons.items():
        world.until(lambda i=i, d=d: d.process.poll() is not None or world.status(i).get("state") == "serving",
                    what=f"expertd {i} serves")
        assert d.process.poll() is None, d.text()
    return daemons


def in_parallel(calls, lanes=None):
    """Results of all calls, `lanes` at a time; the first error is raised."""
    with concurrent.futures.ThreadPoolExecutor(lanes or max(1, len(calls))) as pool:
        return list(pool.map(lambda call: call(), calls))


def gpu_memory():
    """MiB in use on the GPU that the workers see first."""
    if not ON_GPU:
        return 0
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    number = DEVICE.partition(":")[2] or seen or "0"
    r = subprocess.run(["nvidia-smi", "-i", number, "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                       capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    return int(r.stdout.split()[0])


def choices(option):
    """The words that an option of inferd takes, so that a new one is tried too."""
    text = subprocess.run([str(INFERD), "logits", "--help"], capture_output=True, text=True).stdout
    return re.search(rf"--{option}=([\w|]+)", text).group(1).split("|")


def pairwise(axes, rng):
    """Few settings in which every two values of different axes meet. axes: {name: [values]}."""
    names = list(axes)
    left = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    cases = []

    def new(case):
        return sum((a, case[a], b, case[b]) in left for a, b in itertools.combinations(names, 2))

    while left:
        best = max(({n: rng.choice(axes[n]) for n in names} for _ in range(60)), key=new)
        if not new(best):
            a, x, b, y = next(iter(left))
            best = {**best, a: x, b: y}
        left -= {(a, best[a], b, best[b]) for a, b in itertools.combinations(names, 2)}
        cases.append(best)
    return cases


def options_of(case):
    return list(itertools.chain.from_iterable((f"--{k}", v) for k, v in case.items() if v is not None))
