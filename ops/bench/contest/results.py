"""What a run in turns came to: medians of rounds, multiples of the floor, ratios to peers."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from ops.bench.contest.floor import Floor, Limits
from ops.bench.contest.runners import Measure

OURS = "splitflap"


@dataclass
class Server:
    """One contestant's part of the results."""

    version: str
    command: str
    ready_s: float
    rounds: dict[str, list[Measure]] = field(default_factory=dict)
    idle_cores: list[float] = field(default_factory=list)

    def median(self, cell: str, metric: str) -> float | None:
        """Of the rounds in which there is such a number; of none that failed altogether."""
        values = [getattr(measure, metric) for measure in self.rounds.get(cell, ())]
        known = [value for value in values if value]
        return statistics.median(known) if known else None

    def peak(self, metric: str) -> float | None:
        """The most over all cells and rounds."""
        values = [getattr(m, metric) for measures in self.rounds.values() for m in measures]
        return max((value for value in values if value), default=None)


@dataclass
class Results:
    """Everything measured, by server and cell."""

    cells: list[str]
    servers: dict[str, Server] = field(default_factory=dict)
    floors: dict[str, list[Floor]] = field(default_factory=dict)
    limits: list[Limits] = field(default_factory=list)

    def floor(self, cell: str) -> float | None:
        """Tokens a second that the machine allows: median of the rounds."""
        floors = [floor.tokens_per_s for floor in self.floors.get(cell, ())]
        return statistics.median(floors) if floors else None

    def x_of_floor(self, name: str, cell: str) -> float | None:
        """How many times as long as the floor a server takes: median of the rounds' own ratios."""
        measures = self.servers[name].rounds.get(cell, ())
        pairs = zip(self.floors.get(cell, ()), measures, strict=False)
        ratios = [floor.tokens_per_s / m.tokens_per_s for floor, m in pairs if m.tokens_per_s]
        return statistics.median(ratios) if ratios else None

    def best_peer(self, cell: str, metric: str = "tokens_per_s") -> tuple[str, float] | None:
        """(name, median) of the best that is not ours; of times the shortest is best."""
        medians = [
            (name, value)
            for name, server in self.servers.items()
            if name != OURS and (value := server.median(cell, metric)) is not None
        ]
        pick: Callable[..., tuple[str, float]] = max if metric == "tokens_per_s" else min
        return pick(medians, key=lambda pair: pair[1]) if medians else None

    def ratio(self, cell: str, metric: str = "tokens_per_s") -> float | None:
        """Ours to the best peer's; above 1 is better for tokens a second, below 1 for times."""
        best = self.best_peer(cell, metric)
        ours = self.servers[OURS].median(cell, metric) if OURS in self.servers else None
        return ours / best[1] if ours is not None and best is not None else None

    def failures(self) -> Iterable[str]:
        """A line for every server and cell in which requests failed."""
        for name, server in self.servers.items():
            for cell, measures in server.rounds.items():
                failed = sum(measure.failed for measure in measures)
                errors = [measure.first_error for measure in measures if measure.first_error]
                if failed or errors:
                    yield f"{name}, {cell}: {failed} requests failed; the first: {errors[0]}"

    def as_json(self) -> dict[str, object]:
        """Medians first, then every round."""
        metrics = ("tokens_per_s", "ttft_ms", "tpot_ms", "pss_mib", "pss_without_pool_mib")
        return {
            "summary": {
                cell: {
                    "floor_tokens_per_s": self.floor(cell),
                    "best_peer": self.best_peer(cell),
                    "ratio_to_best_peer": self.ratio(cell),
                    "ttft_ratio_to_best_peer": self.ratio(cell, "ttft_ms"),
                    "servers": {
                        name: {metric: server.median(cell, metric) for metric in metrics}
                        | {"x_of_floor": self.x_of_floor(name, cell)}
                        for name, server in self.servers.items()
                    },
                }
                for cell in self.cells
            },
            "limits": [asdict(limits) for limits in self.limits],
            "floors": {
                cell: [asdict(floor) for floor in floors] for cell, floors in self.floors.items()
            },
            "servers": {name: asdict(server) for name, server in self.servers.items()},
        }
