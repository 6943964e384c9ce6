# SPDX-License-Identifier: MIT
"""The failure matrix (DESIGN 11) with real processes."""
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest

from conftest import EXPERTD, INFERD, SLOW, STORY, TOP, die_with_parent, process_facts, prompts

PROMPT = TOP / "tools/model/prompt.txt"


def greedy(world, *options, prompt=None, n=24, **kw):
    prompt = ["--prompt", prompt] if prompt else ["--prompt", "Once upon a time there"]
    return world.run(*prompt, "--raw", "-n", n, "--temperature", 0, "--ignore-eos", "--hash", *options, **kw)


def settled(daemon, want, world):
    """expertd's descriptors, mappings and threads are back where they were."""
    return world.until(lambda: process_facts(daemon.pid) == want, what=f"{process_facts(daemon.pid)} back to {want}")


def test_worker_killed_in_mid_stream_leaks_nothing(world):
    d = world.expertd("--link-gbps", "0.02")
    reference = greedy(world, "--link-gbps", "10")
    world.until(lambda: not world.status()["workers"], what="the first worker is gone")
    before = process_facts(d.pid)
    memory = None
    rng = random.Random(1)
    kills = 100 if SLOW == 1 else 15
    for i in range(kills):
        p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", PROMPT, "--raw", "-n", "4", "--stream",
                         rng.choice(["full", "routed"])], stdout=subprocess.DEVNULL)
        world.until(lambda: world.status()["workers"] or p.poll() is not None, what="attached")
        time.sleep(rng.uniform(0, 0.1))
        p.kill()
        p.wait()
        killed = time.monotonic()
        world.until(lambda: not world.status()["workers"], what="expertd noticed the death")
        assert time.monotonic() - killed < 1 * SLOW
        if i == 9:
            memory = rss(d.pid)
    settled(d, before, world)
    assert rss(d.pid) - memory < 8 << 20, "expertd's memory grows with kills"
    assert world.status()["counters"]["deaths"] >= kills - 2
    again = greedy(world, "--link-gbps", "10")
    assert again["logits_hash"] == reference["logits_hash"]


def rss(pid):
    return int(open(f"/proc/{pid}/statm").read().split()[1]) * 4096


def test_expertd_killed_between_turns_worker_lives(world):
    """A conversation survives expertd: same second answer as undisturbed."""
    turns = ["Tell me a tale of a fox.", "And then?"]

    def chat(disturb):
        d = world.expertd()
        p = subprocess.Popen([str(INFERD), "chat", *world.where(), "--temperature", "0", "-n", "40"], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(world.path / "chat.log", "w"),
                             preexec_fn=die_with_parent)
        world.processes.append(p)
        p.stdin.write(turns[0] + "\n")
        p.stdin.flush()
        session = world.until(lambda: world.status()["workers"] and world.status()["workers"][0]["streams"] > 40
                              and idle(world), what="first answer written")
        assert session
        if disturb:
            d.kill()
            d.wait()
            d = world.expertd()
            assert world.status()["adopted"]
        p.stdin.write(turns[1] + "\n")
        p.stdin.flush()
        p.stdin.close()
        out = p.stdout.read()
        assert p.wait(30 * SLOW) == 0, (world.path / "chat.log").read_text()
        d.kill(signal.SIGTERM)
        assert d.wait() == 0
        return out

    assert chat(False) == chat(True)


def idle(world):
    first = world.status()["workers"][0]["streams"]
    time.sleep(0.3 * SLOW)
    return world.status()["workers"][0]["streams"] == first


def test_expertd_killed_in_mid_stream_worker_says_so(world):
    d = world.expertd("--link-gbps", "0.01")
    p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", PROMPT, "--raw", "-n", "4"],
                    stdout=subprocess.DEVNULL)
    world.until(lambda: world.status().get("workers") and world.status()["workers"][0]["issued"] > 0, what="streaming")
    d.kill()
    assert p.wait(10 * SLOW) != 0
    lines = [line for line in p.log.read_text().splitlines() if line.strip()]
    assert any("expertd" in line for line in lines), lines


def test_adoption_reads_nothing(world):
    d = world.expertd()
    first = greedy(world)
    d.kill()
    d.wait()
    d = world.expertd()
    s = world.status()
    assert s["adopted"] and s["arena"]["generation"] == 2
    read = int(next(line.split()[1] for line in open(f"/proc/{d.pid}/io") if line.startswith("rchar")))
    assert read < 2 << 20, f"{read} bytes read: more than the header of the model file"
    assert greedy(world)["logits_hash"] == first["logits_hash"]


