"""A step's duration from a machine's two roofs: arithmetic and memory.

Owns the arithmetic. Linear layers and attention run one after another on a device, so each has a roofline of its own:
`max(flops / peak, bytes / bandwidth)`, both roofs lowered by an efficiency, and a fixed time per step on top. What it
leaves out: that kernels run short of their roofs at small shapes, and whatever the host does between steps.
"""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.simulator.cost.hardware import Machine, Model
from scheduler_svc.simulator.cost.step_cost import IntArray, StepShape

_NONE = np.zeros(0, np.int64)
# An all-reduce's latency, twice a layer.
_ALL_REDUCE_SECONDS = 10e-6
# Tokens over which the cost of one token of a long prompt is taken.
_LONG_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """`devices` share every layer alike (tensor parallel); `value_bytes` of a weight, an activation, a cache entry."""

    machine: Machine
    model: Model
    page_size: int
    devices: int = 1
    value_bytes: int = 2
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    overhead_seconds: float = 500e-6

    @property
    def name(self) -> str:
        """Model and machine."""
        many = f"{self.devices} x " if self.devices > 1 else ""
        return f"{self.model.name} on {many}{self.machine.name}"

    @property
    def weight_bytes(self) -> int:
        """Of the whole model."""
        return self.model.parameters * self.value_bytes

    @property
    def page_bytes(self) -> int:
        """Of one page, all layers and devices."""
        return self.model.kv_values * self.value_bytes * self.page_size

    def pages_in(self, share: float) -> int:
        """Pages that this share of the devices' memory holds beside the weights; less than 1: it holds none."""
        return int((share * self.devices * self.machine.memory - self.weight_bytes) // self.page_bytes)

    def seconds(self, step: StepShape) -> float:
        """Of one step."""
        model, machine = self.model, self.machine
        flops_rate = self.flops_efficiency * machine.flops * self.devices
        bytes_rate = self.bandwidth_efficiency * machine.bandwidth * self.devices
        multiplied = step.computed_tokens * model.layer_parameters + step.samples * model.head_parameters
        read = (model.layer_parameters + (model.head_parameters if step.samples else 0)) * self.value_bytes
        seconds = max(2 * multiplied / flops_rate, read / bytes_rate)
        for layers, window in self._layers():
            pairs, chunk_keys = chunk_attention(step.chunk_starts, step.chunk_counts, window)
            decode_keys = int((np.minimum(step.contexts, window) if window else step.contexts).sum())
            per_pair = 4 * layers * model.heads * model.head_dim
            per_key = 2 * layers * model.kv_heads * model.head_dim * self.value_bytes
            seconds += max(per_pair * pairs / flops_rate, per_key * chunk_keys / bytes_rate)
            seconds += max(per_pair * decode_keys / flops_rate, per_key * decode_keys / bytes_rate)
        seconds += 2 * step.pages_copied * self.page_bytes / bytes_rate
        seconds += step.host_pages_moved * self.page_copy_us() * 1e-6
        return seconds + self._all_reduce_seconds(step.computed_tokens) + self.overhead_seconds

    def page_copy_us(self) -> float:
        """Over the link to the host, each device its part."""
        return 1e6 * self.page_bytes / (self.bandwidth_efficiency * self.machine.host_bandwidth * self.devices)

    def token_us(self) -> float:
        """Of a long prompt's first chunk."""
        counts = np.array([_LONG_CHUNK])
        step = StepShape(
            chunk_starts=np.zeros(1, np.int64),
            chunk_counts=counts,
            contexts=_NONE,
            computed_tokens=_LONG_CHUNK,
            samples=0,
        )
        return 1e6 * self.seconds(step) / _LONG_CHUNK

    def _layers(self) -> list[tuple[int, int]]:
        """Layers of each visibility and their window, 0 for none."""
        model = self.model
        kinds = [(model.layers - model.window_layers, 0), (model.window_layers, model.window)]
        return [kind for kind in kinds if kind[0]]

    def _all_reduce_seconds(self, tokens: int) -> float:
        """Two ring all-reduces of the activations per layer."""
        if self.devices == 1:
            return 0.0
        part = 2 * (self.devices - 1) / self.devices
        moved = part * tokens * self.model.hidden * self.value_bytes
        rate = self.bandwidth_efficiency * self.machine.peer_bandwidth
        return 2 * self.model.layers * (moved / rate + _ALL_REDUCE_SECONDS)


def chunk_attention(starts: IntArray, counts: IntArray, window: int) -> tuple[int, int]:
    """Of chunks at these positions: pairs of query and key that are not masked, and keys that are read.

    Query q sees q + 1 keys, at most `window` of them; 0 is none.
    """
    if not len(starts):
        return 0, 0
    ends = starts + counts
    pairs = _pairs_before(ends, window) - _pairs_before(starts, window)
    keys = ends if not window else np.minimum(ends, counts + window - 1)
    return int(pairs.sum()), int(keys.sum())


def _pairs_before(ends: IntArray, window: int) -> IntArray:
    """Pairs of all queries before each of `ends`."""
    growing = ends if not window else np.minimum(ends, window)
    return growing * (growing + 1) // 2 + (ends - growing) * window
