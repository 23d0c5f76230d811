"""Sockets between processes: typed messages in, typed messages out. The only place that knows zmq.

A `Router` listens (the scheduler, on both links); a `Dealer` connects (gateways and the executor)
and reconnects by itself. Sends never block: `send` says whether the message was taken. What is no
message of the link is dropped, counted and logged, and disturbs nothing.
"""

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Generic, Self, TypeVar
from urllib.parse import urlsplit

import zmq

from shared.codec import MAX_MESSAGE_BYTES, decode, encode
from shared.curve import KEY_DIR_FLAG, ClientKeys, ServerKeys, arm
from shared.errors import StartError, WireError
from shared.logs import get_logger
from shared.metrics import MESSAGES_UNSENT, count_dropped

MAX_IPC_PATH_BYTES: Final = 107  # sun_path of a Unix socket, its closing zero apart
HIGH_WATER_MARK: Final = 4096  # messages queued for one peer
LONG_MESSAGE_BYTES: Final = 2**17  # some milliseconds of decoding
LINGER_MS: Final = 500  # how long a closing socket tries to get its last messages out
RECONNECT_MS: Final = 100
CONNECT_AGAIN_S: Final = 1.0  # after a handshake that failed
RUN_FOLDER_PREFIX: Final = "splitflap-run-"  # folders of one `splitflap up`

_log = get_logger("links")
_In = TypeVar("_In")


def check_endpoint(endpoint: str, flag: str, *, has_keys: bool = False) -> None:
    """Refuse an endpoint that cannot work or would be open to the network.

    Raises: StartError naming `flag`.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        size = len(rest.encode())
        if not rest.startswith("/") or size > MAX_IPC_PATH_BYTES:
            raise StartError(
                f"{flag} {endpoint}: an ipc path must be absolute and at most "
                f"{MAX_IPC_PATH_BYTES} bytes (this one has {size}); choose a shorter one"
            )
    elif scheme == "tcp":
        _check_tcp(endpoint, flag, has_keys)
    else:
        raise StartError(f"{flag} {endpoint}: use ipc:///absolute/path or tcp://127.0.0.1:port")


def _check_tcp(endpoint: str, flag: str, has_keys: bool) -> None:
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or endpoint.rpartition(":")[2] != str(port):
        raise StartError(
            f"{flag} {endpoint}: a tcp endpoint is tcp://address:port, the port 1 to 65535"
        )
    if not has_keys and not _is_loopback(host):
        raise StartError(
            f"{flag} {endpoint}: {host} is beyond loopback, where anybody could read prompts and "
            f"send plans: make keys with `splitflap keys curve --out DIR` and give {KEY_DIR_FLAG} "
            f"to scheduler, executor and gateways; or use tcp://127.0.0.1:{port} or ipc://"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may be anybody's
        return False


class _Link(Generic[_In]):
    """What both ends share: one context, one socket, one set of accepted messages.

    zmq signals by a file descriptor that something has changed, once; what it was must be asked,
    and every send asks too. So whoever waits for a message is told by `_look`, which runs after
    either. (zmq.asyncio does the same with a future and a queue for each message and direction;
    sends that never wait need neither.)
    """

    def __init__(self, name: str, kind: int, accepted: Sequence[type[_In]], endpoint: str) -> None:
        self.name = name
        self._accepted = accepted
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        # Twice our own limit: what lies between is dropped and counted; beyond, zmq hangs up.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        self._watching: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Send what is queued (for LINGER_MS at most) and give the socket back."""
        if self._watching is not None and not self._watching.is_closed():
            self._watching.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _try_send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError:  # full, not connected, or gone
            MESSAGES_UNSENT.labels(link=self.name).inc()
            return False
        finally:
            if self._news is not None:
                self._look()
        return True

    async def _frames(self) -> list[bytes]:
        """The next message as it came; for one task at a time."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self._socket.fileno(), self._look)
        while True:
            with contextlib.suppress(zmq.Again):
                return self._socket.recv_multipart(zmq.DONTWAIT)
            self._news = self._watching.create_future()
            try:
                await self._news
            finally:
                self._news = None

    def _look(self) -> None:
        """Wake whoever waits, if there is a message."""
        has_message = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        if has_message and self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _decode(self, frames: list[bytes]) -> _In | None:
        try:
            if len(frames) != 1:
                raise WireError("malformed", f"{len(frames)} frames instead of one")
            return decode(frames[0], self._accepted)
        except WireError as error:
            count_dropped(self.name, error)
            _log.warning(
                "message_dropped", link=self.name, reason=error.reason, detail=str(error)[:200]
            )
            return None


class Dealer(_Link[_In]):
    """The connecting end. `identity` keeps its address over reconnects.

    Raises: StartError naming `flag` if the endpoint cannot work or would be open to the network.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        accepted: Sequence[type[_In]],
        identity: bytes,
        flag: str = "endpoint",
        keys: ClientKeys | None = None,
    ) -> None:
        check_endpoint(endpoint, flag, has_keys=keys is not None)
        if endpoint.startswith("tcp://*:"):
            raise StartError(f"{flag} {endpoint}: say where the scheduler is, not where it listens")
        super().__init__(name, zmq.DEALER, accepted, endpoint)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a peer that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._endpoint = endpoint
        self._handshakes = arm(name, self._context, self._socket, keys)
        self._connected_at = time.monotonic()
        # Not the loop's own threads: there a long message would wait for all that others do.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"{name} reader")
        self._socket.connect(endpoint)

    def close(self) -> None:
        """As every link, and let the reading thread go."""
        super().close()
        self._reader.shutdown(wait=False)

    def send(self, message: object) -> bool:
        """Hand over one message without waiting; False if it was not taken (full, no peer).

        Raises: WireError if the message has no wire form.
        """
        if self._handshakes.has_failed:
            self._connect_again()
        return self._try_send([encode(message)])

    def _connect_again(self) -> None:
        """After a handshake that failed libzmq may never try again by itself."""
        now = time.monotonic()
        if now - self._connected_at >= CONNECT_AGAIN_S:
            self._connected_at = now
            self._handshakes.has_failed = False
            with contextlib.suppress(zmq.ZMQError):  # given up already
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    async def receive(self) -> _In:
        """The next valid message. One that takes long to read is read in a thread of the link's."""
        while True:
            frames = await self._frames()
            if sum(map(len, frames)) > LONG_MESSAGE_BYTES:
                loop = asyncio.get_running_loop()
                message = await loop.run_in_executor(self._reader, self._decode, frames)
            else:
                message = self._decode(frames)
            if message is not None:
                return message


