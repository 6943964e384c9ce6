#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes prt_control_gen.h and control.md from control.spec.

Usage: prt_generate.py SPEC HEADER PAGE
Refuses a spec whose fields would leave a hole, so that structs carry no
compiler-made padding and every offset can be asserted.
"""
import re
import sys

SIZES = {"u32": 4, "u64": 8, "i32": 4, "f64": 8}
CTYPES = {"u32": "uint32_t", "u64": "uint64_t", "i32": "int32_t", "f64": "double"}
LIMITS = {"u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "i32": (-2**31, 2**31 - 1)}
HEAD = {"request": 32, "reply": 544}


class Field:
    def __init__(self, line, where):
        m = re.fullmatch(r"(u32|u64|i32|f64|(?:text|bytes|u32|u64)\[(\d+)\]) (\w+) (\S+) (.+?) : (.*)", line)
        if not m:
            sys.exit(f"{where}: not a field: {line}")
        self.type, count, self.name, rng, self.unit, self.text = m.groups()
        self.count = int(count) if count else 0
        self.base = self.type.partition("[")[0]
        self.array = bool(self.count) and self.base in SIZES
        self.align = SIZES.get(self.base, 1)
        self.size = self.align * (self.count or 1)
        self.low = self.high = None
        if rng != "any":
            low, high = rng.split("..")
            conv = float if self.type == "f64" else int
            self.low, self.high = conv(low), conv(high)
            if self.low > self.high or (self.count and self.high >= self.count):
                sys.exit(f"{where}: bad range {rng}")
        elif self.type.startswith("text"):
            sys.exit(f"{where}: text needs a range")
        if (self.type.startswith("bytes") or self.array) and rng != "any":
            sys.exit(f"{where}: bytes and lists have no range")
        self.range = rng

    def declare(self):
        if self.array:
            return f"{CTYPES[self.base]} {self.name}[{self.count}];"
        if self.count:
            return f"{'char' if self.type.startswith('text') else 'uint8_t'} {self.name}[{self.count}];"
        return f"{CTYPES[self.type]} {self.name};"

    def check(self):
        n, quoted = self.name, f'"{self.name}"'
        if self.type.startswith("text"):
            return [f"    if (!prt_text_ok(m.{n}, sizeof(m.{n}), {self.low}, {self.high}))",
                    f"        return prt_refuse_text(what, {quoted}, {self.low}, {self.high}, err);"]
        if self.low is None:
            return []
        if self.type == "f64":  # written so that NaN is refused
            return [f"    if (!(m.{n} >= {self.low!r} && m.{n} <= {self.high!r}))",
                    f"        return prt_refuse_float(what, {quoted}, m.{n}, {self.low!r}, {self.high!r}, err);"]
        least, most = LIMITS[self.type]
        tests = []
        if self.low > least:
            tests.append(f"m.{n} < {self.low}")
        if self.high < most:
            tests.append(f"m.{n} > {self.high}u")
        if not tests:
            return []
        return [f"    if ({' || '.join(tests)})",
                f"        return prt_refuse_int(what, {quoted}, m.{n}, {self.low}u, {self.high}u, err);"]


class Message:
    def __init__(self, name, number, text):
        self.name, self.number, self.text = name, number, text
        self.notes = {}
        self.parts = {}


def parse(path):
    version = limit = None
    consts, messages, part = [], [], None
    for number, raw in enumerate(open(path, encoding="utf-8"), 1):
        where, line = f"{path}:{number}", raw.strip()
        if not line or line.startswith("#"):
            continue
        if raw[0] in " \t":
            if part is None:
                sys.exit(f"{where}: field outside request or reply")
            part.append(Field(line, where))
            continue
        word, _, rest = line.partition(" ")
        if word == "version":
            version = int(rest)
        elif word == "max-bytes":
            limit = int(rest)
        elif word == "const":
            name, value, text = re.fullmatch(r"(\w+) (\d+) : (.*)", rest).groups()
            consts.append((name, int(value), text))
        elif word == "message":
            name, kind, text = re.fullmatch(r"([A-Z]+) (\d+) : (.*)", rest).groups()
            messages.append(Message(name, int(kind), text))
            part = None
        elif word in ("sender", "order", "idempotent", "errors"):
            messages[-1].notes[word] = rest
        elif word in ("request", "reply"):
            part = messages[-1].parts[word] = []
        else:
            sys.exit(f"{where}: unknown word {word}")
    numbers = [m.number for m in messages]
    if version is None or limit is None or len(set(numbers)) != len(numbers):
        sys.exit(f"{path}: version, max-bytes or a message number is missing or doubled")
    for m in messages:
        for note in ("sender", "order", "idempotent", "errors"):
            if note not in m.notes:
                sys.exit(f"{path}: message {m.name} lacks '{note}'")
        for kind in ("request", "reply"):
            if kind not in m.parts:
                sys.exit(f"{path}: message {m.name} lacks '{kind}'")
            at = HEAD[kind]
            for f in m.parts[kind]:
                if at % f.align:
                    sys.exit(f"{path}: {m.name} {kind}: {f.name} at {at} is not aligned to {f.align}")
                f.offset = at
                at += f.size
            if at % 8:
                sys.exit(f"{path}: {m.name} {kind} is {at} bytes, not a multiple of 8")
            if at > limit:
                sys.exit(f"{path}: {m.name} {kind} is {at} bytes, above {limit}")
    return version, limit, consts, messages


def header(version, limit, consts, messages):
    out = ["/* SPDX-License-Identifier: MIT */",
           "/* Generated from proto/control.spec by proto/prt_generate.py: change those. */",
           "#ifndef PRT_CONTROL_GEN_H", "#define PRT_CONTROL_GEN_H", "",
           "#include \"proto/prt_message.h\"", "", "#include <stddef.h>", "#include <string.h>", "",
           f"#define PRT_VERSION {version}u", f"#define PRT_MESSAGE_MAX {limit}u"]
    out += [f"#define PRT_{n} {v}u /* {t} */" for n, v, t in consts]
    out += [""] + [f"#define PRT_{m.name} {m.number}u /* {m.text} */" for m in messages] + [""]
    for m in messages:
        low = m.name.lower()
        for kind in ("request", "reply"):
            st, fields = f"prt_{low}_{kind}", m.parts[kind]
            out += [f"struct {st} {{", f"    struct prt_{kind}_header header;"]
            for f in fields:
                note = "" if f.text == "-" else f" {f.text}"
                unit = "" if f.unit == "-" else f" [{f.unit}]"
                out.append(f"    {f.declare()} /* {f.range}{unit}{note and ':'}{note} */")
            end = fields[-1].offset + fields[-1].size if fields else HEAD[kind]
            out += ["};", f"_Static_assert(sizeof(struct {st}) == {end}, \"wire layout\");"]
            out += [f"_Static_assert(offsetof(struct {st}, {f.name}) == {f.offset}, \"wire layout\");"
                    for f in fields]
            out += ["",
                    f"/* Checks n received bytes (header, size, every range) and copies them out.",
                    " * 0, -EPROTO, -EBADMSG or -ERANGE with the field named. */",
                    f"static inline int {st}_decode(const void *bytes, size_t n, struct {st} *ret_message,",
                    "    struct shm_error *err)", "{",
                    f"    static const char what[] = \"{m.name} {kind}\";",
                    f"    struct {st} m;",
                    f"    int rc = prt_{kind}_check(bytes, n, what, PRT_VERSION, PRT_{m.name}, sizeof(m), err);",
                    "    if (rc < 0)", "        return rc;", "    memset(&m, 0, sizeof(m));",
                    "    memcpy(&m, bytes, n < sizeof(m) ? n : sizeof(m));"]
            checks = [line for f in fields for line in f.check()]
            if kind == "reply" and checks:  # the body of a refusal is zero
                out += ["    if (m.header.status < 0) {", "        *ret_message = m;", "        return 0;", "    }"]
            out += checks
            out += ["    *ret_message = m;", "    return 0;", "}", ""]
            if kind == "request":
                out += [f"/* Fills the header; the struct is then the {end} bytes to send. */",
                        f"static inline size_t {st}_encode(struct {st} *message, uint64_t epoch, uint64_t id)",
                        "{", "    prt_request_fill(&message->header, PRT_VERSION, "
                        f"PRT_{m.name}, sizeof(*message), epoch, id);", "    return sizeof(*message);", "}", ""]
            else:
                out += ["/* Fills the header as the answer to request; the struct is then what to send. */",
                        f"static inline size_t {st}_encode(struct {st} *message,",
                        "    const struct prt_request_header *request, int status, const char *error)", "{",
                        f"    prt_reply_fill(&message->header, PRT_VERSION, PRT_{m.name}, sizeof(*message), "
                        "request, status, error);", "    return sizeof(*message);", "}", ""]
    out += ["/* Name of a message type, or \"unknown\". */",
            "static inline const char *prt_type_name(uint32_t type)", "{", "    switch (type) {"]
    for m in messages:
        out += [f"    case PRT_{m.name}:", f"        return \"{m.name}\";"]
    out += ["    default:", "        return \"unknown\";", "    }", "}", "", "#endif"]
    return "\n".join(out) + "\n"


def page(version, limit, consts, messages):
    out = [f"# Control protocol, version {version}", "",
           "Generated from `proto/control.spec`. Request and reply over a local socket; a message has at most "
           f"{limit} bytes.", "", "| constant | value | |", "|---|---|---|"]
    out += [f"| `PRT_{n}` | {v} | {t} |" for n, v, t in consts]
    for m in messages:
        out += ["", f"## {m.name} ({m.number})", "", m.text, ""]
        out += [f"- {word}: {m.notes[word]}" for word in ("sender", "order", "idempotent", "errors")]
        for kind in ("request", "reply"):
            fields = m.parts[kind]
            out += ["", f"{kind}: header ({HEAD[kind]} bytes)" + (", then" if fields else " only")]
            if fields:
                out += ["", "| at | field | type | range | unit | |", "|---|---|---|---|---|---|"]
                out += [f"| {f.offset} | `{f.name}` | {f.type} | {f.range} | {f.unit} | {f.text} |" for f in fields]
    return "\n".join(out) + "\n"


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    spec = parse(sys.argv[1])
    for path, text in ((sys.argv[2], header(*spec)), (sys.argv[3], page(*spec))):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
