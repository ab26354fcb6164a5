"""Runs a part in a process of its own, with a time limit, while its record is read.

Owns the process and its end. For a CPU, processes are forked from one that has imported torch and Transformers, because
these imports take seconds. For a GPU each process is fresh: an import may look for a device, and after that a forked
process cannot use CUDA.
"""

import importlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil

from gpu_worker.__main__ import choose_allocator
from tandem_contract.child import die_with_parent
from tandem_contract.files import use_caches
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.part_table import Part
from tests.measure.gpu_day.record import Record
from tests.rigs import processes

_POLL_SECONDS = 0.5
# In which a part that is stopped prints what its own processes said.
_LAST_WORDS_SECONDS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a part shall run."""

    device: str
    tiny: bool
    flex_nano_vllm: str
    # Attention by plain operators of torch, so that a CPU compiles nothing.
    plain_attention: bool = False


def context(device: str) -> BaseContext:
    """The context that makes the parts' processes."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["torch", "transformers", "transformers.models.qwen3.modeling_qwen3"])
    return forking


def run_part(
    making: BaseContext,
    part: Part,
    request: Request,
    limit_seconds: float,
    on_change: Callable[[str, float, dict[str, Any]], None],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs a part to its end or its limit. `on_change` gets outcome, seconds and record, also while it runs."""
    begun = clock()
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-day-") as folder:
        path = Path(folder) / "record.json"
        process = making.Process(target=_run, args=(part, request, folder, begun + limit_seconds))
        process.start()
        seen, outcome, tree = "", "", list[psutil.Process]()
        try:
            while process.is_alive() and clock() < begun + limit_seconds:
                process.join(_POLL_SECONDS)
                content = path.read_text() if path.exists() else "{}"
                if content != seen:
                    seen = content
                    on_change("running", clock() - begun, json.loads(content))
            if process.is_alive():
                outcome = f"stopped: it may take {limit_seconds:.0f} s"
                # Those of its processes that it leaves behind are nobody's children afterwards.
                tree = _tree(process.pid)
                process.terminate()
                process.join(_LAST_WORDS_SECONDS)
        finally:
            _kill([*tree, *_tree(process.pid)])
            process.join()
        content = json.loads(path.read_text()) if path.exists() else {}
        if (error := Path(folder) / "error.txt").exists():
            outcome = outcome or f"failed: {error.read_text()}"
        outcome = outcome or ("passed" if process.exitcode == 0 else f"failed: exit code {process.exitcode}")
        on_change(outcome, clock() - begun, content)


def _run(part: Part, request: Request, folder: str, ends_at: float) -> None:
    """The process of a part."""
    # The forking process ends with the command, even one that is killed; services end with the part.
    die_with_parent()
    signal.signal(signal.SIGTERM, _time_is_over)
    # Parts and workers share them.
    use_caches(os.environ)
    choose_allocator()
    record = Record(part=part.name, path=Path(folder) / "record.json")
    if request.device != "cpu":
        import torch

        free, total = torch.cuda.mem_get_info()
        record.note(f"{torch.cuda.get_device_name()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free at the start")
    else:
        from gpu_worker.native.library import leave_out_kernels

        # The parts look at what a GPU runs.
        leave_out_kernels()
        processes.may_fork = request.tiny
        if request.tiny:
            import torch

            torch.set_num_threads(1)
    day = Day(
        device=request.device,
        tiny=request.tiny,
        scratch=Path(folder),
        ends_at=ends_at,
        record=record,
        flex_nano_vllm=request.flex_nano_vllm,
    )
    try:
        with _attention(request):
            importlib.import_module(part.module).run(day)
    except Exception as error:
        traceback.print_exc()
        line = str(error).strip().split("\n")[0][:300]
        (Path(folder) / "error.txt").write_text(f"{type(error).__name__}: {line}")
        raise SystemExit(1) from None


def _attention(request: Request) -> AbstractContextManager[None]:
    if not request.plain_attention:
        return nullcontext()
    from tests.rigs.plain_flex import plain_flex

    return plain_flex()


def _time_is_over(number: int, frame: object) -> None:
    raise TimeoutError("the time of the part is over")


def _tree(pid: int | None) -> list[psutil.Process]:
    """Returns a part's process, if it still runs, and all that it started, these first."""
    try:
        ours = psutil.Process(pid)
        return [*ours.children(recursive=True), ours] if pid is not None else []
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
