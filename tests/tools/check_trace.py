#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Usage: check_trace.py FILE.json: holds a file against the rules of Chrome's trace format, as Perfetto reads it.

Prints how many events of each phase there are; exit status 1 and one line for each broken rule (20 at most).
"""
import collections
import json
import sys

NUMBER = (int, float)
NAMES = {"process_name": "name", "thread_name": "name", "process_labels": "labels", "process_sort_index": "sort_index",
         "thread_sort_index": "sort_index"}
NEEDS_CATEGORY = set("BEXiC")


def number(v):
    return isinstance(v, NUMBER) and not isinstance(v, bool) and v == v


def check_event(e, wrong):
    """One event by itself."""
    ph = e.get("ph")
    if not isinstance(e.get("name"), str) or not e["name"]:
        wrong("has no name")
    for key in ("pid", "tid"):
        if not isinstance(e.get(key), int) or isinstance(e.get(key), bool) or not 0 <= e[key] < 1 << 32:
            wrong(f"{key} is {e.get(key)!r}")
    if "args" in e and not isinstance(e["args"], dict):
        wrong("args is no object")
    if ph == "M":
        key = NAMES.get(e.get("name"))
        if key is None:
            wrong(f"metadata {e.get('name')!r} is none that viewers know")
        elif not isinstance(e.get("args", {}).get(key), int if key == "sort_index" else str):
            wrong(f"metadata {e['name']} without args.{key}")
        return
    if ph not in NEEDS_CATEGORY:
        wrong(f"phase {ph!r} is not one of {sorted(NEEDS_CATEGORY)} or M")
        return
    if not isinstance(e.get("cat"), str):
        wrong("has no cat")
    if not number(e.get("ts")) or e["ts"] < 0:
        wrong(f"ts is {e.get('ts')!r}")
    if ph == "X" and (not number(e.get("dur")) or e["dur"] < 0):
        wrong(f"dur is {e.get('dur')!r}")
    if ph == "i" and e.get("s", "t") not in ("g", "p", "t"):
        wrong(f"scope is {e.get('s')!r}")


def check(data):
    """A list of what is wrong."""
    found = []
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        return ["no object with an array traceEvents"]
    if data.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append(f"displayTimeUnit is {data['displayTimeUnit']!r}")
    named, used, begun, spans = {}, set(), collections.defaultdict(list), collections.defaultdict(list)
    for i, e in enumerate(data["traceEvents"]):
        wrong = lambda text: found.append(f"event {i}: {text}: {json.dumps(e)[:200]}")
        if not isinstance(e, dict):
            wrong("is no object")
            continue
        before = len(found)
        check_event(e, wrong)
        if len(found) > before:
            continue
        thread = e["pid"], e["tid"]
        if e["ph"] == "M":
            if named.setdefault((*thread, e["name"]), e["args"]) != e["args"]:
                wrong("is named a second time")
            continue
        used.add(thread)
        if e["ph"] == "B":
            begun[thread].append(e)
        elif e["ph"] == "E":
            if not begun[thread] or begun[thread].pop()["name"] != e["name"]:
                wrong("ends what did not begin")
        elif e["ph"] == "X":
            # in whole nanoseconds: the file has three digits behind the point
            spans[thread].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000), i))
    found += [f"thread {t}: {len(b)} B without E" for t, b in begun.items() if b]
    for thread in sorted(used):
        found += [f"thread {thread} has no {what}" for what in ("process_name", "thread_name") if (*thread, what) not in named]
    for thread, all_spans in spans.items():  # lie within each other or apart
        stack = []
        for begin, end, i in sorted(all_spans, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1][1] <= begin:
                stack.pop()
            if stack and end > stack[-1][1]:
                found.append(f"thread {thread}: the spans of events {stack[-1][2]} and {i} overlap")
            stack.append((begin, end, i))
    return found


def main():
    try:
        with open(sys.argv[1], encoding="utf-8") as f:
            data = json.load(f)
    except (IndexError, OSError, ValueError) as e:
        print(f"check_trace: {e}", file=sys.stderr)
        return 2
    found = check(data)
    for line in found[:20]:
        print(line)
    if not found:
        phases = collections.Counter(e["ph"] for e in data["traceEvents"])
        print(", ".join(f"{n} {ph}" for ph, n in sorted(phases.items())))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
