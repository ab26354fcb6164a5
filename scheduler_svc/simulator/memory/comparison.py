"""What a cache and a window save. Owns the choice of lengths and windows; `recompute.py` does the arithmetic."""

from dataclasses import dataclass

from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.recompute import Cost, generate, next_token, read_tokens
from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import Workload

_WINDOWS = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLength:
    """Costs of one sequence of `length` tokens: of its last token, and of all of them behind the prompt."""

    length: int
    prompt: int
    token_cached: Cost
    token_recomputed: Cost
    total_cached: Cost
    total_recomputed: Cost

    @property
    def flops_ratio(self) -> float:
        """FLOPs of the sequence without a cache, divided by those with one."""
        return self.total_recomputed.flops / self.total_cached.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Mean K/V bytes that attention reads per generated token of the workload."""

    window: int
    full_bytes: float
    bytes: float

    @property
    def saved(self) -> float:
        """The share of the reads that the window avoids."""
        return 1 - self.bytes / self.full_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a cache saves at each length, and what each window saves."""

    lengths: tuple[AtLength, ...]
    windows: tuple[Window, ...]


def compare(settings: Settings, workload: Workload, geometry: Geometry) -> Comparison:
    """Compares at powers of two up to the longest sequence, and at the run's window or else at common ones."""
    longest = settings.max_length
    lengths = [*(2**k for k in range(7, 21) if 2**k < longest), longest]
    sequences = workload.in_order()
    generated = sum(sequence.length - sequence.prompt for sequence in sequences)
    windows = [settings.window] if settings.window is not None else [w for w in _WINDOWS if w < longest]

    def bytes_read(window: int | None) -> float:
        return read_tokens(sequences, window) * geometry.token_bytes / generated

    full = bytes_read(None)
    return Comparison(
        lengths=tuple(_at(settings, geometry, length) for length in lengths),
        windows=tuple(Window(window=window, full_bytes=full, bytes=bytes_read(window)) for window in windows),
    )


def _at(settings: Settings, geometry: Geometry, length: int) -> AtLength:
    prompt, window = min(max(1, round(length * settings.prompt_share)), length - 1), settings.window
    return AtLength(
        length=length,
        prompt=prompt,
        token_cached=next_token(geometry, length - 1, cached=True, window=window),
        token_recomputed=next_token(geometry, length - 1, cached=False, window=window),
        total_cached=generate(geometry, prompt, length, cached=True, window=window),
        total_recomputed=generate(geometry, prompt, length, cached=False, window=window),
    )
