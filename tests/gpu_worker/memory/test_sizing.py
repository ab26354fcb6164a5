"""Sizes by settings and figures: they fit, or are refused with the value that would fit. Allocates no memory."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker.memory.costs import CPU_RESERVE_BYTES, GPU_RESERVE_BYTES, Costs, PoolTensors
from gpu_worker.memory.sizing import (
    DoesNotFit,
    Machine,
    Measured,
    Sizes,
    check_host_memory,
    choose_sizes,
    ledger,
    readable,
    settable,
)
from gpu_worker.settings import WorkerSettings
from tests.kernels import models, table
from tests.kernels.cards import CARDS, Card

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# 8 GiB in 16 bits; a token's activations take 100 KiB, its K and V 32 KiB: a page of 64 tokens is 2 MiB.
COSTS = Costs(
    weights=16 * GIB,
    dtype="float32",
    smaller_weights=("bfloat16", 8 * GIB),
    activations_per_token=100 * KIB,
    # 32 layers, K and V, 8 heads of 16 in four bytes.
    pool=(PoolTensors(count=64, heads=8, head_dim=16, itemsize=4),),
    vocab_size=1000,
    default_length=4096,
    length_limit=4096,
)


def sizes(
    free: int = 64 * GIB,
    *,
    costs: Costs = COSTS,
    on_cpu: bool = True,
    free_host: int = 0,
    reach: tuple[int, int] = (0, 0),
    shares_pool: bool = False,
    held_pages: int = 0,
    captures: bool = False,
    **settings: object,
) -> Sizes:
    machine = Machine(
        place="cpu" if on_cpu else "cuda:0",
        free=free,
        free_host=free_host,
        shares_pool=shares_pool,
        held_pages=held_pages,
    )
    return choose_sizes(WorkerSettings(**settings), costs, machine, reach, captures=captures)


def refused(free: int = 64 * GIB, *, costs: Costs = COSTS, **settings: object) -> str:
    with pytest.raises(DoesNotFit) as error:
        sizes(free, costs=costs, **settings)
    return str(error.value)


def fitting(message: str, *names: str) -> tuple[str, ...]:
    """What would fit, by the end of a refusal: a value of the first of these settings, and of the others."""
    values = r"(?: or | with )".join(rf"{name} (\S+)" for name in names)
    would = re.search(rf"[;:] {values} would fit$", message)
    assert would is not None, message
    return would.groups()


def taken(chosen: Sizes) -> int:
    """The bytes beside the reserve."""
    return chosen.weights + chosen.step + chosen.graphs + chosen.tables + chosen.pool


def test_defaults_depend_on_the_device() -> None:
    cpu = sizes()
    assert (cpu.geometry.page_size, cpu.geometry.max_rows, cpu.geometry.token_budget) == (64, 32, 512)
    assert (cpu.pool, cpu.reserve, cpu.geometry.max_length) == (GIB, CPU_RESERVE_BYTES, 4096)
    gpu = sizes(on_cpu=False)
    assert (gpu.geometry.page_size, gpu.geometry.max_rows, gpu.geometry.token_budget) == (128, 256, 4096)
    assert (cpu.geometry.chunk_align, gpu.geometry.chunk_align) == (64, 128)
    # 256 rows of 4,096 tokens, 32 KiB each, and page 0.
    assert (gpu.pool, gpu.reserve) == (32 * GIB + 4 * MIB, GPU_RESERVE_BYTES)


def test_the_default_pool_has_no_more_pages_than_rows_can_use() -> None:
    assert sizes(max_rows=1, max_length=128).geometry.num_pages == 3
    assert sizes(max_rows=1, max_length=128, keep_free_bytes=GIB).geometry.num_pages == 3
    asked = sizes(max_rows=1, max_length=128, pool_bytes=GIB)
    assert asked.geometry.num_pages > 3
    assert GIB - asked.pool < asked.pool / asked.geometry.num_pages


@pytest.mark.parametrize(("on_cpu", "keep"), [(False, None), (False, 0), (False, 5 * GIB), (True, GIB)])
def test_a_pool_uses_free_memory_except_the_reserve(on_cpu: bool, keep: int | None) -> None:
    """By default on a GPU, and on a CPU if configured."""
    chosen = sizes(40 * GIB, on_cpu=on_cpu, max_rows=256, keep_free_bytes=keep)
    reserve = GPU_RESERVE_BYTES if keep is None else keep
    assert chosen.reserve == reserve
    # Less than another page, or on a GPU another 64 of some 9,000, is left, beside tables counted for the longest row.
    step = 2 * MIB if on_cpu else 64 * 4 * MIB
    assert reserve <= 40 * GIB - taken(chosen) < reserve + step + MIB


@pytest.mark.parametrize("free", [17 * GIB, 18 * GIB, 24 * GIB, 40 * GIB])
def test_a_little_more_free_memory_mostly_gives_a_gpu_the_same_pages(free: int) -> None:
    """So a start finds the kernels that the one before compiled, for a part of the pool below a hundredth."""
    most = {"on_cpu": False, "max_rows": 256, "keep_free_bytes": 0}
    numbers = [sizes(free + i * MIB, **most).geometry.num_pages for i in range(512)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) <= 2 + 512 * MIB / (numbers[0] * 4 * MIB / 256)
    for i, num_pages in enumerate(numbers):
        chosen = sizes(free + i * MIB, **most)
        assert 0 <= free + i * MIB - taken(chosen) < max(num_pages // 128, 1) * 4 * MIB + MIB


def test_the_default_pool_on_a_cpu_fits_free_memory() -> None:
    chosen = sizes(17 * GIB)
    assert 0 < chosen.pool < GIB
    assert taken(chosen) + chosen.reserve <= 17 * GIB


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_length": 5000}, "max_length is 5000; the model's limit is 4096"),
        ({"page_size": 48}, "page_size is 48; it must be a power of two"),
        ({"token_budget": 16}, "token_budget is 16; it must be at least 96"),
        (
            {"pool_bytes": 3 * MIB},
            "pool_bytes is 3145728, which is too small; the minimum is two pages of 2097152 bytes",
        ),
        ({"pool_bytes": 0}, r"which is too small; .*: pool_bytes 4.0MiB would fit"),
        (
            {"max_length": 4096, "num_pages": 3},
            r"max_length is 4096, which needs num_pages 65 or pool_bytes 130.0MiB; the pool has 3 pages; "
            "a larger pool, or max_length 128, would fit",
        ),
    ],
)
def test_contradictory_sizes_are_refused_for_any_memory(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        sizes(**settings)


def test_weights_that_do_not_fit_are_refused() -> None:
    assert refused(12 * GIB) == (
        "weights take 16.0 GiB in float32; 12.0 GiB are free on cpu; dtype bfloat16 would take 8.0 GiB"
    )
    assert refused(4 * GIB).endswith("; use a smaller model, or more memory")
    half = replace(COSTS, weights=8 * GIB, dtype="bfloat16", smaller_weights=None)
    assert refused(4 * GIB, costs=half).startswith("weights take 8.0 GiB in bfloat16; 4.0 GiB are free on cpu; use")


def test_weights_that_pass_through_host_memory_must_fit_it() -> None:
    check_host_memory(COSTS, 16 * GIB)
    problem = (
        r"weights take 16\.0 GiB in float32, and without the package accelerate they are loaded through host memory, "
        r"where 4\.0 GiB are free; install accelerate"
    )
    with pytest.raises(DoesNotFit, match=problem):
        check_host_memory(COSTS, 4 * GIB)


@pytest.mark.parametrize("asked", [{"num_pages": 40_000}, {"pool_bytes": 40 * GIB}])
def test_a_pool_that_does_not_fit_names_the_largest_that_does(asked: dict[str, int]) -> None:
    rest = {"max_rows": 1000, "max_length": 4096}
    message = refused(24 * GIB, **asked, **rest)
    assert "of 24.0 GiB free on cpu, weights take 16.0 GiB, a step" in message
    pool_bytes, num_pages = fitting(message, "pool_bytes", "num_pages")
    assert sizes(24 * GIB, pool_bytes=pool_bytes, **rest).pool <= 24 * GIB - 16 * GIB
    num_pages = int(num_pages)
    assert sizes(24 * GIB, num_pages=num_pages, **rest).geometry.num_pages == num_pages
    assert f"or num_pages {num_pages} would" in refused(24 * GIB, num_pages=num_pages + 1, **rest)


@pytest.mark.parametrize(("on_cpu", "captures"), [(True, False), (False, False), (False, True)])
def test_a_step_that_does_not_fit_names_the_budget_that_does(on_cpu: bool, captures: bool) -> None:
    how = {"on_cpu": on_cpu, "captures": captures}
    message = refused(20 * GIB, token_budget=65_536, **how)
    assert "do not fit beside a step of token_budget 65536" in message
    budget = int(*fitting(message, "token_budget"))
    chosen = sizes(20 * GIB, token_budget=budget, **how)
    assert chosen.geometry.token_budget == budget
    assert chosen.graphs == (min(GIB, budget * 100 * KIB + 256 * 16 * 1000) if captures else 0)
    assert f"token_budget {budget} would" in refused(20 * GIB, token_budget=budget + 64, **how)


def test_rows_that_do_not_fit_name_the_number_that_does() -> None:
    costs = replace(COSTS, vocab_size=256_000)
    message = refused(20 * GIB, costs=costs, max_rows=1024)
    rows, budget = map(int, fitting(message, "max_rows", "token_budget"))
    assert sizes(20 * GIB, costs=costs, max_rows=rows, token_budget=budget).geometry.max_rows == rows
    assert f"max_rows {rows} with" in refused(20 * GIB, costs=costs, max_rows=rows + 1, token_budget=budget + 1)


def test_a_reserve_that_is_too_large_names_the_largest() -> None:
    [most] = fitting(refused(20 * GIB, keep_free_bytes=8 * GIB), "keep_free_bytes")
    assert sizes(20 * GIB, keep_free_bytes=most).geometry.num_pages >= 2


def test_smaller_weights_are_proposed_if_no_step_fits() -> None:
    assert refused(16 * GIB + 300 * KIB).endswith("; dtype bfloat16 would take 8.0 GiB")
    costs = replace(COSTS, smaller_weights=None)
    assert refused(16 * GIB + 300 * KIB, costs=costs).endswith("; use a smaller model, or more memory")


def test_a_length_beyond_every_pool_names_the_longest() -> None:
    costs = replace(COSTS, length_limit=1 << 20)
    message = refused(20 * GIB, costs=costs, max_length=1 << 20, max_rows=1)
    assert message.startswith("max_length is 1048576, which needs num_pages 16385 or pool_bytes 32.1GiB; the pool has")
    length = int(*fitting(message, "max_length"))
    chosen = sizes(20 * GIB, costs=costs, max_length=length, max_rows=1, keep_free_bytes=CPU_RESERVE_BYTES)
    assert chosen.geometry.max_length == length


def test_a_sequence_with_a_window_may_exceed_the_pool() -> None:
    """A sequence holds a page of sink tokens, and 18 for a window of 1,024, 64 queries and the next tokens."""
    long = replace(COSTS, length_limit=1 << 20)
    chosen = sizes(costs=long, max_length=1 << 20, num_pages=20, max_rows=1, reach=(1024, 4))
    assert (chosen.geometry.max_length, chosen.geometry.num_pages) == (1 << 20, 20)
    problem = "max_length is 1048576, which needs num_pages 20 or pool_bytes 40.0MiB; the pool has 19 pages; a larger"
    with pytest.raises(ValueError, match=problem):
        sizes(costs=long, max_length=1 << 20, num_pages=19, max_rows=1, reach=(1024, 4))
    # The default length is that of the pool then.
    assert sizes(num_pages=19, max_rows=1, reach=(1024, 4)).geometry.max_length == 18 * 64
    assert sizes(num_pages=20, max_rows=1, reach=(1024, 4)).geometry.max_length == 4096


def test_pages_of_learned_sinks_are_counted() -> None:
    sinks = PoolTensors(count=32, heads=8, head_dim=16, itemsize=4, extra_pages=1)
    costs = replace(COSTS, pool=(replace(COSTS.pool[0], count=32), sinks))
    assert sizes(costs=costs, pool_bytes=GIB).pool == GIB - MIB
    assert sizes(costs=costs, num_pages=10).pool == 10 * 2 * MIB + MIB


@pytest.mark.parametrize(
    ("num_bytes", "text", "below", "above"),
    [
        (0, "0 bytes", "0", "0"),
        (1023, "1023 bytes", "1023", "1023"),
        (1536, "1.5 KiB", "1.5KiB", "1.5KiB"),
        (GIB - 1, "1024.0 MiB", "1023.9MiB", "1024.0MiB"),
        (5 * GIB + 1, "5.0 GiB", "5.0GiB", "5.1GiB"),
    ],
)
def test_sizes_as_text_are_readable_or_settable(num_bytes: int, text: str, below: str, above: str) -> None:
    assert readable(num_bytes) == text
    assert settable(num_bytes) == below
    assert settable(num_bytes, at_least=True) == above
    low, high = (WorkerSettings(pool_bytes=value).pool_bytes for value in (below, above))
    assert low <= num_bytes <= high


@pytest.mark.parametrize("on_cpu", [True, False])
def test_host_memory_holds_whole_pages_and_is_in_the_ledger(on_cpu: bool) -> None:
    """On a CPU they reduce the pool; with a GPU they are host memory."""
    asked, none = (
        sizes(24 * GIB, on_cpu=on_cpu, free_host=9 * GIB, keep_free_bytes=GIB, host_pool_bytes=size, max_rows=500)
        for size in ("4.001GiB", 0)
    )
    page = 2 * MIB if on_cpu else 4 * MIB
    assert (asked.geometry.host_pages, asked.host_pool) == (4 * GIB // page, 4 * GIB)
    assert (none.geometry.host_pages, none.host_pool) == (0, 0)
    # Two buffers of 64 MiB for each direction on a GPU, one of 16 MiB on a CPU.
    buffers = 32 * MIB if on_cpu else 256 * MIB
    assert none.pool - asked.pool == buffers + (4 * GIB if on_cpu else 0)
    assert asked.tables - none.tables == pytest.approx(buffers, rel=0.01)
    place = "cpu" if on_cpu else "cuda:0"
    lines = ledger(asked, place, "float32")
    name = f"  saved KV, {asked.geometry.host_pages} pages" + ("" if on_cpu else ", in host memory")
    assert f"{name:40}     4.0 GiB" in lines
    # Less than a page beside what is kept.
    assert re.fullmatch(r"  free, 1.0 GiB of it kept +1.0 GiB", lines[-1])
    assert not any("saved" in line for line in ledger(none, place, "float32"))


def test_host_memory_that_does_not_fit_names_the_size_that_does() -> None:
    message = refused(24 * GIB, host_pool_bytes=8 * GIB)
    assert message.startswith("host_pool_bytes 8.0 GiB does not fit: of 24.0 GiB free on cpu, weights take 16.0 GiB")
    [fits] = fitting(message, "host_pool_bytes")
    assert sizes(24 * GIB, host_pool_bytes=fits).geometry.num_pages >= 2
    # The message lists the memory that reduces the room for the pool.
    assert f"swapped-out pages {readable(sizes(24 * GIB, host_pool_bytes='4GiB').host_pool)}, and" in refused(
        24 * GIB, host_pool_bytes="4GiB", pool_bytes="4GiB"
    )
    gpu = {"on_cpu": False, "host_pool_bytes": 2 * GIB}
    message = refused(**gpu, free_host=2 * GIB)
    assert message.startswith(
        "host_pool_bytes 2.0 GiB does not fit: of 2.0 GiB free in host memory, 256.0 MiB are kept"
    )
    [fits] = fitting(message, "host_pool_bytes")
    assert sizes(on_cpu=False, free_host=2 * GIB, host_pool_bytes=fits).geometry.host_pages > 400
    [fits] = fitting(refused(**gpu, free_host=257 * MIB), "host_pool_bytes")
    assert sizes(on_cpu=False, host_pool_bytes=fits).geometry.host_pages == 0


def test_buffers_of_host_pages_that_do_not_fit_the_device_are_refused() -> None:
    """They hold no more pages than the host does, so a smaller host_pool_bytes has smaller ones."""
    settings = {"on_cpu": False, "free_host": 9 * GIB, "num_pages": 10}
    full = sizes(64 * GIB, **settings)
    free = full.weights + full.step + full.tables + full.reserve + 45 * MIB
    assert sizes(free, **settings).geometry.num_pages == 10
    message = refused(free, host_pool_bytes=GIB, **settings)
    assert message.startswith("host_pool_bytes 1.0 GiB does not fit: its buffers take 256.0 MiB, and of ")
    assert sizes(free, **settings, host_pool_bytes=fitting(message, "host_pool_bytes")[0]).geometry.host_pages == 0
    # Four buffers of one page of 4 MiB leave room for six pages.
    with pytest.raises(DoesNotFit, match="num_pages is 10, which does not fit"):
        sizes(free, **settings, host_pool_bytes=4 * MIB)
    assert sizes(free, on_cpu=False, free_host=GIB, num_pages=6, host_pool_bytes=4 * MIB).geometry.host_pages == 1


def test_host_memory_below_a_page_is_refused() -> None:
    problem = r"less than a page of 2097152 bytes; set host_pool_bytes to 2.0MiB at least, or to 0"
    with pytest.raises(ValueError, match=problem):
        sizes(host_pool_bytes=2 * MIB - 1)
    assert sizes(host_pool_bytes="2.0MiB").geometry.host_pages == 1


# As `estimate` counts them; see test_memory.py. An H200 shows some 139 GiB to a process.
H200 = 139 * GIB
LLAMA_1B = Costs(
    weights=2_471_645_184,
    dtype="bfloat16",
    smaller_weights=None,
    activations_per_token=100 * KIB,
    # K and V of 16 layers, 8 heads of 64, two bytes.
    pool=(PoolTensors(count=32, heads=8, head_dim=64, itemsize=2),),
    vocab_size=128_256,
    default_length=131_072,
    length_limit=131_072,
)
OLMO_1B = replace(
    LLAMA_1B,
    weights=2_969_817_088,
    pool=(PoolTensors(count=32, heads=16, head_dim=128, itemsize=2),),
    vocab_size=100_352,
    default_length=4096,
    length_limit=4096,
)


@pytest.mark.parametrize(("costs", "num_pages"), [(LLAMA_1B, 32_767), (OLMO_1B, 8191)])
def test_the_default_pool_on_a_gpu_has_fewer_than_2_to_the_31_elements_per_tensor(costs: Costs, num_pages: int) -> None:
    chosen = sizes(H200, costs=costs, on_cpu=False)
    assert (chosen.geometry.num_pages, chosen.is_capped) == (num_pages, True)
    assert sizes(H200, costs=costs, on_cpu=False, keep_free_bytes=0).geometry.num_pages == num_pages
    elements = costs.pool[0].heads * costs.pool[0].head_dim * 128
    assert num_pages * elements < 1 << 31 <= (num_pages + 1) * elements
    # Memory and rows would allow more.
    left = H200 - taken(chosen) - chosen.reserve
    assert left > 128 * costs.kv_per_token
    lines = ledger(chosen, "cuda:0", "bfloat16")
    assert any(f"KV, {num_pages - 1} pages of 128 tokens, capped" in line for line in lines)
    assert lines[-1] == (
        "  capped: K (or V) of one layer must have fewer than 2^31 elements, or its decode kernel does not compile for "
        "a GPU"
    )


def test_small_pools_are_not_capped() -> None:
    small = sizes(80 * GIB, costs=LLAMA_1B, on_cpu=False)
    assert not small.is_capped and small.geometry.num_pages < 32_767
    few_rows = sizes(H200, costs=OLMO_1B, on_cpu=False, max_rows=64)
    assert (few_rows.is_capped, few_rows.geometry.num_pages) == (False, 64 * 32 + 1)
    assert not any("capped" in line for line in ledger(few_rows, "cuda:0", "bfloat16"))
    # A CPU's kernels index with 64 bits.
    on_cpu = sizes(400 * GIB, costs=LLAMA_1B, keep_free_bytes=GIB)
    assert on_cpu.geometry.num_pages * 64 * 8 * 64 > 1 << 31


@pytest.mark.parametrize(
    ("asked", "start"),
    [
        ({"num_pages": 32_768}, "num_pages is 32768; K (or V) of one layer must have fewer than 2^31 elements, or"),
        ({"pool_bytes": 128 * GIB}, "pool_bytes is 137438953472 (32768 pages); K (or V) of one layer must have fewer"),
    ],
)
def test_an_explicit_pool_beyond_the_cap_names_the_largest_that_compiles(asked: dict[str, int], start: str) -> None:
    message = refused(H200, costs=LLAMA_1B, on_cpu=False, **asked)
    assert message.startswith(start)
    pool_bytes, num_pages = fitting(message, "pool_bytes", "num_pages")
    assert num_pages == "32767"
    assert sizes(H200, costs=LLAMA_1B, on_cpu=False, num_pages=32_767).geometry.num_pages == 32_767
    assert sizes(H200, costs=LLAMA_1B, on_cpu=False, pool_bytes=pool_bytes).geometry.num_pages <= 32_767


def test_beyond_the_cap_the_largest_pool_named_also_fits() -> None:
    message = refused(40 * GIB, costs=LLAMA_1B, on_cpu=False, num_pages=40_000)
    _, num_pages = fitting(message, "pool_bytes", "num_pages")
    assert sizes(40 * GIB, costs=LLAMA_1B, on_cpu=False, num_pages=int(num_pages)).pool < 40 * GIB


def test_a_length_beyond_the_cap_names_the_longest() -> None:
    costs = replace(LLAMA_1B, length_limit=1 << 23)
    message = refused(H200, costs=costs, on_cpu=False, max_length=1 << 22, max_rows=1)
    assert "K (or V) of one layer must have fewer than 2^31 elements" in message
    assert int(*fitting(message, "max_length")) == 32_766 * 128
    assert sizes(H200, costs=costs, on_cpu=False, max_length=32_766 * 128, max_rows=1).geometry.num_pages == 32_767


def test_pages_of_learned_sinks_count_toward_the_cap() -> None:
    narrow = PoolTensors(count=2, heads=1, head_dim=64, itemsize=2)
    costs = replace(LLAMA_1B, pool=(narrow, replace(LLAMA_1B.pool[0], extra_pages=1)))
    assert costs.addressable_pages(128) == 32_766
    assert LLAMA_1B.addressable_pages(128) == 32_767
    assert LLAMA_1B.addressable_pages(64) == 65_535


def test_the_ledger_is_printed_as_an_aligned_table() -> None:
    chosen = replace(sizes(), step=50 * MIB, tables=10 * KIB)
    before = ledger(chosen, "cpu", "float32")
    assert before == [
        "memory on cpu                                planned",
        "  weights, float32                          16.0 GiB",
        "  step, 512 tokens, 32 rows                 50.0 MiB",
        "  tables and buffers                        10.0 KiB",
        "  KV, 511 pages of 64 tokens                 1.0 GiB",
        "  free, 256.0 MiB of it kept                47.0 GiB",
    ]
    measured = Measured(weights=GIB, step=None, tables=MIB, pool=2 * GIB, host_pool=0, free=3 * GIB)
    after = ledger(chosen, "cpu", "float32", measured)
    assert [line.split()[-2:] for line in after[1:]] == [
        ["1.0", "GiB"], ["MiB", "-"], ["1.0", "MiB"], ["2.0", "GiB"], ["3.0", "GiB"],
    ]  # fmt: skip
    assert all(line.startswith(other) for line, other in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize(("vocab_size", "graphs"), [(1000, 4096 * 100 * KIB + 256 * 16 * 1000), (256_000, GIB)])
def test_captured_graphs_reduce_the_pool_and_not_what_is_kept_free(vocab_size: int, graphs: int) -> None:
    """They take a step of the whole token budget and all rows, but at most the limit."""
    costs = replace(COSTS, vocab_size=vocab_size)
    without, chosen = (sizes(30 * GIB, costs=costs, on_cpu=False, captures=captures) for captures in (False, True))
    assert (without.graphs, chosen.graphs) == (0, graphs)
    assert without.reserve == chosen.reserve == GPU_RESERVE_BYTES
    # Of some 7,000 pages the number is a multiple of 32.
    assert without.pool - chosen.pool == pytest.approx(graphs, abs=32 * 4 * MIB)
    assert taken(chosen) + chosen.reserve <= 30 * GIB
    message = refused(30 * GIB, costs=costs, on_cpu=False, captures=True, pool_bytes=29 * GIB)
    assert f", captured graphs {readable(graphs)}, tables" in message


def test_the_ledger_has_the_number_and_the_bytes_of_captured_graphs() -> None:
    chosen = replace(sizes(on_cpu=False), graphs=600 * MIB)
    before = ledger(chosen, "cuda:0", "float32")
    assert before[3] == "  graphs, at most 40                       600.0 MiB"
    assert not any("graphs" in line for line in ledger(sizes(on_cpu=False), "cuda:0", "float32"))
    figures = {"weights": GIB, "step": GIB, "tables": MIB, "pool": 2 * GIB, "host_pool": 0, "free": 3 * GIB}
    after = ledger(chosen, "cuda:0", "float32", Measured(**figures, graphs=500 * MIB, num_graphs=34))
    assert after[3] == "  graphs, 34 of at most 40                 600.0 MiB   500.0 MiB"
    assert len(after) == len(before)
    for graphs, num_graphs in ((601 * MIB, 34), (500 * MIB, 41)):
        lines = ledger(chosen, "cuda:0", "float32", Measured(**figures, graphs=graphs, num_graphs=num_graphs))
        assert lines[-1].startswith("  graphs: more than planned")


# Standby workers ---------------------------------------------------------------------------------------------------


def test_standby_workers_get_room_for_all_but_their_pool_on_a_cpu() -> None:
    alone, beside = (sizes(40 * GIB, keep_free_bytes=0, max_rows=256, standbys=number) for number in (0, 1))
    each = alone.weights + alone.step + alone.tables
    # Tables grow a little with the pool.
    assert abs(beside.standbys - each) < 4 * MIB and alone.standbys == 0
    assert abs(alone.pool - beside.pool - each) < 8 * MIB
    [line] = [line for line in ledger(beside, "cpu", "float32") if "standby" in line]
    assert readable(each) in line


@pytest.mark.parametrize(("on_cpu", "keep"), [(False, None), (True, 0)])
def test_a_standby_worker_gets_the_pages_of_the_serving_one(on_cpu: bool, keep: int | None) -> None:
    """On a CPU its pool takes memory when it is written, after the serving worker's end."""
    first = sizes(80 * GIB, on_cpu=on_cpu, keep_free_bytes=keep, standbys=1)
    left = 80 * GIB - taken(first)
    second = sizes(left, on_cpu=on_cpu, standby=True, standby_pages=first.geometry.num_pages)
    assert second.geometry == first.geometry


