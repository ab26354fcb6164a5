"""From settings to a runner that is ready: device, sizes, ledger, warm-up, and what Join will say.

Owns the order of start-up and its timed lines. Knows nothing of sockets.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tandem.internal.v1 import worker_pb2 as pb
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from gpu_worker.config import BUNDLED_MODEL, WorkerSettings
from gpu_worker.examine import examine, twin_of
from gpu_worker.geometry import Geometry
from gpu_worker.kv_cache import pool_bytes
from gpu_worker.layers import LayerMap
from gpu_worker.linear import PackedLinear
from gpu_worker.loading import load_weights
from gpu_worker.model import check_config, weight_bytes
from gpu_worker.model_files import ModelFiles, ModelRefused, identity, locate, read_files
from gpu_worker.runner import Runner

log = logging.getLogger(__name__)

PROTOCOL = 2
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_CPU_POOL_BYTES = 1 << 30
# Left free beside the weights on a GPU: activations, logits and the allocator's slack.
_GPU_RESERVE_BYTES = 3 << 30
# Query positions per tile of the prefill kernel.
_CHUNK_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A warm runner and its introduction."""

    runner: Runner
    join: pb.Join


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs how long `name` took."""
    begun = time.perf_counter()
    yield
    log.info("%-36s %7.2f s", name, time.perf_counter() - begun)


def start(settings: WorkerSettings) -> Worker:
    """Raises ModelRefused or ValueError, saying which setting and which value would do."""
    device = choose_device(settings.device)
    set_threads(settings.threads)
    dtype = _DTYPES.get(settings.dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    with phase("model files"):
        folder = locate(settings.model)
        files = read_files(folder)
        check_config(files.config)
    with phase(f"weights, {settings.dtype if settings.dtype != 'auto' else str(dtype)[6:]} on {device}"):
        transformers_logging.disable_progress_bar()
        model = load_weights(files, device=device, dtype=dtype)
    geometry = choose_geometry(settings, files.config, device, dtype)
    with phase("page pool and tables"):
        runner = Runner(model, _layers(files.config, dtype), geometry, device=device, dtype=dtype)
    log_ledger(files.config, geometry, device, dtype, weight_bytes(model))
    for name, seconds in runner.warm_up():
        log.info("%-36s %7.2f s", name, seconds)
    packed = sum(type(module) is PackedLinear for module in model.modules())
    log.info("warm; %d linear layers in oneDNN's layout, %d threads", packed, torch.get_num_threads())
    with phase("identity"):
        join = introduce(settings, files, geometry, device, dtype)
    return Worker(runner=runner, join=join)


def choose_device(name: str) -> torch.device:
    """`name`, or CUDA where there is one. Raises ValueError."""
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name}; it must be cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name}; it must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise ValueError(f"device is {name}; this machine has {count} CUDA devices")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def set_threads(threads: int | None) -> None:
    """Threads of one operation: as asked, else all physical cores but one; one operation at a time.

    Scheduler, front end and clients need a core: threads that wait for one of their number which does not get its own
    made a step of 14 ms take 200.
    """
    torch.set_num_threads(threads or max(1, num_physical_cores() - 1))
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def num_physical_cores() -> int:
    """Physical cores among the CPUs this process may use; a thread per hyperthread would only contend."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:
            cores.add((str(cpu),))
    return len(cores)


