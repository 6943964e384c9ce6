#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/data/goldens/tokenizers.json.gz: for each pre-tokenizer and for SentencePiece a small
vocabulary, trained here, and fuzzed texts with the cuts and the ids that the reference makes of them.

The reference is the `tokenizers` package, set up as each model family's tokenizer.json does it, checked
against `tiktoken` where that is the original (gpt-4o, glm4); and `sentencepiece` for the
last. Characters are those of Unicode 14.0, the version of PCRE2 10.40 to 10.42 and of Python 3.11:
newer ones are letters for a newer reference and signs for an older PCRE2.

    pip install tokenizers tiktoken sentencepiece && tests/data/make_tokenizer_goldens.py
    ... --texts 30000 --seed 2 --out /tmp/long.json.gz     then
    EXPERTD_TOKENIZERS=/tmp/long.json.gz build/tests/unit/t_tokenizers    the long comparison
"""
import argparse
import gzip
import io
import json
import os
import random
import sys
import unicodedata
from pydoc_data.topics import topics

import sentencepiece
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

assert unicodedata.unidata_version == "14.0.0", "take Python 3.11: characters of Unicode 14.0 are wanted"

SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HEAD, TAIL = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943")
IDEOGRAM = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DIGIT = None  # each number by itself

# Name in tokenizer.ggml.pre: patterns one after the other, whole words first, what tiktoken takes.
FAMILIES = {
    "qwen2": ([LLAMA3.replace("{1,3}", "")], False, None),
    "llama-bpe": ([LLAMA3], True, LLAMA3),
    "glm4": ([LLAMA3], False, LLAMA3),
    "gpt-4o": ([f"{HEAD}{UP}*{LOW}+{SUFFIX}?|{HEAD}{UP}+{LOW}*{SUFFIX}?|\\p{{N}}{{1,3}}{TAIL}"], False, 0),
    "tekken": ([f"{HEAD}{UP}*{LOW}+|{HEAD}{UP}+{LOW}*|\\p{{N}}{TAIL}"], True, 0),
    "deepseek-v3": ([r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                     "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                     "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"], False, None),
    "deepseek-llm": (["[\r\n]", f"\\s?[{CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                      "\\s+$", IDEOGRAM, DIGIT], False, None),
    "deepseek-coder": (["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAM, DIGIT], False, None),
}

SPACE = [0x9, 0xA, 0xB, 0xC, 0xD, 0x1C, 0x1F, 0x20, 0x85, 0xA0, 0x1680, 0x180E, 0x2000, 0x2007, 0x200A, 0x200B, 0x2028,
         0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF]
ODD = [0x17F, 0x212A, 0x301, 0x345, 0x2160, 0xBC, 0x663, 0x200D, 0xFE0F, 0x1C5, 0x2B0, 0x2C6, 0x3007, 0x4DFF, 0x4E00,
       0x9FA5, 0x9FA6, 0x7FF, 0x800, 0xABFF, 0xAC00, 0xD7A3, 0x3040, 0x309F, 0x30A0, 0x30FF, 0x3100, 0xFF0F, 0xFF10,
       0x2017, 0x2018, 0x2581, 0x1F600, 0x1F1E6, 0x10400, 0x1E900, 0xE0100, 0x10FFFD, 0xFFFD]
WORDS = ["'s", "'S", "'\u017f", "'LL", "'lL", "'RE", "'ve", "'d", "'m", "'t", "don't", "the", "  ", "\r\n", "\n\n", "\n \n",
         "...", "12", "1234567", "3.14", "Stra\u00dfe", "STRASSE", "camelCase", "HTTPServer", "\u65e5\u672c", "\u65e5\u672c\u8a9e\u304b\u306a",
         "\u0928\u092e\u0938\u094d", "\ufb01", "x", "!", " ", "e\u0301", "\uac00\ub098", "\U0001f468\u200d\U0001f469", "://", "/\n", "\t\t",
         " = ", "();", "\u00bd", "\u0661\u0662", "\u2603\ufe0f", "\u0414\u043e\u043c", "\u1f48\u03b4", "    ", "\u00a0 ", "_x", "#!", "\u3002", "\uff01", "$", "+1"]


def corpus(rng):
    """Lines that any Python 3.11 has, and words of many scripts."""
    lines = [line for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    rng.shuffle(lines)
    scripts = [(0x41, 0x7A), (0xC0, 0x24F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x627, 0x64A), (0x905, 0x939),
               (0x4E00, 0x4E60), (0x3041, 0x3096), (0xAC00, 0xAC40), (0x1F600, 0x1F640)]
    for _ in range(1500):
        low, high = rng.choice(scripts)
        words = ["".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 6))]
        lines.append(" ".join(words) + rng.choice(["", ".", "\n", " 2024", "'s", "!"]))
    return lines[:6000] + lines[-1500:]


def piece(rng):
    kind = rng.random()
    if kind < 0.15:
        return chr(rng.choice(SPACE)) * rng.choice([1, 1, 1, 2, 5])
    if kind < 0.25:
        return chr(rng.choice(ODD))
    if kind < 0.6:
        return rng.choice(WORDS)
    if kind < 0.7:
        return "".join(rng.choice("0123456789\u0665\u0966\u00b2") for _ in range(rng.randrange(1, 8)))
    while True:
        c = chr(rng.randrange(0, rng.choice([0x7F, 0x250, 0x600, 0x3000, 0x10000, 0x20000, 0x110000])))
        if unicodedata.category(c) not in ("Cn", "Cs"):
            return c


def fuzz(rng, n, lines):
    texts = [f"s{chr(c)}s 1{chr(c)}2 \n{chr(c)}'s{chr(c)} \n {chr(c)}!" for c in SPACE + ODD]
    texts += ["", " ", "\n", "a" * 300, " " * 200 + "x", "\n" * 150, "1" * 100, "\u65e5" * 120, "=" * 99, "aB" * 60]
    edges = {d for c in CASED for d in (ord(c) - 1, ord(c), ord(c) + 1)}
    if n > 5000:  # the long comparison: every character
        edges = range(0x110000)
    known = [chr(c) for c in edges if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    texts += [" x".join(known[i:i + 40]) + "\u00e9".join(known[i:i + 40]) for i in range(0, len(known), 40)]
    while len(texts) < n:
        if rng.random() < 0.2:
            line = rng.choice(lines)
            at = rng.randrange(len(line))
            texts.append(line[at:at + rng.randrange(1, 120)])
        else:
            texts.append("".join(piece(rng) for _ in range(rng.randrange(1, 16))))
    return texts


def splits(patterns):
    return [pre_tokenizers.Digits(individual_digits=True) if p is DIGIT else pre_tokenizers.Split(Regex(p), "isolated")
            for p in patterns]


def byte_level(name, lines, texts):
    patterns, whole, tik = FAMILIES[name]
    cutter = pre_tokenizers.Sequence(splits(patterns))
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(splits(patterns) + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=1400, show_progress=False,
                                                       initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    model = json.loads(tok.to_str())["model"]
    vocab = model["vocab"]
    merges = [tuple(x) if isinstance(x, list) else tuple(x.split(" ")) for x in model["merges"]]
    if whole:  # some words are tokens that no merges lead to
        merges = [x for i, x in enumerate(merges) if i % 9 != 8 or len("".join(x)) < 5]
    tok.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=whole)
    tokens = sorted(vocab, key=vocab.get)
    if tik is not None and not whole:
        unbyte = {c: b for b, c in bytes_to_unicode().items()}
        original = tiktoken.Encoding(name, pat_str=tik or patterns[0], special_tokens={},
                                     mergeable_ranks={bytes(unbyte[c] for c in t): i for i, t in enumerate(tokens)})
        for text in texts:
            assert original.encode_ordinary(text) == tok.encode(text).ids, (name, text)
    out = []
    for text in texts:
        ends, at = [], 0
        for part, _ in cutter.pre_tokenize_str(text) if text else []:
            at += len(part.encode())
            ends.append(at)
        out.append([text, ends, tok.encode(text).ids])
    return {"pre": name, "tokens": tokens, "merges": [" ".join(x) for x in merges], "texts": out}


def bytes_to_unicode():
    same = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [b for b in range(256) if b not in same]
    return {**{b: chr(b) for b in same}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def pieces(lines, texts, prefix):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=1600, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix, character_coverage=0.995,
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2, num_threads=1)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = sp.get_piece_size()
    types = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 5 if sp.is_unused(i) else 1 for i in range(n)]
    return {"spm": True, "add_space_prefix": prefix, "tokens": [sp.id_to_piece(i) for i in range(n)],
            "scores": [sp.get_score(i) for i in range(n)], "types": types,
            "texts": [[text, None, sp.encode(text)] for text in texts]}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--texts", type=int, default=400, help="a family")
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--out", default=os.path.join(here, "goldens", "tokenizers.json.gz"))
    o = args.parse_args()
    lines, families = corpus(random.Random(7)), {}
    for i, name in enumerate(FAMILIES):
        families[name] = byte_level(name, lines, fuzz(random.Random(o.seed * 100 + i), o.texts, lines))
        print(name, len(families[name]["tokens"]), file=sys.stderr)
    for prefix in (True, False):
        name = "spm" if prefix else "spm-no-prefix"
        texts = [t for t in fuzz(random.Random(o.seed * 100 + 50 + prefix), o.texts, lines) if "\0" not in t]
        families[name] = pieces(lines, texts, prefix)
        print(name, len(families[name]["tokens"]), file=sys.stderr)
    text = json.dumps({"unicode": unicodedata.unidata_version, "families": families}, ensure_ascii=True, separators=(",", ":"))
    with open(o.out, "wb") as f, gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
        z.write(text.encode())


main()
