# SPDX-License-Identifier: MIT
"""The failure matrix (DESIGN 11) with real processes."""
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest

from conftest import (EXPERTD, INFERD, SLOW, STORY, TOP, Chat, anonymous_bytes, die_with_parent, process_facts)

PROMPT = TOP / "tools/model/prompt.txt"


def greedy(world, *options, prompt=None, n=24, **kw):
    prompt = ["--prompt", prompt] if prompt else ["--prompt", "Once upon a time there"]
    return world.run(*prompt, "--raw", "-n", n, "--temperature", 0, "--ignore-eos", "--hash", *options, **kw)


def settled(daemon, want, world):
    """expertd's descriptors, shared mappings and threads are back where they were."""
    try:
        world.until(lambda: process_facts(daemon.pid) == want)
    except AssertionError:
        assert process_facts(daemon.pid) == want, daemon.text()[-2000:]


def streaming(world, p=None, instance="default"):
    """A worker's stream is under way; the worker's row."""
    def look():
        if p and p.poll() is not None:
            raise AssertionError(f"ended with {p.returncode}: {p.log.read_text()}")
        workers = world.status(instance).get("workers") or []
        return next((w for w in workers if w.get("streaming") and w["issued"]), None)
    return world.until(look, what="streaming", every=0.002)


def unix_sockets(world):
    """Sockets of the instance's control channel, those of its connections too."""
    return sum(str(world.runtime) in line for line in open("/proc/net/unix"))


@pytest.mark.slow
def test_worker_killed_in_mid_stream_leaks_nothing(world):
    d = world.expertd("--link-gbps", "0.02")
    reference = greedy(world, "--link-gbps", "10")
    world.until(lambda: not world.status()["workers"], what="the first worker is gone")
    world.until(lambda: process_facts(d.pid)["threads"] == 2, what="its threads are gone")
    before = process_facts(d.pid)
    objects = set(os.listdir("/dev/shm"))
    memory = None
    rng = random.Random(1)
    sockets = unix_sockets(world)
    kills = int(os.environ.get("EXPERTD_KILLS", 100 if SLOW == 1 else 15))  # 1000: a quarter of an hour
    running = 0
    for i in range(kills):
        p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", PROMPT, "--raw", "-n", "4", "--stream",
                         rng.choice(["full", "routed"])], stdout=subprocess.DEVNULL)
        world.until(lambda: world.status()["workers"] or p.poll() is not None, what="attached", every=0.002)
        time.sleep(rng.uniform(0, 0.1))  # the instant of death is the experiment
        running += any(w.get("streaming") for w in world.status()["workers"])
        p.kill()
        p.wait()
        killed = time.monotonic()
        world.until(lambda: not world.status()["workers"], what="expertd noticed the death", every=0.002)
        assert time.monotonic() - killed < 10 * SLOW
        if i == 9:
            memory = anonymous_bytes(d.pid)
    assert running > kills // 10, "many of them died while a stream ran"
    settled(d, before, world)
    assert anonymous_bytes(d.pid) - memory < 4 << 20, "expertd's memory grows with kills"
    assert {n for n in set(os.listdir("/dev/shm")) - objects if n.startswith("inferd")} == set()
    assert world.status()["counters"]["deaths"] == kills
    world.until(lambda: unix_sockets(world) == sockets, what="no connection of the dead is left")
    print(f"{kills} kills, {running} of them in mid-stream; anonymous memory {memory >> 10} KiB after 10, "
          f"{anonymous_bytes(d.pid) >> 10} KiB after all")
    again = greedy(world, "--link-gbps", "10")
    assert again["logits_hash"] == reference["logits_hash"]


TALE = "Tell me a tale of a fox."


def fifth(answer):
    return {k: answer[k] for k in ("logits_hash", "generated_tokens", "prompt_tokens", "context_tokens")}


