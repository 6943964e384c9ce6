# SPDX-License-Identifier: MIT
"""expert-bench serve against live servers, and against one that answers as it shouldn't."""
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import BUILD, SLOW, TOP, die_with_parent
from serving import Server

BENCH = BUILD / "tools/expert-bench"
TAILS = {"ttft_ms", "later_ttft_ms", "itl_ms", "total_ms"}
SPREADS = {"seconds", "prompt_tokens_per_s", "generated_tokens_per_s"}
RATIOS = {"generated_ratio", "ttft_ratio"}
KEYS = TAILS | SPREADS | {"server", "model", "conversations", "requests", "ok", "errors", "last_error", "retries",
                          "prompt_tokens", "cached_tokens", "generated_tokens", "most_at_once", "late_ms"}


def load(*argv, status=0):
    r = subprocess.run([str(BENCH), "serve", *map(str, argv)], capture_output=True, text=True, timeout=120 * SLOW,
                       preexec_fn=die_with_parent)
    assert r.returncode == status, (r.returncode, r.stdout, r.stderr)
    return r


def check(server):
    for key in TAILS:
        t = server[key]
        assert t is None or 0 < t["p50"] <= t["p99"] <= t["max"] and t["count"] > 0, (key, t)
    for key in (SPREADS | RATIOS) & set(server):
        assert 0 < server[key]["low"] <= server[key]["median"] <= server[key]["high"], key


def test_conversations_at_once(world, tmp_path):
    world.expertd()
    key = tmp_path / "key"
    key.write_text("secret\n")
    server = Server(world, "--api-key-file", key)
    r = load(server.url, "--api-key-file", key, "--conversations", "1,3", "--count", "3", "--turns", "2", "--system-tokens",
             "40", "--prompt-tokens", "30-60", "--turn-tokens", "20", "--max-tokens", "5", "--json", "-q")
    assert not r.stderr
    o = json.loads(r.stdout)
    page = (TOP / "tools/man/expert-bench.1.scd").read_text()
    assert all(f"_{k}_" in page for k in set(o) | KEYS | RATIOS | set(o["loads"][0]) | {"rate"})
    assert [x["at_once"] for x in o["loads"]] == [1, 3]
    for x in o["loads"]:
        (s,) = x["servers"]
        assert set(s) == KEYS and x["rounds"] == 1 and x["count"] == 3
        check(s)
        assert s["conversations"] == 3 and s["requests"] == s["ok"] == 6 and s["errors"] == {} and s["retries"] == 0
        assert s["generated_tokens"] == 30 and s["ttft_ms"]["count"] == s["later_ttft_ms"]["count"] == 3
        assert s["total_ms"]["count"] == 6 and s["itl_ms"]["count"] <= 24
        # Of each turn: system prompt and message; of later ones the first turn and its answer, too.
        low, high = 3 * (2 * 40 + 2 * 30 + 20 + 5) * 0.9, 3 * (2 * 40 + 2 * 60 + 20 + 5 + 60) * 1.1
        assert low < s["prompt_tokens"] < high and s["prompt_tokens"] > s["cached_tokens"] >= 3 * 40
        assert s["most_at_once"] == x["at_once"] and s["late_ms"] == 0
        # What it counted is what the server counted.
    status = server.get("/v1/status", headers={"X-Api-Key": "secret"})[2]
    assert status["queue"]["done"] == 2 + 12  # two requests to learn what a word costs
    assert status["totals"]["written_tokens"] == 2 + 60


@pytest.mark.slow
def test_arrivals_by_rate_and_two_servers(world):
    world.expertd("--link-gbps", "0.1")
    a, b = Server(world), Server(world, "--link-gbps", "10")
    r = load(a.url, b.url, "--rate", "50", "--count", "6", "--max-tokens", "12", "-n", "2", "--json")
    names = [line.split("http://")[1].split(": ")[0] for line in r.stderr.splitlines()]
    assert [f"http://{n}" for n in names] == [a.url, b.url, b.url, a.url]
    (x,) = json.loads(r.stdout)["loads"]
    assert x["rate"] == 50 and x["rounds"] == 2
    slow, fast = x["servers"]
    for s in (slow, fast):
        assert set(s) == KEYS | RATIOS and s["ok"] == 12 and s["generated_tokens"] == 144
        check(s)
    assert slow["most_at_once"] >= 3, "arrivals don't wait for answers"
    assert slow["prompt_tokens"] == fast["prompt_tokens"], "both get the same texts"
    assert slow["generated_ratio"]["low"] == slow["generated_ratio"]["high"] == 1
    text = load(f"{a.url},{b.url}", "--conversations", "2", "--count", "4", "--max-tokens", "3").stdout
    assert "2 conversations at once: 1 round of 4" in text and a.url[:26] in text
    assert all(s.status()["totals"]["written_tokens"] >= 6 for s in (a, b)), "they share the conversations"


