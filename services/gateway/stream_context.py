"""What another gateway must know of a call to go on with its stream, beside what is in `Submit`.

It lies with each of the call's requests at the scheduler, to which it is just bytes (JSON), and
comes back with `Attached`. A version that is not this one's is not understood.
"""

import json
from dataclasses import dataclass
from typing import Any, Final, cast

from services.gateway.answers import Answer
from services.gateway.call import Call, Endpoint, Prompt, StreamOptions
from shared.ids import RequestId
from shared.messages import Submit

VERSION: Final = 1


class NotUnderstood(Exception):
    """A context of another version of this program."""


@dataclass(frozen=True, slots=True)
class StreamContext:
    """The call as far as its answer depends on it; how many requests it is, one a prompt."""

    call: Call
    answer: Answer
    num_prompts: int


def request_id_of(call_id: RequestId, number: int) -> RequestId:
    """The request of prompt `number` of a call."""
    return RequestId(f"{call_id}-{number}") if number else call_id


def packed(call: Call, answer: Answer, num_prompts: int, prompt: Prompt) -> bytes:
    """As bytes, for the request of this prompt; b"" of what is not streamed."""
    options = call.stream
    if options is None:
        return b""
    fields = {
        "version": VERSION,
        "endpoint": call.endpoint,
        "id": answer.request_id,
        "model": answer.model,
        "created": answer.created,
        "num_prompts": num_prompts,
        "text": prompt.text if call.echo else "",
        "stop": call.stop,
        "include_stop": call.include_stop_str_in_output,
        "echo": call.echo,
        "return_token_ids": call.return_token_ids,
        "tokens_as_ids": call.tokens_as_ids,
        "max_tokens_name": call.max_tokens_name,
        "include_usage": options.include_usage,
        "continuous_usage": options.continuous_usage,
        "resumable": options.resumable,
    }
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpacked(submit: Submit) -> tuple[StreamContext, Prompt]:
    """The call of a request, and its prompt. Raises: NotUnderstood."""
    try:
        fields: dict[str, Any] = json.loads(submit.context.decode("utf-8", "surrogatepass"))
        if fields["version"] != VERSION:
            raise NotUnderstood(f"version {fields['version']}, not {VERSION}")
        return _context(fields, submit), Prompt(submit.prompt, fields["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise NotUnderstood(f"{type(error).__name__}: {error}") from error


def _context(fields: dict[str, Any], submit: Submit) -> StreamContext:
    endpoint = cast(Endpoint, fields["endpoint"])
    call = Call(
        endpoint=endpoint,
        model=fields["model"],
        sampling=submit.sampling,
        stop=tuple(fields["stop"]),
        include_stop_str_in_output=fields["include_stop"],
        echo=fields["echo"],
        return_token_ids=fields["return_token_ids"],
        tokens_as_ids=fields["tokens_as_ids"],
        stream=StreamOptions(
            fields["include_usage"], fields["continuous_usage"], fields["resumable"]
        ),
        max_tokens_name=fields["max_tokens_name"],
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        deadline_s=submit.deadline_s,
    )
    answer = Answer(endpoint, RequestId(fields["id"]), fields["model"], fields["created"])
    return StreamContext(call, answer, fields["num_prompts"])
