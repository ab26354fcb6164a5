"""Gumbel noise as a pure function of (seed, sample, position, token): no generator has a state.

Hashing is splitmix64 (Steele, Lea, Flood 2014) on int64, where overflow wraps around.
"""

import torch
from torch import Tensor

# Elements of a scratch tensor; rows beyond that are processed in parts.
_MAX_SCRATCH = 1 << 24


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """Computes splitmix64's finaliser on int64. The masks make the shifts logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FACTOR_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _FACTOR_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def noise_keys(seed: Tensor, sample_idx: Tensor, position: Tensor) -> Tensor:
    """Returns one key per row, int64 [R]; the arguments have the same shape."""
    return _mix(_mix(_mix(seed + _GOLDEN) ^ sample_idx) + position * _GOLDEN)


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Returns standard Gumbel noise, float32, for int64 `keys` and `tokens`, which are broadcast with each other."""
    bits = _mix(keys + (tokens + 1) * _GOLDEN)
    # Uniform in (0, 1), fine near 0, where the exponential -log(1 - u) decides the winner.
    uniform = ((bits >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def add_noise(logits: Tensor, keys: Tensor) -> None:
    """Adds each row's noise to logits [R, V] in place; tokens that a filter removed stay at -inf."""
    num_rows, vocab_size = logits.shape
    tokens = torch.arange(vocab_size, device=logits.device)
    step = max(1, _MAX_SCRATCH // vocab_size)
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        logits[part] += gumbel_noise(keys[part, None], tokens)
