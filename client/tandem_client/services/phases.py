"""The phases of a start, as the lines of the programs show them: which is under way, since when, and what it is about.

Scheduler and worker start at the same time, and are shown one after the other. Knows nothing of terminals.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tandem_client.services.settings import SCHEDULER, WORKER
from tandem_contract.logs import parse


class Phase(StrEnum):
    """In the order in which they are shown."""

    SETTINGS = "check settings"
    SCHEDULER = "scheduler"
    IMPORTS = "worker: import torch"
    COMPILE = "worker: compile kernels"
    WEIGHTS = "worker: load weights"
    WARM_UP = "worker: warm up"
    JOIN = "worker: join the scheduler"


# The line of a program with which a phase ends, and those of the same program before it.
_ENDS: tuple[tuple[str, Phase, re.Pattern[str]], ...] = (
    (SCHEDULER, Phase.SCHEDULER, re.compile(r"frontend listening on ")),
    (WORKER, Phase.IMPORTS, re.compile(r"imports +\d")),
    (WORKER, Phase.COMPILE, re.compile(r"C\+\+ kernels for |model files +\d")),
    (WORKER, Phase.WEIGHTS, re.compile(r"weights, .* \d+\.\d\d s$")),
    (WORKER, Phase.WARM_UP, re.compile(r"whole start +\d")),
)
# Lines that say how far the phase of a worker is.
_COMPILES = re.compile(r"compiling ")
_DETAILS = re.compile(r"(?:weights|compiling the C\+\+ kernels): (?P<detail>\d.*)|(?P<words>fetching \S+ from the hub)")
# It is shown only if something was compiled.
_OPTIONAL = Phase.COMPILE


@dataclass(frozen=True, slots=True)
class Told:
    phase: Phase
    seconds: float
    detail: str = ""


class Phases:
    """Follows one start from the making of this object."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._left = list(Phase)
        self._ended: dict[Phase, Told] = {}
        # When the last phase of a program ended.
        self._since: dict[str, float] = {}
        self._compiles = False
        self._detail = ""

    @property
    def seconds(self) -> float:
        """The time since the start began."""
        return self._clock() - self._begun

    def hear(self, program: str, line: str) -> None:
        """Takes a line of the scheduler or of the first worker."""
        message = parse(line).message
        if program == WORKER:
            self._compiles = self._compiles or _COMPILES.match(message) is not None
            if (detail := _DETAILS.match(message)) is not None:
                self._detail = detail["detail"] or detail["words"]
        for name, phase, pattern in _ENDS:
            if name == program and phase not in self._ended and pattern.match(message):
                self.end(phase)

    def end(self, phase: Phase) -> None:
        """Notes the end of a phase, and of those of the same program before it."""
        program = _program_of(phase)
        for earlier in list(Phase)[: list(Phase).index(phase) + 1]:
            if _program_of(earlier) == program and earlier not in self._ended:
                self._ended[earlier] = Told(earlier, self._seconds_of(program))
                self._since[program] = self._clock()
        if program == WORKER:
            self._detail = ""

    def take(self) -> Iterator[Told]:
        """Yields the phases that have ended, each once and in order."""
        while self._left and self._left[0] in self._ended:
            phase = self._left.pop(0)
            if phase != _OPTIONAL or self._compiles:
                yield self._ended[phase]

    def now(self) -> Told | None:
        """The phase that is under way; None if all have ended."""
        left = [phase for phase in self._left if phase not in self._ended and (phase != _OPTIONAL or self._compiles)]
        if not left:
            return None
        program = _program_of(left[0])
        return Told(left[0], self._seconds_of(program), self._detail if program == WORKER else "")

    def _seconds_of(self, program: str) -> float:
        """Since its last phase ended, or the settings were checked."""
        return self._clock() - self._since.get(program, self._since.get(Phase.SETTINGS, self._begun))


def _program_of(phase: Phase) -> str:
    return phase.partition(":")[0]