def test_too_many_standby_workers_are_refused_with_the_number_that_fits() -> None:
    message = refused(60 * GIB, standbys=4)
    assert message.startswith("standbys is 4, and each standby worker takes 16")
    [fits] = re.findall(r"standbys (\d+) would fit", message)
    assert sizes(60 * GIB, standbys=int(fits)).geometry.num_pages > 1
    assert refused(60 * GIB, standbys=int(fits) + 1)


# A pool that outlives its worker on a GPU -----------------------------------------------------------------------------


def test_a_standby_worker_on_a_gpu_takes_little_beside_a_shared_pool() -> None:
    """The card has one pool: the standby worker gets it when the other one is dead."""
    how = {"on_cpu": False, "max_length": 2048, "max_rows": 4096, "token_budget": 8192}
    shared = how | {"shares_pool": True}
    alone, first = sizes(80 * GIB, **shared), sizes(80 * GIB, **shared, standbys=1)
    each = first.weights + first.step + first.tables + first.beside_pool
    assert 0 < alone.beside_pool == first.beside_pool < 3 * GIB
    assert abs(alone.pool - first.pool - each) < GIB
    assert first.pool > 1.5 * sizes(80 * GIB, **how, standbys=1).pool
    # What the first one leaves, its context included.
    left, pages = 80 * GIB - each - first.pool - 400 * MIB, first.geometry.num_pages
    second = sizes(left, **shared, standby=True, standby_pages=pages)
    assert second.geometry == first.geometry
    with pytest.raises(DoesNotFit):
        sizes(second.weights + second.step, **shared, standby=True, standby_pages=pages)


