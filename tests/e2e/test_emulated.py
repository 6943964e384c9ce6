# SPDX-License-Identifier: MIT
"""Whole workers on a GPU that a CPU plays (tests/gpu/emu_library.c): the CUDA kernels' code, the CUDA device's order of
waits, copies and publications between two processes. Slow, so for prompts of a few tokens; tests/gpu has the rest.
"""
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import BUILD, INFERD, SLOW, prompts
from serving import Server

EMULATED = BUILD / "tests/gpu/libemucuda.so"


@pytest.fixture
def emulated(world, monkeypatch):
    if not EMULATED.exists():
        pytest.skip("the emulated GPU is not built")
    monkeypatch.setenv("EXPERTD_CUDA_LIBRARY", str(EMULATED))
    world.expertd("--device", "cuda")
    return world


def reads(world, lines, *options):
    r = subprocess.run([str(INFERD), "logits", *world.where(), "--raw", "--hash", "--chunk", "16", "--ctx", "64", "--reads", "-",
                        *map(str, options)], input="".join(line + "\n" for line in lines), capture_output=True, text=True,
                       timeout=120 * SLOW)
    if "not in this program" in r.stderr:
        pytest.skip("built without nvcc")
    assert r.returncode == 0, r.stderr
    got = [json.loads(line) for line in r.stdout.splitlines()]
    assert len(got) == len(lines) and not any("error" in g for g in got), got
    return got


@pytest.mark.slow
def test_bits_and_logits(emulated):
    """Within the bounds of 16-bit operands of the host's float32, and the same bits in every setting."""
    ids = ",".join(map(str, prompts()["chat1"]["ids"][:8]))
    host = reads(emulated, ["--positions all --routes"], "--device", "host", "--ids", ids)[0]
    lines = ["--floor 1 --stream full --positions all --routes -n 6", "--floor 1 --order predicted", "--chunk 3 --floor 1 --order recent",
             "--floor 1 --stream full --ring 3", "--floor 100 --ring 20", "--floor 100 --ring 3"]
    got = reads(emulated, lines, "--device", "cuda", "--ids", ids, "--positions", "none", "--poison")
    got += reads(emulated, ["--floor 1 --order index"], "--device", "cuda", "--ids", ids, "--positions", "none", "--resident", 11)
    assert len({g["hash"] for g in got}) == 1, got
    assert got[1]["stream"]["dropped"] and got[4]["stream"]["copied"] == got[4]["stream"]["routed"]
    differ = [(a, b) for a, b in zip(got[0]["routes"], host["routes"])
              if any(set(a[i:i + 8]) != set(b[i:i + 8]) for i in range(0, len(a), 8))]
    assert not differ
    for a, b in zip(got[0]["logits"], host["logits"]):
        off = max(abs(x - y) for x, y in zip(a["logits"], b["logits"])) / max(map(abs, b["logits"]))
        assert off < 5e-3, f"logits at {a['position']} off by {off:.2e}"
    whole = reads(emulated, ["-n 6"], "--device", "host", "--ids", ids, "--positions", "none")[0]
    assert got[0]["greedy"]["ids"] == whole["greedy"]["ids"]


@pytest.mark.slow
def test_follow_up_turn(emulated):
    ids = prompts()["chat1"]["ids"][:9]
    part = [",".join(map(str, x)) for x in (ids, ids[:4], ids[4:])]
    one, _, rest = reads(emulated, [f"--ids {part[0]}", f"--ids {part[1]}", f"--keep --ids {part[2]}"], "--device", "cuda",
                         "--positions", "last")
    assert rest["logits"][0]["logits"] == one["logits"][0]["logits"]


