"""What gateways ask of pinned prefixes: to pin one, to let one go, which there are."""

from collections.abc import Iterator
from typing import Final

from services.scheduler.core.book import Book
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.events import Gateway, PinRequested, PinsListed, UnpinRequested
from services.scheduler.core.flight import SentRow
from services.scheduler.core.intake import Limits
from services.scheduler.core.lifecycle import Change, Status
from services.scheduler.core.pin_budget import (
    RETRY_AFTER_S,
    PrefixBudget,
    check_share,
    lower_limits,
)
from services.scheduler.core.pins import Prefix
from services.scheduler.core.request import Request
from services.scheduler.core.sequence import Finish
from services.scheduler.core.steps import Steps
from services.scheduler.core.streams import Outbox, Streams
from shared.errors import ErrorCode, InvalidField, PromptTooLong, RequestError
from shared.geometry import blocks_in
from shared.ids import RequestId, SequenceId
from shared.messages import Pin, Pinned, Pins, Refused, Unpinned
from shared.sampling import FinishReason, unknown_ids

MOST_PINS: Final = 1024
MOST_ID_CHARACTERS: Final = 256
MOST_CONTEXT_BYTES: Final = 4096  # so that the list of all is far from too long for a message


class PinDesk:
    """Takes, computes and drops pinned prefixes; `book.pins` has them."""

    def __init__(
        self,
        book: Book,
        steps: Steps,
        streams: Streams,
        outbox: Outbox,
        counters: Counters,
        config: SchedulerConfig,
        sequence_ids: Iterator[SequenceId],
    ) -> None:
        self._book = book
        self._steps = steps
        self._streams = streams
        self._outbox = outbox
        self._counters = counters
        self._config = config
        self._sequence_ids = sequence_ids
        self._limits: Limits | None = None
        self._lobby: dict[RequestId, PinRequested] = {}
        """Those that came before any model was known."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept for all pins, computed or not."""
        if self._limits is None:
            return 0
        return sum(map(self._blocks_of, self._book.pins))

    def opened(self, limits: Limits) -> None:
        """An executor says what it can take: pins beyond that are dropped, the oldest are kept."""
        is_new = limits != self._limits
        self._limits = limits
        kept = 0
        for prefix in list(self._book.pins) if is_new else ():
            num_blocks = self._blocks_of(prefix)
            try:
                _check_tokens(prefix.pin, limits)
                check_share(kept, num_blocks, limits)
            except RequestError as error:
                message = f"the executor that came back cannot keep this prefix: {error.message}"
                self._drop(prefix, error.code, message)
            else:
                kept += num_blocks
        waiting, self._lobby = self._lobby, {}
        for event in waiting.values():
            self._admit(event, limits)

    # ----------------------------------------------------------------- what is asked

    def pin(self, event: PinRequested) -> None:
        """A new prefix, or one that is here already and comes again."""
        pin = event.pin
        known = self._book.pins.get(pin.pin_id)
        here = known.pin if known is not None else None
        if pin.pin_id in self._lobby:
            here = self._lobby[pin.pin_id].pin
        if here is not None and not _is_same(pin, here):
            self._refuse(event.gateway, pin.pin_id, InvalidField("id", "another prefix has it"))
        elif known is not None:
            known.gateway = event.gateway
            if known.is_ready:
                self._tell(known)
        elif self._limits is not None:
            self._admit(event, self._limits)
        elif here is None and (error := self._why_full(pin)) is not None:
            self._refuse(event.gateway, pin.pin_id, error)
        else:
            self._lobby[pin.pin_id] = event

    def unpin(self, event: UnpinRequested) -> None:
        """Let a prefix go; a wrong key learns no more than a wrong id."""
        unpin = event.unpin
        known, waiting = self._book.pins.get(unpin.pin_id), self._lobby.get(unpin.pin_id)
        pin = known.pin if known is not None else waiting.pin if waiting is not None else None
        if pin is None or pin.key_hash != unpin.key_hash:
            message = "no prefix with this id is pinned; GET /v1/prefixes lists those that are"
            refused = Refused(unpin.pin_id, ErrorCode.UNKNOWN_PREFIX, message, "id")
            self._outbox.say(event.gateway, refused)
            return
        self._lobby.pop(unpin.pin_id, None)
        if known is not None:
            self._end(known)
        owners = (known or waiting,)
        told = dict.fromkeys((event.gateway, *(one.gateway for one in owners if one is not None)))
        for gateway in told:
            self._outbox.say(gateway, Unpinned(unpin.pin_id))

    def list(self, event: PinsListed) -> None:
        """Those of one key, oldest first."""
        key_hash = event.query.key_hash
        items = [
            prefix.told(self._block_size)
            for prefix in self._book.pins
            if prefix.pin.key_hash == key_hash
        ]
        items += [
            Pinned(one.pin.pin_id, len(one.pin.token_ids), 0, False, context=one.pin.context)
            for one in self._lobby.values()
            if one.pin.key_hash == key_hash
        ]
        self._outbox.say(event.gateway, Pins(event.query.query_id, tuple(items)))

    # ----------------------------------------------------------------- what happens to one

    def computed(self, row: SentRow) -> None:
        """A row of a prefix has returned; if it was the last one the prefix is ready."""
        request, sequence = row.request, row.sequence
        is_whole = row.last == len(sequence.prompt) and sequence.table is row.table
        prefix = self._book.pins.get(request.request_id)
        if prefix is None or not is_whole or request.status is not Status.RUNNING:
            return
        request.num_losses = 0
        self._book.change(request, Change.PIN)
        self._tell(prefix)

    def broken(self, request: Request, finish: Finish) -> None:
        """It cannot be computed: it is dropped, and its gateway hears why."""
        prefix = self._book.pins.get(request.request_id)
        if prefix is not None:
            message = f"this prefix could not be computed: {finish.error}"
            self._drop(prefix, finish.code or ErrorCode.INTERNAL, message)

    # ----------------------------------------------------------------- taking one

    def _admit(self, event: PinRequested, limits: Limits) -> None:
        pin = event.pin
        try:
            _check_tokens(pin, limits)
            if len(self._book.pins) >= MOST_PINS:
                raise _too_many()
            need, before = blocks_in(len(pin.token_ids), limits.block_size), self.num_blocks
            check_share(before, need, limits)
            live = (request for request in self._book if request.is_live)
            lowered = lower_limits(live, before, need, limits)
        except RequestError as error:
            self._refuse(event.gateway, pin.pin_id, error)
            return
        for request, max_tokens in lowered.items():
            request.limit(max_tokens)
            self._streams.accepted(request)
        prefix = Prefix(pin, event.gateway, next(self._sequence_ids))
        self._book.pin(prefix)
        self._steps.prepare(prefix.request)
        self._counters.pins_taken += 1

    def _why_full(self, pin: Pin) -> RequestError | None:
        """Why one more may not wait for a model to be known."""
        num_tokens = sum(len(one.pin.token_ids) for one in self._lobby.values())
        if len(self._lobby) >= MOST_PINS:
            return _too_many()
        try:
            _check_form(pin)
        except InvalidField as error:
            return error
        if self._lobby and num_tokens + len(pin.token_ids) > self._config.max_num_queued_tokens:
            message = "no model is loaded yet, and many prefixes wait already; try again later"
            return PrefixBudget(message, RETRY_AFTER_S)
        return None

    # ----------------------------------------------------------------- small things

    @property
    def _block_size(self) -> int:
        return self._limits.block_size if self._limits is not None else 0

    def _blocks_of(self, prefix: Prefix) -> int:
        return blocks_in(len(prefix.pin.token_ids), self._block_size)

    def _end(self, prefix: Prefix) -> None:
        """Its blocks are kept no longer; requests that share some keep those."""
        request = prefix.request
        for sequence in request.sequences:
            sequence.finish = Finish(FinishReason.ABORT)
            self._steps.release(sequence)
        self._book.change(request, Change.END)
        self._book.pins.remove(prefix)

    def _drop(self, prefix: Prefix, code: ErrorCode, message: str) -> None:
        self._end(prefix)
        self._counters.pins_dropped += 1
        self._outbox.say(prefix.gateway, Refused(prefix.pin.pin_id, code, message))

    def _tell(self, prefix: Prefix) -> None:
        self._outbox.say(prefix.gateway, prefix.told(self._block_size))

    def _refuse(self, gateway: Gateway, pin_id: RequestId, error: RequestError) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, PrefixBudget) else None
        self._counters.pins_refused[error.code] += 1
        refused = Refused(pin_id, error.code, error.message, error.param, retry_after_s)
        self._outbox.say(gateway, refused)


