# SPDX-License-Identifier: MIT
"""inferd serve over plain HTTP: answers, refusals, limits, clients that leave, ends."""
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import BUILD, INFERD, SLOW, TOP, prompts
from serving import Server, events, stream


@pytest.fixture
def server(world):
    world.expertd()
    return Server(world)


def test_answers_are_those_of_run(world, server):
    text = world.run("--prompt", "Once upon a time", "--raw", "-n", "40", "--temperature", "0")["text"]
    whole = server.complete(max_tokens=40)
    assert whole["choices"][0]["text"] == text
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 40
    parts = stream(server, "/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40,
                                               "stream_options": {"include_usage": True}})
    assert parts[-1] == (None, "[DONE]")
    assert "".join(p["choices"][0]["text"] for _, p in parts[:-2]) == text
    assert parts[-2][1]["usage"]["completion_tokens"] == 40 and parts[-2][1]["choices"] == []
    assert parts[-3][1]["choices"][0]["finish_reason"] == "length"
    chat = world.run("--prompt", "Tell me a story.", "-n", "30", "--temperature", "0")["text"]
    message = server.chat(max_tokens=30)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": chat, "refusal": None}
    seeded = [server.complete(max_tokens=20, temperature=1, seed=s)["choices"][0]["text"] for s in (7, 7, 8)]
    assert seeded[0] == seeded[1] != seeded[2]
    free = {server.complete(max_tokens=20, temperature=1)["choices"][0]["text"] for _ in range(4)}
    assert len(free) > 1
    assert server.stop() == 0


def test_a_follow_up_turn_reads_only_what_is_new(world):
    world.expertd("--park", "off")
    server = Server(world)
    messages = [{"role": "user", "content": "Tell me a story about a fox and a bear. " * 10}]

    def turn():
        body = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 24})[2]
        messages.append(body["choices"][0]["message"] | {"refusal": None})
        return body["usage"]
    first = turn()
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    # Other prompts in between must not take its place.
    for i in range(2):
        server.complete(f"{i} is a number", max_tokens=4)
    messages.append({"role": "user", "content": "And then?"})
    second = turn()
    new = second["prompt_tokens"] - second["prompt_tokens_details"]["cached_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"]
    assert new < 30, second
    # A fresh server gives the same answer without what was kept.
    kept = messages[-1]["content"]
    fresh = Server(server.world)
    body = fresh.post("/v1/chat/completions", {"messages": messages[:-1], "temperature": 0, "max_tokens": 24})[2]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert body["choices"][0]["message"]["content"] == kept


