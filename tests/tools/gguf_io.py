# SPDX-License-Identifier: MIT
"""Reading and writing GGUF v3 files, and the block formats used in them.

Only numpy is needed. Written from the published description of the format:
little-endian; header 'GGUF', version, tensor count, key count; keys; tensor
infos; then the tensor data, each tensor aligned to general.alignment bytes.

    write_gguf(path, keys, tensors)       keys: [(name, type, value)], tensors: [(name, ggml type, shape, bytes)]
    read_gguf(path) -> (keys, tensors)    tensors: {name: (ggml type, shape, bytes)}
    quantize(array, type) -> bytes        array: float32, rows in the last axis
    dequantize(bytes, type, shape) -> float32 array

Shapes here are numpy shapes (slowest axis first); GGUF stores them reversed.
"""
import struct
import numpy as np

# ggml type: (id, elements a block, bytes a block, general.file_type when most tensors have it)
TYPES = {"F32": (0, 1, 4, 0), "F16": (1, 1, 2, 1), "Q4_0": (2, 32, 18, 2), "Q8_0": (8, 32, 34, 7),
         "Q4_K": (12, 256, 144, 15), "Q5_K": (13, 256, 176, 17), "Q6_K": (14, 256, 210, 18), "BF16": (30, 1, 2, 32)}
BY_ID = {v[0]: k for k, v in TYPES.items()}
F = np.float32

def nbytes(typ, shape):
    _, per, size, _ = TYPES[typ]
    assert shape[-1] % per == 0, (typ, shape)
    return int(np.prod(shape)) // per * size

# ------------------------------------------------------------------ bfloat16
def f32_to_bf16(x):
    """Round to nearest even; returns uint16."""
    u = np.ascontiguousarray(x, F).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)

def bf16_to_f32(u):
    return (u.astype(np.uint32) << 16).view(F)

def rnd(x):
    """Round half away from zero (C roundf)."""
    return np.trunc(x + np.copysign(F(0.5), x))

# ---------------------------------------------------------------------- Q8_0
def q_q8_0(x):
    b = x.reshape(-1, 32)
    d = np.abs(b).max(1) / F(127)
    with np.errstate(divide="ignore"):
        inv = np.where(d > 0, F(1) / d, F(0)).astype(F)
    out = np.empty((len(b), 34), np.uint8)
    out[:, :2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:] = rnd(b * inv[:, None]).astype(np.int8).view(np.uint8)
    return out.tobytes()

def d_q8_0(raw):
    b = np.frombuffer(raw, np.uint8).reshape(-1, 34)
    d = b[:, :2].copy().view(np.float16).astype(F)
    return d * b[:, 2:].view(np.int8).astype(F)

# ---------------------------------------------------------------------- Q4_0
def q_q4_0(x):
    b = x.reshape(-1, 32)
    m = b[np.arange(len(b)), np.abs(b).argmax(1)]                # the value of largest magnitude, with its sign
    d = (m / F(-8)).astype(F)
    with np.errstate(divide="ignore"):
        inv = np.where(d != 0, F(1) / d, F(0)).astype(F)
    q = np.clip(np.floor(b * inv[:, None] + F(8.5)), 0, 15).astype(np.uint8)
    out = np.empty((len(b), 18), np.uint8)
    out[:, :2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:] = q[:, :16] | (q[:, 16:] << 4)                    # low nibbles: first half of the block
    return out.tobytes()

def d_q4_0(raw):
    b = np.frombuffer(raw, np.uint8).reshape(-1, 18)
    d = b[:, :2].copy().view(np.float16).astype(F)
    q = np.concatenate([b[:, 2:] & 15, b[:, 2:] >> 4], 1).astype(F) - F(8)
    return d * q

# ---------------------------------------------------------------- Q4_K, Q5_K
# 256 weights: f16 d, f16 dmin, 12 bytes of 6-bit scales and minima for eight
# sub-blocks of 32, (Q5_K: 32 bytes of fifth bits,) 128 bytes of nibbles.
# weight = d * scale * q - dmin * min.
def q_q4_k(x, chunk=1 << 14, top=15):
    b = x.reshape(-1, 256)
    return b"".join(_q45_k(b[i:i + chunk], top) for i in range(0, len(b), chunk))

