"""Machines and models by name: figures from public data sheets and configs, in SI units.

Owns the two tables. `cost.py` computes step times from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One device: dense 16-bit FLOP/s, bytes/s and bytes of its memory, bytes/s to the host and to a peer."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    host_bandwidth: float
    peer_bandwidth: float


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder. `window_layers` of its layers attend only to the newest `window` positions."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    tied: bool = False
    window: int = 0
    window_layers: int = 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers, which multiply every token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, which multiply every sampled position."""
        return self.vocab_size * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def kv_values(self) -> int:
        """Numbers in the KV cache per position, all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def slides(self) -> bool:
        """Whether every layer has the window, so that pages behind it can be freed."""
        return self.window > 0 and self.window_layers == self.layers


# From data sheets: dense 16-bit tensor throughput, PCIe to the host and NVLink (else PCIe) to a peer, in one direction.
_MACHINES = (
    Machine("b200", 2250e12, 8000e9, 180e9, 64e9, 900e9),
    Machine("h200", 989e12, 4800e9, 141e9, 64e9, 450e9),
    Machine("h100", 989e12, 3350e9, 80e9, 64e9, 450e9),
    Machine("h100-pcie", 756e12, 2000e9, 80e9, 64e9, 64e9),
    Machine("a100", 312e12, 2039e9, 80e9, 32e9, 300e9),
    Machine("a100-40gb", 312e12, 1555e9, 40e9, 32e9, 300e9),
    Machine("l40s", 362e12, 864e9, 48e9, 32e9, 32e9),
    Machine("l4", 121e12, 300e9, 24e9, 32e9, 32e9),
    Machine("a10g", 70e12, 600e9, 24e9, 32e9, 32e9),
    Machine("rtx-4090", 165e12, 1008e9, 24e9, 32e9, 32e9),
    # A server socket with 16-bit matrix instructions, eight channels of DDR5.
    Machine("cpu", 10e12, 250e9, 256e9, 250e9, 30e9),
)

# Each with its layers, hidden and intermediate size, heads, KV heads, size of a head, vocabulary and longest sequence.
_MODELS = (
    Model("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    Model("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    Model("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, tied=True),
    Model("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072, tied=True),
    Model("qwen-2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, 32768, tied=True),
    Model("qwen-2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 32768),
    Model("qwen-2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064, 32768),
    Model("qwen-3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, 40960, tied=True),
    Model("qwen-3-8b", 36, 4096, 12288, 32, 8, 128, 151936, 40960),
    Model("gemma-2-2b", 26, 2304, 9216, 8, 4, 256, 256000, 8192, tied=True, window=4096, window_layers=13),
    Model("gemma-2-9b", 42, 3584, 14336, 16, 8, 256, 256000, 8192, tied=True, window=4096, window_layers=21),
    Model("mistral-7b-v0.1", 32, 4096, 14336, 32, 8, 128, 32000, 32768, window=4096, window_layers=32),
    Model("mistral-7b-v0.3", 32, 4096, 14336, 32, 8, 128, 32768, 32768),
    Model("phi-4", 40, 5120, 17920, 40, 10, 128, 100352, 16384),
    Model("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True),
)

MACHINES: Mapping[str, Machine] = {machine.name: machine for machine in _MACHINES}
MODELS: Mapping[str, Model] = {model.name: model for model in _MODELS}
