"""`splitflap up`: gateway, scheduler and executor as child processes of one parent.

The children share a folder of sockets that belongs to this run alone. A child that dies is started
again, with growing pauses; one that cannot start as configured (exit status 2) ends the whole run.
Nothing outlives the parent: the kernel tells the children when it dies.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from shared.child_process import command, environment
from shared.errors import StartError
from shared.links import MAX_IPC_PATH_BYTES, RUN_FOLDER_PREFIX
from shared.logs import get_logger
from shared.model_source import find_model
from shared.settings import (
    ENV_PREFIX,
    CommonSettings,
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    UpSettings,
    flags_of,
    secrets_of,
)

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_STEADY_AFTER_S: Final = 60.0  # a child that lived this long starts with a short pause again
_POLL_S: Final = 0.1
_KILL_AFTER_S: Final = 10.0
_EXIT_CANNOT_START: Final = 2
_QUESTION: Final = "What is the capital of France? Answer in one sentence."
_LONGEST_SOCKET_NAME: Final = "/requests.ipc"

_log = get_logger("supervisor")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Child:
    """One supervised process."""

    name: str
    flags: list[str]
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    grace_s: float = _KILL_AFTER_S
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        self.process = await asyncio.create_subprocess_exec(
            *command("services.cli", self.name, *self.flags),
            stdin=asyncio.subprocess.DEVNULL,
            env=environment(_without_settings(os.environ)) | self.secrets,  # flags carry the rest
            start_new_session=True,  # Ctrl-C reaches the parent, which stops them in order
            preexec_fn=_die_with(os.getpid()),
        )
        _log.debug("child_started", child=self.name, pid=self.process.pid)
        return self.process

    async def stop(self, hurrying: asyncio.Event) -> None:
        """SIGTERM, and SIGKILL if it has not gone after its grace, or there is a hurry."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        gone = asyncio.create_task(self.process.wait())
        hurry = asyncio.create_task(hurrying.wait())
        await asyncio.wait([gone, hurry], timeout=self.grace_s, return_when="FIRST_COMPLETED")
        hurry.cancel()
        if not gone.done():
            _log.warning("child_killed", child=self.name)
            self.process.kill()
        await gone


def _without_settings(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if not name.startswith(ENV_PREFIX)}


def _die_with(parent: int) -> Callable[[], None]:
    """What a child does before it runs: have the kernel end it when `parent` dies."""

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask


async def supervise(settings: UpSettings) -> int:
    """Run everything until SIGINT or SIGTERM; returns the exit status.

    Raises: StartError if the port is busy or there is no such model.
    """
    started = time.monotonic()
    source = find_model(settings.model)
    _check_port(settings.host, settings.port)
    stopping, hurrying = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            hurrying.set()
        else:
            _log.info(
                f"stopping: open streams get {settings.shutdown_timeout:g} s to finish; "
                "Ctrl-C again ends them now"
            )
            stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    folder = _socket_folder()
    children = _children(settings, folder)
    try:
        watchers = [asyncio.create_task(_keep_alive(child, stopping)) for child in children]
        banner = asyncio.create_task(
            _announce(settings, settings.served_model_name or source.name, started)
        )
        until = asyncio.create_task(stopping.wait())
        await asyncio.wait([until, *watchers], return_when=asyncio.FIRST_COMPLETED)
        failed = [watcher.result() for watcher in watchers if watcher.done()]
        stopping.set()
        for task in (banner, until, *watchers):
            task.cancel()
        await asyncio.gather(banner, until, *watchers, return_exceptions=True)
        return failed[0] if failed else 0
    finally:
        for child in children:  # the gateway first: its streams need the other two to finish
            await child.stop(hurrying)
        shutil.rmtree(folder, ignore_errors=True)
        _log.info("stopped")


