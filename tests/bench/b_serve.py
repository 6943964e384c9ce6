#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""b_serve.py BUILD MODEL [OPTION...]: what clients of `inferd serve` see, as tables.

    load      throughput, first token, gaps: so many conversations at once (--at-once), or arriving at random (--rate)
    together  prompts at once through a server that computes them together, and through one that takes them one by one
    turn      a follow-up turn behind a long first one
    restart   kill -9 of the server: time to the first token of the next one, a new prompt and the long conversation
    two       the same load on one server and on two that share the experts
    fair      two servers that read prompts at the same time: what each gets

Each part starts the servers it needs below one expertd of its own, and ends them. On a GPU: --device cuda and a model of
mkmodel --preset=qwen3-30b-a3b (its template is none of the known: --chat-template chatml). Exit status 1 when a request
failed. Needs nothing but the standard library."""
import argparse
import concurrent.futures
import http.client
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

PARTS = ["load", "together", "turn", "restart", "two", "fair"]


def options():
    p = argparse.ArgumentParser(usage=__doc__, add_help=True)
    p.add_argument("build", type=pathlib.Path)
    p.add_argument("model")
    p.add_argument("--parts", default=",".join(PARTS))
    p.add_argument("--device", default="host")
    p.add_argument("--link-gbps", help="pace the link (host device)")
    p.add_argument("--ctx", default="24576")
    p.add_argument("--kv-tokens", default="73728")
    p.add_argument("--at-once", default="1,8,32")
    p.add_argument("--rate", default="0.5,2", help="conversations a second")
    p.add_argument("--prompt", type=int, default=64, help="tokens of a prompt under load")
    p.add_argument("--answer", type=int, default=64, help="tokens of an answer under load")
    p.add_argument("--together", default="8x40,8x300,4x1100", help="prompts x tokens")
    p.add_argument("--turn", default="18800+1790", help="tokens of the first turn + of the one behind it")
    p.add_argument("--restart", type=int, default=1000, help="tokens of the prompt behind a restart")
    p.add_argument("--rounds", default="3")
    p.add_argument("--serve", default="", help="more options of inferd serve, in one word list")
    return p.parse_args()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Host:
    def __init__(self, o):
        self.o, self.build = o, o.build.resolve()
        base = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None
        self.run = tempfile.mkdtemp(prefix="xd-serve-", dir=base)
        pace = ["--link-gbps", o.link_gbps] if o.link_gbps else []
        self.log = open(f"{self.run}/log", "w")
        self.daemon = subprocess.Popen([self.build / "expertd/expertd", "--device", o.device, "--model", o.model, "--runtime-dir",
                                        self.run, "--no-keep", *pace], stderr=self.log)
        self.servers = []

    def serve(self, *options):
        s = Server(self, options)
        self.servers.append(s)
        return s

    def bench(self, servers, *options):
        """The JSON of expert-bench serve."""
        where = [",".join(s.url for s in group) for group in servers]
        r = subprocess.run([self.build / "tools/expert-bench", "serve", *where, "-q", "--json", *map(str, options)],
                           stdout=subprocess.PIPE, text=True)
        if r.returncode not in (0, 1) or not r.stdout:
            sys.exit(f"b_serve: expert-bench: exit status {r.returncode}")
        got = json.loads(r.stdout)
        for load in got["loads"]:
            for s in load["servers"]:
                if s["ok"] != s["requests"]:
                    self.failed = True
                    print(f"b_serve: {s['requests'] - s['ok']} of {s['requests']} requests failed: {s['last_error']}", file=sys.stderr)
        return got["loads"]

    failed = False

    def end(self):
        for s in self.servers:
            s.end()
        self.daemon.terminate()
        self.daemon.wait()
        self.log.close()
        shutil.rmtree(self.run)


class Server:
    def __init__(self, host, options):
        self.host, self.options, self.port, self.process = host, options, free_port(), None
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        self.until_ready()

    def start(self):
        o = self.host.o
        self.process = subprocess.Popen([self.host.build / "inferd/inferd", "serve", "--runtime-dir", self.host.run, "--device", o.device,
                                         "--ctx", o.ctx, "--kv-tokens", o.kv_tokens, "--listen", f"127.0.0.1:{self.port}",
                                         *o.serve.split(), *self.options], stderr=self.host.log, stdout=self.host.log)

    def until_ready(self, timeout=300):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                self.host.log.flush()
                sys.exit("b_serve: inferd serve ended:\n" + open(self.host.log.name).read()[-2000:])
            try:
                c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                c.request("GET", "/health")
                if c.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.01)
        sys.exit("b_serve: inferd serve is not ready")

    def first_token(self, prompt, keep=None, tokens=1):
        """Seconds to the first piece of a completion and its usage; again until the server answers."""
        begin, body = time.monotonic(), {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True,
                                         "stream_options": {"include_usage": True}}
        first = usage = None
        while first is None:
            try:
                c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
                c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                r = c.getresponse()
            except OSError:
                time.sleep(0.002)
                continue
            if r.status == 503:
                r.read()
                time.sleep(0.005)
                continue
            if r.status != 200:
                sys.exit(f"b_serve: {r.status}: {r.read()[:300]}")
            for line in r:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                piece = json.loads(line[6:])
                if first is None and piece.get("choices"):
                    first = time.monotonic() - begin
                usage = piece.get("usage") or usage
            c.close()
        return first, usage

    def parked(self):
        """Until nothing of what was read waits to be parked; how many blocks are."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            c.request("GET", "/v1/status")
            p = json.loads(c.getresponse().read()).get("prefix", {})
            if not p.get("unparked_blocks"):
                return p.get("parked_blocks", 0)
            time.sleep(0.05)
        return 0

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


