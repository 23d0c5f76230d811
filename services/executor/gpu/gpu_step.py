"""One plan on its way through the device: its events, and what is read back of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from services.executor.gpu.division import Division
from services.executor.gpu.streams import Event
from services.executor.host_runner import LOST, tokens_of
from services.executor.readout import NOT_FINITE, Readout, read_out
from services.executor.sampler import Sampler
from shared.ids import SequenceId
from shared.messages import PREVIOUS, RowError, Sampled, StepPlan, StepResult, StepTimings


@dataclass(slots=True)
class Marks:
    """Points of a step in the streams. `moved` is the end of its swaps, if there are any.

    `passing` is where its forward pass was put in: what the device waited for the host to lay the
    step out is before it, and no part of the pass.
    """

    begun: Event
    may_copy: Event | None = None
    copied: Event | None = None
    passing: Event | None = None
    computed: Event | None = None
    drawn: Event | None = None
    moves_begun: Event | None = None
    moved: Event | None = None


@dataclass(slots=True)
class GpuStep:
    """A plan that was launched.

    Attributes:
        before: the plan it goes on from, until it is finished.
        tokens_read: [draws] int32 in main memory, and `logits_read` [host_logits, vocab_size]
            float32, both there once `marks.drawn` is done.
    """

    plan: StepPlan
    before: "GpuStep | None"
    division: Division
    sampler: Sampler
    marks: Marks
    tokens_read: Tensor | None = None
    logits_read: Tensor | None = None
    _result: StepResult | None = None

    def is_done(self) -> bool:
        """Whether the device is through with it."""
        return all(event.is_done() for event in self._ends())

    def finish(self) -> StepResult:
        """Wait, read, and draw what the CPU's sampler draws."""
        if self._result is None:
            before = self.before.finish() if self.before is not None else None
            previous = {} if before is None else tokens_of(before)
            for event in self._ends():
                event.wait()
            self._result = self._read(previous)
            self.before = None
        return self._result

    @property
    def tokens(self) -> Mapping[SequenceId, int]:
        """What was drawn."""
        return tokens_of(self.finish())

    def _ends(self) -> list[Event]:
        return [event for event in (self.marks.drawn, self.marks.moved) if event is not None]

    def _read(self, previous: Mapping[SequenceId, int]) -> StepResult:
        began = perf_counter()
        lost = [
            row.sequence_id
            for row in self.plan.rows
            if row.token_ids[-1] == PREVIOUS and row.sequence_id not in previous
        ]
        made = self._read_out({**previous, **dict.fromkeys(lost, 0)})
        sampled = {one.sequence_id: one for one in made.sampled} | self._tokens_read()
        errors = {error.sequence_id: error for error in made.errors}
        for row in self.plan.rows:
            name = row.sequence_id
            if name in lost:
                errors[name] = RowError(name, LOST)
            elif name not in errors and any(
                sample.sequence_id not in sampled for sample in row.samples
            ):
                errors[name] = RowError(name, NOT_FINITE)
        return StepResult(
            boot=self.plan.boot,
            step_id=self.plan.step_id,
            sampled=tuple(
                sampled[sample.sequence_id]
                for row in self.plan.rows
                if row.sequence_id not in errors
                for sample in row.samples
            ),
            row_errors=tuple(
                errors[row.sequence_id] for row in self.plan.rows if row.sequence_id in errors
            ),
            scored=tuple(one for one in made.scored if one.sequence_id not in errors),
            timings=self._timings(perf_counter() - began),
        )

    def _read_out(self, previous: Mapping[SequenceId, int]) -> Readout:
        """What the CPU's rows get; those that are lost get anything."""
        if self.logits_read is None:
            return Readout((), (), ())
        logits = self.logits_read.numpy()
        return read_out(self.sampler, self.division.host_rows, logits, previous)

    def _tokens_read(self) -> dict[SequenceId, Sampled]:
        """The device's draws, but those whose logits were not finite."""
        tokens = [] if self.tokens_read is None else self.tokens_read.tolist()
        return {
            name: Sampled(name, tokens[place])
            for name, place in self.division.places.items()
            if tokens[place] >= 0
        }

    def _timings(self, read_s: float) -> StepTimings:
        """By the device; `read_s` is the CPU's part of drawing."""
        marks = self.marks

        def seconds(start: Event | None, end: Event | None) -> float:
            return end.seconds_since(start) if start is not None and end is not None else 0.0

        return StepTimings(
            swap_s=seconds(marks.moves_begun, marks.moved),
            copy_s=seconds(marks.may_copy, marks.copied),
            forward_s=seconds(marks.passing, marks.computed),
            sample_s=seconds(marks.computed, marks.drawn) + read_s,
        )