def _children(settings: UpSettings, folder: Path) -> list[_Child]:
    """In the order in which they are stopped."""
    requests = settings.request_endpoint or f"ipc://{folder}/requests.ipc"
    steps = settings.step_endpoint or f"ipc://{folder}/steps.ipc"

    def flags(
        settings_class: type[CommonSettings], metrics_port: int | None = None, **own: str
    ) -> list[str]:
        given = [
            flag
            for flag in flags_of(settings, settings_class)
            if not flag.startswith(("--request-endpoint", "--step-endpoint"))
        ]
        given += [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
        return given + ([f"--metrics-port={metrics_port}"] if metrics_port else [])

    return [
        _Child(
            "gateway",
            flags(GatewaySettings, settings.gateway_metrics_port, request_endpoint=requests),
            secrets_of(settings, GatewaySettings),
            grace_s=settings.shutdown_timeout + _KILL_AFTER_S,
        ),
        _Child(
            "scheduler",
            flags(
                SchedulerSettings,
                settings.scheduler_metrics_port,
                request_endpoint=requests,
                step_endpoint=steps,
            ),
        ),
        _Child(
            "executor",
            flags(ExecutorSettings, settings.executor_metrics_port, step_endpoint=steps),
        ),
    ]


async def _keep_alive(child: _Child, stopping: asyncio.Event) -> int:
    """Start `child` again whenever it dies; returns when it cannot start as configured."""
    pause_s = _FIRST_PAUSE_S
    while True:
        born = time.monotonic()
        status = await (await child.start()).wait()
        if stopping.is_set():
            return 0
        lived_s = time.monotonic() - born
        if status == _EXIT_CANNOT_START:
            return status  # it has said why
        if lived_s > _STEADY_AFTER_S:
            pause_s = _FIRST_PAUSE_S
        _log.error(
            "child_died", child=child.name, status=status, lived_s=round(lived_s, 1),
            restart_in_s=pause_s,
        )  # fmt: skip
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _announce(settings: UpSettings, model: str, started: float) -> None:
    """Say on stdout where to go, once the gateway is ready; until then, log each new phase.

    Where logs are for machines it is an event among them.
    """
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    phase = ""
    async with aiohttp.ClientSession() as session:
        while True:
            now, ready = await _phase(session, url)
            if ready:
                break
            if now and now != phase:
                _log.info("starting", phase=now)
                phase = now
            await asyncio.sleep(_POLL_S)
    took_s = time.monotonic() - started
    if settings.log_format == "json":
        _log.info("ready", url=url, model=model, took_s=round(took_s, 1))
        return
    needs_key = bool(settings.api_key or settings.api_key_file)
    sys.stdout.write(banner(url, model, took_s, needs_key=needs_key))
    sys.stdout.flush()


def banner(url: str, model: str, took_s: float, *, needs_key: bool) -> str:
    """Where to go, and a first question to paste; it shows no key."""
    body = json.dumps(
        {
            "model": model,
            "stream": True,
            "temperature": 0,
            "messages": [{"role": "user", "content": _QUESTION}],
        }
    )
    key = "    -H 'Authorization: Bearer YOUR_KEY' \\\n" if needs_key else ""
    return (
        f"\nSplitflap is ready after {took_s:.1f} s: {url}\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}"
        f"    -d '{body}'\n\nCtrl-C stops it.\n\n"
    )


async def _phase(session: aiohttp.ClientSession, url: str) -> tuple[str, bool]:
    """(what the stack is doing, is it ready)."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
        timeout = aiohttp.ClientTimeout(total=5)
        async with session.get(f"{url}/health/ready", timeout=timeout) as answer:
            if answer.status == 200:
                return "ready", True
            return str((await answer.json()).get("phase", "")), False
    return "", False


def _check_port(host: str, port: int) -> None:
    """Find a busy port before three processes are started for nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (socket.gaierror, UnicodeError) as error:
            raise StartError(f"--host {host}: is no address of this machine ({error})") from error
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port} ({error.strerror}); "
                "choose another --port or --host"
            ) from error


def _socket_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX))
    if len(os.fsencode(folder)) + len(_LONGEST_SOCKET_NAME) > MAX_IPC_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX, dir="/tmp"))
    return folder
