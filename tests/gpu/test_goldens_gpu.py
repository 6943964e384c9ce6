# SPDX-License-Identifier: MIT
"""Reference outputs on a GPU: ids, logits, routing, greedy text; long prompts; a follow-up turn.

    EXPERTD_BUILD=build python3 -m pytest -s tests/gpu/test_goldens_gpu.py

The reference's own logits (tests/data/goldens, a few positions) and, at many positions, the float32 model of
float_model.py, itself held to them here. Bounds:

  - logits within 3e-3 of the greatest where the reference follows the GPU's choices of experts, at every position;
  - each choice within MARGIN of a score of what the reference prefers, and few that differ (0.4%, or three);
  - KL to the reference with its own choices below 1e-3 in each prompt's mean;
  - greedy text equal up to a step whose top two are closer in the reference than 2e-2 of the greatest logit (listed);
  - a follow-up turn, cut into chunks: the same bits as all at once.
"""
import os

import numpy as np
import pytest

from float_model import Model, compare_routed, error
from gpu_kit import ON_GPU, SERVER, Reader, prompts, world  # noqa: F401
from test_goldens import KINDS, reference

LOGITS, KL, MARGIN, FLIPPED_SHARE = 3e-3, 1e-3, 0.02, 0.004
GREEDY = 2e-2
POSITIONS = 160  # whose logits are compared, of each prompt
ONLY = os.environ.get("EXPERTD_PROMPTS")  # "p5,p40": of an emulated GPU, which is slow


def check_greedy(got, want, scale):
    """(what is to be said, is it wrong). The tokens come from the kernels for single tokens; the distance of the first
    two logits is held to the reference's, too, but for a few steps in which a tie of experts fell the other way."""
    ids, bound = got["ids"], GREEDY * scale
    step = next((i for i, (a, b) in enumerate(zip(ids, want["greedy_ids"])) if a != b), len(ids))
    off = sorted([0.0] + [abs(a - b) / scale for a, b in zip(got["margins"][:step], want["greedy_margin"])])
    usual = off[len(off) * 9 // 10]
    wrong = usual > LOGITS or off[-1] > 0.2
    said = f"{step} steps equal, margins off by {usual:.2e} (nine in ten), {off[-1]:.2e} (most)"
    if step < len(ids):
        margin = want["greedy_margin"][step]
        said += f"; the next has a margin of {margin:.4f} in the reference (bound {bound:.4f})"
        return said, margin > bound or wrong
    return said, wrong


def check_prompt(model, gpu, kind, ref, full, want, text):
    """One prompt; returns what is wrong with it."""
    name, bad, ids = want["name"], [], text["ids"]
    tokens = len(ids)
    golden = {f["position"]: full[f["offset"]:f["offset"] + ref["vocab"]] for f in want["full_logits"]}
    positions = sorted(set(golden) | set(range(tokens - 1, -1, -max(1, -(-tokens // POSITIONS)))))
    prompt = ["--ids", ",".join(map(str, ids))]
    got = gpu.ask(*prompt, "--positions", ",".join(map(str, positions)), "--routes", "-n", 64)
    r = compare_routed(model, ids, positions, got)
    at = [positions.index(p) for p in golden]
    # A tie of two experts (2e-5 of a score in p40) may fall either way in the float32 model, too.
    exact = min(error(r[which][at], np.array(list(golden.values()))).max() for which in ("want", "followed"))
    share, kl = r["flipped"] / (tokens * len(got["routes"])), r["kl"]
    if exact >= 2e-2:
        bad.append(f"{name}: the float32 model is off by {exact:.2e} from the reference itself")
    if not (r["off"].max() < LOGITS and kl.mean() < KL and r["far"] < MARGIN and r["finite"]):
        bad.append(f"{name}: logits off by {r['off'].max():.2e} with the same experts; mean KL {kl.mean():.2e}; experts chosen "
                   f"against {r['far']:.4f} of a score")
    if share > FLIPPED_SHARE and r["flipped"] > 3:
        bad.append(f"{name}: {100 * share:.2f}% of the routings differ")
    greedy, wrong = check_greedy(got["greedy"], want, np.abs(full).max())
    if wrong:
        bad.append(f"{name}: greedy text {greedy}")
    # The same prompt in two turns, the second cut into chunks, is the same bits.
    cut = tokens // 3
    if cut:
        gpu.ask("--ids", ",".join(map(str, ids[:cut])))
        rest = [p - cut for p in positions if p >= cut]
        turn = gpu.ask("--keep", "--chunk", max(1, tokens // 2), "--ids", ",".join(map(str, ids[cut:])),
                       "--positions", ",".join(map(str, rest)), "-n", 64)
        rows = np.array([row["logits"] for row in turn["logits"]], np.float32)
        if not np.array_equal(rows, r["mine"][-len(rest):]) or turn["greedy"]["ids"] != got["greedy"]["ids"]:
            bad.append(f"{name}: a follow-up turn from token {cut} on gives other logits or text")
    print(f"{kind} {name}: {len(positions)} positions: logits off by {r['off'].max():.2e} with the same experts, "
          f"{r['free_off'].max():.2e} with the reference's own (itself off by {exact:.1e} from the stored); KL mean {kl.mean():.2e}, most {kl.max():.2e}; {r['flipped']} "
          f"routings differ ({100 * share:.2f}%, {len(r['tokens'])} tokens), by at most {r['far']:.4f} of a score; greedy: "
          f"{greedy}; turn from token {cut}", flush=True)
    return bad


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_goldens(world, kind):
    if not KINDS[kind].exists():
        pytest.skip(f"{KINDS[kind]} is not made (tests/data/make_models.py)")
    world.expertd(*SERVER, model=KINDS[kind])
    gpu, model = Reader(world), Model(KINDS[kind])
    ref, full = reference(kind)
    full = np.array(full, np.float32)
    texts, bad = prompts(), []
    for want in ref["results"]:
        if ONLY and want["name"] not in ONLY.split(","):
            continue
        if texts[want["name"]].get("text"):
            path = world.path / "text.txt"
            path.write_text(texts[want["name"]]["text"])
            got = gpu.ask("--prompt-file", path)
            if got["ids"] != texts[want["name"]]["ids"]:
                bad.append(f"{want['name']}: token ids")
        bad += check_prompt(model, gpu, kind, ref, full, want, texts[want["name"]])
    gpu.end()
    assert not bad, "\n".join(bad)
