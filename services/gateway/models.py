"""The model that is served, under the names that clients use: GET /v1/models."""

import time
from typing import Any

from aiohttp import web

from services.gateway import failures
from services.gateway.link import SchedulerLink


class ServedModels:
    """The names, and the paths that list them."""

    def __init__(self, names: tuple[str, ...], link: SchedulerLink) -> None:
        self.names = names
        self._link = link
        self._created = int(time.time())

    def add_to(self, app: web.Application) -> None:
        """Register the paths."""
        app.router.add_get("/v1/models", self.list)
        app.router.add_get("/v1/models/{model:.+}", self.one)

    def named(self, model: str | None) -> str:
        """The name to answer with. Raises: Failure 404 for a model that is not served."""
        if model is None:
            return self.names[0]
        if model not in self.names:
            raise failures.Failure(
                404,
                f"the model {model[:200]!r} does not exist here; this server has "
                f"{', '.join(self.names)}",
                "model_not_found",
                "model",
            )
        return model

    async def list(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        cards = [self._card(name) for name in self.names]
        return web.json_response({"object": "list", "data": cards})

    async def one(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        return web.json_response(self._card(self.named(request.match_info["model"])))

    def _card(self, name: str) -> dict[str, Any]:
        welcome = self._link.scheduler.welcome
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "splitflap",
            "root": self.names[0],
            "parent": None,
            "max_model_len": welcome.max_model_len if welcome else None,
        }
