"""What a start finds: damaged, foreign and old journals, and what is taken from them."""

import logging
import os
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tandem.internal.v1 import journal_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.journal import reader
from scheduler_svc.journal.file import FORMAT, JournalFolder
from scheduler_svc.journal.reader import SavedCore
from scheduler_svc.journal.records import record
from scheduler_svc.wire import framing
from tandem_contract.codec import packed
from tandem_contract.plural import numbered
from tandem_contract.settings import SettingError
from tests.scheduler_svc.journal.test_recovery import steps
from tests.simulation.lives import FRONTEND, Lives

ROOT = bytes(range(32))
STATE = record(state=journal_pb2.JournalState(cache_root=ROOT, identity="model 1", next_generation=1 << 40))


def saved_by(tmp_path: Path, data: bytes, mode: int = 0o600) -> SavedCore:
    """Returns what a start reads from a journal with this content."""
    with closing(JournalFolder(tmp_path / "journal")) as folder:
        folder.current.write_bytes(data)
        folder.current.chmod(mode)
        return reader.read(folder)


def real_journal(tmp_path: Path) -> tuple[bytes, Lives]:
    """Returns the journal of a core that died with three live requests and an ended one."""
    lives = Lives(tmp_path / "first")
    lives.begin()
    lives.submit([5, 6, 7], max_new_tokens=2)
    for i in range(3):
        lives.submit([i, 1, 2], max_new_tokens=30, num_samples=1 + i, seed=i)
    steps(lives, 10)
    lives.kill()
    return (tmp_path / "first" / "journal").read_bytes(), lives


def test_no_journal_is_an_empty_one(tmp_path: Path) -> None:
    with closing(JournalFolder(tmp_path / "journal")) as folder:
        assert reader.read(folder) == SavedCore()
    assert saved_by(tmp_path, b"") == SavedCore()
    assert saved_by(tmp_path, FORMAT.first_line[:5]) == SavedCore()


def test_everything_that_callers_got_is_read(tmp_path: Path) -> None:
    data, lives = real_journal(tmp_path)
    saved = saved_by(tmp_path, data)
    assert len(saved.requests) == 4
    assert saved.state.cache_root == next(iter(lives.roots))
    assert saved.state.next_generation == 1 << 32
    assert saved.next_number == saved.requests[-1].numbers.stop
    for caller, request in zip(lives.callers, saved.requests, strict=True):
        assert [sample.tokens.tolist() for sample in request.samples] == caller.received
        assert [sample.end.end if sample.end else None for sample in request.samples] == caller.ends
        for name in ("request_id", "sampling", "max_new_tokens", "linger_seconds", "secret_hash", "description"):
            assert getattr(request.submit, name) == getattr(caller.submit, name)
        assert request.submit.prompt.tolist() == caller.submit.prompt.tolist()
        assert request.submit.prefix_root == caller.submit.prefix_root


def test_a_journal_cut_at_any_byte_is_read_up_to_the_last_whole_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, _ = real_journal(tmp_path)
    frames = framing.Frames(data, FORMAT)
    ends = [len(FORMAT.first_line)]
    for payload in frames:
        ends.append(ends[-1] + framing.HEADER_BYTES + len(payload))
    whole = saved_by(tmp_path, data)
    for size in range(ends[-5], len(data)):
        caplog.clear()
        saved = saved_by(tmp_path, data[:size])
        assert len(saved.requests) == len(whole.requests)
        for cut, full in zip(saved.requests, whole.requests, strict=True):
            for some, every in zip(cut.samples, full.samples, strict=True):
                assert every.tokens[: len(some.tokens)].tolist() == some.tokens.tolist()
        lost = size - max(end for end in ends if end <= size)
        said = f"an incomplete record of {numbered(lost, 'byte')} at the end of the journal"
        assert [said in message for message in caplog.messages] == [True] * (lost > 0)