@pytest.mark.slow
def test_full_queues(world):
    world.expertd("--link-gbps", "0.05")
    server = Server(world, "--queue", "1", "--parallel", "1")
    argv = [server.url, "--conversations", "8", "--count", "8", "--max-tokens", "10", "--json"]
    (s,) = json.loads(load(*argv).stdout)["loads"][0]["servers"]
    check(s)
    assert s["ok"] == s["requests"] == 8 and s["retries"] > 0 and not s["errors"]
    assert s["ttft_ms"]["max"] >= 1000, "Retry-After was waited for, and counts"
    (s,) = json.loads(load(*argv, "--retries", "0", "--seed", "2", status=1).stdout)["loads"][0]["servers"]
    assert set(s["errors"]) == {"429"} and s["errors"]["429"] + s["ok"] == 8 and "wait" in s["last_error"]


def sse(*parts):
    return "".join(f"data: {p if isinstance(p, str) else json.dumps(p)}\n\n" for p in parts).encode()


def piece(text):
    return {"choices": [{"delta": {"content": text}}]}


def usage(prompt, n):
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": n}}


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
WHOLE = STREAM + sse(piece("a"), piece("b"), usage(9, 2), "[DONE]")


class Fake:
    """A server that gives each connection the next of its answers: bytes, and numbers of seconds between them."""

    def __init__(self, *answers):
        self.answers = [[STREAM + sse(usage(20, 1), "[DONE]")], [STREAM + sse(usage(148, 1), "[DONE]")], *answers]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        self.bodies = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        for answer in self.answers:
            s, _ = self.listener.accept()
            data = b""
            while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                got = s.recv(65536)
                if not got:
                    break
                data += got
            self.bodies.append(json.loads(data.split(b"\r\n\r\n", 1)[1] or b"null"))
            for part in answer:
                if isinstance(part, bytes):
                    s.sendall(part)
                else:
                    time.sleep(part)
            s.close()
        self.listener.close()


def chunked(data, size=7):
    out = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    for i in range(0, len(data), size):
        out += b"%x\r\n%s\r\n" % (len(data[i:i + size]), data[i:i + size])
    return out + b"0\r\n\r\n"


def run_fake(*answers, options=(), status=1):
    fake = Fake(*answers)
    r = load(fake.url, "--model", "m", "--conversations", "1", "--count", len(answers), "--json", "-q", "--retries", "0",
             *options, status=status)
    return fake, json.loads(r.stdout)["loads"][0]["servers"][0]


def test_answers_that_are_none():
    again = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    fake, s = run_fake(
        [WHOLE], [chunked(WHOLE.split(b"\r\n\r\n", 1)[1])], [b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE],
        [again],
        [b"HTTP/1.1 500 Error\r\nContent-Length: 31\r\n\r\n" + b'{"error": {"message": "it is"}}'],
        [STREAM + sse(piece("a"))],                               # broken off
        [chunked(sse(piece("a"), usage(1, 1), "[DONE]"))[:-12]],  # likewise, in a chunk
        [STREAM + sse(piece("a"), {"error": {"message": "no more"}}, "[DONE]")],
        [STREAM + sse(piece("a"), "{")], [b""], [b"nonsense\r\n\r\n"], [b"x" * 70000],
        [STREAM[:-4] + b"\r\nContent-Length: %d\r\n\r\n" % (len(WHOLE) - len(STREAM)) + WHOLE[len(STREAM):]])
    assert s["ok"] == 4 and s["generated_tokens"] == 8 and s["prompt_tokens"] == 36
    assert s["errors"] == {"503": 1, "500": 1, "stream": 4, "connection": 3}
    body = fake.bodies[-1]
    assert body["model"] == "m" and body["stream"] and body["ignore_eos"] and body["max_tokens"] == 64
    assert len(body["messages"][0]["content"].split()) == 60, "64 tokens, of which the template has 4"


