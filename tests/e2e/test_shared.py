# SPDX-License-Identifier: MIT
"""What several workers share: the experts' memory, and the link; and MPS, looked for where they share a GPU."""
import json
import pathlib
import re
import socket
import subprocess

import pytest
from conftest import BUILD, INFERD, MKMODEL, SLOW, prompts
from serving import Server

MIB = 1 << 20


def mappings(pid):
    """[(path, {"Size": bytes, "Pss": bytes, ...})] of a process."""
    out = []
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)", line)
        value = re.match(r"(\w+): +(\d+) kB", line)
        if head:
            out.append((head[1], {}))
        elif value:
            out[-1][1][value[1]] = int(value[2]) << 10
    return out


def rollup(pid):
    return int(re.search(r"^Pss: +(\d+) kB", pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1]) << 10


def pss(pid, name):
    return sum(v["Pss"] for path, v in mappings(pid) if name in path)


@pytest.mark.slow  # a sanitizer's own memory is many times that
def test_experts_are_held_once(world):
    model = world.path / "model.gguf"  # large enough that what is rounded to huge pages does not matter
    subprocess.run([str(MKMODEL), "--layers", "4", "--hidden", "512", "--experts", "64", "--ffn", "768", "--topk", "4",
                    "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--vocab", "2048", model], check=True,
                   capture_output=True)
    d = world.expertd(model=model)
    alone = rollup(d.pid)
    servers = [Server(world) for _ in range(3)]
    for s in servers:
        s.complete("Once upon a time " * 20, max_tokens=4)
    arena = world.status()["arena"]
    held = sum(pss(pid, arena["path"]) for pid in [d.pid] + [s.process.pid for s in servers])
    print(f"arena {arena['bytes'] / MIB:.1f} MiB, held {held / arena['bytes']:.3f} times by expertd and {len(servers)} workers "
          f"(expertd alone: {alone / MIB:.1f} MiB in all)")
    assert 0.97 < held / arena["bytes"] < 1.005
    for s in servers:
        pid, status = s.process.pid, s.status()
        kv, ring = status["kv"]["bytes"], status["expertd"]["ring_bytes"]
        own = rollup(pid) - pss(pid, arena["path"]) - pss(pid, "inferd-ring")
        print(f"worker {pid}: {own / MIB:.1f} MiB besides arena and ring (of {ring / MIB:.1f} MiB), keys and values among it: up "
              f"to {kv / MIB:.1f} MiB")
        # 1 GiB beside 16 GB of experts is the aim; what is here does not grow with the experts but for activations.
        assert own - kv < 128 * MIB


def rates_of(world):
    """bytes a second of each worker's streams, by what expertd reports of them."""
    rates = {}
    for w in json.loads(world.ctl("trace", "--json", "-n", "32").stdout):
        whole = [c for c in w["chunks"] if c["bytes_copied"]]
        rates[w["pid"]] = sum(c["bytes_copied"] for c in whole) / sum(c["span_ms"] for c in whole) * 1000
    return rates


def test_links_share_fairly(world):
    """Two workers that read at the same time, over a link paced so that it is the bound."""
    world.expertd("--link-gbps", "0.02", "--floor", "1", "--stream", "full")
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p300"]["text"])
    said = []
    for _ in range(3):  # a machine that does other things may disturb one
        readers = [world.spawn([INFERD, "logits", *world.where(), "--raw", "--prompt-file", path, "--positions", "none",
                                "--reads", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for r in readers:
            r.stdin.write("--floor 1\n" * 5)
            r.stdin.flush()
        for r in readers:
            for _ in range(5):
                assert "error" not in json.loads(r.stdout.readline())
        rates = rates_of(world)
        for r in readers:
            r.stdin.close()
            assert r.wait(60 * SLOW) == 0
        a, b = (rates[r.pid] for r in readers)
        said.append(f"{a / 1e6:.2f} and {b / 1e6:.2f} MB/s, ratio {a / b:.3f}")
        print(said[-1])
        if 0.9 < a / b < 1.1:
            return
    raise AssertionError(said)


# ---- MPS

FAKE = BUILD / "tests/unit/libfakecuda.so"


def test_mps_is_looked_for(world, monkeypatch):
    """Two workers on one GPU: recommended where no control daemon answers, and shown where one does."""
    if not FAKE.exists():
        pytest.skip("the fake driver is not built")
    monkeypatch.setenv("EXPERTD_CUDA_LIBRARY", str(FAKE))
    pipes = world.path / "mps"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))

    def two_workers(instance):
        d = world.expertd("--device", "cuda", instance=instance)
        servers = []
        for _ in range(2):
            s = Server(world, "--device", "cuda", "--ctx", "256", "--chunk", "64", instance=instance, wait=False)
            world.until(lambda: s.process.poll() is not None or "serving" in s.log(), what="inferd serves", timeout=60)
            if "not in this program" in s.log():
                pytest.skip("built without nvcc")
            assert s.process.poll() is None, s.log()
            s.port = int(re.search(r" on http://[\d.]+:(\d+)", s.log()).group(1))
            servers.append(s)
        found = [s.status()["worker"]["mps"] for s in servers]
        for s in servers:
            s.process.kill()
            s.process.wait()
        return found, d.text()
    found, log = two_workers("without")
    assert found == [False, False]
    assert len(re.findall(r"2 workers on GPU 0.*nvidia-cuda-mps-control -d", log)) == 1, log
    assert "nvidia-cuda-mps-control" in world.status("without")["detail"]
    pipes.mkdir()
    control = socket.socket(socket.AF_UNIX)
    control.bind(str(pipes / "control"))
    control.listen(4)
    found, log = two_workers("with")
    assert found == [True, True] and "workers on GPU" not in log
    control.close()


def test_a_host_worker_has_no_mps(world):
    world.expertd()
    assert Server(world).status()["worker"]["mps"] is None
