"""When each request of an open loop arrives."""

import math
import random


def arrival_times_s(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, ascending, at `rate` requests a second on average.

    Gaps follow a gamma distribution of shape `burstiness`; at 1 that is the exponential of a
    Poisson process. An infinite rate means all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    dice = random.Random(f"arr-{seed}")
    now_s, times = 0.0, []
    for _ in range(count):
        if burstiness == 1:
            now_s += dice.expovariate(rate)
        else:
            now_s += dice.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now_s)
    return times
