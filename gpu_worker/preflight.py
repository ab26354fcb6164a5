"""Checks of settings and paths that need no torch, so that errors are reported before slow imports.

Owns the order of these checks. The limits themselves belong to `geometry`, `windows`, `checkpoint` and `runtime_dir`.
"""

import os
from pathlib import Path

from gpu_worker.checkpoint.generation import read_generation
from gpu_worker.checkpoint.locate import check_folder, locate
from gpu_worker.geometry import Geometry, default_chunk_align
from gpu_worker.link.remote import check_address, read_keys
from gpu_worker.memory.sizing import default_max_rows
from gpu_worker.settings import WorkerSettings
from gpu_worker.windows import check_window
from tandem_contract.files import KeyFile, own_runtime_dir
from tandem_contract.settings import SettingError


def check_before_imports(settings: WorkerSettings) -> Path:
    """The model's folder, after every check that needs no torch.

    Raises SettingError for settings, ModelRefused for the model, ValueError or OSError for the runtime folder.
    """
    try:
        _check_numbers(settings)
        check_threads(settings.threads)
        if settings.connect:
            check_address(settings.connect)
            read_keys(settings.keys, settings.connect)
    except ValueError as error:
        raise SettingError(str(error)) from error
    own_runtime_dir(settings.runtime_dir)
    if not settings.connect:
        KeyFile(settings.runtime_dir).read()
    folder = locate(settings.model)
    check_folder(folder)
    read_generation(folder)
    return folder


def check_threads(threads: int | None) -> None:
    """Raises ValueError for too many threads: torch accepts any number, and crashes if their stacks do not fit."""
    num_cpus = len(os.sched_getaffinity(0))
    if threads is not None and threads > num_cpus:
        raise ValueError(f"threads is {threads}; this process may use {num_cpus} CPUs")


def _check_numbers(settings: WorkerSettings) -> None:
    """Raises ValueError for sizes that no model and no memory allow; a missing size takes its most lenient value."""
    # Without a device in the settings, the CPU's limits are the more lenient ones.
    on_cpu = not settings.device.startswith("cuda")
    rows, chunk_align = settings.max_rows or default_max_rows(on_cpu=on_cpu), default_chunk_align(on_cpu=on_cpu)
    Geometry(
        page_size=settings.page_size or 128,
        num_pages=settings.num_pages or 2,
        max_rows=rows,
        max_length=settings.max_length or 2,
        token_budget=settings.token_budget or rows + chunk_align,
        chunk_align=chunk_align,
        vocab_size=1,
    )
    if settings.window is not None and settings.max_length is not None:
        check_window(settings.window, settings.window_sinks, settings.max_length)
