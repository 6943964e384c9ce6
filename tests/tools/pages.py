#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Keeps the pages under doc/ true.

Usage: pages.py [--write] [--cc COMMAND] --build BUILD

Tables between `<!-- KIND ARGUMENT... -->` and `<!-- end -->` are made from what they are about, by a C program of
offsetof and sizeof that is compiled here, or from the specification:

    struct NAME HEADER       bytes of a shared struct, with the header's comments
    values PREFIX HEADER     constants that begin so (macros, enums), with their comments
    worker LAYERS EXPERTS RING   sections of a worker's segment of that size (shm/shm_worker.c)
    messages | control       messages of proto/control.spec: one line each | every field
    blocks                   blocks of shm/counters.spec

Without --write they are compared. In every page, and in README, SECURITY and CONTRIBUTING, code spans are checked: a path
of the tree must exist, PATH::NAME must be defined there (function, test, struct, macro), and `counter BLOCK.NAME` in
doc/counters.md must be a counter.
"""
import argparse
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((TOP / "doc").glob("*.md"))
OTHERS = [TOP / "README.md", TOP / "SECURITY.md", TOP / "CONTRIBUTING.md"]
TABLE = re.compile(r"<!-- (struct|values|worker|messages|control|blocks)((?: \S+)*) -->\n(.*?)<!-- end -->\n", re.S)
FOLDERS = "shm|proto|kernels|expertd|inferd|tools|tests|doc"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./@+-]*[\w])(?:::(\w+))?`")
SOURCES = ["shm/shm_worker.c", "shm/shm_error.c"]


class Bad(Exception):
    pass


def module(path):
    """A generator of the tree as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


def one_line(comment):
    return " ".join(re.sub(r"^\s*/?\*+/?", "", line).replace("*/", "").strip() for line in comment.splitlines()).strip()


def fields(name, header):
    """[(field, type, comment, section)] of a struct in a header; padding is left out."""
    text = (TOP / header).read_text()
    m = re.search(rf"^struct {name} \{{\n(.*?)^\}};", text, re.M | re.S)
    if not m:
        raise Bad(f"{header} has no struct {name}")
    found, section = [], ""
    for part in re.finditer(r"/\*(.*?)\*/|([^;/]+);(?:[ \t]*(/\*.*?\*/))?", m.group(1), re.S):
        if part.group(1) is not None:
            section = one_line(part.group(1)).strip("- ")
            continue
        declared, comment = " ".join(part.group(2).split()), one_line(part.group(3) or "")
        ctype, names = re.fullmatch(r"((?:_Atomic )?(?:struct )?\w+) (.*)", declared).groups()
        for n in names.split(","):
            n = n.strip()
            if not re.match(r"(pad|reserved|zero|layout_reserved)", n) or n == "pad" and "uint8_t" not in ctype and "[" not in n:
                found.append((n, ctype.replace("struct ", ""), comment, section))
    return found


def constants(prefix, header):
    text, prefix = (TOP / header).read_text(), prefix.replace("(", "(?:")
    return [(m.group(1) or m.group(4), one_line(m.group(3) or m.group(6) or "")) for m in
            re.finditer(rf"^#define ({prefix}\w*)[ \t]+(\S.*?)[ \t]*(/\*.*?\*/)?$"
                        rf"|^    ({prefix}\w*)( = \w+)?,[ \t]*(/\*.*?\*/)?$", text, re.M)
            if not (m.group(1) or m.group(4)).endswith("_COUNT")]