def test_stop_strings_penalties_bias_and_logprobs(server):
    text = server.complete(max_tokens=30)["choices"][0]["text"]
    word = text.split()[5]
    stopped = server.complete(max_tokens=30, stop=[word, "never"])["choices"][0]
    assert stopped["text"] == text[:text.index(word)] and stopped["finish_reason"] == "stop"
    cut = text[3:9]  # across token borders
    assert server.complete(max_tokens=30, stop=cut)["choices"][0]["text"] == text[:3]
    parts = stream(server, "/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 30,
                                               "stop": cut})
    assert "".join(p["choices"][0]["text"] for _, p in parts[:-1]) == text[:3]
    plain = server.complete(max_tokens=60)["choices"][0]["text"]
    for penalty in {"frequency_penalty": 2}, {"presence_penalty": 2}, {"repeat_penalty": 1.8}:
        assert server.complete(max_tokens=60, **penalty)["choices"][0]["text"] != plain
    probs = server.complete(max_tokens=5, logprobs=3)["choices"][0]["logprobs"]
    assert len(probs["tokens"]) == len(probs["token_logprobs"]) == len(probs["top_logprobs"]) == 5
    assert "".join(probs["tokens"]) == server.complete(max_tokens=5)["choices"][0]["text"]
    for token, value, top in zip(probs["tokens"], probs["token_logprobs"], probs["top_logprobs"]):
        assert len(top) == 3 and max(top.values()) == value == top[token] < 0
    chat = server.chat(max_tokens=4, logprobs=True, top_logprobs=2)["choices"][0]
    assert [len(t["top_logprobs"]) for t in chat["logprobs"]["content"]] == [2] * 4
    assert b"".join(bytes(t["bytes"]) for t in chat["logprobs"]["content"]).decode() == chat["message"]["content"]
    parts = stream(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a story."}],
                                                    "temperature": 0, "max_tokens": 4, "logprobs": True})
    seen = [t for _, p in parts[:-1] for c in p["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
    assert [t["token"] for t in seen] == [t["token"] for t in chat["logprobs"]["content"]]
    ids = json.loads(server.world.inferd("tokenize", "--raw", "--prompt", "Once upon a time").stdout)
    by_ids = server.complete(ids, max_tokens=8)["choices"][0]["text"]
    assert by_ids == server.complete(max_tokens=8)["choices"][0]["text"]
    first = json.loads(server.world.inferd("tokenize", "--raw", "--prompt", probs["tokens"][0]).stdout)[0]
    assert server.complete(max_tokens=1, logit_bias={str(first): -100})["choices"][0]["text"] != probs["tokens"][0]
    assert server.complete(max_tokens=3, logit_bias={str(first): 100})["choices"][0]["text"] == probs["tokens"][0] * 3


SCHEMA = {"type": "object", "required": ["name", "age", "kind", "friends"], "properties": {
    "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "kind": {"enum": ["fox", "bear"]},
    "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 2}}}


def test_json_is_forced(server):
    for seed in range(6):
        content = server.chat("Describe an animal.", max_tokens=400, temperature=1, seed=seed, response_format={
            "type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}})["choices"][0]
        assert content["finish_reason"] == "stop", content
        animal = json.loads(content["message"]["content"])
        assert list(animal) == list(SCHEMA["properties"])
        assert len(animal["name"]) <= 20 and isinstance(animal["age"], int) and animal["kind"] in ("fox", "bear")
        assert 1 <= len(animal["friends"]) <= 2 and all(len(f) <= 8 for f in animal["friends"])
    some = [server.chat(max_tokens=200, temperature=1, seed=s, response_format={"type": "json_object"})["choices"][0]
            for s in range(6)]
    for choice in some:
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.slow
def test_text_is_always_whole_characters(server):
    """Random tokens of a byte-level vocabulary: parts of characters all the time."""
    for seed in range(3):
        body = {"prompt": "\u96ea \u2603 \U0001f600", "temperature": 2, "top_k": 0, "top_p": 1, "seed": seed,
                "max_tokens": 150, "ignore_eos": True}
        parts = stream(server, "/v1/completions", body)
        text = "".join(p["choices"][0]["text"] for _, p in parts[:-1])
        whole = server.post("/v1/completions", body)[2]["choices"][0]["text"]
        assert text == whole


REFUSED = [
    ("POST", "/v1/completions", {"prompt": "x", "n": 2}, 400, "n"),
    ("POST", "/v1/completions", {"prompt": "x", "what": 2}, 400, "what"),
    ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, 404, "model"),
    ("POST", "/v1/completions", {"prompt": ""}, 400, None),
    ("POST", "/v1/completions", {"prompt": "x " * 4000}, 400, "prompt"),
    ("POST", "/v1/completions", {"prompt": [99999999]}, 400, "prompt"),
    ("POST", "/v1/completions", b"{", 400, None),
    ("POST", "/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}, 400, "tools"),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": {
        "type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "x"}}}}, 400, "response_format"),
    ("GET", "/v1/completions", None, 405, None),
    ("DELETE", "/health", None, 405, None),
    ("GET", "/nothing", None, 404, None),
    ("GET", "/v1/models/other", None, 404, "model"),
    ("GET", "/v1/models/%ff%0a%", None, 404, "model"),
    ("POST", "/v1/completions", '{"\u2603\\n": 1}'.encode(), 400, "\u2603?"),
    # Nothing that may come next: the request's fault, not the model's or the server's.
    ("POST", "/v1/completions", {"prompt": "x", "logit_bias": {str(i): -100 for i in range(4096)}}, 400, None),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
                                      "logit_bias": {str(i): -100 for i in range(4096)},
                                      "response_format": {"type": "json_object"}}, 400, None),
    # More alternatives than are followed at a time, behind the first byte.
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"anyOf": [
            {"type": "array", "items": {"type": "string", "maxLength": i + 1}} for i in range(1500)]}}}}, 400, None),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [
        {"type": "function", "function": {"name": ""}}]}, 400, "tools"),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [
        {"type": "function", "function": {"name": "a", "parameters": "x"}}]}, 400, "tools"),
]


