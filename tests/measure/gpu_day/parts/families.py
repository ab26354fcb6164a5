"""Logits of the served path against Transformers' eager forward, for tiny models of several families and large ones.

The comparison is the worker's own self-check: a prompt in two chunks, one beside a decode step, decode steps of both.
Its tolerance is measured on the model itself.
"""

import traceback

import torch

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.compatibility.self_check import check_runner
from gpu_worker.failures import first_line
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.models import TINY_MODEL, TINY_SHAPES, TINY_SIZES, TRUE_SHAPES, config_of
from tests.measure.gpu_day.runners import free_memory, serve

# Few rows and tokens, because each bucket is a kernel to compile.
_SIZES = {"max_rows": 4, "max_length": 2048, "token_budget": 512 + 128, "num_pages": 65}
_TINY_DTYPES = ("float32", "bfloat16", "float16")
# A CPU takes a minute to compile a family's kernels.
_FEW = (TINY_MODEL, "tiny gpt-oss, window 40")
# What a family's kernels take at most, so that the part ends before its limit.
_LEAST_SECONDS_LEFT = 40.0


def run(day: Day) -> None:
    """Checks every family, those of true size first."""
    for shape in TRUE_SHAPES if not day.tiny else ():
        if day.seconds_left() < _LEAST_SECONDS_LEFT:
            day.record.note(f"{shape} was left out: the time was over")
            continue
        with day.phase(f"{shape} in {day.dtype}"):
            _check(day, shape, day.dtype, **_SIZES)
    for dtype in _TINY_DTYPES[:1] if day.tiny else _TINY_DTYPES:
        for shape in _FEW if day.tiny else TINY_SHAPES:
            if day.seconds_left() < _LEAST_SECONDS_LEFT / 4:
                day.record.note(f"{shape} in {dtype} was left out: the time was over")
                continue
            with day.phase(f"{shape} in {dtype}"):
                _check(day, shape, dtype, **TINY_SIZES)


def _check(day: Day, shape: str, dtype: str, **sizes: int) -> None:
    name = f"{shape} in {dtype}: logits equal eager attention's within rounding"
    try:
        served = serve(day, config_of(shape), dtype=dtype, **sizes)
        with torch.inference_mode():
            error = check_runner(served.model, served.runner, served.dtype)
    except ModelRefused as refusal:
        day.record.check(name, False, str(refusal))
    except Exception as error:  # the families after it are checked, too
        traceback.print_exc()
        day.record.check(name, False, f"{type(error).__name__}: {first_line(error)}")
    else:
        day.record.check(name, True, f"median relative error {error:.2g}")
        day.record.note(f"{shape} in {dtype}: {served.runner.steps.summary}")
        del served
    free_memory(day.device)