def measure(wanted, build, cc):
    """What the compiler says of [(kind, arguments)]: {(struct, field): (offset, bytes)}, {constant: text}, {worker: rows}."""
    headers, body = set(), []
    for kind, args in wanted:
        if kind == "struct":
            headers.add(args[1])
            body.append(f'    printf("S {args[0]} . 0 %zu\\n", sizeof(struct {args[0]}));')
            for field, *_ in fields(*args):
                bare = field.partition("[")[0]
                body.append(f'    printf("S {args[0]} {bare} %zu %zu\\n", offsetof(struct {args[0]}, {bare}), '
                            f"sizeof(((struct {args[0]} *)0)->{bare}));")
        elif kind == "values":
            headers.add(args[1])
            for name, _ in constants(*args):
                body.append(f'    SHOW({name});')
        elif kind == "worker":
            headers.add("shm/shm_worker.h")
            layers, experts, ring = args
            body.append(f"    worker({layers}, {experts}, {ring});")
    program = "".join(f'#include "{h}"\n' for h in sorted(headers | {"shm/shm_worker.h"})) + """#include <stdio.h>
static void number(const char *name, unsigned long long value) { printf("C %s %llu\\n", name, value); }
static void text(const char *name, const char *value) { printf("C %s \\"%s\\"\\n", name, value); }
static void text_(const char *name, char *value) { text(name, value); }
#define SHOW(x) _Generic((x), char *: text_, const char *: text, default: number)(#x, x)
static inline void worker(uint32_t layers, uint32_t experts, uint32_t ring)
{
    uint32_t entries = shm_group_entries(ring);
    struct shm_geometry g = {.layers = layers, .experts = experts, .ring = ring, .group_entries = entries,
        .groups_per_layer = shm_groups_per_layer(experts, entries), .slot_bytes = 256};
    struct shm_worker_layout l;
    struct shm_error e;
    if (shm_worker_layout(&g, &l, &e)) {
        fprintf(stderr, "%s\\n", e.text);
        return;
    }
    const uint64_t at[] = {0, l.resident, l.route, l.tokens, l.predicted, l.recent, l.table, l.slot_map, l.layer, l.total_bytes};
    for (size_t i = 0; i + 1 < sizeof(at) / sizeof(at[0]); i++)
        printf("W %u-%u-%u %llu %llu\\n", layers, experts, ring, (unsigned long long)at[i],
            (unsigned long long)(at[i + 1] - at[i]));
}
int main(void)
{
""" + "\n".join(body) + "\n    return 0;\n}\n"
    with tempfile.TemporaryDirectory() as d:
        source = pathlib.Path(d, "layout.c")
        source.write_text(program)
        subprocess.run([*cc.split(), "-std=gnu11", "-D_GNU_SOURCE", f"-I{TOP}", f"-I{build}", f"-I{build}/shm", "-o", f"{d}/layout", str(source),
                        *(str(TOP / s) for s in SOURCES)], check=True)
        out = subprocess.run([f"{d}/layout"], check=True, capture_output=True, text=True).stdout
    structs, values, workers = {}, {}, {}
    for line in out.splitlines():
        kind, name, rest = line.split(" ", 2)
        if kind == "S":
            field, at, size = rest.split()
            structs[name, field] = int(at), int(size)
        elif kind == "W":
            workers.setdefault(name, []).append(tuple(map(int, rest.split())))
        else:
            values[name] = rest
    return structs, values, workers


def cell(text):
    return text.replace("|", "\\|") or " "


def make(kind, args, measured):
    structs, values, workers = measured
    if kind == "struct":
        rows = [f"`struct {args[0]}`, {structs[args[0], '.'][1]} bytes (`{args[1]}`)", "", "| at | bytes | field | |", "|---|---|---|---|"]
        last = ""
        for field, ctype, comment, section in fields(*args):
            at, size = structs[args[0], field.partition("[")[0]]
            if section != last:
                rows.append(f"| | | | *{cell(section)}* |")
                last = section
            rows.append(f"| {at} | {size} | `{field}` | {cell(comment)} |")
        return rows
    if kind == "values":
        return ["| constant | value | |", "|---|---|---|"] + [
            f"| `{name}` | {values[name]} | {cell(comment)} |" for name, comment in constants(*args)]
    if kind == "worker":
        what = ["`struct shm_worker`", "`struct shm_mask` [layers]: resident set", "`struct shm_route` [layers]: routing set",
                "`uint32_t` [layers][experts]: tokens", "`uint32_t` [layers][experts]: predicted",
                "`uint32_t` [layers][experts]: recent", "`uint32_t` [layers][experts]: slot table", "`uint64_t` [ring]: slot map",
                "`struct shm_layer_counters` [layers]"]
        rows = workers["-".join(args)]
        assert len(rows) == len(what), "tests/tools/pages.py knows other sections than shm/shm_worker.h"
        return ["| at | bytes | section |", "|---|---|---|"] + [f"| {at:,} | {size:,} | {w} |" for (at, size), w in zip(rows, what)]
    if kind in ("messages", "control"):
        generator = module(TOP / "proto/prt_generate.py")
        version, limit, consts, messages = generator.parse(str(TOP / "proto/control.spec"))
        if kind == "control":
            return generator.page(version, limit, consts, messages).splitlines()[2:]
        rows = [f"Version {version}; a message has at most {limit:,} bytes.", "", "| | message | from | asked again | bytes | |", "|---|---|---|---|---|---|"]
        for m in messages:
            size = {k: (m.parts[k][-1].offset + m.parts[k][-1].size if m.parts[k] else generator.HEAD[k]) for k in ("request", "reply")}
            rows.append(f"| {m.number} | [{m.name}](#{m.name.lower()}-{m.number}) | {m.notes['sender']} | {cell(m.notes['idempotent'])} | "
                        f"{size['request']}, {size['reply']} | {cell(m.text)} |")
        return rows
    _, _, blocks = module(TOP / "shm/shm_counters.py").parse(str(TOP / "shm/counters.spec"))
    return ["| block | of | labels | words reserved |", "|---|---|---|---|"] + [
        f"| `{b.name}` | {cell(b.line)} | {', '.join(b.labels) or '-'} | {b.words} |" for b in blocks]