def test_refusals_are_in_the_apis_own_format(server):
    for method, path, body, status, param in REFUSED:
        got, headers, error = server.request(method, path, body)
        assert got == status, (path, body, error)
        assert set(error["error"]) == {"message", "type", "param", "code"} and error["error"]["message"]
        if param:
            assert error["error"]["param"] == param, error
        assert status != 405 or headers["Allow"]
    # What is much too long is refused without a look at all of it.
    long = "Once upon a time, there was a fox. " * 110000
    for path, body in [("/v1/completions", {"prompt": long}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]})]:
        start = time.monotonic()
        status, _, error = server.post(path, body)
        assert status == 400 and error["error"]["code"] == "context_length_exceeded"
        assert "more than" in error["error"]["message"] and time.monotonic() - start < 20 * SLOW
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    for body, status, kind in [({**message, "seed": 1}, 400, "invalid_request_error"),
                               ({**message, "model": "other"}, 404, "not_found_error"),
                               ({"messages": message["messages"]}, 400, "invalid_request_error")]:
        got, _, error = server.post("/v1/messages", body)
        assert (got, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert server.get("/v1/messages")[0] == 405
    assert server.complete(max_tokens=2)  # none of this did harm


def exchange(server, text, timeout=60):
    s = server.socket(timeout)
    try:
        s.sendall(text if isinstance(text, bytes) else text.encode())
        data = b""
        while got := s.recv(65536):
            data += got
        return data.decode()
    finally:
        s.close()


def test_http_limits(world):
    world.expertd()
    server = Server(world, "--header-kb", "4", "--body-mb", "1", "--read-seconds", "1", "--connections", "8")

    def refused(text, status):
        r = exchange(server, text)
        assert r.startswith(f"HTTP/1.1 {status} "), r[:200]
        assert json.loads(r.split("\r\n\r\n", 1)[1])["error"]["message"]
    refused("GET / HTTP/1.1\r\nHost: x\r\nA: " + "x" * 5000, 431)
    refused("GET / HTTP/1.1\r\n\r\n", 400)
    refused("FOO\r\n\r\n", 400)
    refused("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n", 413)
    refused("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + "10000\r\n" + "x" * 65536
            + "\r\n" + ("10000\r\n" + "x" * 65536 + "\r\n") * 16, 413)
    refused("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400)
    refused("GET /health HTT", 408)  # a head that does not come
    refused("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{", 408)
    # A body that is sent on although it was refused does not reset the connection before the answer is read.
    s = server.socket()
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 1500000)
    time.sleep(0.2)
    assert s.recv(65536).startswith(b"HTTP/1.1 413 ")
    s.close()
    # Pipelined requests, and Expect.
    r = exchange(server, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3 + "GET /v1/models HTTP/1.1\r\nHost: x\r\n"
                 "Connection: close\r\n\r\n")
    assert r.count("HTTP/1.1 200 ") == 4
    r = subprocess.run(["curl", "-s", "-H", "Expect: 100-continue", "-d", '{"prompt":"a","max_tokens":1}',
                        server.url + "/v1/completions"], capture_output=True, text=True, timeout=60 * SLOW)
    assert json.loads(r.stdout)["object"] == "text_completion"
    r = exchange(server, "GET /health HTTP/1.0\r\n\r\n")
    assert "Connection: close" in r and '"ok"' in r
    # More connections than allowed wait; they are served when others end.
    server = Server(world, "--connections", "8")
    idle = [server.socket() for _ in range(8)]
    waiting = server.socket()
    waiting.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    waiting.settimeout(0.3)
    with pytest.raises(TimeoutError):
        waiting.recv(10)
    for s in idle:
        s.close()
    waiting.settimeout(60 * SLOW)
    assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
    waiting.close()


def test_a_client_that_leaves_ends_its_work_at_once(world):
    world.expertd("--link-gbps", "0.05")  # 2000 tokens take most of a minute
    server = Server(world)
    for whole in (False, True):
        before = server.status()
        s = server.start_stream(max_tokens=2000, stream=not whole)
        if whole:
            server.until_status(lambda t: t["running"] and t["running"][0]["written_tokens"] > 3, "it runs")
        else:
            assert s.recv(4096).startswith(b"HTTP/1.1 200")
        running = server.status()["running"]
        assert len(running) == 1
        if whole:
            s.shutdown(socket.SHUT_WR)  # half a close counts, too
        s.close()
        after = server.until_status(lambda t: not t["running"] and t, "the work stops", timeout=20)
        assert after["queue"]["cancelled"] == before["queue"]["cancelled"] + 1
        written = after["totals"]["written_tokens"] - before["totals"]["written_tokens"]
        assert written < 1500
        assert after["http"]["clients_gone"] == before["http"]["clients_gone"] + 1
    # One that waits in the queue never runs.
    server = Server(server.world, "--parallel", "1")
    first = server.start_stream(max_tokens=2000)
    first.recv(4096)
    second = server.start_stream(max_tokens=2000)
    server.until_status(lambda t: t["queue"]["waiting"] == 1, "it waits")
    second.close()
    server.until_status(lambda t: t["queue"]["waiting"] == 0, "it is gone")
    assert len(server.status()["running"]) == 1
    first.close()
    server.until_status(lambda t: not t["running"], "all is quiet")


def test_a_prompt_is_given_up_between_two_layers(world):
    """A slow link: the reading takes most of a minute, leaving ends it at once."""
    world.expertd("--link-gbps", "0.0004", "--floor", "1")
    server = Server(world)
    s = server.start_stream(prompt="word " * 1500, max_tokens=5)
    server.until_status(lambda t: t["running"] and t["running"][0]["phase"] == "reading", "it reads")
    time.sleep(0.3)
    assert server.status()["running"]
    s.close()
    server.until_status(lambda t: not t["running"], "the reading stops", timeout=10)
    assert server.status()["queue"]["cancelled"] == 1


@pytest.mark.slow
def test_a_long_read_keeps_its_stream_alive(world):
    world.expertd("--link-gbps", "0.0001", "--floor", "1")
    server = Server(world, "-v")
    s = server.start_stream(prompt=prompts()["p1900"]["text"][:4000], max_tokens=5)
    data = b""
    while b"\n: still" not in data and b"DONE" not in data:
        data += s.recv(4096)
    assert b"\n: still" in data, data
    assert data.startswith(b"HTTP/1.1 200 ")
    s.close()
    server.until_status(lambda t: not t["running"], "the reading stops")
    assert re.search(r"127\.0\.0\.1 POST /v1/completions 200 left [\d.]+ ms", server.log()), server.log()


def test_slow_readers_are_cut(world):
    world.expertd()
    server = Server(world, "--send-kb", "8", "--write-seconds", "2")
    s = server.start_stream("/v1/completions", receive=4096, max_tokens=2000, logprobs=5)
    status = server.until_status(lambda t: t["queue"]["cancelled"] and not t["running"] and t,
                                 "the slow reader is cut", timeout=120)
    assert status["http"]["slow_readers"] >= 1 and status["queue"]["cancelled"] == 1
    s.close()
    assert server.complete(max_tokens=2)


def test_64_connections_at_once(server):
    alone = server.complete(max_tokens=12)["choices"][0]["text"]
    results = [None] * 64

    def ask(i):
        if i % 2:
            parts = stream(server, "/v1/completions", {"prompt": "Once upon a time", "temperature": 0,
                                                       "max_tokens": 12})
            results[i] = "".join(p["choices"][0]["text"] for _, p in parts[:-1])
        else:
            results[i] = server.complete(max_tokens=12)["choices"][0]["text"]
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120 * SLOW)
    assert results == [alone] * 64
    t = server.status()
    assert t["queue"]["done"] == 65 and not t["running"] and t["queue"]["refused"] == 0


