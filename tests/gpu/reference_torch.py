#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""reference_torch.py BUILD [TOKENS...]: a second reference at real shapes. A synthetic model (qwen3-30b-a3b cut to 4
layers on a GPU, `tiny` on the host; SHAPE overrides mkmodel's options) is computed by inferd and, independently, in
float32 by PyTorch (on its GPU if it has one, TF32 off) or else by numpy, from the same GGUF file.

Bounds, for each prompt: logits within 3e-3 of the greatest where the reference follows inferd's choices of experts,
those choices within MARGIN of a score of the reference's own, KL to the reference with its own choices below 1e-3 in
the mean. EXPERTD_DEVICE as in gpu_kit.py. Exit status 1: a bound does not hold.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ["EXPERTD_BUILD"] = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve())
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import numpy as np  # noqa: E402

from float_model import GPU, G, Model, compare_routed, torch  # noqa: E402
from gpu_kit import MKMODEL, ON_GPU, SERVER, Reader, World  # noqa: E402

LOGITS, KL, MARGIN = 3e-3, 1e-3, 0.01
SHAPE = os.environ.get("SHAPE", "--preset=qwen3-30b-a3b --layers=4 --vocab=16384" if ON_GPU else
                       "--preset=tiny --vocab=2048").split()
POSITIONS = 40  # whose logits are compared


def make_model(path):
    """mkmodel's norms are ones and its attention adds little, which would hide mistakes: other norms, so that every
    part counts (without rotation, say, the logits are off by 0.06)."""
    subprocess.run([str(MKMODEL), *SHAPE, path + ".ones"], check=True, stdout=subprocess.DEVNULL)
    _, tensors, keys = G.read_gguf(path + ".ones", typed=True)
    os.unlink(path + ".ones")
    rng = np.random.default_rng(1)
    gains = {"attn_norm": 8, "attn_q_norm": 1.6, "attn_k_norm": 1.6, "ffn_norm": 2, "output_norm": 3}
    changed = []
    for name, (typ, shape, raw) in tensors.items():
        part = name.split(".")[-2]
        if part.endswith("norm"):
            raw = (gains.get(part, 1) * rng.uniform(0.6, 1.4, shape)).astype(np.float32).tobytes()
        changed.append((name, typ, shape, raw))
    G.write_gguf(path, keys, changed)


def compare(model, reader, text, tokens):
    start = time.monotonic()
    positions = sorted({min(p, tokens - 1) for p in range(tokens - 1, -1, -max(1, tokens // POSITIONS))})
    got = reader.ask("--prompt-file", text, "--routes", "--positions", ",".join(map(str, positions)))
    read = time.monotonic() - start
    assert len(got["ids"]) == tokens, f"the text has {len(got['ids'])} tokens"
    r = compare_routed(model, got["ids"], positions, got)
    kl = r["kl"]
    good = r["off"].max() < LOGITS and kl.mean() < KL and r["far"] < MARGIN and r["finite"]
    print(f"{tokens} tokens, {len(positions)} positions: logits off by {r['off'].max():.2e} with the same experts, "
          f"{r['free_off'].max():.2e} with the reference's own; KL mean {kl.mean():.2e}, most {kl.max():.2e}; {r['flipped']} of "
          f"{tokens * len(got['routes'])} routings differ, by at most {r['far']:.4f} of a score; greatest logit equal at "
          f"{(r['mine'].argmax(1) == r['want'].argmax(1)).mean():.2f} of the positions; inferd {read:.1f} s, reference "
          f"{time.monotonic() - start - read:.1f} s: {'ok' if good else 'FAILED'}", flush=True)
    return good


def main():
    sizes = [int(n) for n in sys.argv[2:]] or ([300, 4096] if ON_GPU else [40, 300])
    print(f"reference: {'numpy' if torch is None else f'PyTorch {torch.__version__} on the ' + ('GPU' if GPU else 'CPU')}; "
          f"model: {' '.join(SHAPE)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="xd-", dir="/dev/shm") as path:
        world, good = World(path), True
        try:
            file = f"{path}/model.gguf"
            make_model(file)
            world.expertd(*SERVER, model=file)
            model, reader = Model(file), Reader(world, "--chunk", max(sizes))
            for tokens in sizes:
                text = world.path / f"{tokens}.txt"
                text.write_text(subprocess.run([str(MKMODEL), *SHAPE, f"--text={tokens}"], check=True, capture_output=True,
                                               text=True).stdout)
                good &= compare(model, reader, text, tokens)
            reader.end()
        finally:
            world.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