@pytest.mark.parametrize("how", ["foreign", "torn", "layout", "short"])
def test_arena_that_may_not_be_used_is_named_and_rebuilt(world, how):
    d = world.expertd()
    first = greedy(world)
    d.kill()
    d.wait()
    arena = next((world.arena / "default").rglob("arena"))
    os.chmod(arena, 0o600)
    with open(arena, "r+b") as f:
        if how == "foreign":
            f.seek(64 + 16)
            f.write(b"another model   ")
        elif how == "torn":
            f.seek(64)
            f.write((1).to_bytes(4, "little"))
        elif how == "layout":
            f.seek(6)
            f.write(b"99")
        else:
            f.truncate(os.path.getsize(arena) // 2)
    d = world.expertd()
    assert not world.status()["adopted"]
    word = {"foreign": "fingerprint", "torn": "torn", "layout": "EXDARN99", "short": "t"}[how]
    assert any("arena" in line and word in line for line in d.text().splitlines()), d.text()
    assert greedy(world)["logits_hash"] == first["logits_hash"]


def test_no_keep_removes_the_arena(world):
    d = world.expertd("--no-keep")
    assert list((world.arena / "default").rglob("arena"))
    d.kill(signal.SIGTERM)
    assert d.wait() == 0
    assert not list((world.arena / "default").rglob("*"))


def test_sigterm_drains(world):
    d = world.expertd("--link-gbps", "0.05")
    p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", PROMPT, "--raw", "-n", "1", "--temperature", "0"],
                    stdout=subprocess.PIPE)
    world.until(lambda: world.status().get("workers") and world.status()["workers"][0]["issued"] > 0, what="streaming")
    d.kill(signal.SIGTERM)
    assert d.wait(30) == 0
    p.wait(20 * SLOW)
    left = [f.name for f in (world.runtime / "expertd/default").iterdir()]
    assert not [f for f in left if f.endswith(".sock")], left


def test_second_expertd_is_refused(world):
    d = world.expertd()
    other = world.expertd(wait=False)
    assert other.wait() != 0
    assert str(d.pid) in other.text() and "instance" in other.text(), other.text()
    assert greedy(world)["prompt_tokens"] == 5


def test_two_instances_side_by_side(world):
    world.expertd(instance="one")
    world.expertd(instance="two")
    a = greedy(world, instance="one")
    b = greedy(world, instance="two")
    assert a["logits_hash"] == b["logits_hash"]
    assert world.ctl("stop", instance="one").returncode == 0
    assert greedy(world, instance="two")["logits_hash"] == a["logits_hash"]


def test_stale_socket_is_no_obstacle(world):
    d = world.expertd()
    d.kill()
    d.wait()
    assert list((world.runtime / "expertd/default").glob("*.sock")), "the socket of the dead expertd lies there"
    world.expertd()
    assert greedy(world)["prompt_tokens"] == 5


def one_error_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "expertd:" in line]
    return errors[-1] if errors else (lines[-1] if lines else "")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_full_disk(world):
    small = world.path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small]).returncode:
        pytest.skip("mount is not allowed here")
    try:
        d = world.expertd("--arena-dir", small, wait=False, arena=False)
        assert d.wait() != 0
        assert str(small) in one_error_line(d.text()), d.text()
        assert not list(small.rglob("arena*")), "nothing half-written is left"
    finally:
        subprocess.run(["umount", "-l", small])


def test_no_memory(world):
    """An address-space limit under the arena's size: one line, no crash."""
    def limit():
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_AS, (16 << 20, 16 << 20))
    if SLOW > 1:
        pytest.skip("sanitizers reserve terabytes of address space")
    r = subprocess.run([str(EXPERTD), "--model", str(STORY), *world.where(), "--arena-dir", str(world.arena)],
                       capture_output=True, text=True, preexec_fn=limit, timeout=30)
    assert r.returncode > 0, "an error exit, not a signal"
    assert "memory" in r.stderr or "limit" in r.stderr or "address space" in r.stderr, r.stderr


def test_memlock_limit(world):
    """Pinning that is required and refused names limit, need and remedy."""
    def limit():
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        if os.geteuid() == 0:  # root may lock past any limit: give the capability up
            os.setgid(65534)
            os.setuid(65534)
    run = world.path / "nobody"
    arena = world.path / "nobody-arena"
    model = world.path / "m.gguf"
    for p in (run, arena):
        p.mkdir(mode=0o700)
    shutil.copy(STORY, model)
    if os.geteuid() == 0:
        for p in (run, arena, model):
            os.chown(p, 65534, 65534)
        os.chmod(world.path, 0o755)
    if not os.access(EXPERTD, os.X_OK):
        pytest.skip("no program")
    tmp = world.path / "expertd"
    shutil.copy(EXPERTD, tmp)
    os.chmod(tmp, 0o755)
    r = subprocess.run([str(tmp), "--model", str(model), "--runtime-dir", str(run), "--arena-dir", str(arena), "--pin",
                        "require"], capture_output=True, text=True, preexec_fn=limit, timeout=30 * SLOW)
    assert r.returncode > 0
    assert "memlock" in r.stderr.lower(), r.stderr


@pytest.mark.parametrize("cut", [0, 3, 24, 1000, 300_000, 5_000_000])
def test_truncated_model(world, cut):
    model = world.path / "cut.gguf"
    model.write_bytes(STORY.read_bytes()[:cut])
    d = world.expertd(model=model, wait=False)
    assert d.wait() > 0
    assert "cut.gguf" in d.text(), d.text()
    assert not list((world.arena / "default").rglob("arena*"))
