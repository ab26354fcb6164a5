"""A step's duration from a machine's peak arithmetic and memory bandwidth.

Owns the arithmetic. Linear layers and attention run one after another on a device, so each has its own roofline,
`max(flops / peak, bytes / bandwidth)`, with both peaks lowered by an efficiency. A fixed time per step is added. The
model ignores that kernels fall short of their peaks at small shapes, and the host's work between steps.
"""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.simulator.cost.hardware import Machine, Model
from scheduler_svc.simulator.cost.step_cost import IntArray, StepShape

_NONE = np.zeros(0, np.int64)
# The cost of a token of a long prompt is the mean over a chunk of this many.
_LONG_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One worker: `ranks` devices split every layer evenly (tensor parallel), and wait for each other in collectives.

    A weight, activation or cache entry has `value_bytes`. A collective takes `rank_link_us` and the time of its bytes
    at `rank_link_gbps` (10^9 bit/s in one direction), or at the machine's own rate to a peer.
    """

    machine: Machine
    model: Model
    page_size: int
    ranks: int = 1
    value_bytes: int = 2
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    overhead_us: float = 500.0
    rank_link_us: float = 10.0
    rank_link_gbps: float | None = None

    @property
    def name(self) -> str:
        """The model and the machine."""
        many = f"{self.ranks} x " if self.ranks > 1 else ""
        return f"{self.model.name} on {many}{self.machine.name}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model."""
        return self.model.parameters * self.value_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers and ranks together. A KV head is on each rank whose query heads read it."""
        copies = max(1.0, self.ranks / self.model.kv_heads)
        return int(copies * self.model.kv_values * self.value_bytes * self.page_size)

    def pages_in(self, share: float) -> int:
        """Returns the pages that fit beside the weights in this share of the ranks' memory; below 1 if none does."""
        return int((share * self.ranks * self.machine.memory - self.weight_bytes) // self.page_bytes)

    def seconds(self, step: StepShape) -> float:
        """Returns the duration of one step."""
        model, machine = self.model, self.machine
        flops_rate = self.flops_efficiency * machine.flops * self.ranks
        bytes_rate = self.bandwidth_efficiency * machine.bandwidth * self.ranks
        multiplied = step.computed_tokens * model.layer_parameters + step.samples * model.head_parameters
        read = (model.layer_parameters + (model.head_parameters if step.samples else 0)) * self.value_bytes
        seconds = max(2 * multiplied / flops_rate, read / bytes_rate)
        for layers, window in self._layers():
            pairs, chunk_keys = chunk_attention(step.chunk_starts, step.chunk_counts, window)
            decode_keys = int((np.minimum(step.contexts, window) if window else step.contexts).sum())
            per_pair = 4 * layers * model.heads * model.head_dim
            per_key = 2 * layers * max(model.kv_heads, self.ranks) * model.head_dim * self.value_bytes
            seconds += max(per_pair * pairs / flops_rate, per_key * chunk_keys / bytes_rate)
            seconds += max(per_pair * decode_keys / flops_rate, per_key * decode_keys / bytes_rate)
        seconds += 2 * step.pages_copied * self.page_bytes / bytes_rate
        seconds += step.host_pages_moved * self.page_copy_us() * 1e-6
        return seconds + self._collective_seconds(step) + self.overhead_us * 1e-6

    def page_copy_us(self) -> float:
        """Returns the time to copy one page over the host link, to which each device contributes its part."""
        return 1e6 * self.page_bytes / (self.bandwidth_efficiency * self.machine.host_bandwidth * self.ranks)

    def token_us(self) -> float:
        """Returns the time per token of a long prompt's first chunk."""
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
        """Returns the number of layers of each attention pattern and their window, 0 for full attention."""
        model = self.model
        kinds = [(model.layers - model.window_layers, 0), (model.window_layers, model.window)]
        return [kind for kind in kinds if kind[0]]

    def _collective_seconds(self, step: StepShape) -> float:
        """Returns the time of a step's collectives.

        A ring all-reduce of the activations after the embedding, after each attention and after each MLP; the gathering
        of the logits; and the broadcast of the tokens.
        """
        if self.ranks == 1:
            return 0.0
        all_reduces, part = 2 * self.model.layers + 1, (self.ranks - 1) / self.ranks
        moved = (
            2 * part * all_reduces * step.computed_tokens * self.model.hidden
            + part * step.samples * self.model.vocab_size
        )
        rate = self.bandwidth_efficiency * self.machine.peer_bandwidth
        if self.rank_link_gbps is not None:
            rate = self.rank_link_gbps * 1e9 / 8
        return moved * self.value_bytes / rate + (all_reduces + 2) * self.rank_link_us * 1e-6


def chunk_attention(starts: IntArray, counts: IntArray, window: int) -> tuple[int, int]:
    """Returns the unmasked pairs of query and key, and the keys read, of chunks at these positions.

    Query q attends to q + 1 keys, of which a `window` above 0 leaves the newest.
    """
    if not len(starts):
        return 0, 0
    ends = starts + counts
    pairs = _pairs_before(ends, window) - _pairs_before(starts, window)
    keys = ends if not window else np.minimum(ends, counts + window - 1)
    return int(pairs.sum()), int(keys.sum())


def _pairs_before(ends: IntArray, window: int) -> IntArray:
    """Returns the pairs of all queries before each of `ends`."""
    growing = ends if not window else np.minimum(ends, window)
    return growing * (growing + 1) // 2 + (ends - growing) * window
