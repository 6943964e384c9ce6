#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Usage: man_agrees.py PROGRAM PAGE.scd: both know the same options."""
import re
import subprocess
import sys

text = subprocess.run([sys.argv[1], "--help"], stdout=subprocess.PIPE, check=True, text=True).stdout
shown = set(re.findall(r"^\s+(?:-.,\s+)?(--[a-z][a-z-]*)", text, re.M))
with open(sys.argv[2], encoding="utf-8") as page:
    described = set(re.findall(r"^(?:\*-.\*, )?\*(--[a-z][a-z-]*)\*", page.read(), re.M))
for option in sorted(shown - described):
    print(f"{sys.argv[2]} lacks {option}")
for option in sorted(described - shown):
    print(f"{sys.argv[2]} describes {option}, which --help does not show")
sys.exit(shown != described or not shown)
