"""What the scheduler is told at its start."""

from dataclasses import dataclass
from typing import Final

from shared.errors import StartError
from shared.ids import Boot
from shared.messages import MAX_SCORED_TOKENS

PREEMPTION_MODES: Final = ("auto", "swap", "recompute")
SCHEDULING_POLICIES: Final = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of one scheduler life.

    Raises: StartError, naming the flag, for a value that cannot work.

    Attributes:
        boot: of this life; every plan carries it, results of another are dropped.
        max_num_seqs: most sequences that run together. Default: vLLM's.
        max_num_batched_tokens: most tokens one step computes; it bounds the running sequences too.
        watermark: share of the pool a start leaves free for those who go on. Default: vLLM v0's.
        plans_in_flight: plans sent ahead of their results, 1 or 2.
        preemption_mode: what becomes of a victim's blocks: auto, swap or recompute.
        enable_prefix_caching: whether full blocks are kept for prompts that begin alike.
        scheduling_policy: who is served first: fcfs, or by priority and then fcfs.
        max_pinned_share: share of the pool's blocks that pinned prefixes may hold, 0 to below 1.
        enable_kv_bill: whether each request's cost in blocks is counted and told in its usage.
        max_scored_tokens: most prompt tokens whose log-probabilities one step reports.
        max_num_queued_reqs: most requests that wait for their first step; more are refused.
        max_num_queued_tokens: most prompt tokens that these may have together.
        stream_ttl_s: how long a request outlives its stream's last reader, or its own end if that
            comes later; one that still runs is cancelled then.
        max_detached_streams: most requests without a reader that are kept.
        max_detached_bytes: most memory that these may take, about.
    """

    boot: Boot
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    watermark: float = 0.01
    plans_in_flight: int = 1
    preemption_mode: str = "auto"
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_pinned_share: float = 0.5
    enable_kv_bill: bool = False
    max_scored_tokens: int = MAX_SCORED_TOKENS
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int = 4 * 2**20
    stream_ttl_s: float = 300.0
    max_detached_streams: int = 4096
    max_detached_bytes: int = 256 * 2**20

    @property
    def most_sequences(self) -> int:
        """Most sequences that can run together: each has a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise StartError(f"--max-num-seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < 1:
            raise StartError(
                f"--max-num-batched-tokens must be at least 1, not {self.max_num_batched_tokens}"
            )
        if not 0 <= self.watermark < 1:
            raise StartError(f"--watermark must be from 0 to below 1, not {self.watermark}")
        if self.plans_in_flight not in (1, 2):
            raise StartError(f"--plans-in-flight must be 1 or 2, not {self.plans_in_flight}")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise StartError(
                f"--preemption-mode must be one of {', '.join(PREEMPTION_MODES)}, "
                f"not {self.preemption_mode}"
            )
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise StartError(
                f"--scheduling-policy must be one of {', '.join(SCHEDULING_POLICIES)}, "
                f"not {self.scheduling_policy}"
            )
        if not 0 <= self.max_pinned_share < 1:
            raise StartError(
                f"--max-pinned-share must be from 0 to below 1, not {self.max_pinned_share}"
            )
        if not 1 <= self.max_scored_tokens <= MAX_SCORED_TOKENS:
            raise StartError(
                f"max_scored_tokens must be from 1 to {MAX_SCORED_TOKENS}, "
                f"not {self.max_scored_tokens}"
            )
        for name in (
            "max_num_queued_reqs", "max_num_queued_tokens", "max_detached_streams",
            "max_detached_bytes",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise StartError(f"{flag} must be at least 1, not {getattr(self, name)}")
        if not self.stream_ttl_s > 0:
            raise StartError(f"--stream-ttl must be above 0 seconds, not {self.stream_ttl_s}")
