"""Where the result of a run is kept, and what it says about the run."""

import json
import math
from datetime import datetime
from pathlib import Path

from services.bench.plan import Json
from services.bench.run import Run
from services.bench.settings import BenchSettings, pairs
from shared.errors import StartError


class ResultFile:
    """A JSON file, named as vLLM names it unless `--result-filename` does.

    Raises: StartError if its folder cannot be made: before a long run, not after it.
    """

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        self._began = datetime.now().astimezone()
        folder = (settings.result_dir / (settings.result_filename or "a name")).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"--result-dir {folder}: {error.strerror}") from error

    def write(self, ran: Run, fields: Json) -> Path:
        """Write the settings that matter and `fields`; returns the path."""
        path = self._settings.result_dir / (self._settings.result_filename or self._name(ran))
        content = self._about(ran) | fields
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @property
    def _label(self) -> str:
        return self._settings.label or self._settings.chosen_backend

    def _name(self, ran: Run) -> str:
        limit = self._settings.max_concurrency
        concurrency = "" if limit is None else f"-concurrency{limit}"
        model = ran.model.rsplit("/", 1)[-1]
        began = f"{self._began:%Y%m%d-%H%M%S}"
        return f"{self._label}-{self._settings.request_rate}qps{concurrency}-{model}-{began}.json"

    def _about(self, ran: Run) -> Json:
        settings = self._settings
        rate = settings.request_rate
        return {
            "date": f"{self._began:%Y%m%d-%H%M%S}",
            "label": self._label,
            "backend": settings.chosen_backend,
            "model_id": ran.model,
            "tokenizer_id": settings.tokenizer,
            "dataset_name": settings.dataset_name,
            "num_prompts": settings.count,
            "num_warmups": settings.warmups,
            "seed": settings.seed,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": settings.burstiness,
            "max_concurrency": settings.max_concurrency,
            "goodput": list(settings.goodput),
            "sampling": settings.sampling,
            "extra_body": json.loads(settings.extra_body),
            "metadata": pairs(settings.metadata),
            "interrupted": ran.was_interrupted,
        }
