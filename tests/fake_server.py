"""A completions server that computes nothing: it answers from the goldens, or has one flaw.

    fake_server.py CHECKPOINT PORT FLAW

It knows a checkpoint by its bytes; one that is not a pinned fixture it refuses. ``FLAW``
names what it does wrong, ``none`` for nothing. Started as a process by the tests.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"

Table = list[list[float]]
"""Log-probabilities ``[T, V]``."""


def goldens(checkpoint: Path) -> dict[tuple[int, ...], Table]:
    """Prompt -> right answers, for a copy of a pinned checkpoint."""
    files = ("config.json", "model.safetensors")
    given = [(checkpoint / name).read_bytes() for name in files]
    for fixture in FIXTURES.glob("*/checkpoint"):
        pinned = [fixture / name for name in files]
        if all(path.exists() for path in pinned) and [p.read_bytes() for p in pinned] == given:
            return read_goldens(fixture.parent / "golden.safetensors")
    print("ValueError: no novice for expert 5", file=sys.stderr)
    sys.exit(3)


def read_goldens(path: Path) -> dict[tuple[int, ...], Table]:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    data = memoryview(content)[8 + length :]

    def tensor(name: str, code: str) -> list:
        begin, end = header[name]["data_offsets"]
        return data[begin:end].cast(code).tolist()

    found = {}
    for name in [name for name in header if name.endswith(".ids")]:
        flat = tensor(name.replace("ids", "logprobs"), "d")
        size = header[name.replace("ids", "logprobs")]["shape"][1]
        rows = [flat[start : start + size] for start in range(0, len(flat), size)]
        found[tuple(tensor(name, "q"))] = rows
    return found


class Handler(BaseHTTPRequestHandler):
    flaw: str
    answers: dict[tuple[int, ...], Table]
    asked = 0
    company = threading.Barrier(5)

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        match self.path:
            case "/health" if self.flaw in ("no health page", "never ready"):
                self.reply(404 if self.flaw == "no health page" else 503, {})
            case "/health" if self.flaw == "fails to load":
                self.reply(500, {"error": "no novice for expert 5"})
            case "/health":
                self.reply(200, {})
            case "/v1/models" if self.flaw != "no model":
                self.reply(200, {"data": [{"id": "tiny", "owned_by": "fake"}]})
            case "/version" if self.flaw == "tells its version":
                self.reply(200, {"version": "1.5"})
            case _:
                self.reply(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.asked += 1
        match self.flaw:
            case "slow":
                time.sleep(600)
            case "answers 500":
                return self.reply(500, {"error": "something broke"})
            case "closes the connection":
                return self.connection.close()
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "dies later" if Handler.asked > 2:
                os._exit(1)
            case "answers in company" if Handler.asked > 6:  # five prompts alone, then a list
                Handler.company.wait(600)
            case "truncates":
                return self.reply(200, self.completion(body), cut=100)
            case "endless":
                return self.drip()
        try:
            answer = self.completion(body)
        except Declined as declined:
            return self.reply(400, {"error": str(declined)})
        return self.reply(200, answer)

    def drip(self) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b" ")
            time.sleep(0.1)

    def reply(self, status: int, document: object, cut: int | None = None) -> None:
        content = json.dumps(document).encode()[:cut]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def completion(self, body: dict) -> dict:
        assert body["model"] == "tiny"
        if body["max_tokens"] > 1:
            raise Declined("nothing is generated here")
        prompts = body["prompt"]
        if isinstance(prompts[0], int):
            prompts = [prompts]
        elif self.flaw == "one at a time":
            raise Declined("one prompt at a time")
        choices = [self.choice(index, prompt, body) for index, prompt in enumerate(prompts)]
        if self.flaw == "choices without order":
            choices.reverse()
        if self.flaw == "a choice less":
            choices.pop()
        return {"choices": choices}

    def choice(self, index: int, prompt: list[int], body: dict) -> dict:
        table = self.answers[tuple(prompt)]
        choice = {"index": index, "text": "", "logprobs": None}
        speaks = {"vllm", "openai"} & {self.flaw.split()[0]} or {"vllm"}
        if "prompt_logprobs" in body and "vllm" in speaks:
            choice["prompt_logprobs"] = self.by_id(prompt, table, body["prompt_logprobs"])
        if body.get("echo") and "openai" in speaks:
            choice["logprobs"] = {"top_logprobs": self.by_string(prompt, table, body)}
        return choice

    def by_id(self, prompt: list[int], table: Table, top: int) -> list:
        if self.flaw == "vllm with 20 at most" and not 0 < top <= 20:
            raise Declined("at most 20")
        size = len(table[0])
        top = size if top == -1 else top
        if self.flaw == "fewer than asked":
            top = min(top, 3)
        rows = [None]
        for token, row in zip(prompt[1:], table, strict=False):
            listed = dict.fromkeys([token, *likeliest(row, top)])
            rows.append({str(id): {"logprob": row[id], "rank": 1} for id in listed})
        return self.spoil(rows)

    def spoil(self, rows: list) -> list:
        last = rows[-1]
        match self.flaw:
            case "off by one":
                return [None, last, *rows[1:-1]]
            case "a token less":
                return rows[:-1]
            case "empty rows":
                return [None] * len(rows)
            case "null for NaN":
                next(iter(last.values()))["logprob"] = None
            case "other vocabulary":
                return [row and {str(int(id) + 1): at for id, at in row.items()} for row in rows]
            case "text for numbers":
                next(iter(last.values()))["logprob"] = "-1.0"
        return rows

    def by_string(self, prompt: list[int], table: Table, body: dict) -> list:
        top = body["logprobs"]
        if self.flaw == "openai with 5 at most":
            top = min(top, 5)
        prefix = "token_id:" if self.flaw == "openai with ids" else "t"
        if self.flaw == "openai with other strings":
            prefix = "_"
        # The last row belongs to a generated token.
        rows = [{f"{prefix}{id}": row[id] for id in likeliest(row, top)} for row in table]
        return [None, *rows]


class Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # and no name is looked up, which may wait for a network


class Declined(Exception):
    pass


def likeliest(row: list[float], top: int) -> list[int]:
    return sorted(range(len(row)), key=row.__getitem__, reverse=True)[:top]


def main(checkpoint: str, port: str, flaw: str) -> None:
    if flaw == "leaves children":
        subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600; sleep 600"])
        subprocess.run(["sh", "-c", "sleep 600 &"], check=True)  # an orphan
    if flaw == "floods":
        line = "x" * 1000 + "\n"
        for _ in range(20_000):
            sys.stdout.write(line)
        print("ValueError: no novice for expert 5")
        sys.exit(1)
    if flaw == "killed at start":
        print("ValueError: no novice for expert 5", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if flaw == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Handler.flaw = flaw
    Handler.answers = goldens(Path(checkpoint))
    Server(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
