"""The executor process: the main thread computes, the step link's thread talks."""

import contextlib
import os
import signal
import time
from collections import deque
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Final

import torch

from services.executor.costs import measure_costs
from services.executor.devices import Place, place_of
from services.executor.interpreter import Interpreter, Pending
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from services.executor.model.toy import ToyModel
from services.executor.plan_check import BadPlan
from services.executor.pool_plans import plan_pools
from services.executor.runner import Runner
from services.executor.sampler import Drawing
from services.executor.sizing import PoolPlan, available_bytes, logits_bytes
from services.executor.step_link import Errand, Run, StartOver, StepLink, Stop
from services.executor.swap_space import SwapPlan
from shared.curve import client_keys
from shared.errors import SplitflapError, StartError
from shared.guard import Guard
from shared.liveness import new_boot
from shared.logs import get_logger
from shared.messages import Costs, ExecutorReady, StepPlan
from shared.model_source import ModelSource, find_model
from shared.settings import ExecutorSettings

if TYPE_CHECKING:
    from services.executor.gpu.start import GpuStart

_DTYPES: Final = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32
}  # fmt: skip

_LONGEST_WAIT_S: Final = 0.5
_MOST_PENDING: Final = 2
"""Plans launched and not finished; a third waits. Only a GPU has more than none."""
_GLANCE_S: Final = 0.0002
"""While the GPU computes: how often to look whether it is done. The next plan is heard at once."""

_log = get_logger("executor")


class Executor:
    """One executor life. `run` belongs to the thread that computes; `stop` may come from any."""

    def __init__(self, settings: ExecutorSettings, guard: Guard | None = None) -> None:
        self._settings = settings
        self._boot = new_boot()
        self._errands: SimpleQueue[Errand] = SimpleQueue()
        self._link = StepLink(
            settings.step_endpoint,
            self._boot,
            self._errands,
            settings.metrics_address,
            client_keys(settings.curve_key_dir, "executor"),
            guard,
        )
        self.is_loading = True

    def run(self) -> None:
        """Load the model, then carry out plans until told to stop.

        Raises: StartError if the model or its pool cannot be had as configured.
        """
        self._link.start()
        try:
            interpreter = self._load()
            self.is_loading = False
            self._work(interpreter)
        finally:
            self._link.stop()

    def stop(self) -> None:
        """Finish the plans that have come, and end."""
        self._errands.put(Stop())

    def _load(self) -> Interpreter:
        settings = self._settings
        began = time.monotonic()
        torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
        source = find_model(settings.model)
        place = place_of(settings, is_toy=source.is_toy)
        model = self._load_model(source, place)
        gpu = self._gpu(model, place)
        self._link.say("making the pool")
        plan, swap = self._plan_pools(model, gpu)
        pools = KVPools(model, plan.num_blocks, plan.block_size, swap.num_blocks)
        drawing = _fastest_drawing(source)
        runner, costs = self._rehearse(model, pools, plan, drawing, gpu)
        self._link.announce(
            ExecutorReady(
                boot=self._boot,
                model=source.name,
                shape=model.shape,
                block_size=plan.block_size,
                num_gpu_blocks=pools.num_gpu_blocks,
                num_cpu_blocks=pools.num_cpu_blocks,
                max_model_len=plan.max_model_len,
                eos_token_ids=model.eos_token_ids,
                kv_dtype=model.kv_dtype,
                costs=costs,
            )
        )
        _log.info(
            "executor_ready", model=source.name, device=place.value,
            quantization=settings.quantization, kv_dtype=model.kv_dtype,
            threads=torch.get_num_threads(), took_s=round(time.monotonic() - began, 2),
        )  # fmt: skip
        return Interpreter(model, pools, plan.max_model_len, drawing, _tell_failure, runner)

    def _gpu(self, model: DecoderModel, place: Place) -> "GpuStart | None":
        """What runs plans on a GPU, or as one would; None on the CPU."""
        if place is Place.CPU:
            return None
        # Here, as a CPU needs no Triton.
        from services.executor.gpu.start import GpuStart

        return GpuStart(model, place, self._link.say)

    def _load_model(self, source: ModelSource, place: Place) -> DecoderModel:
        if source.is_toy:
            if self._settings.dtype != "auto":
                raise StartError(
                    f"--dtype {self._settings.dtype}: the toy has no dtype; leave it out"
                )
            if self._settings.kv_cache_dtype != "auto":
                raise StartError(
                    f"--kv-cache-dtype {self._settings.kv_cache_dtype}: the toy keeps tokens and "
                    "positions, exactly; leave it out"
                )
            if self._settings.quantization is not None:
                raise StartError(
                    f"--quantization {self._settings.quantization}: the toy has no weights; "
                    "leave it out"
                )
            return ToyModel(self._settings.toy_step_ms / 1000)
        if self._settings.toy_step_ms:
            raise StartError("--toy-step-ms is for --model toy; leave it out")
        # Here, as the toy needs neither kernels nor the time it takes to import them.
        from kernels.select import default_dtype
        from services.executor.model.loader import load_model

        if place is Place.INTERPRETER:
            dtype = torch.float32
        else:
            dtype = _DTYPES.get(self._settings.dtype) or default_dtype(place.device)
        try:
            return load_model(
                *(source, dtype, place.device, self._link.say, self._settings.kv_cache_dtype),
                self._settings.quantization,
                is_interpreted=place is Place.INTERPRETER,
            )
        except SplitflapError:
            raise
        except Exception as error:
            _log.exception("loading_failed", model=source.name)
            raise StartError(
                f"--model {self._settings.model}: loading failed with "
                f"{type(error).__name__}: {error}; the log has the story"
            ) from error

    def _plan_pools(self, model: DecoderModel, gpu: "GpuStart | None") -> tuple[PoolPlan, SwapPlan]:
        settings = self._settings
        gpu_bytes = None
        if gpu is not None:
            gpu_bytes = gpu.bytes_for_pool(
                settings.block_size, settings.max_model_len, settings.gpu_memory_utilization
            )
        main_bytes = max(0, available_bytes() - logits_bytes(model.shape.vocab_size))
        plan, swap = plan_pools(
            *(settings, model.kv_bytes_per_token, model.shape.max_position_embeddings),
            *(main_bytes, gpu_bytes),
        )
        _tell_plans(plan, swap, main_bytes if gpu_bytes is None else gpu_bytes, model)
        return plan, swap

    def _rehearse(
        self,
        model: DecoderModel,
        pools: KVPools,
        plan: PoolPlan,
        drawing: Drawing | None,
        gpu: "GpuStart | None",
    ) -> tuple[Runner | None, Costs]:
        """The GPU's runner, None on the CPU; and what giving way costs."""
        began = time.monotonic()
        runner: Runner | None = None
        if gpu is None:
            self._link.say("measuring")
            costs = measure_costs(
                *(model, plan.block_size, plan.block_bytes, plan.max_model_len),
                can_swap=pools.num_cpu_blocks > 0,
            )
        else:
            runner, costs = gpu.runner(pools, plan.max_model_len, plan.block_bytes, drawing)
        _log.info(
            "costs_measured", block_bytes=costs.block_bytes,
            copy_gb_per_s=round(costs.copy_bytes_per_s / 1e9, 3),
            prefill_tokens_per_s=round(costs.prefill_tokens_per_s),
            took_s=round(time.monotonic() - began, 2),
        )  # fmt: skip
        return runner, costs

    def _work(self, interpreter: Interpreter) -> None:
        pending: deque[tuple[int, Pending]] = deque()

        def tell_first() -> None:
            adoption, first = pending.popleft()
            self._link.send(adoption, interpreter.finish(first))

        while True:
            while pending and (len(pending) == _MOST_PENDING or pending[0][1].is_done()):
                tell_first()
            match self._next_errand(_GLANCE_S if pending else _LONGEST_WAIT_S):
                case Run(adoption, plan):
                    if self._link.is_current(adoption):
                        pending.append((adoption, interpreter.launch(plan)))
                case StartOver():
                    interpreter.forget()
                case Stop(error):
                    if error is not None:
                        raise error
                    while pending:
                        tell_first()
                    return

    def _next_errand(self, longest_s: float) -> Errand | None:
        # Python handles a signal that comes just before a wait only after it: wait in pieces.
        with contextlib.suppress(Empty):
            return self._errands.get(timeout=longest_s)
        return None


