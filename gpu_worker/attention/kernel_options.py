"""The options of the attention kernels, from one table by device, dtype, head dimension, group and decode bucket.

Owns `kernel_options.toml`, how it is read, and the choice of an entry. A card is an argument, so that a choice needs no
device. A CPU has its own option, which the table does not contain. Knows nothing of masks or steps.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from gpu_worker.attention.layers import AttentionKind

_TABLE = Path(__file__).with_name("kernel_options.toml")
_UNLIMITED = 1 << 30
# With that of decode torch raises if the split-KV kernel cannot be used, instead of falling back silently.
_BACKENDS = {"decode": "TRITON_DECODE", "prefill": "TRITON"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the choice depends on of a CUDA device."""

    # As torch.cuda.get_device_name gives it.
    name: str
    # Bytes of shared memory that one block may request.
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "Card | None":
        """The card of a CUDA device, None for a CPU."""
        if device.type == "cpu":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(name=properties.name, shared_bytes=properties.shared_memory_per_block_optin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the choice depends on of an attention call."""

    dtype: torch.dtype
    head_dim: int
    # Query heads per KV head.
    group: int
    # Attention slots of a decode call, query positions of a prefill call.
    bucket: int
    # Positions of a query tile of the mask (of a prefill call), and of a block of keys: the kernel's tiles divide them.
    q_block: int
    kv_block: int

    @classmethod
    def of(cls, kind: AttentionKind, mask: BlockMask, *, bucket: int, dtype: torch.dtype) -> "Call":
        q_block, kv_block = mask.BLOCK_SIZE
        return cls(
            dtype=dtype, head_dim=kind.head_dim, group=kind.group, bucket=bucket, q_block=q_block, kv_block=kv_block
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the table: the calls that it covers, and their options."""

    # Bytes of an element.
    itemsize: int
    head_dim: int
    block_n: int
    num_warps: int
    num_stages: int
    # Query rows of a prefill tile. Decode kernels have one tile for the rows of a group.
    block_m: int | None = None
    # Parts of a row that are computed in parallel; None: FlexAttention's choice, two blocks for each multiprocessor.
    split_kv: int | None = None
    # The entry covers calls up to these, and cards with this name in theirs and at least this shared memory.
    group: int = _UNLIMITED
    bucket: int = _UNLIMITED
    device: str = ""
    shared_kib: int = 0

    def covers(self, call: Call, card: Card) -> bool:
        return (
            self.itemsize == call.dtype.itemsize
            and self.head_dim >= call.head_dim
            and self.group >= call.group
            and self.bucket >= call.bucket
            and self.device in card.name
            and self.shared_kib << 10 <= card.shared_bytes
        )

    def options(self, call: Call) -> dict[str, int]:
        """The options as FlexAttention names them; tiles are cut to the blocks of the call's mask."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options["BLOCK_N"] = min(self.block_n, call.kv_block)
        if self.block_m is not None:
            options["BLOCK_M"] = min(self.block_m, call.q_block)
        if self.split_kv is not None:
            options["SPLIT_KV"] = self.split_kv
        return options


def entries(table: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, tuple[Entry, ...]]:
    """The entries of each kind of call in a parsed table. Raises TypeError for a field that no entry has."""
    return {name: tuple(Entry(**fields) for fields in lines) for name, lines in table.items()}


def chosen(lines: Iterable[Entry], call: Call, card: Card) -> Entry:
    entry_of_call = next((entry for entry in lines if entry.covers(call, card)), None)
    assert entry_of_call is not None, f"{_TABLE.name} has no entry for {call} on {card}"
    return entry_of_call


@cache
def _table() -> dict[str, tuple[Entry, ...]]:
    return entries(tomllib.loads(_TABLE.read_text()))


def most_head_dim(dtype: torch.dtype) -> int:
    """The widest heads for which there is a decode kernel on every card."""
    return max(entry.head_dim for entry in _table()["decode"] if entry.itemsize == dtype.itemsize)


def most_group(dtype: torch.dtype, head_dim: int) -> int:
    """The most query heads per KV head for which there is a decode kernel."""
    lines = [entry for entry in _table()["decode"] if entry.itemsize == dtype.itemsize and entry.head_dim >= head_dim]
    return max(entry.group for entry in lines)


def kernel_options(which: str, card: Card | None, call: Call) -> dict[str, Any]:
    """FlexAttention's options for a call; which: decode or prefill; card None: a CPU."""
    if card is None:
        # A size below the block selects the attention template: the CPU's decode template needs full blocks and reads
        # the whole pool.
        return {"PARTITION_SIZE": call.kv_block // 2}
    return {"BACKEND": _BACKENDS[which], **chosen(_table()[which], call, card).options(call)}
