"""Compares the warm runner with eager attention on the same weights: the last check before a model is served.

The plans compute a prompt in two chunks, a second prompt beside a decode step of the first, and decode steps of both;
each logit vector is compared with one forward of the whole sequence. This finds faults that the other checks cannot: a
table of positions that was not pinned, a kernel with wrong results on this device. The tolerance for rounding is
measured on the model itself, because experts that are chosen by a near tie amplify it.

The reference is the model's own eager attention. With the setting `window` the model makes its masks as usual, and
positions that the setting hides are removed from them. A rank of a group that keeps a part of the KV heads passes on
only these. Knows nothing of sockets.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from gpu_worker.attention.layers import AttentionPattern, LayerMap
from gpu_worker.attention.paged import PagedLayer
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.checkpoint.linear import PackedLinear
from gpu_worker.compatibility.probe import attending
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.step.runner import Runner
from gpu_worker.wire.fields import Int32Array
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.started import StartedRows
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

# Relative errors of a logit vector about its mean. A fault causes an error near 1; rounding causes a few times the
# error that one rounding error in attention ("shaken") causes in eager's own logits.
_LEAST_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TIMES_SHAKEN = 4.0
# Two unrelated vectors differ by 1.4.
_MOST_TOLERANCE, _MOST_SHAKEN = 1.0, 0.5
# Long enough for the windows of small models, short enough for any.
_LONGEST_PROMPT = 300
_NUM_DECODE = 4
BOUNDED_NAME = "tandem_bounded_eager"


def check_runner(
    model: PreTrainedModel, runner: Runner, dtype: torch.dtype, *, unbounded: LayerMap | None = None
) -> float:
    """The median relative error of the logits. Raises ModelRefused if it exceeds rounding. Leaves both unchanged.

    unbounded: the model's own layers. If a setting bounds the runner's layers, eager attention is bounded too.
    """
    reference = eager_name(model, unbounded)
    prompts = make_prompts(runner.geometry)
    if runner.geometry.window + runner.geometry.sink_tokens >= prompts[0].size + _NUM_DECODE:
        log.info("the self-check does not cover the window: its texts have only %s", numbered(prompts[0].size, "token"))
    ours, texts = _served_logits(model, runner, prompts, dtype)
    errors, shaken, at_ends = list[float](), list[float](), list[float]()
    for text, logits in zip(texts, ours, strict=True):
        if logits:
            eager = _eager_logits(model, reference, text[:-1], len(logits))
            of_text = _errors(torch.stack(logits), eager)
            errors += of_text
            at_ends.append(of_text[0])
            with _shaken(model, torch.finfo(dtype).eps):
                shaken += _errors(_eager_logits(model, reference, text[:-1], len(logits)), eager)
    if not np.isfinite(errors).all():
        # A kernel may treat NaN scores as masked and return numbers where eager attention returns NaN.
        raise ModelRefused(_not_finite(model, dtype))
    usual = float(np.median(shaken))
    if usual > _MOST_SHAKEN:
        raise ModelRefused(
            f"the self-check failed: one rounding in attention changes logits by a relative {usual:.2g}; the limit is "
            f"{_MOST_SHAKEN:g}; use a dtype that is more precise than {str(dtype).removeprefix('torch.')}"
        )
    # The end of a prompt, which prefill kernels compute, is one position of many, so the median would hide it.
    error = float(np.median(errors))
    for found_error, tolerance in (
        (error, _tolerance(dtype, usual)),
        (min(at_ends), _tolerance(dtype, max(shaken))),
    ):
        if not found_error <= tolerance:
            raise ModelRefused(
                f"the self-check failed: logits differ from eager attention's by a relative {found_error:.2g} over "
                f"{len(errors)} positions; the limit is {tolerance:.2g}"
            )
    return error


def _tolerance(dtype: torch.dtype, shaken: float) -> float:
    return min(max(_LEAST_TOLERANCE[dtype], _TIMES_SHAKEN * shaken), _MOST_TOLERANCE)


def _served_logits(
    model: PreTrainedModel,
    runner: Runner,
    prompts: list[Int32Array],
    dtype: torch.dtype,
) -> tuple[list[list[Tensor]], list[list[int]]]:
    """Logits of each row's samples, and its text with the sampled tokens. Raises ModelRefused if one is not finite."""
    kept: list[Tensor | None] = []

    def keep() -> None:
        logits = runner.on_device.last_logits
        # The next step may overwrite them.
        kept.append(None if logits is None else logits.to("cpu", torch.float32, copy=True))

    plans = make_plans(prompts, runner.geometry)
    outcomes = runner.rehearse(*plans, after_each=keep)
    texts = [prompt.tolist() for prompt in prompts]
    ours: list[list[Tensor]] = [[] for _ in prompts]
    for plan, outcome, logits in zip(plans, outcomes, kept, strict=True):
        if not outcome.tokens.size:
            continue
        assert logits is not None
        if outcome.status != pb.STEP_STATUS_OK or outcome.nonfinite.size:
            raise ModelRefused(_not_finite(model, dtype))
        rows = [*plan.chunk_rows[plan.chunk_samples].tolist(), *plan.decode_rows.tolist()]
        for i, (row, token) in enumerate(zip(rows, outcome.tokens.tolist(), strict=True)):
            ours[row - 1].append(logits[i])
            texts[row - 1].append(token)
    return ours, texts