def choose_geometry(
    settings: WorkerSettings, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> Geometry:
    """Sizes as asked, else from the model and the memory there is. Raises ValueError."""
    on_cpu = device.type == "cpu"
    limit = int(config.max_position_embeddings)
    if settings.max_length is not None and settings.max_length > limit:
        raise ValueError(f"max_length is {settings.max_length}; the model's limit is {limit}")
    # CPU: pages of 64 and 128 are equally fast, 256 slower; smaller ones waste less.
    page_size = settings.page_size or (64 if on_cpu else 128)
    max_rows = settings.max_rows or (32 if on_cpu else 256)
    wanted_length = settings.max_length or limit
    layers = _layers(config, dtype)
    page_bytes = page_size * layers.elements_per_token * dtype.itemsize
    sink_bytes = pool_bytes(layers, num_pages=0, page_size=page_size, dtype=dtype)
    num_pages = settings.num_pages
    if num_pages is not None and settings.pool_bytes is not None:
        raise ValueError(
            f"num_pages is {num_pages} and pool_bytes {settings.pool_bytes}; set one, a page takes {page_bytes} bytes"
        )
    if num_pages is None:
        enough = max_rows * -(-wanted_length // page_size) + 1
        num_pages = min(enough, ((settings.pool_bytes or _default_pool_bytes(device)) - sink_bytes) // page_bytes)
        if num_pages < 2:
            given = "" if settings.pool_bytes is None else f" is {settings.pool_bytes}, which"
            raise ValueError(f"pool_bytes{given} is too small; two pages of {page_bytes} bytes are the least")
    max_length = min(wanted_length, (num_pages - 1) * page_size)
    if max_length < (settings.max_length or 0):
        need = -(-wanted_length // page_size) + 1
        raise ValueError(f"max_length is {wanted_length}, which needs num_pages {need}; the pool has {num_pages}")
    return Geometry(
        page_size=page_size,
        num_pages=num_pages,
        max_rows=max_rows,
        max_length=max_length,
        token_budget=settings.token_budget or max(max_rows + _CHUNK_ALIGN, 512 if on_cpu else 4096),
        chunk_align=_CHUNK_ALIGN,
        vocab_size=int(config.vocab_size),
    )


def _layers(config: PreTrainedConfig, dtype: torch.dtype) -> LayerMap:
    return examine(twin_of(config, dtype=dtype))


def _default_pool_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _DEFAULT_CPU_POOL_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    if free <= _GPU_RESERVE_BYTES:
        raise ValueError(f"{device} has {free} bytes free beside the weights; {_GPU_RESERVE_BYTES} are reserved")
    return free - _GPU_RESERVE_BYTES


def log_ledger(
    config: PreTrainedConfig, geometry: Geometry, device: torch.device, dtype: torch.dtype, weights: int
) -> None:
    """Where the memory goes, in absolute sizes."""
    layers = _layers(config, dtype)
    pool = pool_bytes(layers, num_pages=geometry.num_pages, page_size=geometry.page_size, dtype=dtype)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    log.info(
        "memory: weights %s, pool %s (%d pages of %d tokens), free %s",
        *(_mib(weights), _mib(pool), geometry.num_pages - 1, geometry.page_size, _mib(free)),
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


def introduce(
    settings: WorkerSettings, files: ModelFiles, geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> pb.Join:
    """What Join says."""
    if any(token >= geometry.vocab_size for token in files.eos_token_ids):
        raise ModelRefused(f"eos_token_id {files.eos_token_ids} lies outside the vocabulary of {geometry.vocab_size}")
    own_name = "bundled" if files.folder == BUNDLED_MODEL.resolve() else Path(settings.model).name
    card = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return pb.Join(
        protocol=PROTOCOL,
        identity=identity(files, geometry.page_size),
        model=settings.served_name or own_name,
        vocab_size=geometry.vocab_size,
        page_size=geometry.page_size,
        num_pages=geometry.num_pages,
        max_rows=geometry.max_rows,
        max_length=geometry.max_length,
        token_budget=geometry.token_budget,
        chunk_align=geometry.chunk_align,
        logit_rows=geometry.logit_rows,
        eos_token_ids=files.eos_token_ids,
        defaults=pb.GenerationDefaults(
            temperature=files.temperature,
            top_p=files.top_p,
            top_k=files.top_k,
            min_p=files.min_p,
            repetition_penalty=files.repetition_penalty,
        ),
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        pid=os.getpid(),
        device=f"{device}{card}",
        dtype=str(dtype).removeprefix("torch."),
    )