def _check_form(pin: Pin) -> None:
    """Raises: InvalidField for what would be too long to tell again."""
    if len(pin.pin_id) > MOST_ID_CHARACTERS:
        raise InvalidField("id", f"has over {MOST_ID_CHARACTERS} characters")
    if len(pin.context) > MOST_CONTEXT_BYTES:
        raise InvalidField("context", f"has over {MOST_CONTEXT_BYTES} bytes")
    if not pin.token_ids:
        raise InvalidField("prompt", "is empty; send at least one token")


def _check_tokens(pin: Pin, limits: Limits) -> None:
    """Raises: InvalidField or PromptTooLong."""
    _check_form(pin)
    if len(pin.token_ids) >= limits.max_model_len:
        raise PromptTooLong(len(pin.token_ids), limits.max_model_len)
    if unknown := unknown_ids(pin.token_ids, limits.vocab_size):
        raise InvalidField(
            "prompt",
            f"token id {unknown[0]} is not in the vocabulary (0..{limits.vocab_size - 1})",
        )


def _too_many() -> PrefixBudget:
    return PrefixBudget(f"{MOST_PINS} prefixes are pinned, as many as may be: delete one first")


def _is_same(pin: Pin, here: Pin) -> bool:
    """Whether this is the prefix that is here already."""
    return (pin.token_ids, pin.cache_salt, pin.key_hash) == (
        here.token_ids,
        here.cache_salt,
        here.key_hash,
    )