@pytest.mark.parametrize("when", ["between turns", "while reading", "while writing"])
def test_expertd_killed_worker_keeps_its_conversation(world, when):
    """The turn that it broke is as if it had never been asked; the next is bit for bit that of an undisturbed chat."""
    options = ("--temperature", "0.8", "--repeat-penalty", "1.1", "--seed", "7", "-n", "12", "--ignore-eos")

    d = world.expertd("--link-gbps", "0.005")  # so that there is time to kill it
    calm = Chat(world, *options, "--link-gbps", "10")
    want = [fifth(calm.ask(t)) for t in (TALE, "And then?", "The end?")]
    assert calm.end() == 0
    chat = Chat(world, *options)
    assert fifth(chat.ask(TALE)) == want[0]
    if when != "between turns":
        streams = world.status()["workers"][0]["streams"]
        chat.say("What did the bear say to the fox when it came home? " * 8)
        ahead = 0 if when == "while reading" else 3
        world.until(lambda: world.status()["workers"][0]["stream"] > streams + ahead, every=0.002, what=when)
    d.kill()
    d.wait()
    if when != "between turns":
        world.until(lambda: "expertd" in chat.log(), what="the chat says what happened")
        assert "expertd" in chat.hear()["error"]
    assert chat.process.poll() is None
    d = world.expertd()
    assert world.status()["adopted"]
    second = chat.ask("And then?")
    assert second["attached_again"] and fifth(second) == want[1]
    third = chat.ask("The end?")
    assert not third["attached_again"] and fifth(third) == want[2]
    assert chat.end() == 0, chat.log()
    d.kill(signal.SIGTERM)
    assert d.wait() == 0


def test_expertd_killed_in_mid_stream_worker_says_so(world):
    d = world.expertd("--link-gbps", "0.01")
    p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", PROMPT, "--raw", "-n", "4"],
                    stdout=subprocess.DEVNULL)
    streaming(world, p)
    d.kill()
    assert p.wait(60 * SLOW) != 0
    lines = [line for line in p.log.read_text().splitlines() if line.strip()]
    assert any("expertd" in line for line in lines), lines


def bytes_read(daemon):
    """By any system call; reads through io_uring would not be counted, so these expertd use pread."""
    return int(next(line.split()[1] for line in open(f"/proc/{daemon.pid}/io") if line.startswith("rchar")))


def test_adoption_reads_nothing(world):
    d = world.expertd("--io", "pread")
    assert bytes_read(d) > 10 << 20, "the measure sees a load"
    first = greedy(world)
    d.kill()
    d.wait()
    d = world.expertd("--io", "pread")
    s = world.status()
    assert s["adopted"] and s["arena"]["generation"] == 2 and s["load"]["bytes_done"] == 0
    assert bytes_read(d) < 2 << 20, "more than the header of the model file"
    assert greedy(world)["logits_hash"] == first["logits_hash"]


