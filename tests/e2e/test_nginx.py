# SPDX-License-Identifier: MIT
"""One address: a real nginx, configured by tools/nginx/expertd-nginx, before real workers; and two hosts, which are
two network namespaces with an expertd each."""
import json
import os
import re
import shutil
import socket
import subprocess
import time

import pytest
from conftest import BUILD, INFERD, SLOW, TOP, World
from load import Load
from serving import Server

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(not NGINX, reason="no nginx (tools/setup --tests installs it)")


def free_ports(n):
    """n free ports in a row."""
    for base in range(21080, 31000, 97):
        held = []
        try:
            for i in range(n):
                s = socket.socket()
                held.append(s)
                s.bind(("127.0.0.1", base + i))
            return base
        except OSError:
            continue
        finally:
            for s in held:
                s.close()
    raise AssertionError("no free ports")


class Nginx(Server):
    """nginx before these workers (ADDRESS:PORT)."""

    def __init__(self, world, *workers):
        self.world = world
        base = free_ports(len(workers) + 2)
        self.port = base
        made = subprocess.run([str(TOP / "tools/nginx/expertd-nginx"), "--listen", f"127.0.0.1:{base}", "--inner",
                               str(base + 1), "--retry", "1", "--standalone", str(world.path / "nginx"), *workers],
                              capture_output=True, text=True, check=True)
        (world.path / "nginx.conf").write_text(made.stdout)
        self.process = world.spawn([NGINX, "-c", world.path / "nginx.conf", "-e", "stderr", "-g", "master_process off;"],
                                   stdout=subprocess.DEVNULL)

        def answers():
            assert self.process.poll() is None, self.log()
            try:
                return self.get("/health")[0] == 200
            except OSError:
                return False
        world.until(answers, what="nginx answers")

    def ask(self, conversation, **kw):
        """(worker that answered, body)"""
        status, headers, body = self.post("/v1/completions", {"prompt": f"Once upon a time {conversation}", "max_tokens": 1,
                                                              "temperature": 0, **kw},
                                          headers={"X-Conversation-Id": conversation})
        assert status == 200, (status, body)
        return headers["X-Worker"], body


def submitted(server):
    return server.status()["queue"]["submitted"]


def address(server):
    return f"127.0.0.1:{server.port}"


