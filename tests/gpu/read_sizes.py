#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""read_sizes.py BUILD MODEL [SIZE...]: what a worker on a GPU takes to read prompts of these sizes and to write
32 tokens, for full, routed (index and predicted order) and all experts resident. One line a run: seconds, tokens/s,
bytes copied and wasted, link efficiency (routed bytes at 55.2 GB/s over the time), decode. MODEL is made by
mkmodel (--preset=qwen3-30b-a3b)."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

build, model = pathlib.Path(sys.argv[1]), sys.argv[2]
sizes = [int(x) for x in sys.argv[3:]] or [512, 1046, 2048, 4096, 8192, 32768]
DEVICE = os.environ.get("EXPERTD_DEVICE", "cuda")
LINK = 55.2e9
SETTINGS = {"full": ["--stream", "full"], "index": ["--order", "index"], "predicted": ["--order", "predicted"],
            "resident": ["--resident", "1024"]}


def main():
    run = tempfile.mkdtemp(prefix="xd-", dir="/dev/shm")
    where = ["--runtime-dir", run]
    daemon = subprocess.Popen([build / "expertd/expertd", "--device", DEVICE, "--model", model, *where],
                              stderr=open(f"{run}/expertd.log", "w"))
    try:
        start = time.time()
        for setting in os.environ.get("SETTINGS", " ".join(SETTINGS)).split():
            for size in sizes:
                text = f"{run}/{size}.txt"
                if not os.path.exists(text):
                    shape = ["--preset=qwen3-30b-a3b", *os.environ.get("SHAPE", "").split()]
                    words = subprocess.run([build / "tools/mkmodel", *shape, f"--text={size}"], capture_output=True,
                                           text=True)
                    open(text, "w").write(words.stdout)
                argv = [build / "inferd/inferd", "run", *where, "--device", DEVICE, "--prompt-file", text, "--raw", "-n", "32",
                        "--ignore-eos", "--temperature", "0", "--json", *SETTINGS[setting]]
                r = subprocess.run(argv, capture_output=True, text=True)
                while r.returncode and daemon.poll() is None and time.time() - start < 40:
                    time.sleep(0.5)  # it is being started
                    r = subprocess.run(argv, capture_output=True, text=True)
                if r.returncode:
                    print(setting, size, r.stderr.strip(), flush=True)
                    continue
                j = json.loads(r.stdout)
                s, d = j["stream"], j["decode_stream"]
                each = s["bytes_copied"] / max(s["copied"], 1)
                seconds = j["read_ms"] / 1e3
                share = s["routed"] / max(s["entries"], 1)
                print(f"{setting:9} {j['prompt_tokens']:6} tokens {seconds:7.3f} s {j['read_tps']:8.0f} tok/s; routed "
                      f"{100 * share:5.1f}%, copied {s['bytes_copied'] / 1e9:6.2f} GB, waste "
                      f"{100 * s['bytes_wasted'] / max(s['bytes_copied'], 1):4.1f}%, efficiency "
                      f"{s['routed'] * each / LINK / seconds:5.3f}; decode {j['decode_tps']:6.1f} tok/s, "
                      f"{d['bytes_copied'] / max(d['chunks'], 1) / 1e6:5.0f} MB a token; chunks {s['chunks']}; "
                      f"first text {j['text'][:24]!r}", flush=True)
                print("         ", {k: round(v, 1) for k, v in j["start_ms"].items()}, j["memory"],
                      {k: round(v, 1) for k, v in j["times_ms"].items()}, flush=True)
    finally:
        daemon.terminate()
        daemon.wait()
        print(open(f"{run}/expertd.log").read()[-1500:])
        subprocess.run(["rm", "-rf", run])


main()
