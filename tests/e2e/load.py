# SPDX-License-Identifier: MIT
"""Many clients at once against one or more addresses, with the retries that a client may do, and what became of each
request. Runs beside the test in a thread of its own."""
import asyncio
import json
import random
import threading
import time

from conftest import SLOW

WORDS = "fox bear river stone garden moon little old brave quiet".split()


class Request:
    """One request with its retries. outcome: done, failed (a clear error), refused (nobody listened), broken (the
    connection ended in between), stuck (no byte for too long), wrong."""

    def __init__(self, client, number, stream):
        self.client, self.number, self.stream = client, number, stream
        self.begin = time.monotonic()
        self.first = self.end = None
        self.retries = 0
        self.outcome = None
        self.why = ""
        self.text = ""
        self.worker = None

    @property
    def seconds(self):
        return self.end - self.begin


class Load:
    def __init__(self, ports, clients=64, tokens=12, think=0.0, quiet=60, seed=1, headers=None, patience=60):
        self.ports, self.clients, self.tokens, self.think = list(ports), clients, tokens, think
        self.quiet, self.patience = quiet * SLOW, patience * SLOW
        self.seed, self.headers = seed, headers or (lambda client: {})
        self.requests = []
        self.under_way = set()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.main()), daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *what):
        self.stop()

    def stop(self):
        """No new requests; those under way end by themselves, or are found stuck."""
        self.stopping.set()
        self.thread.join(3 * self.quiet)
        assert not self.thread.is_alive(), "clients that never end"

    def done(self):
        return sum(r.outcome == "done" for r in list(self.requests))

    async def main(self):
        await asyncio.gather(*(self.one_client(i) for i in range(self.clients)))

    async def one_client(self, client):
        rng = random.Random(self.seed * 1000 + client)
        number = 0
        port = self.ports[client % len(self.ports)]
        while not self.stopping.is_set():
            r = Request(client, number, stream=rng.random() < 0.5)
            self.under_way.add(r)
            prompt = "Once upon a time a " + " ".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 8)))
            while True:
                try:
                    again = await self.send(r, port, prompt)
                except ConnectionRefusedError as e:
                    again, r.outcome, r.why = None, "refused", str(e)
                except (ConnectionError, asyncio.IncompleteReadError, ValueError) as e:
                    again, r.outcome, r.why = None, "broken", f"{type(e).__name__} {e}"
                except asyncio.TimeoutError:
                    again, r.outcome, r.why = None, "stuck", f"no byte for {self.quiet} s"
                if again is None or time.monotonic() - r.begin > self.patience:
                    break
                r.retries += 1
                port = self.ports[(self.ports.index(port) + 1) % len(self.ports)]
                await asyncio.sleep(min(again, 0.05 * (1 + rng.random())))
            r.end = time.monotonic()
            self.under_way.discard(r)
            self.requests.append(r)
            number += 1
            if self.think or r.outcome != "done":
                await asyncio.sleep(max(self.think, 0.02))

    async def send(self, r, port, prompt):
        """None when it is over; else the seconds that the server wants to be left alone."""
        body = json.dumps({"prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": r.stream,
                           "ignore_eos": True})
        head = {"Host": "x", "Content-Length": len(body), "Connection": "close", **self.headers(r.client)}
        reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), self.quiet)
        try:
            writer.write("POST /v1/completions HTTP/1.1\r\n".encode() +
                         "".join(f"{k}: {v}\r\n" for k, v in head.items()).encode() + b"\r\n" + body.encode())
            line = await asyncio.wait_for(reader.readline(), self.quiet)
            if not line:
                raise ConnectionError("closed before an answer")
            status = int(line.split()[1])
            fields = {}
            while (line := await asyncio.wait_for(reader.readline(), self.quiet)).strip():
                name, value = line.decode().split(":", 1)
                fields[name.lower()] = value.strip()
            r.worker = fields.get("x-worker")
            data = b""
            while True:
                if fields.get("transfer-encoding") == "chunked":
                    n = int(await asyncio.wait_for(reader.readline(), self.quiet), 16)
                    piece = await asyncio.wait_for(reader.readexactly(n + 2), self.quiet)
                    data += piece[:-2]
                    if n == 0:
                        break
                elif "content-length" in fields:
                    data = await asyncio.wait_for(reader.readexactly(int(fields["content-length"])), self.quiet)
                    break
                else:
                    piece = await asyncio.wait_for(reader.read(65536), self.quiet)
                    data += piece
                    if not piece:
                        break
                if status == 200 and r.first is None and data:
                    r.first = time.monotonic()
        finally:
            writer.close()
        self.judge(r, status, fields, data)
        return float(fields["retry-after"]) if r.outcome == "again" else None

    def judge(self, r, status, fields, data):
        if status in (429, 503) and "retry-after" in fields:
            r.outcome, r.why = "again", data[:300].decode(errors="replace")
        elif status != 200:
            # An error in the API's own form says what happened.
            try:
                r.why = json.loads(data)["error"]["message"]
                r.outcome = "failed"
            except (ValueError, KeyError, TypeError):
                r.outcome, r.why = "wrong", f"{status} {data[:200]}"
        elif not r.stream:
            r.text = json.loads(data)["choices"][0]["text"]
            r.outcome = "done"
        else:
            events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
            parsed = [json.loads(e) for e in events if e != "[DONE]"]
            errors = [p["error"]["message"] for p in parsed if "error" in p]
            if errors:
                r.outcome, r.why = "failed", errors[0]
            elif events and events[-1] == "[DONE]":
                r.text = "".join(p["choices"][0]["text"] for p in parsed if p["choices"])
                r.outcome = "done"
            else:
                r.outcome, r.why = "broken", "the stream has no end"

    def counts(self):
        out = {}
        for r in self.requests:
            out[r.outcome] = out.get(r.outcome, 0) + 1
        return out

    def bad(self, allowed=()):
        return [(r.outcome, r.client, r.number, r.stream, r.why) for r in self.requests
                if r.outcome != "done" and r.outcome not in allowed][:10]

    def report(self, title):
        took = sorted(r.seconds for r in self.requests if r.outcome == "done")
        first = sorted(r.first - r.begin for r in self.requests if r.outcome == "done" and r.stream and r.first)

        def at(values, share):
            return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
        print(f"{title}: {self.clients} clients, {len(self.requests)} requests {self.counts()}, "
              f"{sum(r.retries for r in self.requests)} retries of {sum(r.retries > 0 for r in self.requests)}; "
              f"whole answers p50 {at(took, 0.5):.2f} p99 {at(took, 0.99):.2f} most {at(took, 1):.2f} s, "
              f"first bytes p50 {at(first, 0.5):.2f} p99 {at(first, 0.99):.2f} s")