def test_a_full_queue_says_when_to_come_back(world):
    world.expertd("--link-gbps", "0.05")  # so that answers take a while
    server = Server(world, "--queue", "2", "--parallel", "1")
    streams = [server.start_stream(max_tokens=2000)]
    server.until_status(lambda t: t["running"], "one runs")
    streams += [server.start_stream(max_tokens=2000) for _ in range(2)]
    server.until_status(lambda t: t["queue"]["waiting"] == 2, "the queue is full")
    for path, body in [("/v1/completions", {"prompt": "x"}),
                       ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})]:
        status, headers, error = server.post(path, body)
        assert status == 429 and 1 <= int(headers["Retry-After"]) <= 60
        assert error["error"]["type"] == "rate_limit_error"
    assert server.get("/health")[0] == 200
    for s in streams:
        s.close()
    server.until_status(lambda t: not t["running"] and not t["queue"]["waiting"], "all is quiet")
    assert server.complete(max_tokens=2)


def test_clients_take_turns(world, tmp_path):
    world.expertd("--link-gbps", "0.05")
    keys = tmp_path / "keys"
    keys.write_text("# two clients\nalice\nbob\n")
    server = Server(world, "--api-key-file", keys, "--parallel", "1")
    order = []
    bodies = []

    def ask(key):
        status, _, body = server.post("/v1/completions", {"prompt": "a", "max_tokens": 25, "ignore_eos": True},
                                      headers={"Authorization": f"Bearer {key}"})
        order.append(key)
        bodies.append((status, body))

    def status():
        return server.get("/v1/status", headers={"X-Api-Key": "alice"})[2]
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    first = server.socket()  # holds the others up until all are queued
    first.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: alice\r\nContent-Length: {len(body)}\r\n\r\n{body}"
                  .encode())
    world.until(lambda: status()["running"], what="alice's first runs")
    threads = [threading.Thread(target=ask, args=("alice",)) for _ in range(5)]
    for t in threads:
        t.start()
    world.until(lambda: status()["queue"]["waiting"] == 5, what="alice's are queued")
    bob = threading.Thread(target=ask, args=("bob",))
    bob.start()
    world.until(lambda: status()["queue"]["waiting"] == 6, what="bob's is queued")
    first.close()
    for t in [*threads, bob]:
        t.join(180 * SLOW)
    assert all(s == 200 for s, _ in bodies)
    assert order.index("bob") <= 3, order


