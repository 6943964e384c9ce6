# SPDX-License-Identifier: MIT
"""From the model file to the ids: each pre-tokenizer's vocabulary in the shipped model's file, tokenized by a worker."""
import gzip
import json
import struct

import pytest

from conftest import GOLDENS, STORY

I32, F32, BOOL, STRING, ARRAY = 5, 6, 7, 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
VOCAB = 4096  # rows of the shipped model's embedding

FAMILIES = json.load(gzip.open(GOLDENS / "tokenizers.json.gz"))["families"]


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def strings(items):
    return struct.pack("<IIQ", ARRAY, STRING, len(items)) + b"".join(map(string, items))


def value_end(data, at, kind):
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind != ARRAY:
        return at + SIZES[kind]
    kind, n = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in SIZES:
        return at + n * SIZES[kind]
    for _ in range(n):
        at = value_end(data, at, kind)
    return at


def with_keys(data, new):
    """The GGUF file with other values (type and bytes) of some keys."""
    _, n_tensors, n_keys = struct.unpack_from("<IQQ", data, 4)
    at, keys = 24, []
    for _ in range(n_keys):
        end = value_end(data, at, STRING)
        name = data[at + 8:end].decode()
        kind, = struct.unpack_from("<I", data, end)
        after = value_end(data, end + 4, kind)
        keys.append(data[at:end] + new.pop(name, data[end:after]))
        at = after
    keys += [string(name) + value for name, value in new.items()]
    infos = at
    for _ in range(n_tensors):
        at = value_end(data, at, STRING)
        at += 4 + 8 * struct.unpack_from("<I", data, at)[0] + 12
    head = data[:16] + struct.pack("<Q", len(keys)) + b"".join(keys) + data[infos:at]
    return head + bytes(-len(head) % 32) + data[at + -at % 32:]


def keys_of(family):
    """The vocabulary, filled up to the shipped model's size with tokens that no text gives."""
    n = VOCAB - len(family["tokens"])
    types = family.get("types", [1] * len(family["tokens"])) + [5] * n
    keys = {"tokens": strings(family["tokens"] + [f"<unused {i}>" for i in range(n)]),
            "token_type": struct.pack("<IIQ", ARRAY, I32, VOCAB) + struct.pack(f"<{VOCAB}i", *types)}
    if "pre" in family:
        keys["pre"] = struct.pack("<I", STRING) + string(family["pre"])
        keys["merges"] = strings(family["merges"])
    else:
        keys["model"] = struct.pack("<I", STRING) + string("llama")
        keys["scores"] = struct.pack("<IIQ", ARRAY, F32, VOCAB) + struct.pack(f"<{VOCAB}f", *family["scores"], *[0.0] * n)
        keys["add_bos_token"] = struct.pack("<I?", BOOL, False)
        if not family["add_space_prefix"]:  # with it is what holds where the file says nothing
            keys["add_space_prefix"] = struct.pack("<I?", BOOL, False)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_vocabulary_of_a_file(world, name):
    model = world.path / "model.gguf"
    model.write_bytes(with_keys(STORY.read_bytes(), keys_of(FAMILIES[name])))
    world.expertd(model=model)
    texts = [t for t in FAMILIES[name]["texts"] if t[0] and "\0" not in t[0]]
    for text, _, ids in texts[:4] + texts[-8:]:
        (world.path / "prompt").write_bytes(text.encode())
        r = world.inferd("tokenize", "--raw", "--device", "host", "--prompt-file", world.path / "prompt")
        assert json.loads(r.stdout) == ids, (name, text)
