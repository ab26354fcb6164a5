"""The writer: appends, rewriting, limits and full disks. A journal on the disk is complete or is not there."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.journal.file import FORMAT, JournalFolder, JournalWriter, Sync
from scheduler_svc.wire import framing
from scheduler_svc.wire.framing import Frames, Tail
from tandem_contract.settings import SettingError
from tests.rigs.processes import no_threads
from tests.rigs.small_disk import FullDisk

LIMIT = 20 << 20


class Bench:
    """A writer with the list `live` as its snapshot, and a clock."""

    def __init__(self, path: Path, *, max_bytes: int = LIMIT, sync: Sync = Sync.OFF) -> None:
        self.live: list[bytes] = []
        self.now = 100.0
        self.disk = FullDisk()
        self.folder = JournalFolder(path)
        self.writer = JournalWriter(
            self.folder, snapshot=lambda: list(self.live), max_bytes=max_bytes, sync=sync, now=self.now,
            write=self.disk.write,
        )  # fmt: skip

    def append(self, *payloads: bytes, live: bool = True, drops: bool = False) -> None:
        if live:
            self.live += payloads
        self.writer.append(payloads, self.now, drops=drops)

    def after(self, seconds: float) -> None:
        """Lets time pass, and any sync end."""
        self.now += seconds
        self.writer.maintain(self.now)
        self.settle()

    def settle(self) -> None:
        while self.writer._syncing is not None:
            self.writer._syncing.join()
            self.writer.maintain(self.now)

    def read(self) -> list[bytes]:
        data = self.folder.current.read_bytes()
        assert FORMAT.begins(data)
        frames = Frames(data, FORMAT)
        found = list(frames)
        assert frames.extent.tail is Tail.WHOLE
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "journal")
    yield bench
    bench.writer.close(bench.now)
    bench.folder.close()


def test_appended_payloads_are_in_the_file_at_once(bench: Bench) -> None:
    calls = bench.disk.calls
    bench.append(b"a", b"b")
    bench.append(b"c")
    assert bench.read() == [b"a", b"b", b"c"]
    assert bench.disk.calls == calls + 2
    assert bench.writer.size == bench.folder.current.stat().st_size
    assert bench.folder.current.stat().st_mode & 0o777 == 0o600
    assert bench.folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("sync", list(Sync))
def test_a_large_file_of_dead_content_is_rewritten_and_misses_no_append(tmp_path: Path, sync: Sync) -> None:
    bench = Bench(tmp_path, sync=sync)
    bench.append(b"alive")
    for _ in range(5):
        bench.append(bytes(1 << 20), live=False)
    bench.now += 0.1
    bench.writer.maintain(bench.now)  # begins to rewrite
    bench.append(b"meanwhile")
    bench.settle()
    bench.append(b"later")
    assert bench.read() == [b"alive", b"meanwhile", b"later"]
    assert not bench.folder.aside.exists()


def test_dropped_content_is_erased_within_31_seconds(bench: Bench) -> None:
    bench.append(b"secret", live=False)
    bench.append(b"forget it", live=False, drops=True)
    bench.after(29.0)
    assert b"secret" in bench.read()
    bench.after(2.0)
    assert bench.read() == []


def test_a_file_with_nothing_dead_is_not_rewritten(bench: Bench) -> None:
    calls = bench.disk.calls
    for _ in range(100):
        bench.after(1.0)
    assert bench.disk.calls == calls


def test_a_full_disk_removes_the_journal_and_a_later_snapshot_brings_it_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.append(b"one")
    bench.disk.room = 5
    bench.append(b"two is too long")
    assert not bench.folder.current.exists()
    assert not bench.folder.aside.exists()
    assert bench.writer.size == 0
    assert "No space left on device; streams would not survive" in bench.writer.suspended
    bench.append(b"three")
    bench.after(0.1)  # The first retry comes at once, and fails.
    bench.after(4.0)
    assert bench.writer.suspended
    bench.disk.room = None
    bench.after(2.0)
    assert bench.writer.suspended == ""
    assert bench.read() == [b"one", b"two is too long", b"three"]
    bench.append(b"four")
    assert bench.read()[-1] == b"four"
    errors = [record.message for record in caplog.records]
    assert len(errors) == 2
    assert "cannot be written: No space left on device; it was removed, and it is tried again" in errors[0]
    assert "is written again" in errors[1]


def test_a_disk_that_becomes_full_while_the_file_is_rewritten(bench: Bench) -> None:
    bench.append(b"x" * 100)
    bench.append(b"gone", live=False, drops=True)
    bench.disk.room = 50
    bench.after(31.0)
    assert not bench.folder.current.exists()
    bench.disk.room = None
    bench.after(0.0)
    assert bench.read() == [b"x" * 100]


def test_live_content_above_the_limit_suspends_until_it_fits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_bytes=1000)
    bench.append(b"a" * 600)
    bench.append(b"b" * 600)
    assert "would need 1,2" in bench.writer.suspended
    assert "the limit is 1,000" in bench.writer.suspended
    assert not bench.folder.current.exists()
    bench.live = [b"b" * 600]
    bench.after(5.1)
    assert bench.writer.suspended == ""
    assert bench.read() == bench.live


def test_a_record_that_no_reader_takes_is_not_written(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old journal would be damage to a reader from there on."""
    monkeypatch.setattr(framing, "MAX_PAYLOAD", 100)
    bench.append(b"a" * 100)
    assert bench.read() == bench.live
    bench.append(b"b" * 101)
    bench.after(0.1)
    assert "cannot be written: a record has 101 bytes; the limit is 100" in bench.writer.suspended
    assert not bench.folder.current.exists() and not bench.folder.aside.exists()
    del bench.live[1]
    bench.after(5.1)
    assert bench.writer.suspended == "" and bench.read() == bench.live


