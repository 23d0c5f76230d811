"""CURVE keys of the links between processes: their files, and who is let in with them.

A scheduler that has keys talks to nobody who does not prove to have one that it knows, and nobody
talks to a scheduler that does not prove to be the one whose key they were given; what is said is
encrypted. Gateways and executors have keys of different kinds: neither opens the other's link.
`splitflap keys curve` makes the files; each machine needs only its own:

    scheduler   scheduler.secret; of those it lets in gateway*.public and executor*.public
    gateway     gateway.secret, scheduler.public
    executor    executor.secret, scheduler.public

Source: https://rfc.zeromq.org/spec/26/ (CurveZMQ), https://rfc.zeromq.org/spec/27/ (ZAP).
"""

import os
import stat
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from shared.errors import StartError
from shared.logs import get_logger
from shared.metrics import PEERS_REFUSED

Peer = Literal["gateway", "executor"]

KEY_DIR_FLAG: Final = "--curve-key-dir"
ROLES: Final = ("scheduler", "gateway", "executor")
KEY_BYTES: Final = 32

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_MONITOR_ENDPOINT: Final = "inproc://handshakes"
_ZAP_DOMAIN: Final = b"splitflap"
_ZAP_FRAMES: Final = 7  # version, request id, domain, address, identity, mechanism, key
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
HANDSHAKE_MS: Final = 5000  # how long one may take; so often who is refused tries again
_SAY_AGAIN_AFTER_S: Final = 10.0  # one that is hung up on tries again ten times a second

_log = get_logger("links")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The listening end's: its own secret key, and the public keys of those it lets in."""

    secret: bytes = field(repr=False)
    admitted: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The connecting end's: its own secret key, and whom it expects to meet."""

    secret: bytes = field(repr=False)
    server: bytes


# ------------------------------------------------------------------ files


def make_keys(folder: Path) -> list[Path]:
    """Write a pair of keys for each role; returns the files.

    Secret ones are readable by this user alone. Raises: StartError if a file is there already or
    the folder cannot be written.
    """
    names = [f"{role}.{kind}" for role in ROLES for kind in ("secret", "public")]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            if (folder / name).exists():
                raise StartError(
                    f"{folder / name} is there already, and its peers know it: keys are made in "
                    "an empty folder"
                )
        for role in ROLES:
            public, secret = map(zmq.utils.z85.decode, zmq.curve_keypair())
            _write(folder / f"{role}.secret", role, secret, 0o600)
            _write(folder / f"{role}.public", role, public, 0o644)
    except OSError as error:
        raise StartError(f"{error.filename}: cannot be written ({error.strerror})") from error
    return [folder / name for name in names]


def _write(path: Path, role: str, key: bytes, mode: int) -> None:
    kind = path.suffix[1:]
    whom = f"for the {role} alone" if kind == "secret" else "for its peers"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(f"# Splitflap: the {kind} CURVE key of the {role}, {whom}\n{key.hex()}\n")


def server_keys(folder: Path | None, peers: Peer) -> ServerKeys | None:
    """The scheduler's keys for the link with `peers`; None without a folder.

    Raises: StartError naming the file that is missing, open to others, or no key.
    """
    if folder is None:
        return None
    secret = _read(folder / "scheduler.secret")
    files = sorted(folder.glob(f"{peers}*.public"))
    if not files:
        raise StartError(
            f"{KEY_DIR_FLAG} {folder}: has no {peers}*.public, so no {peers} could come in; copy "
            "theirs here"
        )
    return ServerKeys(secret, frozenset(map(_read, files)))


def client_keys(folder: Path | None, role: Peer) -> ClientKeys | None:
    """A gateway's or an executor's keys; None without a folder.

    Raises: StartError naming the file that is missing, open to others, or no key.
    """
    if folder is None:
        return None
    return ClientKeys(_read(folder / f"{role}.secret"), _read(folder / "scheduler.public"))


