"""The files in which a running service records itself: which settings ask for them, and their creation at the start."""

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.observer import Observer
from scheduler_svc.recording.event_log import Recorder
from scheduler_svc.recording.flight import FlightRecorder
from scheduler_svc.recording.steps_file import StepsFile
from scheduler_svc.settings import SchedulerSettings
from tandem_contract.settings import SettingError


def flight_dir(settings: SchedulerSettings) -> Path | None:
    """Returns the folder of the flight recorder, None if it is off."""
    if settings.flight == "off":
        return None
    folder = settings.runtime_dir / "flight" if settings.flight_dir is None else settings.flight_dir
    return folder.absolute()


class Recordings:
    """What records the service, as the settings ask for it. `stack` closes it."""

    def __init__(self, settings: SchedulerSettings, config: CoreConfig, stack: ExitStack) -> None:
        """Raises SettingError if a file cannot be created."""
        self.observers: list[Observer] = []
        self._flight: FlightRecorder | None = None
        if settings.record is not None:
            with _creating("record", settings.record):
                self.observers.append(stack.enter_context(closing(Recorder(settings.record, config))))
        if settings.steps is not None:
            with _creating("steps", settings.steps):
                self.observers.append(stack.enter_context(closing(StepsFile(settings.steps))))
        if (path := flight_dir(settings)) is not None:
            flight = FlightRecorder(path, keep_tokens=settings.flight == "tokens")
            self._flight = stack.enter_context(closing(flight))
            self.observers.append(flight)

    def guarding(self, *expected: type[Exception]) -> AbstractContextManager[None]:
        """Writes the last events if the body raises an exception that is not expected, or meets a fatal signal."""
        return nullcontext() if self._flight is None else self._flight.guarding(*expected)


@contextmanager
def _creating(setting: str, path: Path) -> Generator[None]:
    """Raises SettingError if the file of the setting cannot be created."""
    try:
        yield
    except OSError as error:
        hint = "; existing files are not overwritten, choose another name" if isinstance(error, FileExistsError) else ""
        raise SettingError(f"{setting}: {path} cannot be created: {error.strerror}{hint}") from None
