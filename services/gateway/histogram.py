"""A histogram that is told of every token."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily


class TokenHistogram:
    """As prometheus_client's, for one thread, at a tenth of the time: its locks are a microsecond.

    `bounds` are the upper bounds of its buckets, included, ascending.
    """

    def __init__(
        self, name: str, what: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._what = name, what
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What there is by now."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == inf else repr(float(bound)), float(total)))
        family = HistogramMetricFamily(self._name, self._what)
        family.add_metric([], buckets, self._sum)
        yield family