@pytest.mark.parametrize("how", ["foreign", "torn", "layout", "short"])
def test_arena_that_may_not_be_used_is_named_and_rebuilt(world, how):
    d = world.expertd()
    first = greedy(world)
    d.kill()
    d.wait()
    arena = next((world.arena / "default").rglob("arena"))
    os.chmod(arena, 0o600)
    with open(arena, "r+b") as f:
        if how == "foreign":
            f.seek(64 + 16)
            f.write(b"another model   ")
        elif how == "torn":
            f.seek(64)
            f.write((1).to_bytes(4, "little"))
        elif how == "layout":
            f.seek(6)
            f.write(b"99")
        else:
            f.truncate(os.path.getsize(arena) // 2)
    d = world.expertd()
    assert not world.status()["adopted"]
    word = {"foreign": "fingerprint", "torn": "torn", "layout": "EXDARN99", "short": "t"}[how]
    assert any("arena" in line and word in line for line in d.text().splitlines()), d.text()
    assert greedy(world)["logits_hash"] == first["logits_hash"]


def test_no_keep_removes_the_arena(world):
    d = world.expertd("--no-keep")
    assert list((world.arena / "default").rglob("arena"))
    d.kill(signal.SIGTERM)
    assert d.wait() == 0
    assert not list((world.arena / "default").rglob("*"))


def left_in(world, instance="default"):
    return sorted(f.name for f in (world.runtime / "expertd" / instance).iterdir() if not f.name.startswith("arena"))


def start_reading(world, *options):
    return world.spawn([INFERD, "run", *world.where(), "--prompt-file", PROMPT, "--raw", "-n", "1", "--temperature",
                        "0", "--json", "--hash", *options], stdout=subprocess.PIPE)


def test_sigterm_lets_a_running_stream_finish(world):
    d = world.expertd("--link-gbps", "0.03", "--drain-ms", str(30000 * SLOW))
    reference = world.run("--prompt-file", PROMPT, "--raw", "-n", 1, "--temperature", 0, "--hash", "--link-gbps", 10)
    p = start_reading(world)
    streaming(world, p)
    d.kill(signal.SIGTERM)
    out, _ = p.communicate(timeout=60 * SLOW)
    assert p.returncode == 0, p.log.read_text()
    assert json.loads(out)["logits_hash"] == reference["logits_hash"]
    assert d.wait() == 0, d.text()
    assert left_in(world) == []


def test_sigterm_breaks_off_past_the_deadline(world):
    d = world.expertd("--link-gbps", "0.001", "--drain-ms", "200")
    p = start_reading(world)
    streaming(world, p)
    began = time.monotonic()
    d.kill(signal.SIGTERM)
    assert d.wait() == 0, d.text()
    assert 0.15 < time.monotonic() - began < 30 * SLOW
    assert p.wait(60 * SLOW) == 1
    assert "after the deadline" in p.log.read_text(), p.log.read_text()
    assert len(p.log.read_text().splitlines()) == 1, p.log.read_text()
    assert left_in(world) == []


def test_second_sigterm_ends_at_once(world):
    d = world.expertd("--link-gbps", "0.0002", "--drain-ms", str(min(600000 * SLOW, 3600000)))
    p = start_reading(world)
    streaming(world, p)
    d.kill(signal.SIGTERM)
    world.until(lambda: world.status()["state"] == "draining", what="draining")
    r = world.inferd("run", "--prompt", "Hello", check=False)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    d.kill(signal.SIGTERM)
    assert d.wait() == 0, d.text()
    assert p.wait(60 * SLOW) == 1


@pytest.mark.parametrize("command", ["run", "chat"])
def test_sigterm_ends_a_worker(world, command):
    """In mid-stream: it cancels, detaches and goes; expertd keeps nothing of it."""
    d = world.expertd()
    world.until(lambda: process_facts(d.pid)["threads"] == 2, what="loader gone")
    before = process_facts(d.pid)
    if command == "run":
        p = start_reading(world, "--link-gbps", "0.001")
    else:
        chat = Chat(world, "--link-gbps", "0.001")
        p = chat.process
        chat.say(TALE * 100)
    streaming(world, p)
    p.send_signal(signal.SIGTERM)
    assert p.wait(60 * SLOW) in (130, 143), p.log.read_text()
    world.until(lambda: world.status()["counters"]["detaches"] == 1, what="detached")
    assert world.status()["counters"]["deaths"] == 0
    settled(d, before, world)


def test_interrupt_cuts_a_turn_and_keeps_the_chat(world):
    world.expertd("--link-gbps", "0.005")
    options = ("--temperature", "0.8", "-n", "8", "--ignore-eos")
    calm = Chat(world, *options, "--link-gbps", "10")
    want = [fifth(calm.ask(t)) for t in (TALE, "And then?")]
    assert calm.end() == 0
    chat = Chat(world, *options)
    assert fifth(chat.ask(TALE)) == want[0]
    chat.say("What did the bear say? " * 40)
    streaming(world, chat.process)
    chat.process.send_signal(signal.SIGINT)
    world.until(lambda: "cancelled" in chat.log(), what="cancelled")
    assert "cancelled" in chat.hear()["error"]
    assert fifth(chat.ask("And then?")) == want[1]
    assert chat.end() == 0


def test_second_expertd_is_refused(world):
    d = world.expertd()
    other = world.expertd(wait=False)
    assert other.wait() != 0
    assert str(d.pid) in other.text() and "instance" in other.text(), other.text()
    assert greedy(world)["prompt_tokens"] == 5


def test_an_expertd_that_has_not_said_its_number_is_not_called_0(world):
    place = world.runtime / "expertd" / "early"
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o700)
    with open(place / "lock", "w") as lock:
        os.chmod(lock.name, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = world.expertd(instance="early", wait=False)
        assert other.wait() == 1
    assert "by another expertd" in other.text() and "pid 0" not in other.text(), other.text()


def test_two_instances_side_by_side(world):
    world.expertd(instance="one")
    world.expertd(instance="two")
    a = greedy(world, instance="one")
    b = greedy(world, instance="two")
    assert a["logits_hash"] == b["logits_hash"]
    assert world.ctl("stop", instance="one").returncode == 0
    assert greedy(world, instance="two")["logits_hash"] == a["logits_hash"]


def test_stale_socket_is_no_obstacle(world):
    d = world.expertd()
    d.kill()
    d.wait()
    assert list((world.runtime / "expertd/default").glob("*.sock")), "the socket of the dead expertd lies there"
    world.expertd()
    assert greedy(world)["prompt_tokens"] == 5


def one_error_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "expertd:" in line]
    return errors[-1] if errors else (lines[-1] if lines else "")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_full_disk(world):
    small = world.path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small]).returncode:
        pytest.skip("mount is not allowed here")
    try:
        d = world.expertd("--arena-dir", small, wait=False, arena=False)
        assert d.wait() != 0
        assert str(small) in one_error_line(d.text()), d.text()
        assert not list(small.rglob("arena*")), "nothing half-written is left"
    finally:
        subprocess.run(["umount", "-l", small])