def test_one_address(world):
    world.expertd()
    a, b = Server(world), Server(world)
    front = Nginx(world, address(a), address(b))
    names = [f"chat-{i}" for i in range(12)]

    # Sticky, and both are used; the second turn finds what the first left.
    homes = {n: front.ask(n)[0] for n in names}
    assert set(homes.values()) == {address(a), address(b)}
    for n in names:
        worker, body = front.ask(n)
        assert worker == homes[n]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for headers in ({"Cookie": "conversation=x1"}, {"Authorization": "Bearer k1"}, {"X-Api-Key": "k2"}, {}):
        seen = {front.get("/v1/models", headers=headers)[1]["X-Worker"] for _ in range(4)}
        assert len(seen) == 1, headers

    # Streams come through as they are made; who leaves is noticed behind two hops.
    c = front.connect()
    c.request("POST", "/v1/completions", json.dumps({"prompt": "Once", "max_tokens": 2000, "ignore_eos": True,
                                                     "stream": True}), {"X-Conversation-Id": names[0]})
    r = c.getresponse()
    assert r.status == 200 and r.headers["Content-Type"] == "text/event-stream"
    assert r.readline().startswith(b"data: ")
    home = a if r.headers["X-Worker"] == address(a) else b
    assert home.status()["running"], "the first event is here while the answer is being made"
    r.close()
    c.close()
    home.until_status(lambda s: not s["running"], "cancelled")

    # One drains: its conversations are answered elsewhere, always by the same one; back after its restart.
    world.ctl("workers", "drain", a.process.pid)
    assert {front.ask(n)[0] for n in names} == {address(b)}
    assert front.get("/health")[0] == 200
    world.ctl("workers", "drain", b.process.pid)
    status, headers, body = front.post("/v1/completions", {"prompt": "x"})
    assert status == 503 and headers["Retry-After"] and body["error"]["message"], "none left: the worker's own words"
    assert front.get("/health")[0] == 503
    world.ctl("workers", "restart", "--all")
    assert {n: front.ask(n)[0] for n in names} == homes

    # One is killed in the middle of an answer: that one is lost and not computed again, others move on.
    mine = next(n for n in names if homes[n] == address(a))
    before = submitted(b)
    c = front.connect()
    c.request("POST", "/v1/completions", json.dumps({"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}),
              {"X-Conversation-Id": mine})
    a.until_status(lambda s: s["running"], "runs")
    a.process.kill()
    a.process.wait()
    assert c.getresponse().status == 502
    c.close()
    assert submitted(b) == before, "never twice"
    assert {front.ask(n)[0] for n in names} == {address(b)}

    # Another in its place.
    a = Server(world, listen=address(a))
    world.until(lambda: {n: front.ask(n)[0] for n in names} == homes, what="back home", timeout=30, every=0.2)


@pytest.mark.slow
def test_rolling_restarts_behind_one_address(world):
    """Nobody in front of nginx sees any of it."""
    world.expertd()
    servers = [Server(world) for _ in range(2)]
    front = Nginx(world, *map(address, servers))
    with Load([front.port], clients=16, tokens=6, headers=lambda i: {"X-Conversation-Id": f"c{i}"}) as load:
        world.until(lambda: load.done() > 16, what="load", timeout=60)
        out = world.ctl("workers", "restart", "--all").stdout
        assert out.count("ready again") == 2
        before = load.done()
        world.until(lambda: load.done() > before + 16, what="answers after it", timeout=60)
    load.report("rolling restart behind nginx")
    assert load.bad() == []
    assert {r.worker for r in load.requests} == set(map(address, servers))


# ---- two hosts


def ip(*argv):
    return subprocess.run(["ip", *argv], capture_output=True, text=True)


class Host:
    """A network namespace with a runtime directory, an expertd and a worker of its own."""

    def __init__(self, world, number):
        self.space, self.link = f"xd{os.getpid() % 100000}-{number}", f"xd{os.getpid() % 100000}v{number}"
        net = f"198.{18 + os.getpid() % 2}.{os.getpid() // 2 % 120 * 2 + number}"  # the range for tests of networks
        self.address = f"{net}.2"
        for step in (["netns", "add", self.space],
                     ["link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.space],
                     ["addr", "add", f"{net}.1/24", "dev", self.link],
                     ["link", "set", self.link, "up"],
                     ["-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0"],
                     ["-n", self.space, "link", "set", "eth0", "up"],
                     ["-n", self.space, "link", "set", "lo", "up"]):
            r = ip(*step)
            if r.returncode:
                self.remove()
                pytest.skip(f"no network namespaces here: ip {' '.join(step)}: {r.stderr.strip()}")
        path = world.path / f"host{number}"
        path.mkdir()
        self.world = World(path)
        spawn = self.world.spawn
        self.world.spawn = lambda argv, **kw: spawn(["ip", "netns", "exec", self.space, *argv], **kw)

    def start(self):
        self.world.expertd()
        log = self.world.spawn([INFERD, "serve", *self.world.where(), "--listen",
                                f"{self.address}:8080"], stdout=subprocess.DEVNULL).log
        self.world.until(lambda: "serving" in log.read_text(), what="serves")
        return f"{self.address}:8080"

    def cut(self, off):
        """At its own end: the way there is still known in front, and leads nowhere."""
        assert ip("-n", self.space, "link", "set", "eth0", "down" if off else "up").returncode == 0

    def remove(self):
        ip("link", "del", self.link)
        ip("netns", "del", self.space)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(not shutil.which("ip"), reason="no ip (iproute2)")
def test_two_hosts_one_cut_off(world):
    hosts = []
    try:
        for number in (0, 1):
            hosts.append(Host(world, number))
        workers = [h.start() for h in hosts]
        front = Nginx(world, *workers)
        names = [f"chat-{i}" for i in range(8)]
        homes = {n: front.ask(n)[0] for n in names}
        assert set(homes.values()) == set(workers)
        hosts[0].cut(True)
        began = time.monotonic()
        assert {front.ask(n)[0] for n in names} == {workers[1]}
        print(f"one of two hosts cut off: {len(names)} conversations went on in {time.monotonic() - began:.2f} s")
        hosts[0].cut(False)
        world.until(lambda: {n: front.ask(n)[0] for n in names} == homes, what="back home", timeout=60, every=0.2)
    finally:
        for h in hosts:
            h.world.close()
            h.remove()


def test_commands_of_the_page(world):
    """The first block of doc/serve-many.md, as it is but for ports and places."""
    section = (TOP / "doc/serve-many.md").read_text().split("## Two workers behind one address\n")[1].split("\n## ")[0]
    commands = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    assert len(commands) == 12
    base = free_ports(6)
    script = "set -m\n" + "\n".join(f"{c}\necho; echo --" for c in commands) + "\nwait\n"
    for i in range(3):
        script = script.replace(f":{8080 + i}", f":{base + i}")
    script = script.replace("127.0.0.1:808{1,2,0}", f"127.0.0.1:{{{base + 1},{base + 2},{base}}}")
    script = script.replace("$PWD/build/nginx", f"{world.path}/nginx").replace("build/nginx", f"{world.path}/nginx")
    script = script.replace("build/", f"{BUILD}/").replace("--standalone", f"--inner {base + 3} --standalone")
    script = script.replace("expertd --model", f"expertd --arena-dir {world.arena} --model")
    r = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120 * SLOW, cwd=TOP,
                       env={**os.environ, "XDG_RUNTIME_DIR": str(world.runtime)})
    parts = [p.strip() for p in r.stdout.split("--\n")]
    assert parts[6].count('"status":"ok"') == 3, r.stderr
    workers = [re.search(r"^X-Worker: (\S+)", parts[i], re.M)[1] for i in (7, 10)]
    assert workers[0] == workers[1], "the same conversation, the same worker"
    assert len(re.findall(r" ready .*http", parts[8])) == 2 and parts[9].count("ready again") == 2, r.stdout
