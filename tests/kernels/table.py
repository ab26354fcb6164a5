"""The table of resources as Markdown, one file per card: what is committed in expected/ and compared.

Owns its columns. Calls of neighbouring buckets with equal figures share a line.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from tests.kernels.cards import Card

Line = dict[str, Any]

_COLUMNS = ("call", "dtype", "buckets", "splits", "tile", "warps/stages", "registers", "shared KiB", "spilled bytes",
            "blocks (warps) per SM", "products", "loads", "launches")  # fmt: skip


def markdown(card: Card, lines: Iterable[Line]) -> str:
    """The table of one card. `lines` are those of `measure`, in order."""
    out = [f"# Kernels on {card.name} (sm_{card.sm})", ""]
    out += ["Compiled, not run. `make test-kernels ARGS=--write` writes this file."]
    for (model, kind), calls in groupby(lines, lambda line: (title(line), _kind(line))):
        if f"## {model}" not in out:
            out += ["", f"## {model}"]
        out += ["", f"{kind}:", "", f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
        out += [_row(list(same)) for _, same in groupby(calls, _figures)]
    return "\n".join(out) + "\n"


def title(line: Line) -> str:
    tokens = line["page_size"] * line["num_pages"]
    return f"{line['model']}, {line['num_layers']} layers, {line['num_pages']} pages ({tokens} tokens)"


def _kind(line: Line) -> str:
    return f"{line['kind']}; head dimension {line['head_dim']}, {line['group']} query heads per KV head"


def _figures(line: Line) -> tuple[Any, ...]:
    return (
        line["call"],
        line["dtype"],
        line["tile"],
        f"{line['warps']}/{line['stages']}",
        line["registers"],
        f"{line['shared_kib']:.1f}",
        line["spilled"] or "-",
        f"{line['blocks']} ({line['resident_warps']})",
        line["products"],
        "cp.async" if line["copies"] else "registers",
    )


def _row(same: list[Line]) -> str:
    call, dtype, *figures = _figures(same[0])
    by_bucket = [", ".join(str(line[name]) for line in same) for name in ("bucket", "splits", "launches")]
    buckets, splits, launches = by_bucket
    return f"| {' | '.join(map(str, (call, dtype, buckets, splits, *figures, launches)))} |"