def test_times_are_those_of_the_client():
    late = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
    fake, s = run_fake([late], [STREAM, 0.3, sse(piece("a")), 0.6, sse(piece("b")), sse(usage(9, 2), "[DONE]")],
                       options=["--retries", "1", "--count", "1", "--may-end"], status=0)
    check(s)
    assert s["retries"] == 1 and s["ok"] == s["requests"] == 1
    assert s["ttft_ms"]["max"] >= 1300 and s["itl_ms"]["max"] >= 500 and s["total_ms"]["max"] >= 1800
    assert "ignore_eos" not in fake.bodies[-1]
    _, s = run_fake([STREAM + sse(piece("a")), 3], options=["--timeout", "0.3"])
    assert s["errors"] == {"time-out": 1}


def test_what_is_wrong_is_said(world):
    for argv, word in [(["http://127.0.0.1:1"], "refused"), (["127.0.0.1:80"], "http://"), (["http://x/y"], "http://"), ([], "SERVER"),
                       (["http://127.0.0.1:1", "--rate", "0"], "rate"), (["http://127.0.0.1:1", "--conversations", "x"], "conversations"),
                       (["http://127.0.0.1:1", "--prompt-tokens", "9-3"], "prompt-tokens"),
                       (["http://127.0.0.1:1", "--api-key-file", "/nonexistent"], "api-key-file")]:
        r = load(*argv, status=2)
        assert word in r.stderr and not r.stdout and len(r.stderr.splitlines()) <= 3, r.stderr


def test_an_interrupt_ends_it(world):
    world.expertd("--link-gbps", "0.05")
    server = Server(world, "--parallel", "1")
    p = world.spawn([BENCH, "serve", server.url, "--conversations", "4", "--max-tokens", "1500"], stdout=subprocess.DEVNULL)
    server.until_status(lambda t: t["queue"]["waiting"] == 3, "the load is on")
    p.send_signal(signal.SIGINT)
    assert p.wait(60 * SLOW) == 2 and "interrupted" in p.log.read_text()
    server.until_status(lambda t: not t["running"] and not t["queue"]["waiting"], "the server has rest")


@pytest.mark.slow
def test_a_server_that_dies_is_no_end(world):
    world.expertd("--link-gbps", "0.05")
    server = Server(world)
    p = world.spawn([BENCH, "serve", server.url, "--conversations", "3", "--count", "6", "--max-tokens", "1500", "--json"],
                    stdout=subprocess.PIPE)
    server.until_status(lambda t: t["running"] and t["running"][0]["written_tokens"], "the load is on")
    server.process.kill()
    out, _ = p.communicate(timeout=60 * SLOW)
    (s,) = json.loads(out)["loads"][0]["servers"]
    assert p.returncode == 1 and s["ok"] == 0 and set(s["errors"]) <= {"stream", "connection"} and sum(s["errors"].values()) == 6


@pytest.mark.slow
def test_tables_of_a_server():
    """tests/bench/b_serve.py, with small loads: every part prints its table, and what was parked comes back."""
    r = subprocess.run([sys.executable, str(TOP / "tests/bench/b_serve.py"), str(BUILD), str(TOP / "tools/model/story-q4_k.gguf"),
                        "--ctx", "2048", "--kv-tokens", "8192", "--at-once", "2", "--rate", "", "--prompt", "20", "--answer", "4",
                        "--together", "2x40", "--turn", "300+40", "--restart", "60", "--rounds", "1"],
                       capture_output=True, text=True, timeout=240, preexec_fn=die_with_parent)
    assert r.returncode == 0, r.stdout + r.stderr
    assert r.stdout.count("\n### ") == 6 and "Traceback" not in r.stderr
    row = next(line for line in r.stdout.splitlines() if line.startswith("| the long conversation goes on"))
    prompt, cached = map(int, row.split("|")[3].split(","))
    assert prompt > 250 and prompt - cached < 32
