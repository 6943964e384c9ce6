#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""restart.py BUILD MODEL [SECTION...]: what a restart takes on a GPU, by phase, in ms.

    worker     kill -9 of a worker in mid-answer; the next one up to the first token of a 1,000-token prompt
    expertd    kill -9 of expertd: arena adopted and registered again, an idle chat goes on with its conversation
    cancel     Ctrl-C in the middle of a read
    resident   a start with every expert in device memory
    profile    where a read's time goes on the GPU, and what asking costs

Each on small pages and, where root may mount, on a tmpfs with huge=advise (PAGES=small, PAGES=huge: only those).
MODEL is made by mkmodel --preset=qwen3-30b-a3b. Bounds: 2,500 ms to the first token, 0.04 s/GB to register: exit
status 1 when missed. EXPERTD_DEVICE: cuda, or host, which tries the script itself; SHAPE: more options of mkmodel."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BUILD, MODEL = pathlib.Path(sys.argv[1]), sys.argv[2]
SECTIONS = sys.argv[3:] or ["worker", "expertd", "cancel", "resident", "profile"]
DEVICE = ["--device", os.environ.get("EXPERTD_DEVICE", "cuda")]
FIRST_MS, REGISTER_S_PER_GB = 2500, 0.04
KILLS = int(os.environ.get("KILLS", "3"))
missed = []


def bound(what, value, limit):
    if value > limit:
        missed.append(f"{what}: {value:.3f}, the bound is {limit}")


class Host:
    def __init__(self, name, huge):
        self.name, self.huge = name, huge
        self.run = tempfile.mkdtemp(prefix="xd-restart-", dir="/dev/shm")
        self.arena = []
        if huge:
            os.mkdir(f"{self.run}/arena")
            subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=advise,size=90%,mode=700", "none", f"{self.run}/arena"],
                           check=True)
            self.arena = ["--arena-dir", f"{self.run}/arena"]
        self.where = ["--runtime-dir", self.run]
        self.daemon = None

    def close(self):
        if self.daemon:
            self.daemon.terminate()
            self.daemon.wait()
        if self.huge:
            subprocess.run(["umount", f"{self.run}/arena"])
        shutil.rmtree(self.run, ignore_errors=True)

    def log(self):
        return open(f"{self.run}/expertd.log").read()

    def expertd(self):
        """Starts it; milliseconds until it serves."""
        start = time.monotonic()
        with open(f"{self.run}/expertd.log", "w") as log:
            self.daemon = subprocess.Popen([BUILD / "expertd/expertd", *DEVICE, "--model", MODEL, *self.arena, *self.where],
                                           stderr=log)
        while True:
            r = subprocess.run([BUILD / "tools/expertctl", "status", "--json", *self.where], capture_output=True, text=True)
            if r.returncode == 0 and json.loads(r.stdout).get("state") == "serving":
                return (time.monotonic() - start) * 1e3
            if self.daemon.poll() is not None or time.monotonic() - start > 60:
                sys.exit(f"expertd does not serve:\n{self.log()}")
            time.sleep(0.002)

    def lines(self, pattern):
        for line in self.log().splitlines():
            if re.search(pattern, line):
                print("   ", re.sub(r"^expertd: (info: )?", "", line)[:200])

    def registered(self):
        """(GB, seconds, of which pages) as expertd says."""
        m = re.search(r"registered ([\d.]+) GB with CUDA in ([\d.]+) s, \d+ pieces \(pages ([\d.]+) s\)", self.log())
        return tuple(map(float, m.groups())) if m else None

    def inferd(self, *options, prompt, n=1):
        return [BUILD / "inferd/inferd", "run", *DEVICE, *self.where, "--prompt-file", prompt, "--raw", "--ignore-eos",
                "--temperature", "0", "-n", str(n), *map(str, options)]

    def prompt(self, tokens):
        path = f"{self.run}/{tokens}.txt"
        if not os.path.exists(path):
            shape = ["--preset=qwen3-30b-a3b", *os.environ.get("SHAPE", "").split()]
            text = subprocess.run([BUILD / "tools/mkmodel", *shape, f"--text={tokens}"], capture_output=True, text=True, check=True)
            open(path, "w").write(text.stdout)
        return path

    def answer(self, *options, prompt, n=1):
        """A run as JSON; the wall time up to there."""
        start = time.monotonic()
        r = subprocess.run(self.inferd(*options, "--json", prompt=prompt, n=n), capture_output=True, text=True)
        if r.returncode:
            sys.exit(f"inferd: {r.stderr}")
        return json.loads(r.stdout), (time.monotonic() - start) * 1e3


PHASES = ["find", "context", "modules", "attach", "dense", "ready"]


def phases(j):
    return " ".join(f"{j['start_ms'].get(p, 0):8.1f}" for p in PHASES)