def test_a_file_above_the_limit_is_rewritten_at_once_if_that_makes_it_fit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_bytes=1000)
    bench.append(b"a" * 600, live=False)
    bench.append(b"b" * 600)
    assert bench.read() == [b"b" * 600]


def test_closing_leaves_what_is_alive(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append(b"alive")
    bench.append(b"dead", live=False)
    bench.writer.close(bench.now)
    assert bench.read() == [b"alive"]


def test_closing_on_a_full_disk_leaves_the_complete_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path)
    bench.append(b"alive")
    bench.append(b"dead", live=False)
    bench.disk.room = 3
    bench.writer.close(bench.now)
    assert bench.read() == [b"alive", b"dead"]
    assert not bench.folder.aside.exists()
    [message] = caplog.messages
    assert message.endswith("cannot be written: No space left on device; it stays with what it has of ended requests")


def test_the_space_of_an_earlier_journal_is_used_at_once(tmp_path: Path) -> None:
    """The requests of the earlier scheduler go on, so they must be on the disk again soon."""
    path = tmp_path / "journal"
    JournalFolder(path).close()
    (path / "journal").write_bytes(bytes(100))
    disk, folder = FullDisk(), JournalFolder(path)
    disk.room = 0
    writer = JournalWriter(
        folder, snapshot=lambda: [b"alive"], max_bytes=LIMIT, sync=Sync.OFF, now=100.0, write=disk.write
    )
    assert writer.suspended and not folder.current.exists()
    disk.room = None
    writer.maintain(100.0)
    assert writer.suspended == "" and folder.current.exists()
    writer.close(100.0)
    folder.close()


def test_a_leftover_of_a_crash_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    JournalFolder(path).close()
    (path / "journal.new").write_bytes(b"half")
    bench = Bench(path)
    assert not bench.folder.aside.exists()
    assert bench.read() == []


def test_two_schedulers_never_share_a_folder(tmp_path: Path) -> None:
    first = JournalFolder(tmp_path / "j")
    with pytest.raises(
        SettingError, match=rf"another scheduler \(process {os.getpid()}\) holds .*; choose another folder"
    ):
        JournalFolder(tmp_path / "j")
    first.close()
    JournalFolder(tmp_path / "j").close()


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingError, match="has mode 0755; it must be 0700"):
        JournalFolder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"cannot be used|is not a folder"):
        JournalFolder(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SettingError, match="is not a folder of this user"):
        JournalFolder(tmp_path / "link")


@pytest.mark.parametrize("sync", list(Sync))
def test_without_threads_it_is_synced_in_the_loop(tmp_path: Path, sync: Sync) -> None:
    with no_threads():
        bench = Bench(tmp_path, sync=sync)
        bench.append(b"alive")
        bench.append(b"dead", live=False, drops=True)
        for _ in range(2):
            bench.now += 31
            bench.writer.maintain(bench.now)
        assert bench.read() == [b"alive"] and not bench.writer.suspended
        bench.writer.close(bench.now)
    assert bench.read() == [b"alive"]
