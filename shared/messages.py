"""Every message, by link and direction. Frozen; laws and pictures: docs/protocol.md.

    gateway   --TO_SCHEDULER-->  scheduler  --TO_EXECUTOR-->    executor
              <--TO_GATEWAY---              <--FROM_EXECUTOR--

The envelope on the wire is msgpack `[version, tag, [fields]]` (shared/codec.py); the tag is the
class name. Ids are always ours; `boot` numbers are compared for equality only.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from shared.errors import ErrorCode
from shared.geometry import ModelShape
from shared.ids import BlockId, Boot, Ids, RequestId, SequenceId
from shared.sampling import DrawParams, FinishReason, SamplingParams

# --------------------------------------------------------------------------- both links


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How many tokens of each choice of a request its gateway holds."""

    request_id: RequestId
    positions: Ids


class Activity(StrEnum):
    """What a scheduler that is ready is doing. STALLED: no step has come back for long."""

    IDLE = "idle"
    BUSY = "busy"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live. `phase` says what I am doing while not ready ("" = ready).

    A gateway lists its open streams: what a full or lost connection swallowed is sent again.
    `activity` is the scheduler's.
    """

    boot: Boot
    phase: str = ""
    streams: tuple[StreamPosition, ...] = ()
    activity: Activity = Activity.IDLE


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities (raw distribution) of one place in a text.

    `chosen` is the token that stands there and `rank` its rank (1 is the likeliest); `top_ids` are
    the likeliest tokens, best first, of equals the smaller id first, and `top` theirs.
    """

    chosen: float
    rank: int
    top_ids: Ids = ()
    top: tuple[float, ...] = ()


# --------------------------------------------------------------------------- request link, up


@dataclass(frozen=True, slots=True)
class Hello:
    """A gateway presents itself; answered by `Welcome` once a model is loaded."""

    boot: Boot


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """What one sequence of a resubmitted request has delivered already.

    `logprobs` has an entry a token if the request asks for them.
    """

    token_ids: Ids
    finish: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate for `prompt`; with `generated`, go on from there (after a scheduler restart).

    `prompt_logprobs` are those of prompt[1:], if they were asked for and delivered already.
    `context` is the gateway's own, given back by `Attached`; `key_hash` guards it. Without one it
    cannot be attached to, so nothing of it outlives its gateway. `age_s` is how
    long ago the client asked; it restores the place in the queue and the deadline. `resubmitted`
    says that an earlier scheduler life had accepted the request: no queue limit refuses it now.
    """

    request_id: RequestId
    prompt: Ids
    sampling: SamplingParams
    generated: tuple[GeneratedSequence, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    age_s: float = 0.0
    context: bytes = b""
    key_hash: bytes = b""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    resubmitted: bool = False


@dataclass(frozen=True, slots=True)
class Pin:
    """Compute `token_ids` and keep their blocks for good: a prefix that many prompts begin with.

    Requests of the same `key_hash` and `cache_salt` share them. Answered by `Pinned` once they are
    computed, or by `Refused`. The same `pin_id` again is answered again. `context` is the
    gateway's own, given back by `Pinned` and `Pins`.
    """

    pin_id: RequestId
    token_ids: Ids
    cache_salt: str = ""
    key_hash: bytes = b""
    context: bytes = b""


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let a pinned prefix go: answered by `Unpinned`, or by `Refused` (UNKNOWN_PREFIX)."""

    pin_id: RequestId
    key_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class ListPins:
    """Which prefixes of this key are pinned? Answered by `Pins` with the same `query_id`."""

    query_id: RequestId
    key_hash: bytes = b""