def _not_finite(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """The message for logits that are not finite: the cause is in the weights, or in computing with them."""
    packed = ((f"{name}.weight", part.weight) for name, part in model.named_modules() if isinstance(part, PackedLinear))
    for name, weight in chain(model.named_parameters(), packed):
        if not bool(weight.isfinite().all()):
            return f"the self-check failed: {name} has values that are not finite; download the weights again"
    largest = torch.finfo(dtype).max
    return (
        f"the self-check failed: logits are not finite, though the weights are; values beyond {largest:.2g} do not "
        f"fit {str(dtype).removeprefix('torch.')}, try another dtype"
    )


def make_prompts(geometry: Geometry) -> list[Int32Array]:
    """Two prompts if rows, pages and length allow it; their chunks fit a step."""
    num_rows = min(2, geometry.max_rows, geometry.num_pages - 1)
    pages = min((geometry.num_pages - 1) // num_rows, geometry.pages_per_row)
    longest = min(pages * geometry.page_size, geometry.max_length) - _NUM_DECODE - 1
    budget = geometry.token_budget - geometry.max_rows
    longest = max(2, min(longest, _LONGEST_PROMPT, budget - budget % geometry.chunk_align))
    generator = np.random.default_rng(1)
    lengths = [longest, max(2, longest * 2 // 3)][:num_rows]
    return [generator.integers(0, geometry.vocab_size, length).astype(np.int32) for length in lengths]


def make_plans(prompts: list[Int32Array], geometry: Geometry) -> list[Plan]:
    """Plans with row 1's prompt in two chunks, row 2's prompt beside a decode step, and decode steps of all rows."""
    started: list[StartedRows] = []
    first_page = 1
    for row, prompt in enumerate(prompts, start=1):
        end = min(prompt.size + _NUM_DECODE + 1, geometry.max_length)
        count = align_up(end, geometry.page_size) // geometry.page_size
        pages = np.arange(first_page, first_page + count, dtype=np.int32)
        started.append(StartedRows.of_prompts(np.array([row], np.int32), [prompt], [pages]))
        first_page += count
    half = prompts[0].size // 2
    plans = [
        _plan(1, started=started[0], chunk=(1, 0, half, False)),
        _plan(2, chunk=(1, half, prompts[0].size - half, True)),
    ]
    num_decode = min(_NUM_DECODE, geometry.max_length - prompts[0].size)
    if len(prompts) > 1:
        beside = [1] if num_decode else []
        plans.append(_plan(3, started=started[1], chunk=(2, 0, prompts[1].size, True), decode=beside))
        num_decode -= len(beside)
    rows = list(range(1, len(prompts) + 1))
    return plans + [_plan(len(plans) + 1 + i, decode=rows) for i in range(num_decode)]


def _plan(
    step: int, *, started: StartedRows | None = None, chunk: tuple[int, ...] = (), decode: Sequence[int] = ()
) -> Plan:
    """A plan; chunk: row, start, count, whether it ends the prompt."""
    row, start, count, ends = np.array(chunk, np.int32).reshape(4, -1)
    return Plan(
        generation=0,
        step=step,
        checksum=0,
        started=started,
        chunk_rows=row,
        chunk_starts=start,
        chunk_counts=count,
        chunk_samples=ends.astype(np.bool_),
        decode_rows=np.array(decode, np.int32),
    )


@torch.inference_mode()
def _eager_logits(model: PreTrainedModel, implementation: str, text: list[int], count: int) -> Tensor:
    """Logits after each of the last `count` tokens."""
    with attending(model, implementation):
        ids = torch.tensor([text], device=model.device)
        return model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0].float().cpu()


@contextmanager
def _shaken(model: PreTrainedModel, eps: float) -> Iterator[None]:
    """Adds an error of one rounding to every attention layer's output for the duration."""
    generator = torch.Generator().manual_seed(1)

    def shake(module: object, args: object, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        noise = torch.rand(first.shape, generator=generator).sub_(0.5).mul_(2 * eps).to(first.device)
        first = (first * (1 + noise)).to(first.dtype)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    hooks = [module.register_forward_hook(shake) for module in model.modules() if hasattr(module, "paged_layer")]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _errors(ours: Tensor, eager: Tensor) -> list[float]:
    ours, eager = (logits - logits.mean(-1, keepdim=True) for logits in (ours, eager))
    return ((ours - eager).norm(dim=-1) / eager.norm(dim=-1).clamp(min=1e-30)).tolist()


def eager_name(model: PreTrainedModel, unbounded: LayerMap | None) -> str:
    """The name of the eager implementation in which each layer sees what it is served with.

    unbounded: the model's own layers. The name is `eager` unless a layer without a window is served with one, or a
    layer's KV heads are not all served.
    """
    bounded: dict[nn.Module, AttentionPattern] = {}
    keeps_part = False
    for layer in () if unbounded is None else unbounded.layers:
        module = model.get_submodule(layer.name)
        served: PagedLayer = module.paged_layer  # type: ignore[assignment]
        keeps_part |= served.first_kv_head is not None
        if layer.kind.pattern.window is None and served.kind.pattern.window is not None:
            bounded[module] = served.kind.pattern
    if not bounded and not keeps_part:
        return "eager"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **keywords: Any
    ) -> tuple[Tensor, Tensor | None]:
        if module in bounded:
            attention_mask = _hiding(attention_mask, bounded[module])
        eager = sys.modules[type(module).__module__].eager_attention_forward
        layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
        key, value = layer.kept(key, value)
        with _repeating(module, layer):
            return eager(module, query, key, value, attention_mask, **keywords)

    AttentionInterface.register(BOUNDED_NAME, attend)
    AttentionMaskInterface.register(BOUNDED_NAME, eager_mask)
    return BOUNDED_NAME


@contextmanager
def _repeating(module: nn.Module, layer: PagedLayer) -> Iterator[None]:
    """Lets the module's eager attention repeat each KV head for as many query heads as read it in this process."""
    if layer.first_kv_head is None:
        yield
        return
    before = module.num_key_value_groups
    module.num_key_value_groups = layer.kind.group  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


def _hiding(mask: Tensor, pattern: AttentionPattern) -> Tensor:
    """The additive mask [1, 1, q, k] of one whole text, with the positions hidden that `pattern` hides."""
    assert pattern.window is not None
    query, key = (torch.arange(size, device=mask.device) for size in mask.shape[2:])
    hidden = (key >= pattern.sink_tokens) & (key <= query[:, None] - pattern.window)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
