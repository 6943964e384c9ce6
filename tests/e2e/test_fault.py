# SPDX-License-Identifier: MIT
"""Fault injection: the Nth call of a kind fails, for N = 1, 2, 3, ... until a run makes fewer than N of them.

tests/fault/fault.c fails calls of the system, the fake driver calls of CUDA. After each fault one of two things
must be true: the program ended with one line that says why, or it did its work and the bits are right. Either way
nothing is left behind, a worker that met the fault can be followed by one that works, and the arena that was left
is adopted or rebuilt, never used half-made.

EXPERTD_FAULT=full tries every N (minutes); otherwise a few of each kind, spread over all. The counts are printed.
"""
import collections
import json
import os
import subprocess

import pytest

from conftest import BUILD, EXPERTD, INFERD, SLOW, STORY, die_with_parent, process_facts

LIBRARY = BUILD / "tests/fault/libfault.so"
FAKE = BUILD / "tests/unit/libfakecuda.so"
FULL = os.environ.get("EXPERTD_FAULT") == "full"
KINDS = ["alloc", "map", "file", "read", "short", "uring", "complete", "thread", "watch", "message"]
READ = ["run", "--prompt", "Once upon a time there", "--raw", "-n", "2", "--temperature", "0", "--ignore-eos", "--hash",
        "--json", "--threads", "1"]
pytestmark = pytest.mark.skipif(SLOW > 1 or not LIBRARY.exists(), reason="no library is preloaded into sanitizer builds")


class Faults:
    """Runs under a fault, and what came of them."""

    def __init__(self, world):
        self.world = world
        self.log = world.path / "fault.log"
        self.count = self.ended = self.worked = 0
        self.wrong, self.keep = [], False

    def env(self, kind, n):
        self.log.unlink(missing_ok=True)
        return {"LD_PRELOAD": str(LIBRARY), "FAULT": f"{kind}:{n}", "FAULT_LOG": str(self.log)}

    def hit(self):
        """What failed, or None when the run made fewer such calls."""
        return self.log.read_text().strip() if self.log.exists() else None

    def over(self, kind, once):
        """Runs once(N) for N = 1, 2, 3, ... while it hits: every N, or the first ones and then ever fewer."""
        n = 1
        while self.tried(once, kind, n):
            self.count += 1
            n += 1 if FULL else 4 * n
        print(f"{kind}: up to call {n - 1}")

    def tried(self, once, kind, n):
        """A full run goes on after what is wrong, and tells all of it at the end."""
        try:
            return once(kind, n)
        except (AssertionError, subprocess.TimeoutExpired) as e:
            if not FULL:
                raise
            self.wrong.append(f"{kind} {n}: {self.hit()}: {str(e).splitlines()[0][:600]}")
            print("WRONG", self.wrong[-1], flush=True)
            for p in self.world.processes[1:]:
                if p.poll() is None and not self.keep:
                    p.kill()
                    p.wait()
            return True

    def told(self):
        print(f"{self.count} faults: {self.ended} ended with a line, {self.worked} worked all the same")
        assert not self.wrong, "\n".join(self.wrong)


def one_line(text, what):
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith(("expertd: ", "inferd: ")) and len(lines[0]) > 30, f"{what}: {text}"


def read(world, env=None, expect=None):
    """One read by a worker. Its hash, or None when it failed with one line."""
    r = subprocess.run([str(INFERD), *READ[:1], *world.where(), *READ[1:]], capture_output=True, text=True,
                       env={**os.environ, **(env or {})}, preexec_fn=die_with_parent, timeout=60)
    assert r.returncode in (0, 1), f"{expect}: {r.returncode} {r.stderr}"
    if r.returncode:
        one_line(r.stderr, expect)
        return None
    return json.loads(r.stdout)["logits_hash"]


def left(world):
    """Files of the instance but for the arena's."""
    folder = world.runtime / "expertd/default"
    return sorted(f.name for f in folder.iterdir() if not f.name.startswith("arena")) if folder.exists() else []


def memory_objects():
    return {n for n in os.listdir("/dev/shm") if n.startswith("inferd")}  # others use the folder, too


def start(world, env, *options):
    """expertd with its standard error in a file; running and serving, or ended. Loading counts as serving later."""
    d = world.expertd("--quiet", *options, env=env, wait=False)
    world.until(lambda: d.process.poll() is not None or world.status().get("state") == "serving", timeout=60, every=0.02,
                what=f"{env}: it serves or has ended: {d.text()}")
    return d


@pytest.mark.parametrize("kind", KINDS)
def test_expertd_meets_faults(world, kind, request):
    """From the start over a worker's attach, read and detach to the drain, loading and adopting by turns."""
    faults = Faults(world)
    d = start(world, {})
    want = read(world)
    d.kill(15)
    d.wait()
    arena = world.arena / "default"
    objects = memory_objects()

    def once(kind, n, adopt):
        if not adopt:
            for f in arena.iterdir():
                f.unlink() if f.is_file() else None
            for f in arena.rglob("arena*"):
                f.unlink()
        d = start(world, faults.env(kind, n), *(["--io", "uring"] if kind in ("uring", "complete") else []))
        if d.process.poll() is None:
            got = read(world, expect=f"{kind} {n} {faults.hit()}, worker")
            assert d.process.poll() is None, f"{faults.hit()}: a worker's end is not expertd's: {d.text()}"
            assert got in (None, want) and (got or faults.hit()), f"{faults.hit()}: {got}"
            if faults.hit():
                assert read(world) == want, f"{faults.hit()}: the next worker works"
            d.kill(15)
            assert d.wait(30) == 0, f"{faults.hit()}: {d.text()}"
            faults.worked += bool(faults.hit())
        else:
            assert d.process.returncode == 1, f"{kind} {n} {faults.hit()}: {d.process.returncode} {d.text()}"
            one_line(d.text(), f"{kind} {n} {faults.hit()}")
            faults.ended += 1
        assert left(world) == [], f"{faults.hit()}: left behind"
        assert memory_objects() == objects, faults.hit()
        hit = faults.hit()
        if hit and n % 3 == 1:  # what it left is adopted or rebuilt, and right
            d = start(world, {})
            assert read(world) == want, f"{hit}: after it: {d.text()}"
            d.kill(15)
            assert d.wait(30) == 0, d.text()
        return hit

    faults.over(kind, lambda kind, n: once(kind, n, adopt=False))
    if kind in ("alloc", "map", "file", "read") and FULL:
        d = start(world, {})
        d.kill(15)
        d.wait()
        faults.over(kind, lambda kind, n: once(kind, n, adopt=True))
    faults.told()


