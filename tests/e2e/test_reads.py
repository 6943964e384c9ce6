# SPDX-License-Identifier: MIT
"""inferd logits --reads: many reads in one process, each with settings of its own, the same as in one of its own."""
import json
import signal
import subprocess

import pytest

from conftest import INFERD, prompts


def reads(world, lines, *options):
    r = subprocess.run([str(INFERD), "logits", *world.where(), "--raw", "--hash", "--positions", "none", "--reads", "-",
                        *map(str, options)], input="".join(line + "\n" for line in lines), capture_output=True, text=True,
                       timeout=120)
    assert r.returncode == 0, r.stderr
    return [json.loads(line) for line in r.stdout.splitlines()]


@pytest.fixture
def prompt(world):
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p40"]["text"])
    return path


def test_settings_of_each_read(world, prompt):
    world.expertd()
    alone = json.loads(world.inferd("logits", "--raw", "--hash", "--prompt-file", prompt).stdout)
    lines = ["--floor 1 --stream full", "--floor 1 --stream routed --order recent --depth 3 --ring 20", "", "--chunk 7",
             "--floor 1 --order index --ring 1"]
    got = reads(world, lines, "--prompt-file", prompt)
    assert [r["hash"] for r in got] == [alone["hash"]] * len(lines)
    assert [r["stream"]["policy"] for r in got[:2]] == ["full", "routed"]
    assert (got[1]["stream"]["order"], got[1]["stream"]["depth"], got[1]["stream"]["ring"]) == ("recent", 3, 20)
    for key in ("policy", "order", "depth", "ring", "entries", "routed", "copied", "dropped"):
        assert got[2]["stream"][key] == alone["stream"][key], f"{key} is not back to the default"
    assert got[3]["stream"]["chunks"] == 6
    assert (got[4]["stream"]["order"], got[4]["stream"]["ring"]) == ("index", 1)


def test_keep_goes_on(world, prompt):
    world.expertd()
    ids = prompts()["p40"]["ids"]
    one, head, tail = reads(world, [f"--ids {','.join(map(str, i))} --positions last {keep} -n 5" for i, keep in (
        (ids, ""), (ids[:13], ""), (ids[13:], "--keep"))])
    # the greedy tokens that head wrote are part of the conversation: without them it is the same
    assert head["greedy"]["ids"] and tail["ids"] == ids[13:]
    _, again = reads(world, [f"--ids {','.join(map(str, ids[:13]))}",
                             f"--ids {','.join(map(str, ids[13:]))} --keep --positions last --routes -n 5"])
    assert again["logits"][0]["logits"] == one["logits"][0]["logits"] and again["logits"][0]["position"] == len(ids) - 14
    assert again["greedy"] == one["greedy"] and len(again["routes"][0]) == (len(ids) - 13) * 8


def test_errors_are_objects(world, prompt):
    """One bad line does not end the others."""
    world.expertd()
    got = reads(world, ["--prompt-file /nonexistent", "--ids 4096", "--threads 1", "--resident 3", "--ids 1 --positions 99", "--ids 1 -n 9999",
                        f"--prompt-file {prompt}", "x" + " x" * 200])[:7]
    assert all(set(r) == {"error"} for r in got[:6]), got
    assert "vocabulary" in got[1]["error"] and "a line may set" in got[2]["error"] and "no position" in got[4]["error"]
    assert got[6]["hash"]


def test_next_expertd_is_taken(world, prompt):
    d = world.expertd()
    p = world.spawn([INFERD, "logits", *world.where(), "--raw", "--hash", "--positions", "none", "--prompt-file", prompt,
                     "--reads", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask():
        p.stdin.write("\n")
        p.stdin.flush()
        return json.loads(p.stdout.readline())

    want = ask()["hash"]
    for _ in range(3):
        d.kill(signal.SIGKILL)
        d.wait()
        d = world.expertd()
        assert ask()["hash"] == want
    p.stdin.close()
    assert p.wait(20) == 0
