# SPDX-License-Identifier: MIT
"""Many conversations at once: the same answers as alone, in any order, beside long prompts, cancels and a lost expertd."""
import random
import signal
import threading

import pytest
from conftest import SLOW, prompts
from serving import Server, stream

STORY = "Once upon a time, there was a little {}. Every day the {} went to the {} and"
KEPT = ("text", "message", "logprobs", "finish_reason")


def requests(long=True):
    """Sixteen of many kinds: (path, body)."""
    words = ["fox", "bear", "bird", "girl", "boy", "fish", "cat", "dog"]
    some = []
    for i, w in enumerate(words):
        body = {"prompt": STORY.format(w, w, words[i - 1]), "max_tokens": 12 + i, "temperature": i % 3 / 2, "seed": i,
                "logprobs": i % 4}
        if i == 3:
            body["repeat_penalty"] = 1.3
        if i == 4:
            body |= {"presence_penalty": 1, "frequency_penalty": 0.5}
        if i == 5:
            body["stop"] = ["."]
        some.append(("/v1/completions", body))
    for i, w in enumerate(words[:6]):
        body = {"messages": [{"role": "user", "content": f"Tell me a story about a {w}."}], "max_tokens": 16,
                "temperature": 1, "top_k": 0, "top_p": 0.9, "seed": 40 + i}
        if i == 2:
            body |= {"logprobs": True, "top_logprobs": 5}
        if i == 3:
            body |= {"response_format": {"type": "json_object"}, "max_tokens": 30}
        some.append(("/v1/chat/completions", body))
    text = prompts()["p1900"]["text"] if long else prompts()["p300"]["text"]
    some.append(("/v1/completions", {"prompt": text[:3000], "max_tokens": 8, "temperature": 0, "logprobs": 2}))
    some.append(("/v1/completions", {"prompt": text[100:1500], "max_tokens": 8, "temperature": 0.8, "seed": 3}))
    return some


def ask(server, path, body):
    status, _, answer = server.post(path, body, timeout=120)
    assert status == 200, answer
    choice = answer["choices"][0]
    return {k: choice[k] for k in KEPT if k in choice}, answer["usage"]


def ask_all(server, some, threads, order):
    """The answers of all, in the order of `some`, asked by so many threads."""
    answers, left, lock = [None] * len(some), list(order), threading.Lock()

    def work():
        while True:
            with lock:
                if not left:
                    return
                i = left.pop()
            answers[i] = ask(server, *some[i])[0]
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(240 * SLOW)
    return answers


def test_an_answer_does_not_depend_on_the_others(world):
    world.expertd("--park", "off")
    some = requests(long=SLOW == 1)
    alone = ask_all(Server(world, "--parallel", "1"), some, 1, range(len(some)))
    assert all(alone)
    server = Server(world)
    shuffle = random.Random(5)
    for threads in (4, 16) if SLOW == 1 else (16,):
        order = list(range(len(some)))
        shuffle.shuffle(order)
        # Others that leave in the middle change nothing.
        gone = [server.start_stream(prompt=STORY.format("cow", "cow", "sea"), max_tokens=500) for _ in range(3)]
        gone[0].recv(100)
        leave = threading.Timer(0.05, lambda: [s.close() for s in gone])
        leave.start()
        together = ask_all(server, some, threads, order)
        leave.join()
        for i, (one, other) in enumerate(zip(alone, together)):
            assert one == other, (threads, some[i])
    t = server.until_status(lambda t: not t["running"] and t, "all is quiet")["totals"]
    assert t["step_sequences"] > 1.5 * t["steps"], t


@pytest.mark.slow
def test_long_prompts_go_by_pieces_beside_answers(world):
    world.expertd()
    server = Server(world, "--answer-gap-ms", "30")
    long = {"prompt": prompts()["p1100"]["text"], "max_tokens": 1, "temperature": 0}
    alone = ask(server, "/v1/completions", {**long, "prompt": "So: " + long["prompt"]})
    first = server.status()["totals"]
    assert first["reads"] == 1 and first["read_tokens"] == alone[1]["prompt_tokens"] > 1000, first
    # Beside answers it takes many passes, and each of them is followed by a step of the answers.
    answers = [server.start_stream(max_tokens=2000) for _ in range(2)]
    for s in answers:
        assert s.recv(100).startswith(b"HTTP/1.1 200 ")
    before = server.status()["totals"]
    ask(server, "/v1/completions", long)
    after = server.status()["totals"]
    assert after["reads"] >= before["reads"] + 4
    assert after["steps"] - before["steps"] >= after["reads"] - before["reads"] - 1
    for s in answers:
        s.close()
    server.until_status(lambda t: not t["running"], "all is quiet")
    # Without a bound it is one.
    server = Server(world, "--answer-gap-ms", "0")
    s = server.start_stream(max_tokens=2000)
    assert s.recv(100)
    before = server.status()["totals"]
    assert before["reads"] == 1
    ask(server, "/v1/completions", long)
    assert server.status()["totals"]["reads"] == 2
    s.close()


