"""Attention alone: each query against a plain softmax in float64 over its own gathered keys and values."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from gpu_worker import attention
from gpu_worker.attention import PagedLayer, UncompiledAttentionError, paged_attention
from gpu_worker.slots import DeviceTables, RowTables
from gpu_worker.step import lay_out
from gpu_worker.upload import step_arrays
from gpu_worker.wire import read_plan
from tests.gpu_worker.plans import TinyCore
from tests.gpu_worker.reference import plain_attention
from tests.gpu_worker.rig import Rig, RigSpec
from tests.gpu_worker.test_forward import SPECS


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_query_sees_its_own_past(spec: RigSpec, rig_of: Callable[[RigSpec], Rig]) -> None:
    """One mixed step over a pool full of noise; rows 1 and 2 decode at page edges, row 3 computes a chunk."""
    rig = rig_of(spec)
    page_size, device = spec.page_size, rig.device
    kernels, cache = rig.runner.kernels, rig.runner.cache
    draw = torch.Generator().manual_seed(6)
    for pool in (cache.keys[0], cache.values[0]):
        pool.copy_(torch.randn(pool.shape, generator=draw))
    tables, core = RowTables(rig.geometry), TinyCore(rig.geometry, page_order=range(rig.geometry.num_pages - 1, 0, -1))
    core.add(1, [0] * page_size)
    core.add(2, [0] * (page_size + 1))
    core.add(3, [0] * (2 * page_size + 7))
    on_device = rig.runner.device_tables
    for chunks in ({1: page_size, 2: page_size + 1}, {3: page_size - 3}):
        plan = read_plan(core.plan(chunks=chunks), rig.geometry)
        set_pages(on_device, tables.apply(plan))
        tables.advance(plan)
    plan = read_plan(core.plan(chunks={3: page_size + 6}, decode=[2, 1]), rig.geometry)
    edits = tables.apply(plan)
    set_pages(on_device, edits)
    layout = lay_out(plan, edits, tables, on_device.slot_of_row, rig.runner.shapes, kernels.views)
    arrays = step_arrays(layout, tables, on_device.slot_of_row)
    context = kernels.context(layout, {name: torch.from_numpy(a).to(device) for name, a in arrays.items()})
    num_kv_heads, _, head_dim = cache.keys[0].shape
    num_tokens, num_heads = layout.positions.size, num_kv_heads * spec.group
    query, key, value = (
        torch.randn(1, heads, num_tokens, head_dim, generator=draw).to(device, spec.dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    kind = kernels.prefill[layout.prefill.bucket][0].kind
    scale, module = kind.scale, SimpleNamespace(paged_layer=PagedLayer(index=0, kind=kind))
    with torch.inference_mode():
        out, _ = paged_attention(module, query, key, value, None, scaling=scale, step=context)
    assert out.shape == (1, num_tokens, num_heads, head_dim)
    # (row, packed tokens): decode rows in the plan's order, their padding, then the chunk.
    first_chunk_token = layout.decode.rows.size
    own_tokens = {2: [0], 1: [1], 3: list(range(first_chunk_token, first_chunk_token + page_size + 6))}
    for row, tokens in own_tokens.items():
        last = int(layout.positions[tokens[-1]])
        pages = torch.tensor(core.rows[row].pages, device=device)
        slots = (pages[:, None] * page_size + torch.arange(page_size, device=device)).flatten()[: last + 1]
        keys, values = cache.keys[0][:, slots], cache.values[0][:, slots]
        assert torch.equal(keys[:, last], key[0, :, tokens[-1]]), "the step's own key was not written"
        positions = torch.tensor(layout.positions[tokens], device=device)
        visible = torch.arange(last + 1, device=device) <= positions[:, None]
        own = query[0][:, tokens]
        exact = plain_attention(own.double(), keys.double(), values.double(), visible, scale)
        plain = plain_attention(own, keys, values, visible, scale).double()
        error = (out[0, tokens].transpose(0, 1).double() - exact).abs().max()
        floor = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[spec.dtype]
        assert error <= 2 * (plain - exact).abs().max() + floor
    for pool in (cache.keys[0], cache.values[0]):
        pool.zero_()


def set_pages(tables: DeviceTables, edits: object) -> None:
    device = tables.pages.device
    columns = (tables.slot_of_row[edits.rows], edits.cols, edits.pages)
    tables.set_pages(*(torch.from_numpy(column).to(device) for column in columns))


def test_uncompiled_flex_attention_is_unreachable(rig_of: Callable[[RigSpec], Rig]) -> None:
    """With compilation turned off the call raises, where FlexAttention itself would give a wrong answer."""
    rig = rig_of(SPECS[0])
    kernel = next(iter(rig.runner.kernels.decode.values()))[0]
    slots = torch.zeros(1, dtype=torch.int64, device=rig.device)
    query = kernel.query.new_zeros(1, kernel.query.shape[1] * kernel.query.shape[2], kernel.query.shape[3])
    with torch.compiler.set_stance("force_eager"), pytest.raises(UncompiledAttentionError):
        kernel(query, slots, rig.runner.cache.keys[0], rig.runner.cache.values[0], None)


def test_nothing_compiles_after_the_warm_up(rig_of: Callable[[RigSpec], Rig]) -> None:
    """A shape that was not warmed raises; it does not compile in the middle of serving."""
    rig = rig_of(SPECS[0])
    kernel = next(iter(rig.runner.kernels.decode.values()))[0]
    wrong = kernel.query[:1, :, :, : kernel.query.shape[3] // 2]
    key = rig.runner.cache.keys[0][None, :, :, : kernel.query.shape[3] // 2]
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        kernel.kernel(wrong, key, key, None)


def test_the_registered_name_builds_no_mask() -> None:
    attention.register()
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[attention.ATTENTION_NAME] is paged_attention
    assert attention.ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS
