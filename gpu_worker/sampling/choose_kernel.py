"""The two Triton kernels of `sampler.choose` on a GPU. Needs Triton, which CUDA builds of torch bring along.

`summarise` reads each row once, in blocks of tokens, by many programs: peaks, finiteness, and the winners of rows that
are greedy or unfiltered. `decide` has one program per row: it takes the winner of the blocks' winners, or finds the
threshold of a row that filters and draws from what is left, reading only blocks with a peak that is high enough.

`kept_from` finds the smallest logit of a row that top-k and top-p keep, without a sort. Float32 numbers have an
order-preserving map to integers, their keys. Both thresholds are the smallest key t for which the logits above t
measure less than a target: counted for top-k, summed as probabilities for top-p. A pass over the row measures three
pivots, and so divides the range of t by four. This is radix selection (Alabi et al. 2012, "Fast k-selection algorithms
for graphics processing units") with pivots in place of histograms: Triton has no histogram of weights. It gives the
exact threshold, as a sort would.

Probabilities, relative to the largest one, are summed as integers (fixed point), so that a sum does not depend on its
order. A row's threshold on logits is its threshold on tempered logits, because dividing keeps the order.

Shape legend: S samples, B blocks of a row, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
# Tiles of logits that a program asks for ahead of the one that it works on, and that one.
PIPELINE = tl.constexpr(4)
# In the first passes the pivots divide the range of values, not of keys, evenly: keys are dense around 0.
_EVEN_PASSES = tl.constexpr(3)
# Tokens of a block, and the blocks that a program reads at once.
_BLOCK = 1024
_BLOCKS_AT_ONCE = 2
# 128 registers per thread leave room for two programs of 8 warps on an SM.
OPTIONS = {"num_warps": 8, "maxnreg": 128}
# Low bits of a logit that are 0 after its conversion to float32.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# Beyond every token.
_NO_TOKEN = tl.constexpr((1 << 31) - 1)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
# These arguments' addresses are aligned differently in every step; specialised kernels would be compiled for each.
PARAMETERS = ["temperature", "top_p", "min_p", "top_k", "seed", "sample_idx", "position", "at"]


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
            # Among logits equal to the last one, only those within top_k count.
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


@triton.jit
def _mix(z):
    """choice.py's hash, on uint64."""
    z = (z ^ (z >> 30)) * _FACTOR_1
    z = (z ^ (z >> 27)) * _FACTOR_2
    return z ^ (z >> 31)


@triton.jit
def _noise_key(seed, sample_idx, position):
    """choice.noise_keys of one row; all int64."""
    mixed = _mix(_mix(seed.to(tl.uint64) + _GOLDEN) ^ sample_idx.to(tl.uint64))
    return _mix(mixed + position.to(tl.uint64) * _GOLDEN)


@triton.jit
def _gumbel(key, tokens):
    """choice.gumbel_noise: the same uniform numbers, bit by bit; the logarithms may differ in their last bit."""
    bits = _mix(key + (tokens + 1).to(tl.uint64) * _GOLDEN)
    uniform = ((bits >> 32).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log1p after Kahan: the quotient corrects the rounding of 1 - u, which the logarithm alone would see.
    rest = 1.0 - uniform
    corrected = tl.log(rest) * (uniform / (1.0 - tl.where(rest == 1.0, 0.0, rest)))
    return -tl.log(tl.where(rest == 1.0, uniform, -corrected))


@triton.jit
def _is_filtered(at, top_p, min_p, top_k, vocab_size):
    limit = tl.load(top_k + at)
    limited = (limit > 0) & (limit < vocab_size)
    return limited | (tl.load(top_p + at) < 1.0) | (tl.load(min_p + at) > 0.0)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS)
