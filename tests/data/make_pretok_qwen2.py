#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/data/pretok_qwen2.jsonl: [text, [end of each piece in bytes]] a line, cut by the
`tokenizers` package (0.23.3 when last run). The demo model's small vocabulary hides many wrong cuts,
so the cuts are compared by themselves. Characters newer than Unicode 14 are left out: PCRE2 10.42
does not know them, other versions may.

    pip install tokenizers && tests/data/make_pretok_qwen2.py > tests/data/pretok_qwen2.jsonl
"""
import json
import random
import unicodedata

from tokenizers import Regex, pre_tokenizers

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ODD = [0x9, 0xA, 0xB, 0xC, 0xD, 0x1C, 0x1F, 0x20, 0x85, 0xA0, 0x1680, 0x180E, 0x2000, 0x2007, 0x200A, 0x200B, 0x2028,
       0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF, 0x17F, 0x212A, 0x301, 0x345, 0x2160, 0xBC, 0x663, 0x1F600, 0x200D]
WORDS = ["'s", "'S", "'\u017f", "'LL", "'lL", "'RE", "'ve", "'d", "'m", "'t", "don", "the", "  ", "\r\n", "\n\n", "...", "12",
         "Stra\u00dfe", "\u65e5\u672c", "\u0928\u092e\u0938\u094d", "\ufb01", "x", "!", " "]
rng = random.Random(14)


def piece():
    kind = rng.random()
    if kind < 0.35:
        return chr(rng.choice(ODD))
    if kind < 0.7:
        return rng.choice(WORDS)
    while True:
        c = chr(rng.randrange(0x20, rng.choice([0x7F, 0x250, 0x3000, 0x20000])))
        if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs"):
            return c


def main():
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    texts = ["".join(piece() for _ in range(rng.randrange(1, 14))) for _ in range(600)]
    texts += [f"s{chr(c)}s 1{chr(c)}2 \n{chr(c)}'s{chr(c)} \n {chr(c)}!" for c in ODD]
    for text in texts:
        ends, at = [], 0
        for part, _ in split.pre_tokenize_str(text):
            at += len(part.encode())
            ends.append(at)
        print(json.dumps([text, ends], separators=(",", ":")))


main()
