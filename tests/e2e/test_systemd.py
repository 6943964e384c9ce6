# SPDX-License-Identifier: MIT
"""The units of tools/systemd: what systemd-analyze says of them, and their command lines run as systemd would run
them (socket, NOTIFY_SOCKET, WATCHDOG_USEC). No systemd runs here: see doc/serve-many.md."""
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess

import pytest
from conftest import EXPERTCTL, EXPERTD, INFERD, SLOW, STORY, TOP

UNITS = TOP / "tools/systemd"
ANALYZE = shutil.which("systemd-analyze")
needs_analyze = pytest.mark.skipif(not ANALYZE, reason="no systemd-analyze (tools/setup --tests installs systemd)")


@pytest.fixture
def units(tmp_path):
    """The units as installed, with this build's programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for p in (EXPERTD, INFERD, EXPERTCTL):
        (programs / p.name).symlink_to(p)
    place = tmp_path / "units"
    place.mkdir()
    for name in ("expertd@.service", "inferd@.service"):
        (place / name).write_text((UNITS / f"{name}.in").read_text().replace("@bindir@", str(programs)))
    shutil.copy(UNITS / "inferd@.socket", place)
    return place


def values(unit, key):
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.M)


@needs_analyze
def test_units_are_correct(units):
    r = subprocess.run([ANALYZE, "verify", "--man=no", "--recursive-errors=no", "expertd@default.service",
                        "inferd@8081.service", "inferd@8081.socket"], capture_output=True, text=True, timeout=60 * SLOW,
                       env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"})
    assert r.returncode == 0 and not r.stderr.strip(), r.stderr


@needs_analyze
@pytest.mark.parametrize("name,most", [("expertd@default.service", 2.0), ("inferd@8081.service", 2.0)])
def test_units_are_hardened(units, name, most):
    path = units / name.replace("default", "").replace("8081", "")
    r = subprocess.run([ANALYZE, "security", "--offline=true", "--no-pager", f"--threshold={int(most * 10)}",
                        str(path.rename(units / name))], capture_output=True, text=True, timeout=60 * SLOW,
                       env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"})
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", r.stdout)
    print(level.group(0) if level else r.stdout + r.stderr)
    assert r.returncode == 0 and level and float(level.group(1)) <= most, r.stdout[-3000:] + r.stderr


def test_units_as_systemd_would_run_them(world, units):
    """Start, reload, a restart of expertd below, stop: over one socket, with a watchdog."""
    expertd, inferd = units / "expertd@.service", units / "inferd@.service"
    assert values(inferd, "Requires") == values(inferd, "After") == ["expertd@default.service inferd@%i.socket"]
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(world.path / "notify"))
    notify.settimeout(30 * SLOW)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)
    port = listening.getsockname()[1]

    def expand(line, instance, **env):
        """Words of a command line, with %i and variables as systemd puts them; /run is the test's."""
        words = []
        for word in shlex.split(line.replace("%i", instance)):
            if re.fullmatch(r"\$\w+", word):
                words += env.get(word[1:], "").split()
            else:
                words.append(re.sub(r"\$\{(\w+)\}", lambda m: env[m[1]], word))
        return [str(world.runtime) if w == "/run" else w for w in words]

    def until(wanted):
        while wanted not in (text := notify.recv(1000).decode()):
            pass
        return text

    def start(unit, instance, socket_fd=None, **env):
        (line,) = values(unit, "ExecStart")
        usec = int(values(unit, "WatchdogSec")[0]) * 1000000 // 30  # faster than waiting for half a minute
        shell = 'export LISTEN_PID=$$ LISTEN_FDS=1 WATCHDOG_PID=$$; exec "$@"'
        shell += f" 3<&{socket_fd}" if socket_fd is not None else ""
        p = world.spawn(["bash", "-c", shell if socket_fd is not None else 'export WATCHDOG_PID=$$; exec "$@"', "bash",
                         *expand(line, instance, **env)], pass_fds=() if socket_fd is None else (socket_fd,),
                        stdout=subprocess.DEVNULL, env={**os.environ, "NOTIFY_SOCKET": str(world.path / "notify"),
                                                       "WATCHDOG_USEC": str(usec)})
        until("READY=1")
        until("WATCHDOG=1")
        return p

    def health():
        s = socket.create_connection(("127.0.0.1", port), timeout=60 * SLOW)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with s, s.makefile("rb") as f:
            return f.read().split()[1]
    options = dict(EXPERTD_MODEL=str(STORY), EXPERTD_ARENA=str(world.arena))
    # What the unit says is what tmpfiles.d makes, for the unit's user.
    (user,) = values(expertd, "User")
    tmpfiles = (UNITS / "expertd-tmpfiles.conf").read_text().splitlines()[-1].split()
    assert f"EXPERTD_ARENA={tmpfiles[1]}" in values(expertd, "Environment") and tmpfiles[2:5] == ["0700", user, user]
    d = start(expertd, "default", **options)
    worker = start(inferd, str(port), listening.fileno(), INFERD_OPTIONS="--queue 64")
    assert health() == b"200"
    (line,) = values(inferd, "ExecReload")
    r = subprocess.run(expand(line.replace("$MAINPID", str(worker.pid)), str(port)), capture_output=True, text=True,
                       timeout=60 * SLOW)
    assert r.returncode == 0 and "ready again" in r.stdout, r.stderr
    assert health() == b"200"
    d.send_signal(signal.SIGTERM)
    assert d.wait(30 * SLOW) == 0
    d = start(expertd, "default", **options)
    assert world.status()["adopted"], "the arena was kept"
    world.until(lambda: health() == b"200", what="attached again")
    worker.terminate()
    until("STOPPING=1")
    assert worker.wait(30 * SLOW) == 0
    d.terminate()
    assert d.wait(30 * SLOW) == 0
    notify.close()
    listening.close()
