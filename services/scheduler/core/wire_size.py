"""What of a request must fit into one message: bounds, as the core knows no wire.

All of a request goes at once with `Attached`, to its next gateway, and with a gateway's `Submit` to
the next scheduler. A message that is too long cannot be sent at all, so a request that could grow
beyond it is refused at the door.
"""

from typing import Final

from shared.messages import Submit, TokenRun

MOST_BYTES: Final = 64 * 2**20
"""Of a message: shared/codec.py."""
OTHER_BYTES: Final = 2**17
"""Of a message beside what is counted here: the wishes, mostly."""
_ID_BYTES: Final = 4
_SEQUENCE_BYTES: Final = 64


def logprobs_bytes(num_top: int | None) -> int:
    """Of the log-probabilities at one place, with `num_top` likeliest; None: not asked for."""
    return 0 if num_top is None else 24 + 13 * num_top


def prompt_bytes(submit: Submit) -> int:
    """Of all that is told of a request before its first token."""
    texts = (submit.request_id, submit.cache_salt)
    return (
        OTHER_BYTES
        + sum(len(text.encode()) for text in texts)
        + len(submit.context)
        + len(submit.key_hash)
        + len(submit.prompt) * (_ID_BYTES + logprobs_bytes(submit.sampling.prompt_logprobs))
        + submit.sampling.n * _SEQUENCE_BYTES
    )


def token_bytes(submit: Submit) -> int:
    """Of one more token of each of its sequences."""
    return submit.sampling.n * (_ID_BYTES + logprobs_bytes(submit.sampling.logprobs))


def run_bytes(run: TokenRun) -> int:
    """Of one run among those of a message."""
    places = (*run.logprobs[:1], *run.prompt_logprobs[:1])
    num_top = max((len(place.top_ids) for place in places), default=0)
    return (
        _SEQUENCE_BYTES
        + len(run.request_id.encode())
        + len(run.token_ids) * _ID_BYTES
        + (len(run.logprobs) + len(run.prompt_logprobs)) * logprobs_bytes(num_top)
    )
