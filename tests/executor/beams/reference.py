"""Makes the reference values of the beam search: what transformers answers, with its scores.

    python -m tests.executor.beams.reference [random] [stories] [smollm2]

writes tests/data/beams_MODEL.json. Each case holds all answers of one search, best first, their
scores, and the *narrowest* decision of the search: the least difference of two scores of which
one was kept and the other not, or one came before the other. Where it is tiny, another order of
adding the same numbers may decide otherwise.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor

from tests.executor.beams.models import REAL, SMALL, write_small
from tests.executor.model.test_smollm2 import DATA, transformers_model

WIDTHS: Final = (2, 3, 4, 6)
LENGTH_PENALTIES: Final = (0.0, 0.5, 1.0, 2.0, -1.0)
EARLY_STOPPING: Final = (False, True, "never")
EVERY: Final = {"random": 1, "stories": 1, REAL: 7}
"""Which of all combinations of these a model searches; the real one takes seconds for each."""
MAX_NEW_TOKENS: Final = {"random": 16, "stories": 20, REAL: 14}
NOTHING: Final = -1e8
"""Scores below this belong to no beam: transformers masks with -1e9."""


class Watched(transformers.LlamaForCausalLM):
    """A model that notes how narrow the decisions of its beam searches are."""

    narrowest = float("inf")

    def note(self, better: Tensor, worse: Tensor) -> None:
        if float(worse) > NOTHING and float(better) > NOTHING:
            self.narrowest = min(self.narrowest, abs(float(better) - float(worse)))

    def note_cut(self, scores: Tensor, count: int) -> None:
        """Of these scores the `count` greatest are kept."""
        ordered = scores.flatten().sort(descending=True).values
        if len(ordered) > count:
            self.note(ordered[count - 1], ordered[count])

    def _get_running_beams_for_next_iteration(self, **named: Any) -> Any:
        scores, ends = named["topk_log_probs"], named["next_token_hits_stopping_criteria"]
        if ends.any():
            self.note_cut(scores, named["num_beams"])
        self.note_cut(scores[~ends], named["num_beams"])
        return super()._get_running_beams_for_next_iteration(**named)

    def _update_finished_beams(self, **named: Any) -> Any:
        ended = named["next_token_hits_stopping_criteria"] & named["top_num_beam_mask"][None, :]
        length = named["cur_len"] + 1 - named["decoder_prompt_len"]
        fresh = named["topk_log_probs"][ended] / length ** named["length_penalty"]
        self.note_cut(torch.cat((named["beam_scores"].flatten(), fresh)), named["num_beams"])
        return super()._update_finished_beams(**named)

    def _check_early_stop_heuristic(self, **named: Any) -> Any:
        is_long = named["early_stopping"] == "never" and named["length_penalty"] > 0
        length = named["max_length" if is_long else "cur_len"] - named["decoder_prompt_len"]
        best = named["running_beam_scores"][0, 0] / length ** named["length_penalty"]
        self.note(named["beam_scores"].min(), best)
        return super()._check_early_stop_heuristic(**named)


def search(model: Watched, prompt: list[int], **options: Any) -> dict[str, Any]:
    """One case: its options, and all that transformers answers."""
    stops, width = options["stop_token_ids"], options["n"]
    model.narrowest = float("inf")
    made: Any = model.generate(
        torch.tensor([prompt]), do_sample=False, num_beams=width, num_return_sequences=width,
        length_penalty=options["length_penalty"], early_stopping=options["early_stopping"],
        eos_token_id=stops or None, pad_token_id=0, min_new_tokens=options["min_tokens"] or None,
        max_new_tokens=options["max_tokens"], return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    lengths = (made.beam_indices >= 0).sum(1).tolist()
    answers = [
        ids[len(prompt) : len(prompt) + length].tolist()
        for ids, length in zip(made.sequences, lengths, strict=True)
    ]
    scores = made.sequences_scores.tolist()
    for better, worse in pairwise(scores):
        model.narrowest = min(model.narrowest, better - worse)
    return {
        **options, "prompt_ids": prompt, "answers": answers,
        "scores": [round(score, 6) for score in scores],
        "narrowest": float(f"{model.narrowest:.2g}"),
    }  # fmt: skip


def common_tokens(model: Watched, prompt: list[int], max_tokens: int) -> list[int]:
    """What the beams of a prompt often say after their third token: good ends for them."""
    free = search(
        model, prompt, n=6, length_penalty=1.0, early_stopping=False, stop_token_ids=[],
        min_tokens=0, max_tokens=max_tokens,
    )  # fmt: skip
    said = Counter(token for answer in free["answers"] for token in set(answer[3:-2]))
    said.subtract({token: 6 for answer in free["answers"] for token in answer[:2]})
    return [token for token, _ in said.most_common(3)]


def cases(name: str, model: Watched, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Widths, penalties and ways to stop; prompts, ends and least lengths take turns."""
    ends = [common_tokens(model, prompt, MAX_NEW_TOKENS[name]) for prompt in prompts]
    grid = list(product(WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING))[:: EVERY[name]]
    for at, (width, penalty, early) in enumerate(grid):
        chosen = at % len(prompts)
        yield search(
            model, prompts[chosen], n=width, length_penalty=penalty, early_stopping=early,
            stop_token_ids=ends[chosen][: (1, 3, 0, 1, 3)[at % 5]],
            min_tokens=(0, 0, 6, 0)[at % 4], max_tokens=MAX_NEW_TOKENS[name],
        )  # fmt: skip


def prompts_of(name: str) -> list[list[int]]:
    """Seven prompts: a number that shares no factor with those of the grid."""
    if name == "stories":
        golden = json.loads((DATA / "stories260K_golden.json").read_text(encoding="utf-8"))
        return [case["prompt_ids"] + case["greedy_ids"][: 3 * at]
                for at, case in enumerate(golden["cases"])][:7]  # fmt: skip
    if name == REAL:
        lines = (DATA / "smollm2_prompts.jsonl").read_text(encoding="utf-8").splitlines()
        ids = [line["ids"] for line in map(json.loads, lines)]
        return [prompt[:24] for prompt in ids if 8 <= len(prompt) <= 40][:7]
    random = np.random.RandomState(7)
    return [random.randint(3, 120, size).tolist() for size in (1, 3, 7, 8, 9, 17, 30)]


def model_of(name: str) -> Watched:
    """The model in transformers, float32."""
    if name == REAL:
        model = transformers_model()
        model.__class__ = Watched
        model.generation_config = transformers.GenerationConfig()
        return model
    with TemporaryDirectory() as folder:
        write_small(name, Path(folder))
        return Watched.from_pretrained(folder, dtype=torch.float32).eval()


def main(names: list[str]) -> None:
    for name in names or [*SMALL, REAL]:
        model = model_of(name)
        with torch.inference_mode():
            made = list(cases(name, model, prompts_of(name)))
        told = ",\n  ".join(json.dumps(case, separators=(",", ":")) for case in made)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        head = json.dumps(versions)[:-1]
        path = DATA / f"beams_{name}.json"
        path.write_text(f'{head}, "dtype": "float32",\n "cases": [\n  {told}\n]}}\n')
        _tell(path, made)


def _tell(path: Path, made: list[dict[str, Any]]) -> None:
    answers = [(case, answer) for case in made for answer in case["answers"]]
    early = sum(len(answer) < case["max_tokens"] for case, answer in answers)
    narrow = sum(case["narrowest"] < 1e-4 for case in made)
    sys.stdout.write(
        f"{path.name}: {len(made)} searches, {len(answers)} answers of which {early} end early; "
        f"{narrow} searches decide something by less than 1e-4\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
