# SPDX-License-Identifier: MIT
"""Parked keys and values: a conversation goes on in the next worker, or in another one, reading only what is new."""
import concurrent.futures
import contextlib
import http.client
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest
from conftest import INFERD, MKMODEL, SLOW, prompts
from serving import Server

BLOCK = 128
MORE = " Then they all went home, and"


def answer(body):
    """What must not depend on where keys and values came from."""
    choice = body["choices"][0]
    return choice["text"], choice["logprobs"]


def cached(body):
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def first_turn(server, prompt):
    return server.complete(prompt, max_tokens=24, logprobs=2, ignore_eos=True)


def next_turn(server, prompt, said):
    return server.complete(prompt + said + MORE, max_tokens=24, logprobs=2, ignore_eos=True)


def all_parked(server):
    """Waits until everything is; the worker's numbers."""
    server.until_status(lambda s: s["prefix"]["parked_blocks"] and not s["prefix"]["unparked_blocks"],
                        "blocks are parked", timeout=60)
    return server.status()["prefix"]


def killed(server):
    server.process.kill()
    server.process.wait(20 * SLOW)


def park(world):
    return world.status()["park"]


@pytest.fixture(scope="module")
def talk():
    """A long prompt, and what is answered to it and to the next turn by one worker that was never disturbed."""
    return {"prompt": prompts()["p1900"]["text"][:3000]}


def reference(world, talk):
    if "said" not in talk:
        world.expertd("--park", "off", instance="ref")
        s = Server(world, instance="ref")
        one = first_turn(s, talk["prompt"])
        two = next_turn(s, talk["prompt"], one["choices"][0]["text"])
        assert cached(two) >= one["usage"]["prompt_tokens"] > 4 * BLOCK
        assert s.status()["prefix"]["park"] == "off" and "--park" in s.status()["prefix"]["park_reason"]
        talk.update(said=one["choices"][0]["text"], one=answer(one), two=answer(two), cached=cached(two),
                    tokens=two["usage"]["prompt_tokens"])
        s.stop()
    return talk


