# SPDX-License-Identifier: MIT
"""Several workers: draining, restarts in place, all of them in turn under load, expertd's own restarts."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest
from conftest import EXPERTCTL, INFERD, SLOW, die_with_parent
from load import Load
from serving import Server

LONG = int(os.environ.get("EXPERTD_LONG", "0"))  # rolling restarts of the long variant


def records(world, instance="default"):
    return sorted(int(p.name[6:]) for p in (world.runtime / "expertd" / instance).glob("serve-*[0-9]"))


def finish_stream(s):
    data = b""
    while got := s.recv(65536):
        data += got
    s.close()
    return data


def test_a_drained_worker_finishes_and_refuses(world):
    world.expertd()
    server, other = Server(world), Server(world)
    assert records(world) == sorted([server.process.pid, other.process.pid])
    before = server.start_stream(max_tokens=150)
    server.until_status(lambda s: s["running"], "runs")
    r = subprocess.Popen([str(EXPERTCTL), "workers", "drain",
                          str(server.process.pid), *world.where()], stdout=subprocess.PIPE, text=True,
                         preexec_fn=die_with_parent)
    world.until(lambda: server.get("/health")[0] == 503, what="/health says so")
    status, headers, body = server.post("/v1/completions", {"prompt": "x"})
    assert status == 503 and headers["Retry-After"] and "drained" in body["error"]["message"]
    assert other.get("/health")[0] == 200
    data = finish_stream(before)
    assert b"[DONE]" in data and b'"error"' not in data
    out = r.communicate(timeout=30 * SLOW)[0]
    assert r.returncode == 0 and re.search(rf"worker {server.process.pid} .*drained", out), out
    shown = world.ctl("workers").stdout
    assert re.search(rf"{server.process.pid} drained .*{server.url}", shown), shown
    assert re.search(rf"{other.process.pid} ready .*{other.url}", shown), shown
    # Back by a restart: same process, same port.
    out = world.ctl("workers", "restart", server.process.pid).stdout
    assert re.search("ready again after", out)
    assert server.get("/health")[0] == 200 and server.complete(max_tokens=2)
    assert server.stop() == 0
    assert records(world) == [other.process.pid]


def test_a_restart_in_place_keeps_port_and_descriptors(world):
    world.expertd()
    server = Server(world)
    pid, text = server.process.pid, server.complete(max_tokens=8)["choices"][0]["text"]
    session = server.status()["expertd"]["session"]
    world.ctl("workers", "restart", pid)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(3):
        out = json.loads(world.ctl("workers", "restart", "--all", "--json").stdout)
        assert [(w["pid"], w["url"], w["restart"]) for w in out] == [(pid, server.url, True)]
        assert out[0]["seconds"] >= out[0]["drained_s"] >= 0
    assert len(os.listdir(f"/proc/{pid}/fd")) == descriptors
    assert server.complete(max_tokens=8)["choices"][0]["text"] == text
    assert server.status()["expertd"]["session"] > session
    assert server.process.poll() is None and server.stop() == 0


def test_a_connection_waits_over_a_restart(world):
    """What arrives when nothing runs any more is answered by the next life."""
    world.expertd()
    server = Server(world)
    busy = server.start_stream(max_tokens=150)
    server.until_status(lambda s: s["running"], "runs")
    server.process.send_signal(signal.SIGUSR2)
    answers = set()

    def next_life():
        answers.add(server.get("/health")[0])  # never refused, never broken
        return server.log().count("serving '") == 2
    world.until(next_life, what="the next life", timeout=60)
    assert server.get("/health")[0] == 200 and answers <= {200, 503}
    assert b"[DONE]" in finish_stream(busy)
    assert server.stop() == 0


def test_a_restart_takes_the_new_program_or_none(world):
    program = world.path / "inferd"
    shutil.copy(INFERD, program)
    world.expertd()
    process = world.spawn([program, "serve", *world.where(), "--listen", "127.0.0.1:0"], stdout=subprocess.DEVNULL)
    world.until(lambda: records(world), what="serves")
    program.rename(world.path / "away")
    r = world.ctl("workers", "restart", process.pid, check=False)
    assert r.returncode == 1 and "goes on as it is" in r.stderr and "install it again" in r.stderr
    assert "ready" in world.ctl("workers").stdout
    shutil.copy(INFERD, program)  # an upgrade: another file under the name
    world.ctl("workers", "restart", process.pid)
    assert os.readlink(f"/proc/{process.pid}/exe") == str(program)
    process.terminate()
    assert process.wait(20 * SLOW) == 0


def test_workers_command_says_what_is_wrong(world):
    world.expertd()
    r = world.ctl("workers", "restart", check=False)
    assert r.returncode == 1 and "--all" in r.stderr
    r = world.ctl("workers", "restart", "--all", check=False)
    assert r.returncode == 1 and "inferd serve" in r.stderr
    r = world.ctl("workers", "drain", os.getpid(), check=False)
    assert r.returncode == 1 and str(os.getpid()) in r.stderr
    for words in (["workers", "jump"], ["workers", "drain", "x"]):
        assert world.ctl(*words, check=False).returncode == 2
    server = Server(world)
    pid = server.process.pid
    server.process.kill()
    server.process.wait()
    r = world.ctl("workers", "restart", pid, check=False)
    assert r.returncode == 1 and "has ended" in r.stderr
    Server(world)  # sweeps what the killed one left
    assert pid not in records(world)


class Notified:
    """What systemd would be told."""

    def __init__(self, world):
        self.path = world.path / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.settimeout(20 * SLOW)

    def env(self, watchdog_ms):
        return {**os.environ, "NOTIFY_SOCKET": str(self.path), "WATCHDOG_USEC": str(watchdog_ms * 1000)}

    def until(self, wanted):
        while True:
            text = self.socket.recv(1000).decode()
            if wanted in text:
                return text

    def silent(self, s):
        """No pet for s seconds."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1000):
                pass
        except BlockingIOError:
            pass
        self.socket.settimeout(s)
        try:
            return "WATCHDOG" not in self.socket.recv(1000).decode()
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(20 * SLOW)