def summarise(
    logits, stride, temperature, top_p, min_p, top_k, seed, sample_idx, position, at, peaks, scores, places,
    vocab_size, num_blocks,
    MAY_BAN: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, UNUSED_BITS: tl.constexpr,
    FIXED: tl.constexpr
):  # fmt: skip
    """Writes peaks and scores float32 [S, B] and places int32 [S, B]; a peak is NaN if the row's token is -1 for it.

    The score and place are those of the block's winner: its largest logit, or its largest tempered logit with noise if
    the row draws and does not filter.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = tokens < vocab_size
    values = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    broken = (values != values) | (values == float("inf"))
    if not MAY_BAN:
        broken = broken | (inside & (values == float("-inf")))
    values = tl.where(broken, float("-inf"), values)
    peak = tl.max(values, axis=1)
    score = peak
    place = tl.min(tl.where(values == peak[:, None], tokens, _NO_TOKEN), axis=1)
    if temperature is not None:
        entry = row if at is None else tl.load(at + row)
        degree = tl.load(temperature + entry)
        if (degree > 0.0) & (_is_filtered(entry, top_p, min_p, top_k, vocab_size) == 0):
            key = _noise_key(tl.load(seed + entry), tl.load(sample_idx + entry), tl.load(position + entry))
            noised = tl.div_rn(values, degree) + _gumbel(key, tokens)
            score = tl.max(noised, axis=1)
            place = tl.min(tl.where(noised == score[:, None], tokens, _NO_TOKEN), axis=1)
    peak = tl.where(tl.max(broken.to(tl.int32), axis=1) > 0, float("nan"), peak)
    to = row * num_blocks + blocks
    tl.store(peaks + to, peak, mask=blocks < num_blocks)
    tl.store(scores + to, score, mask=blocks < num_blocks)
    tl.store(places + to, place, mask=blocks < num_blocks)


@triton.jit
def _draw(row_logits, entries, num_listed, degree, floor, key, vocab_size, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Returns the token of the listed blocks with the largest sum of tempered logit, at least `floor`, and noise."""
    lanes = tl.arange(0, BLOCK)[None, :]
    best = tl.full([AT_ONCE, BLOCK], float("-inf"), tl.float32)
    winner = tl.full([AT_ONCE, BLOCK], _NO_TOKEN, tl.int32)
    for first in tl.range(0, num_listed, AT_ONCE, num_stages=PIPELINE):
        entry = first + tl.arange(0, AT_ONCE)
        block = tl.load(entries + entry, mask=entry < num_listed, other=0)
        tokens = block[:, None] * BLOCK + lanes
        inside = (entry < num_listed)[:, None] & (tokens < vocab_size)
        values = tl.load(row_logits + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        tempered = tl.div_rn(values, degree)
        noised = tl.where(tempered >= floor, tempered + _gumbel(key, tokens), float("-inf"))
        # Lists ascend, so the lowest token of equal ones stays.
        winner = tl.where(noised > best, tokens, winner)
        best = tl.maximum(noised, best)
    return tl.min(tl.where(best == tl.max(best), winner, _NO_TOKEN))


@triton.jit(do_not_specialize_on_alignment=PARAMETERS)
def decide(
    logits, stride, temperature, top_p, min_p, top_k, seed, sample_idx, position, at, peaks, scores, places,
    tokens, floors, vocab_size, num_blocks,
    MAY_BAN: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, UNUSED_BITS: tl.constexpr,
    FIXED: tl.constexpr
):  # fmt: skip
    """Writes tokens int64 [S] and floors float32 [S]. WIDTH is B rounded up to a power of two.

    Overwrites the `places` of a row that filters with its list of blocks.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, WIDTH)
    here = row * num_blocks + blocks
    exists = blocks < num_blocks
    block_peaks = tl.load(peaks + here, mask=exists, other=float("-inf"))
    is_broken = tl.max((block_peaks != block_peaks).to(tl.int32)) > 0
    block_peaks = tl.where(block_peaks != block_peaks, float("-inf"), block_peaks)
    peak = tl.max(block_peaks)
    usable = (peak > float("-inf")) & (is_broken == 0)
    score = tl.load(scores + here, mask=exists, other=float("-inf"))
    place = tl.load(places + here, mask=exists, other=_NO_TOKEN)
    token = tl.min(tl.where(score == tl.max(score), place, _NO_TOKEN))
    floor = tl.full([], float("-inf"), tl.float32)
    if temperature is not None:
        idx = row if at is None else tl.load(at + row)
        degree = tl.load(temperature + idx)
        if usable & (degree > 0.0) & _is_filtered(idx, top_p, min_p, top_k, vocab_size):
            row_logits, entries = logits + row * stride, places + row * num_blocks
            kept = kept_from(
                row_logits, entries, blocks, block_peaks, peak, degree, tl.load(top_k + idx), tl.load(top_p + idx),
                vocab_size, BLOCK, AT_ONCE, UNUSED_BITS, FIXED
            )  # fmt: skip
            share = tl.load(min_p + idx)
            least = tl.where(share > 0.0, tl.log(tl.maximum(share, 1e-37)), float("-inf"))
            floor = tl.maximum(tl.div_rn(kept, degree), tl.div_rn(peak, degree) + least)
            key = _noise_key(tl.load(seed + idx), tl.load(sample_idx + idx), tl.load(position + idx))
            remaining = (block_peaks > float("-inf")) & (tl.div_rn(block_peaks, degree) >= floor)
            num_listed = listed(entries, blocks, remaining)
            token = _draw(row_logits, entries, num_listed, degree, floor, key, vocab_size, BLOCK, AT_ONCE)
    tl.store(tokens + row, tl.where(usable, token, -1).to(tl.int64))
    tl.store(floors + row, floor)


def constants_of(vocab_size: int, dtype: torch.dtype, *, may_ban: bool) -> dict[str, int | float | bool]:
    """The constants that both kernels are compiled with, by name."""
    return {
        "MAY_BAN": may_ban,
        "BLOCK": _BLOCK,
        "AT_ONCE": _BLOCKS_AT_ONCE,
        "WIDTH": triton.next_power_of_2(triton.cdiv(vocab_size, _BLOCK)),
        "UNUSED_BITS": _UNUSED_BITS[dtype],
        # A sum of V shares stays below 2**62.
        "FIXED": 2.0 ** (62 - (vocab_size - 1).bit_length()),
    }


def choose_on_gpu(
    logits: Tensor, columns: tuple[Tensor | None, ...], at: Tensor | None, may_ban: bool
) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 [S] and floors float32 [S] of logits [S, V]; `columns` are DrawInputs' fields or None.

    Does not wait for the device. Two launches; the scratch memory is 12 bytes per block of a row.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    floors = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return tokens, floors
    # Each of its own, so that all are aligned: other addresses would compile other kernels.
    peaks = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(peaks)
    places = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    given = (logits, logits.stride(0), *columns, at, peaks, scores, places)
    constants = constants_of(vocab_size, logits.dtype, may_ban=may_ban)
    grid = num_rows, triton.cdiv(num_blocks, _BLOCKS_AT_ONCE)
    summarise[grid](*given, vocab_size, num_blocks, **constants, **OPTIONS)
    decide[(num_rows,)](*given, tokens, floors, vocab_size, num_blocks, **constants, **OPTIONS)
    return tokens, floors
