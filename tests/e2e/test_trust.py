# SPDX-License-Identifier: MIT
"""What SECURITY.md promises, and what two versions of the programs do when they meet."""
import os
import re
import shutil
import signal
import subprocess

import pytest

from conftest import BUILD, EXPERTCTL, EXPERTD, INFERD, SLOW, STORY, TOP, Chat, die_with_parent

VERSION = BUILD / "tests/fault/libversion.so"
NOBODY = 65534
PYTHON = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")  # one that any user may run
as_root = pytest.mark.skipif(os.geteuid() != 0 or not PYTHON or SLOW > 1,
                             reason="becoming another user needs root, and a build without sanitizers")
preload = pytest.mark.skipif(SLOW > 1 or not VERSION.exists(), reason="no library is preloaded into sanitizer builds")
READ = ["--prompt", "Once upon a time", "--raw", "-n", "4", "--temperature", "0", "--ignore-eos", "--hash"]


def arena_file(world):
    return next((world.arena / "default").rglob("arena"))


def become(uid):
    def before():
        die_with_parent()
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    return before


def programs_for(world, *programs):
    """Copies that another user may run, wherever the build lies."""
    if os.statvfs(world.path).f_flag & os.ST_NOEXEC:
        pytest.skip(f"{world.path} is mounted noexec")
    os.chmod(world.path, 0o755)
    for p in programs:
        shutil.copy(p, world.path / p.name)
        os.chmod(world.path / p.name, 0o755)
    return [world.path / p.name for p in programs]


# ---- an arena that is shortened by somebody else ----

def test_an_arena_truncated_in_use_is_named(world):
    """Whoever touches what is gone says so in one line and ends; the next expertd builds it anew."""
    d = world.expertd()
    want = world.run(*READ)["logits_hash"]
    chat = Chat(world, "-n", "3", "--temperature", "0")
    first = chat.ask("Tell me a tale.")
    arena = arena_file(world)
    os.chmod(arena, 0o600)
    os.truncate(arena, 4096)
    chat.say("And then?")
    world.until(lambda: chat.process.poll() is not None, timeout=60, what="the worker has ended")
    assert chat.process.returncode == 1, (chat.process.returncode, chat.log())
    lines = [line for line in chat.log().splitlines() if "truncated" in line]
    assert len(lines) == 1 and str(arena) in lines[0] and "start expertd again" in lines[0], chat.log()
    d.kill(signal.SIGTERM)
    assert d.wait(30) in (0, 1), "ended as asked, or when it touched what is gone: never by a signal"
    d = world.expertd()
    assert not world.status()["adopted"] and "truncated" in d.text()
    assert world.run(*READ)["logits_hash"] == want
    chat = Chat(world, "-n", "3", "--temperature", "0")
    assert chat.ask("Tell me a tale.")["logits_hash"] == first["logits_hash"]
    assert chat.end() == 0


def test_an_arena_truncated_within_a_page_gives_no_wrong_bits(world):
    """What is cut off in the file's last page reads as zeros, without a signal: no answer may be made of them."""
    world.expertd()
    want = world.run(*READ)["logits_hash"]
    chat = Chat(world, "-n", "3", "--temperature", "0")
    first = chat.ask("Tell me a tale.")
    arena = arena_file(world)
    os.chmod(arena, 0o600)
    # Every expert of the last layer in turn could be hit; one page before the end nobody can miss the cut.
    os.truncate(arena, os.path.getsize(arena) - 4096 - 2048)
    chat.say("And then?")
    world.until(lambda: chat.process.poll() is not None, timeout=60, what="the worker has ended")
    assert chat.process.returncode == 1 and "truncated while it was in use" in chat.log(), chat.log()
    assert want and first


def test_an_arena_truncated_in_use_ends_expertd_with_a_line(world):
    """A stream's copy finds it out: expertd ends with status 1, the worker is told."""
    d = world.expertd("--link-gbps", "0.001")
    p = world.spawn([INFERD, "run", *world.where(), "--prompt-file", TOP / "tools/model/prompt.txt", "--raw", "-n", "1",
                     "--stream", "full"], stdout=subprocess.DEVNULL)
    world.until(lambda: any(w.get("streaming") and w["issued"] for w in world.status().get("workers") or []), every=0.002,
                what="streaming")
    p.send_signal(signal.SIGSTOP)  # it touches nothing; copies go on until the ring is full
    arena = arena_file(world)
    os.chmod(arena, 0o600)
    os.truncate(arena, 4096)
    assert d.wait(60) == 1, d.text()
    p.send_signal(signal.SIGCONT)
    assert p.wait(60 * SLOW) == 1, p.log.read_text()
    assert "arena" in d.text() and "truncated while it was in use" in d.text().splitlines()[-1], d.text()
    assert len(p.log.read_text().splitlines()) == 1, p.log.read_text()


