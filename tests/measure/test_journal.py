"""The journal's benchmark runs, and its lines hold the promised figures; times are not tested."""

from pathlib import Path

from scheduler_svc.journal.file import Sync
from tests.measure import journal


def test_a_load_is_written_and_measured(tmp_path: Path) -> None:
    line = journal.measure(tmp_path, 8, steps=3, num_tokens=10, sync=Sync.OFF)
    assert (line["rows"], line["sync"]) == (8, "off")
    assert line["step_us"] > 0 and line["rewrite_ms"] > 0
    # A number, an offset and a token take 16 bytes; the rest is the frame.
    assert 16 < line["token_bytes"] < 25
