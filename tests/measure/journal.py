"""Measures what the journal adds to a step of the core: `python -m tests.measure.journal [--json] [--rows N…]`.

A step is one StepOutput with a token for each row, all of requests that linger, as the shell passes it on: its record
is made, encoded and written to a file. Figures are wall time of the scheduler's thread, medians over steps.
`rewrite_ms` is the time for which a rewriting holds that thread, with `--tokens` tokens of output for each row.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.file import Sync
from scheduler_svc.journal.keeper import JournalKeeper, OpenedJournal
from scheduler_svc.journal.records import record
from scheduler_svc.wire.framing import frame
from tandem_contract.codec import packed
from tests.measure.harness import Measurement
from tests.rigs.core_events import submit

_PROMPT_TOKENS = 512
_WARM = 20


def core_with(output: Int32Array) -> Scheduler:
    """Returns a core that knows the journal's requests: each ends at 4,096 tokens and has this output so far."""
    core = Scheduler(CoreConfig())
    kept = SimpleNamespace(restored=SimpleNamespace(outputs=(output,), weights=()))
    core.queue.by_request_id = lambda request_id: (SimpleNamespace(total_length=4096),)
    core.kept.by_id = lambda request_id: kept
    return core


class Load:
    """A keeper with `rows` requests, each with `num_tokens` tokens of output, in a folder."""

    def __init__(self, folder: Path, rows: int, *, num_tokens: int, sync: Sync) -> None:
        self.rows = rows
        self._stack = ExitStack()
        journal = OpenedJournal(folder, sync=sync, max_bytes=1 << 30, stack=self._stack)
        self.keeper = JournalKeeper(journal, core_with(np.arange(num_tokens, dtype=np.int32)))
        self.keeper.restore(lambda event, **entry: [], time.monotonic())
        for stream in range(rows):
            self._admit(stream)
        self.keeper.sending(time.monotonic())
        self._streams = np.arange(rows, dtype=np.uint64)
        self._random = np.random.default_rng(7)
        self._offset = num_tokens

    def _admit(self, stream: int) -> None:
        event = submit(
            stream, range(_PROMPT_TOKENS), frontend="f", sampling=bytes(60), max_new_tokens=4096,
            linger_seconds=60.0, secret_hash=bytes(32), description=bytes(200), request_id=f"request {stream}",
        )  # fmt: skip
        self.keeper.handled(0.0, event, [fx.Admitted(frontend="f", stream=stream, requests_ahead=0)])

    def step(self) -> fx.StepOutput:
        """The next step's output, one token per row."""
        self._offset += 1
        return fx.StepOutput(
            frontend="f",
            streams=self._streams,
            offsets=np.full(self.rows, self._offset - 1, np.int32),
            tokens=self._random.integers(0, 150_000, self.rows, dtype=np.int32),
            logprobs=None,
            prompt_logprobs=(),
            ends=(),
        )

    def close(self) -> None:
        self.keeper.close(time.monotonic())
        self._stack.close()


def measure(folder: Path, rows: int, *, steps: int, num_tokens: int, sync: Sync) -> dict[str, Any]:
    """Returns one line of the report."""
    load = Load(folder, rows, num_tokens=num_tokens, sync=sync)
    spent: list[float] = []
    tick = ev.Tick()
    for i in range(_WARM + steps):
        output = load.step()
        start = time.perf_counter()
        load.keeper.handled(0.0, tick, [output])
        load.keeper.sending(time.monotonic())
        if i >= _WARM:
            spent.append(time.perf_counter() - start)
    output = load.step()
    names = {"numbers": "streams", "offsets": "offsets", "tokens": "tokens"}
    arrays = {name: packed(getattr(output, own)) for name, own in names.items()}
    written = len(frame(record(tokens=arrays)))
    start = time.perf_counter()
    for _ in load.keeper.snapshot():
        pass
    rewrite = time.perf_counter() - start
    load.close()
    seconds = median(spent)
    return {
        "rows": rows,
        "sync": str(sync),
        "step_us": round(1e6 * seconds, 1),
        "token_bytes": round(written / rows, 1),
        "rewrite_ms": round(1e3 * rewrite, 2),
    }


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures each combination of rows and sync."""
    for rows in arguments.rows:
        for sync in Sync:
            # A device may take 10 ms to sync.
            steps = arguments.steps if sync is not Sync.STEP else min(arguments.steps, 200)
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                yield measure(Path(folder), rows, steps=steps, num_tokens=arguments.tokens, sync=sync)


def main() -> int:
    measurement = Measurement("journal")
    measurement.flag("--rows", type=int, nargs="+", default=[32, 256], help="rows of a step")
    measurement.flag("--steps", type=int, default=1000, help="measured steps")
    measurement.flag("--tokens", type=int, default=512, help="tokens of output of each row in a rewriting")
    measurement.flag("--folder", type=Path, default=None, help="where the journal is written; default: TMPDIR")
    for line in lines(measurement.begin()):
        measurement.line(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
