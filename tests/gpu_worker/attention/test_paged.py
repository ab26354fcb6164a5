"""Attention alone: each query against a plain softmax in float64 over its own gathered keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpu_worker.attention import paged
from gpu_worker.attention.flex_kernel import UncompiledAttentionError
from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.attention.layers import AttentionKind
from gpu_worker.attention.paged import PagedLayer, paged_attention
from gpu_worker.attention.views import View
from gpu_worker.cpu.steps import CpuKernels
from gpu_worker.cuda.flex import FlexKernels
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.cuda.steps import PaddedSteps
from gpu_worker.geometry import Geometry, align_up
from gpu_worker.layout.row_tables import RowTables
from gpu_worker.layout.step_layout import lay_out
from gpu_worker.step.device_model import DeviceTables
from gpu_worker.trees import mapped
from gpu_worker.wire.frames import read_plan
from tests.gpu_worker.attention.small_layers import layers_of
from tests.gpu_worker.cpu.attention_rig import kind_of
from tests.gpu_worker.plans import TinyCore, geometry_of
from tests.gpu_worker.reference import plain_attention
from tests.gpu_worker.rig import ERROR_FLOOR, Rig, RigSpec
from tests.gpu_worker.rig_specs import FLEX, SPECS
from tests.rigs.padded_shapes import Place, placed_in, unpadded
from tests.rigs.plain_flex import plain_flex


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_query_attends_only_to_its_own_earlier_positions(spec: RigSpec, rig_of: Callable[[RigSpec], Rig]) -> None:
    runner = rig_of(spec).runner
    steps, device = runner.steps, runner.on_device
    place = unpadded(runner.geometry)
    if isinstance(steps, PaddedSteps):
        place = placed_in(steps.shapes, runner.geometry, steps.views)
    kinds = [layer.kind for layer in device.layers.layers]
    for index in sorted({kinds.index(kind) for kind in kinds}):
        check_mixed_step(runner.geometry, place, steps.views, steps.kernels, device.cache, device.tables, index)


# Latent attention's dimensions, a window shorter than a page, sink tokens, soft-capping and sinks.
PATTERN = {"window": 5, "sink_tokens": 3, "has_learned_sinks": True}
EVERYTHING = replace(kind_of(3, 1, 24, 16, softcap=2.0, **PATTERN), scale=0.3)
# Heads that need no padding: decode kernels read the model's own queries.
UNPADDED = replace(kind_of(), scale=0.3)


@pytest.mark.parametrize("on_cpu", [True, False], ids=["shapes of a CPU", "shapes of a GPU"])
def test_unequal_head_sizes_work_with_every_feature_together(device: torch.device, on_cpu: bool) -> None:
    check_one_layer(EVERYTHING, torch.device("cpu") if on_cpu else device, torch.float16, on_cpu=on_cpu)


@pytest.mark.parametrize("kind", [EVERYTHING, UNPADDED], ids=["everything", "unpadded"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_stands_for_kernels_in_other_tests_is_right(kind: AttentionKind, dtype: torch.dtype) -> None:
    with plain_flex():
        check_one_layer(kind, torch.device("cpu"), dtype, on_cpu=False)


def check_one_layer(kind: AttentionKind, device: torch.device, dtype: torch.dtype, *, on_cpu: bool) -> None:
    layers = layers_of(kind)
    geometry = geometry_of(num_pages=14, max_rows=3, max_length=64, token_budget=96, chunk_align=32, vocab_size=9)
    tables = DeviceTables(geometry, device, width=14 if device.type == "cpu" else None)
    cache = KvCache(layers, num_pages=14, page_size=16, dtype=dtype, device=device)
    if on_cpu:
        place, kernels, views = unpadded(geometry), CpuKernels(layers, geometry, tables.pages, dtype), ()
    else:
        kernels = FlexKernels(layers, geometry, shapes := Shapes.of(geometry), tables, dtype)
        place, views = placed_in(shapes, geometry, kernels.views), kernels.views
    check_mixed_step(geometry, place, views, kernels, cache, tables, 0)


def check_mixed_step(
    geometry: Geometry,
    place: Place,
    views: Sequence[View],
    kernels: FlexKernels | CpuKernels,
    cache: KvCache,
    on_device: DeviceTables,
    index: int,
) -> None:
    """Rows 2 and 1 decode beside a chunk of row 3, in layer `index`, over a pool of noise with NaN where the kernels
    must not read: in page 0, in free pages, in pages behind the window."""
    page_size, device = geometry.page_size, on_device.pages.device
    core = TinyCore(geometry, page_order=range(geometry.num_pages - 1, 0, -1))
    for row, start, end in (
        (1, 3 * page_size, 3 * page_size + 1),
        (2, 2 * page_size + 1, 2 * page_size + 2),
        (3, 2 * page_size - 3, 3 * page_size + 3),
    ):
        core.add(row, [0] * end).position = start
    plan = read_plan(core.plan(chunks={3: page_size + 6}, decode=[2, 1]), geometry)
    tables = RowTables(geometry)
    edits = tables.apply(plan)
    layout = lay_out(plan, edits, tables, views, place)
    staged = mapped(layout, lambda array: torch.from_numpy(array).to(device))
    on_device.set_pages(staged.inputs.edits if staged.has_static_edits else staged.extras.edits)
    context = kernels.context(staged.inputs)
    kind = context.decode[index].kind
    window, num_tokens = kind.pattern.window or geometry.max_length, layout.inputs.positions.size
    sink_tokens = kind.pattern.sink_tokens
    # Packed tokens of each row: decode rows in the plan's order, their padding, then the chunk.
    begin = layout.inputs.decode.rows.size
    own_tokens = {2: [0], 1: [1], 3: list(range(begin, begin + page_size + 6))}

    draw = torch.Generator().manual_seed(6)
    readable, pool_tokens = torch.zeros(geometry.num_pages, dtype=torch.bool), geometry.num_pages * page_size
    for row, tokens in own_tokens.items():
        first_seen = max(0, int(layout.inputs.positions[tokens[0]]) - window + 1)
        last_seen = int(layout.inputs.positions[tokens[-1]])
        readable[core.rows[row].pages[first_seen // page_size : last_seen // page_size + 1]] = True
        readable[core.rows[row].pages[: -(-sink_tokens // page_size)]] = True
    behind = [page for row in core.rows.values() for page in row.pages if not readable[page]]
    assert bool(behind) == (window + align_up(sink_tokens, page_size) < 2 * page_size - 2)
    for pool, dim in ((cache.keys[index], kind.key_dim), (cache.values[index], kind.value_dim)):
        noise = torch.randn(kind.num_kv_heads, pool_tokens, dim, generator=draw)
        noise[:, ~readable.repeat_interleave(page_size)] = torch.nan
        pool[:, :pool_tokens, :dim] = noise
    query, key, value = (
        torch.randn(1, heads, num_tokens, dim, generator=draw).to(device, cache.keys[index].dtype)
        for heads, dim in (
            (kind.num_heads, kind.key_dim),
            (kind.num_kv_heads, kind.key_dim),
            (kind.num_kv_heads, kind.value_dim),
        )
    )
    sinks = torch.randn(kind.num_heads, generator=draw).to(query) if kind.pattern.has_learned_sinks else None
    module = SimpleNamespace(
        paged_layer=PagedLayer(keys=cache.keys[index], values=cache.values[index], kernel_idx=index, kind=kind)
    )
    options = {"scaling": kind.scale, "softcap": kind.softcap, "s_aux": sinks}
    with torch.inference_mode():
        out, _ = paged_attention(module, query, key, value, None, step=context, **options)
    assert out.shape == (1, num_tokens, kind.num_heads, kind.value_dim)
    if not context.in_place:
        prefill, pools = context.prefill[index], (cache.keys[index][None], cache.values[index][None])
        of_all_queries = prefill.kernel(prefill.query.transpose(0, 1)[None], *pools, sinks)
        assert of_all_queries.isfinite().all(), "padding beside a chunk reads what it must not"
    for row, tokens in own_tokens.items():
        positions = torch.tensor(layout.inputs.positions[tokens], device=device)
        first, last = max(0, int(positions[0]) - window + 1), int(positions[-1])
        pages = torch.tensor(core.rows[row].pages, device=device)
        seen = torch.cat([torch.arange(min(sink_tokens, first)), torch.arange(first, last + 1)]).to(device)
        slots = (pages[:, None] * page_size + torch.arange(page_size, device=device)).flatten()[seen]
        keys = cache.keys[index][:, slots, : kind.key_dim]
        values = cache.values[index][:, slots, : kind.value_dim]
        assert torch.equal(keys[:, -1], key[0, :, tokens[-1]]), "the step's own key was not written"
        near = (seen > positions[:, None] - window) | (seen < sink_tokens)
        visible = (seen <= positions[:, None]) & near
        own = query[0][:, tokens]
        rule = {"softcap": kind.softcap, "sinks": sinks}
        exact = plain_attention(own.double(), keys.double(), values.double(), visible, kind.scale, **rule)
        plain = plain_attention(own, keys, values, visible, kind.scale, **rule).double()
        error = (out[0, tokens].transpose(0, 1).double() - exact).abs().max()
        assert error <= 2 * (plain - exact).abs().max() + ERROR_FLOOR[query.dtype]
    for pool in (cache.keys[index], cache.values[index]):
        assert not pool[:, pool_tokens:].any(), "the sinks' page was written"
        pool.zero_()


def test_uncompiled_flex_attention_is_unreachable(rig_of: Callable[[RigSpec], Rig]) -> None:
    """Without compilation the call raises, because FlexAttention itself would return wrong results."""
    rig = rig_of(FLEX)
    kernel = next(iter(rig.runner.steps.kernels.decode.values()))[0]
    query = kernel.query.flatten(1, 2)
    with torch.compiler.set_stance("force_eager"), pytest.raises(UncompiledAttentionError):
        kernel(query, None, rig.runner.on_device.cache.keys[0], rig.runner.on_device.cache.values[0], None)


def test_nothing_compiles_after_the_warm_up(rig_of: Callable[[RigSpec], Rig]) -> None:
    """A shape that was not warmed up raises instead of compiling in the middle of serving."""
    rig = rig_of(FLEX)
    kernel = next(iter(rig.runner.steps.kernels.decode.values()))[0]
    wrong = kernel.query[:1, :, :, : kernel.query.shape[3] // 2]
    key = rig.runner.on_device.cache.keys[0][None, :, :, : kernel.query.shape[3] // 2]
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        kernel.kernel(wrong, key, key, None)


def test_a_kernel_refuses_more_threads_than_it_has_buffers(
    rig_of: Callable[[RigSpec], Rig], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would write beyond its buffers."""
    if device.type != "cpu":
        pytest.skip("threads are a CPU's")
    rig = rig_of(FLEX)
    kernel = next(iter(rig.runner.steps.kernels.decode.values()))[0]
    key = rig.runner.on_device.cache.keys[0][None]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(AssertionError, match="more threads than the kernel was compiled for"):
        kernel.kernel(kernel.query, key, key, None)


def test_the_registered_name_builds_no_mask() -> None:
    paged.register()
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[paged.ATTENTION_NAME] is paged_attention
    assert paged.ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS
