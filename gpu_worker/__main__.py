"""`python -m gpu_worker`: settings, checks that need no torch, start-up, then serving until a signal.

Owns the process: the start and end of its log, its exit code, and its last line, which for a failed start is
`gpu_worker: <cause>; <hint>`.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.checkpoint.folder import ModelRefused, check_folder, locate
from gpu_worker.checkpoint.generation import read_generation
from gpu_worker.failures import explain, is_expected
from gpu_worker.geometry import Geometry, check_window, default_chunk_align, default_max_rows
from gpu_worker.group.failures import GROUP_LOST, RankLost, is_lost_peer
from gpu_worker.group.launch import check_keys, launch, meeting_of
from gpu_worker.link.connection import check_address, read_keys
from gpu_worker.native.build import build_ahead
from gpu_worker.phases import begin_phase, log_phase
from gpu_worker.process.ranks import SINGLE, NotInGroup, Ranks, group_name, is_rank, ranks_of
from gpu_worker.process.starting import at_low_priority, import_transformers, keep_objects, without_collections
from gpu_worker.settings import BUNDLED_MODEL, PROGRAM, WorkerSettings
from tandem_contract import logs, stopping
from tandem_contract.child import die_with_parent
from tandem_contract.files import WORKER_SOCKET, KeyFile, endpoint_of, own_runtime_dir, use_caches
from tandem_contract.needed import ends_with_needed
from tandem_contract.plural import numbered
from tandem_contract.processes import WRONG_SETTINGS
from tandem_contract.settings import SettingError, refused
from tandem_contract.version import version

if TYPE_CHECKING:
    from tandem.internal.v1.worker_pb2 import Join

    from gpu_worker.group.start import Together
    from gpu_worker.group.wires import Wires
    from gpu_worker.link.link import Alone
    from gpu_worker.step.runner import Runner

log = logging.getLogger("gpu_worker")

# A follower waits so long before it says why it cannot serve: on a busy machine the leader is later by seconds.
_LEADER_FIRST_SECONDS = 5.0
# Torch reads all of them, in 2.11 and in 2.13; the first is for every kind of accelerator.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
NCCL_REGISTER = "NCCL_GRAPH_REGISTER"


@ends_with_needed("gpu_worker")
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 after a stop in order, 2 for settings and a model that is not served, 1 for others."""
    begun = time.perf_counter()
    stopping.begin()
    logs.open_closed_streams()
    try:
        settings = PROGRAM.read(arguments, os.environ)
        # The launcher of a group is none of its ranks.
        ranks = ranks_of(settings.ranks) if is_rank() else SINGLE
    except (SettingError, NotInGroup) as error:
        return refused("gpu_worker", error)
    # A rank without its launcher would be in the way of the next start.
    if settings.exit_with_parent or ranks.is_group:
        die_with_parent()
    start_log(settings, ranks)
    if not ranks.is_leader:
        # The leader ends the group in order, also where every process gets the signal.
        stopping.leave_to_parent()
    try:
        return run(settings, begun, arguments, ranks)
    finally:
        logs.stop()


def run(settings: WorkerSettings, begun: float, arguments: Sequence[str], ranks: Ranks) -> int:
    """Checks, starts and serves. Returns the exit code. `begun`: the program's start by `time.perf_counter`."""
    try:
        use_caches(os.environ)
        folder = check_before_imports(settings)
        model = "the bundled model" if settings.model == str(BUNDLED_MODEL) else settings.model
        if settings.ranks > 1 and not ranks.is_group:
            log.info("tandem %s: %s with %s", version(), numbered(settings.ranks, "rank", "start"), model)
            return launch(settings.ranks, arguments, meeting_of(settings))
        check_keys(settings, ranks)
        log.info("tandem %s: worker %d starts with %s", version(), os.getpid(), model)
        choose_allocator()
        serve(settings, folder, begun, ranks)
    except RankLost as error:
        log.warning("this rank ends: %s", error)
        return GROUP_LOST
    except Exception as error:
        if ranks.is_group and is_lost_peer(error):
            log.debug("this rank ends with another one: %s", error)
            return GROUP_LOST
        if not ranks.is_leader:
            # The leader says what all ranks find, and the launcher then ends this one.
            time.sleep(_LEADER_FIRST_SECONDS)
        if not is_expected(error):
            log.exception("the worker stops because of an unexpected error")
        logs.draw(logs.closing_line("gpu_worker", explain(error)))
        return WRONG_SETTINGS if isinstance(error, SettingError | ModelRefused) else 1
    log.info("stopped")
    return 0


def check_before_imports(settings: WorkerSettings) -> Path:
    """The model's folder, after every check that needs no torch.

    Raises SettingError for settings, ModelRefused for the model, OSError for what may be there at the next start.
    """
    try:
        _check_numbers(settings)
        check_threads(settings.threads)
        if settings.connect:
            check_address(settings.connect)
            read_keys(settings.keys, settings.connect)
    except ValueError as error:
        raise SettingError(str(error)) from error
    _check_runtime_dir(settings)
    return find_model(settings.model)


def find_model(name: str) -> Path:
    """The folder of the setting `model`. Raises ModelRefused, and OSError for what may be there at the next start."""
    try:
        folder = locate(name)
        check_folder(folder)
        read_generation(folder)
    except PermissionError as error:
        raise ModelRefused(explain(error)) from error
    return folder


