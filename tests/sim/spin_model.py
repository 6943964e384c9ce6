# SPDX-License-Identifier: MIT
"""Checks the model of the ring and of peer death, expertd/exd_ring.pml, with spin.

    spin_model.py MODEL [--full]

The settings below are searched exhaustively: no assertion may fail, nothing may
stand still. Then each mutant of the model, which breaks one rule, must be found.
--full (or EXPERTD_SPIN=full) adds settings that take minutes. Exit status 77
where spin or gcc is missing.
"""
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

FULL, INDEX, EXPECTED, DEMAND = range(4)
POLICY = ["full", "routed by index", "routed by expected use", "demand"]
WORKER_DIES, EXPERTD_DIES, CANCEL, LINK_FAILS, STOP = 1, 2, 4, 8, 16

# policy, ring, depth, events, streams
SAFE = [(INDEX, 2, 1, WORKER_DIES, 1), (INDEX, 4, 2, STOP, 1), (EXPECTED, 2, 1, CANCEL, 1),
        (FULL, 1, 1, WORKER_DIES, 1), (DEMAND, 2, 1, LINK_FAILS, 1)]
LIVE = [("wait_ends", (INDEX, 2, 1, EXPERTD_DIES, 1)), ("closes", (DEMAND, 1, 1, WORKER_DIES, 1))]
SAFE_FULL = [(policy, ring, 2, events, streams) for policy in (FULL, INDEX, EXPECTED, DEMAND) for ring in (1, 2, 4)
             for events, streams in ((WORKER_DIES | CANCEL | LINK_FAILS | STOP, 1), (CANCEL, 2))]
LIVE_FULL = [(claim, (policy, ring, 1, events, 1)) for claim in ("wait_ends", "closes")
             for policy in (FULL, INDEX, EXPECTED, DEMAND) for ring in (1, 4)
             for events in (WORKER_DIES, EXPERTD_DIES, CANCEL | LINK_FAILS)]

# number: what it breaks, the claim that shows it (None: an assertion), settings in which it must be found
MUTANTS = {
    1: ("drops before the layer is published", None, (INDEX, 2, 1, 0, 1)),
    2: ("drops a routed expert", None, (INDEX, 2, 1, 0, 1)),
    3: ("overruns the ring by one group", None, (INDEX, 2, 1, 0, 1)),
    4: ("signals a group before its copy", None, (INDEX, 2, 2, 0, 1)),
    5: ("writes the table after the signal", None, (INDEX, 2, 2, 0, 1)),
    6: ("one copy more than depth", None, (INDEX, 2, 1, 0, 1)),
    7: ("forgets the unused groups", "wait_ends", (EXPECTED, 2, 1, 0, 1)),
    8: ("forgets to signal a group whose entry was dropped", "wait_ends", (INDEX, 1, 1, 0, 1)),
    9: ("unmaps before issuer and link have ended", None, (INDEX, 2, 1, WORKER_DIES, 1)),
    10: ("ends a cancelled stream with copies on the link", None, (INDEX, 2, 1, CANCEL, 2)),
    11: ("keeps the slots of the stream before", "wait_ends", (INDEX, 2, 1, 0, 2)),
    12: ("worker: releases before it has read", None, (INDEX, 2, 1, 0, 1)),
    13: ("worker: does not look whether expertd lives", "wait_ends", (INDEX, 2, 1, EXPERTD_DIES, 1)),
    14: ("worker: does not look whether the stream failed or it was detached", "wait_ends", (INDEX, 2, 1, LINK_FAILS, 1)),
    15: ("issuer: does not look whether it is to stop", "closes", (INDEX, 2, 1, WORKER_DIES, 1)),
    16: ("worker: reads after it has cancelled", None, (INDEX, 2, 1, CANCEL, 1)),
    17: ("never closes the session of a dead worker", "closes", (INDEX, 2, 1, WORKER_DIES, 1)),
}


def build(model, folder):
    shutil.copy(model, os.path.join(folder, "ring.pml"))
    subprocess.run(["spin", "-a", "ring.pml"], cwd=folder, check=True, capture_output=True)
    common = ["gcc", "-O1", "-w", "-DCOLLAPSE", "-DVECTORSZ=2048"]
    jobs = [subprocess.Popen([*common, *more, "-o", name, "pan.c"], cwd=folder)
            for name, more in (("safe", ["-DNOCLAIM", "-DSAFETY"]), ("live", ["-DNFAIR=3"]))]
    if any([p.wait() for p in jobs]):
        sys.exit("spin_model: the model cannot be compiled")


def run(folder, settings, claim=None, mutant=0):
    """(found, states, what pan says): found is an assertion, a dead end or an endless wait."""
    policy, ring, depth, events, streams = settings
    env = dict(os.environ, MUTANT=str(mutant), POLICY=str(policy), RING=str(ring), DEPTH=str(depth), EVENTS=str(events),
               STREAMS_RUN=str(streams))
    # -E: only claims; an end state of a broken model is none of its business
    argv = ["./live", "-a", "-f", "-E", "-N", claim] if claim else ["./safe"]
    with tempfile.TemporaryDirectory(dir=folder) as own:  # of the trail
        shutil.copy(os.path.join(folder, argv[0]), own)
        out = subprocess.run([*argv, "-m400000", "-w22"], cwd=own, env=env, capture_output=True, text=True).stdout
    errors = re.search(r"errors: (\d+)", out)
    if not errors or "max search depth too small" in out or "out of memory" in out:
        return None, 0, out
    states = int(re.search(r"(\d+) states, stored", out).group(1))
    what = re.search(r"^pan:\d+: (.*)", out, re.M)
    return errors.group(1) != "0", states, what.group(1) if what else ""


def main():
    full = "--full" in sys.argv or os.environ.get("EXPERTD_SPIN") == "full"
    if not shutil.which("spin") or not shutil.which("gcc"):
        print("spin_model: skipped: spin or gcc is not installed: tools/setup --tests")
        return 77
    began = time.monotonic()
    jobs = [(s, None, 0) for s in SAFE + (SAFE_FULL if full else [])]
    jobs += [(s, claim, 0) for claim, s in LIVE + (LIVE_FULL if full else [])]
    jobs += [(s, claim, m) for m, (_, claim, s) in MUTANTS.items()]
    bad = states = 0
    with tempfile.TemporaryDirectory(prefix="spin-") as folder:
        build(sys.argv[1], folder)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for (s, claim, mutant), (found, n, what) in zip(jobs, pool.map(lambda j: run(folder, *j), jobs)):
                right = found == bool(mutant) and found is not None
                bad += not right
                states += n
                name = f"mutant {mutant}: {MUTANTS[mutant][0]}" if mutant else claim or "safety"
                print(f"{'ok ' if right else 'BAD'} {name}: {POLICY[s[0]]}, ring {s[1]}, depth {s[2]}, events {s[3]}, streams "
                      f"{s[4]}: {n} states{', found: ' + what if found else ''}{' ' + what if found is None else ''}", flush=True)
    print(f"{len(jobs)} searches, {len(MUTANTS)} of them of mutants, {states} states, {time.monotonic() - began:.0f} s, {bad} bad")
    return 1 if bad else 0


sys.exit(main())
