# SPDX-License-Identifier: MIT
"""Chaos: real processes, and what may happen to them, by seed.

    chaos.py [--seed N] [--seconds S] [--patience S] [--build DIR] [-v]

One instance of expertd, several workers that read prompts and keep conversations,
and a driver that picks, again and again, one of: another read, a turn, kill -9 of
expertd, of a worker or of a tool, SIGSTOP of one of them for a while, SIGTERM, a
link that becomes slow or fast, the model file replaced by another model, written
in place or cut short, the arena truncated under expertd or overwritten while it is
down, a file system that is full, a clock that jumps.

What must hold, whatever happens:
  bits     an answer's hash is that of an undisturbed run of the model that was served
  named    who fails says so in one line, and only if something was done to it
  hangs    nothing takes longer than 10 s (--patience) to answer or end once it is left alone
  leaks    in a quiet moment expertd holds what it held at first; at the end no
           process, socket, file or mapping is left
  torn     no arena that was cut or overwritten is adopted

The same seed makes the same decisions; when things happen to processes depends on
the machine. Exit status 1 with the lines of what did not hold.
"""
import argparse
import collections
import ctypes
import json
import os
import pathlib
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
STORY = TOP / "tools/model/story-q4_k.gguf"
PROMPTS = ["Once upon a time there", "The fox said to the hen", "A king had three sons and", "Tell me of the sea"]
TURNS = ["Tell me a tale of a fox.", "And then?", "The end?"]
GREEDY = ["--temperature", "0", "--ignore-eos", "--hash", "--json", "--threads", "1"]


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Wrong(Exception):
    pass


class Worker:
    """A read, or a conversation, under way. touched: something was done to it or to what it needs."""

    def __init__(self, kind, process, what):
        self.kind, self.process, self.what = kind, process, what
        self.touched, self.killed, self.stopped_until = set(), False, 0.0
        self.since = time.monotonic()
        self.out = b""
        self.turn = 0  # answers of a conversation so far, all of them right