@pytest.mark.parametrize("kind", ["alloc", "map", "file", "read", "thread", "watch", "message"])
def test_worker_meets_faults(world, kind):
    """From its start to its detach. expertd keeps nothing of it."""
    faults = Faults(world)
    faults.keep = True  # one expertd for all
    d = start(world, {})
    want = read(world)
    world.until(lambda: process_facts(d.pid)["threads"] == 2, what="threads of loader and worker gone")
    before = process_facts(d.pid)

    def once(kind, n):
        got = read(world, faults.env(kind, n), expect=f"{kind} {n}")
        assert got in (None, want), f"{kind} {n} {faults.hit()}"
        hit = faults.hit()
        faults.ended += got is None
        faults.worked += got == want and bool(hit)
        world.until(lambda: process_facts(d.pid) == before, what=f"{hit}: expertd is as before")
        assert d.process.poll() is None, d.text()
        return hit

    faults.over(kind, once)
    assert read(world) == want
    faults.told()


SOME_CALLS = {"expertd": ["cuMemHostRegister", "cuIpcOpenMemHandle", "cuMemcpyHtoDAsync"],
              "worker": ["cuMemAlloc", "cuIpcGetMemHandle", "cuLaunchKernel"]}


@pytest.mark.parametrize("who", ["expertd", "worker"])
def test_the_driver_fails(world, who):
    """Registration, IPC, copies, kernels, by the fake driver: CUDA_ERROR_OUT_OF_MEMORY from the Nth call of a kind on,
    every kind that was called. A worker that fails says one line and leaves no session; expertd serves on, or has ended
    with one line at its start."""
    if not FAKE.exists():
        pytest.skip("the fake driver is not built")
    base = {"EXPERTD_CUDA_LIBRARY": str(FAKE)}
    log = world.path / "calls"
    argv = [str(INFERD), "run", *world.where(), "--device", "cuda", "--prompt", "x", "-n", "1", "--stream", "full", "--floor",
            "1", "--json", "--watchdog", "5"]

    def on_gpu(**env):
        return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **base, **env}, timeout=60)

    d = start(world, {**base, "FAKECUDA_LOG": str(log)}, "--device", "cuda")
    r = on_gpu(FAKECUDA_LOG=str(log))
    if "not in this program" in r.stderr:
        pytest.skip("built without nvcc")
    assert r.returncode == 0, r.stderr
    d.kill(15)
    assert d.wait(30) == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    calls = collections.Counter(f[1] for f in lines if (f[0] == str(d.pid)) == (who == "expertd"))
    d = start(world, base, "--device", "cuda") if who == "worker" else None

    hit = world.path / "hit"

    def once(fails):
        """Whether it ended by it."""
        nonlocal d
        fault = {"FAKECUDA_FAIL": fails, "FAKECUDA_FAILED": str(hit)}
        hit.unlink(missing_ok=True)
        if who == "expertd":
            d = start(world, {**base, **fault}, "--device", "cuda")
            if d.process.poll() is not None:
                assert d.process.returncode == 1, f"{fails}: {d.process.returncode} {d.text()}"
                one_line(d.text(), fails)
                return True
        r = on_gpu(**(fault if who == "worker" else {}))
        assert r.returncode in (0, 1), f"{fails}: {r.returncode} {r.stderr}"
        if r.returncode:
            one_line(r.stderr, fails)
        assert d.process.poll() is None, f"{fails}: {d.text()}"
        world.until(lambda: not world.status()["workers"], what=f"{fails}: no session is left")
        if who == "expertd":
            d.kill(15)
            assert d.wait(30) == 0, f"{fails}: {d.text()}"
        return who == "worker" and r.returncode != 0

    wrong, total = [], collections.Counter()
    for call in sorted(calls) if FULL else SOME_CALLS[who]:
        assert calls[call], f"{call} is not called: {calls}"
        count, n = collections.Counter(), 1
        while True:
            try:
                ended = once(f"{call}:{n}:2")
                if not hit.exists():
                    break
                count["ended"] += ended
            except (AssertionError, subprocess.TimeoutExpired) as e:
                if not FULL:
                    raise
                wrong.append(f"{call} {n}: {str(e).splitlines()[0][:600]}")
                print("WRONG", wrong[-1], flush=True)
                if d.process.poll() is None and who == "expertd":
                    d.process.kill()
                    d.wait()
            count["faults"] += 1
            assert who == "worker" or left(world) == []
            n += 1 if FULL else max(1, n)
        assert count["faults"], f"{call}: it did not come to that"
        print(f"{call}: up to call {n - 1}, {count['faults']} faults, {count['ended']} ended {who} with a line", flush=True)
        total += count
    print(f"{who}: {total['faults']} faults of {len(calls)} kinds, {total['ended']} ended it with a line")
    assert not wrong, "\n".join(wrong)
    if who == "worker":
        assert on_gpu().returncode == 0, "the next one works"