@pytest.mark.slow
def test_next_turn_after_a_kill(world, talk):
    t = reference(world, talk)
    d = world.expertd("--park", "256M")
    a = Server(world)
    assert answer(first_turn(a, t["prompt"])) == t["one"]
    parked = all_parked(a)["parked_blocks"]
    assert parked >= t["cached"] // BLOCK
    killed(a)
    world.until(lambda: not world.status()["workers"], what="expertd has seen the death")
    shown = park(world)
    assert shown["blocks"] == parked and 0 < shown["bytes_held"] <= shown["bytes"] == 256 << 20
    assert pathlib.Path(shown["note"]).stat().st_mode & 0o777 == 0o600

    b, c = Server(world), Server(world)
    for server in (b, c):  # the next worker, and another one beside it
        two = next_turn(server, t["prompt"], t["said"])
        # the other one may find what the next one has parked meanwhile
        assert cached(two) == t["cached"] or server is c and cached(two) > t["cached"]
        assert two["usage"]["prompt_tokens"] == t["tokens"]
        assert answer(two) == t["two"]
        assert server.status()["prefix"]["loaded_blocks"] >= t["cached"] // BLOCK
        server.until_status(lambda s: not s["prefix"]["unparked_blocks"], "all is there", timeout=60)
    assert "blocks; " in world.ctl("status").stdout
    # expertd's death loses what is parked; those who have it park it again
    d.kill()
    d.wait()
    assert os.path.exists(shown["note"])
    world.expertd("--park", "256M")
    world.until(lambda: park(world)["blocks"] >= t["cached"] // BLOCK, what="parked again", timeout=60)
    killed(b)
    killed(c)
    d = Server(world)
    assert cached(next_turn(d, t["prompt"], t["said"])) >= t["cached"]
    world.ctl("stop")
    assert not os.path.exists(shown["note"]), "removed at the end"


@pytest.mark.slow
def test_another_build_is_ignored(world, talk):
    t = reference(world, talk)
    world.expertd("--park", "256M")
    a = Server(world)
    first_turn(a, t["prompt"])
    all_parked(a)
    killed(a)
    other = world.path / "inferd"
    shutil.copy(INFERD, other)
    with open(other, "ab") as f:
        f.write(b"another build")
    b = Server(world, program=other)
    two = next_turn(b, t["prompt"], t["said"])
    assert cached(two) == 0 and answer(two) == t["two"]
    p = b.status()["prefix"]
    assert p["ignored_blocks"] >= 1 and "build" in p["park_reason"] and "another build" in b.log()
    assert park(world)["ignored"] >= 1
    c = Server(world)
    assert cached(next_turn(c, t["prompt"], t["said"])) == t["cached"], "the first one's are still there"


def test_damaged_block(world, talk):
    t = reference(world, talk)
    world.expertd("--park", "256M")
    a = Server(world)
    first_turn(a, t["prompt"])
    all_parked(a)
    slot = (lambda kv: kv["bytes"] // kv["blocks"] + 1024 + 4095 & ~4095)(a.status()["kv"])
    killed(a)
    with open(park(world)["note"], "r+b") as f:  # of the third block
        f.seek(2 * slot + 5000)
        byte = f.read(1)[0]
        f.seek(2 * slot + 5000)
        f.write(bytes([byte ^ 4]))
    b = Server(world)
    two = next_turn(b, t["prompt"], t["said"])
    assert cached(two) == 2 * BLOCK and answer(two) == t["two"]
    assert b.status()["prefix"]["damaged_blocks"] == 1 and park(world)["wrong"] == 1
    all_parked(b)
    killed(b)
    assert cached(next_turn(Server(world), t["prompt"], t["said"])) >= t["cached"], "it was parked again"


@pytest.mark.slow
def test_full(world, talk):
    t = reference(world, talk)
    world.expertd("--park", "off", instance="size")
    probe = Server(world, instance="size")
    slot = (lambda kv: kv["bytes"] // kv["blocks"] + 1024 + 4095 & ~4095)(probe.status()["kv"])
    probe.stop()
    world.expertd("--park", 4 * slot + 1)
    a = Server(world)
    first_turn(a, t["prompt"])
    a.until_status(lambda s: s["prefix"]["parked_blocks"] == 4, "the park is full")
    first_turn(a, t["prompt"][-1200:])  # another conversation takes the place of the first one's end
    a.until_status(lambda s: s["prefix"]["parked_blocks"] > 4, "the least recently used gives way", timeout=60)
    shown = park(world)
    assert shown["blocks"] <= 4 and shown["bytes_held"] <= shown["bytes"]
    killed(a)
    b = Server(world)
    two = next_turn(b, t["prompt"], t["said"])
    assert cached(two) <= 4 * BLOCK and cached(two) % BLOCK == 0 and answer(two) == t["two"]


def test_sizes(world):
    for size, words in (("1X", "--park"), ("-1", "--park"), ("9999T", "--park"), ("64T", "tmpfs")):
        d = world.expertd("--park", size, wait=False)
        assert d.wait() != 0 and words in d.text(), d.text()
    world.expertd("--park", "0")
    assert park(world)["bytes"] == 0 and "off" in park(world)["note"]


@pytest.mark.skipif(not os.environ.get("EXPERTD_LONG"), reason="a conversation of 20,000 tokens: EXPERTD_LONG=1")
def test_long_conversation(world):
    model = world.path / "long.gguf"
    subprocess.run([MKMODEL, "--ctx=32768", "--layers=2", "--heads=2", "--kv-heads=1", model], check=True)
    text = subprocess.run([MKMODEL, "--text=19990", "--ctx=32768", "--layers=2", "--heads=2", "--kv-heads=1"], check=True,
                          capture_output=True, text=True).stdout.strip()
    world.expertd("--park", "1G", model=model)

    def ask(server, prompt):
        status, _, body = server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8,
                                                          "ignore_eos": True}, timeout=900)
        assert status == 200, body
        return body
    a = Server(world)
    one = ask(a, text)
    all_parked(a)
    os.kill(a.process.pid, signal.SIGKILL)
    b = Server(world)
    begin = time.monotonic()
    two = ask(b, text + one["choices"][0]["text"] + " " + text[:200])
    print(f"{time.monotonic() - begin:.2f} s")
    print(one["usage"], two["usage"], b.status()["prefix"])
    assert one["usage"]["prompt_tokens"] >= 19000
    assert cached(two) >= one["usage"]["prompt_tokens"]


def test_many_that_share_a_tail_find_room(world):
    """A shared last block makes no room for its own copy: prompts that look for it again in each round, as it is
    kept and parked, must not wait for each other for ever."""
    world.expertd("--park", "2M")
    server = Server(world, "--parallel", "8", "--kv-tokens", "1024", "--ctx", "512")
    prompts = [[300, 301, 302, *range(400 + 150 * i, 400 + 150 * i + n)]
               for i, n in enumerate([30, 62, 98, 134, 39, 127, 97, 72])]

    def said(ids):
        status, _, body = server.post("/v1/completions", {"prompt": ids, "temperature": 0, "max_tokens": 40,
                                                          "ignore_eos": True}, timeout=20)
        assert status == 200, body
        return body["choices"][0]["text"]
    alone = [said(ids) for ids in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(4):
            assert list(pool.map(said, prompts)) == alone


def small(server, prompt="Once upon a time"):
    return server.complete(prompt, max_tokens=9, ignore_eos=True)["choices"][0]["text"]


def test_a_damaged_tail_is_given_up_with_its_reason(world):
    world.expertd("--park", "4M")
    a = Server(world)
    said = small(a)
    all_parked(a)
    killed(a)
    with open(park(world)["note"], "r+b") as f:
        f.seek(5000)
        byte = f.read(1)[0]
        f.seek(5000)
        f.write(bytes([byte ^ 4]))
    b = Server(world)
    assert small(b) == said
    told = [line for line in b.log().splitlines() if "damaged" in line]
    assert len(told) == 1 and "checksum" in told[0] and "Success" not in told[0], b.log()


def test_a_park_truncated_in_use_is_named(world):
    """As with the arena: whoever touches what is gone says so in one line and ends."""
    world.expertd("--park", "4M")
    a = Server(world)
    small(a)
    all_parked(a)
    file = park(world)["note"]
    os.truncate(file, 0)
    with contextlib.suppress(OSError, http.client.HTTPException):
        small(a, "Once upon a dark night " * 3)
    world.until(lambda: a.process.poll() is not None, timeout=60, what="the worker has ended")
    told = [line for line in a.log().splitlines() if "truncated" in line]
    assert a.process.returncode == 1 and len(told) == 1 and str(file) in told[0], a.log()
