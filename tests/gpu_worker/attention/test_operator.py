"""The attention operator's own work: where queries and outputs go, what a call depends on. The kernels are plain."""

import gc

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_worker.attention.paged import StepContext, assign_kv

NUM_PLACES, HEADS, DIM, NUM_TOKEN_SLOTS = 8, 2, 4, 16


class MeanOfPool:
    """In place of a kernel: each query's output is the query plus the sums of the layer's K and V."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places

    def __call__(
        self, query_THD: Tensor, sources: Tensor | None, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        if sources is None:
            placed = torch.zeros(self.num_places, HEADS, DIM, device=query_THD.device)
            placed[: query_THD.shape[0]] = query_THD
        else:
            # Places that the mask hides have a query, too.
            assert sources.shape == (self.num_places,)
            placed = query_THD[sources]
        return placed + key.sum() + value.sum()


def context_of(num_tokens: int, *, decode: int = 0, places: list[int] | None = None) -> StepContext:
    targets = torch.tensor(places or [], dtype=torch.int64)
    sources = torch.zeros(NUM_PLACES, dtype=torch.int64)
    sources[targets] = torch.arange(len(targets))
    return StepContext(
        kv_slots=torch.arange(1, num_tokens + 1),
        write_kv=assign_kv,
        decode=(MeanOfPool(decode),) if decode else None,
        num_decode=decode,
        prefill=(MeanOfPool(NUM_PLACES),) if places else None,
        prefill_places=targets,
        prefill_sources=sources,
    )


def arguments(num_tokens: int, context: StepContext) -> tuple[object, ...]:
    draw = torch.Generator().manual_seed(num_tokens)
    query, key, value = (torch.randn(1, HEADS, num_tokens, DIM, generator=draw) for _ in range(3))
    pools = [torch.zeros(HEADS, NUM_TOKEN_SLOTS, DIM) for _ in range(2)]
    return query, key, value, None, *pools, context.number, 0


@pytest.mark.parametrize(
    ("num_tokens", "step"),
    [
        (3, {"decode": 3}),
        (2, {"places": [5, 6]}),
        (4, {"places": [0, 1]}),
        (5, {"decode": 2, "places": [4, 2, 0]}),
        (7, {"decode": 2, "places": [1, 0]}),
    ],
)
def test_each_token_gets_the_output_of_its_query(num_tokens: int, step: dict[str, object]) -> None:
    context = context_of(num_tokens, **step)
    given = arguments(num_tokens, context)
    query, key, value, _, keys, values, *_ = given
    out = torch.ops.tandem.attend(*given)
    assert out.shape == (1, num_tokens, HEADS, DIM)
    assert out.is_contiguous()
    # K and V are written before a query attends.
    assert torch.equal(keys[:, 1 : num_tokens + 1], key[0])
    assert torch.equal(values[:, 1 : num_tokens + 1], value[0])
    expected = query[0].transpose(0, 1) + key.sum() + value.sum()
    places = step.get("places", [])
    at = [i for i in range(num_tokens) if i < context.num_decode or (places[i - context.num_decode :] or [8])[0] < 8]
    torch.testing.assert_close(out[0, at], expected[at])
    assert not out[0, context.num_decode + len(places) :].any(), "padding is zero"


def test_a_repeated_call_gives_the_same_output() -> None:
    """A recorder of graphs repeats calls with their arguments, after other steps have run."""
    context, other = context_of(3, decode=3), context_of(2, decode=2)
    given = arguments(3, context)
    first = torch.ops.tandem.attend(*given)
    torch.ops.tandem.attend(*arguments(2, other))
    assert torch.equal(torch.ops.tandem.attend(*given), first)


def test_a_context_is_freed_with_its_step() -> None:
    context = context_of(3, decode=3)
    given = arguments(3, context)
    del context
    gc.collect()
    with pytest.raises(KeyError):
        torch.ops.tandem.attend(*given)


def test_the_operator_has_a_shape_without_data() -> None:
    context = context_of(3, decode=3)
    expected = torch.ops.tandem.attend(*arguments(3, context))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments(3, context)]
        out = torch.ops.tandem.attend(*fakes)
    assert (out.shape, out.dtype, out.stride()) == (expected.shape, expected.dtype, expected.stride())
