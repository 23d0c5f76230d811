"""How far a run is: a bar on stderr, only where somebody looks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Counter(Protocol):
    """Told of each request that ended."""

    def __call__(self) -> None:
        """One more."""


@contextmanager
def progress(total: int, *, is_wanted: bool) -> Iterator[Counter]:
    """A bar that a thread draws a few times a second; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    if not is_wanted or not console.is_terminal:
        yield lambda: None
        return
    bar = Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        transient=True,
    )
    with bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