def worker(host):
    print(f"-- kill -9 of a worker, then another reads 1,000 tokens ({host.name})")
    print("    kill to first | process " + " ".join(f"{p:>8}" for p in PHASES) + " |   read  first token")
    short = host.prompt(1000)
    for _ in range(KILLS):
        p = subprocess.Popen(host.inferd(prompt=short, n=4000), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        p.stdout.read(8)  # it is writing
        p.send_signal(signal.SIGKILL)
        start = time.monotonic()
        q = subprocess.Popen(host.inferd("--json", prompt=short), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out = q.stdout.read(1)
        total = (time.monotonic() - start) * 1e3
        out += q.stdout.read()
        p.wait()
        if q.wait():
            sys.exit(f"inferd: {q.stderr.read().decode()}")
        j = json.loads(out)
        print(f"    {total:13.1f} | {total - j['start_to_first_ms']:7.1f} {phases(j)} | {j['read_ms']:6.1f} {j['ttft_ms']:8.1f}"
              f"   ({j['prompt_tokens']} tokens)")
        bound("kill -9 of a worker to the first token, ms", total, FIRST_MS)
    host.lines("flag write")


def expertd(host):
    print(f"-- kill -9 of expertd ({host.name})")
    chat = subprocess.Popen([BUILD / "inferd/inferd", "chat", *DEVICE, *host.where, "--temperature", "0", "-n", "8", "--json",
                             "--chat-template", "chatml"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(text):
        start = time.monotonic()
        chat.stdin.write(text + "\n")
        chat.stdin.flush()
        line = chat.stdout.readline()
        if not line:
            sys.exit("inferd chat ended")
        j = json.loads(line)
        return j, (time.monotonic() - start) * 1e3

    words = open(host.prompt(1000)).read().replace("\n", " ")
    want, _ = say(words)
    say("/clear\n" + words)
    for _ in range(2):
        host.daemon.kill()
        host.daemon.wait()
        ready = host.expertd()
        got, ms = say("/clear\n" + words)
        same = got.get("text") == want["text"]
        print(f"    serves after {ready:7.1f} ms; the chat's next turn of {got.get('prompt_tokens')} tokens took {ms:.0f} ms "
              f"({'same answer' if same else 'OTHER ANSWER: ' + str(got)[:200]})")
        if not same:
            missed.append("another answer after expertd's restart")
        if "adopted" not in host.log():
            missed.append("the arena was not adopted")
        r = host.registered()
        if r:
            print(f"    registered {r[0]:.2f} GB in {r[1]:.3f} s = {r[1] / r[0]:.4f} s/GB (pages {r[2]:.3f} s, the rest "
                  f"{(r[1] - r[2]) / r[0]:.4f} s/GB)")
            bound(f"registration of an adopted arena ({host.name}), s/GB", r[1] / r[0], REGISTER_S_PER_GB)
    host.lines("opened in|adopted|ready")
    chat.stdin.close()
    chat.wait()


def cancel(host):
    print(f"-- Ctrl-C in the middle of a read of 8,192 tokens ({host.name}): exit status, ms until it has ended")
    ended = []
    for i in range(4):
        p = subprocess.Popen(host.inferd(prompt=host.prompt(8192)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.38 + 0.08 * i)
        start = time.monotonic()
        p.send_signal(signal.SIGINT)
        status = p.wait()
        ended.append((status, (time.monotonic() - start) * 1e3))
        if status not in (0, 130):
            missed.append(f"Ctrl-C ended with {status}")
    print("    " + ", ".join(f"{status} {ms:.0f}" for status, ms in ended))


def resident(host):
    print(f"-- every expert resident ({host.name}): " + " ".join(f"{p:>8}" for p in PHASES))
    for _ in range(2):
        j, ms = host.answer("--resident", 1024, prompt=host.prompt(1000))
        size = j["memory"]["resident_bytes"] / 1e9
        print(f"    {size:6.2f} GB, {ms:7.1f} ms in all:         {phases(j)}; attach {size / j['start_ms']['attach'] * 1e3:.1f} GB/s;"
              f" read {j['read_ms']:.1f}")


def profile(host):
    print(f"-- where a read's time goes ({host.name}): {KILLS} pairs without and with --profile")
    for tokens, options in ((1046, []), (4096, []), (4096, ["--resident", 1024])):
        pairs = []
        for _ in range(KILLS):
            a, _ = host.answer(*options, prompt=host.prompt(tokens))
            b, _ = host.answer(*options, "--profile", prompt=host.prompt(tokens))
            pairs.append((a["read_ms"], b["read_ms"]))
        t = b["times_ms"]
        print(f"    {tokens} tokens {'resident' if options else 'streamed'}: read, without/with "
              + ", ".join(f"{x:.1f}/{y:.1f}" for x, y in pairs) + f"; ratio {sum(y for _, y in pairs) / sum(x for x, _ in pairs):.4f}")
        print("        " + ", ".join(f"{k} {v:.1f}" for k, v in t.items()))


def end(*_):
    sys.exit("ended")  # by way of close()


def main():
    signal.signal(signal.SIGTERM, end)
    for name in ("small pages", "huge pages"):
        if os.environ.get("PAGES", name.split()[0]) != name.split()[0]:
            continue
        if name == "huge pages" and os.geteuid() != 0:
            print("no huge pages: only root may mount a tmpfs with huge=advise")
            continue
        host = Host(name, name == "huge pages")
        try:
            print(f"== {name}: expertd loaded the model and serves after {host.expertd():.0f} ms")
            host.lines("registered|opened in|pages")
            for section in SECTIONS:
                {"worker": worker, "expertd": expertd, "resident": resident, "profile": profile, "cancel": cancel}[section](host)
                sys.stdout.flush()
        finally:
            host.close()
    for line in missed:
        print("MISSED:", line)
    return 1 if missed else 0


sys.exit(main())
