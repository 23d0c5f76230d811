"""`splitflap bench` as a process: what it prints, keeps and ends with."""

import asyncio
import json
import os
import pty
import select
import signal
import sys
from pathlib import Path

from tests.bench.fake_server import serving, whole
from tests.bench.stamped import said

ROOT = Path(__file__).parents[2]


async def start(*flags, **environment):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "bench", *flags,
        cwd=ROOT, env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def command(*flags, **environment):
    """(exit status, stdout, stderr)."""
    process = await start(*flags, **environment)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def against(server, *flags):
    return (
        "--base-url",
        server.url + "/v1",
        "--tokenizer",
        "toy",
        "--random-input-len",
        "8",
        *flags,
    )


async def test_it_prints_a_table_and_keeps_the_result(tmp_path):
    async with serving() as server:
        status, out, err = await command(
            *against(server, "--num-prompts", "3", "--random-output-len", "3"),
            "--save-detailed", "--result-dir", str(tmp_path / "results"), "--label", "mine",
            "--metadata", "note=a, b", "--goodput", "ttft:60000", "e2el:60000",
            "--api-key", "secret-key",
            SPLITFLAP_MODEL="nobody", SPLITFLAP_NUM_PROMPTS="9", SPLITFLAP_CONFIG="/nowhere",
        )  # fmt: skip
    assert status == 0, err
    assert "Successful requests:                     3" in out
    (file,) = (tmp_path / "results").iterdir()
    assert file.name.startswith("mine-infqps-fake-")
    assert str(file) in err
    text = file.read_text()
    result = json.loads(text)
    assert (result["completed"], result["total_output_tokens"]) == (3, 9)
    assert result["model_id"] == "fake"
    assert result["metadata"] == {"note": "a, b"}
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert [request["texts"] for request in result["requests"]] == [["xxx"]] * 3
    assert "secret-key" not in text + out + err


async def test_it_ends_with_1_if_nothing_succeeded():
    async with serving(lambda _: (500, "broken")) as server:
        status, out, _ = await command(*against(server, "--num-prompts", "2"))
    assert status == 1
    assert "Errors: 2 x HTTP 500. The first: HTTP 500: broken" in out


async def test_an_interrupt_prints_what_there_is():
    never = asyncio.Event()
    scripts = iter([whole(), [said("a"), never]])
    async with serving(lambda _: next(scripts)) as server:
        process = await start(*against(server, "--num-prompts", "4", "--max-concurrency", "1"))
        await server.held.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        never.set()
    assert process.returncode == 130, err
    assert " Interrupted " in out.decode()
    assert "Successful requests:                     1" in out.decode()
    assert "Unfinished requests:                     3" in out.decode()


async def test_what_is_wrong_is_said_before_anything_is_sent():
    async with serving() as server:
        for flags, complaint in (
            (["--num-promts", "3"], "--num-promts"),
            (["--dataset-name", "sharegpt"], "needs --dataset-path"),
            (["--tokenizer", "nowhere"], "nowhere: no such file"),
        ):
            status, out, err = await command("--base-url", server.url, *flags)
            assert (status, out) == (2, "")
            assert complaint in err
            assert "Traceback" not in err
    assert server.asked == []


async def test_progress_is_shown_where_somebody_looks():
    async with serving() as server:
        shown = {}
        for flags in ((), ("--disable-tqdm",)):
            ours, theirs = pty.openpty()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.cli", "bench",
                *against(server, "--num-prompts", "2"), *flags,
                cwd=ROOT, env=os.environ | {"TERM": "xterm"},
                stdout=asyncio.subprocess.DEVNULL, stderr=theirs,
            )  # fmt: skip
            assert await process.wait() == 0
            shown[flags] = os.read(ours, 65536) if select.select([ours], [], [], 0)[0] else b""
            os.close(theirs)
            os.close(ours)
    assert b"2/2" in shown[()]
    assert b"2/2" not in shown["--disable-tqdm",]
