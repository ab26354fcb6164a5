"""Shared by worker tests: device, one thread, C++ kernels, a checkpoint; and rigs, which compile once per session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker import startup
from gpu_worker.native.build import INSTRUCTION_SETS, InstructionSet, built_library, cpu_flags
from gpu_worker.native.library import NativeLibrary
from tandem_contract.files import cache_dir
from tests.gpu_worker.rig import Rig, RigSpec
from tests.gpu_worker.rig_specs import LONG, SPECS
from tests.gpu_worker.saved_model import save_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the worker tests: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    # Inductor imports parts of torch that torch itself has deprecated.
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\..*")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests on a long rig, before pytest deselects by marker."""
    for item in items:
        call = getattr(item, "callspec", None)
        if call and any(isinstance(value, RigSpec) and value in LONG for value in call.params.values()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("device", default="cpu"))


@pytest.fixture(scope="session")
def rig_of(device: torch.device) -> Callable[[RigSpec], Rig]:
    """Rigs by spec, made at first use and kept, so that tests share compiled kernels."""
    rigs: dict[RigSpec, Rig] = {}

    def make(spec: RigSpec) -> Rig:
        if spec not in rigs:
            rigs[spec] = Rig(spec, device)
        return rigs[spec]

    return make


@pytest.fixture
def rig(rig_of: Callable[[RigSpec], Rig]) -> Rig:
    """The first of them, where a module has no other."""
    return rig_of(SPECS[0])


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in one file. Tests do not change it."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start keeps the number of threads, which all tests share."""
    monkeypatch.setattr(startup, "set_threads", lambda _: None)
    monkeypatch.setattr(startup, "choose_or_follow", lambda *_: None)


@pytest.fixture(scope="session")
def kernel_folder() -> Path:
    """The user's folder of C++ kernels, which are kept there for the next run, as a worker's are."""
    return cache_dir("native")


@pytest.fixture(scope="session")
def library_of(kernel_folder: Path) -> Callable[[InstructionSet], NativeLibrary]:
    """C++ kernels by instruction set, built at first use and kept."""
    found: dict[str, NativeLibrary] = {}

    def library(instructions: InstructionSet) -> NativeLibrary:
        if instructions.name not in found:
            found[instructions.name] = NativeLibrary(built_library(instructions, kernel_folder), instructions.name)
        return found[instructions.name]

    return library


@pytest.fixture(params=INSTRUCTION_SETS, ids=lambda each: each.name)
def library(request: pytest.FixtureRequest, library_of: Callable[[InstructionSet], NativeLibrary]) -> NativeLibrary:
    """The C++ kernels for each instruction set of this machine."""
    if not request.param.cpu_flags <= cpu_flags():
        pytest.skip(f"this CPU has no {request.param.name}")
    return library_of(request.param)
