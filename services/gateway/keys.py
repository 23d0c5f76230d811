"""API keys: who may ask, how much, and the hash that ties a stream to whoever asked for it."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import web

from services.gateway import failures
from services.gateway.allowance import Allowance
from services.gateway.key_file import Limits, digest_of, read_keys
from shared.errors import StartError
from shared.logs import get_logger

OPEN_TO_ALL: Final = frozenset(("/health", "/health/ready", "/health/live"))
"""Paths for machines that watch, and have no key."""

KEY_HASH: Final = web.RequestKey("key_hash", bytes)
"""The first bytes of the SHA-256 of the client's key; none where no keys are set."""

KEY_NAME: Final = web.RequestKey("key_name", str)
"""What the key is called in the file of keys; absent for others."""

ALLOWANCE: Final = web.RequestKey("allowance", Allowance)
"""What the client may still ask: whoever counts tokens tells it."""

_HASH_BYTES: Final = 16
_SCHEME: Final = "bearer "
_UNLIMITED: Final = Limits()

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = get_logger("keys")


class Holder(NamedTuple):
    """Whom a key belongs to: by name, if the key is from the file."""

    name: str | None
    digest: bytes
    allowance: Allowance

    @property
    def key_hash(self) -> bytes:
        """What tells this client from others, to a scheduler."""
        return self.digest[:_HASH_BYTES]


class ApiKeys:
    """The keys that are good, as hashes: comparing takes the same time whatever was sent.

    Args:
        keys: given by the flag or the environment; they have no limits.
        file: of `services.gateway.key_file`, if there is one; then a key is needed even while it
            holds none.

    Raises: StartError if the file cannot be read.
    """

    def __init__(self, keys: Sequence[str], file: Path | None = None) -> None:
        self._file = file
        self._given = tuple([Holder(None, digest_of(key), Allowance(_UNLIMITED)) for key in keys])
        self._anybody = Allowance(_UNLIMITED)
        self._holders = self._given
        if file is not None:
            self._read(file)

    @property
    def are_set(self) -> bool:
        """Whether a key is needed at all."""
        return self._file is not None or bool(self._given)

    def reload(self) -> None:
        """Read the file again; where that fails, everything stays as it is and the log says so."""
        if self._file is None:
            return
        try:
            self._read(self._file)
        except StartError as error:
            _log.error("api_keys_not_reloaded", why=str(error))

    def _read(self, file: Path) -> None:
        known = {holder.digest: holder.allowance for holder in self._holders}
        holders = []
        for key in read_keys(file):
            allowance = known.get(key.digest)
            if allowance is None:
                allowance = Allowance(key.limits)
            else:
                allowance.change(key.limits)
            holders.append(Holder(key.name, key.digest, allowance))
        self._holders = (*holders, *self._given)
        _log.info("api_keys_read", keys=len(holders), path=str(file))

    def holder_of(self, authorization: Sequence[str]) -> Holder | None:
        """Whose key is in a request's one Authorization header; None if it is not good."""
        if len(authorization) != 1 or not authorization[0].lower().startswith(_SCHEME):
            return None
        digest = digest_of(authorization[0][len(_SCHEME) :].strip())
        matches = [each for each in self._holders if hmac.compare_digest(digest, each.digest)]
        return matches[0] if matches else None

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Let no one without a key further than the health of this process.

        Raises: Failure 401, or 429 if the key's limits are reached.
        """
        request[KEY_HASH], request[ALLOWANCE] = b"", self._anybody
        if not self.are_set or _is_open(request):
            return await handler(request)
        holder = self._checked(request.headers.getall("Authorization", ()))
        request[KEY_HASH], request[ALLOWANCE] = holder.key_hash, holder.allowance
        if holder.name is not None:
            request[KEY_NAME] = holder.name
        if not _is_work(request):
            return await handler(request)
        with holder.allowance.one_request(is_new=request.method == "POST"):
            return await handler(request)

    def _checked(self, authorization: Sequence[str]) -> Holder:
        holder = self.holder_of(authorization)
        if holder is not None:
            return holder
        if any(each.lower().startswith(_SCHEME) for each in authorization):
            raise failures.wrong_key()
        raise failures.no_key()


def _is_open(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical in OPEN_TO_ALL


def _is_work(request: web.Request) -> bool:
    """Whether limits count it: what asks for tokens, not what looks or deletes."""
    return request.method == "POST" or request.path.startswith("/v1/streams/")
