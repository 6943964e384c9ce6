# SPDX-License-Identifier: MIT
"""tools/setup: what is there by other means than apt counts; what is not is installed, or named."""
import subprocess

import pytest

from conftest import TOP

SETUP = TOP / "tools/setup"
USED = ("sh", "sed", "grep", "mktemp", "rm", "id", "tail", "cat")
PROGRAMS = ("cc", "gcc", "meson", "ninja", "python3", "scdoc")
NOT_THERE = "#!/bin/sh\nexit 1\n"


class Machine:
    """A PATH with what building needs, none of it from a package, and an apt-get that notes what it is asked."""

    def __init__(self, folder, lacks_program=None, lacks_library=None, debian=True):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        for program in USED:
            (self.bin / program).symlink_to(f"/usr/bin/{program}")
        for program in PROGRAMS:
            if program != lacks_program:
                self.script(program, "#!/bin/sh\nexit 0\n")
        self.script("pkg-config", f'#!/bin/sh\n[ "$2" != "{lacks_library}" ]\n')
        self.script("sudo", '#!/bin/sh\nexec "$@"\n')
        if debian:
            self.script("dpkg-query", NOT_THERE)
            self.script("apt-get", f'#!/bin/sh\necho "$@" >>"{folder}/asked"\n')

    def script(self, name, text):
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def setup(self, *args):
        return subprocess.run([str(SETUP), *args], capture_output=True, text=True,
                              env={"PATH": str(self.bin), "TMPDIR": str(self.folder)})

    def asked(self):
        path = self.folder / "asked"
        return path.read_text().split() if path.exists() else []


def test_nothing_is_asked_for_where_all_is_there(tmp_path):
    m = Machine(tmp_path)
    r = m.setup()
    assert (r.returncode, r.stdout, r.stderr, m.asked()) == (0, "", "", [])


def test_nor_on_another_system(tmp_path):
    r = Machine(tmp_path, debian=False).setup()
    assert (r.returncode, r.stdout, r.stderr) == (0, "", "")


@pytest.mark.parametrize("lacks,package", [
    ({"lacks_program": "meson"}, "meson"), ({"lacks_program": "ninja"}, "ninja-build"),
    ({"lacks_program": "scdoc"}, "scdoc"), ({"lacks_library": "liburing"}, "liburing-dev"),
    ({"lacks_library": "libevent_core"}, "libevent-dev"), ({"lacks_library": "ncursesw"}, "libncurses-dev")])
def test_what_is_missing_is_installed(tmp_path, lacks, package):
    m = Machine(tmp_path, **lacks)
    r = m.setup()
    assert r.returncode == 0 and r.stderr == f"setup: installing {package}\n"
    assert m.asked() == ["install", "-y", "-q", "--no-install-recommends", package]


def test_what_is_missing_is_named_on_another_system(tmp_path):
    r = Machine(tmp_path, lacks_library="jansson", debian=False).setup()
    assert r.returncode == 1
    assert r.stderr == "setup: this is not a Debian or Ubuntu system: install the equivalents of: libjansson-dev\n"


def test_the_tests_packages_are_asked_of_dpkg(tmp_path):
    m = Machine(tmp_path)
    assert m.setup("--tests").returncode == 0
    assert "libcriterion-dev" in m.asked() and "meson" not in m.asked()
