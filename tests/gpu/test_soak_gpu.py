# SPDX-License-Identifier: MIT
"""Ten thousand streams with random settings through several workers of one GPU: each hash right, nothing grows.

    EXPERTD_BUILD=build python3 -m pytest -s tests/gpu/test_soak_gpu.py

EXPERTD_STREAMS and EXPERTD_SEED choose their number and the seed, which is printed. EXPERTD_SOAK_S seconds (240) are
shared by the lives of the workers: where one's share is over no more of its reads begin, and the number of streams is
not asked for, all else is. How far it is is printed every few seconds.
"""
import os
import random
import threading
import time

from gpu_kit import (LANES, ON_GPU, SERVER, STORY_EXPERTS, Reader, anonymous_bytes, choices, gpu_memory, in_parallel,
                     options_of, process_facts, prompts, world)  # noqa: F401

STREAMS = int(os.environ.get("EXPERTD_STREAMS", "10000" if ON_GPU else "1500"))
LIMIT_S = float(os.environ.get("EXPERTD_SOAK_S", 240))
TELL_S = 5
LIVES = 4  # of each worker: poisoned, plain, and with residents
SEED = int(os.environ.get("EXPERTD_SEED", time.time_ns() % 1000000))


class Soak:
    def __init__(self, world, prompts):
        self.world, self.prompts = world, prompts
        self.lock, self.want = threading.Lock(), {}
        self.streams = self.reads = self.dropped = self.attaches = 0
        self.wrong = []
        self.meet = threading.Barrier(LANES + 1)
        self.start = self.told = time.monotonic()
        self.sessions_s = 0.0  # of reads that began a session
        self.cut = False  # a life had too little time for its streams

    def late(self, life):
        """The time of this life is over: each has its share."""
        late = time.monotonic() - self.start > LIMIT_S * (life + 1) / LIVES
        self.cut = self.cut or late
        return late

    def tell(self, life):
        now = time.monotonic()
        if now - self.told > TELL_S:
            self.told = now
            print(f"  {now - self.start:5.0f} s: life {life + 1} of {LIVES}, {self.streams} streams, {self.reads} reads, "
                  f"{self.attaches} sessions ({self.sessions_s:.0f} s of them), {len(self.wrong)} wrong", flush=True)

    def settings(self, rng):
        """Of a run of reads; another ring or floor takes a new session, so these change less often."""
        case = {"ring": rng.choice((rng.randint(8, 60), STORY_EXPERTS, rng.randint(60, 300))),
                "floor": rng.choice((1, 1, 1, rng.randint(2, 100), 5000))}
        if rng.random() < 0.1:  # a hand-shake for each slot: slow beside other workers
            case["ring"] = rng.randint(1, 7)
        for _ in range(rng.randint(1, 3) if case["ring"] < 8 else rng.randint(5, 25)):
            yield {**case, "stream": rng.choice(self.policies), "order": rng.choice(self.orders),
                   "depth": rng.choice((1, 2, rng.randint(3, 64), 16, 64)),
                   "chunk": rng.choice((rng.randint(10, 40), 64, 300))}

    def lane(self, n):
        try:
            return self.reads_of(n)
        except BaseException as e:
            self.wrong.append(f"lane {n}: {e}")
            self.meet.abort()
            raise

    def reads_of(self, n):
        rng = random.Random(SEED * 1000 + n)
        return [pair for life in range(LIVES) for pair in self.life(rng, n, life)]

    def life(self, rng, n, life):
        options = ["--poison"] if life != 1 else []
        options += ["--resident", rng.randint(1, 47)] if life >= 2 else []
        reader = Reader(self.world, "--hash", *options)
        mine, warm = 0, False
        while mine < STREAMS / LANES / LIVES and not self.late(life):
            self.attaches += 1
            first = True
            for case in self.settings(rng):
                if self.late(life):
                    break
                name, began = rng.choice(list(self.prompts)), time.monotonic()
                r = reader.ask("--prompt-file", self.prompts[name], *options_of(case))
                with self.lock:
                    self.sessions_s += time.monotonic() - began if first else 0
                    first = False
                    self.tell(life)
                    want = self.want.setdefault(name, r["hash"])
                    if r["hash"] != want:
                        self.wrong.append(f"lane {n} {options} {name} {case}: {r['hash']} instead of {want}")
                    self.streams += r["stream"]["chunks"]
                    self.reads += 1
                    self.dropped += r["stream"]["dropped"]
                mine += r["stream"]["chunks"]
            if not warm and (mine > STREAMS / LANES / LIVES / 5 or self.late(life)):
                warm = True
                facts = self.rest(reader)
        if not warm:
            facts = self.rest(reader)
        at_end = self.rest(reader)
        reader.end()
        return [(facts, at_end)]

    def rest(self, reader):
        """All lanes in the same state, so that what they use can be compared."""
        reader.ask("--prompt-file", self.prompts["p300"], "--ring", 300, "--floor", 1)
        facts = process_facts(reader.process.pid)
        self.meet.wait(300)
        self.meet.wait(300)
        return facts

    def measure(self, d):
        self.meet.wait(300)
        self.world.until(lambda: len(self.world.status()["workers"]) == LANES, what="old sessions closed")
        time.sleep(0.1)
        found = gpu_memory(), process_facts(d.pid), anonymous_bytes(d.pid)
        self.meet.wait(300)
        return found


