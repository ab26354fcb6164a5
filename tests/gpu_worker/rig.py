"""A small random model three times: behind the worker's runner, eager, and in float64.

Owns the geometry of the tests and the recording of what the runner computes. One rig is one pair of kernels.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from gpu_worker.attention.layers import LayerMap
from gpu_worker.attention.paged import ATTENTION_NAME, register
from gpu_worker.backends import runner_of
from gpu_worker.checkpoint.linear import Groups
from gpu_worker.checkpoint.loading import prepare
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.cpu.graphs import cpu_graphs
from gpu_worker.cpu.steps import PlainSteps
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.graphs import GraphBackend
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.memory.model_facts import shared_inputs
from gpu_worker.shared_pool.pool import WorkerPool
from gpu_worker.step.runner import Runner
from gpu_worker.wire.frames import Outcome
from tests.gpu_worker.plans import Moves, TinyCore
from tests.gpu_worker.reference import eager_model, float64_model, hidden_and_logits
from tests.rigs.padded_shapes import few_shapes, padded_runner

VOCAB_SIZE = 131
# Our error may be this many times eager's in the same dtype, both against float64, each as root mean square.
ERROR_RATIO = 2.0
# For hidden states of order 1: rounding that eager attention avoids by chance.
ERROR_FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class RigSpec:
    page_size: int
    group: int
    head_dim: int
    family: str = "qwen3"
    # The window of families with windows, in every second layer or in all.
    window: int | None = None
    # As by settings: full-attention layers see a window and this number of sink tokens instead.
    bound: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32
    max_rows: int = 3
    chunk_align: int = 64
    # Decoder layers are compiled.
    fused: bool = False
    # C++ kernels compute attention on a CPU where they can; otherwise torch's operators do.
    native: bool = True
    # Steps are padded on every device, and FlexAttention computes them.
    padded: bool = False
    # Decode steps on a CPU are captured. Hidden states are not recorded.
    graphs: bool = False
    # By default pages for some rows, and texts of some pages.
    num_pages: int | None = None
    max_length: int | None = None

    def __str__(self) -> str:
        window = "" if self.window is None else f"-window{self.window}"
        window += "" if self.bound is None else "-bound{}and{}".format(*self.bound)
        head = f"page{self.page_size}-group{self.group}-dim{self.head_dim}"
        suffix = f"{'-fused' * self.fused}{'-torch' * (not self.native)}{'-flex' * self.padded}"
        return f"{self.family}-{head}{window}-{str(self.dtype)[6:]}{suffix}"


@dataclass(kw_only=True)
class Recording:
    """Hidden states by (row, position) of one sequence after another, as the runner computed them."""

    hidden: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)


_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "mistral": (MistralConfig, {}),
    # Soft-capping that changes scores of order 1; a scale that differs from the head dimension's.
    "gemma2": (Gemma2Config, {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0}),
    "gpt_oss": (
        GptOssConfig,
        # Layers that share a kernel have different sinks. Grouped experts need rows of a multiple of 16 bytes.
        {
            "hidden_size": 80,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": None,
        },
    ),
}


def config_of(spec: RigSpec) -> PreTrainedConfig:
    config_class, own = _FAMILIES[spec.family]
    num_kv_heads = 2 if spec.head_dim < 256 else 1
    window = {} if spec.window is None else {"sliding_window": spec.window}
    common = {"hidden_size": 84, "intermediate_size": 80, "num_hidden_layers": 2, "initializer_range": 0.15}
    return config_class(
        num_attention_heads=num_kv_heads * spec.group,
        num_key_value_heads=num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **common | own | window,
    )


# By class and content of the config: to examine a model takes half of what a rig takes, and few configs make all rigs.
_FACTS: dict[tuple[type, str], tuple[LayerMap, Groups]] = {}


def facts_of(config: PreTrainedConfig) -> tuple[LayerMap, Groups]:
    """The attention layers of this model, and its linear layers that share an input."""
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _FACTS:
        # Only shapes are read, and grouped experts run on the meta device in bfloat16 alone.
        meta_model = meta_model_of(config, dtype=torch.bfloat16)
        _FACTS[key] = check_model(meta_model), shared_inputs(meta_model)
    return _FACTS[key]


class Rig:
    def __init__(
        self,
        spec: RigSpec,
        device: torch.device,
        pool_of: Callable[[LayerMap, Geometry, torch.dtype], WorkerPool] | None = None,
        graphs: GraphBackend | None = None,
    ) -> None:
        """pool_of: makes the KV pool; by default it ends with the process. graphs: captures the steps of a GPU."""
        self.spec, self.device = spec, device
        self.geometry = Geometry(
            page_size=spec.page_size,
            num_pages=spec.num_pages or max(12, 640 // spec.page_size),
            max_rows=spec.max_rows,
            max_length=spec.max_length or 4 * spec.page_size + 64,
            token_budget=384,
            chunk_align=spec.chunk_align,
            vocab_size=VOCAB_SIZE,
            host_pages=9,
        )
        register()
        self.eager = eager_model(config_of(spec), seed=7).to(device=device, dtype=spec.dtype)
        served = copy.deepcopy(self.eager)
        served.set_attn_implementation(ATTENTION_NAME)
        layers, merged = facts_of(config_of(spec))
        self.served = served = prepare(served, device=device, dtype=spec.dtype, merged=merged)
        layers = layers if spec.bound is None else layers.bounded(*spec.bound)
        if spec.graphs and device.type == "cpu":
            graphs = cpu_graphs()
        pool = None if pool_of is None else pool_of(layers, self.geometry, spec.dtype)
        own = {"device": device, "dtype": spec.dtype, "graphs": graphs, "pool": pool}
        if spec.padded and device.type == "cpu":
            own |= {"shapes": few_shapes(self.geometry, spec.max_rows)}
            self.runner = padded_runner(served, layers, self.geometry, **own)
        else:
            self.runner = runner_of(served, layers, self.geometry, native=spec.native, fused=spec.fused, **own)
        self.runner.warm_up()
        self._generation = 0
        self._packed_hidden: Tensor | None = None
        if not spec.graphs:
            served.base_model.norm.register_forward_hook(self._record_hidden)

    @cached_property
    def float64(self) -> torch.nn.Module:
        return float64_model(self.eager)

    def _record_hidden(self, module: object, args: object, output: Tensor) -> None:
        self._packed_hidden = output[0]

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """K and V of all layers."""
        return self.runner.on_device.cache.pools

    def content(self, page: int) -> list[Tensor]:
        """Views of a page in each pool."""
        start = page * self.geometry.page_size
        return [pool[:, start : start + self.geometry.page_size] for pool in self.pools]

    def spoil(self, *pages: int) -> None:
        """Fills pages with NaN, which a plan zeroes or `forget`."""
        for page in pages:
            for part in self.content(page):
                part.fill_(torch.nan)

    def forget(self) -> None:
        """Zeroes the pool, because tests share the rig."""
        self.runner.join(pb.Joined(generation=self.core().generation))

    def core(self, **options: object) -> TinyCore:
        """A core with a new generation."""
        self._generation += 1
        return TinyCore(self.geometry, generation=self._generation, **options)

    def submit(self, message: pb.StepPlan) -> Outcome:
        self.runner.submit(message)
        outcome = self.runner.collect()
        assert outcome is not None
        return outcome

    def step(
        self,
        core: TinyCore,
        recording: Recording | None = None,
        *,
        chunks: dict[int, int] | None = None,
        decode: Iterable[int] = (),
        moves: Moves | None = None,
    ) -> Outcome:
        """Runs one step, passes its tokens to the core, and records each computed position."""
        decode = list(decode)
        before = {row: core.rows[row].position for row in (*(chunks or {}), *decode)}
        outcome = self.submit(core.plan(chunks=chunks, decode=decode, moves=moves))
        assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
        assert outcome.nonfinite.size == 0
        core.learn(outcome.tokens)
        if recording is not None:
            assert self._packed_hidden is not None
            places = self._places(chunks or {}, decode)
            for (row, offset), place in places.items():
                recording.hidden[row, before[row] + offset] = self._packed_hidden[place].double().cpu()
            kept = self.runner.on_device.last_logits
            if outcome.tokens.size and kept is not None:
                logits = kept[: outcome.tokens.size].double().cpu()
                recording.logits.append(logits)
                assert np.array_equal(logits.argmax(-1).numpy(), outcome.tokens)
        return outcome

    def _places(self, chunks: dict[int, int], decode: list[int]) -> dict[tuple[int, int], int]:
        """The index of each (row, offset) in the packed tokens: decode rows, their padding, then chunks."""
        places = {(row, 0): i for i, row in enumerate(decode)}
        at = num_decode_tokens(self.runner, len(decode), list(chunks.values()))
        for row, count in chunks.items():
            places |= {(row, offset): at + offset for offset in range(count)}
            at += count
        return places

    def prompt(self, length: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()

    def check(self, core: TinyCore, recording: Recording) -> None:
        """Compares every recorded hidden state with float64, within eager's own error."""
        for row in {row for row, _ in recording.hidden}:
            positions = sorted(position for at, position in recording.hidden if at == row)
            tokens = core.rows[row].tokens[: positions[-1] + 1]
            ours = torch.stack([recording.hidden[row, position] for position in positions])
            exact, _ = hidden_and_logits(self.float64, tokens, self.spec.bound)
            eager, _ = hidden_and_logits(self.eager, tokens, self.spec.bound)
            assert_as_good(ours, eager[positions], exact[positions], ERROR_FLOOR[self.spec.dtype])


def num_decode_tokens(runner: Runner, num_decode: int, counts: Sequence[int]) -> int:
    """Packed tokens of a step's decode rows with their padding; `counts` are the tokens of its chunks."""
    if isinstance(runner.steps, PlainSteps):
        return num_decode
    need = StepShape(
        decode=num_decode,
        prefill=sum(align_up(count, runner.geometry.chunk_align) for count in counts),
        tokens=num_decode + sum(counts),
        samples=num_decode,
        draws=False,
    )
    return runner.steps.shapes.fitting(need).decode


def assert_as_good(ours: Tensor, eager: Tensor, exact: Tensor, floor: float) -> None:
    """Our error against float64 is at most ERROR_RATIO times eager's plus a floor, overall and at every position."""
    allowed = ERROR_RATIO * (eager - exact).pow(2).mean().sqrt() + floor
    error = (ours - exact).pow(2).mean().sqrt()
    worst = (ours - exact).pow(2).mean(-1).sqrt().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    # The mean would hide one wrong position among hundreds.
    assert worst <= 4 * allowed, f"worst position errs by {worst:.3g}, allowed {4 * allowed:.3g}"