def test_keys_and_origins(world, tmp_path):
    world.expertd()
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    server = Server(world, "--api-key-file", keys, "--cors", "https://good.example,https://other.example")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "secre"}, {"Authorization": "secret"}):
        status, h, error = server.get("/v1/models", headers=headers)
        assert status == 401 and error["error"]["type"] == "authentication_error" and h["WWW-Authenticate"]
        status, _, error = server.post("/v1/messages", {}, headers=headers)
        assert status == 401 and error["type"] == "error"
    assert server.get("/health")[0] == 200
    for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
        assert server.get("/v1/models", headers=headers)[0] == 200
        assert server.get("/metrics", headers=headers)[0] == 200
    # A key that is wrong is refused before the body is sent.
    r = exchange(server, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
    assert r.startswith("HTTP/1.1 401 ")
    key = {"Authorization": "Bearer secret"}
    status, h, _ = server.get("/v1/models", headers={**key, "Origin": "https://good.example"})
    assert status == 200 and h["Access-Control-Allow-Origin"] == "https://good.example" and h["Vary"] == "Origin"
    status, h, _ = server.request("OPTIONS", "/v1/chat/completions", headers={
        "Origin": "https://other.example", "Access-Control-Request-Method": "POST"})
    assert status == 204 and "POST" in h["Access-Control-Allow-Methods"]
    status, h, error = server.get("/v1/models", headers={**key, "Origin": "https://evil.example"})
    assert status == 403 and "Access-Control-Allow-Origin" not in h
    assert server.request("OPTIONS", "/v1/models", headers={"Origin": "https://evil.example"})[0] == 403


def test_metrics_are_well_formed(server):
    server.complete(max_tokens=4)
    server.post("/v1/completions", {"prompt": "x", "n": 2})
    status, headers, text = server.get("/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    values, typed = {}, {}
    for line in text.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in typed
            typed[name] = kind
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name not in values
            values[name] = float(value)
            base = name.split("{")[0]
            assert any(base == t or (typed[t] == "histogram" and base in (t + "_bucket", t + "_sum", t + "_count"))
                       for t in typed), name
    assert values['inferd_http_responses_total{endpoint="/v1/completions",status="200"}'] == 1
    assert values['inferd_http_responses_total{endpoint="/v1/completions",status="400"}'] == 1
    assert values["inferd_written_tokens_total"] == 4 and values["inferd_ready"] == 1
    assert values["inferd_first_token_seconds_count"] == 1 and values["inferd_token_gap_seconds_count"] == 3


def test_stops_gracefully(world):
    world.expertd()
    server = Server(world, "--drain-seconds", "900")
    c = server.connect()
    c.request("POST", "/v1/completions", json.dumps({"prompt": "Once", "max_tokens": 600, "ignore_eos": True,
                                                     "stream": True, "temperature": 0}))
    r = c.getresponse()
    kept = server.connect()
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    first = r.readline()
    assert first.startswith(b"data: ")
    server.process.terminate()
    parts = [d for _, d in events(r)]
    assert parts[-1] == "[DONE]" and len(parts) == 601, parts[-1]
    assert server.process.wait(60 * SLOW) == 0
    # What takes longer than the drain is cut with an error that says so.
    server = Server(world, "--drain-seconds", "0", "--link-gbps", "0.05")
    c = server.connect()
    c.request("POST", "/v1/completions", json.dumps({"prompt": "Once", "max_tokens": 2000, "ignore_eos": True,
                                                     "stream": True, "temperature": 0}))
    r = c.getresponse()
    r.readline()
    server.process.terminate()
    parts = [d for _, d in events(r)]
    assert "stopped" in json.loads(parts[-1])["error"]["message"]
    assert server.process.wait(60 * SLOW) == 0
    assert Server(world).stop() == 0


@pytest.mark.slow
def test_the_last_bytes_leave_before_the_end(world):
    """However long the drain took: an answer that is complete, but on its way still, is not cut."""
    world.expertd("--link-gbps", "0.15", "--floor", "1")  # so that it takes longer than what is left for the bytes
    server = Server(world, "-v", "--drain-seconds", "900")
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True,
                       "logprobs": True, "top_logprobs": 20})
    s = server.socket(timeout=120, receive=4096)
    s.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    server.until_status(lambda t: t["running"], "it runs")
    server.process.terminate()
    world.until(lambda: "POST /v1/chat/completions 200 " in server.log(), what="it is answered", timeout=120)
    time.sleep(0.2)  # a few looks of the server at whether all is done
    assert server.process.poll() is None
    data = b""
    while got := s.recv(65536):
        data += got
    s.close()
    head, _, body = data.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head, (head, len(body))
    assert len(body) > 500000 and json.loads(body)["usage"]["completion_tokens"] == 400
    assert server.process.wait(60 * SLOW) == 0


