# SPDX-License-Identifier: MIT
"""tools/find-nvcc (what tools/demo --cuda builds with): the system's nvcc, else
the wheels, else what is missing. nvcc, g++, PyPI and the wheels are stand-ins.
"""
import hashlib
import os
import stat
import subprocess
import sys
import zipfile

import pytest

from conftest import TOP

FIND = TOP / "tools/find-nvcc"
COMPILES = '#!/bin/sh\nfor last; do :; done\necho "$0" "$@" >>"$LOG"\n'
TOO_OLD = "#!/bin/sh\necho \"nvcc fatal   : Unsupported gpu architecture 'compute_120'\" >&2\nexit 1\n"


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def wheel(folder, nvcc):
    """A wheel as NVIDIA's are laid out, and the list that names it."""
    path = folder / "stand_in_nvcc-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        info = zipfile.ZipInfo("nvidia/cu13/bin/nvcc")
        info.external_attr = 0o100755 << 16
        z.writestr(info, nvcc)
        z.writestr("stand_in_nvcc-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: stand-in-nvcc\nVersion: 1.0\n")
        z.writestr("stand_in_nvcc-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("stand_in_nvcc-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheels = folder / "list.txt"
    wheels.write_text(f"stand-in-nvcc==1.0 --hash=sha256:{digest}\n")
    return wheels


class Machine:
    """A PATH with nothing but what a test puts there."""

    def __init__(self, folder):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        for program in ("bash", "sh", "sed", "cat", "mktemp", "rm", "mkdir", "cp", "cmp", "dirname", "readlink", "grep",
                        "env"):
            found = next(d for d in ("/usr/bin", "/bin") if os.path.exists(f"{d}/{program}"))
            (self.bin / program).symlink_to(f"{found}/{program}")
        self.pypi = folder / "pypi"
        self.pypi.mkdir()
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "LOG": str(folder / "log"), "EXPERTD_CUDA_PLACES": "",
                    "PIP_NO_INDEX": "1",
                    "PIP_FIND_LINKS": str(self.pypi), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1",
                    "PIP_ROOT_USER_ACTION": "ignore"}
        self.build = folder / "build"

    def python(self):
        script(self.bin / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')

    def find(self, *options):
        return subprocess.run([FIND, *options, self.build], env=self.env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_systems_nvcc_first(machine):
    script(machine.bin / "nvcc", COMPILES)
    machine.python()
    machine.env["EXPERTD_CUDA_WHEELS"] = str(wheel(machine.pypi, COMPILES))
    r = machine.find()
    assert r.returncode == 0 and r.stdout.strip() == str(machine.folder), r
    assert r.stderr == "" and not (machine.build / "cuda-wheels").exists(), "nothing is fetched"


def test_cuda_home(machine):
    nvcc = script(machine.folder / "toolkit/bin/nvcc", COMPILES)
    machine.env["CUDA_HOME"] = str(nvcc.parent.parent)
    assert machine.find().stdout.strip() == str(nvcc.parent.parent)


def test_a_system_nvcc_that_is_too_old(machine):
    """It is named, and the wheels are taken."""
    script(machine.bin / "nvcc", TOO_OLD)
    machine.python()
    machine.env["EXPERTD_CUDA_WHEELS"] = str(wheel(machine.pypi, COMPILES))
    assert machine.find().stdout.strip() == str(machine.build / "cuda-wheels/nvidia/cu13")
    r = machine.find("--system")
    assert r.returncode == 1 and "sm_120" in r.stderr and "Unsupported gpu architecture" in r.stderr, r.stderr


def test_wheels(machine):
    machine.python()
    machine.env["EXPERTD_CUDA_WHEELS"] = str(wheel(machine.pypi, COMPILES))
    r = machine.find("--wheels")
    root = machine.build / "cuda-wheels/nvidia/cu13"
    assert r.returncode == 0 and r.stdout.strip() == str(root), r
    assert "from PyPI" in r.stderr
    (machine.bin / "python3").unlink()  # there already: nothing is fetched, python3 is not needed
    r = machine.find("--wheels")
    assert r.returncode == 0 and r.stdout.strip() == str(root) and r.stderr == "", r
    assert str(root / "bin/nvcc") in (machine.folder / "log").read_text(), "it was tried"


def test_another_list_is_fetched_anew(machine):
    machine.python()
    wheels = wheel(machine.pypi, TOO_OLD)
    machine.env["EXPERTD_CUDA_WHEELS"] = str(wheels)
    r = machine.find("--wheels")
    assert r.returncode == 1 and "does not compile" in r.stderr and "Unsupported" in r.stderr, r.stderr
    wheel(machine.pypi, COMPILES)
    assert machine.find("--wheels").returncode == 0


def test_a_wheel_with_another_checksum(machine):
    machine.python()
    wheels = wheel(machine.pypi, COMPILES)
    wheels.write_text("stand-in-nvcc==1.0 --hash=sha256:" + "0" * 64 + "\n")
    machine.env["EXPERTD_CUDA_WHEELS"] = str(wheels)
    r = machine.find("--wheels")
    assert r.returncode == 1 and "could not be fetched" in r.stderr and r.stdout == "", r
    assert not (machine.build / "cuda-wheels").exists()


def test_neither(machine):
    """One line for each thing that is missing, and what to do."""
    r = machine.find("--wheels")
    assert r.returncode == 1 and r.stdout == "" and "no python3" in r.stderr and "CUDA Toolkit" in r.stderr, r
    script(machine.bin / "python3", "#!/bin/sh\nexit 1\n")
    r = machine.find("--wheels")
    assert r.returncode == 1 and "no pip" in r.stderr and "python3-pip" in r.stderr, r
    machine.python()
    r = machine.find("--wheels")  # PyPI cannot be reached
    assert r.returncode == 1 and "could not be fetched" in r.stderr and "ERROR" in r.stderr, r
    (machine.bin / "python3").unlink()
    r = machine.find()
    assert r.returncode == 1 and "no nvcc on PATH" in r.stderr and "no python3" in r.stderr, r


def test_known_places(machine):
    nvcc = script(machine.folder / "usr/cuda/bin/nvcc", COMPILES)
    machine.env["EXPERTD_CUDA_PLACES"] = f"/nonexistent {nvcc.parent.parent}"
    assert machine.find().stdout.strip() == str(nvcc.parent.parent)


def test_unknown_option(machine):
    assert machine.find("--nonsense").returncode == 2
