"""The arithmetic of the prompts' benchmark against direct counts."""

from gpu_worker.attention.layers import AttentionKind, AttentionPattern
from tests.measure.prompts import attention_flops, visible_pairs


def kind_of(window: int | None = None, sink_tokens: int = 0) -> AttentionKind:
    pattern = AttentionPattern(window=window, sink_tokens=sink_tokens)
    return AttentionKind(num_heads=3, num_kv_heads=1, key_dim=24, value_dim=16, scale=1.0, pattern=pattern)


def test_pairs_are_those_that_a_query_sees() -> None:
    assert visible_pairs(kind_of(), 4) == 1 + 2 + 3 + 4
    for window, sink_tokens in ((1, 0), (3, 0), (3, 2), (50, 4)):
        pairs = sum(
            position > query - window or position < sink_tokens for query in range(20) for position in range(query + 1)
        )
        assert visible_pairs(kind_of(window, sink_tokens), 20) == pairs


def test_both_products_of_every_head_count() -> None:
    # A product of n elements takes 2 n operations; keys have 24 and values 16.
    assert attention_flops([kind_of(), kind_of()], 2) == 2 * 3 * 3 * (2 * 24 + 2 * 16)
