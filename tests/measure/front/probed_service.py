"""The scheduler service with a clock on its tokens: `python -m tests.measure.front.probed_service FOLDER flags…`.

The core notes when it sends each output to a front end. A front end notes when each output arrives, and when each
sample's tokens are taken for a message, which gRPC gets in the same turn. Both write .npy files at their end; nothing
else of the service is changed. One front end only: outputs are matched by their order. `waits` reads the files.

The notes cost some 2 us per output and message, so CPU is measured without them.
"""

import runpy
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np

_SERVICE, _FRONT_END = "scheduler_svc", "scheduler_svc.frontend"


def waits(folder: Path) -> dict[str, np.ndarray]:
    """Seconds of each token: `sent` from the core's send, `arrived` from the arrival; `first`: it is a first token."""
    sent, arrived, lengths = (np.load(folder / f"{name}.npy") for name in ("sent", "arrived", "lengths"))
    samples, takes = np.load(folder / "samples.npy"), np.load(folder / "takes.npy")
    # Tokens and takes of a sample are in order. A sample that was closed has tokens at its end that nothing took.
    takes = takes[np.argsort(takes[:, 0], kind="stable")]
    takers, num_taken = takes[:, 0].astype(np.int64), takes[:, 1].astype(np.int64)
    by_sample = np.argsort(samples, kind="stable")
    samples, output = samples[by_sample], np.repeat(np.arange(len(lengths)), lengths)[by_sample]
    ids, firsts, counts = np.unique(samples, return_index=True, return_counts=True)
    rank = np.arange(len(samples)) - np.repeat(firsts, counts)
    totals = np.bincount(takers, weights=num_taken, minlength=int(ids[-1]) + 1)[ids]
    is_taken = rank < np.repeat(totals, counts)
    took_at, output = np.repeat(takes[:, 2], num_taken), output[is_taken]
    return {"sent": took_at - sent[output], "arrived": took_at - arrived[output], "first": rank[is_taken] == 0}


def _probe_core(folder: Path) -> list[float]:
    """Notes the time at which each output leaves. Starts the front end with a probe too."""
    from tandem.internal.v1 import frontend_pb2

    from scheduler_svc.shell.dispatch import EffectDispatcher
    from tandem_contract import child

    sent: list[float] = []
    send = EffectDispatcher.send

    def noted_send(self: EffectDispatcher, link: Any, peer: str, frame: bytes) -> None:
        if link is self.frontends:
            message = frontend_pb2.CoreToFrontend.FromString(frame)
            messages = message.batch.messages if message.HasField("batch") else [message]
            sent.extend(time.monotonic() for one in messages if one.HasField("step_output"))
        send(self, link, peer, frame)

    EffectDispatcher.send = noted_send

    popen = child.subprocess.Popen

    def probed(command: tuple[str, ...], *args: Any, **options: Any) -> Any:
        at = command.index(_FRONT_END)
        return popen([*command[:at], __spec__.name, str(folder), "--front-end", *command[at + 1 :]], *args, **options)

    child.subprocess.Popen = probed  # type: ignore[misc, assignment]
    return sent


def _save(folder: Path, **notes: Any) -> None:
    for name, values in notes.items():
        np.save(folder / f"{name}.npy", np.array(values))


def _probe_front_end(folder: Path) -> None:
    """Notes arrivals and takes."""
    from scheduler_svc.frontend.streaming.step_output import StepOutputReader
    from scheduler_svc.frontend.streaming.stream import SampleStream
    from scheduler_svc.frontend.streaming.stream_table import StreamTable

    now = time.monotonic
    arrived, lengths, samples, takes = array("d"), array("q"), array("q"), array("d")
    read, wait_idle, take = StepOutputReader.read, StreamTable.wait_idle, SampleStream.take

    def noted_read(self: StepOutputReader, output: Any) -> None:
        arrived.append(now())
        lengths.append(len(output.offsets) // 4)
        samples.frombytes(output.streams)
        read(self, output)

    def noted_take(self: SampleStream) -> Any:
        taken = take(self)
        if taken:
            takes.extend((self.id, len(taken), now()))
        return taken

    async def noted_idle(self: StreamTable) -> None:
        # The process is stopping. The core kills it once its socket is closed, so this is the last chance.
        await wait_idle(self)
        _save(folder, arrived=arrived, lengths=lengths, samples=samples, takes=np.array(takes).reshape(-1, 3))

    StepOutputReader.read = noted_read  # type: ignore[method-assign]
    StreamTable.wait_idle = noted_idle  # type: ignore[method-assign]
    SampleStream.take = noted_take  # type: ignore[method-assign]


def main() -> None:
    """Runs the service, or a front end of it, in this process."""
    folder = Path(sys.argv.pop(1))
    is_front_end = sys.argv[1] == "--front-end"
    if is_front_end:
        sys.argv.pop(1)
    if is_front_end:
        _probe_front_end(folder)
        runpy.run_module(_FRONT_END, run_name="__main__", alter_sys=True)
        return
    sent = _probe_core(folder)
    try:
        runpy.run_module(_SERVICE, run_name="__main__", alter_sys=True)
    finally:
        _save(folder, sent=sent)


if __name__ == "__main__":
    main()