def _q45_k(b, top):
    n = len(b)
    s = b.reshape(n, 8, 32).astype(F)
    w = np.sqrt((s * s).mean(2, keepdims=True, dtype=np.float64)).astype(F) + np.abs(s)    # importance of each weight
    lo = np.minimum(s.min(2, keepdims=True), F(0))
    hi = s.max(2, keepdims=True)
    span = np.maximum(hi - lo, F(1e-30))
    best_e = np.full((n, 8, 1), np.inf, np.float64)
    best_d = np.zeros((n, 8, 1), F)
    best_m = np.zeros((n, 8, 1), F)
    sw = w.sum(2, keepdims=True, dtype=np.float64)
    sx = (w * s).sum(2, keepdims=True, dtype=np.float64)
    for k in range(-1, 21):                    # candidate step sizes; for each, the least-squares scale and minimum
        inv = (F(top) + F(0.1) * F(k) - F(1) if k >= 0 else F(top)) / span
        q = np.clip(rnd(inv * (s - lo)), 0, top).astype(F)
        wq = w * q
        sq = wq.sum(2, keepdims=True, dtype=np.float64)
        sqq = (wq * q).sum(2, keepdims=True, dtype=np.float64)
        sxq = (wq * s).sum(2, keepdims=True, dtype=np.float64)
        det = sw * sqq - sq * sq
        ok = det > 0
        det = np.where(ok, det, 1)
        d = np.where(ok, (sw * sxq - sx * sq) / det, 0)
        m = np.where(ok, (sqq * sx - sq * sxq) / det, 0)
        pos = (m > 0) | ~ok                                    # the minimum may not be positive
        d = np.where(pos, np.where(sqq > 0, sxq / np.maximum(sqq, 1e-300), 0), d)
        m = np.where(pos, 0, m)
        e = (w * (d * q + m - s) ** 2).sum(2, keepdims=True, dtype=np.float64)
        better = (e < best_e) & (d > 0)
        best_e = np.where(better, e, best_e)
        best_d = np.where(better, d, best_d).astype(F)
        best_m = np.where(better, m, best_m).astype(F)
    sc, mn = best_d[..., 0], -best_m[..., 0]                   # both >= 0
    D = (sc.max(1) / F(63)).astype(np.float16)
    M = (mn.max(1) / F(63)).astype(np.float16)
    d32, m32 = D.astype(F), M.astype(F)
    with np.errstate(divide="ignore", invalid="ignore"):
        ls = np.clip(rnd(np.where(d32[:, None] > 0, sc / d32[:, None], 0).astype(F)), 0, 63).astype(np.uint8)
        lm = np.clip(rnd(np.where(m32[:, None] > 0, mn / m32[:, None], 0).astype(F)), 0, 63).astype(np.uint8)
        dd = d32[:, None] * ls.astype(F)
        mm = m32[:, None] * lm.astype(F)
        q = np.where(dd[..., None] > 0, (s + mm[..., None]) / dd[..., None], 0).astype(F)
    q = np.clip(rnd(q), 0, top).astype(np.uint8)
    out = np.zeros((n, 144 if top == 15 else 176), np.uint8)
    out[:, 0:2] = D.view(np.uint8).reshape(-1, 2)
    out[:, 2:4] = M.view(np.uint8).reshape(-1, 2)
    out[:, 4:8] = (ls[:, :4] & 63) | ((ls[:, 4:] >> 4) << 6)
    out[:, 8:12] = (lm[:, :4] & 63) | ((lm[:, 4:] >> 4) << 6)
    out[:, 12:16] = (ls[:, 4:] & 15) | ((lm[:, 4:] & 15) << 4)
    if top == 31:                                              # bit j of byte l: fifth bit of weight l of sub-block j
        out[:, 16:48] = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[None, :, None], 1)
    q = (q & 15).reshape(n, 4, 2, 32)
    out[:, -128:] = (q[:, :, 0] | (q[:, :, 1] << 4)).reshape(n, 128)
    return out.tobytes()

