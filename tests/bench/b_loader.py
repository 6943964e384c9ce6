#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reading speed of the loader's engine beside fio, on the same file, in one run.

Rounds of {io_uring engine, pread engine, fio} in changing order, all with
O_DIRECT and the same depth and block size; prints the median GB/s of each and
the ratio of paired rounds. With --check exits 1 when the io_uring engine is
below 0.90 of fio (77 when fio is missing).
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile


def ours(args, path, io):
    # The pread pool has as many reads in flight as threads.
    threads = args.depth if io == "pread" else args.threads
    out = subprocess.run([args.reader, path, io, str(args.depth), str(args.block_kib), str(threads), args.mode],
                         check=True, capture_output=True, text=True).stdout
    r = json.loads(out)
    return r["gbps"], r["how"]


def fio(args, path):
    cmd = ["fio", "--name=read", "--filename=" + path, "--rw=read", "--direct=1", "--readonly",
           "--ioengine=io_uring", "--fixedbufs=1", "--bs=%dk" % args.block_kib, "--iodepth=%d" % args.depth,
           "--output-format=json"]
    out = subprocess.run(cmd, check=True, capture_output=True, text=True).stdout
    return json.loads(out[out.index("{"):])["jobs"][0]["read"]["bw_bytes"] / 1e9, \
        "fio io_uring, direct, depth %d x %d KiB, fixed buffers" % (args.depth, args.block_kib)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--reader", default=os.path.join(here, "../../build/tests/bench/b_reader"), help="b_reader program")
    p.add_argument("--file", help="file to read (default: one of --mib random bytes is made and removed)")
    p.add_argument("--mib", type=int, default=1024)
    p.add_argument("--dir", default=".", help="where to make the file; its disk is what is measured")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--depth", type=int, default=16)
    p.add_argument("--block-kib", type=int, default=1024)
    p.add_argument("--threads", type=int, default=0, help="io_uring workers, 0 = the engine's default")
    p.add_argument("--mode", choices=["discard", "copy"], default="discard",
                   help="copy: into fresh tmpfs memory, as the loader does (fio always discards)")
    p.add_argument("--json", action="store_true")
    p.add_argument("--check", action="store_true", help="exit 1 below 0.90 of fio")
    args = p.parse_args()
    if not shutil.which("fio"):
        print("b_loader: fio is not installed", file=sys.stderr)
        return 77

    made = None
    path = args.file
    if not path:
        made = tempfile.NamedTemporaryFile(dir=args.dir, prefix="b_loader.")
        path = made.name
        for _ in range(args.mib):
            made.write(os.urandom(1 << 20))
        made.flush()
        os.fsync(made.fileno())
    runs = {"uring": lambda: ours(args, path, "uring"), "fio": lambda: fio(args, path),
            "pread": lambda: ours(args, path, "pread")}
    speed = {k: [] for k in runs}
    how = {}
    order = list(runs)
    for f in runs.values():  # one round nobody counts
        f()
    for i in range(args.rounds):
        for name in order[i % 3:] + order[:i % 3]:
            gbps, how[name] = runs[name]()
            speed[name].append(gbps)
    if made:
        made.close()
    result = {"bytes": None if made else os.path.getsize(path), "rounds": args.rounds, "mode": args.mode}
    for name in runs:
        ratios = [a / b for a, b in zip(speed[name], speed["fio"])]
        result[name] = {"gbps": statistics.median(speed[name]), "low": min(speed[name]), "high": max(speed[name]),
                        "ratio_to_fio": statistics.median(ratios), "how": how[name]}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for name in runs:
            r = result[name]
            print("%-6s %6.2f GB/s (%.2f to %.2f)  %.2f of fio  %s" % (
                name, r["gbps"], r["low"], r["high"], r["ratio_to_fio"], r["how"]))
    if args.check and result["uring"]["ratio_to_fio"] < 0.90:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
