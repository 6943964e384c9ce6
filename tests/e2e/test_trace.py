# SPDX-License-Identifier: MIT
"""expertctl trace show, record, export: events of real daemons, and what they make of damaged files."""
import collections
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys

import pytest

from conftest import BUILD, Chat, EXPERTCTL, EXPERTD, INFERD, SLOW, TOP

sys.path.insert(0, str(TOP / "tests/tools"))
import check_trace  # noqa: E402

TEXT = " ".join((TOP / "tools/model/prompt.txt").read_text()[:500].split())
OPTIONS = ["--floor", "32", "-n", "1", "--temperature", "0"]


@pytest.fixture
def chat(world):
    """expertd and a worker that has read and answered."""
    world.daemon = world.expertd()
    c = Chat(world, *OPTIONS)
    c.ask(TEXT)
    yield c
    if c.process.poll() is None:
        c.end()


def show(world, *argv, **kw):
    return json.loads(world.ctl("trace", "show", "--json", "-n", "1000000", *argv, **kw).stdout)


def where(world, name):
    return world.runtime / "expertd/default" / name


def of(trace, event, thread=None):
    return [e for e in trace["events"]
            if e["event"] == event and (not thread or trace["tracks"][e["track"]]["thread"] == thread)]


def stream_of(trace, number):
    return [e["fields"] for e in trace["events"] if e["fields"].get("stream") == number]


def test_events_tell_what_the_report_tells(world, chat):
    """Issues, drops and landings are those of the streams' reports; each entry is issued or dropped once."""
    (chunks,) = json.loads(world.ctl("trace", "--json").stdout)
    trace = show(world)
    threads = {t["thread"]: t for t in trace["tracks"]}
    assert set(threads) == {"main", "issuer", "link", "worker"}
    assert all(t["pid"] == chat.process.pid for n, t in threads.items() if n != "main")
    assert threads["main"]["pid"] == world.daemon.pid and not any(t["lost"] or t["older"] for t in trace["tracks"])
    (attach,), (join,) = of(trace, "attach"), of(trace, "join")
    assert attach["fields"]["pid"] == chat.process.pid and attach["fields"]["session"] == join["fields"]["session"]
    assert [e["fields"]["state"] for e in of(trace, "state")][-1] == "serving"
    landed = of(trace, "land", "link")
    assert len(landed) == sum(c["copied"] for c in chunks["chunks"])
    assert sum(e["fields"]["bytes"] for e in landed) == sum(c["bytes_copied"] for c in chunks["chunks"])
    for c in chunks["chunks"]:
        mine = [e for e in trace["events"] if e["fields"].get("stream") == c["stream"]]
        count = collections.Counter(e["event"] for e in mine)
        assert count["issue"] == c["copied"] and count["drop"] == c["dropped"], c
        entries = [(e["fields"]["layer"], e["fields"]["expert"]) for e in mine if e["event"] in ("issue", "drop")]
        assert len(entries) == len(set(entries)) == c["entries"]
        (begin,), (end,) = ([e for e in mine if e["event"] == f"stream_{x}"] for x in ("begin", "end"))
        assert begin["fields"]["policy"] == c["policy"] and begin["fields"]["order"] == c["order"]
        assert begin["fields"]["tokens"] == c["tokens"] and begin["fields"]["depth"] == c["depth"]
        assert end["fields"]["result"] == c["result"] == "ok" and end["fields"]["copied"] == c["copied"]
        assert count["publish"] == count["publish_seen"] == 5 and count["pass_begin"] == count["pass_end"] == 1
        assert count["release"] >= 5 and count["wait_begin"] == count["wait_end"]
        assert count["sleep_begin"] == count["sleep_end"]
        for layer in range(5):
            (out,), (seen,) = ([e for e in mine if e["event"] == x and e["fields"]["layer"] == layer]
                               for x in ("publish", "publish_seen"))
            assert out["at_ns"] <= seen["at_ns"] and out["fields"]["routed"] == seen["fields"]["routed"]
            drops = [e for e in mine if e["event"] == "drop" and e["fields"]["layer"] == layer]
            assert all(e["at_ns"] >= seen["at_ns"] for e in drops)  # none before the router spoke
    text = world.ctl("trace", "show", "-n", "7").stdout.splitlines()
    assert len(text) == 8 and text[0].startswith("TIME"), text
    assert all(str(chat.process.pid) in line for line in world.ctl("trace", "show", "-p", chat.process.pid).stdout.splitlines()[1:])