def _read(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise StartError(
            f"{KEY_DIR_FLAG}: {path} cannot be read ({error.strerror}); "
            "`splitflap keys curve --out DIR` makes the files"
        ) from error
    except UnicodeDecodeError:
        lines = []
    if path.suffix == ".secret" and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise StartError(
            f"{KEY_DIR_FLAG}: {path} is open to others (mode {stat.S_IMODE(mode):o}); "
            "chmod 600 it, and make new keys if others may have read it"
        )
    given = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    try:
        (key,) = map(bytes.fromhex, given)
        if len(key) == KEY_BYTES:
            return key
    except ValueError:
        pass
    raise StartError(f"{KEY_DIR_FLAG}: {path} is no key: one line of {2 * KEY_BYTES} hex digits")


# ------------------------------------------------------------------ sockets


def arm(
    link: str, context: Any, socket: Any, keys: ServerKeys | ClientKeys | None
) -> "HandshakeWatch":
    """Give `socket` its keys, before it binds or connects, and watch who is refused.

    The watch is a thread that ends with `context`.
    """
    if keys is not None:
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if isinstance(keys, ServerKeys):
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    elif isinstance(keys, ClientKeys):
        public = zmq.curve_public(zmq.utils.z85.encode(keys.secret))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.utils.z85.decode(public))
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.monitor(_MONITOR_ENDPOINT, _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    admitted = keys.admitted if isinstance(keys, ServerKeys) else None
    watch = HandshakeWatch(link, zmq.Context.shadow(context), admitted)
    threading.Thread(target=watch.run, name=f"{link}-handshakes", daemon=True).start()
    return watch


class HandshakeWatch:
    """Answers libzmq's question who may come in (ZAP), and counts whom the handshake refused.

    `has_failed` is for the connecting end: libzmq may have given up for good, although the other
    end may be another one soon. Whoever connects again clears it.
    """

    def __init__(self, link: str, context: Any, admitted: frozenset[bytes] | None) -> None:
        self.has_failed = False
        self._link = link
        self._admitted = admitted
        self._events = context.socket(zmq.PAIR)
        self._events.connect(_MONITOR_ENDPOINT)
        self._questions: Any = None
        if admitted is not None:
            self._questions = context.socket(zmq.REP)
            self._questions.bind(_ZAP_ENDPOINT)  # before the first peer can come
        self._said_at: dict[str, float] = {}

    def run(self) -> None:
        """Until the context ends."""
        try:
            poller = zmq.Poller()
            poller.register(self._events, zmq.POLLIN)
            if self._questions is not None:
                poller.register(self._questions, zmq.POLLIN)
            while True:
                for socket, _ in poller.poll():
                    if socket is self._questions:
                        socket.send_multipart(self._answer(socket.recv_multipart()))
                    else:
                        self._happened(zmq.utils.monitor.recv_monitor_message(socket)["event"])
        except zmq.ContextTerminated:
            pass
        finally:
            self._events.close(0)
            if self._questions is not None:
                self._questions.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """The reply to one ZAP request."""
        is_curve = len(frames) == _ZAP_FRAMES and frames[5] == b"CURVE"
        if is_curve and self._admitted is not None and frames[6] in self._admitted:
            return [*frames[:2], b"200", b"OK", b"", b""]
        address = frames[3].decode(errors="replace") if is_curve else None
        self._refused("unknown_key", address)
        # 300: not a word, so it tries again after HANDSHAKE_MS; after a 400 libzmq never would,
        # even if its key has become known.
        return [*frames[:2], b"300", b"unknown key", b"", b""]

    def _happened(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.has_failed = False
        elif self._admitted is None:
            self.has_failed = True
            self._refused("by_scheduler", None)
        elif event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # that one was answered above
            self._refused("no_key", None)

    def _refused(self, reason: str, address: str | None) -> None:
        PEERS_REFUSED.labels(link=self._link, reason=reason).inc()
        now = time.monotonic()
        if now - self._said_at.get(reason, -_SAY_AGAIN_AFTER_S) >= _SAY_AGAIN_AFTER_S:
            self._said_at[reason] = now
            _log.warning("peer_refused", link=self._link, why=_WHY[reason], address=address)


_WHY: Final = {
    "unknown_key": "its CURVE key is none of those in --curve-key-dir",
    "no_key": "it has no CURVE key, or takes this scheduler's for another one",
    "by_scheduler": "the scheduler's CURVE keys and this process's, if any, do not belong together",
}
