"""Records a model's calls of attention, and its masks, on a meta model, and reads attention patterns from mask
functions.

Owns the implementation names under which calls are recorded instead of computed, and the evaluation of mask functions.
Transformers' masks are functions of logical positions; `Recorded` keeps the function itself, because keywords such as
`sliding_window` reach only some kernels. A pattern is causal, or causal within a window. Knows nothing of which models
can be served.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.process.starting import compiler_is_loaded

# Without masks, as the worker runs a model; and with masks, as its own eager attention would get them.
CALLS_NAME, MASKS_NAME = "tandem_calls", "tandem_masks"

# Stands for the step that the worker passes through a model to its attention.
STEP = object()

# bool (batch, head, query position, key position), each an index tensor.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Tokens of the meta model's forwards; no model has a dimension of this size.
NUM_TOKENS = 13
# Below this position every pair is evaluated, elsewhere selected whole rows.
_DENSE = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the attention interface."""

    module: nn.Module
    # [1, heads, tokens, dimension] each.
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    # The mask as passed; the tensor only identifies a function in `Recorded.masks`.
    mask: Tensor | None
    keywords: dict[str, Any]


@dataclass(slots=True)
class Recorded:
    """The calls and masks of one forward, in order."""

    calls: list[Call] = field(default_factory=list)
    # Lines of the model's code that number the tokens of a batch, or run a convolution.
    numberings: list[str] = field(default_factory=list)
    convolutions: list[str] = field(default_factory=list)
    # Each mask that Transformers made, and its function.
    masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)


_recorded: ContextVar[Recorded] = ContextVar("recorded")


def _record_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    shapes = {"query": tuple(query.shape), "key": tuple(key.shape), "value": tuple(value.shape)}
    _recorded.get().calls.append(Call(module=module, mask=attention_mask, keywords=keywords, **shapes))
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]), None


def _record_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> Tensor:
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    _recorded.get().masks.append((mask, mask_function))
    return mask


class _Watch(TorchDispatchMode):
    """Notes convolutions and numberings of tokens in model code. Grouped experts number tokens too, and undo it."""

    def __init__(self, recorded: Recorded, num_tokens: int) -> None:
        super().__init__()
        self._recorded, self._num_tokens = recorded, num_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten.arange") and out.shape == (self._num_tokens,):
            self._note(self._recorded.numberings)
        elif name.startswith("aten.conv"):
            self._note(self._recorded.convolutions)
        return out

    def _note(self, lines: list[str]) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/transformers/" in frame.filename]
        if frames and "modeling_" in frames[-1].filename:
            lines.append(place_of(frames[-1]))


def place_of(frame: traceback.FrameSummary) -> str:
    """A line of code, as messages show it."""
    return f"{frame.filename.rsplit('/', 1)[-1]}, line {frame.lineno}: {frame.line}"