def test_export_keeps_the_rules_of_the_format(world, chat):
    recorded, out = world.path / "recorded", world.path / "trace.json"
    said = json.loads(world.ctl("trace", "record", recorded, "--seconds", "0", "--json").stdout)
    assert said == {"file": str(recorded), "events": said["events"], "rings": 4, "older": 0, "lost": 0} and said["events"]
    world.ctl("trace", "export", recorded, "-o", out)
    data = json.load(open(out))
    assert check_trace.check(data) == []
    (chunks,) = json.loads(world.ctl("trace", "--json").stdout)
    events = data["traceEvents"]
    copies = [e for e in events if e["ph"] == "X" and e["name"].startswith("layer ")]
    assert len(copies) == sum(c["copied"] for c in chunks["chunks"])  # each by its name
    spans = collections.Counter(e["name"] for e in events if e["ph"] == "X")
    assert spans["stream"] == spans["pass"] == len(chunks["chunks"])
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"expertd", "inferd"}
    assert not any("unfinished" in e["args"] for e in events if e["ph"] == "X")  # nothing runs
    # the rings themselves say the same (the worker is idle)
    assert len(json.loads(world.ctl("trace", "export").stdout)["traceEvents"]) == len(events)
    # and the checker notices what is wrong
    def broken(change):
        wrong = json.loads(json.dumps(data))
        change(wrong["traceEvents"])
        return check_trace.check(wrong)
    first = next(i for i, e in enumerate(events) if e["ph"] == "X")
    for key in ("ph", "ts", "dur", "pid", "tid", "name", "cat"):
        assert broken(lambda l: l[first].pop(key)), key
    assert broken(lambda l: l[first].update(dur=-1)) and broken(lambda l: l[first].update(ts="0"))
    assert broken(lambda l: l.append({**l[first], "ph": "B"})) and broken(lambda l: l.append({**l[first], "ph": "E"}))
    assert broken(lambda l: l.append({**l[first], "tid": 77})) and broken(lambda l: l.append({**l[first], "ph": "Q"}))
    assert broken(lambda l: l.append({**l[first], "ts": l[first]["ts"] + l[first]["dur"] / 2}))
    script = subprocess.run([sys.executable, TOP / "tests/tools/check_trace.py", out], capture_output=True, text=True)
    assert script.returncode == 0 and " X" in script.stdout, script.stdout


def test_record_follows_and_tells_losses(world):
    """A recording begun before the worker has all of it, also after the worker's death."""
    world.daemon = world.expertd()
    recorded = world.path / "recorded"
    r = world.spawn([EXPERTCTL, "trace", "record", recorded, *world.where()], stdout=subprocess.PIPE, text=True)
    world.until(recorded.exists, what="the recording began")
    c = Chat(world, *OPTIONS)
    c.ask(TEXT)
    world.until(lambda: of(json.loads(world.ctl("trace", "show", recorded, "--json", "-n", "1000000").stdout), "pass_end"),
                what="the worker is recorded", every=0.1)
    c.process.kill()
    c.process.wait()
    world.until(lambda: b"has ended" in world.daemon.log.read_bytes(), what="the death was seen")
    world.until(lambda: of(json.loads(world.ctl("trace", "show", recorded, "--json", "-n", "1000000").stdout), "death"),
                what="the death is recorded", every=0.1)
    r.send_signal(signal.SIGINT)
    said, _ = r.communicate(timeout=60 * SLOW)
    assert r.returncode == 0 and "lost 0" in said, said
    trace = show(world, recorded)
    assert {t["thread"] for t in trace["tracks"]} == {"main", "issuer", "link", "worker"}
    assert of(trace, "death")[0]["fields"]["pid"] == c.process.pid
    # expertd's rings have it still; the worker's went with it
    live = show(world)
    assert len(of(live, "issue")) == len(of(trace, "issue")) > 0 and not of(live, "publish")
    # a recorder that was killed in the middle of a chunk
    whole = recorded.read_bytes()
    cut = world.path / "cut"
    cut.write_bytes(whole[:-5])
    text = world.ctl("trace", "show", cut).stdout
    assert "its recorder was killed" in text


