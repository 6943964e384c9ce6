# SPDX-License-Identifier: MIT
"""Several instances under one memory budget; evict."""
import json
import pathlib

from conftest import Chat, SLOW


def arena(world, instance):
    return world.arena / instance / instance / "arena"


def evict(world, instance, status, words=()):
    r = world.ctl("evict", instance, check=False, instance=instance)
    assert r.returncode == status, r.stdout + r.stderr
    text = r.stdout if status == 0 else r.stderr
    for word in words:
        assert word in text, text
    assert len(text.splitlines()) == 1
    return text


def test_an_instance_that_does_not_fit_is_refused_with_numbers(world):
    a = world.expertd("--park", "off", instance="a")
    size = world.status("a")["arena"]["bytes"]
    assert world.status("a")["budget"] == {"bytes": 0, "bytes_held": 0, "instances": []}
    world.ctl("stop", instance="a")
    assert a.wait() == 0 and arena(world, "a").stat().st_size == size
    assert f"a {size / 2**20:.1f} MiB (kept)" in world.ctl("doctor", check=False).stdout
    budget = size + size // 2
    b = world.expertd("--memory-budget", budget, instance="b", wait=False)
    assert b.wait() == 1
    for words in ("--memory-budget: the model needs", f"a {size / 2**20:.1f} MiB (kept)", "expertctl evict"):
        assert words in b.text(), b.text()
    assert not arena(world, "b").exists()
    # the same instance again is no second one: it adopts what it has
    a = world.expertd("--park", "off", "--memory-budget", budget, instance="a")
    status = world.status("a")
    assert status["adopted"]
    assert status["budget"] == {"bytes": budget, "bytes_held": size,
                                "instances": [{"instance": "a", "bytes": size, "runs": True}]}
    b = world.expertd("--memory-budget", budget, instance="b", wait=False)
    assert b.wait() == 1 and "MiB (runs)" in b.text(), b.text()
    world.ctl("stop", instance="a")
    assert a.wait() == 0
    evict(world, "a", 0, [f"{size / 2**20:.1f} MiB given back", str(arena(world, "a"))])
    assert list((world.arena / "a").iterdir()) == []
    evict(world, "a", 1, ["holds no arena"])
    b = world.expertd("--memory-budget", budget, instance="b")
    # what the budget leaves: an eighth is too little for a park
    assert world.status("b")["park"]["bytes"] == 0 and "--memory-budget" in world.status("b")["park"]["note"]
    world.expertd("--memory-budget", size * 2 + 2**30, instance="c")
    park = world.status("c")["park"]["bytes"]
    assert 2**20 <= park <= 2**27
    b.kill()
    b.wait()  # what it left counts as ever
    mib = lambda n: f"{n / 2**20:.1f} MiB"
    text = world.ctl("status", instance="c").stdout
    assert (f"\nbudget     {mib(2 * size + park)} of {(size * 2 + 2**30) / 2**30:.1f} GiB held by instances: "
            f"b {mib(size)} (kept), c {mib(size + park)} (runs)\n") in text, text
    assert json.loads(world.ctl("counters", "--json", instance="c").stdout)["store"]["budget_held_bytes"] == 2 * size + park


def test_evict_leaves_alone_what_is_in_use(world):
    d = world.expertd()
    evict(world, "default", 1, ["takes workers", "drain"])
    chat = Chat(world, "--temperature", "0", "-n", "2")
    chat.ask("Hello.")
    evict(world, "default", 1, ["1 workers use", str(chat.process.pid)])
    d.kill()  # the worker stays, and has the arena mapped
    d.wait()
    evict(world, "default", 1, ["still have the arena", f"{chat.process.pid} (inferd)"])
    assert arena(world, "default").exists()
    chat.end()
    d = world.expertd()
    assert world.status()["adopted"]
    world.ctl("drain")
    r = world.ctl("evict", "default", "--json")  # drained, and nobody is attached: expertd ends
    out = json.loads(r.stdout)
    assert d.wait(60 * SLOW) == 0
    assert out["evict"] and out["bytes"] > 0 and pathlib.Path(out["path"]) == arena(world, "default")
    assert list((world.arena / "default").iterdir()) == []
    evict(world, "nobody", 2)


def test_evict_gives_back_what_a_killed_expertd_left(world):
    d = world.expertd("--park", "64M")
    place = arena(world, "default").parent
    assert (place / "park").exists()
    d.kill()
    d.wait()
    (place / "arena").rename(place / "arena.new")  # as if it was killed while the memory was allocated
    evict(world, "default", 0, ["given back"])
    assert not place.exists()
    evict(world, "default", 1, ["holds no arena"])


def test_evict_while_the_instance_starts_again(world):
    """Either it says that it is in use, or the start builds the arena anew; the claim is there in any case."""
    d = world.expertd()
    for _ in range(3):
        d.kill()
        d.wait()
        d = world.expertd(wait=False)
        r = world.ctl("evict", "default", check=False)
        assert r.returncode in (0, 1) and len((r.stdout + r.stderr).splitlines()) == 1
        world.until(lambda: world.status().get("state") == "serving", what=d.text())
        assert (world.runtime / "expertd/default/arena.claim").exists() and arena(world, "default").exists()


def test_an_arena_left_at_another_place_is_named(world):
    world.expertd().kill()
    left = arena(world, "default")
    other = world.arena / "other"
    other.mkdir(mode=0o700)
    d = world.expertd("--arena-dir", other)
    assert f"unused: rm {left}" in d.text() and not world.status()["adopted"]
    d.kill()
    d.wait()
    assert "unused" not in world.expertd("--arena-dir", other).text()
    assert world.status()["adopted"]