class CancelReason(StrEnum):
    """Why a gateway gives up a sequence or a request."""

    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop now and free the blocks. `sequence` None is the whole request.

    STOP_STRING is answered by `Finished` (reason stop) per sequence; CLIENT_GONE by nothing, and
    the request is forgotten.
    """

    request_id: RequestId
    sequence: int | None
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class Attach:
    """This gateway takes over the stream of a request; answered by `Attached` or `Refused`."""

    request_id: RequestId
    key_hash: bytes


@dataclass(frozen=True, slots=True)
class Detach:
    """Nobody reads this stream now, but somebody may `Attach` to it: keep it for a while.

    `is_told`: its client was told all of it, and comes back only if the last of that was lost.
    A request without a context is forgotten. Nothing answers this.
    """

    request_id: RequestId
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """Everything of this request has reached its client: the token log may go."""

    request_id: RequestId


# --------------------------------------------------------------------------- request link, down


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a gateway must know of the model that is served."""

    boot: Boot
    model: str
    shape: ModelShape
    block_size: int
    max_model_len: int
    eos_token_ids: Ids


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request waits or runs. `max_tokens` is what it may generate (lowered if defaulted)."""

    request_id: RequestId
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokenRun:
    """New tokens of one sequence; `start` is the index of the first among those generated.

    `logprobs` has an entry a token if the request asks for them. `prompt_logprobs`, those of
    prompt[1:], come with every run of sequence 0 that starts at 0 if the request asks for them;
    where nothing is to be generated such a run has no tokens.
    """

    request_id: RequestId
    sequence: int
    start: int
    token_ids: Ids
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """All that one step made for one gateway."""

    items: tuple[TokenRun, ...]


@dataclass(frozen=True, slots=True)
class KVBill:
    """What a request cost so far in blocks of the KV pool, over all its sequences.

    Attributes:
        peak_blocks: most different blocks that it held at once.
        peak_saved_blocks: most that it would have held beyond those, had its sequences not shared.
        sharing_saved: blocks without sharing minus blocks used, over blocks without sharing, each
            summed over its steps; 0 to 1.
        copied_blocks: copy-on-write.
        swapped_bytes: to the CPU pool and back, both ways counted.
    """

    peak_blocks: int
    peak_saved_blocks: int
    sharing_saved: float
    copied_blocks: int
    preemptions_swap: int
    preemptions_recompute: int
    swapped_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost so far, in tokens; with `--enable-kv-bill` in blocks too."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    bill: KVBill | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended with `length` generated tokens; repeated until `Done`.

    With reason error, `error` says what happened and `code` what kind of thing it was.
    """

    request_id: RequestId
    sequence: int
    reason: FinishReason
    length: int
    usage: Usage
    stop_token_id: int | None = None
    error: str | None = None
    code: ErrorCode | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is not taken; nothing of it is kept.

    Also the answer to a heartbeat or `Attach` that names a request unknown here (UNKNOWN_REQUEST:
    submit it again) or one that another gateway has taken over (MOVED: let it go).
    """

    request_id: RequestId
    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class AttachedSequence:
    """All of one sequence so far."""

    token_ids: Ids
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """The stream is yours: all there is so far; the rest follows as `Tokens` and `Finished`.

    `submit` is the request as it would be resubmitted, but for what it has generated. `Accepted`
    and, for each sequence that is over, `Finished` come right after this.
    """

    submit: Submit
    sequences: tuple[AttachedSequence, ...]
    cached_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    @property
    def request_id(self) -> RequestId:
        """Whose stream it is."""
        return self.submit.request_id


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned prefix.

    `num_blocks` hold it, the last one perhaps in part; `num_hits` requests have begun with it so
    far. While it is not `is_ready` its tokens are computed, or computed again.
    """

    pin_id: RequestId
    num_tokens: int
    num_blocks: int
    is_ready: bool
    num_hits: int = 0
    context: bytes = b""


@dataclass(frozen=True, slots=True)
class Unpinned:
    """This prefix is pinned no more; said to who asked, and to the gateway that pinned it."""

    pin_id: RequestId


@dataclass(frozen=True, slots=True)
class Pins:
    """The answer to `ListPins`: oldest first."""

    query_id: RequestId
    items: tuple[Pinned, ...]


# --------------------------------------------------------------------------- step link, down

