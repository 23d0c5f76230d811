"""The check: its sections one after the other, each in a process of its own.

So a section that breaks the GPU's context, hangs or is killed takes nothing with it but itself, and
the memory it took is free again. This file imports no torch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from ops.gpu import report

ROOT: Final = Path(__file__).resolve().parents[2]
SHARES: Final = {
    "ceilings": 3,
    "correctness": 18,
    "attention": 12,
    "prefill": 6,
    "swaps": 4,
    "launches": 3,
    "loop": 14,
}
"""Sections in their order, and how large a part of the time each may take."""
DRY_SHARES: Final = {"budgets": 14, **SHARES}
_START_S: Final = 30.0
"""What starting and ending a section may take beyond its time, before it is killed."""
_USED_SHARE: Final = 0.9
"""Of the minutes: the rest is for starting, ending and what had begun when its time was over."""


def main(arguments: list[str]) -> int:
    """Run the check. Returns: the exit status."""
    options = _parser().parse_args(arguments)
    if options.section is not None:
        from ops.gpu.sections import run

        run(options.section, options.dry, options.seconds, json.loads(options.ceilings))
        return 0
    shares = DRY_SHARES if options.dry else SHARES
    chosen = options.only.split(",") if options.only else list(shares)
    unknown = sorted(set(chosen) - set(shares))
    if unknown:
        known = ", ".join(shares)
        print(f"--only {','.join(unknown)}: no such section; there are {known}", file=sys.stderr)
        return 2
    sections: dict[str, report.Told] = {}
    began = time.monotonic()
    last = began + 60 * options.minutes
    ends = began + 60 * options.minutes * _USED_SHARE
    left = {name: shares[name] for name in shares if name in chosen}
    for name in list(left):
        seconds = max(1.0, (ends - time.monotonic()) * left[name] / sum(left.values()))
        del left[name]
        ceilings = report.values_of(sections.get("ceilings", {}))
        most = min(seconds + _START_S, last - time.monotonic())
        sections[name] = (
            _run(name, options.dry, seconds, most, ceilings) if most > 0 else report.not_begun(name)
        )
        report.show(name, sections[name])
    whole = report.whole(sections, is_dry=options.dry, took_s=time.monotonic() - began)
    Path(options.out).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    report.conclude(whole, options.out)
    return 0 if whole["is_right"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description="Is it right and fast here?")
    parser.add_argument("--dry", action="store_true", help="all that needs no GPU")
    parser.add_argument("--out", default="gpu_check.json", help="the JSON file to write")
    parser.add_argument("--only", help=f"sections, by commas: {', '.join(DRY_SHARES)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="the most it may take")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # a process of its own
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", default="{}", help=argparse.SUPPRESS)
    return parser


def _run(
    name: str, is_dry: bool, seconds: float, most: float, ceilings: dict[str, float]
) -> report.Told:
    """One section in its process, killed after `most` seconds. That it failed is told too."""
    command = [sys.executable, str(ROOT / "ops" / "gpu_check.py"), "--section", name]
    command += ["--seconds", f"{seconds:.1f}", "--ceilings", json.dumps(ceilings)]
    command += ["--dry"] if is_dry else []
    env = dict(os.environ)
    if is_dry and name != "budgets":
        env["TRITON_INTERPRET"] = "1"
    began, why = time.monotonic(), ""
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=told, stderr=errors)
        try:
            process.wait(timeout=most)
        except subprocess.TimeoutExpired:
            why = f"killed after {time.monotonic() - began:.0f} s; it had {seconds:.0f}"
        finally:
            process.kill()
            process.wait()
        told.seek(0)
        errors.seek(0)
        section = report.by_kind(told.read())
        if not why and process.returncode:
            why = f"exit status {process.returncode}: {errors.read()[-2000:].strip()}"
    if why:
        section["fault"].append({"what": name, "why": why})
    section["took_s"] = time.monotonic() - began
    return section