def defines(text, name):
    """A name that is defined in a source: function, macro, struct, test, method or constant."""
    return re.search(rf"^(?!\s*(?:return|if|while|for)\b)[\w\s*\"<>:,()\[\]]*?\b{name}\([^;]*$|^#define {name}\b|^(?:struct|enum|class|def) {name}\b"
                     rf"|^\s*(?:async )?def {name}\(|^Test\(\w+, {name}\b|^(?:static )?(?:const )?[\w ]+\b{name}\b.*=|^    {name}\b[,;= ]", text, re.M)


def check_spans(page, counters):
    text = page.read_text()
    problems = []
    for m in PATH.finditer(text):
        path, name = TOP / m.group(1), m.group(2)
        where = f"{page.relative_to(TOP)}: {m.group(0)}"
        if not path.exists():
            problems.append(f"{where}: no such file")
        elif name and not (path.is_file() and defines(path.read_text(errors="replace"), name)):
            problems.append(f"{where}: not defined there")
    for block, name in re.findall(r"`counter (\w+)\.(\w+)`", text):
        if (block, name) not in counters:
            problems.append(f"{page.relative_to(TOP)}: no counter {name} in block {block} of shm/counters.spec")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        if not (page.parent / target).exists():
            problems.append(f"{page.relative_to(TOP)}: no {target} to link to")
    return problems


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--write", action="store_true")
    p.add_argument("--cc", default="cc")
    p.add_argument("--build", required=True)
    a = p.parse_args()
    texts = {page: page.read_text() for page in PAGES}
    wanted = [(m.group(1), m.group(2).split()) for t in texts.values() for m in TABLE.finditer(t)]
    problems = []
    measured = measure(wanted, a.build, a.cc)
    for page, text in texts.items():
        if text.count("<!-- ") != 2 * len(TABLE.findall(text)):
            problems.append(f"{page.relative_to(TOP)}: a table's mark is not one that is known, or has no end")

        def table(m):
            return f"<!-- {m.group(1)}{m.group(2)} -->\n" + "\n".join(make(m.group(1), m.group(2).split(), measured)) + "\n<!-- end -->\n"

        new = TABLE.sub(table, text)
        if new != text:
            if a.write:
                page.write_text(new)
                print(f"{page.relative_to(TOP)}: written")
            else:
                old, made = text.splitlines(), new.splitlines()
                lines = [f"  now  {x}" for x in made if x not in old][:3] + [f"  page {x}" for x in old if x not in made][:3]
                problems.append(f"{page.relative_to(TOP)} is behind the code: ninja -C {pathlib.Path(a.build).name} pages writes its tables\n" + "\n".join(lines))
    _, _, blocks = module(TOP / "shm/shm_counters.py").parse(str(TOP / "shm/counters.spec"))
    counters = {(b.name, c.name) for b in blocks for c in b.counters}
    for page in PAGES + OTHERS:
        problems += check_spans(page, counters)
    print("\n".join(problems) or f"{len(wanted)} tables and {len(PAGES + OTHERS)} pages agree with the code")
    sys.exit(bool(problems))


try:
    main()
except Bad as e:
    sys.exit(f"pages: {e}")
