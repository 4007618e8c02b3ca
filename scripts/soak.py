#!/usr/bin/env python3
"""Runs a mixed load on a server for several minutes. Checks that every request has the right answer, and that memory does not grow.

    python3 scripts/soak.py target/release/gemmule tests/checkpoints/st-mean tests/checkpoints/writer --minutes 5

The script starts the server itself, with both models and a response cache. Clients request embeddings one at a time and in lists, for
repeated and for new texts. They generate texts with and without streaming, send a request for each error status, disconnect before the
answer, send one byte at a time, and close half of a connection. The script needs only Python's standard library. It exits with status 1 if
an answer is missing or wrong, or if memory grows.
"""

import argparse
import collections
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

EMBEDDINGS = "/v1/embeddings"


class Server:
    def __init__(self, program, folders):
        self.process = subprocess.Popen(
            [program, "serve", "--device", "cpu", "--invariant", "--port", "0", "--response-cache-bytes", "2000000", "--drain-delay-ms", "0"]
            + [arg for folder in folders for arg in ("--weights", folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port = None
        for line in self.process.stderr:
            if "listening on http://" in line:
                self.port = int(line.rsplit(":", 1)[1])
                break
        if self.port is None:
            sys.exit("the server did not start")
        self.log = collections.deque(maxlen=50)
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def memory(self):
        """Returns the resident memory of the server in bytes."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class Soak:
    def __init__(self, server, until):
        self.server, self.until = server, until
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.problems = []
        self.known = {}

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def problem(self, text):
        with self.lock:
            self.counts["problems"] += 1
            if len(self.problems) < 20:
                self.problems.append(text)

    def expect(self, what, condition, found):
        self.count(what)
        if not condition:
            self.problem(f"{what}: {str(found)[:300]}")

    def same(self, text, vector):
        """Checks that the vector of a text has the same bits in all responses, with any other requests and with or without the cache."""
        vector = tuple(vector)
        with self.lock:
            known = self.known.setdefault(text, vector) if len(self.known) < 5000 else self.known.get(text, vector)
        return known == vector

    def post(self, connection, path, body, headers=None):
        if not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        connection.request("POST", path, body, headers or {})
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, data

    def connection(self):
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)

    def run(self, client, seed):
        draw = random.Random(seed)
        while time.time() < self.until:
            try:
                client(draw)
            except Exception as error:  # noqa: BLE001: any error means that an answer is missing
                self.problem(f"{client.__name__}: {type(error).__name__}: {error}")
                time.sleep(0.1)

    def text(self, draw):
        n = draw.choice([300, 10**9])
        return f"rain {draw.randrange(n)}"

    def embed(self, draw):
        connection = self.connection()
        for _ in range(50):
            if time.time() > self.until:
                break
            texts = [self.text(draw) for _ in range(draw.choice([1, 1, 1, 7, 60]))]
            status, data = self.post(connection, EMBEDDINGS, {"model": "st-mean", "input": texts})
            answer = json.loads(data)
            is_right = (
                status == 200
                and len(answer["data"]) == len(texts)
                and all(self.same(t, row["embedding"]) for t, row in zip(texts, answer["data"]))
            )
            self.expect("embeddings", is_right, (status, data))
        connection.close()

    def write(self, draw):
        connection = self.connection()
        n = draw.choice([4, 16, 40])
        body = {"model": "writer", "prompt": f"One cold morning {draw.choice(['Ben', 'Lily', 'Tom'])}", "max_tokens": n}
        if draw.random() < 0.3:
            body |= {"frequency_penalty": draw.uniform(-2, 2), "presence_penalty": draw.uniform(-2, 2), "logit_bias": {"7": -100}}
        if draw.random() < 0.5:
            status, data = self.post(connection, "/v1/completions", body)
            answer = json.loads(data)
            is_right = status == 200 and 0 < answer["usage"]["completion_tokens"] <= n
            self.expect("texts", is_right, (status, data))
        else:
            status, data = self.post(connection, "/v1/completions", body | {"stream": True})
            is_right = status == 200 and data.endswith(b"data: [DONE]\n\n")
            self.expect("texts as events", is_right, (status, data[-200:]))
        connection.close()

    def wrong(self, draw):
        connection = self.connection()
        cases = [
            (EMBEDDINGS, "{", (400,), {}),
            (EMBEDDINGS, {"model": "st-mean", "input": []}, (400,), {}),
            (EMBEDDINGS, {"model": "st-mean", "input": ["x", ""]}, (400,), {}),
            (EMBEDDINGS, {"model": "st-mean", "input": [10**7]}, (400,), {}),
            (EMBEDDINGS, {"model": "gpt-9", "input": "x"}, (404,), {}),
            (EMBEDDINGS, {"model": "writer", "input": "x"}, (404,), {}),
            (EMBEDDINGS, {"model": "st-mean", "input": "word " * 5000}, (413,), {}),
            (EMBEDDINGS, {"model": "st-mean", "input": [f"late {draw.random()}"] * 300}, (200, 429, 504), {"x-request-timeout-ms": "1"}),
            (EMBEDDINGS, '{"input": ' + "[" * 50000, (400,), {}),
            ("/v1/completions", {"model": "writer", "prompt": "", "max_tokens": 3}, (400,), {}),
            ("/v1/completions", {"model": "writer", "prompt": "One", "logit_bias": {"100000": 1}}, (400,), {}),
            ("/v9/nothing", {}, (404,), {}),
        ]
        for path, body, expected, headers in cases:
            status, data = self.post(connection, path, body, headers)
            self.expect("errors", status in expected, (path, str(body)[:60], status, data))
        connection.close()

    def leave(self, draw):
        """Sends requests, and disconnects before the answers."""
        for path, body in (
            (EMBEDDINGS, {"model": "st-mean", "input": [self.text(draw) for _ in range(100)]}),
            ("/v1/completions", {"model": "writer", "prompt": "One cold morning", "max_tokens": 40, "stream": True}),
        ):
            body = json.dumps(body).encode()
            stream = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
            stream.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(draw.random() * 0.02)
            stream.close()
            self.count("clients that left")
        time.sleep(0.05)

    def slow(self, draw):
        """Sends one byte at a time, and closes half of a connection."""
        body = json.dumps({"model": "st-mean", "input": "rain"}).encode()
        head = f"POST {EMBEDDINGS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as stream:
            for byte in head + body:
                stream.sendall(bytes([byte]))
                time.sleep(0.005)
            data = b""
            while part := stream.recv(65536):
                data += part
            self.expect("slow clients", data.startswith(b"HTTP/1.1 200"), data)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as stream:
            stream.sendall(head + body[: draw.randrange(len(body))])
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(65536):
                pass
            self.count("half-closed clients")

    def watch(self, _):
        connection = self.connection()
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            self.expect("what monitors ask", answer.status == 200, (path, answer.status))
        connection.close()
        time.sleep(0.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("embeds", help="a folder called st-mean, of a model that embeds")
    parser.add_argument("writes", help="a folder called writer, of a model that writes")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--growth", type=float, default=0.10, help="the share by which memory may grow after the first quarter")
    args = parser.parse_args()
    server = Server(args.program, [args.embeds, args.writes])
    began = time.time()
    soak = Soak(server, began + args.minutes * 60)
    clients = [soak.embed] * 3 + [soak.write] * 2 + [soak.wrong, soak.leave, soak.slow, soak.watch]
    threads = [threading.Thread(target=soak.run, args=(client, seed)) for seed, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    samples = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(2.0, args.minutes * 60 / 40))
        samples.append((time.time() - began, server.memory(), server.files()))
        if server.process.poll() is not None:
            soak.problem(f"the server ended with {server.process.returncode}: {''.join(server.log)}")
            soak.until = 0
            break
    for thread in threads:
        thread.join()
    # Wait for requests whose clients disconnected. They must leave no open files.
    time.sleep(1)
    files = server.files() if server.process.poll() is None else 0
    server.process.terminate()
    code = server.process.wait(60)
    soak.expect("shut down", code == 0, code)
    quarter = len(samples) // 4
    middle = sorted(memory for _, memory, _ in samples[quarter : 2 * quarter + 1])
    end = sorted(memory for _, memory, _ in samples[3 * quarter :])
    before, after = middle[len(middle) // 2], end[len(end) // 2]
    for what, n in sorted(soak.counts.items()):
        print(f"{n:>9} {what}")
    mib = 1 << 20
    print(f"memory: {samples[0][1] / mib:.1f} MiB first, {before / mib:.1f} in the second quarter, {after / mib:.1f} in the last")
    print(f"open files: {samples[0][2]} first, {files} when all had left")
    for text in soak.problems:
        print("problem:", text)
    if after > before * (1 + args.growth):
        sys.exit(f"memory grew from {before / mib:.1f} to {after / mib:.1f} MiB")
    if soak.problems:
        sys.exit("answers are missing or wrong")


if __name__ == "__main__":
    main()
