"""Tokens drawn in C++, with the threads that compute; what NumPy would draw (numpy_drawing.py)."""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.native.drawing import ADJUSTMENT, ASK, DRAW, NativeDraws
from services.executor.adjustment import completing, is_adjusted
from services.executor.logprobs import Ask, log_of_total, told
from services.executor.numpy_drawing import wish_of
from shared.ids import Ids
from shared.messages import PositionLogprobs, Sample

_TINY: Final = float(np.finfo(np.float32).tiny)
_ID_BYTES: Final = 4
_LISTS: Final = ("biased", "prompt", "answer", "allowed", "excluded")


class NativeDrawing:
    """Draws, and tells what logits say, with the native library."""

    def __init__(self, draws: NativeDraws) -> None:
        self._draws = draws

    def draw(
        self,
        rows: Sequence[NDArray[np.float32]],
        samples: Sequence[Sample],
        dice: NDArray[np.float64],
    ) -> list[int | None]:
        """As `Drawing` says. Raises: MemoryError if there is none to work in."""
        if not rows:
            return []
        size, wishes = len(rows[0]), [wish_of(sample) for sample in samples]
        asked = np.zeros(len(rows), DRAW)
        asked["logits"] = [row.ctypes.data for row in rows]
        asked["die"] = dice
        asked["top_p"] = [params.top_p for params in wishes]
        asked["top_k"] = [min(params.top_k, size) for params in wishes]
        asked["min_p"] = [params.min_p for params in wishes]
        asked["temperature"] = [
            max(params.temperature, _TINY) if params.temperature else 0.0 for params in wishes
        ]
        adjusted = [i for i, sample in enumerate(samples) if is_adjusted(sample)]
        if adjusted:
            adjustments = Adjustments([samples[i] for i in adjusted])
            asked["adjustment"][adjusted] = adjustments.addresses
        return [None if token < 0 else token for token in self._draws(asked, size)]

    def tell(self, asks: Sequence[Ask]) -> list[PositionLogprobs | None]:
        """As `Drawing` says. Raises: MemoryError if there is none to work in."""
        if not asks:
            return []
        size = len(asks[0].row)
        counts = [min(ask.num_top, size) for ask in asks]
        top = np.empty((len(asks), max(1, *counts)), np.int32)
        asked = np.zeros(len(asks), ASK)
        asked["logits"] = [ask.row.ctypes.data for ask in asks]
        asked["token"] = [-1 if ask.token_id is None else ask.token_id for ask in asks]
        asked["num_top"] = counts
        asked["top"] = top.ctypes.data + np.arange(len(asks)) * top.strides[0]
        self._draws.answer(asked, size)
        return [
            _read(ask, ids[:count], *numbers)
            for ask, ids, count, numbers in zip(
                asks, top.tolist(), counts, asked[["total", "rank", "peak"]].tolist(), strict=True
            )
        ]


def _read(
    ask: Ask, top_ids: list[int], total: int, rank: int, peak: float
) -> PositionLogprobs | None:
    if total == 0:
        return None
    log_total = log_of_total(peak, total, len(ask.row))
    if ask.token_id is None:
        return told(ask.row, log_total, top_ids[0], 1, top_ids)
    return told(ask.row, log_total, ask.token_id, rank, top_ids)


class Adjustments:
    """What some samples do to their logits, as C++ reads it. Lives as long as its addresses do."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        told = [wish_of(sample) for sample in samples]
        self._made = np.zeros(len(samples), ADJUSTMENT)
        self._made["frequency"] = [wish.frequency_penalty for wish in told]
        self._made["presence"] = [wish.presence_penalty for wish in told]
        self._made["repetition"] = [
            np.float32(max(wish.repetition_penalty, _TINY)) for wish in told
        ]
        self._ids = self._put_lists([ids for sample in samples for ids in _lists(sample)])
        self._put_biases([bias for wish in told for _, bias in wish.logit_bias])
        self.addresses = self._made.ctypes.data + np.arange(len(samples)) * self._made.itemsize
        """[n]: where each sample's is."""

    def _put_lists(self, lists: Sequence[Ids]) -> bytes:
        """All lists one after the other, each sample's in the order of `_LISTS`."""
        packed = b"".join([struct.pack(f"{len(ids)}i", *ids) for ids in lists])
        counts = np.array([len(ids) for ids in lists]).reshape(-1, len(_LISTS))
        ends = np.cumsum(counts).reshape(counts.shape)
        base = np.frombuffer(packed, np.uint8).ctypes.data
        for place, name in enumerate(_LISTS):
            self._made[name]["count"] = counts[:, place]
            self._made[name]["at"] = base + (ends - counts)[:, place] * _ID_BYTES
        return packed

    def _put_biases(self, biases: Sequence[float]) -> None:
        self._biases = np.array(biases, np.float32)
        counts = self._made["biased"]["count"]
        starts = (np.cumsum(counts) - counts) * self._biases.itemsize
        self._made["biases"] = self._biases.ctypes.data + starts


def _lists(sample: Sample) -> Iterable[Ids]:
    wish, prompt = wish_of(sample), sample.num_prompt
    penalised = sample.history if wish.has_penalty else ()
    yield tuple([token_id for token_id, _ in wish.logit_bias])
    yield penalised[:prompt]
    yield penalised[prompt:]
    yield wish.allowed_token_ids
    yield (*completing(wish.bad_words, sample.history), *sample.banned_ids)
