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


@dataclass(frozen=True, slots=True, kw_only=True)
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

_MODELS = (
    Model(name="llama-3.1-8b", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128,
          vocab_size=128256, max_length=131072),
    Model(name="llama-3.1-70b", layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128,
          vocab_size=128256, max_length=131072),
    Model(name="llama-3.2-1b", layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64,
          vocab_size=128256, max_length=131072, tied=True),
    Model(name="llama-3.2-3b", layers=28, hidden=3072, intermediate=8192, heads=24, kv_heads=8, head_dim=128,
          vocab_size=128256, max_length=131072, tied=True),
    Model(name="qwen-2.5-0.5b", layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64,
          vocab_size=151936, max_length=32768, tied=True),
    Model(name="qwen-2.5-7b", layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128,
          vocab_size=152064, max_length=32768),
    Model(name="qwen-2.5-32b", layers=64, hidden=5120, intermediate=27648, heads=40, kv_heads=8, head_dim=128,
          vocab_size=152064, max_length=32768),
    Model(name="qwen-3-0.6b", layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128,
          vocab_size=151936, max_length=40960, tied=True),
    Model(name="qwen-3-8b", layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128,
          vocab_size=151936, max_length=40960),
    Model(name="gemma-2-2b", layers=26, hidden=2304, intermediate=9216, heads=8, kv_heads=4, head_dim=256,
          vocab_size=256000, max_length=8192, tied=True, window=4096, window_layers=13),
    Model(name="gemma-2-9b", layers=42, hidden=3584, intermediate=14336, heads=16, kv_heads=8, head_dim=256,
          vocab_size=256000, max_length=8192, tied=True, window=4096, window_layers=21),
    Model(name="mistral-7b-v0.1", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128,
          vocab_size=32000, max_length=32768, window=4096, window_layers=32),
    Model(name="mistral-7b-v0.3", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128,
          vocab_size=32768, max_length=32768),
    Model(name="phi-4", layers=40, hidden=5120, intermediate=17920, heads=40, kv_heads=10, head_dim=128,
          vocab_size=100352, max_length=16384),
    Model(name="smollm2-135m", layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64,
          vocab_size=49152, max_length=8192, tied=True),
)  # fmt: skip

MACHINES: Mapping[str, Machine] = {machine.name: machine for machine in _MACHINES}
MODELS: Mapping[str, Model] = {model.name: model for model in _MODELS}