def limited(world, limit, value, *options, program=EXPERTD):
    """Starts expertd under a resource limit; its exit status and lines."""
    def before():
        die_with_parent()
        resource.setrlimit(limit, (value, value))
    arena = world.path / "limited"
    arena.mkdir(mode=0o700, exist_ok=True)
    argv = [program, "--model", STORY, *world.where("limited"), "--arena-dir", arena, *options]
    r = subprocess.run([str(a) for a in argv], capture_output=True, text=True, preexec_fn=before, timeout=30 * SLOW)
    assert r.returncode > 0, f"{r.returncode}: an error exit, not a signal: {r.stderr}"
    lines = [line for line in r.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1 and lines[0] == r.stderr.splitlines()[-1], r.stderr
    assert not list(arena.rglob("arena*")) and left_in(world, "limited") == [], "nothing half-written is left"
    return lines[0]


@pytest.mark.skipif(SLOW > 1, reason="sanitizers reserve terabytes of address space")
@pytest.mark.parametrize("mib", [16, 24, 48, 96])
def test_no_memory(world, mib):
    """An address-space limit at several points under the need: one line, no crash."""
    line = limited(world, resource.RLIMIT_AS, mib << 20)
    assert "ulimit -v" in line, line


@pytest.mark.parametrize("kib", [4, 64, 4096])
def test_file_size_limit(world, kib):
    line = limited(world, resource.RLIMIT_FSIZE, kib << 10)
    assert "too large" in line.lower() or "ulimit -f" in line, line


@pytest.mark.parametrize("files", [8, 10, 13, 16, 19])
def test_too_few_descriptors(world, files):
    """At each point of the start; below the control channel a lack of them would hang for ever."""
    line = limited(world, resource.RLIMIT_NOFILE, files)
    assert "Too many open files" in line and "ulimit -n" in line, line


@pytest.mark.skipif(SLOW > 1, reason="sanitizers need descriptors and address space of their own")
@pytest.mark.parametrize("limit,value", [(resource.RLIMIT_NOFILE, 6), (resource.RLIMIT_NOFILE, 10),
                                         (resource.RLIMIT_NOFILE, 14), (resource.RLIMIT_FSIZE, 4 << 10),
                                         (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_AS, 20 << 20)])
def test_worker_under_a_limit(world, limit, value):
    """It fails with one line, and nothing of it stays with expertd."""
    def before():
        die_with_parent()
        resource.setrlimit(limit, (value, value))
    d = world.expertd()
    world.until(lambda: process_facts(d.pid)["threads"] == 2, what="loader gone")
    facts = process_facts(d.pid)
    r = subprocess.run([str(INFERD), "run", *world.where(), "--prompt", "Once", "--raw", "-n", "1"],
                       capture_output=True, text=True, preexec_fn=before, timeout=30 * SLOW)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and r.stderr.startswith("inferd: "), r.stderr
    assert {resource.RLIMIT_NOFILE: "open files", resource.RLIMIT_FSIZE: "too large",
            resource.RLIMIT_AS: "memory"}[limit] in r.stderr, r.stderr
    assert not world.status()["workers"]
    settled(d, facts, world)
    assert greedy(world)["prompt_tokens"] == 5


@pytest.mark.skipif(SLOW > 1, reason="sanitizers need descriptors of their own")
def test_expertd_out_of_descriptors_goes_on(world):
    """Workers that no longer fit are refused or wait; those that are there go on, and later ones fit again."""
    def before():
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, (26, 26))
    d = world.expertd(preexec_fn=before)
    world.until(lambda: process_facts(d.pid)["threads"] == 2, what="loader gone")
    facts = process_facts(d.pid)
    chats = [Chat(world, "-n", "3", "--temperature", "0") for _ in range(10)]
    world.until(lambda: sum(c.process.poll() is not None for c in chats) + len(world.status()["workers"]) == 10,
                what="each attached or refused", timeout=40)
    there = [c for c in chats if c.process.poll() is None]
    gone = [c for c in chats if c.process.poll() is not None]
    assert there and gone, f"{len(there)} attached, {len(gone)} refused"
    assert len({c.ask("Tell me a tale of a fox.")["logits_hash"] for c in there}) == 1
    for c in gone:
        assert c.process.returncode == 1 and len(c.log().splitlines()) == 1, c.log()
    for c in there:
        assert c.end() == 0
    settled(d, facts, world)
    assert greedy(world)["prompt_tokens"] == 5


