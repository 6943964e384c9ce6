# SPDX-License-Identifier: MIT
"""expertctl against real daemons."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

from conftest import BUILD, Chat, EXPERTCTL, INFERD, SLOW, STORY, TOP, die_with_parent

PROMPT = TOP / "tools/model/prompt.txt"
PAGE = (TOP / "tools/man/expertctl.1.scd").read_text().replace("\\_", "_")
LOOKS = ["status", "workers", "rings", "trace", "counters", "metrics", "verify"]


@pytest.fixture
def prompt(world):
    """A few hundred tokens: enough to stream, quickly read."""
    path = world.path / "prompt.txt"
    path.write_text(PROMPT.read_text()[:1600])
    return path


def start_run(world, prompt, gbps, *options, n=2):
    """inferd run in the background, streaming over a slow link; returns once a copy was issued."""
    p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", prompt, "--raw", "-n", n, "--temperature", "0",
                     "--ignore-eos", "--json", "--hash", "--link-gbps", gbps, "--floor", "64", *options],
                    stdout=subprocess.PIPE, text=True)
    world.until(lambda: p.poll() is not None or any(w.get("issued") for w in world.status()["workers"]),
                what="streaming")
    assert p.poll() is None, p.log.read_text()
    return p


def finish(p):
    out, _ = p.communicate(timeout=90 * SLOW)
    assert p.returncode == 0, p.log.read_text()
    return json.loads(out)


def show(world, *argv, status=0):
    r = world.ctl(*argv, check=False)
    assert r.returncode == status, f"{argv}: {r.returncode}\n{r.stdout}{r.stderr}"
    return json.loads(r.stdout) if "--json" in argv else r.stdout


def documented(section):
    """Keys that a section of the manual page's JSON part names."""
    text = re.search(rf"^## JSON of {section}$(.*?)^#", PAGE, re.M | re.S).group(1)
    return {k for line in text.splitlines() if line.startswith("*") for k in re.findall(r"\*([a-z_.]+)\*", line)}


def keys(value, nested=("model", "arena", "park", "budget", "load", "defaults", "slots")):
    found = set()
    for k, v in value.items():
        found |= {f"{k}.{x}" for x in v} if k in nested and isinstance(v, dict) else {k}
    return found


def test_json_has_the_documented_keys(world, prompt):
    world.expertd()
    p = start_run(world, prompt, "0.002")
    status = show(world, "status", "--json")
    assert keys(status) == documented("status")
    assert status["state"] == "serving" and not status["stalled"] and status["model"]["path"] == str(STORY)
    worker = documented("workers and rings")
    of_rings = {k for k in worker if k.startswith("slots.") or k == "bar"}
    for command, want in (("workers", worker - of_rings), ("rings", worker)):
        (w,) = show(world, command, "--json")
        assert keys(w) == want - {"unreadable"}
        assert w["pid"] == p.pid and w["alive"] and w["ring"] > 0
    assert len(w["bar"]) == min(64, w["ring"])
    assert sum(w["slots"].values()) == w["ring"]
    (t,) = show(world, "trace", "--json")
    assert t["pid"] == p.pid
    result = finish(p)
    verify = show(world, "verify", "--json")
    assert keys(verify) == documented("verify")
    assert verify["ok"] and verify["complete"] and verify["bad"] == 0 and verify["problem"] is None
    assert result["stream"]["entries"] > 0
    for command in LOOKS:
        show(world, command)


def test_trace_tells_what_the_worker_tells(world, prompt):
    """The chunks that expertctl shows add up to what inferd reports of the same reading."""
    world.expertd()
    # the second, slow chunk keeps the worker there while its first one is looked at
    p = start_run(world, prompt, "0.02", "--chunk", "128")
    def chunks():
        workers = show(world, "trace", "--json")
        return workers and workers[0]["chunks"]
    first = world.until(lambda: p.poll() is None and chunks(), what="a chunk is done")[0]
    assert set(first) == documented("trace") - {"pid", "overrun", "stale", "chunks"}
    text = show(world, "trace", "--worker", str(p.pid), "--count", "1")
    result = finish(p)
    told = result["chunks"][0]
    for key in ("tokens", "policy", "order", "entries", "routed", "copied", "dropped", "wasted", "bytes_copied"):
        assert first[key] == told[key], key
    assert first["tokens"] <= 128 and first["result"] == "ok"
    assert sum(c["tokens"] for c in result["chunks"]) == result["prompt_tokens"]
    assert first["copied"] + first["dropped"] == first["entries"]
    assert len(text.splitlines()) == 3, text  # worker, heading, one chunk


