"""API keys: who may ask, and the hash that ties a stream to whoever asked for it."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from services.gateway import failures

OPEN_TO_ALL: Final = frozenset(("/health", "/health/ready", "/health/live"))
"""Paths for machines that watch, and have no key."""

KEY_HASH: Final = web.RequestKey("key_hash", bytes)
"""The first bytes of the SHA-256 of the client's key; none where no keys are set."""

_HASH_BYTES: Final = 16
_SCHEME: Final = "bearer "

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiKeys:
    """The keys that are good, as hashes: comparing takes the same time whatever was sent."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple([_digest(key) for key in keys])

    @property
    def are_set(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._digests)

    def hash_of(self, authorization: Sequence[str]) -> bytes | None:
        """The hash of the key in a request's one Authorization header; None if it is not good."""
        if len(authorization) != 1 or not authorization[0].lower().startswith(_SCHEME):
            return None
        digest = _digest(authorization[0][len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest[:_HASH_BYTES] if any(matches) else None

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Let no one without a key further than the health of this process.

        Raises: Failure 401.
        """
        key_hash: bytes | None = b""
        if self.are_set and not _is_open(request):
            key_hash = self.hash_of(request.headers.getall("Authorization", ()))
        if key_hash is None:
            raise failures.unauthorized()
        request[KEY_HASH] = key_hash
        return await handler(request)


def _is_open(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical in OPEN_TO_ALL


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
