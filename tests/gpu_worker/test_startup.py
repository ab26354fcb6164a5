"""Start-up: devices, early refusals, the largest step, and the contents of Join."""

import gc
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker import __main__ as program
from gpu_worker import startup
from gpu_worker.geometry import align_up
from gpu_worker.link import join_message, link
from gpu_worker.memory import device_memory as machine
from gpu_worker.memory.model_facts import examine
from gpu_worker.memory.sizing import DoesNotFit
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup import choose_device, start
from gpu_worker.step.warm_up import full_plan, full_prompts_plan
from gpu_worker.timings import take_timings
from tests.gpu_worker.plans import geometry_of
from tests.gpu_worker.rig import Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS
from tests.gpu_worker.saved_model import save_model

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("threads_stay")


class Reached(Exception):
    """Loading began."""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets free memory; loading raises `Reached`."""

    def load(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(startup, "load_weights", load)
    return lambda num_bytes: monkeypatch.setattr(machine, "free_bytes", lambda _: num_bytes)


@pytest.mark.parametrize(
    ("device", "cuda", "problem"),
    [
        ("cuda:99", torch.version.cuda, "device is cuda:99"),
        ("cuda", None, r"device is cuda; this torch \(.*\) is built without CUDA: install a CUDA build"),
        ("cuda", "13.0", "this machine has 0 CUDA devices: nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_device_that_the_machine_or_torch_lacks_is_named(
    device: str, cuda: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=problem):
        choose_device(device)


@pytest.mark.parametrize(
    ("free_now", "settings", "problem"),
    [
        (40_000, {}, r"weights take 40.4 KiB in float32; 39.1 KiB are free on cpu; dtype bfloat16 would take 20.2 KiB"),
        (
            600 * MIB,
            {"token_budget": 1_000_000},
            r"do not fit beside a step of token_budget 1000000 .*; token_budget \d+ would fit",
        ),
        (
            900 * MIB,
            {"num_pages": 500_000},
            r"num_pages is 500000, which does not fit \(.*\): .*; pool_bytes \S+ or num_pages \d+ would",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_before_loading(
    saved: Path, free: Callable[[int], None], free_now: int, settings: dict[str, object], problem: str
) -> None:
    free(free_now)
    with pytest.raises(DoesNotFit, match=problem):
        start(WorkerSettings(model=str(saved), device="cpu", **settings), saved)


def test_the_ledger_is_logged_before_loading(
    saved: Path, free: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpu_worker")
    free(900 * MIB)
    with pytest.raises(Reached):
        start(WorkerSettings(model=str(saved), device="cpu", num_pages=65), saved)
    lines = [record.getMessage() for record in caplog.records]
    # 65 pages of 64 tokens; K and V of one layer, one head of 16, four bytes.
    assert "  KV, 64 pages of 64 tokens                520.0 KiB" in lines
    assert "  weights, float32                          40.4 KiB" in lines


def test_a_model_without_a_tokenizer_is_reported(
    tmp_path: Path, free: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    free(900 * MIB)
    (save_model(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(Reached):
        start(WorkerSettings(model=str(tmp_path), device="cpu"), tmp_path)
    assert (
        "has no tokenizer: prompts and outputs are token ids only; for texts, add the model's tokenizer" in caplog.text
    )


def test_a_tokenizer_too_large_for_a_join_is_refused_before_loading(
    saved: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(900 * MIB)
    monkeypatch.setattr("gpu_worker.wire.frames.MAX_JOIN_BYTES", 100)
    with pytest.raises(
        ValueError, match=r"Join has \d+ bytes \(tokenizer \d+, .*the scheduler accepts at most 100; serve"
    ):
        start(WorkerSettings(model=str(saved), device="cpu"), saved)


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [
        ("org/llama", "", "llama"),
        ("org/llama", "chat", "chat"),
        (".", "", "v1"),
        ("..", "", "v1"),
        ("a/m\udcff", "", "m?"),
    ],
)
def test_every_model_has_a_name_that_a_join_may_have(model: str, served: str, name: str, tmp_path: Path) -> None:
    files = mock.Mock(folder=tmp_path / "v1")
    found = join_message.model_name(WorkerSettings.model_construct(model=model, served_name=served), files)
    assert pb.Join(model=found).model == name


def test_a_gpus_pool_fits_the_memory_free_after_loading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took memory meanwhile."""
    card = mock.Mock(spec=torch.device, type="cuda")
    monkeypatch.setattr(machine, "free_bytes", lambda _: 4000 * MIB)
    settings = WorkerSettings(model=str(saved), max_rows=8, token_budget=136, page_size=16)
    costs = examine(startup.read_files(saved).config, dtype=torch.bfloat16, packs=False).costs
    planned = startup.plan_memory(settings, costs, card)
    monkeypatch.setattr(machine, "free_bytes", lambda _: 1024 * MIB + 360_000)
    sizes = startup.sizes_of_loaded(settings, costs, planned, card)
    assert 2 <= sizes.geometry.num_pages < planned.geometry.num_pages