def test_memlock_limit(world):
    """Pinning that is required and refused names limit, need and remedy."""
    def limit():
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        if os.geteuid() == 0:  # root may lock past any limit: give the capability up
            os.setgid(65534)
            os.setuid(65534)
    run = world.path / "nobody"
    arena = world.path / "nobody-arena"
    model = world.path / "m.gguf"
    for p in (run, arena):
        p.mkdir(mode=0o700)
    shutil.copy(STORY, model)
    if os.geteuid() == 0:
        for p in (run, arena, model):
            os.chown(p, 65534, 65534)
        os.chmod(world.path, 0o755)
    if not os.access(EXPERTD, os.X_OK):
        pytest.skip("no program")
    tmp = world.path / "expertd"
    shutil.copy(EXPERTD, tmp)
    os.chmod(tmp, 0o755)
    r = subprocess.run([str(tmp), "--model", str(model), "--runtime-dir", str(run), "--arena-dir", str(arena), "--pin",
                        "require"], capture_output=True, text=True, preexec_fn=limit, timeout=30 * SLOW)
    assert r.returncode > 0
    assert "memlock" in r.stderr.lower(), r.stderr


@pytest.mark.parametrize("cut", [0, 3, 24, 1000, 300_000, 5_000_000])
def test_truncated_model(world, cut):
    model = world.path / "cut.gguf"
    model.write_bytes(STORY.read_bytes()[:cut])
    d = world.expertd(model=model, wait=False)
    assert d.wait() > 0
    assert "cut.gguf" in d.text(), d.text()
    assert not list((world.arena / "default").rglob("arena*"))
