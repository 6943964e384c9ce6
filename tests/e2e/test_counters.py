# SPDX-License-Identifier: MIT
"""Counters of real daemons: names agree everywhere, numbers add up, Prometheus takes them."""
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from conftest import BUILD, Chat, EXPERTCTL, SLOW
from serving import Server

TALE = "Tell me a long tale of a fox, a bear, a wolf and a bird. " * 8
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: tools/setup --tests installs it")


def counters(world, *options):
    return json.loads(world.ctl("counters", "--json", "--detail", *options).stdout)


def samples(text):
    """{'name{labels}': value} of Prometheus text."""
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


def check_metrics(text):
    r = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30 * SLOW)
    assert r.returncode == 0 and not r.stderr, r.stderr


def test_list_manual_and_prometheus_agree(world):
    """One text makes them all."""
    listed = json.loads(world.ctl("counters", "--list", "--json").stdout)
    page = (BUILD / "shm/expertd-counters.7.scd").read_text().replace("\\", "")
    for c in listed:
        assert re.search(rf"^\*{c['name']}\* \({c['kind']}", page, re.M), c
        assert c["help"] in page and (c["metric"] is None or f"Prometheus: *{c['metric']}*" in page)
    blocks = {c["block"] for c in listed}
    assert blocks == {"store", "link", "layer", "compute", "server"}
    text = world.ctl("counters", "--list").stdout
    assert all(c["help"] in text for c in listed)
    world.expertd()
    chat = Chat(world, "--temperature", "0", "-n", "1", "--ignore-eos")
    chat.ask("Once")
    shown = set(re.findall(r"^# TYPE (\w+) ", world.ctl("metrics", "--detail").stdout, re.M))
    assert shown == {c["metric"] for c in listed if c["metric"] and c["block"] != "server"}
    basic = set(re.findall(r"^# TYPE (\w+) ", world.ctl("metrics").stdout, re.M))
    assert basic == {c["metric"] for c in listed if c["metric"] and c["level"] == "basic" and c["block"] != "server"}


@pytest.mark.parametrize("policy", ["routed", "full"])
def test_numbers_add_up(world, policy):
    world.expertd("--stream", policy)
    chat = Chat(world, "--link-gbps", "0.2", "--temperature", "0", "-n", "4", "--ignore-eos", "--chunk", "64", "--floor",
                "32", "--resident", "2")
    turn = chat.ask(TALE)
    (w,) = counters(world)["workers"]
    link, layers = w["link"], w["layers"]
    chunks = turn["stream"]["chunks"] + turn["decode_stream"]["chunks"]
    both = lambda key: turn["stream"][key] + turn["decode_stream"][key]
    assert link["streams"] == {"ok": chunks, "cancelled": 0, "failed": 0}
    copies, drops = link["link_copies"], link["stream_drops"]
    assert sum(copies.values()) == both("copied") and sum(drops.values()) == both("dropped")
    assert copies["ahead_wasted"] == both("wasted") and link["stream_routed"] == both("routed")
    assert link["stream_entries"] == both("entries") == sum(copies.values()) + sum(drops.values())
    assert sum(copies.values()) - copies["ahead_wasted"] == link["stream_routed"], "each routed one once"
    assert copies["demand"] == turn["decode_stream"]["copied"] and copies["unknown"] == copies["resident"] == 0
    assert drops["demand"] == turn["decode_stream"]["dropped"] and drops["cancelled"] == 0
    assert (drops["unrouted"] == 0 and copies["ahead_wasted"] > 0) if policy == "full" else drops["unrouted"] > 0
    bytes_ = dict(link["link_bytes"])
    assert bytes_.pop("resident") == w["compute"]["resident_fill_bytes"] == w["compute"]["resident_bytes"] > 0
    assert sum(bytes_.values()) == both("bytes_copied")
    for name, total in (("entries", link["stream_entries"]), ("routed", link["stream_routed"]),
                        ("copied", sum(copies.values())), ("wasted", copies["ahead_wasted"])):
        assert sum(x[f"layer_{name}"] for x in layers) == total, name
    lags = link["router_to_last_copy_ns"]
    assert lags["count"] == sum(lags["buckets"]) == sum(x["layer_lags"] for x in layers) > 0
    assert lags["sum"] == sum(x["layer_lag_ns"] for x in layers)
    assert link["stream_resident_hits"] > 0 and 0 < link["resident_hit"] < 1
    assert 0 < link["link_rate"] <= 1.1 * link["link_pace"] == pytest.approx(0.22e9, rel=1e-6)
    assert sum(link["ring_slots"].values()) * 32 <= link["ring_bytes"] and link["worker_streaming"] == 0


