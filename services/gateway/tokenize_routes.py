"""POST /tokenize and /detokenize: the model's tokens of a text or a chat, and back.

They need no scheduler: what only it knows (max_model_len) is null until it said so.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from services.gateway.bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from services.gateway.call import Chat
from services.gateway.conversation import chat_of
from services.gateway.encoding import Encoder
from services.gateway.link import SchedulerLink
from services.gateway.models import ServedModels
from services.gateway.openai import validate
from services.gateway.prompts import check_vocabulary, token_ids_of
from services.gateway.request_reading import HttpLimits, body_of, expect_nothing_yet
from services.gateway.tokenizer import Tokenizer
from shared.errors import InvalidField

_PORTION: Final = 10_000

_Asked = TokenizeTextBody | tuple[TokenizeChatBody, Chat]


class TokenizeRoutes:
    """Both paths, in vLLM's forms."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder,
        link: SchedulerLink,
        models: ServedModels,
        limits: HttpLimits,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._link = link
        self._models = models
        self._limits = limits

    def add_to(self, app: web.Application) -> None:
        """Register both paths."""
        app.router.add_post("/tokenize", self.tokenize, expect_handler=expect_nothing_yet)
        app.router.add_post("/detokenize", self.detokenize, expect_handler=expect_nothing_yet)

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: a text's or a conversation's token ids."""
        asked = await body_of(request, self._limits, _parse_tokenize)
        body = asked if isinstance(asked, TokenizeTextBody) else asked[0]
        self._models.named(body.model)
        welcome = self._link.scheduler.welcome
        max_model_len = welcome.max_model_len if welcome is not None else None
        told = await asyncio.to_thread(self._tell_tokens, asked, max_model_len)
        return web.Response(text=told, content_type="application/json")

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: the text of token ids, special tokens written out."""
        body = await body_of(request, self._limits, _parse_detokenize)
        self._models.named(body.model)
        check_vocabulary(body.tokens, self._vocab_size, "tokens")
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens)
        return web.json_response({"prompt": text})

    @property
    def _vocab_size(self) -> int:
        welcome = self._link.scheduler.welcome
        return welcome.shape.vocab_size if welcome is not None else self._tokenizer.vocab_size

    def _tell_tokens(self, asked: _Asked, max_model_len: int | None) -> str:
        if isinstance(asked, TokenizeTextBody):
            body: TokenizeTextBody | TokenizeChatBody = asked
            text, adds_special = asked.prompt, asked.add_special_tokens is not False
        else:
            body, chat = asked
            text, adds_special = self._encoder.render(chat), bool(body.add_special_tokens)
        ids = self._tokenizer.encode(text, add_special_tokens=adds_special)
        names = "null"
        if body.return_token_strs:
            names = _json_list([self._tokenizer.name_of(token_id) for token_id in ids])
        return (
            f'{{"count": {len(ids)}, "max_model_len": {json.dumps(max_model_len)}, '
            f'"tokens": {_json_list(ids)}, "token_strs": {names}}}'
        )


def _json_list(items: Sequence[int | str]) -> str:
    """Portion by portion, so that other threads have their turn: there may be millions."""
    starts = range(0, len(items), _PORTION)
    portions = [json.dumps(items[start : start + _PORTION])[1:-1] for start in starts]
    return f"[{', '.join(portions)}]"


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _parse_tokenize(fields: dict[str, Any]) -> _Asked:
    if fields.get("messages") is None:
        return validate(TokenizeTextBody, _without(fields, "messages"))
    if fields.get("prompt") is not None:
        raise InvalidField("prompt", "and messages are both given; give one")
    body = validate(TokenizeChatBody, _without(fields, "prompt"))
    return body, chat_of(body)


def _parse_detokenize(fields: dict[str, Any]) -> DetokenizeBody:
    body = validate(DetokenizeBody, fields)
    if not isinstance(body.tokens, list):
        raise InvalidField("tokens", "must be a list of token ids")
    if body.tokens:
        token_ids_of(body.tokens, "tokens")
    return body
