"""Does `make serve` do what the README says? `python ops/serve_check.py FOLDER_OF_A_CLONE`.

Starts it on a free port, waits for the banner, runs the very `curl` line that it prints, and looks
for Paris in the streamed answer; then Ctrl-C must leave no process and no socket, and a second
`make serve` must find everything installed.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

READY_WITHIN_S = 900  # the installation included
STOPPED_WITHIN_S = 60


def main(clone: Path) -> None:
    """Exits with status 1 and a reason where the README is wrong."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        server = subprocess.Popen(
            ["make", "serve", f"ARGS=--port {port}"],
            cwd=clone,
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        impatience = threading.Timer(READY_WITHIN_S, os.killpg, (server.pid, signal.SIGKILL))
        impatience.start()
        try:
            banner = read_banner(server)
            answer = run_curl(banner)
        finally:
            impatience.cancel()
            os.killpg(server.pid, signal.SIGINT)
            server.wait(STOPPED_WITHIN_S)
        check("Paris" in answer, f"no Paris in the streamed answer: {answer!r}")
        left = [str(path) for path in Path(folder).rglob("*") if path.is_socket()]
        check(not left, f"sockets left behind: {left}")
    with socket.socket() as probe:
        check(probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} still answers")
    alive = processes_of(clone)
    check(not alive, f"processes left behind: {alive}")
    to_do = subprocess.run(["make", "--question", "install"], cwd=clone, check=False)
    check(to_do.returncode == 0, "a second `make serve` would install again")
    print(f"make serve: {answer!r}, then stopped and left nothing")


def read_banner(server: subprocess.Popen[str]) -> str:
    """All that the server prints up to the hint how to stop it."""
    printed = ""
    assert server.stdout is not None
    while "Ctrl-C" not in printed:
        line = server.stdout.readline()
        check(line != "", f"make serve ended with status {server.poll()}: {printed}")
        print(line, end="", flush=True)
        printed += line
    return printed


def processes_of(clone: Path) -> list[str]:
    """Command lines of processes that run this clone's Python."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if command.startswith(str(clone / ".venv")):
                found.append(command)
    return found


def run_curl(banner: str) -> str:
    """Run the printed curl line; returns the joined text of its events."""
    command = re.search(r"curl .*?\}'", banner, re.DOTALL)
    check(command is not None, f"no curl line in the banner: {banner}")
    assert command is not None
    out = subprocess.run(
        command[0], shell=True, check=True, capture_output=True, text=True, timeout=120
    )
    events = [line.removeprefix("data: ") for line in out.stdout.split("\n") if "data: " in line]
    check(events[-1] == "[DONE]", f"the stream did not end in [DONE]: {events[-1:]}")
    check(len(events) > 4, f"the answer came in {len(events)} events: is it streamed?")
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


def check(holds: bool, complaint: str) -> None:
    """End with `complaint` unless it holds."""
    if not holds:
        sys.exit(f"serve_check: {complaint}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