def test_store_counts_lives_and_memory(world):
    d = world.expertd()
    store = world.until(lambda: (s := counters(world)["store"])["arena_page_bytes"] and s, what="its memory was looked at")
    assert store["load_bytes"] == store["load_wanted_bytes"] > 0 and store["io_bytes"] >= store["load_bytes"]
    assert store["io_depth"] > 0 and store["io_reads"] > 0 and store["io_in_flight"] == 0 and store["file_rate"] > 0
    assert store["arena_page_bytes"] >= 4096 and store["arena_pinned_bytes"] <= store["arena_bytes"]
    assert store["state"]["serving"] == 1 and sum(store["state"].values()) == 1
    assert store["arena_generation"] == 1 and store["arena_adopted"] == 0
    for _ in range(2):
        chat = Chat(world)
        world.until(lambda: counters(world)["store"]["workers"], what="attached")
        chat.process.kill()
        chat.process.wait()
        world.until(lambda: not counters(world)["store"]["workers"], what="gone")
    chat = Chat(world)
    world.until(lambda: counters(world)["store"]["workers"], what="attached")
    assert chat.end() == 0
    world.until(lambda: counters(world)["store"]["detaches"] == 1, what="detached")
    now = counters(world)["store"]
    assert (now["attaches"], now["deaths"]) == (3, 2)
    d.kill()
    d.wait()
    r = world.ctl("counters", "--json", check=False)
    assert r.returncode == 1 and json.loads(r.stdout)["store"]["up"] == 0, "it tells what a dead one left"
    world.expertd()
    again = counters(world)["store"]
    assert again["arena_generation"] == 2 and again["arena_adopted"] == 1 and again["attaches"] == 0
    assert again["start_time_ns"] > store["start_time_ns"]


def test_watch_shows_what_happened_between(world):
    world.expertd()
    chat = Chat(world, "--temperature", "0", "-n", "2", "--ignore-eos")
    chat.ask("Once")
    p = world.spawn([EXPERTCTL, "counters", "--watch", "0.05", *world.where()], stdout=subprocess.PIPE, text=True)
    seen = ""
    while seen.count("expertd ") < 2:
        seen += p.stdout.readline()
    chat.ask("More")
    while not re.search(r"stream_tokens +\d+ tokens  \+\d+\n", seen):
        seen += p.stdout.readline()
    p.send_signal(signal.SIGINT)
    p.communicate(timeout=20 * SLOW)
    assert p.returncode == 0


def test_server_counts_where_others_can_look(world):
    """What /metrics says is in shared memory, over the lives of expertd; and its names are those of the list."""
    d = world.expertd()
    server = Server(world, "--queue", "8")
    server.complete(max_tokens=4)
    server.post("/v1/completions", {"prompt": "x", "n": 2})
    (w,) = counters(world)["workers"]
    seen = w["server"]
    assert seen["written_tokens"] == 4 and seen["answers"]["length"] == 1 and seen["queue_limit"] == 8
    assert seen["http_responses"]["/v1/completions"] == {"200": 1, "400": 1} and seen["ready"] == 1
    assert seen["queue_waiting"] == seen["queue_oldest_ns"] == seen["running"] == 0 and seen["queue_submitted"] == 1
    assert seen["first_token_ns"]["count"] == 1 and seen["token_gap_ns"]["count"] == 3
    assert seen["stream_tokens"]["decode"] == 3 and seen["decode_rate"] > 0
    text = server.get("/metrics")[2].decode()
    values = samples(text)
    assert values["inferd_written_tokens_total"] == 4 and values["inferd_kv_blocks"] > 0
    listed = json.loads(world.ctl("counters", "--list", "--json").stdout)
    assert set(re.findall(r"^# TYPE (\w+) ", text, re.M)) == {c["metric"] for c in listed
                                                              if c["metric"] and c["block"] == "server"}
    if shutil.which("promtool"):
        check_metrics(text)
    # More requests than run at once: they wait, and it shows.
    jobs = []
    queue = lambda: counters(world)["workers"][0]["server"]
    while queue()["queue_waiting"] < 3:
        assert len(jobs) < 200
        jobs.append(server.start_stream(max_tokens=2000))
        time.sleep(0.02)
    now = queue()
    assert now["running"] > 0 and now["queue_oldest_ns"] > 0
    for s in jobs:
        s.close()
    world.until(lambda: queue()["running"] + queue()["queue_waiting"] == 0, what="it is quiet")
    d.kill()
    d.wait()
    world.expertd()
    server.until_status(lambda t: t["state"] == "ready", "attached again")
    # It may be seen, and say that it is ready, a moment before it counts that it attached.
    again = world.until(lambda: (ws := counters(world)["workers"]) and (s := ws[0].get("server")) and s["attached_again"] == 1 and s,
                        what="it is seen again")
    assert again["written_tokens"] >= 4, "its numbers go on"


