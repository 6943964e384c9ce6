# SPDX-License-Identifier: MIT
"""expert-top on a real terminal (pty) and as text: every key, small and changing sizes, damaged memory."""
import fcntl
import json
import os
import pathlib
import pty
import random
import re
import resource
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from conftest import BUILD, Chat, EXPERTCTL, SLOW, die_with_parent

TOP = BUILD / "tools/expert-top"
pytestmark = pytest.mark.skipif(not TOP.exists(), reason="expert-top is not built: ncurses is missing")
TALE = "Tell me a long tale of a fox, a bear, a wolf and a bird. " * 24


def once(world, *options, status=0):
    r = subprocess.run([str(TOP), *world.where(), "-d", "0.05", *map(str, options)], capture_output=True, text=True,
                       timeout=60 * SLOW)
    assert r.returncode == status, r.stdout + r.stderr
    return r.stdout if status != 2 else r.stderr


class Terminal:
    """expert-top on a pty; the screen as a terminal would show it."""

    def __init__(self, world, *options, cols=80, rows=24):
        pyte = pytest.importorskip("pyte")
        self.world = world
        self.master, slave = pty.openpty()
        self.resize(cols, rows, tell=False)
        self.screen = pyte.Screen(cols, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.process = subprocess.Popen([str(TOP), *world.where(), "-d", "0.1", *options], stdin=slave, stdout=slave,
                                        stderr=open(world.path / "top.log", "w"), preexec_fn=die_with_parent,
                                        env={**os.environ, "TERM": "linux"})
        world.processes.append(self.process)
        os.close(slave)

    def resize(self, cols, rows, tell=True):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        if tell:
            self.screen.resize(rows, cols)
            self.process.send_signal(signal.SIGWINCH)

    def read(self, seconds=0.05):
        end = time.monotonic() + seconds
        while select.select([self.master], [], [], max(0, end - time.monotonic()))[0]:
            try:
                self.stream.feed(os.read(self.master, 65536))
            except OSError:  # the other side has closed
                return

    def text(self):
        return "\n".join(self.screen.display)

    def until(self, what, timeout=20):
        def seen():
            self.read()
            return re.search(what, self.text())
        try:
            return self.world.until(seen, timeout=timeout, what=what)
        except AssertionError:
            raise AssertionError(f"never saw {what}:\n{self.text()}")

    def press(self, keys):
        os.write(self.master, keys if isinstance(keys, bytes) else keys.encode())

    def wait(self):
        self.world.until(lambda: self.read() or self.process.poll() is not None, what="it ends")
        return self.process.returncode


@pytest.fixture
def streaming(world):
    """Two workers, the first in the middle of a long, slow stream."""
    world.expertd("--floor", "16")
    chats = [Chat(world, "--link-gbps", "0.0004", "--temperature", "0", "-n", "1", "--ignore-eos", "--chunk", "64", "--order",
                  "recent") for _ in range(2)]
    chats[0].say(TALE)
    world.until(lambda: len(ws := world.status()["workers"]) == 2 and any(w.get("issued") for w in ws), what="streaming")
    return chats


def test_text_fits_any_size(world, streaming):
    pid = streaming[0].process.pid
    for size in ("80x24", "200x60", "60x12", "40x8", "20x5", "7x3", "1x1", "1000x2"):
        for more in ([], ["--worker", pid]):
            cols, rows = map(int, size.split("x"))
            lines = once(world, "--once", "--size", size, *more).split("\n")[:-1]
            assert len(lines) == rows and all(len(line) <= cols for line in lines), size
    text = once(world, "--once")
    row = next(line for line in text.splitlines() if line.split()[:1] == [str(pid)])
    assert re.search(r"inferd +stream", row), text
    assert "serving" in text and "rings" in text and re.search(rf"^ *{pid} [.i#@]{{20,}}", text, re.M), text
    close = once(world, "--once", "--worker", pid)
    assert re.search(r"bytes +routed", close) and "LAYER" in close and re.search(r"\d+ issued \(i\)", close), close
    value = json.loads(once(world, "--json"))
    (w,) = [w for w in value["workers"] if w["pid"] == pid]
    assert w["streaming"] and w["link_bytes_per_second"] >= 0 and value["store"]["up"] == 1


def test_every_key(world, streaming):
    first, second = (c.process.pid for c in streaming)
    t = Terminal(world)
    t.until(rf"{second} inferd")
    t.until(rf"layers of {first}")
    t.press("j")
    t.until(rf"layers of {second}")
    t.press("k")
    t.until(rf"layers of {first}")
    t.press("\x1b[B")  # arrow down
    t.until(rf"layers of {second}")
    t.press("k\r")
    t.until(rf"worker {first} inferd")
    t.until("LAYER +ROUTED")
    t.press("j" * 3)
    t.press("\x1b[6~kkkk")
    t.until(r"\n +0 ")
    t.press("n")
    t.until(rf"worker {second} inferd")
    t.press("n")
    t.until(rf"worker {first} inferd")
    t.press("q")
    t.until("PID NAME")
    for _ in range(8):
        t.press("s")
    t.press("rr")
    t.press(" ")
    t.until("FROZEN")
    t.press("f")
    world.until(lambda: t.read() or "FROZEN" not in t.text(), what="it goes on")
    for key in "+-=x\t":
        t.press(key)
    t.press("h")
    t.until("Any key goes back")
    t.press("z")
    t.until("PID NAME")
    t.press("\n")
    t.until(rf"worker {first} inferd")
    t.press(b"\x1b")
    t.until("PID NAME")
    t.press("q")
    assert t.wait() == 0
    t = Terminal(world, "--worker", str(second))
    t.until(rf"worker {second} inferd")
    t.press("Q")
    assert t.wait() == 0


def test_resize_and_ends(world, streaming):
    t = Terminal(world, cols=40, rows=8)
    t.until("PID NAME")
    for cols, rows in ((80, 24), (132, 50), (20, 5), (3, 2), (80, 24)):
        t.resize(cols, rows)
        t.read(0.3)
        assert t.process.poll() is None
    t.until("q quit")
    t.until("FROZEN|rings")
    t.process.send_signal(signal.SIGTERM)
    assert t.wait() == 0
    t = Terminal(world, "-n", "3")
    assert t.wait() == 0
    r = subprocess.run([str(TOP), *world.where()], capture_output=True, text=True, timeout=20 * SLOW)
    assert r.returncode == 2 and "--once" in r.stderr


def test_follows_restarts(world):
    t = Terminal(world)
    t.until("no expertd runs")
    d = world.expertd()
    t.until("serving")
    d.kill(signal.SIGSTOP)
    t.until("STOPPED")
    d.kill(signal.SIGCONT)
    d.kill()
    d.wait()
    t.until("DEAD")
    assert "DEAD" in once(world, "--once", status=1)
    world.expertd()
    t.until("serving.*life 2")
    t.press("q")
    assert t.wait() == 0
    assert "no expertd" in once(world, "--once", "--instance", "none", status=2)


def test_reads_only_and_costs_little(world, streaming):
    used = lambda: (u := resource.getrusage(resource.RUSAGE_CHILDREN)).ru_utime + u.ru_stime
    t = Terminal(world, "-d", "0.05", "-n", "60")
    t.until("PID NAME")
    maps = [line.split() for line in open(f"/proc/{t.process.pid}/maps")]
    shared = [m for m in maps if len(m) > 5 and (str(world.path) in m[5] or "memfd" in m[5])]
    assert shared and all(m[1].startswith("r-") for m in shared), shared
    before = used()
    assert t.wait() == 0
    # under 1 ms a look where it was measured
    assert used() - before < 60 * 0.02 * SLOW


def scribble(fd, start, size, rng):
    """Random bytes over parts of a segment, words of all kinds of sizes."""
    for _ in range(rng.randrange(1, 40)):
        at = rng.randrange(start, size)
        n = rng.choice((1, 4, 8, 64, 4096))
        data = rng.choice((b"\xff" * n, b"\0" * n, bytes(rng.getrandbits(8) for _ in range(n))))
        os.pwrite(fd, data[:size - at], at)


def test_damaged_memory_is_shown_not_followed(world, streaming):
    """Segments full of garbage, while those who own them are stopped: nothing crashes or hangs."""
    pids = [c.process.pid for c in streaming] + [world.processes[0].pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    targets = []
    for pid in pids[:2]:
        for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:inferd-control" in os.readlink(fd):
                targets.append((os.open(fd, os.O_RDWR), 0))
    store = world.runtime / "expertd/default/store"
    targets.append((os.open(store, os.O_RDWR), 64))
    assert len(targets) == 3
    saved = [(fd, os.pread(fd, os.fstat(fd).st_size, 0)) for fd, _ in targets]
    rng = random.Random(5)
    try:
        for round_ in range(8):
            for fd, start in targets[:2] if round_ % 2 else targets:
                scribble(fd, start, os.fstat(fd).st_size, rng)
            for argv in ([TOP, "--once", "-d", "0.05"], [TOP, "--json", "-d", "0.05"], [EXPERTCTL, "counters", "--detail"],
                         [EXPERTCTL, "metrics", "--detail"]):
                r = subprocess.run([str(argv[0]), *argv[1:], *world.where()], capture_output=True, timeout=60 * SLOW)
                assert r.returncode in (0, 1, 2), (argv, r.returncode, r.stderr)
                if b"--json" in r.args and r.returncode < 2:
                    json.loads(r.stdout)
            for fd, data in saved:
                os.pwrite(fd, data, 0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