def test_what_a_dead_expertd_left(world, chat):
    live = show(world)
    world.daemon.kill()
    world.daemon.wait()
    chat.process.kill()
    left = show(world)
    assert len(of(left, "issue")) == len(of(live, "issue")) > 0
    again = world.expertd()
    before = show(world, where(world, "events.before"))
    assert len(of(before, "issue")) == len(of(live, "issue"))
    assert not of(show(world), "issue")
    again.kill(signal.SIGTERM)
    assert again.wait() == 0
    assert not where(world, "events").exists() and not where(world, "events.before").exists()
    r = world.ctl("trace", "show", check=False)
    assert r.returncode == 2 and "no expertd runs here" in r.stderr, r.stderr


def text(data):
    return data.split(b"\0")[0].decode()


def test_an_outside_reader_needs_only_the_segment(world, chat):
    """Read here by the structs of shm/shm_event.h alone: kinds, fields and words come from the segment."""
    data = where(world, "events").read_bytes()
    assert data[:8] == b"EXDEVT01" and text(data[64:80]) == "expertd"
    infos, info_bytes, values, value_bytes, rings, ring_bytes, event_bytes = struct.unpack_from("=7I", data, 88)
    infos_at, values_at, rings_at = struct.unpack_from("=3Q", data, 120)
    kinds, words = {}, {}
    for at in range(infos_at, infos_at + infos * info_bytes, info_bytes):
        kind, _, n = data[at + 40:at + 43]
        kinds[kind] = text(data[at:at + 24]), [
            (text(data[f:f + 16]), *data[f + 16:f + 20]) for f in range(at + 48, at + 48 + 24 * n, 24)]
    for at in range(values_at, values_at + values * value_bytes, value_bytes):
        words[struct.unpack_from("=2I", data, at)] = text(data[at + 8:at + 32])
    found = collections.Counter()
    for at in range(rings_at, rings_at + rings * ring_bytes, ring_bytes):
        following, = struct.unpack_from("=Q", data, at)
        offset, capacity, first = struct.unpack_from("=3Q", data, at + 64)
        thread = text(data[at + 104:at + 120])
        for number in range(max(first, following - capacity, 0), following):
            e = offset + number % capacity * event_bytes
            word, at_ns = struct.unpack_from("=2Q", data, e)
            assert word >> 8 == number + 1 and at_ns
            name, fields = kinds[word & 0xff]
            fields = {f: int.from_bytes(data[e + 16 + o:e + 16 + o + n], "little") for f, o, n, _, _ in fields} | {
                f: words[s, int.from_bytes(data[e + 16 + o:e + 16 + o + n], "little")] for f, o, n, k, s in fields if k == 3}
            found[thread, name, json.dumps(fields, sort_keys=True)] += 1
    trace = show(world)
    told = collections.Counter((trace["tracks"][e["track"]]["thread"], e["event"], json.dumps(e["fields"], sort_keys=True))
                               for e in trace["events"])
    assert found == collections.Counter({k: n for k, n in told.items() if k[0] != "worker"}) and found
    # and expertctl knows no more than that: what the segment calls otherwise is shown as it calls it
    other = world.path / "other"
    other.write_bytes(data.replace(b"issue\0", b"hand!\0").replace(b"expert\0\0", b"number\0\0"))
    assert len([e for e in show(world, other)["events"] if e["event"] == "hand!" and "number" in e["fields"]]) == \
        len(of(trace, "issue"))
    other.write_bytes(b"EXDEVT99" + data[8:])
    r = world.ctl("trace", "show", other, check=False)
    assert r.returncode == 3 and "EXDEVT99" in r.stderr and "EXDEVT01" in r.stderr


def test_a_ring_that_went_around_says_so(world):
    world.daemon = world.expertd()
    c = Chat(world, "--floor", "8", "-n", "1", "--chunk", "8", "--temperature", "0")
    def older():
        c.ask(TEXT)
        return [t for t in show(world, "-n", "1")["tracks"] if t["thread"] == "issuer" and t["older"]]
    track = world.until(older, what="the issuer's ring went around")[0]
    assert track["events"] <= 16384 and track["lost"] == 0
    text = world.ctl("trace", "show", "-n", "1").stdout
    assert f"issuer: {track['older']} older ones were written over" in text
    assert check_trace.check(json.loads(world.ctl("trace", "export").stdout)) == []
    assert c.end() == 0


def test_events_can_be_off(world):
    off = {"EXPERTD_EVENTS": "0"}
    world.expertd(env=off)
    world.run("--prompt", TEXT, "--raw", *OPTIONS, env=off)
    assert not where(world, "events").exists()
    r = world.ctl("trace", "show", check=False)
    assert r.returncode == 2 and "EXPERTD_EVENTS" in r.stderr


