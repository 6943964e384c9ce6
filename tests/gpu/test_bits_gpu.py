# SPDX-License-Identifier: MIT
"""The same bits under every setting, on a GPU: hashes of all logits over policy, order, depth, ring, chunk, floor,
residency, copies in one call of the driver, and the number of workers at once. Slots are poisoned.

The demo model under all settings; a larger one, of several thousand tokens and experts of real width, under settings
in which every two values meet.

    EXPERTD_BUILD=build python3 -m pytest -s tests/gpu/test_bits_gpu.py
"""
import itertools
import os
import random
import subprocess
import time

from gpu_kit import BUILD, DEVICE, LANES, MKMODEL, ON_GPU, SERVER, STORY_EXPERTS, Reader, choices, in_parallel, options_of, pairwise, prompts, serve, world  # noqa: F401

LONG = int(os.environ.get("EXPERTD_LONG", "4608" if ON_GPU else "600"))
SHAPE = (["--preset=qwen3-30b-a3b", "--layers=3", "--vocab=4096"] if ON_GPU else
         ["--preset=tiny", "--ctx=8192", "--vocab=2048"])


class Tally:
    """Hashes of one prompt, from any number of workers."""

    def __init__(self, world, path):
        self.world, self.path, self.want = world, path, None
        self.cases = self.streams = self.dropped = 0
        self.wrong = []

    def walk(self, cases, *options, instance="default", whole=True):
        """One worker through all cases."""
        start, streams = time.monotonic(), 0
        reader = Reader(self.world, "--poison", "--hash", "--prompt-file", self.path, *options, instance=instance)
        for case in cases:
            r = reader.ask(*options_of(case))
            if self.want is None:
                self.want = r["hash"]
            if r["hash"] != self.want:
                self.wrong.append(f"{instance} {options} {case}: {r['hash']}")
            self.cases += 1
            streams += r["stream"]["chunks"]
            self.dropped += r["stream"]["dropped"]
        reader.end()
        self.streams += streams
        print(f"  {instance} {' '.join(map(str, options))}: {len(cases)} settings, {streams} streams, "
              f"{time.monotonic() - start:.1f} s", flush=True)

    def check(self, what, start):
        print(f"{what}: {self.cases} settings, {self.streams} streams, {self.dropped} entries dropped, "
              f"{len(self.wrong)} wrong, hash {self.want}, {time.monotonic() - start:.1f} s", flush=True)
        assert not self.wrong, self.wrong[:10]
        assert self.dropped, "nothing was ever dropped: the comparison proved nothing"


def test_several_sequences_in_a_pass(world):
    """16 and 32 sequences in shuffled passes, their keys and values in strewn blocks, each as alone."""
    serve(world, {"default": []})
    for options in (["--floor", "1", "--ring", "20"], ["--floor", "1"], ["--floor", "1024"]):
        start = time.monotonic()
        r = subprocess.run([str(BUILD / "tests/gpu/g_batch"), str(world.runtime), "default", "--device", DEVICE, *options],
                           capture_output=True, text=True, timeout=300)
        assert r.returncode == 0, r.stderr
        print(f"{' '.join(options)}: {r.stdout.strip()}, {time.monotonic() - start:.1f} s", flush=True)


