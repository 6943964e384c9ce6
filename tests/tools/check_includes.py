#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the include direction of the tree (CONTRIBUTING.md, "Folders").

    check_includes.py [SOURCE_DIR]

Every project include names its folder. Prints each include that goes against
the direction, and each file without an SPDX line; exit status 1 then.
"""
import os
import re
import sys

MAY = {
    "shm": {"shm"},
    "proto": {"shm", "proto"},
    "kernels": {"shm", "kernels"},
    "expertd": {"shm", "proto", "expertd", "kernels/krn_quant.h", "kernels/krn_link.h", "kernels/krn_link_host.h",
                "kernels/krn_link_cuda.h", "kernels/krn_cuda.h", "kernels/krn_register.h"},
    "inferd": {"shm", "proto", "kernels", "inferd"},
    "tools": {"shm", "proto", "tools", "kernels/krn_quant.h"},
    "tests": {"shm", "proto", "kernels", "expertd", "inferd", "tools", "tests"},
}
# Mutation points of the walk exist in test builds only.
EXCEPT = {("expertd/exd_walk.c", "tests/sim/sim_mutant.h")}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def main():
    top = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", ".."))
    bad = files = 0
    for folder, may in MAY.items():
        for where, dirs, names in os.walk(os.path.join(top, folder)):
            dirs[:] = [d for d in dirs if not d.startswith("build") and d != "__pycache__"]
            for name in names:
                path = os.path.join(where, name)
                rel = os.path.relpath(path, top)
                if not name.endswith((".c", ".h", ".cu", ".cuh", ".py", ".sh")):
                    continue
                files += 1
                lines = open(path, encoding="utf-8").read().splitlines()
                if not any("SPDX-License-Identifier: MIT" in line for line in lines[:3]):
                    print(f"{rel}: no SPDX line in the first three lines")
                    bad += 1
                for number, line in enumerate(lines, 1):
                    m = INCLUDE.match(line)
                    if not m or (rel, m.group(1)) in EXCEPT:
                        continue
                    target = m.group(1)
                    generated = "/" not in target and target.startswith("prt_")
                    # A test names the fixture beside it without its folder.
                    beside = folder == "tests" and "/" not in target and os.path.exists(os.path.join(where, target))
                    if beside or target in may or target.split("/")[0] in may or generated:
                        continue
                    print(f"{rel}:{number}: {folder} must not include {target}")
                    bad += 1
    print(f"{files} files, {bad} against the rules")
    return 1 if bad or not files else 0


if __name__ == "__main__":
    sys.exit(main())
