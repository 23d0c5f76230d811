"""The results as a figure: tokens a second of every server in every cell, and the floor."""

from pathlib import Path
from typing import Any

from ops.bench.contest.results import Results


def plot(results: Results, title: str, path: Path) -> None:
    """Bars, and a line for each floor. Raises: ImportError without matplotlib (extra `plots`)."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "splitflap"  # the same numbers, the same file
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    names = list(results.servers)
    width = 0.85 / len(names)
    for at, name in enumerate(names):
        heights = [results.servers[name].median(c, "tokens_per_s") or 0 for c in results.cells]
        places = [x + (at - (len(names) - 1) / 2) * width for x in range(len(results.cells))]
        bars = axes.bar(places, heights, width, label=f"{name} {results.servers[name].version}")
        axes.bar_label(bars, fmt="%.0f", fontsize=6)
    floors = [results.floor(cell) or 0 for cell in results.cells]
    lefts, rights = zip(*((at - 0.45, at + 0.45) for at in range(len(floors))), strict=True)
    axes.hlines(floors, lefts, rights, "k", label="floor of this machine")
    axes.set_xticks(range(len(results.cells)), results.cells)
    axes.set(ylabel="output tokens/s", title=title)
    axes.grid(visible=True, axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
