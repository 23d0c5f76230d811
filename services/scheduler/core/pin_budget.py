"""What pinned prefixes may hold, and what they leave to the requests beside them.

All pins together hold at most a share of the pool, and whoever lives fits beside all of them. So a
request that runs alone always finds its blocks. A prefix is counted with all its blocks, though it
may share some with another.
"""

from collections.abc import Iterable
from typing import Final

from services.scheduler.core.intake import Limits, check_submit, need_of
from services.scheduler.core.request import Request
from shared.errors import ErrorCode, RequestError

RETRY_AFTER_S: Final = 5.0


class PrefixBudget(RequestError):
    """There is no room for one more pinned prefix; it may come if `retry_after_s` is given."""

    code = ErrorCode.PREFIX_BUDGET

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, "prompt")
        self.retry_after_s = retry_after_s


def check_share(before: int, need: int, limits: Limits) -> None:
    """Raises: PrefixBudget if `need` blocks beside `before` pinned ones are more than the share."""
    share = limits.config.max_pinned_share
    most = int(share * limits.num_blocks)
    if before + need > most:
        raise PrefixBudget(
            f"the prefix needs {need} blocks of {limits.block_size} tokens beside {before} "
            f"pinned ones; at most {most} of {limits.num_blocks} may be pinned "
            f"(--max-pinned-share {share:g}): delete another prefix, shorten this one, or "
            "raise the share"
        )


def lower_limits(
    live: Iterable[Request], before: int, need: int, limits: Limits
) -> dict[Request, int]:
    """How many tokens those may generate at most that would not fit beside one prefix more.

    Whoever asked for a number of tokens keeps it. Raises: PrefixBudget if such a one stands in the
    way.
    """
    lowered = {}
    for request in live:
        wanted = need_of(request.submit, request.max_tokens, limits.block_size)
        if before + need + wanted <= limits.num_blocks:
            continue
        most = _most_beside(request, limits.beside(before + need))
        if most is None:
            raise PrefixBudget(
                f"the prefix needs {need} blocks beside {before} pinned ones, and a request that "
                f"is here may need {wanted} of the {limits.num_blocks}: try again when it has "
                "ended",
                RETRY_AFTER_S,
            )
        lowered[request] = most
    return lowered


def _most_beside(request: Request, limits: Limits) -> int | None:
    """What a request gets that left its number of tokens to us; None if it cannot live with less.

    A search cannot: the number decides which texts are best. Nor can who has drawn so many already.
    """
    sampling = request.submit.sampling
    if sampling.max_tokens is not None or sampling.use_beam_search:
        return None
    try:
        most = check_submit(request.submit, limits)
    except RequestError:
        return None
    return most if most > max(one.num_drawn for one in request.live_sequences) else None