@contextmanager
def attending(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Runs the model with this implementation of attention for the duration, and without compiled layers."""
    before: Any = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        # Compiled layers would ask for a compilation with the other implementation, and call no hooks of modules.
        with torch.compiler.set_stance("force_eager") if compiler_is_loaded() else nullcontext():
            yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _recording(model: PreTrainedModel, name: str) -> Iterator[Recorded]:
    AttentionInterface.register(CALLS_NAME, _record_call)
    AttentionInterface.register(MASKS_NAME, _record_call)
    AttentionMaskInterface.register(MASKS_NAME, _record_mask)
    token = _recorded.set(Recorded())
    try:
        with attending(model, name):
            yield _recorded.get()
    finally:
        _recorded.reset(token)


def forward(meta_model: PreTrainedModel, num_tokens: int = NUM_TOKENS, **arguments: Any) -> Any:
    """One forward of the worker's arguments and these. Passes on every exception of the model."""
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        return meta_model(input_ids=ids, position_ids=ids.clone(), use_cache=False, **arguments)


def calls_without_masks(meta_model: PreTrainedModel, num_tokens: int = NUM_TOKENS) -> tuple[Recorded, tuple[int, ...]]:
    """The calls in a step of the worker, and the shape of one token's logits. Passes on exceptions of the model."""
    kept = torch.zeros(1, dtype=torch.int64, device="meta")
    with _recording(meta_model, CALLS_NAME) as recorded, _Watch(recorded, num_tokens):
        out = forward(meta_model, num_tokens, logits_to_keep=kept, step=STEP)
    return recorded, tuple(out.logits.shape)


def calls_with_masks(meta_model: PreTrainedModel) -> Recorded:
    """The model's calls with the masks of one whole sequence. Passes on every exception of the model."""
    # Without a mask of padding Transformers looks for several sequences in the positions, for which a meta model lacks
    # the data.
    everything = torch.ones(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    with _recording(meta_model, MASKS_NAME) as recorded:
        forward(meta_model, attention_mask=everything)
    return recorded


class UnreadableMask(ValueError):
    """The mask is neither causal nor a causal window; the message names the difference."""


def read_pattern(mask: MaskFunction, *, num_heads: int, length: int) -> AttentionPattern:
    """The pattern of `mask` for a sequence of `length` tokens. Raises UnreadableMask."""
    length = max(length, 2)
    last = torch.tensor([length - 1])
    everything = torch.arange(length)
    row = _evaluate(mask, last, everything, 1)[0, 0]
    if not bool(row[-1]):
        raise UnreadableMask("a token does not see itself")
    seen = int(row.sum())
    if not bool(row[length - seen :].all()):
        raise UnreadableMask("the positions that a token sees have gaps")
    window = seen if seen < length else None
    edges = {0, 1, length // 2, length - 2, length - 1, *(range(seen - 2, seen + 3) if window else ())}
    rows = torch.tensor(sorted(q for q in edges if 0 <= q < length))
    _compare(mask, rows, everything, window, 1)
    dense = everything[:_DENSE]
    _compare(mask, dense, dense, window, num_heads)
    return AttentionPattern(window=window)


def _compare(mask: MaskFunction, queries: Tensor, keys: Tensor, window: int | None, num_heads: int) -> None:
    seen = _evaluate(mask, queries, keys, num_heads)
    q, k = queries[:, None], keys[None, :]
    if bool((seen & (k > q)).any()):
        raise UnreadableMask("tokens see later tokens (bidirectional attention)")
    expected = k <= q
    if window is not None:
        expected = expected & (k > q - window)
    if not torch.equal(seen, expected.expand_as(seen)):
        head, query, key = (seen != expected).nonzero()[0].tolist()
        sees = "sees" if bool(seen[head, query, key]) else "does not see"
        among = f" in head {head}" if num_heads > 1 else ""
        usual = "causal attention" if window is None else f"a window of {window}"
        place = f"position {int(queries[query])} {sees} position {int(keys[key])}{among}"
        raise UnreadableMask(f"{place}, which differs from {usual}")


def _evaluate(mask: MaskFunction, queries: Tensor, keys: Tensor, num_heads: int) -> Tensor:
    """bool [heads, queries, keys]."""
    batch, heads = torch.zeros((), dtype=torch.int64), torch.arange(num_heads)[:, None, None]
    try:
        seen = mask(batch, heads, queries[None, :, None], keys[None, None, :])
    except (RuntimeError, IndexError, NotImplementedError) as error:
        raise UnreadableMask(_kind_of(mask)) from error
    if not isinstance(seen, Tensor):
        seen = torch.tensor(bool(seen))
    if seen.is_meta:
        raise UnreadableMask(_kind_of(mask))
    return seen.broadcast_to(num_heads, queries.shape[0], keys.shape[0]).bool()


def _kind_of(mask: MaskFunction) -> str:
    """Describes a mask that cannot be evaluated without data, by the names of the functions that it combines."""
    names, waiting = set[str](), [mask]
    while waiting:
        function = waiting.pop()
        names.add(function.__qualname__)
        for cell in function.__closure__ or ():
            parts = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
            waiting.extend(part for part in parts if hasattr(part, "__closure__"))
    if any(name.startswith("chunked") for name in names):
        return "tokens attend within chunks"
    if any(name.startswith("blockwise") for name in names):
        return "blocks of tokens see each other both ways"
    return "it depends on data"
