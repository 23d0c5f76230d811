"""The forms of a prompt: a text, token ids, or a list of either."""

from typing import Any, Final

from services.gateway.field_types import INT32_MAX, MAX_PROMPTS
from shared.errors import InvalidField, RequestError
from shared.ids import Ids

_INDEXED: Final = "prompt[%d]"


def prompts_of(value: Any) -> tuple[str | Ids, ...]:
    """What `prompt` asks for, one element a prompt. Ids are not compared with a vocabulary.

    A long list costs some nanoseconds an id.
    Raises: InvalidField naming prompt, prompt[3] or prompt[3][17].
    """
    if isinstance(value, str):
        return (_text(value, "prompt"),)
    if not isinstance(value, list):
        raise InvalidField("prompt", f"must be a string or a list, not {_kind(value)}")
    if not value:
        raise InvalidField("prompt", "is an empty list; give at least one prompt or token id")
    kinds = set(map(type, value))
    if kinds == {int}:
        return (token_ids_of(value, "prompt"),)
    if kinds in ({str}, {list}) and len(value) > MAX_PROMPTS:
        raise InvalidField("prompt", f"takes at most {MAX_PROMPTS} prompts, not {len(value)}")
    if kinds == {str}:
        return tuple([_text(text, _INDEXED % index) for index, text in enumerate(value)])
    if kinds == {list}:
        return tuple([token_ids_of(ids, _INDEXED % index) for index, ids in enumerate(value)])
    raise _mixed(value)


def token_ids_of(value: list[Any], name: str) -> Ids:
    """A list of token ids. Raises: InvalidField naming the list or its first bad item."""
    if not value:
        raise InvalidField(name, "is an empty list; give at least one token id")
    if set(map(type, value)) != {int}:
        index = next(index for index, item in enumerate(value) if type(item) is not int)
        raise InvalidField(f"{name}[{index}]", f"must be a token id, not {_kind(value[index])}")
    if min(value) < 0 or max(value) > INT32_MAX:
        index = next(index for index, item in enumerate(value) if not 0 <= item <= INT32_MAX)
        raise InvalidField(f"{name}[{index}]", "is no token id of any vocabulary")
    return tuple(value)


def check_vocabulary(token_ids: Ids, vocab_size: int, name: str) -> None:
    """Refuse ids that the model does not have. Raises: InvalidField naming the first."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(index for index, item in enumerate(token_ids) if item >= vocab_size)
        raise InvalidField(
            f"{name}[{index}]",
            f"{token_ids[index]} is not in the vocabulary (0..{vocab_size - 1})",
        )


def about_one(error: RequestError, index: int, num_prompts: int) -> RequestError:
    """`error` about a prompt of several: it names which one."""
    if num_prompts > 1 and error.message.startswith("prompt"):
        name = _INDEXED % index
        error.message = name + error.message.removeprefix("prompt")
        if error.param is not None and error.param.startswith("prompt"):
            error.param = name + error.param.removeprefix("prompt")
    return error


def _text(text: str, name: str) -> str:
    if not text:
        raise InvalidField(name, "is empty; give at least one character")
    return text


def _mixed(value: list[Any]) -> InvalidField:
    first = type(value[0])
    if first not in (int, str, list):
        return InvalidField(
            "prompt[0]", f"must be a string, a token id or a list of those, not {_kind(value[0])}"
        )
    index = next(index for index, item in enumerate(value) if type(item) is not first)
    return InvalidField(
        _INDEXED % index,
        f"is {_kind(value[index])}, but prompt[0] is {_kind(value[0])}: give a list of strings, "
        "of token ids, or of lists of token ids",
    )


def _kind(value: Any) -> str:
    return {bool: "a boolean", int: "an integer", float: "a fraction", str: "a string",
            list: "a list", dict: "an object", type(None): "null"}[type(value)]  # fmt: skip
