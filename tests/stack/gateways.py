"""More gateways beside the one of a stack, each a process that may be killed."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.stack.stack import ROOT, fetch, free_port, until


@dataclass
class Gateway:
    """One more gateway of a stack; the client's helpers take it for a stack."""

    process: subprocess.Popen
    port: int
    log: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name):
        _, page = fetch(self.url + "/metrics")
        for line in page.splitlines():
            if line.startswith(f"splitflap:{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.contextmanager
def gateway(stack, *flags):
    """Another gateway of the stack, ready; killed at the end, if it still lives."""
    (endpoint,) = stack.folder.rglob("requests.ipc")
    port = free_port()
    log = stack.folder / f"gateway-{port}.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "services.cli", "gateway", "--model", "toy",
                "--port", str(port), "--request-endpoint", f"ipc://{endpoint}", *flags,
            ],
            stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ,
        )  # fmt: skip
    one = Gateway(process, port, log)
    try:
        until(lambda: fetch(one.url + "/health/ready")[0] == 200, "ready", 60)
        yield one
    finally:
        process.kill()
        process.wait(10)


@dataclass
class Reader:
    """One streamed answer, frame by frame, as far as it came; closes its connection."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse
    chunks: list = field(default_factory=list)
    last_id: str = ""
    """Of the last event that came whole."""
    next_id: str = ""
    is_done: bool = False

    def read(self, most=None):
        """So many chunks more, or all to the end of what comes."""
        count = 0
        with contextlib.suppress(OSError, http.client.HTTPException):
            while (most is None or count < most) and (line := self.answer.readline()):
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    self.next_id = value
                elif name == "data" and value == "[DONE]":
                    self.is_done = True
                elif name == "data":
                    self.chunks.append(json.loads(value))
                    self.last_id = self.next_id
                    count += 1
        if most is None:
            self.close()
        return self

    @property
    def error(self):
        """The code of the error it ended with."""
        return self.chunks[-1].get("error", {}).get("code") if self.chunks else None

    def close(self):
        self.answer.close()
        self.connection.close()


def ask(one, method, path, body=None, headers=None, *, may_be_away=False):
    """A reader of the answer to this; its status is 200, or 503 (None) if it `may_be_away`."""
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=120)
    raw = None if body is None else json.dumps(body)
    kind = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, path, raw, {**kind, **(headers or {})})
    answer = connection.getresponse()
    if answer.status != 200:
        told = answer.read().decode()
        connection.close()
        if may_be_away and answer.status == 503:
            return None
        raise AssertionError(f"{answer.status}: {told}")
    return Reader(connection, answer)


def go_on(one, reader, method="GET", path=None, **headers):
    """The rest of a stream that was cut off, at another gateway."""
    path = path or f"/v1/streams/{reader.last_id.partition(':')[0]}"
    return ask(one, method, path, headers={"Last-Event-ID": reader.last_id, **headers})


def joined(*readers):
    """What a client makes of all these: per choice (text, token ids, logprobs, ends)."""
    told = {}
    for reader in readers:
        for chunk in reader.chunks:
            for choice in chunk.get("choices", ()):
                text, ids, logprobs, ends = told.setdefault(choice["index"], ([], [], [], []))
                delta = choice.get("delta", {})
                text.append(choice.get("text", delta.get("content", "")) or "")
                ids += choice.get("token_ids") or []
                inner = choice.get("logprobs") or {}
                logprobs += inner.get("token_logprobs") or inner.get("content") or []
                if choice["finish_reason"] is not None:
                    ends.append((choice["finish_reason"], choice.get("stop_reason")))
    return {
        index: ("".join(text), ids, logprobs, ends)
        for index, (text, ids, logprobs, ends) in sorted(told.items())
    }