def test_prompts_that_wait_are_read_together(world):
    world.expertd("--link-gbps", "0.2")
    server = Server(world)
    # All are there before the server sees the first one.
    server.process.send_signal(signal.SIGSTOP)
    streams = [server.start_stream(prompt=STORY.format(i, i, i), max_tokens=2) for i in range(12)]
    server.process.send_signal(signal.SIGCONT)
    for s in streams:
        data = b""
        while b"[DONE]" not in data:
            got = s.recv(65536)
            assert got, data
            data += got
        s.close()
    t = server.status()["totals"]
    assert t["read_sequences"] == 12 and t["reads"] <= 8, t


def test_expertd_dies_below_a_batch(world):
    d = world.expertd()
    server = Server(world, "--resume-seconds", "30")
    bodies = [{"prompt": STORY.format(w, w, "sea"), "max_tokens": 150 if SLOW == 1 else 60, "ignore_eos": True,
               "temperature": 1, "seed": i}
              for i, w in enumerate(["fox", "bear", "bird", "girl"])]
    alone = [ask(server, "/v1/completions", b)[0] for b in bodies]
    results = [None] * len(bodies)

    def work(i):
        parts = stream(server, "/v1/completions", bodies[i])
        results[i] = "".join(p["choices"][0]["text"] for _, p in parts[:-1])
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(bodies))]
    for t in threads:
        t.start()
    server.until_status(lambda s: len(s["running"]) == 4 and all(r["written_tokens"] > 5 for r in s["running"]),
                        "all answer")
    gone = server.start_stream(max_tokens=1500)
    gone.recv(100)
    d.kill()
    d.wait()
    world.until(lambda: server.get("/health")[0] == 503, what="not ready")
    gone.close()  # who leaves meanwhile is not waited for
    server.until_status(lambda s: len(s["running"]) == 4, "it is gone")
    world.expertd()
    for t in threads:
        t.join(90 * SLOW)
    assert results == [a["text"] for a in alone]
    server.until_status(lambda s: s["totals"]["attached_again"] == 1 and not s["running"], "it goes on")


@pytest.mark.slow
def test_a_request_starts_when_there_is_room_for_all_of_it(world):
    world.expertd()
    server = Server(world, "--kv-tokens", "500")
    assert server.status()["worker"]["kv_tokens"] == 512 and "512 tokens" in server.log()
    status, _, error = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 600})
    assert status == 400 and "512" in error["error"]["message"] and "600" in error["error"]["message"]
    assert error["error"]["param"] == "max_tokens" and error["error"]["code"] == "context_length_exceeded"
    # Where no length was asked for, it is what there is room for.
    whole = server.complete("Once upon a time", ignore_eos=True)
    assert whole["choices"][0]["finish_reason"] == "length" and whole["usage"]["total_tokens"] == 513
    first = server.start_stream(max_tokens=300)
    server.until_status(lambda t: t["running"] and t["kv"]["reserved"] == 3, "one runs")
    second = server.start_stream(prompt="The bear", max_tokens=200)
    server.until_status(lambda t: t["queue"]["waiting"] == 1 or t["running"][0]["written_tokens"] > 250,
                        "there is no room for the second")
    assert first.recv(100) and len(server.status()["running"]) == 1
    first.close()
    assert second.recv(100).startswith(b"HTTP/1.1 200 ")
    second.close()
    server.until_status(lambda t: not t["running"] and not t["kv"]["reserved"], "all is quiet")
    # What was kept for later makes room.
    large = Server(world)
    for i in range(2):
        for w in ("fox", "bear"):
            body = {"prompt": STORY.format(w, w, "sea"), "max_tokens": 100, "ignore_eos": True}
            assert server.complete(**body)["choices"] == large.complete(**body)["choices"]
        server.complete(prompts()["p300"]["text"], max_tokens=50 + i, ignore_eos=True)
    kv = server.status()["kv"]
    assert kv["evicted"] > 0 and kv["free"] + kv["kept"] >= kv["blocks"] == 4, kv


