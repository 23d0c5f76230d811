"""`splitflap bench`: build the requests, send them, then understand what came back."""

import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from services.bench.build import build
from services.bench.outcome import judge
from services.bench.report import summarize
from services.bench.result_file import ResultFile
from services.bench.run import run
from services.bench.settings import load_settings
from services.bench.table import report_json, request_json, write_table
from services.bench.tokens import load_tokens

EXIT_NONE_SUCCEEDED: Final = 1
EXIT_INTERRUPTED: Final = 130
_WARM_UP_SEED: Final = 987_654  # not a run's own, so that no run finds its prompts cached


def main(arguments: Sequence[str]) -> int:
    """Run a bench. Exit status: 0, 1 if no request succeeded, 130 if interrupted.

    Raises: StartError if it cannot begin.
    """
    settings = load_settings(arguments)
    file = ResultFile(settings) if settings.save_result or settings.save_detailed else None
    sys.stderr.write(
        f"splitflap bench: {settings.count} requests of {settings.dataset_name} (seed "
        f"{settings.seed}) to {settings.url}\n"
    )
    tokens = load_tokens(settings.tokenizer)
    plans = build(settings, settings.count, settings.seed, tokens)
    warm_up = build(settings, settings.warmups, _WARM_UP_SEED, tokens) if settings.warmups else []
    ran = uvloop.run(run(settings, plans, warm_up))
    ended = [
        (recording, judge(plan, recording, tokens.count))
        for plan, recording in zip(plans, ran.recordings, strict=True)
        if recording.end_s is not None
    ]
    report = summarize(
        [outcome for _, outcome in ended],
        duration_s=ran.duration_s,
        unfinished=len(plans) - len(ended),
        goodput_s=settings.goodput_s,
    )
    title = "Interrupted" if ran.was_interrupted else "Serving Benchmark Result"
    sys.stdout.write(write_table(report, settings.metrics, settings.percentiles, title=title))
    if file is not None:
        fields = report_json(report, settings.metrics, settings.percentiles)
        if settings.save_detailed:
            fields["requests"] = [
                request_json(recording, outcome, ran.start_s) for recording, outcome in ended
            ]
        path = file.write(ran, fields)
        sys.stderr.write(f"splitflap bench: the result is in {path}\n")
    if ran.was_interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.completed else EXIT_NONE_SUCCEEDED
