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

    Raises: StartError if it could not be written: before a long run, not after it.
    """

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        self._began = datetime.now().astimezone()
        path = self._path("model")
        try:
            _try_to_write(path)
        except OSError as error:
            raise StartError(
                f"the result cannot be written to {path} ({error.strerror}): choose another "
                "--result-dir or --result-filename"
            ) from error

    def write(self, ran: Run, fields: Json) -> Path:
        """Write the settings that matter and `fields`; returns the path."""
        path = self._path(ran.model)
        content = self._about(ran) | fields
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @property
    def _label(self) -> str:
        return self._settings.label or self._settings.chosen_backend

    def _path(self, model: str) -> Path:
        return self._settings.result_dir / (self._settings.result_filename or self._name(model))

    def _name(self, model: str) -> str:
        limit = self._settings.max_concurrency
        concurrency = "" if limit is None else f"-concurrency{limit}"
        model = _in_a_name(model.rsplit("/", 1)[-1])
        label, began = _in_a_name(self._label), f"{self._began:%Y%m%d-%H%M%S}"
        return f"{label}-{self._settings.request_rate}qps{concurrency}-{model}-{began}.json"

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


def _in_a_name(text: str) -> str:
    """`text` as part of a file's name, whose bytes are few (255 on most file systems).

    >>> _in_a_name("a/b")
    'a_b'
    """
    return text.replace("/", "_").encode(errors="replace")[:80].decode(errors="ignore")


def _try_to_write(path: Path) -> None:
    """Make its folder, and leave everything else as it was. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("a").close()
    if is_new:
        path.unlink()
