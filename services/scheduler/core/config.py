"""What the scheduler is told at its start."""

from dataclasses import dataclass

from shared.errors import StartError
from shared.ids import Boot
from shared.messages import MAX_SCORED_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of one scheduler life.

    Raises: StartError, naming the flag, for a value that cannot work.

    Attributes:
        boot: of this life; every plan carries it, results of another are dropped.
        max_num_seqs: most sequences that run together. Default: vLLM's.
        max_num_batched_tokens: most tokens one step computes; it bounds the running sequences too.
        watermark: share of the pool a start leaves free for those who go on. Default: vLLM v0's.
        plans_in_flight: plans sent ahead of their results; one is all there is for now.
        max_scored_tokens: most prompt tokens whose log-probabilities one step reports.
        max_num_queued_reqs: most requests that wait for their first step; more are refused.
        max_num_queued_tokens: most prompt tokens that these may have together.
        stream_ttl_s: how long the log of a finished request outlives its gateway's last sign.
    """

    boot: Boot
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    watermark: float = 0.01
    plans_in_flight: int = 1
    max_scored_tokens: int = MAX_SCORED_TOKENS
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int = 4 * 2**20
    stream_ttl_s: float = 300.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise StartError(f"--max-num-seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < 1:
            raise StartError(
                f"--max-num-batched-tokens must be at least 1, not {self.max_num_batched_tokens}"
            )
        if not 0 <= self.watermark < 1:
            raise StartError(f"--watermark must be from 0 to below 1, not {self.watermark}")
        if self.plans_in_flight != 1:
            raise StartError(f"--plans-in-flight can only be 1 yet, not {self.plans_in_flight}")
        if not 1 <= self.max_scored_tokens <= MAX_SCORED_TOKENS:
            raise StartError(
                f"max_scored_tokens must be from 1 to {MAX_SCORED_TOKENS}, "
                f"not {self.max_scored_tokens}"
            )
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise StartError(f"{flag} must be at least 1, not {getattr(self, name)}")
        if not self.stream_ttl_s > 0:
            raise StartError(f"--stream-ttl must be above 0 seconds, not {self.stream_ttl_s}")
