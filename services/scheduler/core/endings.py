"""How requests grow and end: the one place where a finished sequence gives its blocks back."""

from services.scheduler.core.book import Book
from services.scheduler.core.counters import Counters
from services.scheduler.core.lifecycle import Change
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Finish, Sequence
from services.scheduler.core.steps import Steps
from services.scheduler.core.streams import Streams
from shared.errors import InvariantBroken
from shared.sampling import FinishReason


class Endings:
    """Carries an ending through: blocks, line, counters, and the gateway's `Finished`."""

    def __init__(self, book: Book, steps: Steps, streams: Streams, counters: Counters) -> None:
        self._book = book
        self._steps = steps
        self._streams = streams
        self._counters = counters

    def due(self, request: Request, sequence: Sequence) -> Finish | None:
        """How the tokens a sequence has end it, if they do. A stop token goes before the length."""
        num_generated = len(sequence.generated)
        if num_generated and request.decoding.stops(num_generated, sequence.generated[-1]):
            return Finish(FinishReason.STOP, stop_token_id=sequence.generated[-1])
        if num_generated >= request.max_tokens and (num_generated or not request.num_unscored):
            return Finish(FinishReason.LENGTH)
        return None

    def end(self, request: Request, sequence: Sequence, finish: Finish, at: float) -> None:
        """End one sequence and say so. Raises: InvariantBroken if it has ended before."""
        self._close(request, sequence, finish, at)
        self._streams.ended(request, sequence)

    def end_all(self, request: Request, finish: Finish, at: float) -> None:
        """End every answer that has not ended, and say so."""
        for sequence in request.live_answers:
            self.end(request, sequence, finish, at)

    def give_up(self, request: Request, sequence: Sequence, at: float) -> None:
        """Nobody wants to hear of this sequence again; the others of its request go on."""
        if sequence.finish is None:
            self._close(request, sequence, Finish(FinishReason.ABORT), at)

    def forget(self, request: Request, at: float) -> None:
        """Nobody wants to hear of this request again: end it in silence, drop its log."""
        for sequence in request.live_answers:
            self._close(request, sequence, Finish(FinishReason.ABORT), at)
        self._book.forget(request)

    def _close(self, request: Request, sequence: Sequence, finish: Finish, at: float) -> None:
        if sequence.finish is not None:
            raise InvariantBroken(f"{request.request_id}:{sequence.index} ended twice")
        sequence.finish = finish
        self._steps.release(sequence)
        sequence.hashes = []
        if request.beams and not request.live_answers:
            self._end_search(request)
        live = request.live_sequences
        tables = [one.table if one.table is not None else one.swapped for one in live]
        if live and request.holds_blocks and all(table is None for table in tables):
            self._steps.drop(request)  # the lead ended before the others had a share of its prompt
        if not live:
            self._book.change(request, Change.END)
            request.last_heard = max(request.last_heard, at)
            self._counters.requests_finished[finish.reason] += 1

    def _end_search(self, request: Request) -> None:
        """No answer is left that its beams could become."""
        for beam in request.beams:
            self._steps.release(beam)
        request.beams, request.search, request.num_spare_seats = (), None, 0
