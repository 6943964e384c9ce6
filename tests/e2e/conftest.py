# SPDX-License-Identifier: MIT
"""Real daemons for the end-to-end tests.

`world` gives each test a runtime and an arena directory of its own on tmpfs
and starts expertd and inferd there; whatever a test leaves running is killed
and checked for leftovers when it ends. EXPERTD_BUILD names the build under
test, EXPERTD_MODELS the directory of the larger reference models.
"""
import ctypes
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

TOP = pathlib.Path(os.environ.get("EXPERTD_SRC", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(os.environ.get("EXPERTD_BUILD", TOP / "build"))
MODELS = pathlib.Path(os.environ.get("EXPERTD_MODELS", BUILD / "models"))
STORY = TOP / "tools/model/story-q4_k.gguf"
GOLDENS = TOP / "tests/data/goldens"
SLOW = 8 if "asan" in BUILD.name or "tsan" in BUILD.name else 1  # time limits are scaled by this

EXPERTD = BUILD / "expertd/expertd"
INFERD = BUILD / "inferd/inferd"
EXPERTCTL = BUILD / "tools/expertctl"
PROGRAMS = {"expertd": EXPERTD, "inferd": INFERD, "expertctl": EXPERTCTL}
MKMODEL = BUILD / "tools/mkmodel"


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left out of sanitizer runs")


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_options(commands):
    """Each option of command lines that a manifest holds is one of its program's."""
    for program, *words in commands:
        first = [words[0]] if program == "inferd" else []
        text = subprocess.run([str(PROGRAMS[program]), *first, "--help"], capture_output=True, text=True, check=True).stdout
        for option in (w for w in words if w.startswith("--")):
            assert re.search(rf"{option}\b", text), (program, option)


def prompts():
    return {p["name"]: p for p in json.load(open(GOLDENS / "prompts.json"))["prompts"]}


class Daemon:
    """A running expertd."""

    def __init__(self, world, process, log):
        self.world, self.process, self.log = world, process, log

    @property
    def pid(self):
        return self.process.pid

    def text(self):
        return self.log.read_text(errors="replace")

    def kill(self, sig=signal.SIGKILL):
        self.process.send_signal(sig)

    def wait(self, timeout=60):
        return self.process.wait(timeout * SLOW)


class World:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.runtime = self.path / "run"
        self.arena = self.path / "arena"
        self.runtime.mkdir(mode=0o700)
        self.arena.mkdir(mode=0o700)
        self.processes = []
        self.count = 0

    def where(self, instance="default"):
        return ["--runtime-dir", str(self.runtime), "--instance", instance]

    def spawn(self, argv, **kw):
        self.count += 1
        log = self.path / f"{self.count:03d}-{pathlib.Path(argv[0]).name}.log"
        kw.setdefault("stderr", open(log, "w"))
        kw.setdefault("stdin", subprocess.DEVNULL)
        kw.setdefault("preexec_fn", die_with_parent)
        p = subprocess.Popen([str(a) for a in argv], **kw)
        self.processes.append(p)
        p.log = log
        return p

    def expertd(self, *options, model=STORY, instance="default", wait=True, env=None, arena=True, **kw):
        """Starts expertd; waits until it serves. Its stderr goes to .log."""
        argv = [EXPERTD, "--model", model, *self.where(instance)]
        if arena:
            argv += ["--arena-dir", self.arena / instance]
            (self.arena / instance).mkdir(mode=0o700, exist_ok=True)
        p = self.spawn([*argv, *options], stdout=subprocess.DEVNULL, env={**os.environ, **(env or {})}, **kw)
        d = Daemon(self, p, p.log)
        if wait:
            self.until(lambda: p.poll() is not None or self.status(instance).get("state") == "serving",
                       what=f"expertd serves: {d.text()}")
            assert p.poll() is None, d.text()
        return d

    def ctl(self, *argv, check=True, instance="default"):
        r = subprocess.run([str(EXPERTCTL), *map(str, argv), *self.where(instance)], capture_output=True, text=True,
                           timeout=60 * SLOW)
        if check:
            assert r.returncode == 0, r.stderr
        return r

    def status(self, instance="default"):
        r = self.ctl("status", "--json", check=False, instance=instance)
        try:
            return json.loads(r.stdout)
        except ValueError:
            return {}

    def inferd(self, command, *options, check=True, timeout=120, instance="default", input=None, env=None):
        r = subprocess.run([str(INFERD), command, *self.where(instance), *map(str, options)], capture_output=True,
                           text=True, timeout=timeout * SLOW, input=input, env={**os.environ, **(env or {})},
                           preexec_fn=die_with_parent)
        if check:
            assert r.returncode == 0, r.stderr
        return r

    def run(self, *options, **kw):
        """inferd run --json: the parsed object."""
        return json.loads(self.inferd("run", "--json", *options, **kw).stdout)

    def until(self, condition, timeout=60, what="condition", every=0.01):
        end = time.monotonic() + timeout * SLOW
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            time.sleep(every)
        raise AssertionError(f"not within {timeout * SLOW} s: {what}")

    def strays(self):
        """Processes that name this world and that close() does not know: started in the background."""
        known = {p.pid for p in self.processes} | {os.getpid()}
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in known:
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if any(w.startswith(str(self.path).encode()) for w in words):
                    found.append((int(entry.name), words[0].decode()))
        return found

    def close(self):
        for p in self.processes:
            if p.poll() is None:
                p.kill()
        for p in self.processes:
            p.wait(10)
            for stream in (p.stdin, p.stdout):
                if stream:
                    stream.close()
        left = self.strays()
        for pid, _ in left:
            os.kill(pid, signal.SIGKILL)
        return left


@pytest.fixture
def world():
    path = tempfile.mkdtemp(prefix="xd-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    w = World(path)
    yield w
    left = w.close()
    shutil.rmtree(path, ignore_errors=True)
    assert not left, f"still running: {left}"
    assert not os.path.exists(path)


def process_facts(pid):
    """What must not grow: descriptors, shared mappings, threads. (The C library keeps stacks of ended threads, so
    that private mappings come and go: anonymous_bytes watches those.)"""
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "shared": sum(line.split()[1].endswith("s") for line in open(f"/proc/{pid}/maps")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def anonymous_bytes(pid):
    return next(int(line.split()[1]) << 10 for line in open(f"/proc/{pid}/status") if line.startswith("RssAnon"))


class Chat:
    """inferd chat --json on pipes: one object a turn."""

    def __init__(self, world, *options, instance="default"):
        self.world = world
        self.process = world.spawn([INFERD, "chat", *world.where(instance), "--json", "--hash", *options],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.buffer = b""

    def say(self, text):
        self.process.stdin.write(text.encode() + b"\n")

    def hear(self, timeout=60):
        """The next line of output, parsed; None at its end."""
        end = time.monotonic() + timeout * SLOW
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
            assert ready, f"no answer within {timeout * SLOW} s: {self.log()}"
            got = self.process.stdout.read(65536)
            if not got:
                return None
            self.buffer += got
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, text):
        self.say(text)
        answer = self.hear()
        assert answer, self.log()
        return answer

    def log(self):
        return self.process.log.read_text(errors="replace")

    def end(self):
        self.process.stdin.close()
        return self.process.wait(60 * SLOW)