def test_a_stop_finds_connections_in_every_state(world):
    """Under the address sanitizer nothing may be left over; the exit status tells."""
    daemon = world.expertd()

    def connections(server):
        sockets = [server.socket() for _ in range(3)]
        for text in (b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
                     b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 40,
                     b"nonsense\r\n\r\n"):
            sockets.append(server.socket())
            sockets[-1].sendall(text)
        sockets += [server.start_stream(max_tokens=1500), server.start_stream(max_tokens=1500, stream=False),
                    server.start_stream(max_tokens=1500, logprobs=5, receive=4096)]
        server.until_status(lambda t: t["running"], "one runs")
        sockets += [server.socket() for _ in range(2)]
        return sockets
    for how in ("cut", "left before", "left after", "twice", "without expertd"):
        server = Server(world, "--drain-seconds", "900" if how == "twice" else "0", "--resume-seconds", "1")
        sockets = connections(server)
        if how == "left before":
            sockets[-3].shutdown(socket.SHUT_WR)
            for s in sockets:
                s.close()
        if how == "without expertd":
            daemon.kill()
        server.process.terminate()
        if how == "left after":
            for s in sockets:
                s.close()
        if how == "twice":
            world.until(lambda: "stopping" in server.log(), what="it is stopping")
            server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60 * SLOW) == 0, (how, server.log())
        for s in sockets:
            s.close()


