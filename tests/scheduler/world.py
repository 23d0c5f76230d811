"""A scheduler server on real sockets, a clock that stands still, and peers that speak to it."""

import asyncio
import contextlib

from services.scheduler.server import SchedulerServer
from shared.geometry import ModelShape
from shared.ids import Boot
from shared.links import Dealer, Router
from shared.messages import (
    FROM_EXECUTOR,
    TO_EXECUTOR,
    TO_GATEWAY,
    TO_SCHEDULER,
    Adopt,
    Costs,
    ExecutorReady,
    Hello,
    Sampled,
    StepPlan,
    StepResult,
    Submit,
)
from shared.sampling import SamplingParams
from shared.settings import SchedulerSettings

READY = ExecutorReady(
    boot=Boot(5), model="toy", shape=ModelShape(1, 1, 1, 8, 8, 512, 8192), block_size=4,
    num_gpu_blocks=32, num_cpu_blocks=0, max_model_len=64, eos_token_ids=(256,), kv_dtype="int32",
    costs=Costs(32, 1e9, 1e3),
)  # fmt: skip
PATIENCE_S = 120  # of a machine that has much else to do; nothing is measured by it
SUBMIT = Submit("cmpl-1", (65, 66, 67), SamplingParams(max_tokens=2, ignore_eos=True))


class World:
    """A scheduler server, a clock that stands still, and peers that speak the protocol."""

    def __init__(self, folder, **settings):
        self.now = 100.0
        self._requests = f"ipc://{folder}/r"
        self._steps = f"ipc://{folder}/s"
        self._open = contextlib.ExitStack()
        self._peers = []
        self.server = SchedulerServer(
            SchedulerSettings(**settings),
            self._open.enter_context(Router("request", self._requests, TO_SCHEDULER)),
            self._open.enter_context(Router("step", self._steps, FROM_EXECUTOR)),
            clock=lambda: self.now,
        )
        self._task = asyncio.create_task(self.server.run())

    def peer(self, link, identity):
        endpoint, accepted = (
            (self._requests, TO_GATEWAY) if link == "request" else (self._steps, TO_EXECUTOR)
        )
        peer = Dealer(link, endpoint, accepted, identity=identity)
        self._peers.append(peer)
        return peer

    def leave(self, peer):
        """It closes its socket, and says nothing."""
        self._peers.remove(peer)
        peer.close()

    async def gateway(self, identity=b"g1"):
        peer = self.peer("request", identity)
        await say(peer, Hello(Boot(9)))
        return peer

    async def executor(self, identity=b"e5", ready=READY):
        peer = self.peer("step", identity)
        await say(peer, ready)
        assert await hear(peer, Adopt) == Adopt(self.server.boot)
        return peer

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for peer in self._peers:
            peer.close()
        self._open.close()


async def say(peer, message):
    while not peer.send(message):  # not connected yet
        await asyncio.sleep(0.01)


async def hear(peer, kind):
    """The next message of a kind, whatever comes between."""
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(message := await peer.receive(), kind):
            pass
        return message


async def until(holds):
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


async def run_plan(executor, token_id=70):
    """Answer the next plan: every sample draws `token_id`."""
    plan = await hear(executor, StepPlan)
    await answer(executor, plan, token_id)
    return plan


async def answer(executor, plan, token_id=70):
    """Answer this plan."""
    samples = [sample for row in plan.rows for sample in row.samples]
    drawn = tuple(Sampled(sample.sequence_id, token_id) for sample in samples)
    await say(executor, StepResult(plan.boot, plan.step_id, drawn))