class Router(_Link[_In]):
    """The listening end; peers are told apart by their address.

    Raises: StartError if the endpoint is in use or cannot be made.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        accepted: Sequence[type[_In]],
        flag: str = "endpoint",
        keys: ServerKeys | None = None,
    ) -> None:
        check_endpoint(endpoint, flag, has_keys=keys is not None)
        self._path = _claim(endpoint, flag)
        super().__init__(name, zmq.ROUTER, accepted, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            arm(name, self._context, self._socket, keys)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartError(
                f"{flag} {endpoint}: cannot listen there ({error.strerror}); choose another"
            ) from error

    def send(self, peer: bytes, message: object) -> bool:
        """Hand one message to `peer` without waiting; False if it was not taken (full, gone).

        Raises: WireError if the message has no wire form.
        """
        return self._try_send([peer, encode(message)])

    async def receive(self) -> tuple[bytes, _In]:
        """The next valid message and the address of its sender."""
        while True:
            peer, *frames = await self._frames()
            message = self._decode(frames)
            if message is not None:
                return peer, message

    def close(self) -> None:
        """Give back the socket, its file and its lock."""
        super().close()
        if self._path is not None:
            self._path.release()


class _IpcPath:
    """An ipc path that this process alone may listen on, by a lock that dies with the process."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self._path = path
        self._lock = lock

    def release(self) -> None:
        """Leave nothing behind, not even the folder of a run whose parent was killed."""
        self._path.unlink(missing_ok=True)
        self.unlock()
        if self._path.parent.name.startswith(RUN_FOLDER_PREFIX):
            with contextlib.suppress(OSError):  # the other socket is still in it
                self._path.parent.rmdir()

    def unlock(self) -> None:
        """Leave only what was there before."""
        Path(self._lock.name).unlink(missing_ok=True)
        self._lock.close()


def _claim(endpoint: str, flag: str) -> _IpcPath | None:
    """Take the path of an ipc endpoint: zmq itself would silently steal it from a live owner."""
    if not endpoint.startswith("ipc://"):
        return None
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path.parent, endpoint, flag)
        lock = _lock(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise StartError(f"{flag} {endpoint}: {error.strerror}; choose another folder") from error
    if lock is None:
        raise StartError(
            f"{flag} {endpoint}: another process listens there; stop it or choose another path"
        )
    claimed = _IpcPath(path, lock)
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            claimed.unlock()
            raise StartError(f"{flag} {endpoint}: the path exists and is no socket; choose another")
        path.unlink()
        _log.warning("stale_socket_removed", path=str(path), why="its owner died without closing")
    return claimed


def _lock(path: Path) -> IO[str] | None:
    """The lock file at `path`, locked; None if a living process has it.

    Its last owner may remove it between our opening and locking it: then the file that we hold is
    no longer the one at `path`, and the next process would not see our lock.
    """
    while True:
        lock = path.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
        except BlockingIOError:
            lock.close()
            return None
        except FileNotFoundError:
            pass
        lock.close()


def _check_private(folder: Path, endpoint: str, flag: str) -> None:
    """Whoever may replace our sockets reads the prompts and sends the plans."""
    status = folder.stat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid not in (os.geteuid(), 0) or (
        others_write and not status.st_mode & stat.S_ISVTX
    ):
        raise StartError(
            f"{flag} {endpoint}: others may write to {folder}, and so replace the socket; use a "
            "folder of your own (chmod 700)"
        )