def test_expertd_tells_its_manager(world):
    n = Notified(world)
    d = world.expertd(wait=False, env=n.env(watchdog_ms=600))
    n.until("READY=1")
    for _ in range(3):
        n.until("WATCHDOG=1")
    d.kill(signal.SIGSTOP)
    world.until(lambda: n.silent(1.2), what="no pets")
    d.kill(signal.SIGCONT)
    n.until("WATCHDOG=1")
    d.kill(signal.SIGTERM)
    n.until("STOPPING=1")
    assert d.wait() == 0


def test_inferd_is_petted_only_while_it_gets_on(world):
    """A request that is computed but gets nowhere (its expertd is stopped in the middle of a read)."""
    d = world.expertd("--link-gbps", "0.001")
    n = Notified(world)
    s = Server(world, "--chunk", "64", env=n.env(watchdog_ms=1500))
    n.until("READY=1")
    n.until("WATCHDOG=1")
    stream = s.start_stream(prompt="word " * 500, max_tokens=400)
    s.until_status(lambda t: t["running"], "runs")
    n.until("WATCHDOG=1")
    n.until("WATCHDOG=1")
    d.kill(signal.SIGSTOP)
    world.until(lambda: n.silent(2), what="stuck: no pets", timeout=30)
    assert s.get("/v1/status")[0] == 200  # although the loop itself lives
    d.kill(signal.SIGCONT)
    n.until("WATCHDOG=1")
    stream.close()


def test_socket_activation_harness(world):
    """Two lives of a unit on one socket, as systemd would run them: clients wait in between."""
    world.expertd()
    n = Notified(world)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)
    port = listening.getsockname()[1]
    shell = f'LISTEN_PID=$$ LISTEN_FDS=1 WATCHDOG_PID=$$ exec "$@" 3<&{listening.fileno()}'

    def start():
        p = world.spawn(["bash", "-c", shell, "bash", INFERD, "serve", *world.where()],
                        pass_fds=(listening.fileno(),), env=n.env(watchdog_ms=2000))
        return p

    def ask():
        s = socket.create_connection(("127.0.0.1", port), timeout=60 * SLOW)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return s
    for _ in range(2):
        waiting = ask()  # nobody serves
        p = start()
        n.until("READY=1")
        n.until("WATCHDOG=1")
        assert finish_stream(waiting).startswith(b"HTTP/1.1 200")
        p.send_signal(signal.SIGUSR2)  # and the one in place
        n.until("READY=1")
        assert finish_stream(ask()).startswith(b"HTTP/1.1 200")
        p.terminate()
        n.until("STOPPING=1")
        assert p.wait(20 * SLOW) == 0
    listening.close()


# ---- under load


def rolling(world, clients, restarts, tokens=6):
    world.expertd()
    servers = [Server(world) for _ in range(2)]
    reference = servers[0].complete("Once upon a time", max_tokens=tokens)["choices"][0]["text"]
    with Load([s.port for s in servers], clients=clients, tokens=tokens) as load:
        world.until(lambda: load.done() > clients, what="load", timeout=60)
        for i in range(restarts):
            before = load.done()
            out = world.ctl("workers", "restart", "--all").stdout
            print(out, end="")
            assert out.count("ready again") == len(servers)
            world.until(lambda: load.done() > before, what="answers after a restart", timeout=60)
    load.report(f"{restarts} rolling restarts of {len(servers)} workers")
    assert load.bad() == [], "every request could be retried"
    assert servers[0].complete("Once upon a time", max_tokens=tokens)["choices"][0]["text"] == reference
    for s in servers:
        assert s.log().count("serving '") == 1 + restarts
        assert s.stop() == 0


def test_rolling_restarts_lose_no_request(world):
    rolling(world, clients=64 if SLOW == 1 else 16, restarts=2 if SLOW == 1 else 1)


@pytest.mark.skipif(not LONG, reason="EXPERTD_LONG=10: ten rolling restarts")
def test_rolling_restarts_long(world):
    rolling(world, clients=64, restarts=LONG)


def test_expertd_restarts_under_load(world):
    """Killed, then ended as it should be: requests in flight finish or fail with a clear line, none hangs."""
    clients = 64 if SLOW == 1 else 16
    d = world.expertd("--drain-ms", "300")
    servers = [Server(world, "--resume-seconds", "5") for _ in range(2)]
    with Load([s.port for s in servers], clients=clients, tokens=6) as load:
        world.until(lambda: load.done() > clients, what="load", timeout=60)
        for sig in (signal.SIGKILL, signal.SIGTERM):
            d.kill(sig)
            d.wait()
            began = time.monotonic()
            d = world.expertd("--drain-ms", "300")
            assert world.status()["adopted"]
            before = load.done()
            world.until(lambda: load.done() > before + clients, what="answers by the next expertd", timeout=60)
            print(f"expertd ended by {signal.Signals(sig).name}: {clients} more answers "
                  f"{time.monotonic() - began:.2f} s after its end")
    load.report("expertd killed, then restarted")
    assert load.bad(allowed=("failed",)) == []
    failed = [r for r in load.requests if r.outcome == "failed"]
    lines = sorted({re.sub("[0-9]+", "N", r.why) for r in failed})
    print(f"failed with a clear line: {len(failed)} {lines}")
    assert all("expertd" in r.why for r in failed)
    for s in servers:
        assert s.log().count("attached to the next expertd") == 2
        assert s.stop() == 0
