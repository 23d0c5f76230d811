"""What is said every ten seconds: how it goes, and that somebody has waited for long."""

import asyncio
from collections.abc import Callable
from typing import Final

from services.scheduler.core.machine import Scheduler
from shared.logs import get_logger
from shared.messages import PreemptionMode

STATS_S: Final = 10.0
LONG_WAIT_S: Final = 60.0

_log = get_logger("scheduler")


async def report_every_so_often(core: Scheduler, clock: Callable[[], float]) -> None:
    """Every ten seconds, if anything happened, the line that this field knows."""
    before = core.counters.tokens()
    while True:
        await asyncio.sleep(STATS_S)
        warn_of_long_wait(core, clock())
        after = core.counters.tokens()
        if after != before:
            prompt, generated = (
                (new - old) / STATS_S for new, old in zip(after, before, strict=True)
            )
            _say_how_it_goes(core, prompt, generated)
        before = after


def warn_of_long_wait(core: Scheduler, at: float) -> None:
    """Say so if somebody has waited for over a minute: under priorities it may be for ever."""
    longest_s = core.longest_wait_s(at)
    if longest_s > LONG_WAIT_S:
        _log.warning(
            "long_wait",
            longest_wait_s=round(longest_s, 1),
            waiting=core.num_waiting,
            swapped=core.num_swapped,
            scheduling_policy=core.config.scheduling_policy,
        )


def _say_how_it_goes(core: Scheduler, prompt: float, generated: float) -> None:
    """Two rates in tokens a second, and where requests and blocks are."""
    counters = core.counters
    usage, cpu_usage = core.usage(), core.cpu_usage()
    giving_way = {}
    if counters.preemptions:
        for mode in PreemptionMode:
            giving_way[f"{mode}_estimated_s"] = round(counters.preemption_estimated_s[mode], 4)
            giving_way[f"{mode}_actual_s"] = round(counters.preemption_actual_s[mode], 4)
    _log.info(
        f"Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generated:.1f} tokens/s, "
        f"Running: {core.num_running} reqs, "
        f"Swapped: {core.num_swapped} reqs, "
        f"Waiting: {core.num_waiting} reqs, "
        f"GPU KV cache usage: {100 * usage.used_share:.1f}%, "
        f"CPU KV cache usage: {100 * cpu_usage.used_share:.1f}%, "
        f"Prefix cache hit rate: {100 * counters.prefix_cache_hit_rate:.1f}%",
        prompt_tokens_per_s=round(prompt, 1),
        generation_tokens_per_s=round(generated, 1),
        kv_cache_usage=round(usage.used_share, 4),
        **giving_way,
    )
