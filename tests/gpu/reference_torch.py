#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""reference_torch.py BUILD [TOKENS...]: a second reference at real shapes. A synthetic model (qwen3-30b-a3b cut to 4
layers on a GPU, `tiny` on the host; SHAPE overrides mkmodel's options) is computed by inferd and, independently, in
float32 by PyTorch (on its GPU if it has one, TF32 off) or else by numpy, from the same GGUF file.

Bounds, for each prompt: logits within 3e-3 of the greatest, KL below 1e-3 in the mean; and where a token took other
experts than the reference, though the same ones in the layers before, the reference's 8th and 9th score must be
within MARGIN of each other. Such tokens may be off by more. EXPERTD_DEVICE as in gpu_kit.py. Exit status 1: a bound
does not hold.
"""
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ["EXPERTD_BUILD"] = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve())
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
import numpy as np  # noqa: E402

import gguf_io as G  # noqa: E402
from gpu_kit import MKMODEL, ON_GPU, SERVER, Reader, World  # noqa: E402

try:
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    GPU = torch.cuda.is_available()
except ImportError:
    torch, GPU = None, False

LOGITS, KL, MARGIN = 3e-3, 1e-3, 0.01
SHAPE = os.environ.get("SHAPE", "--preset=qwen3-30b-a3b --layers=4 --vocab=16384" if ON_GPU else
                       "--preset=tiny --vocab=2048").split()
POSITIONS = 40  # whose logits are compared


# What numpy and PyTorch call differently.
def put(array):
    if torch is None:
        return array
    return torch.from_numpy(np.ascontiguousarray(array).copy()).to("cuda" if GPU else "cpu")


def fetch(x):
    return x if torch is None else x.cpu().numpy()


def exp(x):
    return np.exp(x) if torch is None else torch.exp(x)


def softmax(x):
    if torch is not None:
        return torch.softmax(x, -1)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rmsnorm(x, weight, eps):
    mean = (x * x).mean(-1)[..., None]
    return x / (mean + eps) ** 0.5 * weight


def best(scores, k):
    """The k greatest of each row, in falling order."""
    if torch is None:
        return np.argsort(-scores, -1, kind="stable")[:, :k]
    return torch.sort(scores, dim=-1, descending=True, stable=True)[1][:, :k]


class Model:
    def __init__(self, path):
        self.keys, self.tensors = G.read_gguf(path)
        a = self.keys["general.architecture"]
        self.layers, self.heads, self.kv_heads = (self.keys[f"{a}.{k}"] for k in (
            "block_count", "attention.head_count", "attention.head_count_kv"))
        self.eps, self.base = self.keys[f"{a}.attention.layer_norm_rms_epsilon"], self.keys[f"{a}.rope.freq_base"]
        self.used = self.keys[f"{a}.expert_used_count"]
        self.kept = {}
        self.head_dim = self.keys[f"{a}.attention.key_length"]

    def weight(self, name):
        typ, shape, raw = self.tensors[name + ".weight"]
        return put(G.dequantize(raw, typ, shape))

    def expert(self, name, e):
        """A matrix of one expert; kept where there is memory for it."""
        if (name, e) not in self.kept:
            matrix = put(self.decode(name, e))
            if not GPU:
                return matrix
            self.kept[name, e] = matrix
        return self.kept[name, e]

    def decode(self, name, e):
        typ, shape, raw = self.tensors[name + ".weight"]
        each = len(raw) // shape[0]
        return G.dequantize(raw[e * each:(e + 1) * each], typ, shape[1:])

    def attention(self, layer, x):
        n, d = len(x), self.head_dim
        blk = f"blk.{layer}."
        h = rmsnorm(x, self.weight(blk + "attn_norm"), self.eps)
        q, k, v = ((h @ self.weight(blk + f"attn_{w}").T).reshape(n, -1, d) for w in "qkv")
        q = self.rotate(rmsnorm(q, self.weight(blk + "attn_q_norm"), self.eps))
        k = self.rotate(rmsnorm(k, self.weight(blk + "attn_k_norm"), self.eps))
        hidden = put(np.triu(np.full((n, n), -np.inf, np.float32), 1))
        each, out = self.heads // self.kv_heads, []
        for head in range(self.heads):
            kv = head // each
            out.append(softmax(q[:, head] @ k[:, kv].T / d ** 0.5 + hidden) @ v[:, kv])
        y = np.concatenate(out, 1) if torch is None else torch.cat(out, 1)
        return x + y @ self.weight(blk + "attn_output").T

    def rotate(self, x):
        n, half = len(x), self.head_dim // 2
        angle = np.arange(n, dtype=np.float64)[:, None] * self.base ** (-np.arange(half, dtype=np.float64) / half)
        cos, sin = (put(f(angle).astype(np.float32)[:, None]) for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        parts = (a * cos - b * sin, b * cos + a * sin)
        return np.concatenate(parts, -1) if torch is None else torch.cat(parts, -1)

    def experts(self, layer, x):
        """(the layer's output, experts of each token, distance of the last chosen score to the next)"""
        blk = f"blk.{layer}."
        h = rmsnorm(x, self.weight(blk + "ffn_norm"), self.eps)
        scores = h @ self.weight(blk + "ffn_gate_inp").T
        order = fetch(best(scores, self.used + 1))
        flat = fetch(scores)
        rows = np.arange(len(x))
        margin = flat[rows, order[:, self.used - 1]] - flat[rows, order[:, self.used]]
        chosen = order[:, :self.used]
        p = fetch(softmax(scores))[rows[:, None], chosen]
        p = p / p.sum(1, keepdims=True)
        out = x * 1
        names = [blk + f"ffn_{w}_exps" for w in ("gate", "up", "down")]
        used = sorted(set(chosen.ravel().tolist()))
        with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            weights = pool.map(lambda e: [self.expert(name, e) for name in names], used)
            for e, (gate, up, down) in zip(used, weights):
                token, place = np.nonzero(chosen == e)
                at = put(token)
                g, u = h[at] @ gate.T, h[at] @ up.T
                y = (g / (1 + exp(-g)) * u) @ down.T * put(p[token, place][:, None].astype(np.float32))
                out[at] = out[at] + y  # no token is there twice
        return out, chosen, margin

    def logits(self, ids, positions):
        typ, shape, raw = self.tensors["token_embd.weight"]
        each = len(raw) // shape[0]
        x = put(np.concatenate([G.dequantize(raw[i * each:(i + 1) * each], typ, (1, shape[1])) for i in ids]))
        routes, margins = [], []
        for layer in range(self.layers):
            x, chosen, margin = self.experts(layer, self.attention(layer, x))
            routes.append(chosen)
            margins.append(margin)
        x = rmsnorm(x[put(np.array(positions))], self.weight("output_norm"), self.eps)
        head = "output" if "output.weight" in self.tensors else "token_embd"
        return fetch(x @ self.weight(head).T), routes, margins


def divergence(want, got):
    p, q = want.astype(np.float64), got.astype(np.float64)
    p, q = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(1)


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
    want, routes, margins = model.logits(got["ids"], positions)
    mine = np.array([row["logits"] for row in got["logits"]], np.float32)
    first, flipped, worst = {}, 0, 0.0
    for layer, (a, b) in enumerate(zip(got["routes"], routes)):
        a = np.sort(np.array(a).reshape(tokens, -1), 1)
        for token in np.nonzero((a != np.sort(b, 1)).any(1))[0].tolist():
            flipped += 1
            if token not in first:
                first[token] = layer
                worst = max(worst, float(margins[layer][token]))
    off = np.abs(mine - want).max(1) / np.abs(want).max(1)
    other = np.array([p in first for p in positions])
    kl = divergence(want, mine)
    same = float(off[~other].max(initial=0))
    good = same < LOGITS and kl.mean() < KL and worst < MARGIN and np.isfinite(mine).all()
    print(f"{tokens} tokens: logits off by {same:.2e} ({(~other).sum()} positions), {off[other].max(initial=0):.2e} "
          f"({other.sum()} with other experts); KL mean {kl.mean():.2e}, most {kl.max():.2e}; {flipped} of "
          f"{tokens * len(routes)} routings differ, greatest margin {worst:.4f} (median of all "
          f"{np.median(np.concatenate(margins)):.3f}); greatest logit equal at {(mine.argmax(1) == want.argmax(1)).mean():.2f} "
          f"of the positions; inferd {read:.1f} s, reference {time.monotonic() - start - read:.1f} s: "
          f"{'ok' if good else 'FAILED'}", flush=True)
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
