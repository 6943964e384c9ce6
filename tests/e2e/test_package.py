# SPDX-License-Identifier: MIT
"""tools/package, on the build under test (its prefix is not /usr, which only changes where files lie): what is in the
package, what it depends on, that it is the same bytes twice, that its programs and pages are found when unpacked."""
import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import BUILD, SLOW, TOP

TOOLS = ["dpkg-deb", "dpkg-shlibdeps", "scdoc", "meson", "strip"]
MISSING = [t for t in TOOLS if not shutil.which(t)]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} (tools/setup --tests)")]


def package(out, **env):
    r = subprocess.run([TOP / "tools/package", "--no-setup", "--compress", "none", "--build", BUILD, out], capture_output=True, text=True,
                       timeout=300 * SLOW, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **env})
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()


@pytest.fixture(scope="module")
def deb(tmp_path_factory):
    return package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def root(deb, tmp_path_factory):
    """The package unpacked: its prefix there."""
    place = tmp_path_factory.mktemp("root")
    subprocess.run(["dpkg-deb", "-R", deb, place], check=True, timeout=60 * SLOW)
    options = json.loads(subprocess.run(["meson", "introspect", BUILD, "--buildoptions"], capture_output=True, check=True,
                                        timeout=60 * SLOW).stdout)
    return place, place / next(o["value"] for o in options if o["name"] == "prefix").lstrip("/")


def programs():
    return ["expertd", "inferd", "expertctl", "expert-bench", "mkmodel"] + (
        ["expert-top"] if (BUILD / "tools/expert-top").exists() else [])


def test_everything_is_in_it(root):
    place, prefix = root
    for p in programs():
        assert os.access(prefix / "bin" / p, os.X_OK), p
        assert (prefix / "share/bash-completion/completions" / p).exists(), p
    pages = {f.name for f in (prefix / "share/man").rglob("*.gz")}
    assert pages >= {f"{p}.{8 if p == 'expertd' else 1}.gz" for p in programs()} | {"expertd-counters.7.gz"}
    assert {f.name for f in (prefix / "lib/systemd/system").iterdir()} == {
        "expertd@.service", "inferd@.service", "inferd@.socket"}
    assert all((prefix / f"lib/{d}.d/expertd.conf").exists() for d in ("sysusers", "tmpfiles"))
    assert (place / "etc/expertd").is_dir()
    docs = prefix / "share/doc/expertd"
    # Every page of doc/ that git knows, and what README and SECURITY are.
    wanted = {f.name for f in (TOP / "doc").glob("*.md")} | {"README.md", "SECURITY.md", "copyright", "changelog.gz", "examples"}
    assert wanted <= {f.name for f in docs.iterdir()}
    assert {"expertd.json", "alerts.yml", "default.conf"} <= {f.name for f in (docs / "examples").iterdir()}
    assert os.access(prefix / "share/expertd/expertd-nginx", os.X_OK)
    stray = [f for f in prefix.rglob("*") if f.suffix in (".a", ".h", ".pc")]
    assert not stray


def test_it_depends_on_what_its_programs_load(deb, root):
    control = (root[0] / "DEBIAN/control").read_text()
    depends = re.search(r"^Depends: (.*)$", control, re.M).group(1)
    for package in ("libc6", "libnanomsg5", "liburing2", "libjansson4", "libpcre2-8-0", "libxxhash0"):
        assert re.search(rf"\b{package}(t64)? \(>= ", depends), depends
    assert "cuda" not in depends and not re.search("@[A-Z]+@", control)
    scripts = {f.name for f in (root[0] / "DEBIAN").iterdir()}
    assert scripts == {"control", "md5sums", "postinst", "prerm", "postrm"}
    for s in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", root[0] / "DEBIAN" / s], check=True)
    r = subprocess.run(["md5sum", "-c", "--quiet", "DEBIAN/md5sums"], cwd=root[0], capture_output=True, text=True)
    assert r.returncode == 0, r.stdout


def test_twice_gives_the_same_bytes(deb, tmp_path):
    assert open(package(tmp_path), "rb").read() == open(deb, "rb").read()


def test_its_programs_and_pages_are_found(root):
    _, prefix = root
    for p in programs():
        r = subprocess.run([prefix / "bin" / p, "--version"], capture_output=True, text=True, timeout=60 * SLOW)
        assert r.returncode == 0 and re.match(rf"{p} \d", r.stdout), (p, r)
    if shutil.which("man"):
        for p in programs():
            r = subprocess.run(["man", "-M", prefix / "share/man", "-w", p], capture_output=True, text=True, timeout=60 * SLOW)
            assert r.returncode == 0, (p, r.stderr)