def test_short(world):
    """Everything crossed with everything, 300 tokens of the demo model."""
    start = time.monotonic()
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p300"]["text"])
    instances = {"b8": [], "b1": ["--batch", "1"], "b16": ["--batch", "16"]}
    serve(world, instances)
    tally = Tally(world, path)
    tally.walk([{"stream": "full", "floor": 1, "chunk": 300}], instance="b8")  # alone on the GPU
    # A ring of few slots means a hand-shake for each, which is slow beside other workers: no short chunks there.
    rings = (1, 2, STORY_EXPERTS, STORY_EXPERTS * 5 // 2)
    cases = [{"stream": s, "order": o, "floor": 1, "depth": d, "ring": r, "chunk": c}
             for r, s, o, d, c in itertools.product(rings, choices("stream"), choices("order"), (1, 2, 16, 64), (64, 300))
             if (s != "full" or (o, d) == ("index", 16)) and (r > 2 or c == 300)]
    cases += [{"ring": r, "floor": 5000, "chunk": c} for r, c in itertools.product(rings, (7, 77, 300)) if r > 2 or c == 300]
    random.Random(1).shuffle(cases)
    # another ring or floor is a new session
    some = sorted(cases[:len(cases) // (1 if ON_GPU else 8)], key=lambda case: (case["ring"], case["floor"]))
    lanes = []
    for n, instance in enumerate(instances):
        lanes += [lambda i=instance, n=n: tally.walk(some[n::len(instances)], instance=i)]
        lanes += [lambda i=instance, n=n: tally.walk(some[n::9], "--resident", (1, 7, 30)[n], instance=i)]
    lanes += [lambda: tally.walk([{"chunk": c} for c in (3, 64, 300)], "--resident", STORY_EXPERTS, instance="b8")]
    in_parallel(lanes, LANES)
    tally.check("short", start)


def test_two_workers(world):
    """Two workers of one GPU, reading at the same time, without MPS if there is none; and after each other."""
    start = time.monotonic()
    world.expertd(*SERVER)
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p300"]["text"])
    tally = Tally(world, path)
    tally.walk([{"stream": "full", "floor": 1, "ring": 96}], instance="default")
    cases = [{"stream": s, "order": o, "floor": 1, "ring": r, "chunk": c} for s, o, r, c in (
        ("routed", "predicted", 96, 300), ("full", "index", 96, 300), ("routed", "index", 48, 100), ("routed", "recent", 20, 150),
        ("routed", "predicted", 10, 300))]
    in_parallel([lambda: tally.walk(cases, instance="default"), lambda: tally.walk(cases[::-1], instance="default")])
    tally.check("two workers", start)


def test_long(world):
    """Chunks of 512, 1,024, 4,096 tokens and the whole prompt; experts of 2.65 MB on a GPU."""
    start = time.monotonic()
    model, path = world.path / "model.gguf", world.path / "prompt.txt"
    subprocess.run([str(MKMODEL), *SHAPE, str(model)], check=True, stdout=subprocess.DEVNULL)
    path.write_text(subprocess.run([str(MKMODEL), *SHAPE, f"--text={LONG}"], check=True, capture_output=True,
                                   text=True).stdout)
    instances = {"b8": [], "b1": ["--batch", "1"]}
    serve(world, instances, model=model)
    experts = 128 if ON_GPU else 16
    tally = Tally(world, path)
    tally.walk([{"stream": "full", "floor": 1, "chunk": LONG}], "--chunk", LONG, instance="b8")
    print(f"long: {LONG} tokens, alone {time.monotonic() - start:.1f} s", flush=True)
    axes = {"ring": [experts // 3, experts, 2 * experts + 5], "floor": [1, 1024, 100000], "stream": choices("stream"),
            "order": choices("order"), "depth": [1, 2, 16, 64], "chunk": [512, 1024, 4096, LONG]}
    rng = random.Random(2)
    lanes = []
    for instance in instances:
        for resident in (0, experts // 3):
            cases = sorted(pairwise(axes, rng), key=lambda case: (case["ring"], case["floor"]))
            cases.append({"ring": 5, "floor": 1, "stream": "routed", "order": "index", "depth": 16, "chunk": LONG})
            lanes.append(lambda c=cases, i=instance, r=resident: tally.walk(c, "--chunk", LONG, "--resident", r, instance=i))
    lanes.append(lambda: tally.walk([{"chunk": c} for c in axes["chunk"]], "--chunk", LONG, "--resident", experts,
                                    instance="b8"))
    in_parallel(lanes, LANES)
    tally.check("long", start)