def test_works_while_expertd_is_stopped_and_disturbs_nothing(world, prompt):
    d = world.expertd()
    reference = finish(start_run(world, prompt, "0.02"))
    p = start_run(world, prompt, "0.004")
    d.kill(signal.SIGSTOP)
    world.until(lambda: world.status()["suspended"], what="seen as stopped")
    before = world.status()
    for _ in range(3):
        status = show(world, "status", "--json", status=1)
        assert status["state"] == "serving" and status["alive"] and status["suspended"] and status["stalled"]
        assert "SIGSTOP" in show(world, "status", status=1)
        for command in ("workers", "rings", "trace", "verify"):
            show(world, command)
            show(world, command, "--json")
    assert status["heartbeat_age_ms"] >= before["heartbeat_age_ms"]
    assert status["workers"][0]["streaming"]
    d.kill(signal.SIGCONT)
    result = finish(p)
    assert result["logits_hash"] == reference["logits_hash"]
    assert result["generated_tokens"] == reference["generated_tokens"]
    show(world, "status")


def test_stale_store_is_told_from_a_live_one(world):
    d = world.expertd()
    assert "live" in show(world, "status")
    d.kill()
    d.wait()
    status = show(world, "status", "--json", status=1)
    assert status["state"] == "stale" and not status["alive"]
    assert "stale" in show(world, "status", status=1)
    assert show(world, "verify", "--json")["ok"], "the arena that it left is whole"
    for command in ("drain", "stop"):
        r = world.ctl(command, check=False)
        assert r.returncode == 2 and len(r.stderr.splitlines()) == 1 and not r.stdout
    world.expertd()
    assert show(world, "status", "--json")["alive"]


