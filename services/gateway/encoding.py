"""From a call's texts to token ids: its prompts, and the words it does not want to see."""

from dataclasses import replace
from typing import Final

from services.gateway.answer_size import bounded
from services.gateway.call import Call, Chat, Prompt
from services.gateway.chat import ChatTemplate
from services.gateway.prompts import about_one, check_vocabulary
from services.gateway.tokenizer import Tokenizer
from shared.errors import ErrorCode, InvalidField, PromptTooLong, RequestError
from shared.ids import Ids
from shared.messages import Welcome
from shared.sampling import MAX_BAD_WORD_TOKENS, SamplingParams, check_sampling

_COUNT_BELOW_BYTES: Final = 2**20


class PromptFarTooLong(RequestError):
    """A prompt that cannot fit, by its size alone: counting its tokens would take seconds."""

    code = ErrorCode.CONTEXT_LENGTH

    def __init__(self, least_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"prompt has at least {least_tokens} tokens; with one token to generate, fewer than "
            f"{max_model_len} fit (--max-model-len): shorten it",
            "prompt",
        )


class Encoder:
    """Everything here takes its time with long texts: call it in a thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, call: Call, welcome: Welcome) -> tuple[SamplingParams, list[Prompt]]:
        """The call's sampling, whole, and all its prompts: nothing of a call is half applied.

        Raises: InvalidField, Unsupported or PromptTooLong, naming the field.
        """
        sampling = self._sampling(call, welcome)
        if call.chat is not None:
            texts: tuple[str | Ids, ...] = (self.render(call.chat),)
        else:
            texts = call.prompts
        prompts = []
        for index, text in enumerate(texts):
            try:
                prompts.append(self._prompt(call, text, welcome))
            except RequestError as error:
                raise about_one(error, index, len(texts)) from error
        return bounded(call, sampling, prompts, welcome.max_model_len), prompts

    def render(self, chat: Chat) -> str:
        """The text of a conversation. Raises: InvalidField if the model has no template."""
        if self._template is None:
            raise InvalidField(
                "messages", "this model has no chat template; use /v1/completions with a prompt"
            )
        return self._template.render(chat)

    def _prompt(self, call: Call, given: str | Ids, welcome: Welcome) -> Prompt:
        max_model_len, max_tokens = welcome.max_model_len, call.sampling.max_tokens
        if isinstance(given, str):
            self._check_size(given, max_model_len)
            ids = self._tokenizer.encode(given, add_special_tokens=call.add_special_tokens)
        else:
            check_vocabulary(given, welcome.shape.vocab_size, "prompt")
            ids = given
        if not ids:
            raise InvalidField("prompt", "has no tokens; write some text")
        if len(ids) + (max_tokens != 0) > max_model_len:
            raise PromptTooLong(len(ids), max_model_len)
        if len(ids) + (max_tokens or 0) > max_model_len:
            raise PromptTooLong(len(ids), max_model_len, max_tokens or 0)
        if isinstance(given, str):
            return Prompt(ids, given)
        return Prompt(ids, self._tokenizer.decode(ids) if call.echo else "")

    def _check_size(self, text: str, max_model_len: int) -> None:
        size = len(text.encode())
        least_tokens = size // self._tokenizer.longest_token_bytes
        if size > _COUNT_BELOW_BYTES and least_tokens > max_model_len:
            raise PromptFarTooLong(least_tokens, max_model_len)

    def _sampling(self, call: Call, welcome: Welcome) -> SamplingParams:
        draw, vocab_size = call.sampling.draw, welcome.shape.vocab_size
        banned = tuple([token_id for (token_id,) in draw.bad_words])
        for index, token_id in enumerate(banned):
            if token_id < 0:
                raise InvalidField(f"banned_token_ids[{index}]", "must be at least 0")
        check_vocabulary(banned, vocab_size, "banned_token_ids")
        words = list(draw.bad_words)
        for index, text in enumerate(call.bad_words):
            words += self._runs_of(text, f"bad_words[{index}]")
        whole = replace(call.sampling, draw=replace(draw, bad_words=tuple(dict.fromkeys(words))))
        check_sampling(whole, vocab_size, welcome.eos_token_ids)
        return whole

    def _runs_of(self, text: str, name: str) -> list[Ids]:
        """The runs of tokens that a bad word is.

        As in vLLM: its own and, if it is another word of as many tokens there, that after a space.
        """
        own = self._tokenizer.encode(text.lstrip(), add_special_tokens=False)
        if not own:
            raise InvalidField(name, "has no tokens; give a text that is more than spaces")
        if len(own) > MAX_BAD_WORD_TOKENS:
            raise InvalidField(name, f"has {len(own)} tokens; at most {MAX_BAD_WORD_TOKENS}")
        spaced = self._tokenizer.encode(" " + text.lstrip(), add_special_tokens=False)
        if len(spaced) == len(own) and spaced[0] != own[0]:
            return [own, spaced]
        return [own]
