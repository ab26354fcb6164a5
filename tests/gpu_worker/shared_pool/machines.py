"""A machine on which runners take each other's pools over, with pools in host memory or on a GPU.

All runners are in this process. One dies by not being used again; a list of pools of dead users stands for the holder.
Without a GPU the card's driver is `fake_libcuda.py`, and the runners compute on the CPU, on the same addresses.
"""

from dataclasses import dataclass, field

import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.attention.layers import LayerMap
from gpu_worker.cuda.graphs import CudaGraphs
from gpu_worker.geometry import Geometry
from gpu_worker.graphs import GraphBackend
from gpu_worker.shared_pool.cuda_driver import Driver, cuda_driver
from gpu_worker.shared_pool.device_pool import DevicePool
from gpu_worker.shared_pool.pool import SharedPool, WorkerPool
from gpu_worker.wire.frames import Outcome
from tests.gpu_worker.cuda_memory.fake_libcuda import FakeCard, FakeLibcuda
from tests.gpu_worker.plans import TinyCore
from tests.gpu_worker.rig import Rig, RigSpec
from tests.gpu_worker.shared_pool.fake_holder import FakeHolder

SPEC = RigSpec(page_size=16, group=1, head_dim=64, family="llama", chunk_align=32)
PAGE, PROMPT = SPEC.page_size, 3 * SPEC.page_size + 5
CPU = torch.device("cpu")


@dataclass(kw_only=True)
class Host:
    """Pools in host memory."""

    spec: RigSpec = SPEC
    device: torch.device = CPU
    holder: FakeHolder = field(default_factory=FakeHolder)

    def rig(self, *, is_whole: bool = False, identity: str = "model", spec: RigSpec | None = None) -> Rig:
        """A runner that has joined. is_whole: its pool has memory at once; a pool on the host always has."""

        def pool_of(layers: LayerMap, geometry: Geometry, dtype: torch.dtype) -> WorkerPool:
            return self.pool(layers, geometry, dtype, identity, is_whole)

        rig = Rig(spec or self.spec, self.device, pool_of, graphs=self.graphs())
        rig.runner.join(pb.Joined(generation=rig.core().generation))
        return rig

    def pool(
        self, layers: LayerMap, geometry: Geometry, dtype: torch.dtype, identity: str, is_whole: bool
    ) -> WorkerPool:
        return SharedPool(self.holder, layers, geometry, dtype, identity=identity)  # type: ignore[arg-type]

    def graphs(self) -> GraphBackend | None:
        return None

    def pair(self, num_tokens: int = 0, **numbers: int) -> tuple[Rig, Rig, TinyCore]:
        """A runner that has served, a second one, and the core of the first."""
        first, second = self.rig(is_whole=True), self.rig()
        return first, second, served(first, num_tokens or PROMPT, **numbers)

    def dies(self, rig: Rig) -> None:
        self.holder.dead.add(rig.runner.pool.pool_id)

    def succeed(
        self, first: Rig, second: Rig, core: TinyCore, num_shared: int, generation: int = 1
    ) -> tuple[TinyCore, Outcome]:
        """The first one dies, and the second one takes its pool over."""
        self.dies(first)
        return taking(second, core, num_shared, order_of(first, generation))

    def close(self) -> None:
        self.holder.close()


@dataclass(kw_only=True)
class Card(Host):
    """Pools on a GPU, with a driver for each runner."""

    fake: FakeCard = field(default_factory=FakeCard)
    libraries: list[FakeLibcuda] = field(default_factory=list[FakeLibcuda])

    def driver(self) -> Driver:
        if self.device.type == "cuda":
            return cuda_driver(self.device.index or 0)
        self.libraries.append(FakeLibcuda(self.fake))
        return Driver(self.libraries[-1], 0)

    def pool(
        self, layers: LayerMap, geometry: Geometry, dtype: torch.dtype, identity: str, is_whole: bool
    ) -> WorkerPool:
        own = {"identity": identity, "device": self.device, "is_whole": is_whole}
        return DevicePool(self.holder, self.driver(), layers, geometry, dtype, **own)  # type: ignore[arg-type]

    def graphs(self) -> GraphBackend | None:
        return CudaGraphs(self.device) if self.device.type == "cuda" and self.spec.graphs else None

    def close(self) -> None:
        """On the fake card each driver gives up all that its process had."""
        super().close()
        for library in self.libraries:
            library.end()


def served(rig: Rig, num_tokens: int = PROMPT, *, generation: int = 1, step: int = 1) -> TinyCore:
    """The runner computes a prompt of `num_tokens`, in this step, and two tokens more."""
    core = TinyCore(rig.geometry, generation=generation)
    if step > 1:
        rig.runner.reset(generation)
        core.step = rig.runner._step = step - 1
    core.add(1, rig.prompt(num_tokens, seed=3))
    rig.step(core, chunks={1: num_tokens})
    for _ in range(2):
        rig.step(core, decode=[1])
    return core


def taking(rig: Rig, core: TinyCore, num_shared: int, order: pb.TakeOver) -> tuple[TinyCore, Outcome]:
    """The rig takes the pool over; its row 1 begins with `num_shared` pages of the dead runner."""
    old = core.rows[1]
    after = TinyCore(core.geometry, generation=core.generation + 1, page_order=list(core.free_pages))
    after.add(1, old.tokens, shared=old.pages[:num_shared], position=num_shared * PAGE)
    # Step 1 is ordinary: the pool is taken over when the worker is seated.
    message = after.plan(chunks={1: len(old.tokens) - num_shared * PAGE})
    message.take_over.CopyFrom(order)
    outcome = rig.submit(message)
    if outcome.status == pb.STEP_STATUS_OK:
        after.learn(outcome.tokens)
    return after, outcome


def taken(outcome_of: tuple[TinyCore, Outcome]) -> TinyCore:
    """The core after a pool was taken over."""
    core, outcome = outcome_of
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    return core


def order_of(rig: Rig, generation: int = 1) -> pb.TakeOver:
    return pb.TakeOver(pool_id=rig.runner.pool.pool_id, generation=generation)


def assert_undisturbed(rig: Rig, core: TinyCore) -> None:
    """The tokens of row 1 are those of a run on this rig in which nothing died."""
    tokens = core.rows[1].tokens
    truth = TinyCore(core.geometry, generation=9)
    truth.add(1, tokens[:PROMPT])
    rig.step(truth, chunks={1: PROMPT})
    while len(truth.rows[1].tokens) < len(tokens):
        rig.step(truth, decode=[1])
    assert truth.rows[1].tokens == tokens


def damage(rig: Rig, page: int) -> None:
    """Changes one bit of a page in the first layer's V."""
    word = rig.runner.on_device.cache.values[0].view(torch.int32)[1, page * PAGE + 3, 5]
    word.bitwise_xor_(1)
