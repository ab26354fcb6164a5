"""Weights for a device pass through host memory tensor by tensor, also if they are converted on the way."""

import ctypes
import gc
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations import accelerate

from gpu_worker.checkpoint import loading
from gpu_worker.checkpoint.files import ModelFiles, read_files
from gpu_worker.checkpoint.loading import load_weights, loads_to_device

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
STATUS = Path("/proc/self/status")
CPU, META = torch.device("cpu"), torch.device("meta")
SETTINGS = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "num_local_experts": 8,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A checkpoint of 16-bit weights with experts, which Transformers merges in loading."""
    folder = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(MixtralConfig(**SETTINGS)).to(torch.bfloat16).save_pretrained(folder)
    return read_files(folder)


class Meter:
    """The peak of this process's own memory, without mapped files, which the system can drop."""

    def __init__(self) -> None:
        self.first = self.peak = self._now()

    def sample(self) -> None:
        self.peak = max(self.peak, self._now())

    @property
    def grown(self) -> int:
        return self.peak - self.first

    @staticmethod
    def _now() -> int:
        found = re.search(r"^RssAnon:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
        assert found is not None
        return int(found.group(1)) << 10


@contextmanager
def metered() -> Iterator[Meter]:
    meter, ended = Meter(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            meter.sample()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield meter
    finally:
        ended.set()
        thread.join()
        meter.sample()


@pytest.fixture
def exact_memory() -> Iterator[None]:
    """Lets the C library return the memory of freed tensors at once, instead of keeping it for later ones."""
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    gc.collect()
    library.malloc_trim(0)
    yield
    # Where the library's own adjustment, which is off from now on, ends in a process with large tensors.
    library.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    library.mallopt(M_TRIM_THRESHOLD, 64 << 20)


@pytest.fixture
def separate_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes meta a device with memory of its own: a copy to it reads the values, in host memory and in their new dtype.

    CUDA's copy does the same: it converts on the host before the transfer. Accelerate is only asked for.
    """
    to = Tensor.to

    def copied(
        self: Tensor, *args: Any, device: object = None, dtype: torch.dtype | None = None, **rest: Any
    ) -> Tensor:
        if device == META and not self.is_meta:
            on_host = to(self, dtype=dtype or self.dtype)
            on_host.view(torch.uint8).max()
            return to(on_host, device=device)
        return to(self, *args, **rest, **{k: v for k, v in (("device", device), ("dtype", dtype)) if v is not None})

    monkeypatch.setattr(Tensor, "to", copied)
    for module in (loading, accelerate):
        monkeypatch.setattr(module, "is_accelerate_available", lambda: True)


@pytest.mark.skipif(not STATUS.exists() or "RssAnon" not in STATUS.read_text(), reason="this system does not tell")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_larger_than_host_memory_would_load(
    files: ModelFiles, exact_memory: None, separate_device: None, dtype: torch.dtype
) -> None:
    grown: list[int] = []
    # Threads of Transformers read ahead. On a machine with other work they are sometimes far ahead.
    for _ in range(3):
        with metered() as meter:
            model = load_weights(files, device=META, dtype=dtype)
        grown.append(meter.grown)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights > 50 << 20
    assert all(parameter.is_meta and parameter.dtype is dtype for parameter in model.parameters())
    assert min(grown) < weights / 4
    # On a CPU the merged experts, most of the weights, are in memory at the end: the meter sees them, except for those
    # that use memory which earlier tests of this process have left.
    with metered() as meter:
        model = load_weights(files, device=CPU, dtype=dtype)
    assert meter.grown > weights / 4


def test_a_device_map_is_used_only_where_transformers_accepts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (False, True):
        monkeypatch.setattr(loading, "is_accelerate_available", lambda answer=answer: answer)
        assert loads_to_device(torch.device("cuda", 0)) == answer
        assert not loads_to_device(CPU)
