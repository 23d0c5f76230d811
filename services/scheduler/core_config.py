"""What of the process's settings the core is told."""

from services.scheduler.core.config import SchedulerConfig
from shared.ids import Boot
from shared.settings import SchedulerSettings


def core_config_of(settings: SchedulerSettings, boot: Boot) -> SchedulerConfig:
    """The core's part of them, for one life. Raises: StartError if a value cannot work."""
    return SchedulerConfig(
        boot=boot,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        watermark=settings.watermark,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        preemption_mode=settings.preemption_mode,
        enable_prefix_caching=settings.enable_prefix_caching,
        scheduling_policy=settings.scheduling_policy,
        max_pinned_share=settings.max_pinned_share,
        enable_kv_bill=settings.enable_kv_bill,
        plans_in_flight=settings.plans_in_flight,
        stream_ttl_s=settings.stream_ttl,
        max_detached_streams=settings.max_detached_streams,
        max_detached_bytes=settings.max_detached_bytes,
    )
