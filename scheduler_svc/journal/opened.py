"""A journal that the starting scheduler has opened: what it held, and the keeper that goes on with it."""

import secrets
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal import reader
from scheduler_svc.journal.clock import clock_after
from scheduler_svc.journal.folder import JournalFolder
from scheduler_svc.journal.keeper import JournalKeeper
from scheduler_svc.journal.suspicion import SuspicionLog
from scheduler_svc.journal.writer import JournalWriter, Snapshot, Sync

# No scheduler resets its lanes this often, and no service starts this often: generations have 64 bits (worker.proto).
_GENERATIONS = 1 << 32


class OpenedJournal:
    """The folder is locked until `stack` closes."""

    def __init__(self, path: Path, *, sync: Sync, max_bytes: int, stack: ExitStack) -> None:
        """Raises SettingError if the folder or the journal in it cannot be used."""
        self._folder = JournalFolder(path)
        stack.callback(self._folder.close)
        self._saved = reader.read(self._folder)
        self._clock = clock_after(self._saved.boot_id, self._saved.booted_at)
        self._saved.written_at = self._clock.written_at(self._saved.written_at)
        self._sync = sync
        self._max_bytes = max_bytes
        self.cache_root = self._saved.cache_root or secrets.token_bytes(HASH_BYTES)
        self.first_generation = self._saved.next_generation

    def keeper(self, core: Scheduler, monotonic: Callable[[], float]) -> JournalKeeper:
        """Returns the keeper of the requests that the core will get."""

        def make_writer(snapshot: Snapshot) -> JournalWriter:
            return JournalWriter(
                self._folder, snapshot=snapshot, max_bytes=self._max_bytes, sync=self._sync, now=monotonic()
            )

        return JournalKeeper(
            saved=self._saved,
            cache_root=self.cache_root,
            next_generation=self.first_generation + _GENERATIONS,
            outputs_of=core.outputs_of,
            spans_of=core.spans_of,
            suspicion=SuspicionLog(core, self._saved.suspects),
            make_writer=make_writer,
            on_steady=self._folder.forget_crashes,
            clock=self._clock,
        )

    @contextmanager
    def closing(self, keeper: JournalKeeper, monotonic: Callable[[], float]) -> Generator[None]:
        """Closes the keeper at the end. After an error of the core the journal stays as it is, and the crash counts.

        The core's state is not to be trusted then.
        """
        try:
            yield
        except BaseException:
            self._folder.count_crash()
            raise
        keeper.close(monotonic())
