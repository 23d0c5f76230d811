"""An answer as the events of a stream: OpenAI's chunks, and what a client asked for beside them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from services.gateway import sse
from services.gateway.answer_stream import Piece
from services.gateway.answers import Answer, usage_fields
from services.gateway.call import Call
from services.gateway.choice import Choice
from services.gateway.echo import placed_prompt
from services.gateway.event_id import Place, Told, last_event_id
from services.gateway.json_portions import LongList, is_long
from services.gateway.logprob_fields import LogprobFields
from services.gateway.progress import Progress
from services.gateway.text_event import TextEvent
from services.gateway.token_names import TokenNames
from services.gateway.tokenizer import Tokenizer
from shared.ids import Ids
from shared.messages import KVBill


class StreamEvents:
    """A pure function of the pieces, in whatever portions they came.

    An event tells the text, the log-probabilities and the ids of exactly the tokens that came
    since the event of that choice before it; its SSE id counts all that came (`event_id.py`). With
    log-probabilities, tokens of which all text is held back are told with that text.

    What its client has been told already, by another gateway perhaps, is `told`: all pieces are
    fed from the first, and only what comes after that is told.
    """

    def __init__(
        self,
        call: Call,
        answer: Answer,
        progress: Progress,
        tokenizer: Tokenizer,
        told: Told | None = None,
    ) -> None:
        self._call = call
        self._answer = answer
        self._progress = progress
        self._tokenizer = tokenizer
        num_top = call.sampling.logprobs or 0
        names = TokenNames(tokenizer, as_ids=call.tokens_as_ids)
        self._logprobs = LogprobFields(call.endpoint, num_top, names)
        self._is_done = told is not None and told.is_done
        places = _places(told, len(progress.choices))
        self._positions = list(map(str, places))
        self._known = {
            index: place for index, place in enumerate(places) if place.num_tokens or place.has_text
        }
        """Choices of which the client has more than the tokens fed so far have let out."""
        self._num_told = sum(place.num_tokens for place in self._known.values())
        options = call.stream
        self._opens_later = call.echo and call.sampling.logprobs is not None
        """Whether the first events wait for what the scheduler sends with the first token."""
        self._is_plain = not (
            call.return_token_ids
            or call.sampling.logprobs is not None
            or (options is not None and options.include_usage and options.continuous_usage)
        )
        """Whether the events between a choice's first and last tell its text alone."""
        self._text_events: dict[int, TextEvent] = {}
        self._unopened = {index for index, place in enumerate(places) if not place.is_open}
        """Choices whose first event is still to come."""

    def _awaits_prompt(self, index: int) -> bool:
        return self._opens_later and index in self._unopened

    def _prompt_ids(self, index: int) -> Ids:
        return self._progress.prompt_of(index).token_ids

    def opening(self) -> Iterator[bytes]:
        """What a client gets before the model has computed anything, in portions."""
        if self._answer.endpoint == "completion" and (not self._call.echo or self._opens_later):
            yield sse.PING
            return
        for index in sorted(self._unopened):
            yield from self._first(index)

    def of(self, index: int, piece: Piece) -> Iterator[bytes]:
        """The events that a piece of a choice lets out, maybe none, in portions.

        Raises: Failure if the choice ended with an error; `broken_off` has what came with it.
        """
        choice = self._progress.choices[index]
        if choice.ending is not None:
            return
        if index in self._known:
            rest = self._replay(index, piece)
            if choice.ending is not None and not self._positions[index].endswith("e"):
                yield from self._told(index, choice, is_last=True)
            if rest is None or choice.ending is not None:
                return
            piece = rest
        num_scored = 1 + len(piece.prompt_logprobs)
        if self._awaits_prompt(index) and num_scored >= len(self._prompt_ids(index)):
            yield from self._first(index, piece)
        self._progress.feed(index, piece)
        if self._awaits_prompt(index):
            return  # another choice failed before the prompt was computed
        if choice.is_due:
            yield from self._told(index, choice)
        if choice.ending is not None:
            yield from self._told(index, choice, is_last=True)

    def _replay(self, index: int, piece: Piece) -> Piece | None:
        """Feed what the client knows of a choice; what is left of the piece, if that was all.

        Raises: Failure if the choice ended with an error.
        """
        choice, known = self._progress.choices[index], self._known[index]
        num_known = known.num_tokens - choice.num_tokens
        rest = None
        if not known.has_text and len(piece.token_ids) >= num_known:
            rest = replace(
                piece, token_ids=piece.token_ids[num_known:], logprobs=piece.logprobs[num_known:]
            )
            piece = replace(
                piece,
                token_ids=piece.token_ids[:num_known],
                logprobs=piece.logprobs[:num_known],
                finished=None,
            )
        self._progress.feed(index, piece)
        if rest is not None or choice.ending is not None:
            self._num_told += len(choice.delta().token_ids) - known.num_tokens
            del self._known[index]
        return rest

    def broken_off(self) -> Iterator[bytes]:
        """What is to be told before an error: of each choice that has not ended, all that came."""
        for index, choice in enumerate(self._progress.choices):
            if index in self._known:
                continue
            if choice.break_off() and not self._awaits_prompt(index):
                yield from self._told(index, choice, is_cut=True)

    def usage(self, num_cached: int, bills: Sequence[KVBill] = ()) -> bytes:
        """What comes before [DONE] for who asked for it."""
        if self._is_done:
            return b""
        progress = self._progress
        usage = usage_fields(progress.num_prompt_tokens, progress.num_tokens, num_cached, bills)
        return sse.event(
            self._answer.chunk((), usage=usage), last_event_id(self._answer.request_id)
        )

    # ------------------------------------------------------------------ events

    def _first(self, index: int, piece: Piece | None = None) -> Iterable[bytes]:
        """A chat's role or an echoed prompt."""
        if self._answer.endpoint == "chat":
            return self._event(index, self._answer.role(index))
        prompt = self._progress.prompt_of(index)
        logprobs = None
        if piece is not None:
            placed = placed_prompt(self._tokenizer, prompt, piece.prompt_logprobs)
            logprobs = self._logprobs.of(placed)
        extras: dict[str, Any] = {"token_ids": []} if self._call.return_token_ids else {}
        return self._event(index, self._answer.text(index, prompt.text, logprobs, **extras))

    def _told(
        self, index: int, choice: Choice, *, is_last: bool = False, is_cut: bool = False
    ) -> Iterable[bytes]:
        delta = choice.delta()
        self._num_told += len(delta.token_ids)
        state = "e" if is_last else "t" if is_cut or choice.ending is not None else ""
        self._positions[index] = f"{choice.num_tokens}{state}"
        if self._is_plain and not is_last and index not in self._unopened:
            return (self._text_event(index).of(delta.text, self._positions),)
        logprobs = self._logprobs.of(delta.placed)
        extras = {"token_ids": delta.token_ids} if self._call.return_token_ids else {}
        if is_last and choice.ending is not None:
            fields = self._answer.end(index, choice.ending, logprobs, **extras)
        else:
            fields = self._answer.text(index, delta.text, logprobs, **extras)
        return self._event(index, fields)

    def _event(self, index: int, choice: dict[str, Any]) -> Iterable[bytes]:
        extras: dict[str, Any] = {}
        if index in self._unopened:
            self._unopened.discard(index)
            if self._positions[index] == "-":
                self._positions[index] = "0"
            if self._call.return_token_ids:
                where = extras if self._answer.endpoint == "chat" else choice
                where["prompt_token_ids"] = self._prompt_ids(index)
        extras.update(self._usage_so_far())
        if not is_long(choice):
            return (self._answer.event(self._answer.chunk((choice,), **extras), self._positions),)
        chunk = self._answer.chunk(LongList((choice,), at_a_time=1), **extras)
        return self._answer.event_portions(chunk, self._positions)

    def _text_event(self, index: int) -> TextEvent:
        event = self._text_events.get(index)
        if event is None:
            event = TextEvent(self._answer, index, self._usage_so_far())
            self._text_events[index] = event
        return event

    def _usage_so_far(self) -> dict[str, Any]:
        """What stands beside the choices for who asked for the usage."""
        options = self._call.stream
        if options is None or not options.include_usage:
            return {}
        if not options.continuous_usage:
            return {"usage": None}
        return {"usage": usage_fields(self._progress.num_prompt_tokens, self._num_told)}


def _places(told: Told | None, num_choices: int) -> Sequence[Place]:
    """Of each choice; a client that has something of other choices than these has nothing."""
    if told is not None and told.is_done:
        return [Place(is_open=True, has_text=True, has_end=True)] * num_choices
    if told is None or len(told.places) != num_choices:
        return [Place()] * num_choices
    return told.places
