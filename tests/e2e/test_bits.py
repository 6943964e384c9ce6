# SPDX-License-Identifier: MIT
"""Same bits whatever the stream dropped: hashes of all logits over policy,
depth, ring, order, link speed, residency, chunking and number of workers.

Slots are poisoned after each release (--poison), so a read of a slot that was
not copied in this stream turns into NaN and another hash.
"""
import concurrent.futures
import itertools

import pytest

from conftest import TOP, prompts

EXPERTS = 48  # of the shipped model, a layer
PROMPT = TOP / "tools/model/prompt.txt"


@pytest.fixture
def short(world):
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p300"]["text"])
    return path


def hash_of(world, prompt, *options):
    r = world.run("--prompt-file", prompt, "--raw", "-n", 4, "--ignore-eos", "--temperature", 0, "--hash", "--poison",
                  "--floor", 1, *options)
    return r["logits_hash"], r


@pytest.mark.slow
def test_policies_depths_rings_orders(world, short):
    world.expertd()
    want, _ = hash_of(world, short, "--stream", "full")
    seen = set()
    rings = (1, EXPERTS, EXPERTS * 5 // 2)
    for order, depth, ring in itertools.product(("index", "recent", "predicted"), (1, 2, 16, 64), rings):
        got, r = hash_of(world, short, "--stream", "routed", "--order", order, "--depth", depth, "--ring", ring)
        assert got == want, f"routed, order {order}, depth {depth}, ring {ring}"
        assert (r["stream"]["order"], r["stream"]["depth"], r["stream"]["ring"]) == (order, depth, ring)
        seen.add(r["stream"]["dropped"] > 0)
    assert True in seen, "nothing was ever dropped: the comparison proved nothing"
    for ring in rings:
        assert hash_of(world, short, "--stream", "full", "--ring", ring)[0] == want, f"full, ring {ring}"


def test_below_the_floor_residents_chunks(world, short):
    world.expertd()
    want, _ = hash_of(world, short, "--stream", "full")
    for options in (["--floor", 5000], ["--resident", 1], ["--resident", 20], ["--resident", EXPERTS], ["--chunk", 64],
                    ["--chunk", 77, "--order", "recent"], ["--threads", 1], ["--chunk", 1, "--floor", 1]):
        assert hash_of(world, short, *options)[0] == want, options


@pytest.mark.slow
def test_link_speeds(world, short):
    world.expertd()
    want, _ = hash_of(world, short, "--stream", "full")
    for policy, order in (("full", "index"), ("routed", "index"), ("routed", "recent"), ("routed", "predicted")):
        for gbps in (0.05, 0.3):
            got, r = hash_of(world, short, "--stream", policy, "--order", order, "--link-gbps", gbps)
            assert got == want, f"{policy} {order} at {gbps} GB/s"


def test_three_workers_at_once(world, short):
    world.expertd()
    want, _ = hash_of(world, short, "--stream", "full")
    settings = [("full", "index"), ("routed", "index"), ("routed", "predicted")]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda s: hash_of(world, short, "--stream", s[0], "--order", s[1], "--ring", 24, "--threads", 1)[0],
                            settings * 2))
    assert got == [want] * 6


@pytest.mark.slow
def test_long_prompt(world):
    """1,900 tokens over a link so slow that reading waits for it: drops, in every order."""
    world.expertd()
    want, full = hash_of(world, PROMPT, "--stream", "full")
    assert full["stream"]["dropped"] == 0
    for order in ("index", "recent", "predicted"):
        for gbps in (0.005, 0.001):  # the slower one where the machine is busy and computing is slower than the link
            got, r = hash_of(world, PROMPT, "--order", order, "--floor", 1024, "--link-gbps", gbps)
            assert got == want, order
            if r["stream"]["dropped"]:
                break
        assert r["stream"]["dropped"] > 0, order