@pytest.mark.slow
def test_bits_of_generated_tokens(emulated):
    """One by one behind a prompt: experts all in reach, group by group, resident, some of each."""
    def read(options):
        r = emulated.run("--device", "cuda", "--prompt", "A", "--raw", "-n", 3, "--temperature", 0, "--ignore-eos", "--hash",
                         "--chunk", 16, "--ctx", 64, *options)
        return r["logits_hash"], tuple(r["generated_tokens"])

    settings = (["--floor", 1, "--stream", "full", "--ring", 20], ["--order", "index", "--ring", 20],
                ["--floor", 1, "--order", "predicted", "--ring", 3],
                ["--resident", 5, "--ring", 20], ["--resident", 5, "--ring", 3], ["--resident", 1000])
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(read, settings))
    assert len(set(got)) == 1, got


def trace_of(path):
    """Lines that inferd wrote in its test mode: (steps by name, what was found in the slots)."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return [dict(line["steps"]) for line in lines], [line.get("slots") for line in lines]


@pytest.mark.slow
def test_trace_of_steps(emulated, monkeypatch, tmp_path):
    """The test mode that names the first wrong step: the same sums in every setting, slots as the arena has them."""
    path = tmp_path / "trace"
    monkeypatch.setenv("EXPERTD_TRACE_STEPS", str(path))
    monkeypatch.setenv("EXPERTD_TRACE_SLOTS", "1")
    ids = ",".join(map(str, prompts()["chat1"]["ids"][:5]))
    settings = ["--floor 1 --stream full", "--floor 1 --order predicted --ring 3", "--floor 100 --ring 20"]
    reads(emulated, settings, "--device", "cuda", "--ids", ids, "--positions", "none", "--poison")
    steps, slots = trace_of(path)
    assert len(steps) == len(settings) and len(steps[0]) >= 18 * 2
    for other in steps[1:]:
        assert [name for name in other if other[name] != steps[0][name]] == []
    assert all(s["checked"] and not s["bad"] and not s["notes"] for s in slots), slots
    other = ids.rsplit(",", 1)[0] + ",7"  # another last token: its own row from the embedding on, others' not before attention
    reads(emulated, settings[:1], "--device", "cuda", "--ids", other, "--positions", "none")
    changed = trace_of(path)[0][0]
    assert next(name for name in changed if changed[name] != steps[0][name]) == "0 norm"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("EXPERTD_LONG"), reason="half a minute: EXPERTD_LONG=1")
def test_parked(emulated):
    """Keys and values of the emulated GPU in the next worker: the same answer as by one that read it all. (That one's are
    not found by those with --exact-prefix.)"""
    def start(*options):
        return Server(emulated, "--device", "cuda", "--chunk", "16", "--ctx", "64", "--parallel", "2", *options)

    def ask(server, prompt):
        body = server.complete(prompt, max_tokens=2, logprobs=2, ignore_eos=True)
        return (body["choices"][0]["text"], body["choices"][0]["logprobs"]), body["usage"]
    first, more = "Once upon a time there was", " a fox"
    whole, _ = ask(start(), first + more)
    a = start("--exact-prefix")
    _, usage = ask(a, first)
    a.until_status(lambda s: s["prefix"]["parked_blocks"] and not s["prefix"]["unparked_blocks"], "it is parked", timeout=60)
    a.process.kill()
    a.process.wait()
    again, more = ask(start("--exact-prefix"), first + more)
    assert again == whole and more["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


@pytest.mark.slow
def test_several_sequences_in_a_pass(emulated):
    """Prompts together, answers together, across blocks that lie anywhere: each as alone."""
    for options in (["--floor", "1", "--ring", "20"], ["--floor", "100"]):
        r = subprocess.run([str(BUILD / "tests/gpu/g_batch"), str(emulated.runtime), "default", "--small", *options],
                           capture_output=True, text=True, timeout=240 * SLOW)
        if "not in this program" in r.stderr:
            pytest.skip("built without nvcc")
        assert r.returncode == 0 and "the same bits as alone" in r.stdout and " 0 passes" not in r.stdout, r.stdout + r.stderr