class Chaos:
    def __init__(self, args):
        self.rng = random.Random(args.seed)
        self.args = args
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="xd-chaos-", dir="/dev/shm"))
        self.build = pathlib.Path(args.build).resolve()
        for d in ("run", "arena"):
            (self.path / d).mkdir(mode=0o700)
        self.model = self.path / "model.gguf"
        self.count = collections.Counter()
        self.wrong = []
        self.workers, self.logs = [], 0
        self.expertd = self.expertd_log = None
        self.expertd_stopped_until = 0.0
        self.ended_by = None  # what we did that ends expertd
        self.sane = None  # arena: None nothing done to it since it was served, else what
        self.slow = 1.0
        self.refs, self.tokens = {}, {}
        self.served = None
        self.baseline = None

    # ---- helpers ----

    def say(self, text):
        if self.args.verbose:
            print(f"{time.monotonic() - self.began:7.2f} {text}", flush=True)

    def spawn(self, argv, **kw):
        self.logs += 1
        log = self.path / f"{self.logs:05d}.log"
        kw.setdefault("stdin", subprocess.DEVNULL)
        kw.setdefault("stdout", subprocess.DEVNULL)
        p = subprocess.Popen([str(a) for a in argv], stderr=open(log, "w"), preexec_fn=die_with_parent, **kw)
        p.log = log
        return p

    def program(self, name):
        return self.build / {"expertd": "expertd/expertd", "inferd": "inferd/inferd", "expertctl": "tools/expertctl"}[name]

    def where(self):
        return ["--runtime-dir", self.path / "run"]

    def patience(self):
        """Seconds: more where a read takes longer than the 0.15 s of an idle machine."""
        return self.args.patience * self.slow

    def fail(self, text):
        self.wrong.append(text)
        print(f"WRONG: {text}", flush=True)

    def status(self):
        r = subprocess.run([str(self.program("expertctl")), "status", "--json", *map(str, self.where())], capture_output=True,
                           text=True, timeout=60)
        try:
            return json.loads(r.stdout)
        except ValueError:
            return {}

    # ---- models and what they answer when nobody disturbs ----

    def make_models(self):
        data = bytearray(STORY.read_bytes())
        (self.path / "a.gguf").write_bytes(data)
        for at in range(len(data) - 400000, len(data) - 300000, 64):  # other weights of the same shape
            data[at] ^= 0x11
        (self.path / "b.gguf").write_bytes(data)
        for name in "ab":
            os.utime(self.path / f"{name}.gguf", (1e9 + ord(name), 1e9 + ord(name)))

    def put_model(self, name):
        """Another file by the same name, at once, as an upgrade does it."""
        new = self.path / "new.gguf"
        shutil.copy2(self.path / f"{name}.gguf", new)
        os.replace(new, self.model)
        self.on_disk = name

    def references(self):
        for name in "ab":
            self.put_model(name)
            self.start(())
            self.wait_serving()
            began = time.monotonic()
            for prompt in PROMPTS:
                r = subprocess.run([str(a) for a in self.read_argv(prompt, [])], capture_output=True, text=True)
                if r.returncode:
                    raise Wrong(f"an undisturbed read fails: {r.stderr}")
                self.remember(name, prompt, r.stdout)
            self.slow = max(1.0, (time.monotonic() - began) / len(PROMPTS) / 0.15)
            r = subprocess.run([str(a) for a in self.chat_argv([])], capture_output=True, text=True,
                               input="".join(t + "\n" for t in TURNS))
            for i, line in enumerate(r.stdout.splitlines()):
                self.remember(name, i, line)
            self.stop_expertd(signal.SIGTERM)
            self.reap_expertd()
        if self.refs["a", PROMPTS[0]] == self.refs["b", PROMPTS[0]]:
            raise Wrong("the two models answer the same: the test would see nothing")

    def remember(self, name, key, line):
        answer = json.loads(line)
        self.refs[name, key] = answer["logits_hash"]
        self.tokens[name, key] = answer["generated_tokens"]

    def read_argv(self, prompt, options):
        return [self.program("inferd"), "run", *self.where(), "--prompt", prompt, "--raw", "-n", "3", *GREEDY, *options]

    def chat_argv(self, options):
        return [self.program("inferd"), "chat", *self.where(), "-n", "3", *GREEDY, *options]

    # ---- expertd ----

    def start(self, options, env=None):
        self.expertd = self.spawn([self.program("expertd"), "--quiet", "--model", self.model, *self.where(), "--arena-dir",
                                   self.path / "arena", *options], env={**os.environ, **(env or {})})
        self.expertd_since = time.monotonic()
        self.expertd_said = self.expertd.log
        self.ended_by = None
        self.loading = self.on_disk
        self.checked_start = False
        self.count["expertd started"] += 1

    def wait_serving(self):
        """Until expertd serves or has ended. Checks adoption."""
        end = time.monotonic() + self.patience() * 3
        while self.expertd.poll() is None:
            s = self.status()
            if s.get("state") == "serving" and s.get("pid") == self.expertd.pid:
                adopted = bool(s.get("adopted"))
                if adopted and self.sane:
                    self.fail(f"torn: an arena that was {self.sane} is adopted")
                if adopted and self.served not in (None, self.loading):
                    self.fail(f"torn: the arena of model {self.served} is adopted for {self.loading}")
                self.count["arena adopted" if adopted else "arena built"] += 1
                self.served, self.sane = self.loading, None
                return True
            if time.monotonic() > end:
                self.fail(f"hangs: expertd does not come to serve: {self.expertd_said.read_text()[-300:]} {s}")
                self.expertd.kill()
                return False
            time.sleep(0.02)
        return False

    def stop_expertd(self, sig):
        self.ended_by = sig.name
        self.expertd.send_signal(signal.SIGCONT)
        self.expertd.send_signal(sig)

    def touch_all(self, why):
        for w in self.workers:
            w.touched.add(why)

    def reap_expertd(self):
        """It has ended, or was told to: how?"""
        try:
            rc = self.expertd.wait(self.patience() * 2)
        except subprocess.TimeoutExpired:
            self.fail(f"hangs: expertd does not end after {self.ended_by}")
            self.expertd.kill()
            rc = self.expertd.wait()
        try:
            text = self.expertd_said.read_text()
        except UnicodeDecodeError as e:
            text = self.expertd_said.read_text(errors="replace")
            self.fail(f"named: expertd's line is no text: {e} {text}")
        errors = [line for line in text.splitlines() if "warning" not in line]
        if self.ended_by == "SIGKILL":
            pass
        elif rc == 0 and self.ended_by == "SIGTERM":
            pass
        elif rc == 1 and self.ended_by:
            if len(errors) != 1:
                self.fail(f"named: expertd ended with {len(errors)} lines after {self.ended_by}: {text}")
        else:
            self.fail(f"named: expertd ended with {rc} after {self.ended_by}: {text}")
        self.touch_all("expertd ended")
        self.expertd = None

    def ensure_expertd(self):
        if self.expertd and self.expertd.poll() is not None:
            self.reap_expertd()
        for _ in range(5):
            if self.expertd:
                return
            if self.on_disk not in self.models_whole:
                self.put_model(self.rng.choice("ab"))
            self.start(["--io", self.rng.choice(["auto", "auto", "pread"])])
            if not self.wait_serving():
                self.ended_by = self.ended_by or "its start"
                self.reap_expertd()
        raise Wrong("expertd does not start any more")

    models_whole = "ab"

    # ---- what the driver can do ----

    def act_read(self):
        if len(self.workers) >= 4:
            return None
        prompt = self.rng.choice(PROMPTS)
        options = self.rng.choice([["--stream", "full"], ["--stream", "routed", "--floor", "1"], [],
                                   ["--stream", "routed", "--floor", "1", "--order", "recent", "--ring", "12"]])
        link = self.rng.choice(["0.02", "0.05", "1", "-1"])
        p = self.spawn(self.read_argv(prompt, [*options, "--link-gbps", link]), stdout=subprocess.PIPE)
        self.workers.append(Worker("read", p, prompt))
        return f"read '{prompt}' {options} at {link} GB/s"

    def act_chat(self):
        if len(self.workers) >= 4:
            return None
        p = self.spawn(self.chat_argv(["--link-gbps", self.rng.choice(["0.05", "1"])]), stdin=subprocess.PIPE,
                       stdout=subprocess.PIPE)
        w = Worker("chat", p, 0)
        self.workers.append(w)
        self.ask(w)
        return "a conversation"

    def ask(self, w):
        try:
            w.process.stdin.write(TURNS[w.turn].encode() + b"\n")
            w.process.stdin.flush()
        except BrokenPipeError:
            pass
        w.since = time.monotonic()
        self.count["turn"] += 1

    def act_kill_worker(self):
        w = self.rng.choice(self.workers) if self.workers else None
        if not w:
            return None
        w.process.kill()
        w.killed = True
        return f"kill -9 of a {w.kind}"

    def act_term_worker(self):
        w = self.rng.choice(self.workers) if self.workers else None
        if not w or w.stopped_until:
            return None
        w.process.send_signal(signal.SIGTERM)
        w.killed = True
        return f"SIGTERM to a {w.kind}"

    def act_stop_worker(self):
        w = self.rng.choice(self.workers) if self.workers else None
        if not w or w.stopped_until:
            return None
        seconds = self.rng.uniform(0.2, 3)
        w.process.send_signal(signal.SIGSTOP)
        w.stopped_until = time.monotonic() + seconds
        return f"SIGSTOP of a {w.kind} for {seconds:.1f} s"

    def act_stop_expertd(self):
        if self.expertd_stopped_until:
            return None
        seconds = self.rng.uniform(0.2, 3)
        self.expertd.send_signal(signal.SIGSTOP)
        self.expertd_stopped_until = time.monotonic() + seconds
        self.touch_all("expertd stopped")
        return f"SIGSTOP of expertd for {seconds:.1f} s"

    def act_kill_expertd(self):
        self.stop_expertd(signal.SIGKILL)
        self.expertd_stopped_until = 0
        self.reap_expertd()
        if self.rng.random() < 0.3:  # again, in the middle of its start
            self.start(())
            time.sleep(self.rng.uniform(0, 0.3) * self.slow)
            self.stop_expertd(signal.SIGKILL)
            self.reap_expertd()
            self.sane = None  # whether it was torn is for it to know: bits are checked
            self.served = None
            self.count["kill -9 of expertd while it starts"] += 1
        return "kill -9 of expertd"

    def act_term_expertd(self):
        self.stop_expertd(signal.SIGTERM)
        self.expertd_stopped_until = 0
        self.reap_expertd()
        return "SIGTERM to expertd"

    def act_kill_tool(self):
        p = self.spawn([self.program("expertctl"), self.rng.choice(["status", "rings", "workers", "verify"]), *self.where()])
        time.sleep(self.rng.uniform(0, 0.02))
        p.kill()
        p.wait()
        return "kill -9 of a tool"

    def act_link(self):
        pids = [w.process.pid for w in self.workers if w.process.poll() is None]
        if not pids or self.expertd_stopped_until:  # it would not answer, and we would wait for it
            return None
        gbps = self.rng.choice(["0.01", "0.1", "2"])
        subprocess.run([str(a) for a in (self.program("expertctl"), "configure", "--worker", self.rng.choice(pids),
                                         "--link-gbps", gbps, *self.where())], capture_output=True, timeout=60)
        return f"a link of {gbps} GB/s"

    def act_replace_model(self):
        name = self.rng.choice("ab")
        self.put_model(name)
        if self.rng.random() < 0.7:  # somebody restarts expertd for it
            self.stop_expertd(self.rng.choice([signal.SIGKILL, signal.SIGTERM]))
            self.expertd_stopped_until = 0
            self.reap_expertd()
        return f"model file replaced by {name}"

    def act_bad_model(self):
        """In the file's place lies something cut short; expertd is started for it, says so, ends."""
        self.stop_expertd(signal.SIGTERM)
        self.expertd_stopped_until = 0
        self.reap_expertd()
        self.model.unlink()
        self.model.write_bytes(STORY.read_bytes()[:self.rng.randrange(0, 11_000_000)])
        self.on_disk = "-"
        self.start(())
        if self.wait_serving():
            self.fail("named: a model that is cut short is served")
        self.ended_by = self.ended_by or "a model cut short"
        self.reap_expertd()
        return "model file cut short"

    def act_written_model(self):
        """The file is written in place while it is read: refused, or read before, never half of each."""
        self.stop_expertd(signal.SIGTERM)
        self.expertd_stopped_until = 0
        self.reap_expertd()
        for f in (self.path / "arena").rglob("arena"):
            if f.is_file():
                f.unlink()
        self.put_model("a")
        self.start(["--io-depth", "1"])
        time.sleep(self.rng.uniform(0, 0.15) * self.slow)
        other = (self.path / "b.gguf").read_bytes()
        with open(self.model, "r+b") as f:
            f.write(other)
        self.on_disk = "b"
        self.loading = "a"
        if self.wait_serving():
            # Which of the two it read, its answers tell; of a mixture some would be the one's, some the other's.
            seen = set()
            for prompt in PROMPTS:
                r = subprocess.run([str(a) for a in self.read_argv(prompt, [])], capture_output=True, text=True, timeout=120)
                said = json.loads(r.stdout)["logits_hash"] if r.returncode == 0 else r.stderr
                seen.add({self.refs[n, prompt]: n for n in "ab"}.get(said, said))
            if len(seen) != 1 or not seen <= {"a", "b"}:
                self.fail(f"bits: of a file written while it was read: {seen}")
            else:
                self.served = seen.pop()
                self.count["written in place: before or after it was read"] += 1
        else:
            self.ended_by = "a model written while it was read"
            self.reap_expertd()
            self.count["written in place: refused"] += 1
        return "model file written in place"

    def arena_files(self):
        return [f for f in (self.path / "arena").rglob("arena") if f.is_file()]

    def act_truncate_arena(self):
        files = self.arena_files()
        if not files:
            return None
        os.chmod(files[0], 0o600)
        os.truncate(files[0], self.rng.randrange(0, os.path.getsize(files[0])))
        self.sane = "truncated"
        self.touch_all("arena truncated")
        self.ended_by = self.ended_by or "a truncated arena"
        self.arena_cut = True
        # What runs may go on if it touches nothing that is gone; then it is restarted.
        time.sleep(self.rng.uniform(0, 0.5))
        if self.expertd.poll() is None:
            self.stop_expertd(self.rng.choice([signal.SIGKILL, signal.SIGTERM]))
        self.expertd_stopped_until = 0
        self.reap_expertd()
        return "arena truncated under expertd"

    def act_overwrite_arena(self):
        """While expertd is down: what it must notice by itself is all but the blobs' own bytes."""
        self.stop_expertd(signal.SIGKILL)
        self.expertd_stopped_until = 0
        self.reap_expertd()
        files = self.arena_files()
        if not files:
            return None
        os.chmod(files[0], 0o600)
        with open(files[0], "r+b") as f:
            f.seek(self.rng.choice([0, 6, 64, 80, 4096]))
            f.write(self.rng.randbytes(16))
        self.sane = "overwritten"
        return "arena overwritten while expertd was down"

    def act_full_disk(self):
        if os.geteuid() != 0:
            return None
        small = self.path / "small"
        small.mkdir(exist_ok=True)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.rng.choice([64, 1024, 8192])}k", "tmpfs", small],
                          capture_output=True).returncode:
            return None
        try:
            p = self.spawn([self.program("expertd"), "--quiet", "--model", self.path / "a.gguf", "--runtime-dir",
                            self.path / "run", "--instance", "full", "--arena-dir", small])
            try:
                rc = p.wait(self.patience() * 2)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
                rc = None
            text = p.log.read_text()
            if rc != 1 or len(text.splitlines()) != 1 or str(small) not in text:
                self.fail(f"named: on a full file system: {rc} {text}")
            if any(f.is_file() for f in small.rglob("*")):
                self.fail("leaks: something half-written is left on a full file system")
        finally:
            subprocess.run(["umount", "-l", small])
        return "full file system"

    def act_clock(self):
        """The wall clock jumps for one reader (all waits are to be by the monotonic clock)."""
        if not self.faketime or len(self.workers) >= 4:
            return None
        prompt = self.rng.choice(PROMPTS)
        jump = self.rng.choice(["-3600", "+86400", "-86400000"])
        p = self.spawn(self.read_argv(prompt, ["--link-gbps", "0.05"]), stdout=subprocess.PIPE,
                       env={**os.environ, "LD_PRELOAD": self.faketime, "CLOCK_JUMP": jump})
        self.workers.append(Worker("read", p, prompt))
        return f"a reader whose clock jumps by {jump} s"

    # ---- watching ----

    def check_answer(self, w, key, line):
        try:
            answer = json.loads(line)
        except ValueError:
            return self.fail(f"named: a {w.kind} says {line[:200]!r}")
        if "error" in answer:
            self.count["named error"] += 1
            if w.killed:
                return None
            if not w.touched:
                self.fail(f"named: a {w.kind} to which nothing was done fails: {answer['error']}")
            if len(answer["error"]) < 20:
                self.fail(f"named: a {w.kind} fails with '{answer['error']}'")
            return None
        hashes = {self.refs[n, key] for n in w.models}
        if answer["stop"] == "cancelled" and w.killed:  # SIGTERM cut it: what there is of it must be right
            said = answer["generated_tokens"]
            if not any(self.tokens[n, key][:len(said)] == said for n in w.models):
                self.fail(f"bits: {w.kind} {key!r} was cut: {said}, undisturbed {[self.tokens[n, key] for n in w.models]}")
            self.count["answer cut by SIGTERM"] += 1
            return answer
        if answer["logits_hash"] not in hashes:
            self.fail(f"bits: {w.kind} {key!r}: {answer}, undisturbed {hashes} of {w.models}, after {w.touched}")
        self.count["right answer"] += 1
        return answer

    def watch(self, w):
        """True while it is under way."""
        now = time.monotonic()
        if w.stopped_until and now >= w.stopped_until:
            w.process.send_signal(signal.SIGCONT)
            w.stopped_until, w.since = 0, now
        if not hasattr(w, "models"):
            w.models = set()
        if self.expertd_stopped_until:
            w.touched.add("expertd stopped")
        if self.served:
            w.models.add(self.served)  # the one that was, or became, served while it ran
        while select.select([w.process.stdout], [], [], 0)[0]:
            got = os.read(w.process.stdout.fileno(), 65536)
            if not got:
                break
            w.out += got
            if w.kind == "chat":
                while b"\n" in w.out:
                    line, w.out = w.out.split(b"\n", 1)
                    answer = self.check_answer(w, w.turn, line)
                    w.since = now
                    w.turn += answer is not None  # what failed is asked again
                    if w.turn < len(TURNS) and not w.killed:
                        time.sleep(0.01)
                        self.ask(w)
                    else:
                        w.process.stdin.close()
        rc = w.process.poll()
        if rc is None:
            if now - w.since > self.patience() + (3 if self.expertd_stopped_until else 0) and not w.stopped_until \
                    and not self.expertd_stopped_until and self.expertd:
                if now - max(w.since, self.undisturbed_since) > self.patience():
                    self.fail(f"hangs: a {w.kind} ({w.what}) since {now - w.since:.1f} s: {w.process.log.read_text()[-400:]}")
                    w.process.kill()
                    w.killed = True
            return True
        text = w.process.log.read_text().strip()
        if w.kind == "read" and rc == 0:
            self.check_answer(w, w.what, w.out)
        elif rc == 1 and w.touched:
            lines = [x for x in text.splitlines() if x]
            if w.kind == "read" and (len(lines) != 1 or not lines[0].startswith("inferd: ")):
                self.fail(f"named: a {w.kind} fails with {text!r} after {w.touched}")
            self.count["named error"] += 1
        elif rc and not (w.killed and rc in (-9, -15, 1, 130, 143)):
            self.fail(f"named: a {w.kind} ends with {rc} after {w.touched or 'nothing'}: {text[-300:]}")
        w.process.stdout.close()
        return False

    def settle(self):
        """A quiet moment: everything goes on and ends; then expertd holds what it held at first."""
        if self.expertd_stopped_until:
            self.expertd.send_signal(signal.SIGCONT)
            self.expertd_stopped_until = 0
        self.undisturbed_since = time.monotonic()
        for w in self.workers:
            if w.stopped_until:
                w.stopped_until = time.monotonic()
        while self.workers:
            if self.expertd.poll() is not None:
                self.ensure_expertd()
            self.workers = [w for w in self.workers if self.watch(w)]
            time.sleep(0.01)
        end = time.monotonic() + self.patience()
        facts = None
        while time.monotonic() < end:
            pid = self.expertd.pid
            maps = [line.split() for line in open(f"/proc/{pid}/maps")]
            facts = {"fds": len(os.listdir(f"/proc/{pid}/fd")), "threads": len(os.listdir(f"/proc/{pid}/task")),
                     "shared": sum(m[1].endswith("s") for m in maps)}
            if facts["threads"] == 2 and (not self.baseline or facts == self.baseline) and not self.status()["workers"]:
                break
            time.sleep(0.02)
        else:
            self.fail(f"leaks: expertd holds {facts}, at first {self.baseline}: {self.status().get('workers')}")
        self.baseline = self.baseline or facts
        self.count["quiet moments"] += 1

    ACTS = {"read": 30, "chat": 8, "kill_worker": 8, "term_worker": 3, "stop_worker": 5, "stop_expertd": 3, "kill_expertd": 4,
            "term_expertd": 2, "kill_tool": 3, "link": 5, "replace_model": 3, "bad_model": 1, "written_model": 2,
            "truncate_arena": 3, "overwrite_arena": 2, "full_disk": 2, "clock": 3}

    def drive(self):
        self.began = self.undisturbed_since = time.monotonic()
        self.faketime = self.build / "tests/fault/libclock.so"
        self.faketime = str(self.faketime) if self.faketime.exists() else None
        self.on_disk = "a"
        self.make_models()
        self.references()
        self.put_model("a")
        self.ensure_expertd()
        self.settle()
        end = time.monotonic() + self.args.seconds
        names, weights = list(self.ACTS), list(self.ACTS.values())
        since_settled = 0
        while time.monotonic() < end and len(self.wrong) < 10:
            act = self.rng.choices(names, weights)[0]
            done = getattr(self, "act_" + act)()
            if done:
                self.count[act.replace("_", " ")] += 1
                self.say(done)
                if "expertd" in act or "model" in act or "arena" in act:
                    self.undisturbed_since = time.monotonic()
            pause = time.monotonic() + self.rng.choice([0, 0.01, 0.05, 0.2])
            while True:
                if self.expertd_stopped_until and time.monotonic() >= self.expertd_stopped_until:
                    if self.expertd:
                        self.expertd.send_signal(signal.SIGCONT)
                    self.expertd_stopped_until = 0
                    self.undisturbed_since = time.monotonic()
                if not self.expertd or self.expertd.poll() is not None:
                    self.expertd_stopped_until = 0
                    self.ensure_expertd()
                    self.undisturbed_since = time.monotonic()
                self.workers = [w for w in self.workers if self.watch(w)]
                if time.monotonic() >= pause:
                    break
                time.sleep(0.005)
            since_settled += 1
            if since_settled >= 25:
                self.settle()
                since_settled = 0
        self.settle()
        self.stop_expertd(signal.SIGTERM)
        self.reap_expertd()
        left = [f.name for f in (self.path / "run/expertd/default").iterdir() if not f.name.startswith("arena")]
        if left:
            self.fail(f"leaks: files {left}")
        for line in open("/proc/net/unix"):
            if str(self.path) in line:
                self.fail(f"leaks: socket {line.split()[-1]}")

    def close(self):
        for w in self.workers:
            w.process.kill()
        if self.expertd:
            self.expertd.kill()
            self.expertd.wait()
        if self.wrong:
            print(f"chaos: logs are kept in {self.path}")
        else:
            shutil.rmtree(self.path, ignore_errors=True)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--seconds", type=float, default=30)
    a.add_argument("--patience", type=float, default=10)
    a.add_argument("--build", default=os.environ.get("EXPERTD_BUILD", TOP / "build"))
    a.add_argument("-v", "--verbose", action="store_true")
    args = a.parse_args()
    chaos = Chaos(args)
    began = time.monotonic()
    try:
        chaos.drive()
    except Wrong as e:
        chaos.fail(str(e))
    finally:
        chaos.close()
    for what, n in sorted(chaos.count.items()):
        print(f"{n:7d} {what}")
    print(f"seed {args.seed}: {time.monotonic() - began:.0f} s, {len(chaos.wrong)} wrong", flush=True)
    return 1 if chaos.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
