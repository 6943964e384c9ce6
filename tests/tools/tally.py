#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Adds up test results into the closing line "N passed, N failed, N skipped".

    tally.py [--reports DIR] NAME=RESULT...

RESULT is a Meson testlog.json or a JUnit XML file; NAME says which build it
is from. A Criterion program counts with each of its tests, any other program
as one. Files in DIR whose name begins with "san" are sanitizer reports: each
counts as a failure (a leak does not fail a Criterion test by itself). Exit
status 1 when anything failed, when a result is missing, or when nothing passed.
"""
import argparse
import glob
import json
import os
import re
import sys
import xml.etree.ElementTree as ET

SYNTHESIS = re.compile(r"Synthesis: Tested: .*?(\d+).*?Passing: .*?(\d+).*?Failing: .*?(\d+).*?Crashing: .*?(\d+)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Tally:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0
        self.lines = []

    def fail(self, name, why, n=1):
        self.failed += n
        self.lines.append(f"FAILED {name}: {why}")

    def meson(self, label, path):
        for line in open(path):
            t = json.loads(line)
            name = f"{label}/{t['name']}"
            out = ANSI.sub("", (t.get("stdout") or "") + (t.get("stderr") or ""))
            m = SYNTHESIS.search(out)
            tested, good, bad, crashed = map(int, m.groups()) if m else (1, 1, 0, 0)
            result = t["result"]
            if result == "SKIP":
                self.skipped += 1
                self.lines.append(f"skipped {name}: {out.strip().splitlines()[-1] if out.strip() else 'no reason given'}")
            elif result in ("OK", "EXPECTEDFAIL"):
                if m and tested == 0:
                    self.fail(name, "ran no test")
                else:
                    self.passed += good
            else:
                self.passed += good if m else 0
                self.fail(name, f"{result}; last lines:\n    " + "\n    ".join(out.strip().splitlines()[-12:]),
                          max(1, bad + crashed))

    def junit(self, label, path):
        for case in ET.parse(path).getroot().iter("testcase"):
            name = f"{label}/{case.get('classname')}.{case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                node = case.find("failure") if case.find("failure") is not None else case.find("error")
                self.fail(name, (node.get("message") or "").splitlines()[0] if node.get("message") else "failed")
            elif case.find("skipped") is not None:
                self.skipped += 1
                self.lines.append(f"skipped {name}: {case.find('skipped').get('message')}")
            else:
                self.passed += 1


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--reports", help="directory of sanitizer reports")
    ap.add_argument("results", nargs="+", metavar="NAME=RESULT")
    a = ap.parse_args()
    t = Tally()
    for r in a.results:
        label, path = r.split("=", 1)
        if not os.path.exists(path):
            t.fail(label, f"no result file {path}: the run did not get so far")
        elif path.endswith(".xml"):
            t.junit(label, path)
        else:
            t.meson(label, path)
    for report in sorted(glob.glob(os.path.join(a.reports, "san*"))) if a.reports else []:
        t.fail(report, "sanitizer report:\n    " + "\n    ".join(open(report, errors="replace").read().splitlines()[:30]))
    print("\n".join(t.lines))
    print(f"{t.passed} passed, {t.failed} failed, {t.skipped} skipped")
    return 1 if t.failed or not t.passed else 0


if __name__ == "__main__":
    sys.exit(main())
