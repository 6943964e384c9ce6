#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the larger reference models that the goldens belong to.

    make_models.py OUTDIR [bf16] [q8_0]        (default: both)

story-bf16.gguf is unpacked from story-bf16.gguf.xz beside this script;
story-q8_0.gguf is quantized from it. Each is checked against the SHA-256 of the
file that the reference outputs were computed from. A file that is there already and
right is left alone; a new one appears under its name only when complete.
"""
import hashlib
import lzma
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tools"))

SHA256 = {
    "bf16": "adb4644c3088356c6b9ee33410d8d4f684461a91a9322715772889fa9c1a28a6",
    "q8_0": "dc82050b50bdc789877140817a7f6888e7047d63b448baab86b65b7a308819cb",
}
FILE_TYPE_Q8_0 = 7


def good(path, kind):
    try:
        with open(path, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest() == SHA256[kind]
    except FileNotFoundError:
        return False


def write_bf16(path, _outdir):
    with lzma.open(os.path.join(HERE, "story-bf16.gguf.xz")) as src, open(path, "wb") as dst:
        dst.write(src.read())


def write_q8_0(path, outdir):
    import gguf_io as G        # needs numpy
    _, tensors, keys = G.read_gguf(make("bf16", outdir), typed=True)
    keys = [(k, t, FILE_TYPE_Q8_0 if k == "general.file_type" else v) for k, t, v in keys]
    out = []
    for name, (typ, shape, raw) in tensors.items():     # norms and routers stay in float32
        if typ != "F32":
            raw, typ = G.quantize(G.dequantize(raw, typ, shape), "Q8_0"), "Q8_0"
        out.append((name, typ, shape, raw))
    G.write_gguf(path, keys, out)


def make(kind, outdir):
    path = os.path.join(outdir, f"story-{kind}.gguf")
    if not good(path, kind):
        part = f"{path}.{os.getpid()}.part"
        try:
            {"bf16": write_bf16, "q8_0": write_q8_0}[kind](part, outdir)
            if not good(part, kind):
                sys.exit(f"{path}: the SHA-256 differs from the reference file's; the goldens do not apply")
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)
    return path


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or set(sys.argv[2:]) - set(SHA256):
        sys.exit(__doc__)
    os.makedirs(sys.argv[1], exist_ok=True)
    for kind in sys.argv[2:] or ["bf16", "q8_0"]:
        print(make(kind, sys.argv[1]))


if __name__ == "__main__":
    main()