@pytest.mark.parametrize("where", [0.3, 0.6, 0.95, "name", "ready"])
def test_verify_finds_a_flipped_bit(world, where):
    world.expertd()
    assert show(world, "verify", "--json")["bad"] == 0
    arena = show(world, "status", "--json")["arena"]["path"]
    model = STORY.read_bytes()
    with open(arena, "rb") as f:
        held = f.read()
    if where == "ready":  # the first unit's flag: struct shm_arena's ready_offset
        at = int.from_bytes(held[136:144], "little")
    elif where == "name":  # the model's, in the catalog
        at = held.index(b"Story MoE")
    else:  # a piece of some tensor
        start = int(len(model) * where)
        at = held.index(model[start:start + 24])
    os.chmod(arena, 0o600)

    def flip():
        with open(arena, "r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1]))

    flip()
    r = world.ctl("verify", check=False)
    assert r.returncode == 1
    named = {"name": "catalog", "ready": "not marked as loaded"}.get(where, r"layer \d+ expert \d+|tensor \w+")
    assert re.search(named, r.stderr), r.stderr
    told = show(world, "verify", "--json", status=1)
    assert not told["ok"] and told["bad"] >= 1
    flip()
    assert show(world, "verify", "--json")["ok"]


def test_watch_that_nobody_reads_ends_on_sigint(world):
    """Blocked in a write to a full pipe: still a clean end."""
    world.expertd()
    p = world.spawn([EXPERTCTL, "status", "--json", "--watch", "0.001", *world.where()], stdout=subprocess.PIPE)
    world.until(lambda: "pipe" in open(f"/proc/{p.pid}/wchan").read() or
                open(f"/proc/{p.pid}/syscall").read().startswith("1 "), what="blocked in write")
    p.send_signal(signal.SIGINT)
    assert p.wait(10 * SLOW) == 0


def test_watch_ends_on_sigint(world):
    world.expertd()
    for command in ("status", "rings"):
        p = world.spawn([EXPERTCTL, command, "--json", "--watch", str(0.05 * SLOW), *world.where()], stdout=subprocess.PIPE,
                        text=True)
        time.sleep(0.5 * SLOW)
        assert p.poll() is None
        p.send_signal(signal.SIGINT)
        out, _ = p.communicate(timeout=5 * SLOW)
        assert p.returncode == 0
        decoder, values = json.JSONDecoder(), []
        while out.strip():
            value, end = decoder.raw_decode(out.lstrip())
            values.append(value)
            out = out.lstrip()[end:]
        assert len(values) > 2, "several looks, each a whole value"


def test_watch_survives_a_restart(world):
    d = world.expertd()
    p = world.spawn([EXPERTCTL, "status", "--watch", "0.05", *world.where()], stdout=subprocess.PIPE, text=True)
    time.sleep(0.2 * SLOW)
    d.kill()
    d.wait()
    time.sleep(0.2 * SLOW)
    world.expertd()
    time.sleep(0.2 * SLOW)
    p.send_signal(signal.SIGINT)
    out, _ = p.communicate(timeout=5 * SLOW)
    assert p.returncode == 0
    assert re.search(r"\(live\).*\(stale.*\(live\)", out, re.S), out


def test_trace_tells_overrun_and_a_stale_writer(world, prompt):
    d = world.expertd()
    chat = Chat(world, "--temperature", "0", "-n", "3", "--ignore-eos")
    chat.ask("Once upon a time")
    (t,) = show(world, "trace", "--json")
    assert set(t) == {"pid", "overrun", "stale", "chunks"} and not t["overrun"] and not t["stale"]
    assert len(t["chunks"]) >= 3
    # as if expertd were writing chunk 2 right now: the generation of its report is odd (report[2], each of 160 bytes)
    for fd in pathlib.Path(f"/proc/{t['pid']}/fd").iterdir():
        if "memfd" in os.readlink(fd):
            with open(fd, "r+b", buffering=0) as segment:
                if segment.read(8).startswith(b"EXDWRK"):
                    segment.seek(960 + 2 * 160)
                    segment.write((2 * 66 + 1).to_bytes(8, "little"))
    (now,) = show(world, "trace", "--json")
    assert now["overrun"] == 1 and [c["stream"] for c in now["chunks"]] == [
        c["stream"] for c in t["chunks"] if c["stream"] != 2]
    assert "overrun: 1 of" in show(world, "trace")
    d.kill()
    d.wait()
    (dead,) = show(world, "trace", "--json")
    assert dead["stale"] and dead["chunks"] == now["chunks"]
    assert "stale writer" in show(world, "trace")
    chat.end()


def test_configure_holds_from_the_next_stream_on(world, prompt):
    """An operator changes a live worker; its answers stay the same bits."""
    world.expertd()
    chat = Chat(world, "--temperature", "0", "-n", "1", "--ignore-eos", "--chunk", "64", "--floor", "16", "--order",
                "recent")
    story = prompt.read_text()[:300].replace("\n", " ")
    first = chat.ask(story)
    assert first["stream"]["policy"] == "routed" and first["stream"]["order"] == "recent"
    who = ["--worker", str(chat.process.pid)]
    before = show(world, "configure", *who, "--json")
    assert set(before) == documented("configure")
    assert (before["policy"], before["order"], before["floor"]) == ("routed", "recent", 16)
    now = show(world, "configure", *who, "--json", "--stream", "full", "--depth", "3", "--link-gbps", "5",
               "--link-latency-us", "2.5")
    assert now == {**before, "policy": "full", "depth": 3, "link_gbps": 5, "link_latency_us": 2.5}
    assert chat.ask(story)["stream"]["policy"] == "full"
    session = ["--session", str(before["session"])]
    text = show(world, "configure", *session, "--stream", "routed", "--order", "index", "--link-gbps", "0",
                "--link-latency-us", "0")
    assert "order index, depth 3" in text and "unpaced" in text, text
    third = chat.ask(story)["stream"]
    assert (third["policy"], third["order"], third["depth"]) == ("routed", "index", 3)
    show(world, "configure", *session, "--floor", "100000")
    assert chat.ask(story)["stream"]["policy"] == "demand"
    assert chat.end() == 0


def test_configure_of_nobody(world):
    world.expertd()
    for argv, word in (([], "--worker"), (["--worker", "1"], "no such worker"), (["--session", "77"], "no such worker")):
        r = world.ctl("configure", *argv, check=False)
        assert r.returncode == 1 and not r.stdout
        (line,) = r.stderr.splitlines()
        assert word in line, line


def test_drain_refuses_new_work(world, prompt):
    d = world.expertd()
    assert show(world, "drain", "--json", "--deadline", "5") == {"drain": True}
    assert show(world, "status", "--json")["state"] == "draining"
    assert world.ctl("drain").returncode == 0
    r = world.inferd("run", "--prompt-file", prompt, "--raw", "-n", "1", "--quiet", check=False)
    assert r.returncode == 1 and not r.stdout.strip()
    (line,) = r.stderr.splitlines()
    assert "expertd" in line and re.search("drain|ending", line), line
    counters = show(world, "status", "--json")["counters"]
    assert counters["refused"] == 0, "a worker sees the state, and doesn't ask to be refused"
    assert d.process.poll() is None, "drain doesn't end it"


def test_drain_lets_a_running_stream_finish(world, prompt):
    world.expertd()
    reference = finish(start_run(world, prompt, "0.02", n=1))
    p = start_run(world, prompt, "0.004", n=1)
    show(world, "drain", "--deadline", "60")
    assert finish(p)["logits_hash"] == reference["logits_hash"]


def test_stop_ends_within_the_deadline(world, prompt):
    d = world.expertd()
    p = start_run(world, prompt, "0.001")
    began = time.monotonic()
    assert show(world, "stop", "--json", "--deadline", "0.5") == {"stop": True}
    took = time.monotonic() - began
    assert took < 3 * SLOW, "the stream would have taken seven seconds"
    assert d.process.poll() == 0, "stop returns when expertd has ended"
    p.communicate(timeout=20 * SLOW)
    assert p.returncode == 1
    assert any("expertd" in line for line in p.log.read_text().splitlines())
    assert world.ctl("status", check=False).returncode == 2


def test_exit_codes_without_an_instance(world):
    for command in [*LOOKS, "configure", "drain", "stop"]:
        r = world.ctl(command, check=False, instance="nobody")
        assert r.returncode == 2 and not r.stdout
        (line,) = r.stderr.splitlines()
        assert "nobody" in line and str(world.runtime) in line


def copy_of_store(world, name):
    there = world.runtime / "expertd" / name
    there.mkdir(mode=0o700)
    shutil.copy(world.runtime / "expertd/default/store", there / "store")
    return there / "store"


def test_exit_code_of_another_version(world):
    world.expertd()
    store = copy_of_store(world, "later")
    with open(store, "r+b") as f:
        magic = f.read(8)
        f.seek(0)
        f.write(magic[:6] + b"99")
    for command in LOOKS:
        r = world.ctl(command, check=False, instance="later")
        assert r.returncode == 3, r.stderr
        assert (magic[:6] + b"99").decode() in r.stderr and magic.decode() in r.stderr


@pytest.mark.parametrize("size", [0, 7, 200, 5000])
def test_torn_store_is_no_crash(world, size):
    world.expertd()
    store = copy_of_store(world, "torn")
    os.truncate(store, size)
    for command in LOOKS:
        r = world.ctl(command, check=False, instance="torn")
        assert r.returncode == 2 and len(r.stderr.splitlines()) == 1, r.stderr


def test_scribbled_store_is_no_crash(world):
    """Everything behind the header is rubbish."""
    world.expertd()
    store = copy_of_store(world, "scribbled")
    size = os.path.getsize(store)
    with open(store, "r+b") as f:
        f.seek(64)
        f.write(b"\xff" * (size - 64))
    for command in [*LOOKS, *(f"{c} --json" for c in LOOKS)]:
        r = subprocess.run([str(EXPERTCTL), *command.split(), *world.where("scribbled")], capture_output=True,
                           timeout=60 * SLOW)
        assert r.returncode in (0, 1, 2, 3), (command, r.returncode, r.stderr)


def doctor(world, *options, env=None):
    r = subprocess.run([str(EXPERTCTL), "doctor", "--json", *world.where(), *map(str, options)], capture_output=True,
                       text=True, timeout=60 * SLOW, env={**os.environ, **(env or {})})
    assert not r.stderr, r.stderr
    out = json.loads(r.stdout)
    assert r.returncode == (1 if out["problems"] else 0) and out["ok"] == (out["problems"] == 0)
    assert set(out) == documented("doctor") - {"check", "grade", "text"}
    for grade in ("problem", "warning"):
        assert sum(f["grade"] == grade for f in out["findings"]) == out[grade + "s"]
    return out


def found(out, check):
    """Text of a check's findings; each check is told."""
    texts = [f["text"] for f in out["findings"] if f["check"] == check]
    assert texts, out
    return "\n".join(texts)


def test_doctor(world):
    out = doctor(world)
    assert "no expertd runs" in found(out, "instance")
    assert {f["check"] for f in out["findings"]} | {"disk"} == set(re.findall(
        r"^\*(\w+)\*$", PAGE.split("# CHECKS OF DOCTOR")[1].split("# JSON")[0], re.M))
    before = doctor(world, "--model", STORY, "--arena-dir", world.arena)
    assert "is there already" not in found(before, "model") and "a sample" in found(before, "disk")
    world.expertd()
    (world.runtime / "link").symlink_to(STORY)  # the same file by another name
    after = doctor(world, "--model", world.runtime / "link")
    assert "is there already" in found(after, "model") and "0 B more" in found(after, "memory")
    assert "share IPC and PID namespaces" in found(after, "ipc")
    told = float(re.search(r"arena of about ([\d.]+) MiB", found(after, "model")).group(1)) * 2**20
    real = world.status()["arena"]["bytes"]
    assert real <= told <= real * 1.05 + 4 * 2**20


def test_doctor_finds_a_problem(world):
    empty = world.path / "empty"
    empty.mkdir()
    out = doctor(world, "--model", world.path / "none.gguf", env={"EXPERTCTL_ROOT": str(empty)})
    assert out["problems"] >= 3
    for check, words in (("ipc", "mount /proc"), ("space", "/dev/shm"), ("model", "none.gguf")):
        assert words in found(out, check)


def test_what_is_not_there_is_told_with_what_to_do(world):
    """An instance, a process, a folder, a server: the first mistakes of whoever begins."""
    assert "start one with expertd --model FILE --instance other\n" in world.ctl("status", check=False, instance="other").stderr
    assert "start one with expertd --model FILE\n" in world.ctl("status", check=False).stderr
    assert "--instance or --runtime-dir" in world.ctl("evict", "other", check=False, instance="other").stderr
    r = subprocess.run([str(BUILD / "expertd/expertd"), "--model", str(STORY), *world.where("lost"), "--arena-dir",
                        str(world.path / "nowhere")], capture_output=True, text=True, timeout=60 * SLOW)
    assert r.returncode == 1 and "name a directory that is there" in r.stderr, r.stderr
    r = subprocess.run([str(BUILD / "tools/expert-bench"), "serve", "http://127.0.0.1:1"], capture_output=True, text=True,
                       timeout=60 * SLOW)
    assert r.returncode == 2 and "is 'inferd serve' running there?" in r.stderr, (r.returncode, r.stderr)
    world.expertd()
    assert "'expertctl workers' lists them" in world.ctl("workers", "drain", os.getpid(), check=False).stderr


def test_doctor_sees_that_a_model_is_not_whole(world):
    whole = STORY.read_bytes()
    cut = world.path / "cut.gguf"
    for n in (len(whole) - 1, len(whole) // 2):
        cut.write_bytes(whole[:n])
        r = world.ctl("doctor", "--json", "--model", cut, check=False)
        assert r.returncode == 1 and "incomplete download?" in r.stdout, r.stdout