def test_no_room_for_events_is_no_reason_to_fail(world):
    """Something else lies where the segment goes: expertd says so and serves."""
    where(world, "").mkdir(parents=True, mode=0o700)
    where(world, "events.new").mkdir()
    (where(world, "events.new") / "x").touch()
    d = world.expertd()
    assert "no events are kept" in d.text()
    world.run("--prompt", TEXT, "--raw", *OPTIONS)


def test_damaged_files_are_refused_or_shown(world, chat):
    """Each of many mutations of a recording and of a segment: an answer or one line, never a crash."""
    recorded, bad = world.path / "recorded", world.path / "bad"
    world.ctl("trace", "record", recorded, "--seconds", "0")
    segment = where(world, "events").read_bytes()[:200000]  # tables, the main loop's ring, some of an issuer's
    whole = recorded.read_bytes()
    rng = random.Random(5)
    seen = collections.Counter()
    evil = [0, 1, 0x7f, 0xff, 0xffff, 0x7fffffff, 0xffffffff, 1 << 31]
    for i in range(int(os.environ.get("EXPERTD_LONG") or 60)):
        data = bytearray(whole if i % 3 else segment)
        head = len(data) if i % 2 else 12000
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(0, head - 4)
            n = rng.choice((1, 2, 4))
            data[at:at + n] = rng.choice(evil).to_bytes(8, "little")[:n]
        if i % 7 == 0:
            del data[rng.randrange(0, len(data)):]
        bad.write_bytes(data)
        argv = ["trace", "export", bad] if i % 2 else ["trace", "show", bad, "-n", "100000"]
        r = subprocess.run([EXPERTCTL, *argv], capture_output=True, timeout=60 * SLOW)
        assert r.returncode in (0, 2, 3), (i, r.returncode, r.stderr)
        assert r.returncode == 0 or r.stderr.count(b"\n") == 1, r.stderr
        if r.returncode == 0 and i % 2:
            json.loads(r.stdout)
        seen[r.returncode] += 1
    assert seen[0] and seen[2], seen
    # each word of the first chunk of each kind
    at, heads = 32, {}
    while at < len(whole):
        kind, n = struct.unpack_from("=2I", whole, at)
        heads.setdefault(kind, (at, {1: 48, 2: 96, 3: 24}[kind]))
        at += 8 + n
    assert set(heads) == {1, 2, 3}
    for at, n in heads.values():
        for word in range(at, at + 8 + n, 4):
            bad.write_bytes(whole[:word] + b"\xfe\xff\xff\x7f" + whole[word + 4:])
            r = subprocess.run([EXPERTCTL, "trace", "export", bad], capture_output=True, timeout=60 * SLOW)
            assert r.returncode in (0, 2) and (r.returncode or json.loads(r.stdout)), (word - at, r.stderr)
    for content in (b"", b"EXDREC01", b"x" * 100, whole[:32] + b"\xff" * 64):
        bad.write_bytes(content)
        assert world.ctl("trace", "show", bad, check=False).returncode in (2, 3)
    assert world.ctl("trace", "show", world.path, check=False).returncode == 2
    for argv in (["trace", "nonsense"], ["trace", "show", "--watch", "1"], ["trace", "show", bad, bad], ["trace", "record"]):
        assert world.ctl(*argv, check=False).returncode == 2


@pytest.mark.parametrize("program,probes", [
    (EXPERTD, {"attach", "detach", "death", "fault", "stream_begin", "stream_end", "issue", "drop", "land", "land_seen",
               "publish_seen", "release_seen"}),
    (INFERD, {"join", "pass_begin", "pass_end", "publish", "release", "wait_begin", "wait_end"})])
def test_probes_are_there(program, probes):
    if not shutil.which("readelf"):
        pytest.skip("readelf is not there")
    notes = subprocess.run(["readelf", "-n", program], capture_output=True, text=True, check=True).stdout
    options = json.loads((BUILD / "meson-info/intro-buildoptions.json").read_text())
    with_probes = "-DEXPERTD_PROBES" in (BUILD / "compile_commands.json").read_text()
    if not with_probes:
        assert "Provider: expertd" not in notes and any(o["name"] == "probes" for o in options)
        pytest.skip("built without sys/sdt.h (systemtap-sdt-dev)")
    found = collections.defaultdict(set)
    for provider, name in zip(*[iter([line.split()[1] for line in notes.splitlines()
                                      if line.strip().startswith(("Provider:", "Name:"))])] * 2):
        found[provider].add(name)
    assert found == {program.name: probes}


