# SPDX-License-Identifier: MIT
"""expert-bench, inferd measure and tools/timeline against real daemons."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

import pytest

from conftest import BUILD, SLOW, STORY, TOP, die_with_parent

BENCH = BUILD / "tools/expert-bench"
PROMPT = TOP / "tools/model/prompt.txt"
TIMELINE = TOP / "tools/timeline"


@pytest.fixture
def prompt(world):
    """A few hundred tokens: enough to stream, quickly read."""
    path = world.path / "prompt.txt"
    path.write_text(PROMPT.read_text()[:1600])
    return path


BENCH_KEYS = {"setting", "identical_pair", "read_ms", "tokens_per_s", "ratio", "routed_share", "entries", "copied",
              "dropped", "wasted", "bytes_copied", "bytes_wasted", "waste", "link_efficiency", "link_gbps", "link_ms",
              "wait_ms", "issuer_us_per_copy"}


def bench(*argv, env=None):
    return subprocess.run([str(BENCH), *map(str, argv)], capture_output=True, text=True, timeout=300 * SLOW,
                          preexec_fn=die_with_parent, env={**os.environ, **(env or {})})


@pytest.mark.slow
def test_bench_on_a_running_instance(world, prompt):
    world.expertd()
    argv = ["--runtime-dir", world.runtime, "--prompt-file", prompt, "--link-gbps", "0.006", "--floor", "64", "-n", "2"]
    r = bench(*argv, "--json", "full", "routed/predicted/4", "oracle")
    assert r.returncode == 0, r.stderr
    o = json.loads(r.stdout)
    assert o["same_bits"] and o["peak_from"] == "paced" and o["peak_gbps"] == pytest.approx(0.006)
    (read,) = o["reads"]
    assert read["rounds"] == 2 and read["same_bits"] and read["at"] == 0
    assert [s["setting"] for s in read["settings"]] == ["full", "routed/predicted/4", "oracle", "(identical pair)"]
    assert [s["identical_pair"] for s in read["settings"]] == [False, False, False, True]
    page = (TOP / "tools/man/expert-bench.1.scd").read_text()
    for s in read["settings"]:
        assert set(s) == BENCH_KEYS and all(f"_{k}_" in page for k in s)
        for spread in (s["ratio"], s["read_ms"]):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert 0 < s["link_efficiency"] <= 1.05 and 0 <= s["waste"] < 1
        assert s["copied"] + s["dropped"] == s["entries"] and s["issuer_us_per_copy"] > 0
    full, routed, oracle, _ = read["settings"]
    assert full["copied"] == full["entries"] and routed["copied"] < full["copied"]
    assert oracle["wasted"] == 0, "it knew what would be routed"
    if SLOW == 1:
        assert routed["ratio"]["median"] > 1, "the link is the bound here: dropping must win"
        assert oracle["read_ms"]["low"] <= routed["read_ms"]["high"]
    assert world.status()["workers"] == []
    r = bench(*argv, "-n", "1", "routed/index")
    assert r.returncode == 0 and "equal under all settings" in r.stdout and "routed/index" in r.stdout


@pytest.mark.slow
def test_bench_reads_pieces_and_turns(world, prompt):
    """A turn is read behind what was read once; each piece with its own hash, equal under every setting."""
    world.expertd()
    r = bench("--runtime-dir", world.runtime, "--prompt-file", TOP / "tools/model/prompt.txt", "-n", "2", "--bits", "last",
              "--tokens", "100,300+64,100+40", "--generate", "3", "--seconds", "0.001", "--floor", "64", "--json",
              "full", "routed", "demand", "ahead")
    assert r.returncode == 0, r.stderr
    o = json.loads(r.stdout)
    assert [(x["at"], x["tokens"]) for x in o["reads"]] == [(0, 100), (300, 64), (100, 40)]
    for x in o["reads"]:
        assert x["same_bits"] and x["rounds"] == 2
        for s in x["settings"]:
            assert set(s) == BENCH_KEYS | {"decode_tokens_per_s", "decode_bytes_per_token", "decode_issuer_us_per_copy"}
            assert s["decode_tokens_per_s"] > 0 and s["decode_bytes_per_token"] > 0
        by = {s["setting"]: s for s in x["settings"]}
        assert by["demand"]["wasted"] == 0
        assert (by["full"]["dropped"] == 0) == (x["tokens"] >= 64), "full below the floor runs on demand"


def measure(world, *requests, options=()):
    """Replies of inferd measure, the first being its introduction."""
    r = world.inferd("measure", "--raw", "--prompt-file", TOP / "tools/model/prompt.txt", "--floor", "1", *options,
                     input="".join(json.dumps(q) + "\n" for q in requests), check=False)
    return r, [json.loads(line) for line in r.stdout.splitlines()]


@pytest.mark.slow
def test_measure_reads_what_run_reads(world):
    """The same logits as a fresh process for the same text; the same again after other reads and settings."""
    world.expertd()
    text = (TOP / "tools/model/prompt.txt").read_text()
    head = {"tokens": 200, "all": True, "order": "recent", "floor": 1}
    turn = {"at": 200, "tokens": 100, "order": "recent", "floor": 1}
    r, (hello, first, a, b, again, c, known) = measure(world, head, turn, {**turn, "policy": "full"}, head, turn,
                                                       {**turn, "known": True, "order": "predicted"})
    assert r.returncode == 0, r.stderr
    assert hello["prompt_tokens"] > 1000 and hello["peak_gbps"] == 0 and hello["ring"] > 0
    assert first["logits_hash"] == again["logits_hash"] and first["stream"]["copied"] + first["stream"]["dropped"] == 240
    assert a["logits_hash"] == b["logits_hash"] == c["logits_hash"] == known["logits_hash"] != first["logits_hash"]
    assert known["stream"]["wasted"] == 0
    ids = json.loads(world.inferd("tokenize", "--raw", "--prompt", text).stdout)
    alone = json.loads(world.inferd("logits", "--ids", ",".join(map(str, ids[:200])), "--hash").stdout)
    assert alone["hash"] == first["logits_hash"]


def test_measure_names_what_is_wrong(world):
    world.expertd()
    for request, word in [({"tokens": 0}, "tokens"), ({"tokens": 10, "at": 10**6}, "tokens"), ({"tokens": 1, "order": "best"}, "best"),
                          ({"tokens": 5, "known": True}, "known"), ({"tokens": -1}, "tokens"), ([1], "object"),
                          ({"tokens": 1, "depth": 1 << 25}, "depth")]:
        r, replies = measure(world, request)
        assert r.returncode == 1 and word in replies[1]["error"], (request, replies)
        assert len(r.stderr.splitlines()) == 1


def leftovers(world):
    def mine(d):
        return {str(d / n) for n in os.listdir(d) if "bench" in n} if d.is_dir() else set()
    return mine(world.path / "tmp") | mine(pathlib.Path("/dev/shm")) | mine(pathlib.Path(f"/dev/shm/expertd-{os.geteuid()}"))


def test_bench_starts_and_removes_its_own_instance(world, prompt):
    (world.path / "tmp").mkdir()
    env = {"TMPDIR": str(world.path / "tmp")}
    before = leftovers(world)
    r = bench("--model", STORY, "--prompt-file", prompt, "--link-gbps", "0.05", "-n", "1", "--json", "routed", env=env)
    assert r.returncode == 0, r.stderr
    assert json.loads(r.stdout)["same_bits"]
    assert leftovers(world) <= before
    assert not list((world.path / "tmp").iterdir())
    r = bench("--model", PROMPT, "--prompt-file", prompt, env=env)
    assert r.returncode == 2 and "prompt.txt" in r.stderr, r.stderr
    assert leftovers(world) <= before


def test_bench_interrupted_cleans_up(world, prompt):
    (world.path / "tmp").mkdir()
    before = leftovers(world)
    p = world.spawn([BENCH, "--model", STORY, "--prompt-file", prompt, "--link-gbps", "0.001", "full"],
                    env={**os.environ, "TMPDIR": str(world.path / "tmp")}, stdout=subprocess.PIPE)
    tmp = world.path / "tmp"
    world.until(lambda: list(tmp.glob("expert-bench.*/expertd/*/store")), what="its instance runs")
    time.sleep(0.3 * SLOW)
    p.send_signal(signal.SIGINT)
    assert p.wait(15 * SLOW) == 2
    assert "interrupted" in p.log.read_text()
    assert leftovers(world) <= before and not list(tmp.iterdir())


def test_bench_passes_on_why_a_read_failed(world, prompt):
    world.expertd()
    r = bench("--runtime-dir", world.runtime, "--prompt-file", prompt, "--ring", "0", "full")
    assert r.returncode == 2
    assert "--ring" in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr
    r = bench("--runtime-dir", world.runtime, "--instance", "nobody", "--prompt-file", prompt, "full")
    assert r.returncode == 2 and "nobody" in r.stderr


def timeline(*argv):
    return subprocess.run([sys.executable, str(TIMELINE), *map(str, argv)], capture_output=True, text=True, timeout=60 * SLOW)


@pytest.mark.slow
def test_timeline_of_a_real_trace(world, prompt):
    """Each copy, landing, publication and release of the streams is in the file, in order, and in the picture."""
    trace = world.path / "trace"
    world.expertd("--trace-file", trace)
    measure(world, {"tokens": 120, "policy": "full", "floor": 1}, {"tokens": 300, "order": "predicted", "floor": 1},
            options=("--link-gbps", "0.05"))
    listed = timeline(trace, "--list")
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()
    assert len(lines) == 2 and "300 tokens, routed/predicted" in lines[1]
    svg = world.path / "t.svg"
    r = timeline(trace, "-o", svg, "--layers", "1-2", "--tokens", "300", "--setting", "routed/predicted")
    assert r.returncode == 0, r.stderr
    root = xml.etree.ElementTree.parse(svg).getroot()
    text = "".join(root.itertext())
    assert "layer 1 published" in text and "layer 2 published" in text and "layers 1 to 2 of 5: 300 tokens" in text
    copies = text.count(", landed ")
    assert f"{copies} of 96 experts copied" in text and copies > 40
    assert timeline(trace).stdout.startswith("<svg")


def test_timeline_refuses_what_is_no_trace(world):
    path = world.path / "x"
    for content in (b"", b"EXDTRC01", b"x" * 1000, b"EXDTRC01" + b"\xff" * 500):
        path.write_bytes(content)
        r = timeline(path)
        assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and "timeline" in r.stderr, r.stderr
    assert timeline(world.path / "none").returncode == 1
