# SPDX-License-Identifier: MIT
"""The worker's own behaviour: newcomer's way, conversations, cancelling, error lines."""
import json
import os
import pty
import shutil
import signal
import subprocess
import time

import pytest
from conftest import INFERD, STORY, prompts

LONG = " ".join(prompts()["p1900"]["text"].split())[:4500]  # about 1,250 tokens: above the floor


class Chat:
    """inferd chat --json: a line in, an object out."""

    def __init__(self, world, *options):
        self.process = world.spawn(
            [INFERD, "chat", *world.where(), "--temperature", "0", "--json", "--hash", *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)

    def send(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def turn(self, line):
        self.send(line)
        return self.hear()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def error(self):
        return self.process.stderr.readline().strip()

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def close(self):
        self.process.stdin.close()
        return self.process.wait(20)


def test_model_option_starts_expertd_and_finds_it_again(world, tmp_path):
    where = ["--runtime-dir", world.runtime]
    options = ["run", *where, "--prompt", "Once upon a time", "--raw", "-n", "5", "--temperature", "0"]
    first = subprocess.run([INFERD, *options, "--model", STORY], capture_output=True, text=True, timeout=60)
    try:
        assert first.returncode == 0 and "started expertd" in first.stderr, first.stderr
        link = tmp_path / "link.gguf"  # another name of the same file
        link.symlink_to(STORY)
        second = subprocess.run([INFERD, *options, "--model", link], capture_output=True, text=True, timeout=60)
        assert second.returncode == 0 and "started" not in second.stderr, second.stderr
        assert second.stdout == first.stdout != ""
        # Another file: an instance of its own; the default one when told to use it: refused.
        other = tmp_path / "My Other.gguf"
        shutil.copy(STORY, other)
        third = subprocess.run([INFERD, *options, "--model", other], capture_output=True, text=True, timeout=60)
        assert third.returncode == 0 and "instance my-other" in third.stderr, third.stderr
        refused = subprocess.run([INFERD, *options, "--model", other, "--instance", "default"], capture_output=True,
                                 text=True, timeout=60)
        assert refused.returncode == 1 and "serves another file" in refused.stderr
    finally:
        for name in "default", "my-other":
            world.ctl("stop", check=False, instance=name)


def test_workers_started_together_share_one_expertd(world):
    options = ["run", "--runtime-dir", world.runtime, "--prompt", "Once upon a time", "--raw", "-n", "5",
               "--temperature", "0", "--model", STORY]
    workers = [subprocess.Popen([INFERD, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for _ in range(4)]
    try:
        results = [(w.communicate(timeout=60), w.returncode) for w in workers]
        assert all(code == 0 for _, code in results), results
        assert len({out for (out, _), _ in results}) == 1
        assert sum("started expertd" in err for (_, err), _ in results) == 1, results
    finally:
        world.ctl("stop", check=False)


def test_model_option_with_a_bad_file_is_one_line(world, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")
    r = subprocess.run([INFERD, "run", "--runtime-dir", world.runtime, "--model", bad, "--prompt", "x", "--quiet"],
                       capture_output=True, text=True, timeout=60)
    assert r.returncode == 1 and str(bad) in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr
    r = subprocess.run([INFERD, "run", "--runtime-dir", world.runtime, "--model", tmp_path / "none", "--prompt", "x"],
                       capture_output=True, text=True, timeout=60)
    assert r.returncode == 1 and "No such file" in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr


def test_follow_up_reads_only_what_is_new(world):
    world.expertd()
    chat = Chat(world, "-n", "12")
    first = chat.turn("Tell me a story about a fox.")
    second = chat.turn("And then?")
    assert second["prompt_tokens"] < 30
    assert second["context_tokens"] >= first["context_tokens"] + second["prompt_tokens"]
    assert chat.close() == 0


@pytest.mark.slow
def test_conversation_goes_on_after_expertd(world):
    daemon = world.expertd()
    chat = Chat(world, "-n", "12")
    chat.turn("Tell me a story.")
    want = chat.turn(LONG)
    assert want["stream"]["policy"] == "routed"
    chat.close()

    # Killed between two turns, then in the middle of one: the turn is taken back.
    chat = Chat(world, "-n", "12", "--link-gbps", "0.005")
    chat.turn("Tell me a story.")
    chat.send(LONG)
    world.until(lambda: world.status().get("workers") is not None, what="status answers")
    time.sleep(0.4)
    daemon.kill()
    daemon.wait()
    assert "expertd is gone" in chat.error() and "expertd is gone" in chat.hear()["error"]
    daemon = world.expertd()
    again = chat.turn(LONG)
    assert again["attached_again"] and again["attach_ms"] < 1000
    assert again["logits_hash"] == want["logits_hash"] and again["text"] == want["text"]
    daemon.kill()
    daemon.wait()
    world.expertd()
    chat.turn("And then?")
    assert chat.close() == 0


def test_cancel_in_chat(world):
    world.expertd()
    chat = Chat(world, "-n", "12")
    want = chat.turn("Tell me a story.")
    chat.close()
    chat = Chat(world, "-n", "40", "--ignore-eos", "--link-gbps", "0.02")
    chat.send(LONG)
    time.sleep(0.2)
    chat.interrupt()
    assert "cancelled" in chat.error() and "cancelled" in chat.hear()["error"]
    chat.send("Tell me a story.")
    time.sleep(0.5)
    chat.interrupt()
    cut = chat.hear()
    assert cut["stop"] == "cancelled" and 0 < len(cut["generated_tokens"]) < 40
    assert "answer cut" in chat.error()
    n = min(len(cut["generated_tokens"]), 12)  # as if the cancelled turn had never been
    assert cut["generated_tokens"][:n] == want["generated_tokens"][:n]
    after = chat.turn("And then?")
    assert after["context_tokens"] > cut["context_tokens"]
    assert chat.close() == 0


def test_interrupted_run_leaves_nothing(world):
    world.expertd()
    p = world.spawn([INFERD, "run", *world.where(), "--prompt", LONG, "--raw", "-n", "9", "--link-gbps", "0.003"],
                    stdout=subprocess.DEVNULL)
    world.until(lambda: world.ctl("workers", "--json").stdout.count('"pid"') == 1, what="attached")
    time.sleep(0.2)
    p.send_signal(signal.SIGINT)
    assert p.wait(10) == 130
    world.until(lambda: world.ctl("workers", "--json").stdout.count('"pid"') == 0, timeout=5, what="detached")


def test_context_ends_an_answer_and_refuses_a_prompt(world):
    world.expertd()
    r = world.run("--prompt", "Once upon a time", "--raw", "--ctx", "20", "-n", "100", "--ignore-eos")
    assert r["stop"] == "context full" and r["context_tokens"] == 20
    r = world.inferd("run", "--prompt", LONG, "--raw", "--ctx", "100", check=False)
    assert r.returncode == 1 and "--ctx" in r.stderr and len(r.stderr.splitlines()) == 1


def test_progress_is_shown_on_a_terminal_only(world):
    world.expertd()
    options = [INFERD, "run", *world.where(), "--prompt", LONG, "--raw", "-n", "1", "--link-gbps", "0.01"]
    assert "reading" not in subprocess.run(options, capture_output=True, text=True, timeout=60).stderr
    ours, theirs = pty.openpty()
    p = subprocess.Popen(options, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert p.wait(20) == 0 and b"\rreading " in seen and b"tokens (" in seen, seen


def test_one_line_names_the_file(world):
    world.expertd()
    r = world.inferd("run", "--prompt-file", "/does/not/exist", "--raw", check=False)
    assert r.returncode == 1 and "/does/not/exist" in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr


def test_no_expertd_is_one_line(world):
    r = world.inferd("run", "--prompt", "x", check=False)
    assert r.returncode == 1 and "expertd --model" in r.stderr and len(r.stderr.splitlines()) == 1
