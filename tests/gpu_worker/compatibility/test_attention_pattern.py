"""Mask functions are read by evaluation, independent of how they are composed."""

import pytest
import torch
from transformers import masking_utils as masks

from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.compatibility.probe import UnreadableMask, read_pattern


@pytest.mark.parametrize("length", [2, 50, 1000])
def test_causal_masks_have_no_window(length: int) -> None:
    assert read_pattern(masks.causal_mask_function, num_heads=4, length=length) == AttentionPattern()


@pytest.mark.parametrize("window", [1, 2, 21, 96, 97, 500, 999])
def test_a_window_is_found_at_its_length(window: int) -> None:
    mask = masks.sliding_window_causal_mask_function(window)
    assert read_pattern(mask, num_heads=4, length=1000) == AttentionPattern(window=window)


def test_a_window_as_long_as_every_text_is_dropped() -> None:
    mask = masks.sliding_window_causal_mask_function(1000)
    assert read_pattern(mask, num_heads=4, length=1000) == AttentionPattern()


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (masks.bidirectional_mask_function, "see later tokens"),
        (masks.sliding_window_bidirectional_mask_function(30), "see later tokens"),
        # A prefix that sees itself.
        (lambda b, h, q, k: (k <= q) | ((k < 10) & (q < 10)), "see later tokens"),
        (
            lambda b, h, q, k: (k <= q) & ((h == 0) | (k > q - 8)),
            "position 8 does not see position 0 in head 1, which differs from causal attention",
        ),
        # First tokens stay.
        (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 4)), "have gaps"),
        # Chunks.
        (lambda b, h, q, k: (k <= q) & (k // 300 == q // 300), "which differs from a window of 100"),
        (lambda b, h, q, k: k < q, "does not see itself"),
        (masks.chunked_causal_mask_function(300, torch.zeros(1, device="meta")), "within chunks"),
        (masks.padding_mask_function(torch.zeros(1, 1000, dtype=torch.bool, device="meta")), "depends on data"),
    ],
)
def test_other_masks_are_refused_with_the_reason(mask: masks.Callable, problem: str) -> None:
    with pytest.raises(UnreadableMask, match=problem):
        read_pattern(mask, num_heads=4, length=1000)
