"""Finds the smallest logit of a row that top-k and top-p keep, without a sort: device functions of `choose_kernel.py`.

Float32 numbers have an order-preserving map to integers, their keys. Both thresholds are the smallest key t for which
the logits above t measure less than a target: counted for top-k, summed as probabilities for top-p. A pass over the row
measures three pivots, and so divides the range of t by four. This is radix selection (Alabi et al. 2012, "Fast
k-selection algorithms for graphics processing units") with pivots in place of histograms: Triton has no histogram of
weights. It gives the exact threshold, as a sort would.

Probabilities, relative to the largest one, are summed as integers (fixed point), so that a sum does not depend on its
order. A row's threshold on logits is its threshold on tempered logits, because dividing keeps the order.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# Tiles of logits that a program asks for ahead of the one that it works on, and that one.
PIPELINE = tl.constexpr(4)
# In the first passes the pivots divide the range of values, not of keys, evenly: keys are dense around 0.
_EVEN_PASSES = tl.constexpr(3)


@triton.jit
def _key_of(value, UNUSED_BITS: tl.constexpr):
    """An integer with the order of float32 values; int64, because ranges of keys exceed int32."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS).to(tl.int64)


@triton.jit
def _value_of(key, UNUSED_BITS: tl.constexpr):
    narrow = key.to(tl.int32)
    bits = (narrow << UNUSED_BITS) | tl.where(narrow < 0, (1 << UNUSED_BITS) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def listed(entries, blocks, chosen):
    """Writes the chosen blocks, ascending, to `entries` and returns their number."""
    at = tl.cumsum(chosen.to(tl.int32), 0) - 1
    # The program's threads share the list: all have read the old one, then all see the new one.
    tl.debug_barrier()
    tl.store(entries + at, blocks, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def _measure(
    row_logits, entries, num_listed, peak, steepness, low, middle, high, vocab_size,
    SUMS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, FIXED: tl.constexpr
):  # fmt: skip
    """Returns what the logits above each pivot measure in the listed blocks: their number, or the sum of their shares.

    A share is 2**((logit - peak) * steepness), in units of 1 / FIXED.
    """
    lanes = tl.arange(0, BLOCK)[None, :]
    above_low = tl.zeros([AT_ONCE, BLOCK], tl.int64 if SUMS else tl.int32)
    above_middle = above_low
    above_high = above_low
    for first in tl.range(0, num_listed, AT_ONCE, num_stages=PIPELINE):
        entry = first + tl.arange(0, AT_ONCE)
        block = tl.load(entries + entry, mask=entry < num_listed, other=0)
        tokens = block[:, None] * BLOCK + lanes
        inside = (entry < num_listed)[:, None] & (tokens < vocab_size)
        values = tl.load(row_logits + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        if SUMS:
            weight = (tl.exp2((values - peak) * steepness) * FIXED).to(tl.int64)
        else:
            weight = tl.full([AT_ONCE, BLOCK], 1, tl.int32)
        above_low += tl.where(values > low, weight, 0)
        above_middle += tl.where(values > middle, weight, 0)
        above_high += tl.where(values > high, weight, 0)
    low_sum, middle_sum, high_sum = tl.sum(above_low), tl.sum(above_middle), tl.sum(above_high)
    return low_sum.to(tl.float64), middle_sum.to(tl.float64), high_sum.to(tl.float64)


@triton.jit
def _smallest(
    above, upto, guess, target, row_logits, entries, blocks, peaks, peak, steepness, vocab_size,
    SUMS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, UNUSED_BITS: tl.constexpr, FIXED: tl.constexpr
):  # fmt: skip
    """Returns the smallest key t, above < t <= upto, for which the logits above t measure less than `target`.

    If `above` is below every key, the first pivots lie around the logit `guess`.
    """
    lowest = _key_of(tl.full([], float("-inf"), tl.float32), UNUSED_BITS)
    passes = 0
    while upto - above > 1:
        bottom = tl.where(above <= lowest, float("-inf"), _value_of(above, UNUSED_BITS))
        top = _value_of(upto, UNUSED_BITS)
        step = (upto - above + 3) >> 2
        low, middle, high = above + step, above + 2 * step, above + 3 * step
        is_bounded = bottom > -1e30
        if (passes == 0) | ((passes < _EVEN_PASSES) & is_bounded):
            part = tl.where(is_bounded, (top - bottom) * 0.25, top - guess)
            low = _key_of(top - part * tl.where(is_bounded, 3.0, 4.0), UNUSED_BITS)
            middle = _key_of(top - part * 2.0, UNUSED_BITS)
            high = _key_of(top - part, UNUSED_BITS)
        low = tl.minimum(tl.maximum(low, above + 1), upto - 1)
        middle = tl.minimum(tl.maximum(middle, low), upto - 1)
        high = tl.minimum(tl.maximum(high, middle), upto - 1)
        num_listed = listed(entries, blocks, peaks > bottom)
        at_low, at_middle, at_high = _measure(
            row_logits, entries, num_listed, peak, steepness,
            _value_of(low, UNUSED_BITS), _value_of(middle, UNUSED_BITS), _value_of(high, UNUSED_BITS), vocab_size,
            SUMS, BLOCK, AT_ONCE, FIXED
        )  # fmt: skip
        # Measures fall from the low to the high pivot.
        above = tl.where(at_low >= target, low, above)
        above = tl.where(at_middle >= target, middle, above)
        above = tl.where(at_high >= target, high, above)
        upto = tl.where(at_high < target, high, upto)
        upto = tl.where(at_middle < target, middle, upto)
        upto = tl.where(at_low < target, low, upto)
        passes += 1
    return upto


@triton.jit
def _rank_of_peaks(peaks, count, upto, UNUSED_BITS: tl.constexpr):
    """Returns the key of the `count`-th largest peak, or that of -inf if there are fewer.

    At least `count` logits of the row are as large.
    """
    above = _key_of(tl.full([], float("-inf"), tl.float32), UNUSED_BITS) - 1
    while upto - above > 1:
        middle = (above + upto) >> 1
        fewer = tl.sum((peaks > _value_of(middle, UNUSED_BITS)).to(tl.int32)) < count
        upto = tl.where(fewer, middle, upto)
        above = tl.where(fewer, above, middle)
    return upto


@triton.jit
def kept_from(
    row_logits, entries, blocks, peaks, peak, temperature, top_k, top_p, vocab_size,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, UNUSED_BITS: tl.constexpr, FIXED: tl.constexpr
):  # fmt: skip
    """Returns the smallest logit that top-k and then top-p keep, float32; -inf if they keep every token.

    `peaks` float32 [B] are the largest logits of the blocks, -inf for blocks that do not exist; `entries` int32 [B] is
    scratch memory of this row.
    """
    lowest = _key_of(tl.full([], float("-inf"), tl.float32), UNUSED_BITS)
    highest = _key_of(peak, UNUSED_BITS)
    kept = lowest
    limited = (top_k > 0) & (top_k < vocab_size)
    steepness = _LOG2_E / temperature
    least_peak = tl.min(tl.where(peaks > float("-inf"), peaks, peak))
    if limited:
        enough = _rank_of_peaks(peaks, top_k, highest, UNUSED_BITS)
        kept = _smallest(
            enough - 1, highest, least_peak, top_k.to(tl.float64), row_logits, entries, blocks, peaks, peak, steepness,
            vocab_size, False, BLOCK, AT_ONCE, UNUSED_BITS, FIXED
        )  # fmt: skip
    if (top_p < 1.0) & (kept < highest):
        kept_value = _value_of(kept, UNUSED_BITS)
        num_listed = listed(entries, blocks, peaks > kept_value)
        # A kept token has more than (1 - top_p) / V of the largest probability: with less, it and all smaller ones
        # would not make up what top_p leaves. 1 and the last term are for rounding.
        width = temperature * (tl.log(vocab_size / (1.0 - top_p)) + 1.0) + tl.abs(peak) * 1e-6
        bottom = tl.maximum(kept_value, peak - width)
        middle = tl.minimum(_key_of(peak - (peak - bottom) * 0.33, UNUSED_BITS), highest - 1)
        high = tl.minimum(_key_of(peak - (peak - bottom) * 0.11, UNUSED_BITS), highest - 1)
        total, at_middle, at_high = _measure(
            row_logits, entries, num_listed, peak, steepness,
            kept_value, _value_of(middle, UNUSED_BITS), _value_of(high, UNUSED_BITS), vocab_size,
            True, BLOCK, AT_ONCE, FIXED
        )  # fmt: skip
        if limited:
            # Of logits equal to the last one, only those within top_k count.
            larger, _, _ = _measure(
                row_logits, entries, num_listed, peak, steepness, kept_value, kept_value, kept_value, vocab_size,
                False, BLOCK, AT_ONCE, FIXED
            )  # fmt: skip
            equal = (tl.exp2((kept_value - peak) * steepness) * FIXED).to(tl.int64).to(tl.float64)
            total += (top_k.to(tl.float64) - larger) * equal
        target = top_p.to(tl.float64) * total
        above = tl.maximum(kept, _key_of(bottom, UNUSED_BITS)) - 1
        above = tl.where(at_middle >= target, tl.maximum(above, middle), above)
        above = tl.where(at_high >= target, tl.maximum(above, high), above)
        upto = tl.where(at_high < target, high, highest)
        upto = tl.where(at_middle < target, middle, upto)
        kept = _smallest(
            above, tl.maximum(upto, above + 1), least_peak, target, row_logits, entries, blocks, peaks, peak, steepness,
            vocab_size, True, BLOCK, AT_ONCE, UNUSED_BITS, FIXED
        )  # fmt: skip
    return _value_of(kept, UNUSED_BITS)
