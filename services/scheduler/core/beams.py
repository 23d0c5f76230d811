"""Beams of a request: how a search begins, goes on, and becomes the answers.

Every beam of a request has a row, and is told the likeliest tokens after its last. When all are
(their rows may be in different plans), the search says which texts come next. Of those that go on
from one beam the first takes its place and its table; the others fork it. A beam from which none
goes on gives its blocks back. The paper's figure 9 shows the blocks.
"""

from collections.abc import Iterator

from services.scheduler.core.beam_search import BeamSearch, Branch
from services.scheduler.core.counters import Counters
from services.scheduler.core.decoding import Beam
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Finish, Sequence
from services.scheduler.core.steps import Steps
from services.scheduler.core.streams import Streams
from shared.errors import InvariantBroken
from shared.ids import SequenceId
from shared.sampling import FinishReason


class Beams:
    """Begins every search, and takes each a token further at a time."""

    def __init__(
        self, steps: Steps, streams: Streams, counters: Counters, ids: Iterator[SequenceId]
    ) -> None:
        self._steps = steps
        self._streams = streams
        self._counters = counters
        self._ids = ids

    def begin(self, request: Request) -> None:
        """Start to search, from the prompt, if the request asks for it: with one beam.

        A request that is under way begins again; it must hold no blocks.
        """
        if not isinstance(request.decoding, Beam):
            return
        params, stop_ids = request.submit.sampling, request.decoding.stop_ids
        request.search = BeamSearch(params, request.max_tokens, stop_ids)
        first = Sequence(next(self._ids), 0, request.submit.prompt)
        self._go_on_with(request, [first])

    def expand(self, request: Request) -> list[tuple[Sequence, Finish]]:
        """Take a search further if all its beams have their reports.

        Returns: its answers, with the way each ended, once it is over; their tokens are told.
        """
        beams, search = request.beams, request.search
        if search is None or any(beam.report is None for beam in beams):
            return []
        request.is_protected = False
        request.num_losses = 0
        branches = search.expand(beams)
        if not branches:
            return self._tell(request, search)
        nexts = self._grow(beams, branches, search)
        for beam in beams:
            if beam not in nexts:
                self._steps.release(beam)
        self._go_on_with(request, nexts)
        return []

    def _grow(
        self, beams: tuple[Sequence, ...], branches: list[Branch], search: BeamSearch
    ) -> list[Sequence]:
        """The beams that come next. All forks are made before any beam has its next token."""
        nexts, heirs = [], dict[int, Branch]()
        for branch in branches:
            beam = beams[branch.parent]
            if heirs.setdefault(branch.parent, branch) is branch:
                nexts.append(beam)
                continue
            text = (*beam.generated, branch.token_id)
            told = (*beam.logprobs, *search.told(beam, branch.token_id))
            twin = Sequence(next(self._ids), 0, beam.prompt, text, told)
            self._steps.branch(beam, twin)
            nexts.append(twin)
        for parent, heir in heirs.items():
            beam = beams[parent]
            beam.logprobs += search.told(beam, heir.token_id)
            beam.generated.append(heir.token_id)
        return nexts

    def _go_on_with(self, request: Request, beams: list[Sequence]) -> None:
        for beam in beams:
            beam.report, beam.stem, beam.num_common = None, None, 0
        request.beams = tuple(beams)
        request.num_spare_seats = len(request.sequences) - len(beams)
        request.limit(request.max_tokens)

    def _tell(self, request: Request, search: BeamSearch) -> list[tuple[Sequence, Finish]]:
        """The best text is the first answer. One that was given up is not told."""
        if len(search.hypotheses) != len(request.sequences):
            raise InvariantBroken(
                f"{request.request_id}: {len(search.hypotheses)} texts were found for "
                f"{len(request.sequences)} answers"
            )
        ended = []
        for answer, found in zip(request.sequences, search.hypotheses, strict=True):
            if answer.finish is None:
                answer.generated = list(found.token_ids)
                answer.logprobs = list(found.logprobs)
                self._counters.generation_tokens += len(answer.generated)
                self._streams.grew_whole(request, answer)
                finish = Finish(FinishReason.LENGTH)
                if found.is_stopped:
                    finish = Finish(FinishReason.STOP, stop_token_id=found.token_ids[-1])
                ended.append((answer, finish))
        return ended