def test_what_lies_in_an_arena_does_not_reach_the_terminal(world):
    """A header of any bytes is named in plain characters."""
    d = world.expertd()
    d.kill()
    d.wait()
    arena = arena_file(world)
    os.chmod(arena, 0o600)
    with open(arena, "r+b") as f:
        f.write(b"\x1b[2J\xf8\x9b\x00A")
    d = world.expertd()
    assert "?[2J" in d.text() and d.log.read_bytes().isascii(), d.text()


# ---- who may do what ----

@as_root
def test_another_user_cannot_attach_or_look(world):
    inferd, ctl = programs_for(world, INFERD, EXPERTCTL)
    world.expertd()
    for mode in (0o700, 0o755):  # the runtime directory above may be open; the instance's own is not
        os.chmod(world.runtime, mode)
        for argv in ([inferd, "run", *world.where(), "--prompt", "x"], [ctl, "status", *world.where()],
                     [ctl, "stop", *world.where()]):
            r = subprocess.run([str(a) for a in argv], capture_output=True, text=True, preexec_fn=become(NOBODY))
            assert r.returncode != 0 and len(r.stderr.splitlines()) == 1, r.stderr
            assert "Permission denied" in r.stderr or "belongs to user 0" in r.stderr, r.stderr
    folder = world.runtime / "expertd/default"
    assert os.stat(folder).st_mode & 0o077 == 0 and os.stat(folder.parent).st_mode & 0o077 == 0
    for f in folder.iterdir():
        assert f.is_symlink() or os.stat(f).st_mode & 0o077 == 0, f
    probe = "import os,sys; os.open(sys.argv[1], os.O_RDONLY)"
    for f in [folder / "store", arena_file(world)]:
        r = subprocess.run([PYTHON, "-c", probe, str(f)], capture_output=True, text=True, preexec_fn=become(NOBODY))
        assert "PermissionError" in r.stderr, r.stderr
    assert world.status()["state"] == "serving" and not world.status()["workers"]


@as_root
def test_a_directory_of_another_user_is_not_used(world):
    """Nor one that others may write: what lies there could be theirs."""
    d = world.runtime / "expertd"
    d.mkdir(mode=0o700)
    (d / "default").mkdir(mode=0o700)
    os.chown(d / "default", NOBODY, NOBODY)
    for argv in ([EXPERTD, "--model", STORY], [INFERD, "run", "--prompt", "x"]):
        r = subprocess.run([str(a) for a in (*argv, *world.where())], capture_output=True, text=True)
        assert r.returncode == 1 and f"belongs to user {NOBODY}" in r.stderr, r.stderr
    os.chown(d / "default", 0, 0)
    os.chmod(d / "default", 0o777)
    for argv in ([EXPERTD, "--model", STORY], [INFERD, "run", "--prompt", "x"]):
        r = subprocess.run([str(a) for a in (*argv, *world.where())], capture_output=True, text=True)
        assert r.returncode == 1 and "may be written by others" in r.stderr, r.stderr


WRITER = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
assert at != ctypes.c_void_p(-1).value
print("mprotect", libc.mprotect(at, size, mmap.PROT_READ | mmap.PROT_WRITE), ctypes.get_errno())
again = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
print("mmap", -1 if again == ctypes.c_void_p(-1).value else 0, ctypes.get_errno())
for name in (sys.argv[1], f"/proc/self/fd/{fd}", f"/proc/{sys.argv[2]}/fd/{sys.argv[3]}"):
    try:
        os.open(name, os.O_RDWR)
        print("open 0 0")
    except OSError as e:
        print("open -1", e.errno)
