#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes the structs, the table and the manual page of all counters from counters.spec.

Usage: shm_counters.py SPEC HEADER TABLE PAGE
Refuses a spec that breaks the conventions of Prometheus (base units, suffixes, HELP) or whose blocks overflow.
"""
import hashlib
import re
import sys

LEVELS = ("basic", "detail")
STORED = ("counter", "gauge", "histogram", "info")
DERIVED = ("share", "rate")
SUFFIX = {"ns": "_ns", "bytes": "_bytes"}


class Labels:
    def __init__(self, name, label, values):
        self.name, self.label, self.values = name, label, values

    def macro(self, value):
        return f"SHM_{self.name}_{re.sub(r'[^A-Za-z0-9]+', '_', value).strip('_')}".upper()


class Counter:
    def __init__(self, block, look, kind, name, unit, level, sets, formula, line, where):
        self.block, self.look, self.kind, self.name, self.unit, self.level = block, look, kind, name, unit, level
        self.sets, self.formula, self.line, self.text, self.where = sets, formula, line, [], where
        self.above, self.below = [], []

    @property
    def words(self):
        if self.kind in DERIVED:
            return 0
        if self.kind == "histogram":
            return len(self.bounds.values) + 2  # the last bucket is what is above them all; then the sum
        n = 1
        for s in self.sets:
            n *= len(s.values)
        return n

    @property
    def metric(self):
        if self.kind in DERIVED:
            return ""
        base = self.name
        if self.unit == "ns":
            base = base[:-3] + "_seconds"
        elif self.unit == "bytes/s":
            base += "_bytes_per_second"
        return f"{self.block.prefix}_{base}" + ("_total" if self.kind == "counter" else "")

    def promql(self, window="5m"):
        """What a derived one is in Prometheus; None where a gauge that Prometheus does not have is needed."""
        def side(terms):
            out = []
            for sign, c, value in terms:
                if c.name.endswith("_attached_ns"):
                    return None
                if c.kind == "histogram":
                    one = f"rate({c.metric}_{'sum' if value == 'sum' else 'count'}[{window}])"
                else:
                    pick = f'{{{c.sets[0].label}="{value}"}}' if value else ""
                    one = f"{c.metric}{pick}" if c.kind == "gauge" else f"rate({c.metric}{pick}[{window}])"
                    if c.sets:
                        one = f"sum without({c.sets[0].label}) ({one})"
                out.append((" - " if sign < 0 else " + ") + one)
            text = "".join(out)
            text = text[3:] if text.startswith(" + ") else text
            return f"({text})" if len(out) > 1 else text
        above, below = side(self.above), side(self.below)
        return above if below is None else f"{above} / {below}"


class Block:
    def __init__(self, name, prefix, words, labels, line):
        self.name, self.prefix, self.words, self.line = name, prefix, words, line
        self.labels = [] if labels == "-" else labels.split(",")
        self.text, self.counters = [], []


def parse(path):
    sets, bounds, blocks, target = {}, {}, [], None
    for number, raw in enumerate(open(path, encoding="utf-8"), 1):
        where, line = f"{path}:{number}", raw.strip()
        if not line or line.startswith("#"):
            continue
        if raw[0] in " \t":
            if target is None:
                sys.exit(f"{where}: text of nothing")
            target.text.append(line)
            continue
        words = line.split()
        if words[0] == "labels" and len(words) == 4:
            sets[words[1]] = Labels(words[1], words[2], words[3].split("|"))
        elif words[0] == "bounds" and len(words) > 2:
            values = [int(w) for w in words[2:]]
            if values != sorted(set(values)):
                sys.exit(f"{where}: bounds do not rise")
            bounds[words[1]] = Labels(words[1], "", values)
        elif words[0] == "block":
            m = re.fullmatch(r"block (\w+) (\w+) (\d+) (\S+) : (.+)", line)
            if not m:
                sys.exit(f"{where}: not a block: {line}")
            target = Block(m[1], m[2], int(m[3]), m[4], m[5])
            blocks.append(target)
        else:
            m = re.fullmatch(r"(look )?(\w+) ([a-z]\w*) (\S+) (basic|detail)(?: ([a-z]\w*(?:,\w+)?))?(?: = (.+?))? : (.+)",
                             line)
            if not m or not blocks:
                sys.exit(f"{where}: not a counter: {line}")
            named = m[6].split(",") if m[6] else []
            target = Counter(blocks[-1], bool(m[1]), m[2], m[3], m[4], m[5], [], m[7], m[8], where)
            blocks[-1].counters.append(target)
            if target.kind not in STORED + DERIVED:
                sys.exit(f"{where}: unknown kind {target.kind}")
            if (target.kind in DERIVED) != bool(m[7]):
                sys.exit(f"{where}: shares and rates have a formula, others none")
            if target.kind == "histogram":
                if len(named) != 1 or named[0] not in bounds:
                    sys.exit(f"{where}: a histogram names its bounds")
                target.bounds = bounds[named[0]]
            elif any(n not in sets for n in named):
                sys.exit(f"{where}: unknown labels {m[6]}")
            else:
                target.sets = [sets[n] for n in named]
            if target.kind in STORED and target.unit in SUFFIX and not target.name.endswith(SUFFIX[target.unit]):
                sys.exit(f"{where}: a name in {target.unit} ends in {SUFFIX[target.unit]}")
            if not target.line.endswith("."):
                sys.exit(f"{where}: the one line is a sentence")
    return sets, bounds, blocks


def resolve(blocks):
    """Places words, reads the formulas, checks what must be unique."""
    metrics = {}
    for b in blocks:
        at, known = 0, {}
        for c in b.counters:
            if c.name in known:
                sys.exit(f"{c.where}: {c.name} is there twice")
            known[c.name] = c
            c.word = at
            at += c.words
            if c.metric and metrics.setdefault(c.metric, c) is not c:
                sys.exit(f"{c.where}: {c.metric} is that of {metrics[c.metric].where}, too")
        if at > b.words or b.words % 8:
            sys.exit(f"block {b.name}: {at} words, {b.words} reserved (a multiple of 8)")
        b.used = at
        for c in b.counters:
            if not c.formula:
                continue
            for terms, text in zip((c.above, c.below), c.formula.split(" / ")):
                sign = 1
                for token in text.split():
                    if token in "+-":
                        sign = 1 if token == "+" else -1
                        continue
                    m = re.fullmatch(r"(\w+)(?:\{(\w+)\})?", token)
                    if not m or m[1] not in known or known[m[1]].kind in DERIVED:
                        sys.exit(f"{c.where}: {token} is no counter of this block")
                    terms.append((sign, known[m[1]], m[2]))
                    sign = 1
            if not c.above or not c.below:
                sys.exit(f"{c.where}: not a formula: {c.formula}")


def term_words(sign, c, value):
    """(word, count, sign) that a term of a formula adds up."""
    if c.kind == "histogram":
        return (c.word + c.words - 1, 1, sign) if value == "sum" else (c.word, c.words - 1, sign)
    if value:
        if len(c.sets) != 1 or value not in c.sets[0].values:
            sys.exit(f"{c.where}: no such label value: {value}")
        return c.word + c.sets[0].values.index(value), 1, sign
    return c.word, c.words, sign


def layout_id(blocks):
    text = "\n".join(f"{b.name} {b.words} " + " ".join(
        f"{c.name}:{c.kind}:{c.word}:{c.words}:{','.join('|'.join(map(str, s.values)) for s in c.sets)}"
        for c in b.counters if c.words) for b in blocks)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") | 1


def header(sets, bounds, blocks):
    out = ["/* SPDX-License-Identifier: MIT */",
           "/* Generated from shm/counters.spec by shm/shm_counters.py: change those. */",
           "#ifndef SHM_COUNTERS_GEN_H", "#define SHM_COUNTERS_GEN_H", "", "#include <stdatomic.h>",
           "#include <stddef.h>", "#include <stdint.h>", "",
           "/* Tells layouts of these blocks apart: in the header of each segment that holds some. */",
           f"#define SHM_COUNTERS_LAYOUT UINT64_C({layout_id(blocks):#x})", ""]
    for s in sets.values():
        out += [f"#define {s.macro(v)} {i}u" for i, v in enumerate(s.values)]
        out += [f"#define SHM_{s.name.upper()}_COUNT {len(s.values)}u", ""]
    out += ["enum shm_block {"] + [f"    SHM_BLOCK_{b.name.upper()}," for b in blocks] + ["    SHM_BLOCK_COUNT", "};", ""]
    for name, b in bounds.items():
        out.append(f"extern const uint64_t shm_bounds_{name}[{len(b.values)}];")
    out.append("")
    for b in blocks:
        out += [f"/* {b.line}. " + " ".join(b.text), " */", f"struct shm_{b.name}_counters {{"]
        for n, c in enumerate(x for x in b.counters if x.words):
            align = "_Alignas(64) " if n == 0 else ""
            size = f"[{c.words}]" if c.sets or c.kind == "histogram" else ""
            note = "look: 0 here; " if c.look else ""
            out.append(f"    {align}_Atomic uint64_t {c.name}{size}; /* {note}{c.kind} [{c.unit}]: {c.line} */")
        if b.used < b.words:
            out.append(f"    uint64_t pad[{b.words - b.used}];")
        out += ["};", f"_Static_assert(sizeof(struct shm_{b.name}_counters) == {b.words * 8}, \"shared layout\");"]
        out += [f"_Static_assert(offsetof(struct shm_{b.name}_counters, {c.name}) == {c.word * 8}, \"shared layout\");"
                for c in b.counters if c.words]
        out += [f"#define SHM_{b.name.upper()}_WORDS {b.words}u"]
        out += [f"#define SHM_{b.name.upper()}_WORD_{c.name.upper()} {c.word}u" for c in b.counters if c.words]
        out += [""]
    out += ["#endif"]
    return "\n".join(out) + "\n"


def quote(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def table(sets, bounds, blocks):
    out = ["/* SPDX-License-Identifier: MIT */",
           "/* Generated from shm/counters.spec by shm/shm_counters.py: change those. */",
           '#include "shm/shm_counter.h"', ""]
    for s in sets.values():
        out += [f"static const char *const values_{s.name}[] = {{" + ", ".join(quote(v) for v in s.values) + "};",
                f"static const struct shm_labels labels_{s.name} = {{{quote(s.label)}, values_{s.name}, {len(s.values)}}};"]
    for name, b in bounds.items():
        out.append(f"const uint64_t shm_bounds_{name}[] = {{" + ", ".join(map(str, b.values)) + "};")
    first = 0
    rows, block_rows = [], []
    for b in blocks:
        for c in b.counters:
            fields = [f".block = SHM_BLOCK_{b.name.upper()}", f".kind = SHM_KIND_{c.kind.upper()}",
                      f".detail = {int(c.level == 'detail')}", f".look = {int(c.look)}", f".name = {quote(c.name)}",
                      f".unit = {quote(c.unit)}", f".metric = {quote(c.metric)}", f".help = {quote(c.line)}",
                      f".text = {quote(' '.join(c.text))}"]
            if c.words:
                fields += [f".word = {c.word}", f".words = {c.words}"]
            for i, s in enumerate(c.sets):
                fields.append(f".labels[{i}] = &labels_{s.name}")
            if c.kind == "histogram":
                fields += [f".bounds = shm_bounds_{c.bounds.name}", f".n_bounds = {len(c.bounds.values)}"]
            if c.formula:
                terms = [term_words(*t) + (0,) for t in c.above] + [term_words(*t) + (1,) for t in c.below]
                out.append(f"static const struct shm_term terms_{b.name}_{c.name}[] = {{"
                           + ", ".join(f"{{{w}, {n}, {sign}, {below}}}" for w, n, sign, below in terms) + "};")
                fields += [f".terms = terms_{b.name}_{c.name}", f".n_terms = {len(terms)}"]
            rows.append("    {" + ", ".join(fields) + "},")
        block_rows.append(f"    {{{quote(b.name)}, {quote(b.line)}, {quote(','.join(b.labels))}, {b.words}, {first}, "
                          f"{len(b.counters)}}},")
        first += len(b.counters)
    out += ["", "const struct shm_counter shm_counters[] = {"] + rows + ["};",
            f"const size_t shm_counters_n = {first};", "",
            "const struct shm_block_info shm_blocks[SHM_BLOCK_COUNT] = {"] + block_rows + ["};"]
    return "\n".join(out) + "\n"


def man(text):
    return re.sub(r"([_*\\~])", r"\\\1", text)


def page(sets, bounds, blocks):
    out = ["expertd-counters(7)", "", "; SPDX-License-Identifier: MIT",
           "; Generated from shm/counters.spec by shm/shm_counters.py: change those.", "", "# NAME", "",
           "expertd-counters - what expertd and inferd count", "", "# DESCRIPTION", "",
           "Every number that *expertd*(8) and *inferd*(1) show of themselves. They lie in shared memory, are written "
           "without locks by one thread each, and are read by *expertctl*(1) *counters*, *expertctl metrics* and "
           "*expert-top*(1) through read-only mappings, also while their writer is stopped.", "",
           "A *counter* only grows and begins anew with its writer; a *gauge* goes up and down; a *histogram* has "
           "buckets; *info* is always 1 and says something in its labels. A *share* or *rate* is made of others by "
           "whoever looks: over the time between two looks, or since its beginning when there was only one; "
           "Prometheus has the parts, and the expression is given. What is marked _look_ is not written by the "
           "process it is about, but found by who looks.", "",
           "Times are kept in nanoseconds and shown in seconds. What is marked _detail_ is many or rarely wanted: "
           "*--detail* shows it.", ""]
    for b in blocks:
        out += [f"# {b.name.upper()}", "", man(b.line[0].upper() + b.line[1:]) + ". " + man(" ".join(b.text))]
        if b.labels:
            out += ["", "Labels: " + ", ".join(f"_{x}_" for x in b.labels) + "."]
        out.append("")
        for c in b.counters:
            marks = [c.kind, c.unit if c.unit != "-" else "", c.level if c.level == "detail" else "", "look" if c.look else ""]
            out += [f"*{man(c.name)}* (" + ", ".join(m for m in marks if m) + ")", "\t" + man(" ".join([c.line] + c.text))]
            for s in c.sets:
                out += ["", f"\tLabel _{man(s.label)}_: " + ", ".join(man(v) for v in s.values) + "."]
            if c.kind == "histogram":
                out += ["", "\tBuckets up to (s): " + ", ".join(f"{v / 1e9:g}" for v in c.bounds.values) + "."]
            if c.metric:
                out += ["", f"\tPrometheus: *{man(c.metric)}*"]
            else:
                out += ["", "\t= " + man(c.formula)]
                out += ["", "\tPrometheus: " + man(c.promql())]
            out.append("")
    out += ["# SEE ALSO", "", "*expertd*(8), *inferd*(1), *expertctl*(1), *expert-top*(1)"]
    return "\n".join(out) + "\n"


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    spec = parse(sys.argv[1])
    resolve(spec[2])
    for path, make in zip(sys.argv[2:], (header, table, page)):
        with open(path, "w", encoding="utf-8") as file:
            file.write(make(*spec))


if __name__ == "__main__":
    main()