def d_q4_k(raw, size=144):
    b = np.frombuffer(raw, np.uint8).reshape(-1, size)
    n = len(b)
    D = b[:, 0:2].copy().view(np.float16).astype(F)
    M = b[:, 2:4].copy().view(np.float16).astype(F)
    ls = np.concatenate([b[:, 4:8] & 63, (b[:, 12:16] & 15) | ((b[:, 4:8] >> 6) << 4)], 1).astype(F)
    lm = np.concatenate([b[:, 8:12] & 63, (b[:, 12:16] >> 4) | ((b[:, 8:12] >> 6) << 4)], 1).astype(F)
    qs = b[:, -128:].reshape(n, 4, 32)
    q = np.stack([qs & 15, qs >> 4], 2).reshape(n, 8, 32)
    if size == 176:
        q = q | (((b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1) << 4)
    q = q.astype(F)
    return ((D * ls)[..., None] * q - (M * lm)[..., None]).reshape(n, 256)

# ---------------------------------------------------------------------- Q6_K
# 256 weights: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 int8
# scales (one for 16 weights), f16 d. weight = d * scale * (q - 32).
def q_q6_k(x, chunk=1 << 14):
    b = x.reshape(-1, 256)
    return b"".join(_q6_k(b[i:i + chunk]) for i in range(0, len(b), chunk))

def _q6_k(b):
    n = len(b)
    s = b.reshape(n, 16, 16).astype(F)
    w = s * s
    idx = np.abs(s).argmax(2)[..., None]
    top = np.take_along_axis(s, idx, 2)                        # signed value of largest magnitude
    safe = np.where(top == 0, F(1), top)
    best = np.full((n, 16, 1), -1.0, np.float64)
    scale = np.zeros((n, 16, 1), F)
    for k in range(-9, 10):
        inv = -(F(32) + F(0.1) * F(k)) / safe
        q = np.clip(rnd(inv * s), -32, 31).astype(F)
        sxq = (w * s * q).sum(2, keepdims=True, dtype=np.float64)
        sqq = (w * q * q).sum(2, keepdims=True, dtype=np.float64)
        gain = np.where(sqq > 0, sxq * sxq / np.maximum(sqq, 1e-300), 0)
        better = gain > best
        best = np.where(better, gain, best)
        scale = np.where(better & (sqq > 0), sxq / np.maximum(sqq, 1e-300), scale).astype(F)
    scale = np.where(top == 0, F(0), scale)[..., 0]
    ms = scale[np.arange(n), np.abs(scale).argmax(1)]
    D = (ms / F(-128)).astype(np.float16)
    d32 = D.astype(F)
    with np.errstate(divide="ignore", invalid="ignore"):
        ls = np.where(d32[:, None] != 0, scale / d32[:, None], 0).astype(F)
        ls = np.clip(rnd(ls), -128, 127).astype(np.int8)
        dd = d32[:, None] * ls.astype(F)
        q = np.where(dd[..., None] != 0, s / dd[..., None], 0).astype(F)
    q = (np.clip(rnd(q), -32, 31) + 32).astype(np.uint8).reshape(n, 2, 4, 32)
    out = np.zeros((n, 210), np.uint8)
    ql = np.stack([(q[:, :, 0] & 15) | ((q[:, :, 2] & 15) << 4), (q[:, :, 1] & 15) | ((q[:, :, 3] & 15) << 4)], 2)
    qh = (q[:, :, 0] >> 4) | ((q[:, :, 1] >> 4) << 2) | ((q[:, :, 2] >> 4) << 4) | ((q[:, :, 3] >> 4) << 6)
    out[:, :128] = ql.reshape(n, 128)
    out[:, 128:192] = qh.reshape(n, 64)
    out[:, 192:208] = ls.view(np.uint8)
    out[:, 208:210] = D.view(np.uint8).reshape(-1, 2)
    return out.tobytes()

def d_q6_k(raw):
    b = np.frombuffer(raw, np.uint8).reshape(-1, 210)
    n = len(b)
    ql = b[:, :128].reshape(n, 2, 2, 32)
    qh = b[:, 128:192].reshape(n, 2, 32)
    q = np.stack([(ql[:, :, 0] & 15) | ((qh & 3) << 4), (ql[:, :, 1] & 15) | (((qh >> 2) & 3) << 4),
                  (ql[:, :, 0] >> 4) | (((qh >> 4) & 3) << 4), (ql[:, :, 1] >> 4) | ((qh >> 6) << 4)], 2)
    q = q.reshape(n, 16, 16).astype(F) - F(32)
    ls = b[:, 192:208].copy().view(np.int8).astype(F)
    D = b[:, 208:210].copy().view(np.float16).astype(F)
    return ((D * ls)[..., None] * q).reshape(n, 256)

# ------------------------------------------------------------------- general
def quantize(x, typ):
    x = np.ascontiguousarray(x, F)
    if typ == "F32":
        return x.tobytes()
    if typ == "F16":
        return x.astype(np.float16).tobytes()
    if typ == "BF16":
        return f32_to_bf16(x).tobytes()
    assert x.shape[-1] % TYPES[typ][1] == 0, (typ, x.shape)
    return {"Q8_0": q_q8_0, "Q4_0": q_q4_0, "Q4_K": q_q4_k, "Q6_K": q_q6_k,
            "Q5_K": lambda y: q_q4_k(y, top=31)}[typ](x)

def dequantize(raw, typ, shape):
    if typ == "F32":
        a = np.frombuffer(raw, F)
    elif typ == "F16":
        a = np.frombuffer(raw, np.float16).astype(F)
    elif typ == "BF16":
        a = bf16_to_f32(np.frombuffer(raw, np.uint16))
    else:
        a = {"Q8_0": d_q8_0, "Q4_0": d_q4_0, "Q4_K": d_q4_k, "Q6_K": d_q6_k,
             "Q5_K": lambda b: d_q4_k(b, 176)}[typ](raw)
    return a.reshape(shape)

SCALAR = {"u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"),
          "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d")}
