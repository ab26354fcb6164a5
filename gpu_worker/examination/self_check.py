"""The last thing before a model is served: what the warm runner computes against the same weights' eager attention.

A prompt in two chunks, a second one beside the first's decode, decode steps of both; each logit vector is compared with
one forward of the whole sequence. Finds whatever the examination could not: a table of positions that was not pinned, a
kernel that computes something else on this device. Knows nothing of pages' content or of sockets.
"""

import numpy as np
import torch
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.runner import Runner
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.started import StartedRows

# Of a logit vector about its mean; what is wrong errs by a good part of 1.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# Long enough for the windows of small models, short enough for any.
_LONGEST_PROMPT = 300
_NUM_DECODE = 4


def check_runner(model: PreTrainedModel, runner: Runner, dtype: torch.dtype) -> float:
    """The median relative error of the logits. Raises ModelRefused where it is no rounding. Leaves both as before."""
    prompts = make_prompts(runner.geometry)
    kept: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: kept.append(output.logits[0].float().cpu()))
    plans = make_plans(prompts, runner.geometry)
    try:
        outcomes = runner.rehearse(*plans)
    finally:
        hook.remove()
    texts = [prompt.tolist() for prompt in prompts]
    ours: list[list[Tensor]] = [[] for _ in prompts]
    sampling = [(plan, outcome) for plan, outcome in zip(plans, outcomes, strict=True) if outcome.tokens.size]
    for (plan, outcome), logits in zip(sampling, kept, strict=True):
        if outcome.status != pb.STEP_STATUS_OK or outcome.nonfinite.size:
            raise ModelRefused(f"the self-check's step {outcome.step} has no finite logits: {outcome.detail}")
        rows = [*plan.chunk_rows[plan.chunk_samples].tolist(), *plan.decode_rows.tolist()]
        for i, (row, token) in enumerate(zip(rows, outcome.tokens.tolist(), strict=True)):
            ours[row - 1].append(logits[i])
            texts[row - 1].append(token)
    errors: list[float] = []
    for text, found in zip(texts, ours, strict=True):
        if found:
            errors += _errors(torch.stack(found), _eager_logits(model, text[:-1], len(found)))
    error = float(np.median(errors))
    if not error <= _TOLERANCE[dtype]:
        raise ModelRefused(
            f"the self-check failed: logits differ from eager attention's by {error:.2g} of their size (median of "
            f"{len(errors)} positions), at most {_TOLERANCE[dtype]} is rounding; this model would be served wrongly"
        )
    return error


def make_prompts(geometry: Geometry) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Two where rows, pages and length allow it; their chunks fit a step."""
    num_rows = min(2, geometry.max_rows, geometry.num_pages - 1)
    pages = min((geometry.num_pages - 1) // num_rows, geometry.pages_per_row)
    longest = min(pages * geometry.page_size, geometry.max_length) - _NUM_DECODE - 1
    budget = geometry.token_budget - geometry.max_rows
    longest = max(2, min(longest, _LONGEST_PROMPT, budget - budget % geometry.chunk_align))
    generator = np.random.default_rng(1)
    lengths = [longest, max(2, longest * 2 // 3)][:num_rows]
    return [generator.integers(0, geometry.vocab_size, length).astype(np.int32) for length in lengths]


def make_plans(prompts: list[np.ndarray[tuple[int], np.dtype[np.int32]]], geometry: Geometry) -> list[Plan]:
    """Row 1's prompt in two chunks; row 2's beside a decode step; decode steps of all."""
    pages: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    first_page = 1
    for prompt in prompts:
        end = min(prompt.size + _NUM_DECODE + 1, geometry.max_length)
        count = align_up(end, geometry.page_size) // geometry.page_size
        pages.append(np.arange(first_page, first_page + count, dtype=np.int32))
        first_page += count
    half = prompts[0].size // 2
    plans = [
        _plan(1, started=_started([1], prompts[:1], pages[:1]), chunk=(1, 0, half, False)),
        _plan(2, chunk=(1, half, prompts[0].size - half, True)),
    ]
    num_decode = min(_NUM_DECODE, geometry.max_length - prompts[0].size)
    if len(prompts) > 1:
        started = _started([2], prompts[1:], pages[1:])
        beside = [1] if num_decode else []
        plans.append(_plan(3, started=started, chunk=(2, 0, prompts[1].size, True), decode=beside))
        num_decode -= len(beside)
    rows = list(range(1, len(prompts) + 1))
    return plans + [_plan(len(plans) + 1 + i, decode=rows) for i in range(num_decode)]


def _plan(
    step: int,
    *,
    started: StartedRows | None = None,
    chunk: tuple[int, int, int, bool] | None = None,
    decode: list[int] | None = None,
) -> Plan:
    """chunk: row, start, count, whether it ends the prompt."""
    row, start, count, ends = ([], [], [], []) if chunk is None else ([value] for value in chunk)
    return Plan(
        generation=0,
        step=step,
        checksum=0,
        started=started,
        chunk_rows=np.array(row, np.int32),
        chunk_starts=np.array(start, np.int32),
        chunk_counts=np.array(count, np.int32),
        chunk_samples=np.array(ends, np.bool_),
        decode_rows=np.array(decode or [], np.int32),
    )


def _started(
    rows: list[int],
    tokens: list[np.ndarray[tuple[int], np.dtype[np.int32]]],
    pages: list[np.ndarray[tuple[int], np.dtype[np.int32]]],
) -> StartedRows:
    """Greedy rows."""
    num = len(rows)
    zeros = np.zeros(num, np.int32)
    return StartedRows(
        rows=np.array(rows, np.int32),
        tokens=tokens,
        pages=pages,
        first_position=zeros,
        num_prompt_tokens=np.array([text.size for text in tokens], np.int32),
        temperature=np.zeros(num, np.float32),
        top_p=np.ones(num, np.float32),
        top_k=zeros,
        min_p=np.zeros(num, np.float32),
        seed=zeros.astype(np.uint64),
        sample_idx=zeros,
        banned_until=zeros,
        banned=[zeros[:0]] * num,
    )


@torch.inference_mode()
def _eager_logits(model: PreTrainedModel, text: list[int], count: int) -> Tensor:
    """Logits after each of the last `count` tokens."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([text], device=model.device)
        return model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0].float().cpu()
    finally:
        model.set_attn_implementation(before)


def _errors(ours: Tensor, eager: Tensor) -> list[float]:
    ours, eager = (logits - logits.mean(-1, keepdim=True) for logits in (ours, eager))
    return ((ours - eager).norm(dim=-1) / eager.norm(dim=-1).clamp(min=1e-30)).tolist()