PREVIOUS: Final = -1
"""In `Row.token_ids`: the token this sequence sampled in the plan before."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """The scheduler takes this executor; plans of another scheduler boot are dropped."""

    scheduler_boot: Boot


class PreemptionMode(StrEnum):
    """What becomes of a victim's blocks."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Preemption:
    """This sequence gave way; what the executor remembers of it may go."""

    sequence_id: SequenceId
    mode: PreemptionMode


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one whole block from one pool or place to another (swap out, swap in, copy)."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw one token from a row's last logits, or report log-probabilities, or both.

    With `num_top` the log-probability of the token drawn and the `num_top` best (0 or more) are
    reported, of the raw distribution.

    `index` is the sequence's number within its request; the draw is a function of (`seed`,
    `index`, position in the sequence, prompt included). `history` is all tokens before the draw,
    prompt first (`num_prompt` of it), sent only when `draw.needs_history`; where the row says
    PREVIOUS its last entry is PREVIOUS too.

    With `draw` None nothing is drawn, as for a beam: `num_top` likeliest tokens are reported, and
    `chosen` and `rank` are the likeliest one's. `index`, `seed` and the rest are then 0 or empty.
    """

    sequence_id: SequenceId
    index: int
    seed: int
    draw: DrawParams | None
    history: Ids = ()
    num_prompt: int = 0
    banned_ids: Ids = ()
    num_top: int | None = None


MAX_SCORED_TOKENS: Final = 256
"""Most tokens that the scores of one plan may ask for: each needs logits of its own."""


@dataclass(frozen=True, slots=True)
class Score:
    """Report the log-probability of token_ids[i] as the token after position first_position + i.

    With each the `num_top` likeliest at its place (0 or more). The positions are the row's own.
    """

    first_position: int
    token_ids: Ids
    num_top: int


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `token_ids` of one sequence at `first_position`...; then draw its `samples`.

    `block_table` covers every place up to the last of these tokens. `score` asks for
    log-probabilities of tokens that are known already: a prompt's.
    """

    sequence_id: SequenceId
    token_ids: Ids
    first_position: int
    block_table: Ids
    samples: tuple[Sample, ...] = ()
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, complete: swap out -> swap in -> copy -> forward -> sample, in this order."""

    boot: Boot
    step_id: int
    rows: tuple[Row, ...]
    preemptions: tuple[Preemption, ...] = ()
    swap_out: tuple[Move, ...] = ()
    swap_in: tuple[Move, ...] = ()
    copies: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish the plans in flight, take no more, and exit."""


# --------------------------------------------------------------------------- step link, up


@dataclass(frozen=True, slots=True)
class Costs:
    """What giving way costs on this machine, as measured by the executor at its start.

    `block_bytes` are those of one block over all layers, `copy_bytes_per_s` the rate of a move
    between the two pools, `prefill_tokens_per_s` that of a prompt. A rate of 0 is not known.
    """

    block_bytes: int
    copy_bytes_per_s: float
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ExecutorReady:
    """The model is loaded and the pools are there; sent until `Adopt` comes."""

    boot: Boot
    model: str
    shape: ModelShape
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    max_model_len: int
    eos_token_ids: Ids
    kv_dtype: str
    costs: Costs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of one `Sample`; `token_id` None where nothing was drawn."""

    sequence_id: SequenceId
    token_id: int | None
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """The outcome of a row's `Score`: one entry a token of it."""

    sequence_id: SequenceId
    first_position: int
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RowError:
    """This row (a sequence) failed alone, for example with NaN logits.

    `code` INVALID: by what the request asked, for example a draw of which everything is excluded.
    """

    sequence_id: SequenceId
    message: str
    code: ErrorCode = ErrorCode.INTERNAL


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Seconds spent in each part of a step."""

    swap_s: float = 0.0
    copy_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one plan made; exactly one per plan, in plan order. `boot` is the plan's."""

    boot: Boot
    step_id: int
    sampled: tuple[Sampled, ...]
    row_errors: tuple[RowError, ...] = ()
    scored: tuple[Scored, ...] = ()
    timings: StepTimings = StepTimings()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The executor refused or could not run this plan; nothing of it may be relied on."""

    boot: Boot
    step_id: int
    message: str


# --------------------------------------------------------------------------- who may say what

GatewayMessage: TypeAlias = (
    Heartbeat | Hello | Submit | Cancel | Attach | Detach | Done | Pin | Unpin | ListPins
)
SchedulerReply: TypeAlias = (
    Heartbeat
    | Welcome
    | Accepted
    | Tokens
    | Finished
    | Refused
    | Attached
    | Pinned
    | Unpinned
    | Pins
)
ExecutorMessage: TypeAlias = Heartbeat | ExecutorReady | StepResult | StepFailed
StepCommand: TypeAlias = Heartbeat | Adopt | StepPlan | Drain

TO_SCHEDULER: Final = (
    Heartbeat, Hello, Submit, Cancel, Attach, Detach, Done, Pin, Unpin, ListPins
)  # fmt: skip
TO_GATEWAY: Final = (
    Heartbeat, Welcome, Accepted, Tokens, Finished, Refused, Attached, Pinned, Unpinned, Pins
)  # fmt: skip
FROM_EXECUTOR: Final = (Heartbeat, ExecutorReady, StepResult, StepFailed)
TO_EXECUTOR: Final = (Heartbeat, Adopt, StepPlan, Drain)
