"""Stand-ins for modules that a peer's scheduler imports and does not need, and the measuring loop of every peer.

Owns nothing. A fake module has every attribute: a class that accepts any arguments.
"""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


class Fake:
    """Can be called, inherited from, indexed and used as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, key: Any) -> type["Fake"]:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Fake()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Fake()


class _FakeModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = list[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Fake


def fake(names: Iterable[str]) -> None:
    """Installs a fake for each of these modules; a dotted one becomes an attribute of its parent."""
    for name in names:
        sys.modules[name] = _FakeModule(name)


def fake_missing(names: Iterable[str]) -> None:
    """Installs fakes for those modules that are missing."""
    fake(name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None)


def package(name: str, folder: Path) -> None:
    """Makes a package of that folder without running its __init__."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


class SteadyPeer:
    """A peer's scheduler. `_step` returns the figures of a step, and the number of rows that it decoded."""

    variants = ("step",)
    _num_rows: int

    def _step(self) -> tuple[dict[str, float], int]:
        raise NotImplementedError

    def run(self, variant: str, times: int) -> dict[str, list[float]]:
        """Runs `times` decode steps. Returns their microseconds of process CPU time.

        Raises AssertionError if a step did not decode all rows.
        """
        series: dict[str, list[float]] = {}
        for _ in range(times):
            figures, num_decoding = self._step()
            assert num_decoding == self._num_rows
            for key, value in figures.items():
                series.setdefault(key, []).append(value)
        return series