def ms(t):
    return "-" if not t else f"{t['p50']:.0f} / {t['p99']:.0f}"


def spread(s, form="{:.2f}"):
    return f"{form.format(s['median'])} ({form.format(s['low'])}..{form.format(s['high'])})"


def row(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def head(*cells):
    row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def load(h, o):
    s = h.serve("--parallel", "32")
    print(f"\n### Load: prompts of {o.prompt} tokens, answers of {o.answer}\n")
    head("load", "requests", "prompt tokens/s", "answer tokens/s", "first token ms p50 / p99", "gap ms p50 / p99")
    common = ["--prompt-tokens", o.prompt, "--max-tokens", o.answer]
    got = h.bench([[s]], "--conversations", o.at_once, *common) if o.at_once else []
    got += h.bench([[s]], "--rate", o.rate, *common) if o.rate else []
    for x in got:
        r = x["servers"][0]
        row(f"{x['at_once']} at once" if "at_once" in x else f"{x['rate']:g} a second", r["requests"],
            f"{r['prompt_tokens_per_s']['median']:.0f}", f"{r['generated_tokens_per_s']['median']:.1f}", ms(r["ttft_ms"]), ms(r["itl_ms"]))
    s.end()


def together(h, o):
    alone, all_ = h.serve("--parallel", "1"), h.serve("--parallel", "32")
    print("\n### Prompts at once: one by one, and in one stream\n")
    head("prompts", "one by one: prompt tokens/s", "in one stream", "ratio of the times", "first token p50 / p99: one by one", "in one stream")
    for case in o.together.split(","):
        n, tokens = map(int, case.split("x"))
        x = h.bench([[alone], [all_]], "--conversations", n, "--count", n, "-n", o.rounds, "--prompt-tokens", tokens, "--max-tokens", 1)[0]
        a, b = x["servers"]
        row(f"{n} of {tokens}", f"{a['prompt_tokens_per_s']['median']:.0f}", f"{b['prompt_tokens_per_s']['median']:.0f}",
            spread(b["generated_ratio"]), ms(a["ttft_ms"]), ms(b["ttft_ms"]))
    alone.end()
    all_.end()


def turn(h, o):
    first, later = map(int, o.turn.split("+"))
    s = h.serve("--parallel", "4")
    print(f"\n### A turn of {later} tokens behind one of {first}\n")
    head("turn", "requests", "first token ms p50 / p99", "prompt tokens, of them cached")
    x = h.bench([[s]], "--conversations", 1, "--count", o.rounds, "--turns", 2, "--prompt-tokens", first, "--turn-tokens", later,
                "--max-tokens", 8)[0]["servers"][0]
    row("first", o.rounds, ms(x["ttft_ms"]), "")
    row("second", o.rounds, ms(x["later_ttft_ms"]), f"{x['prompt_tokens']}, {x['cached_tokens']} (both turns)")
    s.end()


def words(n, salt):
    return " ".join(f"{salt} fox {i} ran" for i in range(n))


def restart(h, o):
    s = h.serve("--parallel", "4")
    print("\n### kill -9 of the server, the next one started at once: first token after the kill\n")
    head("what", "ms, each", "prompt tokens, of them cached")
    first, _ = map(int, o.turn.split("+"))
    _, usage = s.first_token(words(100, "probe"))
    per_word = usage["prompt_tokens"] / 100
    story = words(int(first / per_word), "long")
    s.first_token(story)
    s.parked()
    new, same = [], []
    for i in range(int(o.rounds)):
        s.kill()
        begin = time.monotonic()
        s.start()
        s.first_token(words(int(o.restart / per_word), f"new{i}"))
        new.append((time.monotonic() - begin) * 1e3)
    usage_new = s.first_token(words(int(o.restart / per_word), "again"))[1]
    for i in range(int(o.rounds)):
        s.kill()
        begin = time.monotonic()
        s.start()
        _, usage = s.first_token(f"{story} and then turn {i}")
        same.append((time.monotonic() - begin) * 1e3)
    row("a new prompt", ", ".join(f"{x:.0f}" for x in new), f"{usage_new['prompt_tokens']}, {usage_new['prompt_tokens_details']['cached_tokens']}")
    row("the long conversation goes on", ", ".join(f"{x:.0f}" for x in same),
        f"{usage['prompt_tokens']}, {usage['prompt_tokens_details']['cached_tokens']}")
    s.end()


def two(h, o):
    a, b = h.serve("--parallel", "32"), h.serve("--parallel", "32")
    print("\n### Two servers and one\n")
    head("conversations at once", "answer tokens/s: one", "two", "ratio", "first token ms p50 / p99: one", "two")
    loads = [n for n in o.at_once.split(",") if int(n) > 1]
    for x in h.bench([[a], [a, b]], "--conversations", ",".join(loads), "-n", o.rounds, "--prompt-tokens", o.prompt, "--max-tokens", o.answer):
        one, both = x["servers"]
        row(x["at_once"], f"{one['generated_tokens_per_s']['median']:.1f}", f"{both['generated_tokens_per_s']['median']:.1f}",
            spread(both["generated_ratio"]), ms(one["ttft_ms"]), ms(both["ttft_ms"]))
    a.end()
    b.end()


def fair(h, o):
    servers = [h.serve("--parallel", "4"), h.serve("--parallel", "4")]
    print("\n### Two servers that read at the same time\n")
    head("prompts", "prompt tokens/s: first", "second", "ratio")
    n, tokens = 24, 1100
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda s: h.bench([[s]], "--conversations", 2, "--count", n, "--prompt-tokens", tokens, "--max-tokens", 1), servers))
    a, b = (x[0]["servers"][0]["prompt_tokens_per_s"]["median"] for x in got)
    row(f"{n} of {tokens} each, two at once", f"{a:.0f}", f"{b:.0f}", f"{a / b:.3f}")
    for s in servers:
        s.end()


def main():
    o = options()
    wanted = o.parts.split(",")
    if any(p not in PARTS for p in wanted):
        sys.exit(f"b_serve: --parts: some of {','.join(PARTS)}")
    h = Host(o)
    try:
        for p in wanted:
            begin = time.monotonic()
            globals()[p](h, o)
            print(f"\n({p}: {time.monotonic() - begin:.0f} s)", flush=True)
    finally:
        h.end()
    return 1 if h.failed else 0


if __name__ == "__main__":
    sys.exit(main())