def test_prompts_that_begin_alike_read_it_once(world):
    world.expertd()
    server = Server(world)
    system = prompts()["p300"]["text"]

    def ask_about(where, what, **kw):
        return where.post("/v1/chat/completions", {"temperature": 0, "max_tokens": 10, "messages": [
            {"role": "system", "content": system}, {"role": "user", "content": what}], **kw})[2]
    first = ask_about(server, "Who is the fox?")["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0 and first["prompt_tokens"] > 256
    second = ask_about(server, "Where does the bear live?")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 256 <= cached < second["usage"]["prompt_tokens"]
    # Beside the first ones, which go on writing into blocks of their own.
    alone = Server(world, "--parallel", "1")
    streams = [server.start_stream(prompt=system, max_tokens=400) for _ in range(2)]
    for s in streams:
        s.recv(100)
    for what in ("Who is the fox?", "Is it cold?"):
        together = ask_about(server, what, logprobs=True)
        assert ask_about(alone, what, logprobs=True)["choices"] == together["choices"]
        assert together["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
    for s in streams:
        s.close()


def test_prompts_that_begin_alike_at_once_read_it_once(world):
    world.expertd("--link-gbps", "0.2", "--park", "off")
    server = Server(world)
    bodies = [{"messages": [{"role": "system", "content": prompts()["p300"]["text"]},
                            {"role": "user", "content": f"What about the {w}?"}],
               "temperature": 1, "seed": i, "max_tokens": 8, "logprobs": True}
              for i, w in enumerate(["fox", "bear", "bird", "girl", "boy", "fish"])]
    some = [("/v1/chat/completions", b) for b in bodies]
    first = server.start_stream(prompt=prompts()["p1100"]["text"], max_tokens=1)
    server.until_status(lambda t: t["running"], "one is read")  # the others gather meanwhile
    answers = ask_all(server, some, len(some), range(len(some)))
    first.close()
    t = server.until_status(lambda t: not t["running"] and t, "all is quiet")
    assert t["prefix"]["prompts"] == 1 + len(some) and t["prefix"]["hits"] == len(some) - 1, "each once"
    assert t["prefix"]["hit_tokens"] == t["totals"]["cached_tokens"]
    t = t["totals"]
    assert t["cached_tokens"] >= (len(some) - 1) * 256, t
    assert t["prompt_tokens"] == t["cached_tokens"] + t["read_tokens"]
    alone = Server(world, "--parallel", "1")
    assert ask_all(alone, some[:2], 1, range(2)) == answers[:2]


@pytest.mark.slow
def test_room_for_a_beginning_is_counted_once(world):
    """Eight blocks: two that three prompts have in common, and two more for each of them."""
    world.expertd("--link-gbps", "0.15", "--park", "off")
    server = Server(world, "--kv-tokens", "1024")
    system = prompts()["p300"]["text"]
    streams = [server.start_stream(prompt=system, max_tokens=200)]
    assert streams[0].recv(100)
    streams += [server.start_stream(prompt=system + w, max_tokens=200 - 10) for w in (" A fox", " A bear")]
    kv = server.until_status(lambda t: len(t["running"]) == 3 and t["kv"], "all three run")
    assert kv["blocks"] == kv["reserved"] == 8, kv
    streams.append(server.start_stream(prompt=system, max_tokens=200))
    server.until_status(lambda t: t["queue"]["waiting"] == 1 or len(t["running"]) < 3, "there is no room for a fourth")
    for s in streams:
        s.close()
    server.until_status(lambda t: not t["running"] and not t["kv"]["reserved"], "all is quiet")
    # To the last block: the same answers as alone.
    alone = Server(world, "--parallel", "1")
    some = [("/v1/completions", {"prompt": system + w, "max_tokens": 150, "temperature": 1, "seed": 5, "ignore_eos": True})
            for w in (" A fox", " A bear", " A bird")]
    assert ask_all(server, some, 3, range(3)) == ask_all(alone, some, 1, range(3))