def test_a_changed_byte_anywhere_restores_no_request_and_keeps_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, _ = real_journal(tmp_path)
    after_state = len(FORMAT.first_line + framing.frame(next(iter(framing.Frames(data, FORMAT)))))
    for at in range(after_state, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 0x10
        caplog.clear()
        saved = saved_by(tmp_path, bytes(changed))
        assert saved.requests == []
        assert saved.state.next_generation == 1 << 32
        [record] = caplog.records
        assert record.levelno == logging.ERROR
        assert "does not match its checksum; its" in record.message
        folder = tmp_path / "journal"
        assert (folder / "journal.damaged").read_bytes() == bytes(changed)
        assert not (folder / "journal").exists()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"tandem journal 2\n" + bytes(20), "journal has format 2; this program reads format 1 only; remove"),
        (b"#!/bin/sh\n", "journal is not a journal; remove it or choose another folder with --journal"),
    ],
)
def test_foreign_files_end_the_start(tmp_path: Path, data: bytes, what: str) -> None:
    with pytest.raises(SettingError, match=what):
        saved_by(tmp_path, data)
    assert (tmp_path / "journal" / "journal").read_bytes() == data


def test_a_file_that_others_can_read_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"must be a file of user \d+ with mode 0600; it .* has mode 0644"):
        saved_by(tmp_path, FORMAT.first_line, mode=0o644)
    folder = JournalFolder(tmp_path / "link")
    os.symlink(tmp_path / "journal" / "journal", folder.current)
    with pytest.raises(SettingError, match="cannot be read: Too many levels of symbolic links"):
        reader.read(folder)
    folder.close()


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def tokens_of(numbers: np.ndarray, offsets: np.ndarray, tokens: np.ndarray) -> bytes:
    return record(tokens={"numbers": packed(numbers), "offsets": packed(offsets), "tokens": packed(tokens)})


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "it is empty"),
        (b"\xff\xff", "not a JournalRecord"),
        (tokens_of(numbers(1, 2), ints(0, 0), ints(5)), "differ in length"),
        (struct.pack("<BBBB", 0x12, 2, 0x08, 1), "prompt has 0 entries; it must have at least 1"),
    ],
)
def test_a_record_that_cannot_be_read_is_damage(
    tmp_path: Path, payload: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = FORMAT.first_line + framing.frame(STATE) + framing.frame(payload) + framing.frame(STATE)
    saved = saved_by(tmp_path, data)
    assert (saved.state.cache_root, saved.state.identity, saved.state.next_generation) == (ROOT, "model 1", 1 << 40)
    assert "is damaged: a record cannot be read: " in caplog.text
    assert why in caplog.text


def test_a_journal_with_which_two_schedulers_crashed_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, _ = real_journal(tmp_path)
    for num_crashes, num_requests in ((1, 4), (2, 0)):
        folder = JournalFolder(tmp_path / "journal")
        folder.count_crash()
        assert folder.num_crashes == num_crashes
        folder.close()
        saved = saved_by(tmp_path, data)
        assert len(saved.requests) == num_requests
        assert saved.state.cache_root
    assert "2 schedulers in a row crashed with it; its 4 requests are not restored" in caplog.text
    assert (tmp_path / "journal" / "journal.damaged").read_bytes() == data
    assert len(saved_by(tmp_path, data).requests) == 4


def test_a_scheduler_that_runs_for_a_while_was_not_crashed_by_its_journal(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "journal")
    folder = JournalFolder(tmp_path / "journal")
    folder.count_crash()
    folder.close()
    lives.begin()
    lock = tmp_path / "journal" / "lock"
    assert lock.stat().st_size == 1
    lives.now += 11.0
    lives.turn(ev.Tick())
    assert lock.stat().st_size == 0
    lives.close()


def test_a_gap_in_a_sample_restores_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, _ = real_journal(tmp_path)
    request = saved_by(tmp_path, data).requests[-1]
    gap = tokens_of(numbers(request.number), ints(len(request.samples[0].tokens) + 1), ints(9))
    assert saved_by(tmp_path, data + framing.frame(gap)).requests == []
    assert "without a gap" in caplog.text


def test_the_output_of_many_samples_is_collected_from_all_steps(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "journal")
    lives.begin()
    callers = [lives.submit([i, i], max_new_tokens=20, num_samples=3, seed=i) for i in range(4)]
    lives.run()
    lives.kill()
    with closing(JournalFolder(tmp_path / "journal")) as folder:
        saved = reader.read(folder)
    for caller, request in zip(callers, saved.requests, strict=True):
        assert [sample.tokens.tolist() for sample in request.samples] == caller.received
        assert all(sample.end is not None and isinstance(sample.end.end, fx.End) for sample in request.samples)
        assert request.submit.frontend == "" != FRONTEND
