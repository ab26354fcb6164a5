"""The arithmetic of recomputation: by hand for a model of one layer, by counting for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.simulator.cost.hardware import MODELS, Model
from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.recompute import attended, forward, generate, next_token, read_tokens
from tests.scheduler_svc.simulator.memory.asking import sequence

# One layer: q and o are 2 × 2 and k and v 2 × 1, the MLP three times 2 × 3; the logits 2 × 5.
TINY = Geometry(
    model=Model(name="tiny", layers=1, hidden=2, intermediate=3, heads=2, kv_heads=1, head_dim=1, vocab_size=5,
                max_length=64)
)  # fmt: skip


def test_the_cost_of_a_forward_equals_an_example_by_hand():
    assert (TINY.model.layer_parameters, TINY.model.head_parameters, TINY.token_bytes) == (30, 10, 4)
    # Three new tokens behind one attend to 2 + 3 + 4 keys, in 2 heads of 1 element, at 4 FLOPs each.
    cost = forward(TINY, 1, 3)
    assert cost.flops == 2 * 30 * 3 + 4 * 2 * 9 + 2 * 10
    assert cost.weight_bytes == 2 * (30 + 10)
    # Three written, four read.
    assert cost.kv_bytes == (3 + 4) * 4
    assert cost.bytes == 80 + 28


def test_the_cost_of_a_token_equals_an_example_by_hand():
    cached, again = next_token(TINY, 5, cached=True), next_token(TINY, 5, cached=False)
    assert cached.flops == 2 * 30 + 4 * 2 * 5 + 20
    assert again.flops == 5 * 2 * 30 + 4 * 2 * 15 + 20
    assert (cached.kv_bytes, again.kv_bytes) == ((1 + 5) * 4, (5 + 5) * 4)


def test_the_cost_with_a_window_equals_an_example_by_hand():
    # Each of five tokens attends to two keys, the first to one: 1 + 2 + 2 + 2 + 2.
    assert attended(0, 5, 2) == 9
    assert next_token(TINY, 5, cached=True, window=2).flops == 2 * 30 + 4 * 2 * 2 + 20
    assert next_token(TINY, 5, cached=True, window=2).kv_bytes == (1 + 2) * 4


@given(st.integers(0, 40), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_attended_and_read_keys_equal_those_counted_one_by_one(past: int, new: int, window: int | None):
    seen = [
        [key for key in range(query + 1) if window is None or query - key < window] for query in range(past, past + new)
    ]
    assert attended(past, past + new, window) == sum(map(len, seen))
    read = {key for keys in seen for key in keys}
    assert forward(TINY, past, new, window).kv_bytes == (new + len(read)) * TINY.token_bytes


@given(st.integers(1, 12), st.integers(0, 12), st.one_of(st.none(), st.integers(1, 20)))
def test_the_cost_of_a_sequence_is_the_sum_of_its_forwards(prompt: int, more: int, window: int | None):
    contexts = range(prompt, prompt + more)
    cached = generate(TINY, prompt, prompt + more, cached=True, window=window)
    again = generate(TINY, prompt, prompt + more, cached=False, window=window)
    assert again.flops == sum(forward(TINY, 0, context, window).flops for context in contexts)
    # With a cache every position is computed once, except the last token's.
    positions = prompt + more - 1 if more else 0
    assert cached.flops == 60 * positions + 8 * attended(0, positions, window) + 20 * more
    assert cached.weight_bytes == again.weight_bytes == 80 * more


def test_read_tokens_counts_the_reads_of_each_generated_token():
    of = [sequence(0, [0] * 5, prompt=2), sequence(1, [0] * 3, prompt=2)]
    assert read_tokens(of, None) == 3 + 4 + 5 + 3
    assert read_tokens(of, 3) == 3 + 3 + 3 + 3


@pytest.mark.parametrize(
    ("name", "token_bytes", "parameters"),
    [("llama-3.1-8b", 131072, 8.03e9), ("llama-3.1-70b", 327680, 70.55e9), ("qwen-3-8b", 147456, 8.19e9)],
)
def test_known_models_have_their_public_sizes(name: str, token_bytes: int, parameters: float):
    geometry = Geometry(model=MODELS[name])
    assert geometry.token_bytes == token_bytes
    # The embedding counts too, although it is looked up and not multiplied.
    assert geometry.model.layer_parameters + 2 * geometry.model.head_parameters == pytest.approx(parameters, rel=1e-3)