def _fastest_drawing(source: ModelSource) -> Drawing | None:
    """What draws tokens; None if NumPy must, or may as well."""
    if source.is_toy:
        return None
    from kernels.select import select_draws
    from services.executor.native_drawing import NativeDrawing

    draws = select_draws()
    return None if draws is None else NativeDrawing(draws)


def _tell_failure(plan: StepPlan, error: Exception) -> None:
    if isinstance(error, BadPlan):
        _log.error("plan_refused", step_id=plan.step_id, reason=str(error))
    else:
        _log.error("plan_failed", step_id=plan.step_id, rows=len(plan.rows), exc_info=error)


def _tell_plans(plan: PoolPlan, swap: SwapPlan, free_bytes: int, model: DecoderModel) -> None:
    if plan.lowered_from is not None:
        _log.warning(
            "max_model_len_lowered", max_model_len=plan.max_model_len,
            of_the_model=plan.lowered_from, why="the pool holds no more",
            longer_with="--kv-cache-memory-bytes",
        )  # fmt: skip
    gib = 2**30
    _log.info(
        str(plan),
        blocks=plan.num_blocks, block_size=plan.block_size, tokens=plan.num_tokens,
        max_model_len=plan.max_model_len, kv_dtype=model.kv_dtype, block_bytes=plan.block_bytes,
        times_auto=None if model.times_auto == 1 else round(model.times_auto, 2),
        pool_gib=round(plan.pool_bytes / gib, 2), free_gib=round(free_bytes / gib, 2),
    )  # fmt: skip
    if swap.why_lowered is not None:
        _log.info("swap_space_lowered", blocks=swap.num_blocks, why=swap.why_lowered)
    _log.info(str(swap), blocks=swap.num_blocks)


def serve(settings: ExecutorSettings) -> None:
    """Run an executor until `Drain`, SIGTERM or SIGINT. Call it in the main thread.

    Raises: StartError if it cannot start as configured.
    """
    with Guard("executor", settings.log_format) as guard:
        executor = Executor(settings, guard)

        def stop(_number: int, _frame: FrameType | None) -> None:
            executor.stop()
            if executor.is_loading:
                raise SystemExit(0)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        executor.run()
    _log.info("executor_ended")
