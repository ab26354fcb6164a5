"""The worker's whole runner on the fake device, with a model of the shape of Qwen3-0.6B and few layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from gpu_worker.attention.flex_kernel import FlexKernel
from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import ATTENTION_NAME, register
from gpu_worker.backends import runner_of
from gpu_worker.checkpoint.loading import prepare
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.geometry import Geometry
from gpu_worker.layout.step_layout import StepInputs
from gpu_worker.shared_pool.pool import WorkerPool
from gpu_worker.step.output import StaticOutput
from tests.gpu_worker.fake_cuda.fake_device import CUDA, FakeCuda, on_fake_cuda
from tests.gpu_worker.fake_cuda.trace import Trace
from tests.gpu_worker.plans import TinyCore

NUM_LAYERS = 2
# No bucket of the usual sizes: the largest bucket is exactly max_rows.
GEOMETRY = Geometry(
    page_size=128,
    num_pages=4096,
    max_rows=100,
    max_length=8192,
    token_budget=2048,
    chunk_align=128,
    vocab_size=151_936,
)


class FakeRig:
    """Runs plans and returns the trace of each."""

    def __init__(self, fake: FakeCuda, pool_of: Callable[[LayerMap], WorkerPool] | None = None) -> None:
        """pool_of: makes the KV pool; by default it ends with the process."""
        self.fake = fake
        config = Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=GEOMETRY.vocab_size,
            tie_word_embeddings=True,
            max_position_embeddings=40_960,
        )
        register()
        meta_model = meta_model_of(config, dtype=torch.bfloat16)
        layers = check_model(meta_model)
        meta_model.set_attn_implementation(ATTENTION_NAME)
        with fake.present():
            # The parameters are on the device already, and fake ones cannot be moved.
            with patch.object(PreTrainedModel, "to", lambda model, device: model):
                model = prepare(on_fake_cuda(meta_model), device=CUDA, dtype=torch.bfloat16)
            pool = None if pool_of is None else pool_of(layers)
            self.runner = runner_of(model, layers, GEOMETRY, device=CUDA, dtype=torch.bfloat16, pool=pool)
            # What is done before serving.
            self.runner.on_device.zero_pool()
        self._static_part = self.runner.steps._static_part
        self.runner.steps._static_part = self._traced_static_part
        self._generation = 0

    def _traced_static_part(self, inputs: StepInputs[Tensor]) -> StaticOutput:
        with self.fake.trace.static():
            return self._static_part(inputs)

    def core(self, lengths: Mapping[int, int], **sampling: float) -> TinyCore:
        """A core with rows of these lengths that are about to decode."""
        self._generation += 1
        core = TinyCore(GEOMETRY, generation=self._generation)
        for row, length in lengths.items():
            core.add(row, [row] * length, position=length - 1, **sampling)
        return core

    def step(self, core: TinyCore, *, chunks: Mapping[int, int] | None = None, decode: Sequence[int] = ()) -> Trace:
        """Runs one step. Its tokens are arbitrary, because no memory of the fake device has contents."""
        message = core.plan(chunks=dict(chunks or {}), decode=decode)
        with self.fake.present(), _flex_attention_on_shapes():
            trace = self.fake.start_trace()
            self.runner.submit(message)
            outcome = self.runner.collect()
        assert outcome is not None and outcome.status == pb.STEP_STATUS_OK, outcome
        return trace


@contextmanager
def _flex_attention_on_shapes() -> Iterator[None]:
    """FlexAttention's kernels are compiled for a device that launches them; here they only have a result."""

    def attend(kernel: FlexKernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    with patch.object(FlexKernel, "__call__", attend):
        yield
