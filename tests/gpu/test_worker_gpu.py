# SPDX-License-Identifier: MIT
"""Whole workers on a GPU: against the reference outputs, the same bits under
every setting, and kill -9 of either side.

    EXPERTD_BUILD=build python3 -m pytest -s tests/gpu/test_worker_gpu.py

EXPERTD_DEVICE: cuda (default), cuda:N, or host, which tries the test itself.
Bounds: logits within 2e-2 of the greatest of the float32 reference, KL below
1e-3, greedy text equal up to a step whose top two are closer than that bound
in the reference (such steps are listed).

The shipped models are small and sure of nothing: their 8th and 9th expert are
often nearer than what 16-bit operands resolve, and a token that takes the other
one leaves the reference for good, and with it, a little, all that look at it.
So the bounds speak of many tokens: the mean KL over about 50 positions of each
prompt (against a float32 worker on the host, itself within 1e-3 of the
reference), and the logits of 95% of those that took the same experts. The
others may be off by 0.15, and must be few. All figures are printed.
"""
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from conftest import INFERD, TOP, die_with_parent, prompts, world  # noqa: E402,F401
from test_goldens import KINDS, logits, reference  # noqa: E402

DEVICE = os.environ.get("EXPERTD_DEVICE", "cuda")
SERVER = ["--device", DEVICE.split(":")[0]]
WORKER = ["--device", DEVICE]
KILLS = int(os.environ.get("EXPERTD_KILLS", "20"))
LOGITS, KL = 2e-2, 1e-3
FLIPPED_LOGITS, FLIPPED_SHARE = 0.15, 0.02
EXPERTS = 48


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(x - top) for x in row)) + top
    return [x - total for x in row]


def divergence(want, got):
    p, q = log_softmax(want), log_softmax(got)
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q))


def memory_used():
    if DEVICE == "host":
        return 0
    r = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True,
                       text=True)
    return int(r.stdout.split()[0])


def flips(got, expect, tokens, used=8):
    """Layers in which a token's set of experts differs, for each token."""
    count = [0] * tokens
    for a, b in zip(got["routes"], expect["routes"]):
        for token in range(tokens):
            at = slice(token * used, (token + 1) * used)
            count[token] += set(a[at]) != set(b[at])
    return count