def test_expertd_restarts_below_it(world):
    d = world.expertd("--link-gbps", "0.02")  # so that the answer takes long enough for all of this
    quick = Server(world, "--link-gbps", "10")
    alone = quick.complete(max_tokens=400, ignore_eos=True)["choices"][0]["text"]
    assert quick.stop() == 0
    server = Server(world, "--resume-seconds", "200")
    result = {}

    def ask():
        result["text"] = server.complete(max_tokens=400, ignore_eos=True)["choices"][0]["text"]
    t = threading.Thread(target=ask)
    t.start()
    server.until_status(lambda s: s["running"] and s["running"][0]["written_tokens"] > 5, "it answers")
    d.kill()
    d.wait()
    world.until(lambda: server.get("/health")[0] == 503, what="not ready")
    status, headers, error = server.post("/v1/completions", {"prompt": "x"})
    assert status == 503 and headers["Retry-After"] and "expertd" in error["error"]["message"]
    assert server.status()["state"] == "away"
    world.expertd()
    t.join(180 * SLOW)
    assert result["text"] == alone
    world.until(lambda: server.get("/health")[0] == 200, what="ready again")
    assert server.status()["totals"]["attached_again"] == 1


def test_without_expertd_requests_fail_at_once(world):
    d = world.expertd()
    server = Server(world, "--resume-seconds", "1")
    s = server.start_stream(max_tokens=2000)
    s.recv(4096)
    d.kill()
    data = b""
    while got := s.recv(65536):
        data += got
        if b"0\r\n\r\n" in data:
            break
    assert b'"error"' in data and b"expertd is away" in data
    assert server.get("/health")[0] == 503
    assert server.stop() == 0


def test_the_socket_may_come_from_systemd(world):
    world.expertd()
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    s.listen(64)
    port = s.getsockname()[1]
    waiting = socket.create_connection(("127.0.0.1", port))  # before anybody serves
    waiting.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(world.path / "notify"))
    notify.settimeout(60 * SLOW)

    shell = f'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@" 3<&{s.fileno()}'
    p = world.spawn(["bash", "-c", shell, "bash", INFERD, "serve", *world.where()], pass_fds=(s.fileno(),),
                    env={**os.environ, "NOTIFY_SOCKET": str(world.path / "notify")})
    assert notify.recv(100) == b"READY=1", p.log.read_text()
    waiting.settimeout(60 * SLOW)
    assert b"HTTP/1.1 " in waiting.recv(65536)
    p.send_signal(signal.SIGTERM)
    assert notify.recv(100) == b"STOPPING=1"
    assert p.wait(60 * SLOW) == 0
    notify.close()
    s.close()


def test_wrong_starts(world, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n# nothing\n")
    for options, word in [(["--listen", "nowhere"], "--listen"), (["--listen", "127.0.0.1:0"], "expertd"),
                          (["--listen", "127.0.0.1:65536"], "up to 65535"),
                          (["--api-key-file", "/nonexistent"], "api-key-file"), (["--api-key-file", empty], "no key"),
                          (["--api-key-file", "/dev/zero"], "longer than")]:  # no end, no line
        r = world.inferd("serve", *options, check=False)
        assert r.returncode == 1 and word in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(1)
        r = world.inferd("serve", "--listen", f"127.0.0.1:{s.getsockname()[1]}", check=False)
        assert r.returncode == 1 and "another program" in r.stderr


@pytest.mark.slow
def test_commands_of_the_readme(world):
    section = (TOP / "README.md").read_text().split("\n## Serve\n")[1].split("\n## ")[0]
    commands = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    assert len(commands) > 5
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = "set -m\n" + "\n".join(f"{c}\necho; echo --" for c in commands) + "\nwait\n"
    script = script.replace("8080", str(port)).replace("build/", f"{BUILD}/").replace(
        "inferd serve", f"inferd serve --listen 127.0.0.1:{port}")
    try:
        r = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60 * SLOW, cwd=TOP,
                           env={**os.environ, "XDG_RUNTIME_DIR": str(world.runtime)})
        _, health, chat, completion, message, talk, _ = [p.strip() for p in r.stdout.split("--\n")][:7]
        assert json.loads(health)["status"] == "ok", r.stderr
        assert json.loads(chat)["choices"][0]["message"]["content"], chat
        assert completion.endswith("data: [DONE]")
        assert json.loads(message)["type"] == "message"
        assert len(talk) > 20 and r.returncode == 0, r.stderr
    finally:
        world.ctl("stop", check=False)
