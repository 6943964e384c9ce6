# SPDX-License-Identifier: MIT
"""Settings that only a GPU has or refuses.

    EXPERTD_BUILD=build python3 -m pytest -s tests/gpu/test_settings_gpu.py
"""
import json
import subprocess

import pytest

from gpu_kit import (DEVICE, EXPERTCTL, INFERD, ON_GPU, SERVER, WORKER, Reader, gpu_memory, prompts,
                     world)  # noqa: F401


@pytest.fixture
def text(world):
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p40"]["text"])
    return path


def test_floor_is_refused_below_that_of_attach(world, text):
    """A worker on a GPU takes a layer of a chunk below its floor as a whole, which is wrong once copies run ahead: a
    live worker's floor may rise, not fall below what it attached with."""
    world.expertd(*SERVER)
    reader = Reader(world, "--hash", "--prompt-file", text, "--floor", 20)
    want = reader.ask()["hash"]
    worker = reader.process.pid

    def configure(*options):
        return subprocess.run([str(EXPERTCTL), "configure", "--worker", str(worker), *world.where(), *options],
                              capture_output=True, text=True)

    for floor in ("5000", "50", "20"):
        r = configure("--floor", floor)
        assert r.returncode == 0 and f"floor {floor}" in r.stdout, r.stderr
        assert reader.ask()["hash"] == want
    r = configure("--floor", "10")
    if ON_GPU:
        assert r.returncode != 0 and "can't go below" in r.stderr and "--floor 10" in r.stderr, r.stderr
        r = configure("--link-gbps", "1")
        assert r.returncode != 0 and "real, not paced" in r.stderr, r.stderr
    else:
        assert r.returncode == 0, r.stderr
    # a mixed request is all or nothing
    if ON_GPU:
        assert configure("--depth", "3", "--floor", "10").returncode != 0
        assert world.status()["workers"][0].get("depth") != 3
    assert reader.ask()["hash"] == want
    assert reader.ask("--stream", "full")["hash"] == want
    reader.end()


def test_policies_change_between_reads(world, text):
    world.expertd(*SERVER)
    reader = Reader(world, "--hash", "--prompt-file", text, "--floor", 1, "--poison")
    want = reader.ask("--stream", "full")
    assert want["stream"]["policy"] == "full" and want["stream"]["dropped"] == 0
    for order in ("index", "recent", "predicted"):
        r = reader.ask("--stream", "routed", "--order", order, "--depth", 7)
        assert (r["stream"]["policy"], r["stream"]["order"], r["stream"]["depth"]) == ("routed", order, 7)
        assert r["hash"] == want["hash"]
    reader.end()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_auto_takes_the_gpu(world, text):
    """--device auto on both sides: the GPU, and device memory is in use."""
    before = gpu_memory()
    d = world.expertd("--device", "auto")
    assert world.status()["device"].startswith("CUDA"), world.status()
    r = world.run("--prompt-file", text, "--raw", "-n", 2, "--temperature", 0, "--hash", "--device", "auto")
    assert r["device"].startswith("cuda:") and r["device_note"] is None, r
    same = world.run("--prompt-file", text, "--raw", "-n", 2, "--temperature", 0, "--hash", *WORKER)
    assert same["logits_hash"] == r["logits_hash"]
    assert gpu_memory() > before, "expertd holds no context"
    d.kill(15)
    assert d.wait() == 0


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_auto_beside_an_expertd_without_gpu(world, text):
    """The worker computes on the host and says why."""
    world.expertd("--device", "host")
    r = world.run("--prompt-file", text, "--raw", "-n", 2, "--temperature", 0, "--device", "auto")
    assert r["device"].startswith("host") and "host device only" in r["device_note"], r
    fails = world.inferd("run", "--prompt-file", text, "--raw", *WORKER, check=False)
    assert fails.returncode == 1 and "host device only" in fails.stderr, fails.stderr


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_gpu_that_is_not_there(world, text):
    world.expertd(*SERVER)
    r = world.inferd("run", "--prompt-file", text, "--raw", "--device", "cuda:63", check=False)
    assert r.returncode == 1 and "--device cuda" in r.stderr and "63" in r.stderr, r.stderr


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_ring_that_does_not_fit(world, text):
    """One line, and device memory is given back."""
    world.expertd(*SERVER)
    before = gpu_memory()
    r = subprocess.run([str(INFERD), "run", *world.where(), "--prompt-file", str(text), "--raw", "--json", "--ring", "1048575",
                        "--resident", "48", *WORKER], capture_output=True, text=True)
    if r.returncode == 0:  # a small model: it may even fit
        assert json.loads(r.stdout)["memory"]["ring_bytes"] > 1 << 33
    else:
        assert r.stderr.count("\n") == 1 and "--ring" in r.stderr, r.stderr
    world.until(lambda: gpu_memory() <= before + 8, timeout=10, what="device memory given back", every=0.2)
    print(DEVICE, "largest ring:", r.stderr.strip() or "fits")
