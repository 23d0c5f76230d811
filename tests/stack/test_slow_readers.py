"""Many streams at one gateway, some of which nobody reads: these cost the others nothing."""

import http.client
import json
import re
import socket
import subprocess
import sys

import psutil
import pytest

from tests.stack.client import complete
from tests.stack.gateways import Reader, gateway, go_on, joined
from tests.stack.stack import ROOT, start, until

pytestmark = pytest.mark.stack

NUM_READ, TOKENS_READ = 250, 30
NUM_UNREAD = 4
LONG = {
    "max_tokens": 220,
    "n": 64,
    "ignore_eos": True,
    "seed": 5,
}  # 3 MB of events, and as much of ids
CUT_OFF = 'streams_detached_total{reason="slow_reader"}'
MOST_UNSENT_BYTES = 2**18  # what asyncio and aiohttp hold back for a connection, and one piece


@pytest.fixture
def stack(tmp_path):
    stack = start(
        tmp_path, "--model", "toy", "--num-gpu-blocks-override", "8000", "--max-model-len", "512",
        "--max-num-seqs", "600", "--max-num-batched-tokens", "2048",
    )  # fmt: skip
    yield stack
    stack.stop()


def barely_read(one, prompt):
    """A stream of which nothing is taken but its first events, through a narrow socket."""
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=120)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.connect(("127.0.0.1", one.port))
    body = json.dumps({**LONG, "prompt": prompt, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return Reader(connection, connection.getresponse()).read(10)


def many_are_read(one):
    """NUM_READ streams at once, to their ends, by a process of their own."""
    command = [
        sys.executable,
        "-m",
        "ops.bench.gateway_load.readers",
        str(NUM_READ),
        str(TOKENS_READ),
    ]
    with subprocess.Popen(
        [*command, str(one.port)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip

        def ask(question):
            process.stdin.write(question + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        assert ask("open") == {"open": NUM_READ}
        until(lambda: ask("look")["tokens"] == NUM_READ * TOKENS_READ, "they end", 60)
        process.stdin.close()


def test_streams_that_nobody_reads_are_cut_off_at_a_bound_and_lose_nothing(stack):
    prompts = [f"story {number}" for number in range(NUM_UNREAD)]
    with gateway(stack, "--slow-reader-timeout-s", "3") as first, gateway(stack) as second:
        memory = psutil.Process(first.process.pid).memory_info
        many_are_read(first)  # what is not given back is there from now on
        before = memory().rss
        unread = [barely_read(first, prompt) for prompt in prompts]
        many_are_read(first)
        until(lambda: first.metric(CUT_OFF) == NUM_UNREAD, "they are cut off", 60)
        grown = memory().rss - before
        unsent = re.findall(r"client_stalled.*unsent_bytes\D+(\d+)", first.log.read_text())
        rests = [go_on(second, reader.read()).read() for reader in unread]
        assert second.metric("streams_attached_total") == NUM_UNREAD
    assert len(unsent) == NUM_UNREAD
    assert max(map(int, unsent)) <= MOST_UNSENT_BYTES
    (least,) = {len(json.dumps(reader.chunks[0])) for reader in unread}
    unread_bytes = NUM_UNREAD * LONG["n"] * LONG["max_tokens"] * least
    assert grown < unread_bytes / 2
    for prompt, reader, rest in zip(prompts, unread, rests, strict=True):
        assert rest.is_done
        told = joined(reader, rest)
        whole = complete(stack, **LONG, prompt=prompt)["choices"]
        assert {index: text for index, (text, *_) in told.items()} == {
            choice["index"]: choice["text"] for choice in whole
        }
        assert {tuple(ends) for *_, ends in told.values()} == {(("length", None),)}
