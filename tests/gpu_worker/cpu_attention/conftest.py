"""The C++ kernels, built for every instruction set of this machine, once per session."""

from collections.abc import Callable

import pytest

from gpu_worker.native.build import INSTRUCTION_SETS, InstructionSet, built_library, cpu_flags
from gpu_worker.native.library import NativeLibrary


@pytest.fixture(scope="session")
def library_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[InstructionSet], NativeLibrary]:
    """Libraries by instruction set, built at first use and kept."""
    folder = tmp_path_factory.mktemp("kernels")
    found: dict[str, NativeLibrary] = {}

    def library(instructions: InstructionSet) -> NativeLibrary:
        if instructions.name not in found:
            found[instructions.name] = NativeLibrary(built_library(instructions, folder), instructions.name)
        return found[instructions.name]

    return library


@pytest.fixture(params=INSTRUCTION_SETS, ids=lambda each: each.name)
def library(request: pytest.FixtureRequest, library_of: Callable[[InstructionSet], NativeLibrary]) -> NativeLibrary:
    """Each library that this machine runs."""
    if not request.param.cpu_flags <= cpu_flags():
        pytest.skip(f"this CPU has no {request.param.name}")
    return library_of(request.param)
