"""A prompt told back to its client, token by token."""

from collections.abc import Iterator, Sequence

from services.gateway.call import Prompt
from services.gateway.logprob_fields import PlacedTokens
from services.gateway.token_names import TokenNames
from services.gateway.tokenizer import Tokenizer
from shared.messages import PositionLogprobs


def placed_prompt(
    tokenizer: Tokenizer, prompt: Prompt, logprobs: Sequence[PositionLogprobs]
) -> PlacedTokens:
    """The prompt's tokens where they begin in its text; `logprobs` are those of prompt[1:]."""
    offsets = prompt_offsets(tokenizer, prompt)
    return PlacedTokens(prompt.token_ids, (None, *logprobs), offsets)


def prompt_offsets(tokenizer: Tokenizer, prompt: Prompt) -> Iterator[int]:
    """The character of the text at which each token begins, never beyond its end.

    A character split over tokens begins at the first of them. Tokens and text may differ: a
    tokenizer puts a token before a text or a space before its first word, or normalises it. What
    does not stand in the text where it should takes no room if it is special, else its own length.
    """
    names = TokenNames(tokenizer)
    text = prompt.text.encode()
    position = characters = 0
    for token_id in prompt.token_ids:
        yield min(characters, len(prompt.text))
        ends = _end_of(names.bytes_of(token_id), bool(tokenizer.bytes_of(token_id)), text, position)
        characters += _num_ended(text, position, ends)
        position = ends


def _end_of(token: bytes, is_text: bool, text: bytes, position: int) -> int:
    for spelled in (token, token.removeprefix(b" ")):
        if spelled and text.startswith(spelled, position):
            return position + len(spelled)
    return min(position + len(token), len(text)) if is_text else position


def _num_ended(text: bytes, begin: int, end: int) -> int:
    """Characters whose last byte is in text[begin:end]: the next byte continues none."""
    return sum(
        1 for index in range(begin, end) if index + 1 == len(text) or text[index + 1] & 0xC0 != 0x80
    )
