"""Steps of a few rows through the worker's own layout and masks: whole prompts, a second chunk beside decode rows, and
decode rows with an idle slot.

Owns these steps and attention over them written out, in any dtype. Runs on a CPU with the shapes of a GPU.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.arrays import Int64Array
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind, AttentionPattern, LayerMap
from gpu_worker.attention.paged import StepContext
from gpu_worker.cuda.flex import FlexKernels
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.geometry import Geometry
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.step_layout import lay_out
from gpu_worker.step.device_model import DeviceTables
from gpu_worker.trees import mapped
from gpu_worker.wire.frames import read_plan
from tests.gpu_worker.attention.small_layers import layers_of
from tests.gpu_worker.plans import TinyCore, geometry_of
from tests.rigs.padded_shapes import placed_in

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of layer in one dtype."""

    kind: AttentionKind
    dtype: torch.dtype
    page_size: int = 128

    @property
    def geometry(self) -> Geometry:
        """The pool and limits of the steps."""
        sizes = {"page_size": self.page_size, "max_length": 3 * self.page_size}
        return geometry_of(token_budget=640, chunk_align=128, vocab_size=9, **sizes)

    @property
    def layers(self) -> LayerMap:
        """The only layer."""
        return layers_of(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """The queries of one call that stand for tokens: their places among the call's query rows, rows and positions."""

    places: Int64Array
    rows: Int64Array
    positions: Int64Array


class Steps:
    """The steps of a case, one after another, each with the masks as the worker updates them."""

    def __init__(self, case: Case) -> None:
        geometry = case.geometry
        order = np.random.default_rng(3).permutation(np.arange(1, geometry.num_pages)).tolist()
        self._geometry, self._core = geometry, TinyCore(geometry, page_order=order)
        self.tables, self.on_device = RowTables(geometry), DeviceTables(geometry, CPU, width=geometry.num_pages)
        self.cache = KvCache(
            case.layers, num_pages=geometry.num_pages, page_size=geometry.page_size, dtype=case.dtype, device=CPU
        )
        shapes = Shapes.of(geometry)
        self.kernels = FlexKernels(case.layers, geometry, shapes, self.on_device, case.dtype)
        self._place = placed_in(shapes, geometry, self.kernels.views)
        page = geometry.page_size
        self.lengths = {1: 1, 2: page + 6, 3: 2 * page - 1, 4: 5}
        for row, length in self.lengths.items():
            self._core.add(row, [1] * length)

    def run(self, chunks: dict[int, int], decode: list[int]) -> tuple[StepContext, Queries | None, Queries | None]:
        """One step; the masks' context, and the queries of its decode call and of its prefill call."""
        plan = read_plan(self._core.plan(chunks=chunks, decode=decode), self._geometry)
        edits = self.tables.apply(plan)
        layout = mapped(
            lay_out(plan, edits, self.tables, self.kernels.views, self._place),
            torch.from_numpy,
        )
        page_edits = layout.inputs.edits if layout.has_static_edits else layout.extras.edits
        if page_edits is not None:
            self.on_device.set_pages(page_edits)
        context = self.kernels.context(layout.inputs)
        of_decode = of_prefill = None
        if decode:
            rows = plan.decode_rows.astype(np.int64)
            of_decode = Queries(places=np.arange(rows.size), rows=rows, positions=self.tables.position[rows])
        if chunks:
            starts, counts = plan.chunk_starts.astype(np.int64), plan.chunk_counts.astype(np.int64)
            spans = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
            places = context.prefill_places.numpy()[: counts.sum()]
            rows = np.repeat(plan.chunk_rows.astype(np.int64), counts)
            of_prefill = Queries(places=places, rows=rows, positions=np.concatenate(spans))
        self.tables.advance(plan)
        return context, of_decode, of_prefill


def seen(pattern: AttentionPattern, position: int) -> Int64Array:
    """The positions that a query sees, by the definition of the pattern."""
    at = np.arange(position + 1)
    if pattern.window is None:
        return at
    return at[(at > position - pattern.window) | (at < pattern.sink_tokens)]


def attention(
    case: Case, steps: Steps, queries: Queries, query_THD: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[T, H, D]: softmax attention of queries [T, H, D] over the rows' pages, one query after another, in `dtype`."""
    kind, page = case.kind, case.page_size
    keys, values = steps.cache.keys[0].to(dtype), steps.cache.values[0].to(dtype)
    out = torch.zeros(query_THD.shape, dtype=dtype)
    for i, (row, position) in enumerate(zip(queries.rows, queries.positions, strict=True)):
        at = seen(kind.pattern, int(position))
        slots = torch.from_numpy(steps.tables.page_table[row][at // page].astype(np.int64) * page + at % page)
        query = query_THD[i].to(dtype).view(kind.num_kv_heads, kind.group, -1)
        scores = torch.einsum("kgd,knd->kgn", query, keys[:, slots]) * kind.scale
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype).view(kind.num_kv_heads, kind.group, 1)], -1)
        shares = scores.softmax(-1)[..., : slots.numel()]
        out[i] = torch.einsum("kgn,knd->kgd", shares, values[:, slots]).reshape(kind.num_heads, -1)
    return out
