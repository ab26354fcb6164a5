"""Generates and compiles every kernel of the models for one card and dtype, in a process of its own.

`python -m tests.kernels.measure CARD DTYPE` writes one JSON object per attention call to standard output, and progress
to standard error. Owns which calls are made. Equal kernels are compiled once.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

# ptxas reports only what it compiles, so nothing may come from a cache; set before torch and Triton are imported.
_CACHES = tempfile.TemporaryDirectory(prefix="tandem-kernels-")
for _name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
    os.environ[_name] = os.path.join(_CACHES.name, _name)

import torch  # noqa: E402

from gpu_worker.attention.layers import AttentionKind  # noqa: E402
from tests.kernels import fake_device  # noqa: E402
from tests.kernels.cards import CARDS, KIB, Card  # noqa: E402
from tests.kernels.compile import Resources, compiled  # noqa: E402
from tests.kernels.generate import Generator, Kernel  # noqa: E402
from tests.kernels.models import MODELS, Fitted, fitted  # noqa: E402

_FEW_ROWS = 32


def main(card: Card, dtype: torch.dtype) -> None:
    """Prints the lines of a card."""
    found = {name: fitted(name, card, dtype) for name in MODELS}
    fake_device.install(card)
    known: dict[str, Resources] = {}
    begun = time.monotonic()
    for name, model in found.items():
        for call in _calls(model, dtype):
            resources = [_resources(kernel, known) for kernel in call["kernels"] if kernel.is_template]
            call["launches"] = len(call.pop("kernels"))
            print(json.dumps({"model": name, **call, **_described(resources[0], card)}), flush=True)
        print(
            f"{card.key} {str(dtype)[6:]} {name}: {len(known)} kernels compiled after {time.monotonic() - begun:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def _calls(model: Fitted, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    geometry = model.sizes.geometry
    generator = Generator(model.layers, geometry, dtype)
    shapes = generator.shapes
    rows = [size for size in shapes.decode_buckets if size <= _FEW_ROWS and size & (size - 1) == 0]
    for kind in model.layers.kinds:
        common = {
            "num_layers": model.num_layers,
            "num_pages": geometry.num_pages,
            "page_size": geometry.page_size,
            "max_length": geometry.max_length,
            "kind": _named(kind),
            "head_dim": kind.head_dim,
            "group": kind.group,
            "dtype": str(dtype)[6:],
        }
        for bucket in dict.fromkeys((*rows, shapes.decode_buckets[-1])):
            yield common | _of_call("decode", bucket, generator.decode(kind, bucket))
        for bucket in shapes.prefill_buckets:
            yield common | _of_call("prefill", bucket, generator.prefill(kind, bucket))


def _of_call(call: str, bucket: int, kernels: list[Kernel]) -> dict[str, Any]:
    (template,) = (kernel for kernel in kernels if kernel.is_template)
    return {
        "call": call,
        "bucket": bucket,
        "splits": int(template.constant("SPLIT_KV") or 1),
        "tile": f"{template.constant('BLOCK_M')}x{template.constant('BLOCK_N')}",
        "index": template.constant("INDEX_DTYPE").removeprefix("tl."),
        "kernels": kernels,
    }


def _resources(kernel: Kernel, known: dict[str, Resources]) -> Resources:
    source = kernel.normal_source
    if source not in known:
        known[source] = compiled(kernel)
    return known[source]


def _described(taken: Resources, card: Card) -> dict[str, Any]:
    blocks = taken.blocks_per_multiprocessor(card)
    return {
        "warps": taken.warps,
        "stages": taken.stages,
        "registers": taken.registers,
        "shared_kib": taken.shared / KIB,
        "spilled": taken.spilled,
        "stack": taken.stack,
        "blocks": blocks,
        "resident_warps": blocks * taken.warps,
        "products": taken.products,
        "copies": taken.copies > 0,
    }


def _named(kind: AttentionKind) -> str:
    """What a query sees, and what changes its scores."""
    pattern = kind.pattern
    words = ["full" if pattern.window is None else f"window {pattern.window}"]
    words += ["learned sinks"] if pattern.has_learned_sinks else []
    words += ["soft-capped"] if kind.softcap is not None else []
    return ", ".join(words)


if __name__ == "__main__":
    main(CARDS[sys.argv[1]], getattr(torch, sys.argv[2]))
