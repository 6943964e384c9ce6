# SPDX-License-Identifier: MIT
"""tools/container against itself, the tree, and what this build's programs know. No image is built here: doc/serve-many.md
says what was run."""
import re

import pytest
from conftest import TOP, check_options

yaml = pytest.importorskip("yaml")

FOLDER = TOP / "tools/container"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
GPU = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())
SERVICES = COMPOSE["services"]
MEMBERS = {n: s for n, s in SERVICES.items() if n != "anchor"}
KNOWN = set("image build command user cap_drop security_opt read_only ulimits pid ipc container_name shm_size "
            "network_mode stop_signal restart depends_on volumes ports healthcheck stop_grace_period".split())


def test_the_names_are_those_of_compose():
    assert set(COMPOSE) <= {"name", "services", "volumes", "x-common", "x-member"}
    for name, service in SERVICES.items():
        assert set(service) <= KNOWN, name
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


def test_containers_have_in_common_what_they_must():
    anchor = SERVICES["anchor"]
    assert anchor["ipc"] == "shareable" and "pid" not in anchor
    for name, service in MEMBERS.items():
        assert service["pid"] == service["ipc"] == f"container:{anchor['container_name']}", name
    for key in ("image", "user", "cap_drop", "security_opt", "ulimits"):
        assert all(s[key] == anchor[key] for s in MEMBERS.values()), key
    # All have the runtime directory where their commands look for it; its owner is their user.
    for name, service in MEMBERS.items():
        place = service["command"][service["command"].index("--runtime-dir") + 1]
        assert f"runtime:{place}" in service["volumes"], name
    options = COMPOSE["volumes"]["runtime"]["driver_opts"]["o"]
    user, group = anchor["user"].split(":")
    assert f"uid={user},gid={group}" in options and "mode=0700" in options and int(user) > 0
    assert set(GPU["services"]) == set(SERVICES)
    ports = [p for s in MEMBERS.values() for p in s.get("ports", [])]
    assert len(ports) == len(set(ports)) == 2


def test_commands_are_those_of_the_programs():
    commands = [s["command"] for s in MEMBERS.values()] + [SERVICES["expertd"]["healthcheck"]["test"][1:]]
    assert len(commands) == 4
    check_options(commands)


def test_the_image_has_all_that_a_package_needs():
    text = (FOLDER / "Containerfile").read_text()
    copied = {w for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M) for w in line.split()}
    assert all((TOP / c).exists() for c in copied)
    folders = set(re.findall(r"^ *subdir\('(\w+)'\)", (TOP / "meson.build").read_text(), re.M)) - {"tests"}
    installed = set(re.findall(r"'\.\./([A-Z]\w+\.md)'", (TOP / "doc/meson.build").read_text()))
    assert folders | installed | {"meson.build", "meson_options.txt", "LICENSE"} <= copied
    for option in re.findall(r"tools/(setup|package) (--[\w-]+)", text):
        assert option[1] in (TOP / "tools" / option[0]).read_text(), option
    user = re.search(r"^USER (\S+)$", text, re.M).group(1)
    assert user == SERVICES["anchor"]["user"]
    dockerfile = SERVICES["anchor"]["build"]["dockerfile"]
    assert (TOP / dockerfile).exists() and (FOLDER / SERVICES["anchor"]["build"]["context"]).resolve() == TOP.resolve()
