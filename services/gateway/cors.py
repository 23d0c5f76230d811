"""CORS: pages of which origins may read what this server answers (WHATWG Fetch, section 3.2).

A browser asks first (a preflight, which carries no key); the request itself needs one as any other.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

_METHODS: Final = "GET, POST, OPTIONS"
_READABLE: Final = "X-Request-Id, Retry-After"
_REMEMBER_S: Final = 600
_ASKS_FOR_METHOD: Final = "Access-Control-Request-Method"
_ASKS_FOR_HEADERS: Final = "Access-Control-Request-Headers"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AllowedOrigins:
    """The origins (`https://example.org`), or `*` for all; none: no page may read anything."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def add_to(self, app: web.Application) -> None:
        """Have every answer say who may read it, streams and errors too."""
        if self._origins:
            app.on_response_prepare.append(self._tell)

    @web.middleware
    async def preflight(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer a browser that asks before it sends."""
        if request.method != "OPTIONS" or _ASKS_FOR_METHOD not in request.headers:
            return await handler(request)
        if not self._allowed(request):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Max-Age": str(_REMEMBER_S),
        }
        if wanted := request.headers.get(_ASKS_FOR_HEADERS):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    async def _tell(self, request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in self._origins:
            response.headers["Vary"] = "Origin"
        if allowed := self._allowed(request):
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = _READABLE

    def _allowed(self, request: web.Request) -> str:
        """What to say of the origin of a request; empty if it has none that is allowed."""
        origin = request.headers.get("Origin", "")
        if "*" in self._origins:
            return "*" if origin else ""
        return origin if origin in self._origins else ""