"""


@as_root
def test_a_worker_cannot_write_the_arena(world):
    """As expertd's own user, who is not root: not through its mapping, not by opening the file again."""
    expertd, inferd = programs_for(world, EXPERTD, INFERD)
    model = world.path / "m.gguf"
    shutil.copy(STORY, model)
    for p in (world.runtime, world.arena, model):
        os.chown(p, NOBODY, NOBODY)
    d = world.spawn([expertd, "--model", model, *world.where(), "--arena-dir", world.arena, "--pin", "off"],
                    preexec_fn=become(NOBODY), stdout=subprocess.DEVNULL)
    # status as that user: root's tools may look, too, but would be refused a directory that is not root's
    def serving():
        assert d.poll() is None, d.log.read_text()
        r = subprocess.run([str(inferd), "run", *world.where(), "--prompt", "x", "-n", "1", "--quiet"], capture_output=True,
                           preexec_fn=become(NOBODY))
        return r.returncode == 0
    world.until(serving, timeout=60, what="a worker of that user is served", every=0.1)
    arena = next(world.arena.rglob("arena"))
    assert os.stat(arena).st_mode & 0o777 == 0o400
    p = world.spawn([inferd, "chat", *world.where(), "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    preexec_fn=become(NOBODY))
    p.stdin.write(b"Hello\n")
    p.stdin.flush()
    assert b"text" in p.stdout.readline(), p.log.read_text()
    maps = [line.split() for line in open(f"/proc/{p.pid}/maps") if str(arena) in line]
    assert maps and all(m[1] == "r--s" for m in maps), maps
    fds = [n for n in os.listdir(f"/proc/{d.pid}/fd") if os.readlink(f"/proc/{d.pid}/fd/{n}") == str(arena)]
    r = subprocess.run([PYTHON, "-c", WRITER, str(arena), str(d.pid), fds[0] if fds else "0"], capture_output=True,
                       text=True, preexec_fn=become(NOBODY))
    said = [line.split() for line in r.stdout.splitlines()]
    assert [s[0] for s in said] == ["mprotect", "mmap", "open", "open", "open"], r.stderr
    assert all(s[1:] == ["-1", "13"] for s in said), f"all of them EACCES: {said}"
    p.stdin.close()
    assert p.wait(30 * SLOW) == 0
    d.send_signal(signal.SIGTERM)
    assert d.wait(30 * SLOW) == 0


def test_security_names_files_that_exist():
    """Each file and test that SECURITY.md speaks of is in the tree."""
    text = (TOP / "SECURITY.md").read_text()
    names = set(re.findall(r"`((?:expertd|inferd|proto|shm|kernels|tools|tests|doc)/[\w./-]+)`", text))
    assert len(names) > 20
    for name in names:
        assert (TOP / name).exists(), name
    for test, name in re.findall(r"`(tests/[\w./]+)::(\w+)`", text):
        assert name in (TOP / test).read_text(), (test, name)


# ---- two versions ----

def protocol_version():
    return int(re.search(r"^version (\d+)", (TOP / "proto/control.spec").read_text(), re.M).group(1))


@preload
@pytest.mark.parametrize("off", [-1, 1])
def test_a_worker_of_another_protocol_version_is_refused(world, off):
    ours = protocol_version()
    d = world.expertd()
    r = world.inferd("run", *READ, check=False, env={"LD_PRELOAD": str(VERSION), "OTHER_PROTOCOL": str(ours + off)})
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    assert f"version {ours + off}" in r.stderr and f"version {ours}" in r.stderr, r.stderr
    assert d.process.poll() is None and not world.status()["workers"]
    assert world.run(*READ)["logits_hash"]


@preload
@pytest.mark.parametrize("off", [-1, 1])
def test_an_expertd_of_another_protocol_version_is_refused(world, off):
    ours = protocol_version()
    world.expertd(env={"LD_PRELOAD": str(VERSION), "OTHER_PROTOCOL": str(ours + off)})
    for argv in (["run", *READ],):
        r = world.inferd(*argv, check=False)
        assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
        assert r.stderr.count("version") >= 2 and "one release" in r.stderr, r.stderr
    r = world.ctl("stop", check=False)
    assert r.returncode != 0 and "version" in r.stderr, r.stderr


@preload
def test_a_worker_segment_of_another_layout_is_refused(world):
    d = world.expertd()
    r = world.inferd("run", *READ, check=False, env={"LD_PRELOAD": str(VERSION), "OTHER_LAYOUT": "99"})
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    ours = re.search(r'define SHM_WORKER_MAGIC "(\w+)"', (TOP / "shm/shm_worker.h").read_text()).group(1)
    assert "EXDWRK99" in r.stderr and ours in r.stderr, r.stderr
    assert d.process.poll() is None
    assert world.run(*READ)["logits_hash"]


@pytest.mark.parametrize("which", ["store", "arena"])
def test_a_worker_refuses_segments_of_another_layout(world, which):
    """expertd's are of another version than the worker: both are named; so they are by the tools."""
    world.expertd()
    path = world.runtime / "expertd/default/store" if which == "store" else arena_file(world)
    os.chmod(path, 0o600)
    with open(path, "r+b") as f:
        magic = f.read(8).decode()
        f.seek(6)
        f.write(b"99")
    r = world.inferd("run", *READ, check=False)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
    assert magic in r.stderr and magic[:6] + "99" in r.stderr, r.stderr
    r = world.ctl("status" if which == "store" else "verify", check=False)
    assert r.returncode != 0 and magic[:6] + "99" in r.stderr, r.stderr
