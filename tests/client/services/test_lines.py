"""Programs that are found, log lines, and the thread that writes lines."""

import json
import os
import re
import sys

from tandem_client.services.lines import LineWriter
from tandem_client.services.programs import missing_programs
from tandem_contract.logs import LogLine, as_json, parse
from tests.client.fake_service import WAIT_SECONDS


def test_programs_are_found_without_importing_them() -> None:
    before = set(sys.modules)
    assert missing_programs(["this", "no_such_program"]) == ["no_such_program"]
    assert "this" not in set(sys.modules) - before


def test_lines_of_the_log_are_read_in_both_formats() -> None:
    core = LogLine("core", "WARNING", "worker lost: gone")
    assert parse("2026-11-22 02:12:58.026 core WARNING worker lost: gone") == core
    record = '{"time": "2026-11-22T02:12:58.026+00:00", "process": "core", "pid": 1, "level": "WARNING", '
    assert parse(record + '"message": "worker lost: gone"}') == core
    for other in ("gpu_worker: device: no such device", '{"a": 1}', "{", "[1]"):
        assert parse(other) == LogLine("", "", other)


def test_every_line_becomes_one_of_a_json_log() -> None:
    ours = '{"time": "t", "process": "core", "pid": 1, "level": "WARNING", "message": "lost"}'
    assert as_json("scheduler", ours) == ours
    for other in ("gpu_worker: no such device", '{"a": 1}', "{", "[1]", "\x1b[2J\u2028", '{"process": "core"'):
        made = json.loads(as_json("scheduler", other, level="ERROR"))
        assert (made["process"], made["level"], made["message"]) == ("scheduler", "ERROR", other)
        assert set(made) == set(json.loads(ours)) and as_json("scheduler", other).isascii()


def test_a_writer_without_a_reader_drops_and_counts_lines() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading) as reader:
        writer = LineWriter(stream, max_lines=100, own_line="own: {}".format)
        for n in range(20_000):
            writer.write(f"{n:050}")
        # The pipe is full, so this call times out.
        writer.close(0.01)
        written: list[int] = []
        num_dropped = 0
        while len(written) + num_dropped < 20_000:
            line = reader.readline().rstrip()
            dropped = re.fullmatch(r"own: (\d+) lines were dropped because the output was not read in time", line)
            if dropped is None:
                written.append(int(line))
            else:
                num_dropped += int(dropped[1])
    assert num_dropped > 0
    assert written == sorted(set(written))


def test_a_writer_survives_the_end_of_its_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        writer = LineWriter(stream)
        for _ in range(3):
            writer.write("x")
        writer.close(WAIT_SECONDS)
    assert not writer._thread.is_alive()
