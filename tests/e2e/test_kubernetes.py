# SPDX-License-Identifier: MIT
"""The manifests of tools/kubernetes against Kubernetes' own schemas, and against what this build's programs know.
They were not applied to a cluster: see doc/serve-many.md."""
import re

import pytest
from conftest import PROGRAMS, TOP, check_options
from serving import Server

validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate (PyPI; tools/check installs it)")
yaml = pytest.importorskip("yaml")

FILES = sorted((TOP / "tools/kubernetes").glob("*.yaml"))
DOCUMENTS = [(f.name, d) for f in FILES for d in yaml.safe_load_all(f.read_text())]


def walk(value):
    yield value
    for v in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from walk(v)


@pytest.mark.parametrize("name,document", DOCUMENTS, ids=[f"{n}-{d['kind']}" for n, d in DOCUMENTS])
def test_schema(name, document):
    for version in ("1.29", validate.latest_version()):
        validate.validate(document, version, strict=True)


def test_the_schema_check_finds_mistakes():
    document = next(d for _, d in DOCUMENTS if d["kind"] == "Deployment")
    with pytest.raises(validate.ValidationError):
        validate.validate({**document, "spec": {**document["spec"], "replica": 2}}, validate.latest_version(), strict=True)


def test_commands_are_those_of_the_programs():
    commands = [v["command"] for _, d in DOCUMENTS for v in walk(d) if isinstance(v, dict) and
                isinstance(v.get("command"), list) and v["command"][0] in PROGRAMS]
    assert len(commands) == 4
    check_options(commands)


def test_parts_fit_together():
    kinds = {d["kind"]: d for _, d in DOCUMENTS}
    pods = [kinds[k]["spec"]["template"]["spec"] for k in ("DaemonSet", "Deployment")]
    for key in ("hostPID", "hostIPC", "nodeSelector"):
        assert pods[0][key] == pods[1][key]
    users = {v["runAsUser"] for p in pods for c in p["containers"] for v in [c["securityContext"]]}
    assert len(users) == 1
    paths = [{v["name"]: v["hostPath"]["path"] for v in p["volumes"]} for p in pods]
    mounts = [{m["name"]: m["mountPath"] for m in p["containers"][0]["volumeMounts"]} for p in pods]
    for name in ("runtime", "arena"):
        assert paths[0][name] == paths[1][name] and mounts[0][name] == mounts[1][name]
    assert kinds["Service"]["spec"]["selector"] == kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    assert kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]


def test_probes_and_metrics_are_there(world):
    world.expertd()
    server = Server(world)
    kinds = {d["kind"]: d for _, d in DOCUMENTS}
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server.get(container["readinessProbe"]["httpGet"]["path"])[0] == 200
    metric = kinds["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    annotations = kinds["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    text = server.get(annotations["prometheus.io/path"])[2].decode()
    assert re.search(rf"^{metric} \d", text, re.M)
    status = next(v["exec"]["command"] for v in walk(kinds["DaemonSet"]) if isinstance(v, dict) and "exec" in v)
    assert world.ctl(*status[1:2]).returncode == 0
