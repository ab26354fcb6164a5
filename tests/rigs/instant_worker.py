"""A worker that answers every plan at once, without a model: `python -m tests.rigs.instant_worker --runtime-dir DIR …`.

For measurements of everything else. It speaks the real protocol over the real socket, keeps one position per row, and
spends some 30 us on a step of any size. Output token i of a request with a prompt of first tokens a and b is
`token(256 * a + b, num_prompt + i)`, a lower-case letter, so a reader can check every token. With --step-ms results
leave at that pace. With --sent-at it writes the time (CLOCK_MONOTONIC) at which each token left to a .npy file at its
end, float64[streams, tokens], for the requests with a first number below --streams.
"""

import argparse
import signal
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import zmq
from tandem.internal.v1 import worker_pb2 as pb

from tandem_contract.stopping import STOP
from tests.rigs import byte_tokenizer, checking_worker

_HEARTBEAT_SECONDS = 1.0
_FIRST_LETTER, _NUM_LETTERS = 97, 26


def token(number: int, position: int) -> int:
    """The token at this position (from 0, the prompt included) of the request with this first number."""
    return _FIRST_LETTER + (number + position) % _NUM_LETTERS


class InstantRows:
    """The rows of the worker: `apply` returns the tokens that a plan samples."""

    def __init__(self, max_rows: int, sent_at: np.ndarray | None = None) -> None:
        self._numbers = np.zeros(max_rows + 1, np.int64)
        self._lengths = np.zeros(max_rows + 1, np.int64)
        self._num_prompt = np.zeros(max_rows + 1, np.int64)
        self._sent_at = sent_at

    def apply(self, plan: pb.StepPlan) -> bytes:
        """int32: the tokens of the rows that sample, in the plan's order."""
        if plan.HasField("started"):
            self._start(plan.started)
        rows = np.frombuffer(plan.decode_rows, "<i4")
        if plan.HasField("chunks"):
            samples = np.frombuffer(plan.chunks.samples, np.uint8) == 1
            rows = np.concatenate([np.frombuffer(plan.chunks.rows, "<i4")[samples], rows])
        lengths = self._lengths[rows]
        tokens = _FIRST_LETTER + (self._numbers[rows] + lengths) % _NUM_LETTERS
        if self._sent_at is not None:
            self._note(self._numbers[rows], lengths - self._num_prompt[rows])
        self._lengths[rows] = lengths + 1
        return tokens.astype("<i4").tobytes()

    def _start(self, started: pb.StartedRows) -> None:
        rows = np.frombuffer(started.rows, "<i4")
        num_tokens = np.frombuffer(started.num_tokens, "<i4")
        tokens = np.frombuffer(started.tokens, "<i4")
        firsts = np.cumsum(num_tokens) - num_tokens
        seconds = np.minimum(firsts + 1, len(tokens) - 1)
        self._numbers[rows] = 256 * tokens[firsts].astype(np.int64) + tokens[seconds]
        self._lengths[rows] = num_tokens
        self._num_prompt[rows] = np.frombuffer(started.num_prompt_tokens, "<i4")

    def _note(self, numbers: np.ndarray, indices: np.ndarray) -> None:
        assert self._sent_at is not None
        num_streams, num_tokens = self._sent_at.shape
        known = (numbers < num_streams) & (indices < num_tokens)
        self._sent_at[numbers[known], indices[known]] = time.monotonic()


class _Worker:
    """One connection to the core."""

    def __init__(self, dealer: zmq.Socket, join: pb.Join, rows: InstantRows, step_seconds: float) -> None:
        self._dealer = dealer
        self._join = join
        self._rows = rows
        self._step_seconds = step_seconds
        # Plans that wait for their pace, and the time at which the last result left.
        self._plans: deque[pb.StepPlan] = deque()
        self._answered_at = 0.0
        self._heartbeat_at = 0.0
        self.is_stopping = False

    def serve(self) -> None:
        """Joins, and answers plans until `is_stopping`."""
        self._send(pb.WorkerToCore(join=self._join), flags=0)
        while not self.is_stopping:
            now = time.monotonic()
            due = self._answered_at + self._step_seconds
            if self._plans and now >= due:
                # A pace, so that a late step does not delay all later ones.
                self._answered_at = due if now - due < self._step_seconds else now
                self._answer(self._plans.popleft())
                continue
            if now >= self._heartbeat_at:
                self._heartbeat_at = now + _HEARTBEAT_SECONDS
                self._send(pb.WorkerToCore(heartbeat=pb.Heartbeat(phase="ready", num_in_flight=len(self._plans))))
            until = min(due, self._heartbeat_at) if self._plans else self._heartbeat_at
            if self._dealer.poll(max(0, 1e3 * (until - now))):
                self._receive(self._dealer.recv(zmq.NOBLOCK))
        self._send(pb.WorkerToCore(leave=pb.Leave()))

    def _receive(self, frame: bytes) -> None:
        message = pb.CoreToWorker.FromString(frame)
        match message.WhichOneof("message"):
            case "plan":
                self._plans.append(message.plan)
            case "refused" | "rejoin":
                raise SystemExit(f"the core turned the worker away: {message}")
            case "joined":
                print(f"joined generation={message.joined.generation}", flush=True)
            case _:
                pass

    def _answer(self, plan: pb.StepPlan) -> None:
        message = pb.WorkerToCore()
        result = message.result
        result.generation, result.step, result.status = plan.generation, plan.step, pb.STEP_STATUS_OK
        result.tokens = self._rows.apply(plan)
        self._send(message)

    def _send(self, message: pb.WorkerToCore, flags: int = zmq.NOBLOCK) -> None:
        self._dealer.send(message.SerializeToString(), flags)


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    own = argparse.ArgumentParser(prog="instant_worker", allow_abbrev=False)
    own.add_argument("--sent-at", type=Path, metavar="FILE")
    own.add_argument("--streams", type=int, default=256)
    own.add_argument("--tokens", type=int, default=4096)
    # All other flags are the checking worker's: the sizes, --runtime-dir, --step-ms.
    flags, rest = own.parse_known_args(words)
    args = checking_worker.parse(rest)
    sent_at = np.full((flags.streams, flags.tokens), np.nan) if flags.sent_at else None
    context = zmq.Context()
    dealer = checking_worker.open_dealer(context, args)
    dealer.connect(f"ipc://{args.runtime_dir}/worker.sock")
    worker = _Worker(
        dealer, checking_worker.join_message(args), InstantRows(args.max_rows, sent_at), args.step_ms / 1e3
    )

    def stop(*_: object) -> None:
        worker.is_stopping = True

    for number in (signal.SIGTERM, STOP):
        signal.signal(number, stop)
    try:
        worker.serve()
    finally:
        if sent_at is not None:
            np.save(flags.sent_at, sent_at)
        dealer.close()
        context.term()
    return 0


assert byte_tokenizer.NUM_DRAWN > _FIRST_LETTER + _NUM_LETTERS

if __name__ == "__main__":
    raise SystemExit(main())