def left():
    """Names in /dev/shm, but for folders of tests."""
    return {n for n in os.listdir("/dev/shm") if not n.startswith("xd-")}


def test_soak(world):
    print(f"seed {SEED} (EXPERTD_SEED), {LANES} workers", flush=True)
    start = time.monotonic()
    d = world.expertd(*SERVER)
    empty = gpu_memory()
    paths = {}
    for name in ("p5", "p40", "p300", "chat2"):
        paths[name] = world.path / f"{name}.txt"
        paths[name].write_text(prompts()[name]["text"])
    shm = left()
    soak = Soak(world, paths)
    soak.policies, soak.orders = choices("stream"), choices("order")
    results = []
    thread = threading.Thread(target=lambda: results.extend(in_parallel([lambda n=n: soak.lane(n) for n in range(LANES)])))
    thread.start()
    try:
        measured = [(soak.measure(d), soak.measure(d)) for _ in range(LIVES)]
    except threading.BrokenBarrierError:
        thread.join()
        raise AssertionError(soak.wrong[:3]) from None
    thread.join()
    memory, facts, anonymous = measured[0][0]
    at_end, facts_end, anonymous_end = measured[-1][1]
    print(f"{soak.streams} streams in {soak.reads} reads, {soak.attaches} sessions, {soak.dropped} entries dropped, "
          f"{len(soak.wrong)} wrong, {time.monotonic() - start:.1f} s; device memory {empty} MiB, after a fifth {memory}, "
          f"at the end {at_end}; expertd {facts} -> {facts_end}, {anonymous >> 10} -> {anonymous_end >> 10} KiB", flush=True)
    assert not soak.wrong, soak.wrong[:10]
    assert soak.streams >= STREAMS or soak.cut
    assert soak.dropped
    lives = [pair for lane in results for pair in lane]
    assert len(lives) == LANES * LIVES and all(end == begin for begin, end in lives), results
    assert all(end[0] <= begin[0] + 8 for begin, end in measured), f"device memory grew: {measured}"
    assert all(end[1] == facts for begin, end in measured), f"descriptors, mappings or threads of expertd grew: {measured}"
    assert anonymous_end <= anonymous + (8 << 20), "memory of expertd grew"
    world.until(lambda: not world.status()["workers"], timeout=10, what="sessions closed")
    world.until(lambda: gpu_memory() <= empty + 8, timeout=10, what=f"device memory back to {empty} MiB", every=0.2)
    assert left() <= shm, "left in /dev/shm"
