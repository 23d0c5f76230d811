"""What is asked of every server: a workload at so many clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from services.bench.build import build
from services.bench.plan import Planned, Text
from services.bench.settings import BenchSettings, load_settings
from services.bench.workloads import Workload

SHARED_TOKENS = {"B": 512}  # of each prompt: the same for all, so that one computation is enough
WARM_UP_SEED = 987_654


@dataclass(frozen=True)
class Cell:
    """One column of the table."""

    name: str
    workload: Workload
    clients: int

    def requests(self, *, quick: bool) -> int:
        """How many a round."""
        return max(self.clients, 2) if quick else max(3 * self.clients, 8)

    def flags(self, seed: int, *, quick: bool) -> list[str]:
        """As `splitflap bench` takes them, but for the server's own."""
        return [
            f"--workload={self.workload}", f"--concurrency={self.clients}",
            f"--num-prompts={self.requests(quick=quick)}", f"--seed={seed}", "--ignore-eos",
        ]  # fmt: skip


CELLS = {
    cell.name: cell
    for cell in (
        Cell("A1", "A", 1), Cell("A8", "A", 8), Cell("A32", "A", 32), Cell("A64", "A", 64),
        Cell("B", "B", 16), Cell("C", "C", 4), Cell("L", "L", 4),
    )
}  # fmt: skip


def choose(names: str | None) -> list[Cell]:
    """`A1,B`, or all. Raises: SystemExit naming what there is."""
    wanted = names.split(",") if names else list(CELLS)
    unknown = [name for name in wanted if name not in CELLS]
    if unknown:
        raise SystemExit(f"--only {names}: no {', '.join(unknown)}; choose of {', '.join(CELLS)}")
    return [CELLS[name] for name in wanted]


@dataclass(frozen=True)
class Load:
    """One cell of one round: the same requests for every server."""

    cell: Cell
    flags: list[str]
    plans: Sequence[Planned]
    warm_up: Sequence[Planned]

    @classmethod
    def of(cls, cell: Cell, round_number: int, tokens: Text, *, quick: bool) -> "Load":
        """No two cells or rounds have requests in common, so that no cache has seen them before."""
        seed = 100 * round_number + list(CELLS).index(cell.name)
        flags = cell.flags(seed, quick=quick)
        settings = load_settings(flags)
        plans = build(settings, settings.count, settings.seed, tokens)
        warm_up = build(settings, 1, WARM_UP_SEED + seed, tokens)
        return cls(cell, flags, plans, warm_up)

    def settings(self, url: str, extra_body: str) -> BenchSettings:
        """Those of `splitflap bench` against one server."""
        own = [f"--base-url={url}", f"--extra-body={extra_body}", "--disable-tqdm"]
        return load_settings([*self.flags, *own])

    @property
    def sequences(self) -> int:
        """That decode at a time."""
        return min(self.cell.clients, len(self.plans)) * self.plans[0].num_choices

    @property
    def output_tokens(self) -> int:
        """Of all answers."""
        return sum(plan.max_tokens * plan.num_choices for plan in self.plans)

    @property
    def computed_prompts(self) -> list[tuple[int, int]]:
        """(tokens to compute, tokens before them in the cache) of each prompt."""
        shared = SHARED_TOKENS.get(self.cell.workload, 0)
        prompts = [(plan.prompt_tokens - shared, shared) for plan in self.plans]
        return [(shared, 0), *prompts] if shared else prompts

    @property
    def mean_context(self) -> float:
        """Tokens that a decode step attends to, on average over all of them."""
        steps = [plan.max_tokens for plan in self.plans]
        middles = [plan.prompt_tokens + plan.max_tokens / 2 for plan in self.plans]
        return fmean(m for m, count in zip(middles, steps, strict=True) for _ in range(count))