def test_a_model_larger_than_host_memory_needs_accelerate(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = mock.Mock(spec=torch.device, type="cuda")
    monkeypatch.setattr(machine, "free_bytes", lambda _: 4000 * MIB)
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 1000)
    costs = examine(startup.read_files(saved).config, dtype=torch.bfloat16, packs=False).costs
    settings = WorkerSettings(model=str(saved), max_rows=8, token_budget=136, page_size=16)
    monkeypatch.setattr(startup, "loads_to_device", lambda _: False)
    with pytest.raises(DoesNotFit, match="where 1000 bytes are free; install accelerate"):
        startup.plan_memory(settings, costs, card)
    monkeypatch.setattr(startup, "loads_to_device", lambda _: True)
    assert startup.plan_memory(settings, costs, card).weights > 1000


@pytest.mark.parametrize(("max_rows", "max_length", "token_budget"), [(1, 64, 65), (3, 80, 384), (256, 4096, 4096)])
@pytest.mark.parametrize("extra", [0, 1, 63])
def test_the_largest_step_uses_the_budget(max_rows: int, max_length: int, token_budget: int, extra: int) -> None:
    geometry = geometry_of(
        num_pages=99, max_rows=max_rows, max_length=max_length, token_budget=token_budget + extra, chunk_align=64
    )
    plan = full_plan(geometry)
    cost = plan.decode_rows.size + int(align_up(plan.chunk_counts, 64).sum())
    assert cost <= geometry.token_budget
    assert sorted([*plan.chunk_rows, *plan.decode_rows]) == list(range(1, max_rows + 1))
    assert plan.chunk_counts.max() <= max_length
    assert plan.chunk_samples.all()
    # The first row's prompt has as many logprobs as the limit leaves beside every row's sample.
    assert plan.started is not None
    num_logprobs = plan.chunk_counts[0] - plan.started.prompt_logprobs_from[0]
    assert num_logprobs == min(plan.chunk_counts[0] - 1, geometry.logit_rows - max_rows)
    # Nothing more fits: every row is full, or one more tile exceeds the budget.
    assert geometry.token_budget - cost < 64 or plan.decode_rows.size == 0


def test_join_contains_settings_and_measurements(tmp_path: Path, device: torch.device) -> None:
    """A whole start, with the kernels of a rig, which are compiled already. Texts may be longer than the pool."""
    spec = next(spec for spec in SPECS if spec.family == "llama" and spec.bound)
    window, sinks = spec.bound
    heads = {"num_attention_heads": 2 * spec.group, "num_key_value_heads": 2, "head_dim": spec.head_dim}
    saved = save_model(tmp_path, hidden_size=48, max_position_embeddings=512, **heads)
    settings = WorkerSettings(
        model=str(saved),
        device=str(device),
        dtype="float32",
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        max_rows=spec.max_rows,
        max_length=spec.max_length,
        token_budget=384,
        window=window,
        window_sinks=sinks,
        # A page takes K and V of one layer, two heads of 64, four bytes: 16 KiB.
        host_pool_bytes="80KiB",
    )
    runner, join, _ = start(settings, saved)
    assert (join.protocol, join.window, join.sink_tokens, join.host_pages) == (9, window, sinks, 5)
    assert join.max_length > join.num_pages * join.page_size
    assert 0 < join.page_copy_us < 1e6
    assert 0 < join.token_us < 1e6
    # Another window gives another text, so such a worker cannot continue this one's requests.
    files = startup.read_files(saved)
    others = [
        join_message.identity_of(settings.model_copy(update=update), files, runner.geometry)
        for update in ({}, {"window": None, "window_sinks": 0}, {"window_sinks": 0}, {"window": 71, "window_sinks": 7})
    ]
    assert len(set(others)) == len(others)
    assert join.identity == others[0]
    # Measuring left the runner unchanged.
    assert not any(pool.any() for pool in runner.on_device.cache.pools)