@needs_promtool
def test_promtool_takes_expertds_metrics(world):
    world.expertd()
    chats = [Chat(world, "--temperature", "0", "-n", "2", "--ignore-eos") for _ in range(2)]
    for chat in chats:
        chat.ask("Once upon a time")
    check_metrics(world.ctl("metrics").stdout)
    check_metrics(world.ctl("metrics", "--detail").stdout)


def test_textfile_is_written_whole(world):
    world.expertd()
    path = world.path / "expertd.prom"
    world.ctl("metrics", "--output", path)
    assert samples(path.read_text())['expertd_up{store="default"}'] == 1
    assert [p.name for p in world.path.glob("expertd.prom*")] == ["expertd.prom"]
    r = world.ctl("metrics", "--output", world.path / "no/such", check=False)
    assert r.returncode == 1 and "cannot be written" in r.stderr


class Responder:
    def __init__(self, world, *options, listen="0"):
        self.process = world.spawn([EXPERTCTL, "metrics", "--listen", listen, *options, *world.where()],
                                   stdout=subprocess.DEVNULL)
        told = lambda: re.search(r"on port (\d+)", self.process.log.read_text())
        world.until(lambda: self.process.poll() is not None or told(), what="it listens")
        assert self.process.poll() is None, self.process.log.read_text()
        self.port = int(told().group(1))

    def get(self, path="/metrics", method="GET"):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30 * SLOW)
        c.request(method, path)
        r = c.getresponse()
        body = r.read().decode()
        c.close()
        return r.status, r.headers, body


def test_metrics_over_http(world):
    m = Responder(world)
    status, headers, text = m.get()
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert samples(text) == {'expertd_up{store="default"}': 0}, "no expertd is a measurement, too"
    d = world.expertd()
    assert samples(m.get()[2])['expertd_up{store="default"}'] == 1
    assert m.get("/")[0] == 404 and m.get(method="POST")[0] == 405
    assert m.get(method="HEAD")[2] == ""
    # Clients that send nothing, garbage, too much, or leave keep nobody waiting.
    idle = [socket.create_connection(("127.0.0.1", m.port)) for _ in range(3)]
    for junk in (b"\0" * 100 + b"\r\n\r\n", b"GET /metrics" + b"x" * 9000, b"G"):
        s = socket.create_connection(("127.0.0.1", m.port))
        s.sendall(junk)
        s.close()
    assert m.get()[0] == 200
    d.kill()
    d.wait()
    assert samples(m.get()[2])['expertd_up{store="default"}'] == 0
    for s in idle:
        s.close()
    m.process.send_signal(signal.SIGTERM)
    assert m.process.wait(20 * SLOW) == 0


@pytest.mark.parametrize("where", ["0.0.0.0:0", "192.0.2.1:0", "127.0.0.1:99999", "[::]:0", "nonsense"])
def test_metrics_listen_on_loopback_only(world, where):
    r = subprocess.run([str(EXPERTCTL), "metrics", "--listen", where, *world.where()], capture_output=True, text=True,
                       timeout=20 * SLOW)
    assert r.returncode == 2 and len(r.stderr.splitlines()) == 1 and "--listen" in r.stderr