def _check_runtime_dir(settings: WorkerSettings) -> None:
    """Makes the folder and reads its key. A folder that another start would not help is a wrong setting."""
    try:
        own_runtime_dir(settings.runtime_dir)
        if not settings.connect:
            KeyFile(settings.runtime_dir).read()
    except OSError as error:
        problem = f"runtime_dir {settings.runtime_dir} cannot be used: {error.strerror}"
        is_wrong = isinstance(error, PermissionError | NotADirectoryError | FileNotFoundError)
        raise SettingError(problem) if is_wrong else OSError(problem) from error
    except ValueError as error:
        raise SettingError(str(error)) from error


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


def serve(settings: WorkerSettings, folder: Path, begun: float, ranks: Ranks = SINGLE) -> None:
    """Starts (`begun`: by perf_counter) and serves until a signal, or carries out the plans of the group's leader.

    A standby worker leaves the CPU to the serving one while it starts; then this thread serves at the normal priority.
    """
    prepare = partial(prepared, settings, folder, begun, ranks)
    runner, join, together = at_low_priority(prepare) if settings.standby else prepare()
    from gpu_worker.step.in_flight import MAX_IN_FLIGHT

    if not ranks.is_leader:
        from gpu_worker.group.roles import follow

        follow(runner, ranks, wires_of(ranks, together, settings, join), max_in_flight=MAX_IN_FLIGHT)
        return
    from gpu_worker.link.link import Link

    endpoint = settings.connect or endpoint_of(settings.runtime_dir, WORKER_SOCKET)
    curve = read_keys(settings.keys, endpoint) if settings.connect else None
    key = None if settings.connect else KeyFile(settings.runtime_dir)
    # Its sockets have threads, which get this thread's priority.
    leading: AbstractContextManager[Alone | None] = nullcontext()
    if ranks.is_group:
        from gpu_worker.group.roles import Leader

        leading = closing(Leader(ranks, wires_of(ranks, together, settings, join)))
    with leading as others:
        Link(endpoint, join, runner, key=key, max_in_flight=MAX_IN_FLIGHT, curve=curve, ranks=others).serve()


def wires_of(ranks: Ranks, together: "Together", settings: WorkerSettings, join: "Join") -> "Wires":
    """The sockets to the other ranks. Raises SettingError."""
    from gpu_worker.group.wires import Wires

    keys = read_keys(settings.keys, settings.connect) if ranks.spans_hosts else None
    return Wires(ranks, together, settings.runtime_dir, group_name(), identity=join.identity, keys=keys)


def prepared(settings: WorkerSettings, folder: Path, begun: float, ranks: Ranks) -> "tuple[Runner, Join, Together]":
    """Imports torch, and returns the warm runner, its Join and the other ranks. `begun`: by perf_counter."""
    # Torch takes seconds to import, and a wrong setting is refused without it.
    if not settings.device.startswith("cuda") and settings.native_kernels == "auto":
        build_ahead()
    with without_collections():
        import torch

        on_cpu = settings.device == "cpu" or (not settings.device and not torch.cuda.is_available())
        # A group needs torch's distributed tensors, which need the compiler.
        lean = on_cpu and settings.fused_layers != "on" and not ranks.is_group
        import_transformers(without_compiler=lean)
        from gpu_worker.native.library import write_last_line
        from gpu_worker.startup import start

    logs.adopt_libraries()
    log_phase("imports", time.perf_counter() - begun)
    if on_cpu and settings.native_kernels == "auto":
        write_last_line()
    runner, join, together = start(settings, folder, ranks)
    runner.execution.take_constraints(join, is_leader=ranks.is_leader)
    keep_objects()
    log_phase("whole start", time.perf_counter() - begun)
    begin_phase("serving")
    return runner, join, together


def start_log(settings: WorkerSettings, ranks: Ranks) -> None:
    """The first rank of each host logs its start; the others what differs from it: warnings, and their own end."""
    process = "worker" if ranks.is_leader else f"worker rank {ranks.rank}"
    level = "warning" if ranks.local_rank and settings.log_level == "info" else settings.log_level
    logs.start(process, level=level, log_format=settings.log_format, package="gpu_worker")
    # The ranks of a host have the same variables and files.
    logging.getLogger("gpu_worker.checkpoint").setLevel(logging.ERROR if ranks.local_rank else logging.NOTSET)
    for line in () if ranks.local_rank else PROGRAM.warnings(os.environ):
        log.warning("%s", line)


def choose_allocator() -> None:
    """Lets torch's allocator for GPUs use segments that grow, unless the user has configured the allocator.

    Steps allocate tensors of many sizes, and the pool leaves little memory beside them. Where no freed piece of a fixed
    segment is large enough, the allocator returns segments to the driver, which waits for the device. Private pools of
    captured graphs may have growing segments too (pytorch/pytorch#128068). Torch reads these variables at its first use
    of the allocator.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
        # NCCL would register buffers of captured collectives, and hang in such segments (NVIDIA/Megatron-LM#5474).
        os.environ.setdefault(NCCL_REGISTER, "0")


if __name__ == "__main__":
    if sys.stderr is not None:
        # For a signal that the process's own code causes; `native/library.py` adds a line.
        faulthandler.enable()
    exit_code = main(sys.argv[1:])
    # The interpreter's teardown takes seconds once torch is loaded; the device must be free at once.
    os._exit(exit_code)
