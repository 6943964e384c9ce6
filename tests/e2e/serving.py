# SPDX-License-Identifier: MIT
"""A running inferd serve for the tests, and plain HTTP to talk to it."""
import http.client
import json
import re
import socket
import subprocess
import time

from conftest import INFERD, SLOW


class Server:
    def __init__(self, world, *options, wait=True, instance="default", env=None, listen="127.0.0.1:0",
                 program=INFERD):
        self.world = world
        self.process = world.spawn([program, "serve", *world.where(instance), "--listen", listen, *options], env=env,
                                   stdout=subprocess.DEVNULL)
        self.port = None
        if wait:
            world.until(lambda: self.process.poll() is not None or "serving" in self.log(), what="inferd serves")
            assert self.process.poll() is None, self.log()
            self.port = int(re.search(r" on http://[\d.]+:(\d+)", self.log()).group(1))

    def log(self):
        return self.process.log.read_text(errors="replace")

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def connect(self, timeout=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout * SLOW)

    def socket(self, timeout=60, receive=None):
        s = socket.socket()
        if receive:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        s.settimeout(timeout * SLOW)
        s.connect(("127.0.0.1", self.port))
        return s

    def request(self, method, path, body=None, headers=None, timeout=60):
        """(status, headers, parsed or plain body)"""
        c = self.connect(timeout)
        try:
            c.request(method, path, json.dumps(body) if isinstance(body, (dict, list)) else body, headers or {})
            r = c.getresponse()
            data = r.read()
            kind = r.headers.get("Content-Type", "")
            return r.status, r.headers, json.loads(data) if kind == "application/json" else data
        finally:
            c.close()

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body, **kw):
        return self.request("POST", path, body, **kw)

    def complete(self, prompt="Once upon a time", **kw):
        status, _, body = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **kw})
        assert status == 200, body
        return body

    def chat(self, content="Tell me a story.", **kw):
        status, _, body = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}],
                                                             "temperature": 0, **kw})
        assert status == 200, body
        return body

    def status(self):
        return self.get("/v1/status")[2]

    def start_stream(self, path="/v1/completions", receive=None, **body):
        """A socket on which a streamed request is under way."""
        body = json.dumps({"prompt": "Once upon a time", "temperature": 0, "stream": True, "ignore_eos": True, **body})
        s = self.socket(receive=receive)
        s.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        return s

    def until_status(self, condition, what, timeout=60):
        return self.world.until(lambda: condition(self.status()), what=what, timeout=timeout)

    def stop(self, timeout=60):
        self.process.terminate()
        return self.process.wait(timeout * SLOW)


def events(response):
    """Server-sent events: (name or None, data) of a file object."""
    name = None
    for line in response:
        line = line.decode().rstrip("\r\n")
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, line[6:]
            name = None


def stream(server, path, body):
    """The parsed objects of a streamed response; [DONE] as it is."""
    c = server.connect()
    try:
        c.request("POST", path, json.dumps({**body, "stream": True}))
        r = c.getresponse()
        assert r.status == 200, r.read()
        assert r.headers["Content-Type"] == "text/event-stream"
        return [(n, d if d == "[DONE]" else json.loads(d)) for n, d in events(r)]
    finally:
        c.close()


def wait_quiet(server, timeout=10):
    end = time.monotonic() + timeout * SLOW
    while server.status()["running"] and time.monotonic() < end:
        time.sleep(0.005)
