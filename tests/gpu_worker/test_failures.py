"""The last line of every failed start is `gpu_worker: <cause>; <hint>`."""

import builtins
import errno
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from gpu_worker import __main__ as program
from gpu_worker import startup
from gpu_worker.failures import explain, is_expected
from tandem_contract.version import how_to_install
from tests.gpu_worker.saved_model import changed
from tests.rigs.processes import run
from tests.rigs.small_disk import run_on_small_disk

pytestmark = pytest.mark.usefixtures("threads_stay")


class DeviceLost(RuntimeError):
    pass


def file_error(number: int) -> OSError:
    return OSError(number, "As the system says", "/models/a/model.safetensors")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB.\nSee docs."),
            "the GPU is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB; ",
        ),
        (torch.AcceleratorError("CUDA error: out of memory"), "the GPU is out of memory: CUDA error: out of memory; "),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "the GPU is out of memory: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (MemoryError(), "host memory is used up: MemoryError; a smaller pool_bytes"),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "host memory is used up: [Errno 12] Cannot allocate memory; a",
        ),
        (file_error(errno.EACCES), "/models/a/model.safetensors: as the system says; it must be readable by"),
        (file_error(errno.EIO), "/models/a/model.safetensors: as the system says; the disk or the network share"),
        (file_error(errno.ENOSPC), "/models/a/model.safetensors: as the system says; XDG_CACHE_HOME, TORCH"),
        (
            ImportError("No module named 'torch'"),
            "No module named 'torch'; install what the worker needs with: make",
        ),
        (
            torch.AcceleratorError("CUDA error: unspecified launch failure\nmore"),
            "the GPU failed: CUDA error: unspecified",
        ),
        (DeviceLost("the device is lost: x"), "the GPU failed: the device is lost: x; start the worker again"),
        (ValueError("max_rows is 0; it must be 1"), "max_rows is 0; it must be 1"),
    ],
)
def test_explain_puts_cause_and_hint_in_one_line(error: Exception, line: str) -> None:
    assert is_expected(error)
    assert explain(error).startswith(line)
    assert "\n" not in explain(error)


def test_an_error_of_the_cpu_allocator_is_reported_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_expected(error.value)
    assert explain(error.value).startswith("host memory is used up: ")


def compilations_that_fail() -> list[Exception]:
    """As Inductor and Triton raise them."""
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    call = ["/usr/bin/gcc", "/tmp/t/cuda_utils.c", "-O3", "-shared"]
    return [
        InvalidCxxCompiler(),
        InductorError(InvalidCxxCompiler(), None),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs."),
        CppCompileError(["g++", "x.cpp"], "x.h:1:10: fatal error: Python.h: No such file or directory"),
        subprocess.CalledProcessError(1, call),
    ]


@pytest.mark.parametrize("index", range(5))
def test_a_missing_package_of_compilations_is_named(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    error = compilations_that_fail()[index]
    missing = "install g++ (Debian: apt install g++), or name" if index < 3 else "apt install python3-dev"
    line = explain(error)
    assert line.startswith("a kernel cannot be compiled: ")
    assert missing in line
    assert "\n" not in line
    assert is_expected(error), "a traceback of hundreds of lines would hide the line"


def test_failed_compilations_name_the_kernel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InductorError

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").touch()
    line = explain(InductorError(AssertionError("no vectors"), None))
    assert line.startswith("a kernel cannot be compiled: AssertionError: no vectors; room in TORCHINDUCTOR_CACHE_DIR")
    assert f"({tmp_path} has " in line
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "none"))
    assert f"({tmp_path}/none: No such file" in explain(InductorError(AssertionError("no vectors"), None))


@pytest.mark.long
def test_a_kernel_that_a_full_disk_takes_not_is_explained_in_one_line(tmp_path: Path) -> None:
    """Inductor writes its code there before any compiler runs."""
    code = """
import os, sys
import torch
from gpu_worker.failures import explain, is_expected
from tests.rigs.small_disk import fill
from pathlib import Path
fill(Path(sys.argv[1]))
try:
    torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(1000))
except Exception as error:
    print(is_expected(error), explain(error))
"""
    [line] = run_on_small_disk(tmp_path, "256k", code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert line.startswith("True a kernel cannot be compiled: ")
    assert "No space left on device" in line and f"room in TORCHINDUCTOR_CACHE_DIR ({tmp_path} has 0 MiB free)" in line


def test_a_fault_of_the_worker_keeps_its_traceback() -> None:
    error = KeyError("x")
    assert not is_expected(error)
    assert explain(error) == "KeyError: 'x'; this is a fault of the worker, its traceback is in the log"


def last_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], runtime_dir: Path, *flags: str, code: int = 1
) -> str:
    monkeypatch.setattr(program, "use_caches", lambda _: None)
    monkeypatch.setattr(program, "choose_allocator", lambda: None)
    assert program.main(["--runtime-dir", str(runtime_dir), "--device", "cpu", *flags]) == code
    return capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        file_error(errno.EIO),
        KeyError("x"),
        OSError("bare"),
    ],
)
def test_an_error_of_loading_is_the_last_line(
    error: Exception,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(startup, "load_weights", load)
    line = last_line(monkeypatch, capfd, tmp_path / "run", "--model", str(saved))
    assert line == f"gpu_worker: {explain(error)}"


def test_files_that_may_not_be_read_are_named(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real_open = Path.open

    def denied(path: Path, *arguments: object, **keywords: object) -> object:
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", denied)
    line = last_line(monkeypatch, capfd, tmp_path / "run", "--model", str(saved), code=2)
    assert line.startswith(f"gpu_worker: {saved}/model.safetensors: permission denied; it must be readable by")


def test_failed_imports_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def fails(name: str, *arguments: object, **keywords: object) -> object:
        if name == "gpu_worker.startup":
            raise ImportError("No module named 'torch'")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", fails)
    line = last_line(monkeypatch, capfd, tmp_path / "run")
    assert line == (
        f"gpu_worker: No module named 'torch'; install what the worker needs with: {how_to_install('worker')}"
    )


# The worker is forked by a process that has imported torch, which takes seconds.
@pytest.mark.together("torch")
def test_corrupt_weights_are_the_last_line_of_the_process(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path / "m")
    weights = (folder / "model.safetensors").read_bytes()
    # The header is complete and wrong, so safetensors itself reports it.
    (folder / "model.safetensors").write_bytes(weights.replace(b'"shape":[40,', b'"shape":[99,'))
    flags = ["--model", str(folder), "--device", "cpu", "--runtime-dir", str(tmp_path / "run")]
    ended = run("gpu_worker", *flags)
    assert ended.returncode == 2
    assert ended.stdout == ""
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"gpu_worker: the weights in {folder} cannot be read: ")
    assert last.endswith("; download them again")


def test_a_file_that_cannot_be_made_is_not_called_unreadable(tmp_path: Path) -> None:
    """Where caches and temporary files go is a setting; a model is not written."""
    there, new = tmp_path / "there", tmp_path / "new"
    there.touch()
    rights = {there: "it must be readable by", new: "XDG_CACHE_HOME, ", tmp_path / "no" / "x": "it must be readable by"}
    for path, hint in rights.items():
        denied = PermissionError(errno.EACCES, "Permission denied", str(path))
        assert explain(denied).startswith(f"{path}: permission denied; {hint}")
    full = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert explain(full).endswith(
        "; XDG_CACHE_HOME, TORCHINDUCTOR_CACHE_DIR and HF_HOME set the folders of kernels "
        "and models, TMPDIR that of temporary files"
    )