def test_a_worker_that_starts_again_gets_the_pages_of_the_pool_that_is_kept() -> None:
    """Free memory differs a little from start to start, and a pool of another size could not be taken over."""
    shared = {"on_cpu": False, "shares_pool": True}
    pages = sizes(40 * GIB, **shared).geometry.num_pages
    for free in (40 * GIB - 90 * MIB, 40 * GIB + 90 * MIB):
        assert sizes(free, **shared).geometry.num_pages != pages
        assert sizes(free, **shared, held_pages=pages).geometry.num_pages == pages
    # A pool of another size is of another service; sizes that are set decide.
    assert sizes(30 * GIB, **shared, held_pages=pages).geometry.num_pages < pages
    assert sizes(40 * GIB, **shared, held_pages=pages, num_pages=pages - 1).geometry.num_pages == pages - 1


def test_the_ledger_says_what_a_shared_pool_takes() -> None:
    chosen = sizes(40 * GIB, on_cpu=False, shares_pool=True)
    [line] = [line for line in ledger(chosen, "cuda:0", "bfloat16") if "beside the shared pool" in line]
    assert readable(chosen.beside_pool) in line
    assert "  the shared pool is outside torch's allocator, and the holder keeps it if this worker dies" in ledger(
        chosen, "cuda:0", "bfloat16"
    )
    assert not any("shared" in line for line in ledger(sizes(40 * GIB, on_cpu=False), "cuda:0", "bfloat16"))


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.key)
def test_the_tables_of_kernels_are_of_the_sizes_chosen_by_default(card: Card) -> None:
    """The kernels themselves are compiled by `make test-kernels` alone."""
    name = "Llama-3.2-1B"
    found = models.fitted(name, card, torch.bfloat16)
    geometry = found.sizes.geometry
    line = {"model": name, "num_layers": found.num_layers}
    line |= {"num_pages": geometry.num_pages, "page_size": geometry.page_size}
    expected = Path(table.__file__).with_name("expected") / f"{card.key}.md"
    assert f"## {table.title(line)}" in expected.read_text().splitlines()