def test_files_of_events_are_not_written_over(world, tmp_path):
    d = world.expertd()
    events, recorded, other = where(world, "events"), tmp_path / "r", tmp_path / "other"
    world.ctl("trace", "record", recorded, "--seconds", "0")
    world.ctl("trace", "record", recorded, "--seconds", "0")  # a recording is replaced
    other.write_text("a letter")
    length = events.stat().st_size
    for argv in (["record", events, "--seconds", "0"], ["record", other, "--seconds", "0"],
                 ["export", "--output", events], ["export", recorded, "--output", recorded]):
        r = world.ctl("trace", *argv, check=False)
        assert r.returncode == 2 and "name another file" in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr
    assert events.stat().st_size == length and other.read_text() == "a letter"
    show(world, recorded)
    os.truncate(events, 0)  # by somebody else: one line instead of a signal
    world.ctl("stop", check=False)
    assert d.wait() == 1 and "was truncated while it was in use" in d.text()


def test_a_recording_keeps_nothing_of_workers_that_are_gone(world, tmp_path):
    world.expertd()
    p = world.spawn([EXPERTCTL, "trace", "record", tmp_path / "r", *world.where()], stdout=subprocess.DEVNULL)

    def mapped():
        with open(f"/proc/{p.pid}/maps") as f:
            return sum("memfd" in line for line in f)

    world.until(lambda: (tmp_path / "r").exists(), what="the recording begins")
    c = Chat(world, *OPTIONS)
    c.ask("Hello.")
    world.until(lambda: mapped() == 1, what="the worker's events are mapped")
    c.end()
    world.until(lambda: mapped() == 0, what="they are given back")
    p.send_signal(signal.SIGINT)
    assert p.wait(30 * SLOW) == 0
    trace = show(world, tmp_path / "r")
    assert of(trace, "pass_end", "worker") and not any(t["lost"] for t in trace["tracks"])


def test_errors_name_object_cause_and_remedy(world):
    def error(*argv, status=2):
        r = world.ctl("trace", *argv, check=False)
        (line,) = r.stderr.splitlines()
        assert r.returncode == status and line.startswith("expertctl: "), (r.returncode, line)
        return line.removeprefix("expertctl: ")

    name_one = "name a file that 'expertctl trace record' wrote, or none for what runs"
    file = world.path / "file"
    assert error("show", file) == f"{file}: No such file or directory: {name_one}"
    assert error("show", world.path) == f"{world.path}: is not a regular file: {name_one}"
    head = struct.pack("=8sIIQQ", b"EXDREC01", 0x01020304, 0, 0, 0)
    source = struct.pack("=2I", 1, 48) + bytes(48)
    for content, cause, status in (
            (b"x" * 40, "neither a recording nor the events of an expertd", 3),
            (b"x", "damaged: it is too short", 2),
            (head[:8] + head[7::-1] + head[16:], "damaged: another byte order", 2),
            (head + struct.pack("=2I", 1, 1 << 30), "damaged: a chunk that is too large", 2),
            (b"EXDEVT" + bytes(2), "damaged: it is too short", 2)):
        file.write_bytes(content)
        assert error("show", file, status=status) == f"{file}: {cause}: {name_one}"
    file.write_bytes(head + 4097 * source)
    assert re.fullmatch(rf"{file}: more than 4096 processes, .*: record for a shorter time", error("show", file))
    file.write_bytes(head + source)
    for out, cause in ((world.path, "Is a directory: name another file with --output"),
                       ("/dev/full", "No space left on device; make room there: name another file with --output")):
        assert error("export", file, "-o", out) == f"{out}: {cause}"
    world.expertd(env={"EXPERTD_EVENTS": "0"})
    assert error("show") == (f"{where(world, 'events')}: No such file or directory: no expertd runs here, or one without "
                             "events: start one without EXPERTD_EVENTS=0")
    world.expertd(instance="b")
    r = world.ctl("trace", "record", "/dev/full", "--seconds", "0", check=False, instance="b")
    assert r.stderr == "expertctl: /dev/full: No space left on device; make room there: name another file\n"


@pytest.mark.parametrize("argv", ["show -o x", "show --seconds 1", "record x -p 1", "record x -n 1", "export -n 1",
                                  "show -n 0.5", "show -p 1.5"])
def test_options_that_would_do_nothing_are_refused(world, argv):
    r = world.ctl("trace", *argv.split(), check=False)
    assert r.returncode == 2 and "--help" in r.stderr, r.stderr
