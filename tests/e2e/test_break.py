# SPDX-License-Identifier: MIT
"""What broke once under odd use, or might: prompts, signals, closed descriptors, races between newcomers."""
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from conftest import EXPERTCTL, EXPERTD, INFERD, STORY, TOP, die_with_parent

PROMPT = TOP / "tools/model/prompt.txt"
KEYS = {"prompt_tokens", "generated_tokens", "text", "ttft_ms", "read_tps", "decode_tps", "stream", "held_off"}


def popen(world, *argv, **kw):
    kw.setdefault("stdin", subprocess.DEVNULL)
    p = subprocess.Popen([str(a) for a in argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         preexec_fn=die_with_parent, **kw)
    world.processes.append(p)
    return p


def test_newcomers_at_one_moment_share_one_expertd(world):
    """Several `inferd run --model FILE` when nothing runs: one expertd, all answer."""
    for _ in range(2):
        ps = [popen(world, INFERD, "run", "--runtime-dir", world.runtime, "--model", STORY, "--prompt", "Once", "--raw",
                    "-n", "4", "--temperature", "0") for _ in range(6)]
        out = [p.communicate(timeout=100) for p in ps]
        assert [p.returncode for p in ps] == [0] * len(ps), [o[1] for o in out]
        assert len({o[0] for o in out}) == 1
        assert sum("started expertd" in o[1] for o in out) == 1, [o[1] for o in out]
        assert os.listdir(world.runtime / "expertd") == ["default"]
        world.ctl("stop")


def test_newcomers_with_two_files_get_two_expertds(world):
    """At one moment, too: neither is told that the other's file is in the way."""
    other = world.path / "other.gguf"
    shutil.copy(STORY, other)
    ps = [popen(world, INFERD, "run", "--runtime-dir", world.runtime, "--model", model, "--prompt", "Once", "--raw",
                "-n", "4", "--temperature", "0") for model in (STORY, other, STORY, other)]
    out = [p.communicate(timeout=100) for p in ps]
    assert [p.returncode for p in ps] == [0] * 4, [o[1] for o in out]
    for instance in os.listdir(world.runtime / "expertd"):
        world.ctl("stop", instance=instance)


def closed(*numbers):
    def close():
        die_with_parent()
        for fd in numbers:
            os.close(fd)
    return close


def test_closed_standard_descriptors_are_never_a_segment(world):
    """Started with 0, 1 or 2 closed, no arena or segment may get that number: output would go into it."""
    d = subprocess.Popen([str(EXPERTD), "--model", str(STORY), *world.where(), "--arena-dir", str(world.arena)],
                         preexec_fn=closed(0, 1, 2))
    world.processes.append(d)
    world.until(lambda: world.status().get("state") == "serving", what="expertd serves")
    assert [os.readlink(f"/proc/{d.pid}/fd/{n}") for n in range(3)] == ["/dev/null"] * 3
    p = subprocess.Popen([str(INFERD), "run", *world.where(), "--prompt-file", str(PROMPT), "--raw", "-n", "5",
                          "--link-gbps", "0.02"], preexec_fn=closed(0, 1, 2))
    world.processes.append(p)
    world.until(lambda: world.status()["workers"], what="attached")
    assert [os.readlink(f"/proc/{p.pid}/fd/{n}") for n in range(3)] == ["/dev/null"] * 3
    assert p.wait(60) == 1, "nobody could read the answer"
    r = subprocess.run([str(INFERD), "run", *world.where(), "-"], preexec_fn=closed(0), capture_output=True, text=True)
    assert r.returncode == 1 and "standard input" in r.stderr and "Bad file descriptor" in r.stderr, r.stderr
    for argv in ([EXPERTCTL, "status", *world.where()], [INFERD, "tokenize", *world.where(), "--prompt", "x"]):
        r = subprocess.run([str(a) for a in argv], preexec_fn=closed(1), stderr=subprocess.PIPE)
        assert r.returncode == 1 and b"output" in r.stderr


@pytest.mark.parametrize("prompt", [b"\0", b"a\0b", b"\xff\xfe\x80abc\xc3", b"x", b"\n", b"<|im_start|>" * 50,
                                    "🦊é\u0301".encode(), b"\xed\xa0\x80\xf4\x90\x80\x80"],
                         ids=["nul", "inner-nul", "invalid", "one", "newline", "specials", "wide", "surrogate"])
def test_odd_prompts_give_one_object(odd, prompt):
    for options in ([], ["--raw"]):
        r = subprocess.run([str(INFERD), "run", *odd.where(), "-", "--json", "-n", "6", "--ignore-eos", *options],
                           input=prompt, capture_output=True, timeout=60)
        assert r.returncode == 0, r.stderr
        lines = r.stdout.decode("utf-8").splitlines()
        assert len(lines) == 1 and KEYS <= json.loads(lines[0]).keys()


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """One instance for all odd prompts."""
    from conftest import World
    w = World(tmp_path_factory.mktemp("odd"))
    w.expertd()
    yield w
    w.close()


def test_prompts_around_the_context(odd):
    ids = ",".join(str(100 + i % 50) for i in range(2048))
    full = json.loads(odd.inferd("logits", "--ids", ids).stdout)
    assert full
    r = odd.inferd("logits", "--ids", ids + ",1", check=False)
    assert r.returncode == 1 and "context" in r.stderr
    huge = odd.path / "huge"
    huge.write_bytes(os.urandom(1 << 20))
    r = odd.inferd("run", "--prompt-file", huge, "--raw", check=False)
    assert r.returncode == 1 and "2048" in r.stderr and r.stdout == ""


def test_context_runs_full(odd):
    r = odd.run("--prompt", "Once upon", "--raw", "-n", 1 << 27, "--ctx", 40, "--ignore-eos")
    assert r["stop"] == "context full" and r["context_tokens"] == 40 and len(r["generated_tokens"]) == 39
    assert odd.run("--prompt", "Once upon", "--raw", "-n", 0)["generated_tokens"] == []


def test_broken_pipe_and_full_device(odd):
    with open("/dev/full", "w") as full:
        for json_option in ([], ["--json"]):
            r = subprocess.run([str(INFERD), "run", *odd.where(), "--prompt", "Once", "--raw", "-n", "20", *json_option],
                               stdout=full, stderr=subprocess.PIPE, timeout=60)
            assert r.returncode == 1


def test_sigterm_ends_a_chat(odd):
    p = subprocess.Popen([str(INFERD), "chat", *odd.where(), "-n", "1500", "--ignore-eos", "--link-gbps", "0.05"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                         preexec_fn=die_with_parent)
    odd.processes.append(p)
    p.stdin.write("Tell me a story\nAnother one\n")
    p.stdin.flush()
    assert p.stdout.read(1)
    p.send_signal(signal.SIGTERM)
    assert p.wait(20) == 128 + signal.SIGTERM


def test_stopped_worker_goes_on(odd):
    options = ["--prompt", "Once", "--raw", "-n", "60", "--temperature", "0", "--ignore-eos"]
    want = odd.inferd("run", *options, "--quiet").stdout
    p = popen(odd, INFERD, "run", *odd.where(), *options, "--quiet", "--link-gbps", "0.1")
    time.sleep(0.3)
    p.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    p.send_signal(signal.SIGCONT)
    assert p.communicate(timeout=60)[0] == want and p.returncode == 0


def test_same_seed_same_text(odd):
    options = ["--prompt", "Once upon a time", "--raw", "-n", 40, "--temperature", 1.5, "--top-k", 0, "--top-p", 1,
               "--repeat-penalty", 1.3, "--min-p", 0.01]
    a = odd.run(*options, "--seed", 7)
    assert odd.run(*options, "--seed", 7, "--stream", "full", "--threads", 1)["text"] == a["text"]
    assert odd.run(*options, "--seed", 8)["text"] != a["text"]


@pytest.mark.parametrize("option", ["--temperature=-1", "--temperature=nan", "--temperature=101", "--top-p=0",
                                    "--top-p=1.1", "--min-p=-0.1", "--min-p=2", "--repeat-penalty=0",
                                    "--repeat-penalty=-inf", "--top-k=-1", "--seed=-1", "-n-1", "--ctx=0"])
def test_bad_values_are_refused(odd, option):
    r = odd.inferd("run", "--prompt", "x", option, check=False)
    name = "-n" if option == "-n-1" else option.lstrip("-").split("=")[0].replace("repeat-penalty", "penalty")
    assert r.returncode in (1, 2) and r.stdout == "" and name[:7] in r.stderr, r.stderr


def test_chat_gives_one_object_a_turn(odd):
    """Odd lines, a line too long, a full context: each turn has its object; /clear goes on."""
    lines = [b"Hello", b"\0nul\0line", b"\xff\xfe bad", b"x " * 100000, *[b"more of it"] * 8, b"/clear", b"Hello",
             b"no newline"]
    r = subprocess.run([str(INFERD), "chat", *odd.where(), "-n", "10", "--temperature", "0", "--json", "--ctx", "160"],
                       input=b"\n".join(lines), capture_output=True, timeout=100)
    assert r.returncode == 0, r.stderr
    turns = [json.loads(line) for line in r.stdout.decode().splitlines()]
    assert len(turns) == len(lines) - 1
    failed = ["error" in t for t in turns]
    assert failed[:4] == [False, False, False, True] and failed[-3:] == [True, False, False]
    assert turns[-2]["text"] == turns[0]["text"], "after /clear it is as at the start"
    assert b"/clear" in r.stderr


def test_a_path_that_is_not_utf8(world):
    """A model whose name is not UTF-8 is loaded, and shown, like any other."""
    model = os.fsencode(world.path) + b"/m\xff\xc3.gguf"
    shutil.copy(STORY, model)
    p = popen(world, EXPERTD, "--model", os.fsdecode(model), *world.where(), "--arena-dir", world.arena)
    world.until(lambda: world.status().get("state") == "serving" or p.poll() is not None, what="serves")
    assert p.poll() is None
    for command in ("status", "workers", "rings", "trace"):
        json.loads(world.ctl(command, "--json").stdout)
    r = subprocess.run([os.fsencode(INFERD), b"run", b"--runtime-dir", os.fsencode(world.runtime), b"--model",
                        model, b"--prompt", b"Once", b"--raw", b"-n", b"2", b"--json"], capture_output=True)
    assert r.returncode == 0 and json.loads(r.stdout), r.stderr


def test_expertd_killed_in_mid_answer_three_workers(world):
    """A sampled answer is cut by expertd's death. Asked again of the next expertd, each worker answers as if
    nothing had happened: what the lost answer drew is forgotten, too."""
    options = ["-n", "20", "--temperature", "0.9", "--seed", "3", "--repeat-penalty", "1.2", "--ignore-eos", "--json",
               "--link-gbps", "0.02"]
    d = world.expertd()
    chats = [popen(world, INFERD, "chat", *world.where(), *options, stdin=subprocess.PIPE) for _ in range(3)]

    def say(text):
        for c in chats:
            c.stdin.write(text + "\n")
            c.stdin.flush()

    def hear():
        return [json.loads(c.stdout.readline()) for c in chats]

    def written():
        return [w["streams"] for w in world.status().get("workers", [])]

    say("Hello")
    hear()
    before = max(written())
    say("More")
    world.until(lambda: len(written()) == 3 and min(written()) > before + 3, what="all write")
    d.kill()
    d.wait()
    assert all("expertd" in answer["error"] for answer in hear())
    world.expertd()
    say("More")
    again = hear()
    for c in chats:
        c.stdin.close()
        assert c.wait(20) == 0
    want = world.inferd("chat", *options[:-2], input="Hello\nMore\n").stdout.splitlines()
    assert {a["text"] for a in again} == {json.loads(want[1])["text"]}
    assert all(a["attached_again"] for a in again)
