# SPDX-License-Identifier: MIT
"""Logs for the journal, levels, and what SIGHUP reads anew."""
import os
import re
import signal

from conftest import EXPERTD, INFERD, STORY
from serving import Server


def journal(world, name):
    """stderr and environment of a service of systemd."""
    f = open(world.path / name, "w")
    st = os.fstat(f.fileno())
    return {"stderr": f, "env": {**os.environ, "JOURNAL_STREAM": f"{st.st_dev}:{st.st_ino}"}}


def test_lines_carry_levels_for_the_journal_only(world):
    plain = world.expertd()
    assert plain.text() and not re.search(r"^<\d>", plain.text(), re.M)
    server = Server(world, "--log-level", "debug")
    assert server.get("/health")[0] == 200
    world.until(lambda: "GET /health 200" in server.log(), what="the request is logged")
    assert all(re.match(r"inferd: ", line) for line in server.log().splitlines()), server.log()
    for name, argv in (("expertd", [EXPERTD, "--model", STORY]), ("inferd", [INFERD, "serve", "--listen", "0"])):
        p = world.spawn([*argv, *world.where("b" if name == "expertd" else "default")], **journal(world, name))
        world.until(lambda: re.search("takes workers|serving", (world.path / name).read_text()), what="it runs")
        p.terminate()
        assert p.wait(60) == 0
        lines = (world.path / name).read_text().splitlines()
        assert lines and all(re.match(rf"<[3-7]>{name}: ", line) for line in lines), lines


def test_expertd_reads_its_level_anew(world):
    level = world.path / "level"
    level.write_text("warning\n")
    d = world.expertd("--log-level", f"@{level}")
    assert "takes workers" not in d.text()
    level.write_text("debug\n")
    d.kill(signal.SIGHUP)
    world.until(lambda: "log level is debug, was warning" in d.text(), what=d.text())
    world.until(lambda: "everything else stays as it was" in d.text(), what=d.text())
    level.write_text("loud\n")
    d.kill(signal.SIGHUP)
    world.until(lambda: "log level stays debug" in d.text() and str(level) in d.text(), what=d.text())
    assert world.status()["state"] == "serving"


def test_a_server_reads_its_keys_anew(world):
    world.expertd()
    keys = world.path / "keys"
    keys.write_text("old\n")
    server = Server(world, "--api-key-file", keys)

    def status(key):
        return server.get("/v1/models", headers={"Authorization": f"Bearer {key}"})[0]

    assert (status("old"), status("new")) == (200, 401)
    keys.write_text("new\n# gone: old\nother\n")
    assert (status("old"), status("new")) == (200, 401)  # not before it is told
    server.process.send_signal(signal.SIGHUP)
    world.until(lambda: "2 keys, read anew" in server.log(), what=server.log())
    assert (status("old"), status("new"), status("other")) == (401, 200, 200)
    keys.write_text("# none\n")
    server.process.send_signal(signal.SIGHUP)
    world.until(lambda: "the keys stay as they were" in server.log(), what=server.log())
    assert (status(""), status("new")) == (401, 200)
    assert "everything else stays" in server.log()