def check_prompt(world, kind, ref, full, want, text):
    """One prompt; returns what is wrong with it."""
    name, bad, tokens = want["name"], [], len(text["ids"])
    golden = {f["position"]: full[f["offset"]:f["offset"] + ref["vocab"]] for f in want["full_logits"]}
    positions = sorted(set(golden) | set(range(tokens - 1, -1, -max(1, tokens // 48))))
    options = ["--positions", ",".join(map(str, positions)), "--routes"]
    got = logits(world, text["text"], *options, "-n", 64, *WORKER)
    host = logits(world, text["text"], *options, "--device", "host")
    assert got["ids"] == text["ids"], f"{name}: token ids"
    flipped = flips(got, host, tokens)
    same, other, kl = [], [0.0], []
    for position, row, exact in zip(positions, got["logits"], host["logits"]):
        expect = golden.get(position, exact["logits"])
        off = max(abs(a - b) for a, b in zip(row["logits"], expect)) / max(map(abs, expect))
        (other if flipped[position] else same).append(off)
        kl.append(divergence(expect, row["logits"]))
    same.sort()
    most, mean = same[int(0.95 * (len(same) - 1))] if same else 0.0, sum(kl) / len(kl)
    share = sum(flipped) / (tokens * len(got["routes"]))
    if most >= LOGITS or max(same + other) >= FLIPPED_LOGITS or mean >= KL:
        bad.append(f"{name}: logits off by {most:.2e}, at most {max(same + other):.2e}; mean KL {mean:.2e}")
    if share > FLIPPED_SHARE and sum(flipped) > 2:
        bad.append(f"{name}: {100 * share:.2f}% of the routings differ")
    greedy, note = got["greedy"]["ids"], "equal"
    if greedy != want["greedy_ids"]:
        step = next(i for i, (a, b) in enumerate(zip(greedy, want["greedy_ids"])) if a != b)
        margin, scale = want["greedy_margin"][step], max(map(abs, full))
        note = f"differs from step {step}, where the reference's margin is {margin:.4f} (bound {LOGITS * scale:.4f})"
        if margin > LOGITS * scale:
            bad.append(f"{name}: greedy text {note}")
    print(f"{kind} {name}: {len(same)} of {len(positions)} positions with the same experts: logits off by {most:.2e} (95%), "
          f"{max(same + [0]):.2e} (most); others {max(other):.2e}; KL mean {mean:.2e}, most {max(kl):.2e}; "
          f"{100 * share:.2f}% of the routings differ; greedy {note}")
    return bad


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_goldens(world, kind):
    if not KINDS[kind].exists():
        pytest.skip(f"{KINDS[kind]} is not made (tests/data/make_models.py)")
    world.expertd(*SERVER, model=KINDS[kind])
    ref, full = reference(kind)
    texts = prompts()
    bad = sum((check_prompt(world, kind, ref, full, want, texts[want["name"]]) for want in ref["results"]), [])
    assert not bad, bad


def hash_of(world, prompt, *options):
    r = world.run("--prompt-file", prompt, "--raw", "-n", 4, "--ignore-eos", "--temperature", 0, "--hash", "--poison",
                  *WORKER, *options)
    return r["logits_hash"], r


def compare(world, prompt, cases, workers=4):
    """All cases in a few processes at a time: the workers share the GPU, too."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda options: hash_of(world, prompt, *options), cases))
    want = results[0][0]
    wrong = [f"{options}: {got} instead of {want}" for options, (got, _) in zip(cases, results) if got != want]
    print(f"{len(cases)} settings, hash {want}")
    assert not wrong, wrong
    return [r for _, r in results]


def test_bits_short(world):
    world.expertd(*SERVER)
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p300"]["text"])
    cases = [["--floor", "1", "--stream", "full"]]
    for order, depth, ring in itertools.product(("index", "recent", "predicted"), (1, 16), (1, EXPERTS, EXPERTS * 5 // 2)):
        cases.append(["--floor", "1", "--stream", "routed", "--order", order, "--depth", str(depth), "--ring", str(ring)])
    cases += [["--floor", "1", "--stream", "full", "--ring", "1"], ["--floor", "5000"], ["--floor", "5000", "--ring", "3"],
              ["--resident", "1"], ["--resident", "20", "--floor", "1"], ["--resident", str(EXPERTS)],
              ["--chunk", "64", "--floor", "1"], ["--chunk", "77", "--floor", "1", "--order", "recent"],
              ["--chunk", "1", "--floor", "1"], ["--chunk", "1", "--floor", "2"]]
    results = compare(world, path, cases)
    assert any(r["stream"]["dropped"] for r in results), "nothing was ever dropped"


def test_bits_long(world):
    world.expertd(*SERVER)
    results = compare(world, TOP / "tools/model/prompt.txt",
                      [["--stream", "full"], ["--order", "index"], ["--order", "recent"], ["--order", "predicted"],
                       ["--chunk", "512", "--floor", "1"], ["--chunk", "1024"], ["--chunk", "512"],
                       ["--resident", "7", "--depth", "64"], ["--ring", "16", "--depth", "2"]])
    print("start of the first, ms:", results[0].get("start_ms"), results[0].get("memory"))


def answer(world, *options, **kw):
    return world.run("--prompt-file", TOP / "tools/model/prompt.txt", "--raw", "-n", 8, "--temperature", 0, "--hash",
                     *WORKER, *options, **kw)


def test_worker_killed(world):
    d = world.expertd(*SERVER)
    want = answer(world)["logits_hash"]
    before, rng = memory_used(), random.Random(1)
    for i in range(KILLS):
        p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", TOP / "tools/model/prompt.txt", "--raw", "-n", "400",
                         "--ignore-eos", "--floor", "1", "--stream", "full", *WORKER], stdout=subprocess.DEVNULL)
        world.until(lambda: world.status().get("workers") or p.poll() is not None, what="attached", every=0.005)
        time.sleep(rng.random() * 0.3)
        p.send_signal(signal.SIGKILL)
        p.wait()
        world.until(lambda: not world.status()["workers"], timeout=10, what=f"kill {i}: session closed")
    assert d.process.poll() is None, d.text()
    assert answer(world)["logits_hash"] == want
    world.until(lambda: memory_used() <= before + 8, timeout=5, what=f"device memory back to {before} MiB", every=0.2)
    print(f"{KILLS} workers killed, device memory {before} -> {memory_used()} MiB")


def test_expertd_killed(world):
    """In mid-stream: a line, the conversation kept, the same answer afterwards."""
    rng = random.Random(2)
    world.expertd(*SERVER)
    text = prompts()["p1100"]["text"].replace("\n", " ")
    want = None
    p = subprocess.Popen([str(INFERD), "chat", *world.where(), "--temperature", "0", "-n", "8", "--json", "--floor", "1",
                          *WORKER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=open(world.path / "chat.log", "w"), preexec_fn=die_with_parent)
    world.processes.append(p)
    said = set()
    for i in range(KILLS):
        d = next(x for x in world.processes if x is not p and x.poll() is None)
        p.stdin.write("/clear\n" + text + "\n")
        p.stdin.flush()
        if i % 2 == 0:
            time.sleep(rng.random() * 0.06)
            d.send_signal(signal.SIGKILL)
            d.wait()
            world.expertd(*SERVER)
        r = json.loads(p.stdout.readline())  # the answer if it was faster, else the error
        assert p.poll() is None, (world.path / "chat.log").read_text()
        if i % 2:
            want = want or r["text"]
            assert r["text"] == want, f"round {i}"
        said.add(r.get("error", "answered"))
    p.stdin.close()
    assert p.wait(30) == 0
    print(f"{(KILLS + 1) // 2} times killed; the worker said: {said}")
