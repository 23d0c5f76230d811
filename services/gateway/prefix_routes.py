"""/v1/prefixes: prompts whose beginning stays computed, for all who begin alike.

A client that leaves before its POST is answered leaves the prefix pinned: the list has it.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from time import time as now_s
from typing import Any, Final, NamedTuple

from aiohttp import web

from services.gateway import failures
from services.gateway.body_fields import unknown
from services.gateway.call import Call
from services.gateway.conversation import chat_of
from services.gateway.encoding import Encoder
from services.gateway.keys import ALLOWANCE, KEY_HASH
from services.gateway.models import ServedModels
from services.gateway.openai import validate
from services.gateway.pins import GatewayPins
from services.gateway.prefix_models import PrefixChatBody, PrefixTextBody
from services.gateway.prompts import prompts_of
from services.gateway.request_reading import HttpLimits, body_of, expect_nothing_yet
from shared.errors import InvalidField
from shared.geometry import blocks_in
from shared.ids import RequestId
from shared.messages import Pin, Pinned, Welcome
from shared.sampling import SamplingParams

COMPUTE_S: Final = 60.0  # a prefix that takes longer is answered while it is computed
MAX_ID_CHARACTERS: Final = 256


class _Asked(NamedTuple):
    """What a client wants pinned."""

    call: Call
    name: str | None


class PrefixRoutes:
    """All paths. `welcome` gives what is known of the model, or raises Failure 503."""

    def __init__(
        self,
        encoder: Encoder,
        pins: GatewayPins,
        models: ServedModels,
        limits: HttpLimits,
        welcome: Callable[[], Welcome],
    ) -> None:
        self._encoder = encoder
        self._pins = pins
        self._models = models
        self._limits = limits
        self._welcome = welcome

    def add_to(self, app: web.Application) -> None:
        """Register them."""
        app.router.add_post("/v1/prefixes", self.pin, expect_handler=expect_nothing_yet)
        app.router.add_get("/v1/prefixes", self.list)
        app.router.add_get("/v1/prefixes/{id}", self.one)
        app.router.add_delete("/v1/prefixes/{id}", self.delete)

    async def pin(self, request: web.Request) -> web.Response:
        """POST /v1/prefixes: answered once it is computed."""
        call, name = await body_of(request, self._limits, _parse)
        self._models.named(call.model)
        welcome = self._welcome()
        _, (prompt,) = await asyncio.to_thread(self._encoder.encode, call, welcome)
        request[ALLOWANCE].admit_prompt(len(prompt.token_ids))
        welcome = self._welcome()
        context = {"name": name, "created": int(now_s())}
        pin = Pin(
            RequestId(f"prefix-{secrets.token_hex(16)}"),
            prompt.token_ids,
            call.cache_salt,
            request[KEY_HASH],
            json.dumps(context).encode(),
        )
        told = await self._pins.pin(pin, COMPUTE_S)
        if told is None:
            num_blocks = blocks_in(len(pin.token_ids), welcome.block_size)
            told = Pinned(
                pin.pin_id, len(pin.token_ids), num_blocks, is_ready=False, context=pin.context
            )
        return web.json_response(_card(told))

    async def list(self, request: web.Request) -> web.Response:
        """GET /v1/prefixes."""
        self._welcome()
        items = await self._pins.list(request[KEY_HASH])
        cards = sorted(map(_card, items), key=lambda card: card["created"])
        return web.json_response({"object": "list", "data": cards})

    async def one(self, request: web.Request) -> web.Response:
        """GET /v1/prefixes/{id}."""
        pin_id = _id_of(request)
        self._welcome()
        for item in await self._pins.list(request[KEY_HASH]):
            if item.pin_id == pin_id:
                return web.json_response(_card(item))
        raise failures.unknown_prefix(pin_id)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/prefixes/{id}: requests that began with it go on."""
        pin_id = _id_of(request)
        self._welcome()
        await self._pins.unpin(pin_id, request[KEY_HASH])
        return web.json_response({"id": pin_id, "object": "prefix", "deleted": True})


def _id_of(request: web.Request) -> RequestId:
    pin_id = RequestId(request.match_info["id"])
    if len(pin_id) > MAX_ID_CHARACTERS or not pin_id.isprintable():
        raise failures.unknown_prefix(pin_id)
    return pin_id


def _card(told: Pinned) -> dict[str, Any]:
    context = json.loads(told.context) if told.context else {}
    return {
        "id": told.pin_id,
        "object": "prefix",
        "created": context.get("created", 0),
        "name": context.get("name"),
        "num_tokens": told.num_tokens,
        "num_blocks": told.num_blocks,
        "status": "ready" if told.is_ready else "computing",
        "hits": told.num_hits,
    }


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _parse(fields: dict[str, Any]) -> _Asked:
    one_token = SamplingParams(max_tokens=1)  # whoever begins with it has that much room at least
    if fields.get("messages") is None and fields.get("prompt") is None:
        known = {**PrefixTextBody.model_fields, **PrefixChatBody.model_fields}
        for name in fields:
            if name not in known:
                raise unknown(name, known=known)
        raise InvalidField("prompt", "is required (or messages)")
    if fields.get("messages") is None:
        text = validate(PrefixTextBody, _without(fields, "messages"))
        prompts = prompts_of(text.prompt)
        if not isinstance(text.prompt, str) and type(text.prompt[0]) is not int:
            raise InvalidField("prompt", "must be one text, or one list of token ids")
        call = Call(
            "completion",
            text.model,
            one_token,
            prompts,
            add_special_tokens=text.add_special_tokens is not False,
            cache_salt=text.cache_salt or "",
        )
        return _Asked(call, text.name)
    if fields.get("prompt") is not None:
        raise InvalidField("prompt", "and messages are both given; give one")
    body = validate(PrefixChatBody, _without(fields, "prompt"))
    adds = bool(body.add_generation_prompt)
    call = Call(
        "chat",
        body.model,
        one_token,
        chat=chat_of(body.model_copy(update={"add_generation_prompt": adds})),
        add_special_tokens=bool(body.add_special_tokens),
        cache_salt=body.cache_salt or "",
    )
    return _Asked(call, body.name)
