# SPDX-License-Identifier: MIT
"""The alerts fire on what they speak of: real metrics before and after, judged by Prometheus' own rule tester."""
import json
import re
import shutil
import signal
import subprocess
import time

import pytest

from conftest import Chat, SLOW, TOP
from serving import Server

pytestmark = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: tools/setup --tests installs it")
ALERTS = TOP / "tools/prometheus/alerts.yml"
DASHBOARD = TOP / "tools/grafana/expertd.json"
TALE = "Tell me a long tale of a fox, a bear, a wolf and a bird. " * 8
BEFORE, AFTER = 6, 7  # minutes of the judge's clock


def promtool(*argv):
    r = subprocess.run(["promtool", *map(str, argv)], capture_output=True, text=True, timeout=60 * SLOW)
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


def rules():
    """{name: (labels, annotations)} of the alerts."""
    found = {}
    for block in ALERTS.read_text().split("      - alert: ")[1:]:
        severity = re.search(r"severity: (\w+)", block).group(1)
        notes = dict(re.findall(r'^ {10}(summary|remedy): "(.*)"$', block, re.M))
        found[block.split("\n")[0]] = ({"severity": severity}, notes)
    return found


def scrape(world, server=None, instance="default"):
    text = world.ctl("metrics", instance=instance).stdout if not server else server.get("/metrics")[2].decode()
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            if server:
                name = re.sub(r"\{|$", '{instance="a:1",', name, count=1) if "{" in name else name + '{instance="a:1"}'
            values[name] = value
    return values


def judge(world, alert, before, after, labels):
    """The alert is silent on the metrics before and fires on those after, with these labels."""
    severity, notes = rules()[alert]
    expand = lambda text: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: labels.get(m.group(1), ""), text)
    series = [{"series": name, "values": " ".join([before.get(name, "_")] * BEFORE + [after.get(name, "_")] * 3)}
              for name in {**before, **after}]
    fires = {"exp_labels": {**labels, **severity}, "exp_annotations": {k: expand(v) for k, v in notes.items()}}
    test = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [{
        "interval": "1m", "input_series": series, "alert_rule_test": [
            {"eval_time": f"{BEFORE - 1}m", "alertname": alert, "exp_alerts": []},
            {"eval_time": f"{AFTER}m", "alertname": alert, "exp_alerts": [fires]}]}]}
    path = world.path / f"{alert}.yml"
    path.write_text(json.dumps(test))  # JSON is YAML
    promtool("test", "rules", path)


def labels_of(values, metric):
    (name,) = [n for n in values if n.startswith(metric + "{")]
    return dict(re.findall(r'(\w+)="([^"]*)"', name))


def test_rules_are_well_formed():
    promtool("check", "rules", ALERTS)
    assert len(rules()) == ALERTS.read_text().count("- alert:") >= 5


def test_dashboard_speaks_of_metrics_that_exist(world):
    """Each expression parses, and each metric in it is one of counters.spec."""
    listed = {c["metric"]: c["kind"] for c in json.loads(world.ctl("counters", "--list", "--json").stdout)}
    known = set(listed) | {m + s for m, k in listed.items() if k == "histogram" for s in ("_bucket", "_sum", "_count")}
    dashboard = json.loads(DASHBOARD.read_text())
    exprs = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    exprs += [a["expr"] for a in dashboard["annotations"]["list"]]
    assert len(exprs) > 25
    for text in exprs + [ALERTS.read_text()]:
        assert set(re.findall(r"\b(?:expertd|inferd)_\w+", text)) <= known, text
    plain = lambda e: e.replace("$__rate_interval", "5m").replace("$store", ".*").replace("$worker", ".*")
    path = world.path / "dashboard.yml"
    path.write_text(json.dumps({"groups": [{"name": "d", "rules": [
        {"record": f"panel{i}", "expr": plain(e)} for i, e in enumerate(exprs)]}]}))
    promtool("check", "rules", path)


@pytest.mark.slow
def test_stalled_worker_and_restart(world):
    """A worker stopped in the middle of a stream; meanwhile another instance's expertd is killed and started again."""
    world.expertd("--floor", "16")
    chat = Chat(world, "--link-gbps", "0.0002", "--temperature", "0", "-n", "1", "--ignore-eos")
    chat.say(TALE)
    world.until(lambda: scrape(world).get(f'expertd_worker_streaming{{store="default",worker="inferd",pid="{chat.process.pid}"}}')
                == "1", what="it streams")
    before = scrape(world)
    chat.process.send_signal(signal.SIGSTOP)
    other = world.expertd(instance="b")
    up = scrape(world, instance="b")
    other.kill()
    other.wait()
    down = scrape(world, instance="b")
    judge(world, "ExpertdDown", up, down, labels_of(down, "expertd_up"))
    world.expertd(instance="b")
    judge(world, "ExpertdRestarted", up, scrape(world, instance="b"), {"store": "b"})
    age = f'expertd_worker_progress_age_seconds{{store="default",worker="inferd",pid="{chat.process.pid}"}}'
    after = world.until(lambda: (s := scrape(world)) and float(s[age]) > 10 and s, what="ten seconds", timeout=30, every=0.2)
    judge(world, "ExpertdWorkerStalled", before, after,
          labels_of(after, "expertd_worker_streaming"))
    chat.process.send_signal(signal.SIGCONT)


def test_waste_and_slow_link(world):
    world.expertd("--floor", "16")
    chat = Chat(world, "--temperature", "0", "-n", "1", "--ignore-eos", "--chunk", "64", "--link-gbps", "0.5", "--order",
                "recent")
    chat.ask(TALE)
    before = scrape(world)
    who = ["--worker", chat.process.pid]
    world.ctl("configure", *who, "--stream", "full")
    chat.ask(TALE)
    full = scrape(world)
    labels = labels_of(full, "expertd_worker_streaming")
    judge(world, "ExpertdWasteHigh", before, full, labels)
    world.ctl("configure", *who, "--stream", "routed", "--link-gbps", "0.02")
    chat.ask(TALE)
    judge(world, "ExpertdLinkSlow", full, scrape(world), labels)
    assert chat.end() == 0


def test_long_queue(world):
    world.expertd()
    server = Server(world, "--queue", "4")
    before = scrape(world, server)
    # At most one runs more than the server takes at once; the rest wait.
    jobs = []
    while scrape(world, server)['inferd_queue_waiting{instance="a:1"}'] != "4":
        assert len(jobs) < 200
        jobs.append(server.start_stream(max_tokens=2000))
        time.sleep(0.02)
    judge(world, "InferdQueueLong", before, scrape(world, server), {"instance": "a:1"})
    for s in jobs:
        s.close()
