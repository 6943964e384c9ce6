# SPDX-License-Identifier: MIT
"""kill -9 of either side in mid-stream, on a GPU: no error on the other side, device memory back to where it was, the
next answer right.

    EXPERTD_BUILD=build python3 -m pytest -s tests/gpu/test_kills_gpu.py

EXPERTD_KILLS (100) of each, EXPERTD_KILL_LANES (6) at a time.
"""
import os
import random
import signal
import threading
import time

from gpu_kit import (ON_GPU, SERVER, Reader, gpu_memory, process_facts, prompts, serve,
                     world)  # noqa: F401

LANES = int(os.environ.get("EXPERTD_KILL_LANES", "6" if ON_GPU else "2"))
ORDERS = ("index", "recent", "predicted")
KILLS = int(os.environ.get("EXPERTD_KILLS", "100" if ON_GPU else "20"))
SLOW_STREAM = ["--floor", 1, "--stream", "full", "--ring", 1, "--chunk", 40]  # as long as one can be


def write_prompts(world):
    path = world.path / "prompt.txt"
    path.write_text(prompts()["p300"]["text"])
    return path


def test_workers_killed(world):
    """Workers that are killed, several at a time, beside one worker that must not notice and whose every answer is right."""
    start = time.monotonic()
    d = world.expertd(*SERVER)
    prompt = write_prompts(world)
    survivor = Reader(world, "--hash", "--prompt-file", prompt, "--floor", 1)
    want = survivor.ask()["hash"]
    before, facts = gpu_memory(), process_facts(d.pid)
    answers, times, wrong, kills, rng = [], [], [], 0, random.Random(1)
    active, done = threading.Event(), threading.Event()

    def live():
        while not done.is_set():
            if active.wait(0.1):
                answers.append(survivor.ask("--order", ORDERS[len(answers) % 3], "--stream", ("full", "routed")[len(answers) % 2])["hash"])

    thread = threading.Thread(target=live)
    thread.start()
    try:
        # Rounds: contexts are made while nobody reads, for beside a busy worker each takes over a second.
        while kills < KILLS:
            begin = time.monotonic()
            readers = [Reader(world, "--prompt-file", prompt) for _ in range(min(LANES, KILLS - kills))]
            for reader in readers:
                reader.say("--ids", "5,6,7")
            for reader in readers:
                reader.hear()
            times.append((time.monotonic() - begin) / len(readers))
            before_round = len(answers)
            active.set()
            for reader in readers:
                for _ in range(20):
                    reader.say(*SLOW_STREAM)
            time.sleep(0.03)
            for reader in readers:
                time.sleep(rng.random() * 0.1 / LANES)
                if reader.process.poll() is not None:
                    wrong.append(f"ended by itself: {reader.log()}")
                reader.process.send_signal(signal.SIGKILL)
            for reader in readers:
                reader.process.wait()
                reader.process.stdin.close()
                reader.process.stdout.close()
                kills += 1
            world.until(lambda: len(answers) > before_round + 1, what="the survivor answers")
            active.clear()
            if len(times) % 5 == 1:
                print(f"  {kills} killed after {time.monotonic() - start:.1f} s, each {times[-1]:.2f} s until its first answer; "
                      f"{len(answers)} answers beside", flush=True)
    finally:
        done.set()
        thread.join()
    assert d.process.poll() is None, d.text()
    world.until(lambda: len(world.status()["workers"]) == 1, timeout=10, what="sessions of the dead closed")
    world.until(lambda: gpu_memory() <= before + 8, timeout=10, what=f"device memory back to {before} MiB", every=0.2)
    assert survivor.ask()["hash"] == want
    survivor.end()
    world.until(lambda: not world.status()["workers"], timeout=10, what="last session closed")
    after = process_facts(d.pid)
    odd = [line for line in d.text().splitlines() if "warning" in line or "error" in line]
    died = d.text().count("has ended: session")
    print(f"{kills} workers killed in {time.monotonic() - start:.1f} s ({LANES} at once, each {sorted(times)[len(times) // 2]:.2f} s "
          f"until its first answer), {died} told; {len(answers)} answers beside them, "
          f"{sum(a != want for a in answers)} wrong; device memory {before} MiB again; expertd {facts} -> {after}; {len(odd)} warnings: {sorted({line[:160] for line in odd})[:4]}", flush=True)
    assert kills == KILLS and not wrong, wrong
    assert answers and all(a == want for a in answers)
    assert all(after[k] <= facts[k] for k in facts), "expertd keeps something of the dead"
    again = Reader(world, "--hash", "--prompt-file", prompt)
    assert again.ask()["hash"] == want
    again.end()


def test_expertd_killed(world):
    """Each lane: one worker that lives through all of them; expertd killed and started again, arena adopted."""
    start = time.monotonic()
    lanes = LANES
    prompt = write_prompts(world)
    names = [f"lane{n}" for n in range(lanes)]
    daemons = serve(world, {name: [] for name in names})
    readers = {name: Reader(world, "--prompt-file", prompt, instance=name) for name in names}
    ask = ["--hash", "--ids", ",".join(map(str, prompts()["p40"]["ids"])), "--ring", 96, "--floor", 1, "--stream", "routed"]
    want = readers[names[0]].ask(*ask)["hash"]
    for reader in readers.values():
        assert reader.ask(*ask)["hash"] == want
    before = gpu_memory()
    rng, in_stream, kills, said, answers = random.Random(3), 0, 0, set(), 0
    back, restart = [], []
    # Rounds: all lanes at once. Processes are begun by this thread: they die with the thread that began them.
    while kills < KILLS:
        for reader in readers.values():
            reader.say(*SLOW_STREAM)
        time.sleep(0.03)
        for name in names:
            time.sleep(rng.random() * 0.05 / lanes)
            daemons[name].kill()
        for name in names:
            daemons[name].wait()
            kills += 1
        begin = time.monotonic()
        daemons = serve(world, {name: [] for name in names})
        restart.append(time.monotonic() - begin)
        for reader in readers.values():
            r = reader.hear()
            in_stream += "this read is lost" in r.get("error", "")
            said.add(r.get("error"))
            reader.say(*ask)
        for name, reader in readers.items():
            r = reader.hear()
            assert r.get("hash") == want, f"{name} after kill {kills}: {r}"
            answers += 1
        back.append(time.monotonic() - begin)
        if len(back) % 4 == 1:
            print(f"  {kills} killed after {time.monotonic() - start:.1f} s, serving again after {restart[-1]:.2f} s, answered "
                  f"after {back[-1]:.2f} s", flush=True)
    assert all("adopted" in d.text() for d in daemons.values()), daemons[names[0]].text()
    memory = gpu_memory()
    facts = [process_facts(r.process.pid) for r in readers.values()]
    print(f"{kills} times killed in {time.monotonic() - start:.1f} s ({lanes} at once, serving after "
          f"{sorted(restart)[len(restart) // 2]:.2f} s, answered after {sorted(back)[len(back) // 2]:.2f} s), {in_stream} in mid-stream; {answers} answers after it, "
          f"all right; device memory {before} -> {memory} MiB; workers {facts[0]}; said: {said - {None}}", flush=True)
    assert in_stream >= kills * 3 // 4, "too few in mid-stream"
    assert memory <= before + 8, "device memory grew"
    assert max(f["fds"] for f in facts) < 80
    for reader in readers.values():
        reader.end()
