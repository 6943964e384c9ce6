# SPDX-License-Identifier: MIT
"""inferd's choice of a device; and, on a driver without a GPU, the order of
what a pass enqueues and how a wait that nobody will fulfil ends. Kernels do not
run there, so no routing set is ever published: the full policy goes through,
the routed one waits for ever.
"""
import collections
import json
import os
import signal
import subprocess
import time

import pytest

from conftest import BUILD, INFERD, SLOW, die_with_parent

FAKE = BUILD / "tests/unit/libfakecuda.so"
LAYERS, EXPERTS, RING = 5, 48, 20
GROUPS = -(-EXPERTS // (RING // 2))  # of a layer


@pytest.fixture
def fake(world, monkeypatch):
    if not FAKE.exists():
        pytest.skip("the fake driver is not built")
    monkeypatch.setenv("EXPERTD_CUDA_LIBRARY", str(FAKE))
    world.expertd("--device", "cuda")
    r = world.inferd("run", "--device", "cuda", "--prompt", "x", "-n", 1, "--stream", "full", "--floor", 1, check=False)
    if "not in this program" in r.stderr:
        pytest.skip("built without nvcc")
    assert r.returncode == 0, r.stderr
    return world


def test_no_driver(world, monkeypatch):
    """cuda says why and ends, auto computes on the host, says so, and answers the same."""
    monkeypatch.setenv("EXPERTD_CUDA_LIBRARY", "/nonexistent/libcuda.so")
    world.expertd()
    options = ["--prompt", "A fox", "-n", 8, "--temperature", 0]
    for device in ("cuda", "cuda:1"):
        r = world.inferd("run", "--device", device, *options, check=False)
        assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
        assert "no CUDA driver" in r.stderr and "--device host" in r.stderr, r.stderr
    host, auto = world.run("--device", "host", *options), world.run(*options)
    assert host["text"] == auto["text"] and host["text"]
    assert host["device"].startswith("host") and host["device_note"] is None
    assert auto["device"].startswith("host") and "no CUDA driver" in auto["device_note"]
    said = world.inferd("run", *options).stderr
    assert said.count("no CUDA driver") == 1 and "computed on the host" in said, said
    status = world.ctl("status").stdout
    assert "No such file or directory (is it installed?))\n" in status, status  # the whole of it
    assert "no CUDA driver" not in world.inferd("run", *options, "--device", "host").stderr
    assert world.inferd("run", *options, "--quiet").stderr == ""


def test_a_host_expertd_and_a_worker_with_a_gpu(world, monkeypatch):
    if not FAKE.exists():
        pytest.skip("the fake driver is not built")
    world.expertd("--device", "host")
    monkeypatch.setenv("EXPERTD_CUDA_LIBRARY", str(FAKE))
    options = ["--prompt", "A fox", "-n", 2]
    r = world.inferd("run", "--device", "cuda", *options, check=False)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    if "not in this program" in r.stderr:
        pytest.skip("built without nvcc")
    assert "host device only" in r.stderr
    auto = world.run(*options)
    assert auto["device"].startswith("host") and "host device only" in auto["device_note"]


@pytest.mark.slow
def test_a_start_that_takes_long(world):
    """Registering much memory (three pieces here) takes longer than a call of the protocol may: a worker waits, and says so."""
    if not FAKE.exists():
        pytest.skip("the fake driver is not built")
    d = world.expertd("--device", "cuda", env={"EXPERTD_CUDA_LIBRARY": str(FAKE), "FAKECUDA_REGISTER_MS": "4000"}, wait=False)
    world.until(lambda: world.status().get("state") == "starting", what="it is starting")
    r = world.inferd("run", "--device", "host", "--prompt", "A fox", "-n", 2, check=False)
    assert r.returncode == 0, f"{r.stderr} {d.text()}"
    assert "expertd is starting: waiting until it takes workers" in r.stderr


def test_several_gpus(world, monkeypatch):
    """Opened at the same time, told in order; a worker takes the one it names; one that cannot serve is left out."""
    if not FAKE.exists():
        pytest.skip("the fake driver is not built")
    monkeypatch.setenv("EXPERTD_CUDA_LIBRARY", str(FAKE))
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    d = world.expertd("--device", "cuda")
    told = [line for line in d.text().splitlines() if "CUDA device" in line]
    assert [f"CUDA device {i}: Fake GPU {i}" in line for i, line in enumerate(told)] == [True] * 3, told
    r = world.inferd("run", "--device", "cuda:2", "--prompt", "x", "-n", 1, "--stream", "full", "--floor", 1, "--json",
                     check=False)
    if "not in this program" in r.stderr:
        pytest.skip("built without nvcc")
    assert r.returncode == 0 and "Fake GPU 2" in r.stdout, r.stderr
    r = world.inferd("run", "--device", "cuda:3", "--prompt", "x", check=False)
    assert r.returncode == 1 and "no CUDA device 3" in r.stderr, r.stderr
    d.kill()
    d.wait()
    monkeypatch.setenv("FAKECUDA_FAIL", "cuIpcGetMemHandle:3:801")  # two are good, whichever they are
    d = world.expertd("--device", "cuda")
    lacking = [line for line in d.text().splitlines() if "cannot serve workers" in line]
    assert len(lacking) == 1 and "CUDA_ERROR_NOT_SUPPORTED" in lacking[0], d.text()


def pass_calls(log):
    """Calls of the busiest stream, in order, from its ring's first memset on: (call, first argument)."""
    lines = [line.split() for line in log.read_text().splitlines()]
    waits = collections.Counter(f[2] for f in lines if f[1] == "cuStreamWaitValue32")
    stream = waits.most_common(1)[0][0]
    calls = [(f[1], f[3]) for f in lines if f[2] == stream]
    return calls[next(i for i, c in enumerate(calls) if c[0] == "cuMemsetD8Async"):]


def test_order_of_a_pass(fake, tmp_path, monkeypatch):
    log = tmp_path / "calls.log"
    monkeypatch.setenv("FAKECUDA_LOG", str(log))
    r = fake.run("--device", "cuda", "--prompt", "A fox and a hen", "-n", 1, "--stream", "full", "--floor", 1, "--ring",
                 RING)
    assert r["stream"]["copied"] == LAYERS * EXPERTS
    calls = pass_calls(log)
    first = next(i for i, c in enumerate(calls) if c[0] == "cuStreamWaitValue32")
    last = max(i for i, c in enumerate(calls) if c[0] == "cuStreamWriteValue64")
    inside = calls[first:last + 1]
    assert {c for c, _ in inside} == {"cuStreamWaitValue32", "cuStreamWriteValue64", "cuStreamWriteValue32",
                                      "cuLaunchKernel"}, "something in a pass waits for the host"
    order = [(c, int(v)) for c, v in inside if c in ("cuStreamWaitValue32", "cuStreamWriteValue64")]
    expect = []
    for group in range(1, LAYERS * GROUPS + 1):
        expect += [("cuStreamWaitValue32", group), ("cuStreamWriteValue64", group)]
    assert order == expect, "each group is waited for, then released, in order"
    between = "".join({"cuStreamWaitValue32": "w", "cuStreamWriteValue64": "r", "cuLaunchKernel": "k"}.get(c, "")
                      for c, _ in inside)
    for group in between.split("w")[1:]:
        assert group.index("r") == 3 and group[:3] == "kkk", "plan, gate and up, down between wait and release"


def test_profile(fake, tmp_path, monkeypatch):
    """An event behind each step, and only where it was asked for."""
    log = tmp_path / "calls.log"
    monkeypatch.setenv("FAKECUDA_LOG", str(log))
    options = ["--device", "cuda", "--prompt", "A fox", "-n", 1, "--stream", "full", "--floor", 1, "--ring", RING]
    steps = ("attention", "routers", "experts", "head", "stall", "idle")
    plain = fake.run(*options)["times_ms"]
    assert all(plain[s] == 0 for s in steps) and plain["wait"] > 0
    assert "cuEventRecord" not in [c for c, _ in pass_calls(log)]
    log.unlink()
    r = fake.run(*options, "--profile")["times_ms"]
    assert all(r[s] > 0 for s in steps), r
    events = [c for c, _ in pass_calls(log)].count("cuEventRecord")
    # begin, embedding, stream begun; per layer attention, router, residents, combine; each group waited for and run in
    # layer 0, in the others all of them together; logits
    assert events == 3 + LAYERS * 4 + 2 * GROUPS + (LAYERS - 1) + 1, events
    text = fake.inferd("run", *options, "--profile", "-v").stderr
    assert "the GPU waited for groups" in text and "--profile" not in text
    assert "--profile" in fake.inferd("run", *options, "-v").stderr


def test_small_chunks_take_a_layer_at_once(fake, tmp_path, monkeypatch):
    """Below the floor all that can be routed fits in the ring: one wait a layer. (Demand never comes here:
    cancelled.)"""
    log = tmp_path / "calls.log"
    monkeypatch.setenv("FAKECUDA_LOG", str(log))
    r = fake.inferd("run", "--device", "cuda", "--prompt", "x", "--raw", "-n", 1, "--ring", 2 * EXPERTS, "--watchdog", 1,
                    check=False)
    assert r.returncode == 1
    waits = [int(v) for c, v in pass_calls(log) if c == "cuStreamWaitValue32"]
    assert waits == [3 * (layer + 1) for layer in range(LAYERS)], "48 experts are 3 groups of 16"


def test_residents_wait_for_nobody(fake, tmp_path, monkeypatch):
    """All resident: one wait and one release at the end, for the groups that nobody filled."""
    log = tmp_path / "calls.log"
    monkeypatch.setenv("FAKECUDA_LOG", str(log))
    fake.run("--device", "cuda", "--prompt", "x", "-n", 1, "--ring", RING, "--resident", EXPERTS)
    order = [(c, int(v)) for c, v in pass_calls(log) if c in ("cuStreamWaitValue32", "cuStreamWriteValue64")]
    assert order == [("cuStreamWaitValue32", LAYERS * GROUPS), ("cuStreamWriteValue64", LAYERS * GROUPS)]


def test_chunk_and_context_come_from_free_memory(fake, monkeypatch):
    options = ["--device", "cuda", "--prompt", "x", "-n", 1, "--stream", "full", "--floor", 1]
    whole = fake.run(*options)["memory"]
    chunks = []
    for mib in (384 + 24, 384 + 14, 384 + 8):
        monkeypatch.setenv("FAKECUDA_FREE_MIB", str(mib))
        m = fake.run(*options, "--ctx", 1024)["memory"]
        assert m["activation_bytes"] + m["kv_bytes"] <= (mib - 384) << 20
        chunks.append(m["chunk"])
    assert whole["chunk"] > chunks[1] > chunks[2] > 0 and chunks[0] >= chunks[1], chunks
    monkeypatch.setenv("FAKECUDA_FREE_MIB", str(384 + 8))
    assert fake.run(*options)["context_tokens"] > 0  # a smaller context is chosen
    r = fake.inferd("run", *options, "--ctx", 200000, check=False)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    assert "do not fit" in r.stderr and "--ctx" in r.stderr, r.stderr


@pytest.mark.parametrize("call,word", [("cuLaunchKernel:40:719", "CUDA_ERROR_LAUNCH_FAILED"),
                                       ("cuStreamQuery:2:719", "CUDA_ERROR_LAUNCH_FAILED"),
                                       ("cuStreamWriteValue32:3:801", "CUDA_ERROR_NOT_SUPPORTED")])
def test_the_gpu_fails_in_a_read(fake, monkeypatch, call, word):
    """At a launch, or seen later while the stream is waited for: the driver's words in one line, nothing stays."""
    monkeypatch.setenv("FAKECUDA_FAIL", call)
    r = fake.inferd("run", "--device", "cuda", "--prompt", "A fox", "-n", 4, "--floor", 1, check=False)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    for text in ("the GPU failed in a pass", word, "said the fake driver", "start inferd anew"):
        assert text in r.stderr, r.stderr
    fake.until(lambda: not fake.status()["workers"], what="detached")
    monkeypatch.delenv("FAKECUDA_FAIL")
    assert fake.run("--device", "cuda", "--prompt", "x", "-n", 1, "--stream", "full", "--floor", 1)["stop"] == "length"


@pytest.mark.parametrize("kernel", ["plan", "token_router"])
def test_a_chosen_expert_that_did_not_run(fake, monkeypatch, kernel):
    """Of a prompt, of a generated token: never an answer that was computed without it."""
    monkeypatch.setenv("FAKECUDA_LEFT_OUT", kernel)
    r = fake.inferd("run", "--device", "cuda", "--prompt", "A fox and a hen", "-n", 2, "--ignore-eos", "--stream", "full", "--floor", 1,
                    check=False)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    assert "layer 0" in r.stderr and "choices of experts were run" in r.stderr


def test_stuck_waits_end(fake):
    routed = ["run", *fake.where(), "--device", "cuda", "--prompt", "A fox", "-n", 4, "--floor", 1]

    def start(*options):
        return subprocess.Popen(list(map(str, [INFERD, *routed, *options])), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                text=True, preexec_fn=die_with_parent)

    p = start("--watchdog", 1)
    line = p.communicate(timeout=10 * SLOW)[1]
    assert p.returncode == 1 and len(line.splitlines()) == 1, line
    for word in ("no progress", "stream 1", "layer", "flag", "landed_groups"):
        assert word in line, line

    p = start()
    fake.until(lambda: fake.status()["workers"], what="attached")
    time.sleep(0.3 * SLOW)
    p.send_signal(signal.SIGINT)
    line = p.communicate(timeout=5 * SLOW)[1]
    assert p.returncode == 130 and "cancelled" in line, line

    fake.until(lambda: not fake.status()["workers"], what="detached")
    p = start()
    fake.until(lambda: fake.status()["workers"], what="attached")
    time.sleep(0.3 * SLOW)
    os.kill(next(x.pid for x in fake.processes if x.poll() is None), signal.SIGKILL)
    line = p.communicate(timeout=5 * SLOW)[1]
    assert p.returncode == 1 and "expertd is gone" in line and len(line.splitlines()) == 1, line


def test_sessions_one_after_the_other(fake):
    """Rings that grow and shrink between reads: expertd may still hold the last session's allocation, so it is used
    again or kept, never freed under it."""
    rings = [20, 5, 1, 200, 300, 20, 400, 500, 600, 700, 800, 2, 100]
    lines = [f"--ring {ring} --floor {1 + i % 2} --stream full" for i, ring in enumerate(rings)]
    r = subprocess.run([str(INFERD), "logits", *fake.where(), "--device", "cuda", "--ids", "1,2,3", "--positions", "none",
                        "--reads", "-"], input="".join(line + "\n" for line in lines), capture_output=True, text=True,
                       timeout=60 * SLOW)
    got = [json.loads(line) for line in r.stdout.splitlines()]
    assert r.returncode == 0 and len(got) == len(rings), r.stdout + r.stderr
    assert [g["stream"]["ring"] for g in got] == rings, got
    assert all(g["stream"]["copied"] == LAYERS * EXPERTS for g in got), got


def test_floor_of_a_live_worker_only_rises(fake):
    """It takes a layer of a chunk below its floor as a whole, which is wrong once copies run ahead."""
    p = fake.spawn([INFERD, "logits", *fake.where(), "--device", "cuda", "--ids", "1,2,3", "--positions", "none", "--floor", "3",
                    "--stream", "full", "--reads", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    p.stdin.write(b"\n")
    p.stdin.flush()
    assert b"error" not in p.stdout.readline()
    worker = ["configure", "--worker", p.pid]
    assert "floor 9" in fake.ctl(*worker, "--floor", "9").stdout
    assert "floor 3" in fake.ctl(*worker, "--floor", "3").stdout
    r = fake.ctl(*worker, "--floor", "2", "--depth", "5", check=False)
    assert r.returncode != 0 and "can't go below" in r.stderr and "--floor 2" in r.stderr, r.stderr
    r = fake.ctl(*worker, "--link-gbps", "1", check=False)
    assert r.returncode != 0 and "not paced" in r.stderr, r.stderr
