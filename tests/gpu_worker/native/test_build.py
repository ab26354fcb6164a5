"""The build of the C++ kernels: which instruction set, when it compiles, and what happens where it cannot."""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.native import build
from gpu_worker.native.build import INSTRUCTION_SETS, NotBuilt, best_instruction_set, built_library, cpu_flags
from tests.rigs.processes import child_environment
from tests.rigs.small_disk import small_disk
from tests.rigs.waiting import until

pytestmark = pytest.mark.skipif(
    not any(each.cpu_flags <= cpu_flags() for each in INSTRUCTION_SETS), reason="needs a CPU with AVX2"
)


def test_the_best_instruction_set_needs_all_its_features() -> None:
    everything = frozenset().union(*(each.cpu_flags for each in INSTRUCTION_SETS))
    assert best_instruction_set(everything).name == "avx512_bf16"
    assert best_instruction_set(everything - {"avx512_bf16"}).name == "avx512"
    assert best_instruction_set(everything - {"avx512vl"}).name == "avx2"
    with pytest.raises(NotBuilt, match="no AVX2 with FMA"):
        best_instruction_set(everything - {"fma"})


def test_a_second_build_compiles_nothing(kernel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = best_instruction_set(cpu_flags())
    path = built_library(instructions, kernel_folder)
    assert ctypes.CDLL(str(path)).tandem_lanes() == (8 if instructions.name == "avx2" else 16)
    assert {entry.suffix for entry in kernel_folder.iterdir()} == {".so"}
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert built_library(instructions, kernel_folder) == path


def test_other_flags_give_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []
    monkeypatch.setattr(build, "_compile", lambda _, path: compiled.append(path))
    instructions = best_instruction_set(cpu_flags())
    built_library(instructions, tmp_path)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    built_library(instructions, tmp_path)
    monkeypatch.setattr(build, "_cpu_info", lambda _: "another CPU")
    built_library(instructions, tmp_path)
    assert len(set(compiled)) == 3


_BUILD = """
import logging, sys
from pathlib import Path
from gpu_worker.native import build
logging.basicConfig(level="INFO")
build._SAY_SECONDS = 0.2
build.built_library(build.INSTRUCTION_SETS[-1], Path(sys.argv[1]))
"""


def test_processes_that_build_at_once_compile_once(tmp_path: Path) -> None:
    """The second one says whom it waits for, and takes the library of the first."""
    compiler, calls, folder = tmp_path / "compiler", tmp_path / "calls", tmp_path / "cache"
    compiler.write_text(f"#!/bin/sh\necho called >>{calls}\nuntil test -e {tmp_path}/go; do sleep 0.05; done\n")
    compiler.chmod(0o755)
    calls.touch()

    def builder(log: Path) -> "subprocess.Popen[bytes]":
        environment = child_environment() | {"CXX": str(compiler)}
        with log.open("w") as errors:
            return subprocess.Popen([sys.executable, "-c", _BUILD, str(folder)], env=environment, stderr=errors)

    with builder(tmp_path / "first.log") as first:
        until(lambda: calls.read_text() != "")
        with builder(tmp_path / "second.log") as second:
            says = f"another process (process {first.pid}) builds the C++ kernels"
            until(lambda: says in (tmp_path / "second.log").read_text(), says)
            (tmp_path / "go").touch()
    assert (first.returncode, second.returncode) == (0, 0)
    assert calls.read_text() == "called\n"
    assert [each.suffix for each in folder.iterdir()] == [".so"]


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), build.Locked()])
def test_a_folder_that_gives_no_turn_is_built_in_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_: int) -> None:
        raise error

    compiled: list[Path] = []
    monkeypatch.setattr(build, "lock_file", refuse)
    monkeypatch.setattr(build, "_compile", lambda _, path: compiled.append(path))
    monkeypatch.setattr(build, "_COMPILE_SECONDS", 0.2)
    assert compiled == [built_library(INSTRUCTION_SETS[-1], tmp_path)]


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotBuilt, match="no-such-compiler of CXX is not found"):
        built_library(INSTRUCTION_SETS[-1], tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotBuilt, match="install g"):
        built_library(INSTRUCTION_SETS[-1], tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NotBuilt, match="error: no such luck"):
        built_library(INSTRUCTION_SETS[-1], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_named_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, disk = tmp_path / "sources", tmp_path / "disk"
    for each in (sources, disk):
        each.mkdir()
    (sources / "kernels.cpp").write_text("char data[1 << 20] = {1};\n")
    monkeypatch.setattr(build, "_SOURCES", sources)
    with small_disk(disk, "256k"):
        (disk / "earlier.so").write_text("whole")
        with pytest.raises(NotBuilt, match=f"No space left on device.*; there is no room in {disk} or "):
            built_library(best_instruction_set(cpu_flags()), disk)
        assert {each.name: each.read_text() for each in disk.iterdir()} == {"earlier.so": "whole"}


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(NotBuilt, match="only its owner may write"):
        built_library(INSTRUCTION_SETS[-1], tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_access_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(NotBuilt, match="set XDG_CACHE_HOME"):
        built_library(INSTRUCTION_SETS[-1], tmp_path / "cache")
