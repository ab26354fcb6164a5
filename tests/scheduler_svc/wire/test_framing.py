"""Frames: every truncation is torn, every changed bit is damage, and what comes before is read."""

import pytest

from scheduler_svc.journal.file import FORMAT
from scheduler_svc.wire import framing
from scheduler_svc.wire.framing import ForeignFileError, Frames, Tail, frame

FIRST_LINE = FORMAT.first_line

PAYLOADS = [b"", b"one", bytes(range(70)), b"the last record"]


def file_of(payloads: list[bytes]) -> bytes:
    return FIRST_LINE + b"".join(map(frame, payloads))


def read(data: bytes) -> tuple[list[bytes], Tail, int]:
    frames = Frames(data, FORMAT)
    found = list(frames)
    return found, frames.extent.tail, frames.extent.end


def test_what_is_framed_is_read() -> None:
    data = file_of(PAYLOADS)
    assert FORMAT.begins(data)
    assert read(data) == (PAYLOADS, Tail.WHOLE, len(data))


def test_a_file_cut_at_any_byte_gives_the_complete_frames_before() -> None:
    data = file_of(PAYLOADS)
    ends = [len(file_of(PAYLOADS[:count])) for count in range(len(PAYLOADS) + 1)]
    for size in range(len(FIRST_LINE), len(data)):
        count = sum(end <= size for end in ends) - 1
        tail = Tail.WHOLE if size in ends else Tail.TORN
        assert read(data[:size]) == (PAYLOADS[:count], tail, ends[count]), size


def test_any_changed_bit_is_damage_in_its_frame() -> None:
    data = file_of(PAYLOADS)
    ends = [len(file_of(PAYLOADS[:count])) for count in range(len(PAYLOADS) + 1)]
    for bit in range(8 * len(FIRST_LINE), 8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        count = sum(end <= bit // 8 for end in ends) - 1
        assert read(bytes(changed)) == (PAYLOADS[:count], Tail.DAMAGED, ends[count]), bit


def test_a_first_line_that_was_cut_is_not_complete() -> None:
    assert [FORMAT.begins(FIRST_LINE[:size]) for size in range(len(FIRST_LINE))] == [False] * len(FIRST_LINE)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"tandem journal 7\nmore", "has format 7; this program reads format 1 only"),
        (b"tandem journal \xff\nmore", "has format .; this program reads"),
        (b"SQLite format 3\0", "is not a journal"),
        (bytes(4096), "is not a journal"),
    ],
)
def test_other_files_are_named(data: bytes, what: str) -> None:
    with pytest.raises(ForeignFileError, match=what):
        FORMAT.begins(data)


def test_a_length_above_the_limit_is_damage() -> None:
    assert framing.MAX_PAYLOAD < 1 << 32
    sizes = framing._SIZES.pack(framing.MAX_PAYLOAD + 1, 0)
    bad = sizes + framing._CHECK.pack(framing.crc32(sizes))
    assert read(FIRST_LINE + frame(b"x") + bad) == ([b"x"], Tail.DAMAGED, len(FIRST_LINE + frame(b"x")))