SC_BY_ID = {v[0]: (k, v[1]) for k, v in SCALAR.items()}

def _s(s):
    b = s.encode("utf-8")
    return struct.pack("<Q", len(b)) + b

def _value(typ, v):
    if typ == "str":
        return struct.pack("<I", 8) + _s(v)
    if typ.startswith("["):                                     # "[str]", "[i32]", ...
        el = typ[1:-1]
        head = struct.pack("<IIQ", 9, 8 if el == "str" else SCALAR[el][0], len(v))
        return head + b"".join(_s(x) if el == "str" else struct.pack(SCALAR[el][1], x) for x in v)
    return struct.pack("<I", SCALAR[typ][0]) + struct.pack(SCALAR[typ][1], v)

def write_gguf(path, keys, tensors, align=32):
    pad = lambda n: -n % align
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_s(k) + _value(t, v) for k, t, v in keys)
    off = 0
    for name, typ, shape, data in tensors:
        assert len(data) == nbytes(typ, shape), name
        head += _s(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", TYPES[typ][0], off)
        off += len(data) + pad(len(data))
    with open(path, "wb") as f:
        f.write(head + b"\0" * pad(len(head)))
        for _, _, _, data in tensors:
            f.write(data + b"\0" * pad(len(data)))

def read_gguf(path, typed=False):
    """(keys, tensors) as in the head of this file; with typed also the keys as write_gguf takes them."""
    with open(path, "rb") as f:
        b = f.read()
    p = 0
    def take(fmt):
        nonlocal p
        v = struct.unpack_from(fmt, b, p)
        p += struct.calcsize(fmt)
        return v if len(v) > 1 else v[0]
    def string():
        nonlocal p
        n = take("<Q")
        p += n
        return b[p - n:p].decode("utf-8")
    def value(t):
        """(type as in write_gguf, value)"""
        if t == 8:
            return "str", string()
        if t == 9:
            et, n = take("<I"), take("<Q")
            el = "str" if et == 8 else SC_BY_ID[et][0]
            return f"[{el}]", [value(et)[1] for _ in range(n)]
        return SC_BY_ID[t][0], take(SC_BY_ID[t][1])
    assert b[:4] == b"GGUF"
    p = 4
    version, nt, nk = take("<IQQ")
    assert version == 3
    order = []
    for _ in range(nk):
        k = string()
        order.append((k, *value(take("<I"))))
    keys = {k: v for k, _, v in order}
    infos = []
    for _ in range(nt):
        name, nd = string(), take("<I")
        dims = [take("<Q") for _ in range(nd)]
        typ, off = take("<IQ")
        infos.append((name, BY_ID[typ], tuple(reversed(dims)), off))
    align = keys.get("general.alignment", 32)
    base = p + (-p % align)
    tensors = {n: (t, s, b[base + o:base + o + nbytes(t, s)]) for n, t, s, o in infos}
    return (keys, tensors, order) if typed else (keys, tensors)

if __name__ == "__main__":                                      # self-test: round trips and errors of each format
    g = np.random.default_rng(1)
    x = (g.standard_normal((64, 512)) * g.uniform(0.2, 2, (64, 1)) * 0.05).astype(F)
    x[3] = 0
    x[4, :256] = np.abs(x[4, :256])
    x[5] = 0.25
    for t in TYPES:
        raw = quantize(x, t)
        assert len(raw) == nbytes(t, x.shape)
        y = dequantize(raw, t, x.shape)
        print(f"{t:5s} {8 * len(raw) / x.size:6.3f} bits a weight, relative error "
              f"{np.sqrt(((x - y) ** 2).sum() / (x ** 2).sum()):.5f}, all finite {np.isfinite(y).all()}")