@pytest.mark.parametrize(
    ("configured", "left"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}),
        (
            {"NCCL_GRAPH_REGISTER": "1"},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"},
        ),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
        ({"PYTORCH_HIP_ALLOC_CONF": "a:1"}, {"PYTORCH_HIP_ALLOC_CONF": "a:1"}),
    ],
)
def test_segments_grow_unless_the_user_configured_the_allocator(
    configured: dict[str, str], left: dict[str, str]
) -> None:
    names = (*program.ALLOCATOR_VARIABLES, program.NCCL_REGISTER)
    others = {name: value for name, value in os.environ.items() if name not in names}
    with mock.patch.dict(os.environ, others | configured, clear=True):
        program.choose_allocator()
        assert {name: os.environ[name] for name in names if name in os.environ} == left


def test_a_serving_worker_collects_no_objects_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are frozen when the link begins to serve; garbage is collected before."""
    frozen: list[int] = []

    class Garbage:
        """Refers to itself."""

        def __init__(self) -> None:
            self.own = self

    class ServingLink:
        """Notes the frozen objects."""

        def __init__(self, *_: object, **__: object) -> None:
            self.made = [object()]

        def serve(self) -> None:
            frozen.append(gc.get_freeze_count())

    def started(*_: object) -> tuple[mock.Mock, None, None]:
        left.append(weakref.ref(Garbage()))
        return mock.Mock(), None, None

    left: list[weakref.ref[Garbage]] = []
    monkeypatch.setattr(startup, "start", started)
    monkeypatch.setattr(link, "Link", ServingLink)
    monkeypatch.setattr(program.logs, "adopt_libraries", lambda: None)
    gc.unfreeze()
    try:
        program.serve(WorkerSettings(runtime_dir=tmp_path), tmp_path, 0.0)
        assert left[0]() is None
        assert frozen[0] > 10_000
    finally:
        gc.unfreeze()


def test_page_copies_are_not_timed_without_host_memory(
    rig_of: Callable[[RigSpec], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = rig_of(RigSpec(page_size=64, group=2, head_dim=64)).runner
    monkeypatch.setattr(runner, "geometry", replace(runner.geometry, host_pages=0))
    timings = take_timings(runner)
    assert (timings.token_us > 0, timings.page_copy_us) == (True, 0)


@pytest.mark.parametrize(("max_rows", "max_length", "token_budget"), [(1, 64, 65), (3, 80, 384), (256, 4096, 4096)])
def test_the_plan_of_full_prompts_fills_a_step(max_rows: int, max_length: int, token_budget: int) -> None:
    geometry = geometry_of(
        num_pages=9, max_rows=max_rows, max_length=max_length, token_budget=token_budget, chunk_align=64
    )
    plan = full_prompts_plan(geometry)
    cost = int(align_up(plan.chunk_counts, 64).sum())
    assert cost <= token_budget
    assert token_budget - cost < 64 or plan.chunk_rows.size == max_rows
    assert plan.decode_rows.size == 0
    assert plan.started is not None
    for pages, tokens in zip(plan.started.pages, plan.started.tokens, strict=True):
        assert pages.size == align_up(tokens.size, 16) // 16
        assert 1 <= pages.min() <= pages.max() < 9


def test_the_largest_step_runs_and_leaves_the_runner_unchanged(rig_of: Callable[[RigSpec], Rig]) -> None:
    rig = rig_of(RigSpec(page_size=64, group=2, head_dim=64))
    runner = rig.runner
    # Other tests have used the rig.
    runner.on_device.cache.zero()
    runner.rehearse(full_plan(runner.geometry))
    assert runner.num_in_flight == 0
    assert not np.any(runner.tables.num_tokens)
    assert not any(pool.any() for pool in rig.pools)
