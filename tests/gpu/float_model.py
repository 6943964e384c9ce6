# SPDX-License-Identifier: MIT
"""qwen3moe in float32, independently of inferd: by PyTorch (on its GPU if it has one, TF32 off) or else by numpy, from
the same GGUF file.

`forced` routes make it follow another computation's choices of experts: where two scores are nearer than 16-bit
operands resolve, a token takes another expert and leaves the reference for good, and with it, a little, all that look
at it. Following the choices, logits can be held to a bound everywhere; the choices are judged by how much the
reference itself prefers others (`margins`).
"""
import concurrent.futures
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
import numpy as np  # noqa: E402

import gguf_io as G  # noqa: E402

try:
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    GPU = torch.cuda.is_available()
except ImportError:
    torch, GPU = None, False


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
        self.kept, self.keeps = {}, GPU or os.path.getsize(path) < 1 << 28
        self.head_dim = self.keys[f"{a}.attention.key_length"]

    def weight(self, name):
        typ, shape, raw = self.tensors[name + ".weight"]
        if not self.keeps:
            return put(G.dequantize(raw, typ, shape))
        if name not in self.kept:
            self.kept[name] = put(G.dequantize(raw, typ, shape))
        return self.kept[name]

    def expert(self, name, e):
        """A matrix of one expert; kept where there is memory for it."""
        if (name, e) not in self.kept:
            matrix = put(self.decode(name, e))
            if not self.keeps:
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

    def experts(self, layer, x, forced=None):
        """(the layer's output, experts of each token in rising order, how much they are preferred: the least score
        among them minus the greatest among the others; below 0 where others were forced)"""
        blk = f"blk.{layer}."
        h = rmsnorm(x, self.weight(blk + "ffn_norm"), self.eps)
        scores = h @ self.weight(blk + "ffn_gate_inp").T
        chosen = np.sort(fetch(best(scores, self.used)) if forced is None else forced, 1)
        flat, rows = fetch(scores).copy(), np.arange(len(x))[:, None]
        least = flat[rows, chosen].min(1)
        flat[rows, chosen] = -np.inf
        margin = least - flat.max(1)
        p = fetch(softmax(scores))[rows, chosen]
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

    def logits(self, ids, positions, forced=None):
        """(logits of the positions, experts, margins); forced: for each layer [tokens][experts]."""
        typ, shape, raw = self.tensors["token_embd.weight"]
        each = len(raw) // shape[0]
        x = put(np.concatenate([G.dequantize(raw[i * each:(i + 1) * each], typ, (1, shape[1])) for i in ids]))
        routes, margins = [], []
        for layer in range(self.layers):
            x, chosen, margin = self.experts(layer, self.attention(layer, x), forced and forced[layer])
            routes.append(chosen)
            margins.append(margin)
        x = rmsnorm(x[put(np.array(positions))], self.weight("output_norm"), self.eps)
        head = "output" if "output.weight" in self.tensors else "token_embd"
        return fetch(x @ self.weight(head).T), routes, margins


def divergence(want, got):
    p, q = want.astype(np.float64), got.astype(np.float64)
    p, q = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(1)


def compare_routed(model, ids, positions, got):
    """Holds an answer of `inferd logits --routes` against the float32 model, once as it chooses experts itself and once
    as they were chosen there. A dict: off (greatest error of each position, over the greatest logit, by the same
    experts), free_off and kl (the same and the divergence by its own experts), flipped (routings that differ), tokens
    (with such), far (how much the reference prefers others, at most: where experts were chosen that its scores do not
    justify), want and followed (logits by its own experts and by those), mine."""
    mine = np.array([row["logits"] for row in got["logits"]], np.float32)
    forced = [np.array(flat).reshape(len(ids), -1) for flat in got["routes"]]
    want, routes, _ = model.logits(ids, positions)
    same = [(np.sort(a, 1) == b).all(1) for a, b in zip(forced, routes)]
    followed, _, margins = model.logits(ids, positions, forced) if not np.all(same) else (want, None, [np.zeros(1)])
    return {"mine": mine, "want": want, "followed": followed, "off": error(mine, followed), "free_off": error(mine, want),
            "kl": divergence(want, mine), "flipped": int(sum((~s).sum() for s in same)),
            "tokens": np.nonzero(~np.all(same, 0))[0], "far": max(0.0, -min(float(m.min()) for m in margins)),
            "finite": bool(np.isfinite(mine).all())}


def error(got, want):
    return np.abs(got - want).max(1) / np.abs(want).max(1)
