"""The leader's side of a group: passes the scheduler's frames to the other ranks before it acts on them itself.

Owns the sockets to the followers and the record of when each was heard. A follower that is silent while the leader is
not in a step is lost, and with it the group.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import zmq
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.group.ranks import Ranks
from gpu_worker.group.words import (
    BEAT,
    BEAT_SECONDS,
    FRAME,
    HIGH_WATER_MARK,
    SILENCE_SECONDS,
    STOP,
    RankLost,
    endpoint_of,
    name_of,
    rank_of,
)
from gpu_worker.link.plan_runner import PlanRunner
from gpu_worker.wire.frames import Outcome

# Followers connect once their own start has ended.
_CONNECT_SECONDS = 60.0


class LeadingRunner:
    """The runner of rank 0 as the link uses it (`PlanRunner`); what it is told, the followers are told first."""

    def __init__(self, runner: PlanRunner, ranks: Ranks, runtime_dir: Path, launcher_pid: int) -> None:
        """Waits for the followers. Raises RankLost."""
        self._runner, self._ranks = runner, ranks
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, 4096),
            (zmq.LINGER, 200),
        ):
            self._socket.setsockopt(option, value)
        self._path = Path(endpoint_of(runtime_dir, launcher_pid).removeprefix("ipc://"))
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{self._path}")
        finally:
            os.umask(before)
        # By rank.
        self._heard: dict[int, float] = {}
        self._beat_at = 0.0
        self._await_followers()

    def _await_followers(self) -> None:
        until = time.monotonic() + _CONNECT_SECONDS
        while len(self._heard) < self._ranks.size - 1:
            left = until - time.monotonic()
            if left <= 0 or not self._socket.poll(left * 1e3):
                missing = sorted(set(range(1, self._ranks.size)) - self._heard.keys())
                raise RankLost(f"ranks {missing} of {self._ranks.size} have not connected in {_CONNECT_SECONDS:g} s")
            self._hear()

    @property
    def num_in_flight(self) -> int:
        """As `PlanRunner`."""
        return self._runner.num_in_flight

    @property
    def pool_id(self) -> bytes:
        """As `PlanRunner`."""
        return self._runner.pool_id

    def report_pages(self, join: pb.Join) -> None:
        """As `PlanRunner`."""
        self._runner.report_pages(join)

    def join(self, message: pb.Joined) -> None:
        """As `PlanRunner`."""
        self._runner.join(message)
        self._in_a_step()

    def submit(self, message: pb.StepPlan) -> None:
        """As `PlanRunner`."""
        self._runner.submit(message)
        self._in_a_step()

    def collect(self, *, wait: bool = True) -> Outcome | None:
        """As `PlanRunner`. The link calls it in every turn, so the signs of life pass here. Raises RankLost."""
        outcome = self._runner.collect(wait=wait)
        if outcome is not None:
            self._in_a_step()
        self._keep_in_touch()
        return outcome

    def forward(self, frame: bytes) -> None:
        """Sends a frame of the scheduler to every follower. Raises RankLost."""
        self._tell(FRAME, frame)

    def close(self) -> None:
        """Tells the followers to end, if they still take frames, and closes the socket."""
        with suppress(RankLost):
            self._tell(STOP)
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)

    def _in_a_step(self) -> None:
        """Until now this rank could not listen, and the others could not speak: all were in the same step."""
        now = time.monotonic()
        self._heard = dict.fromkeys(self._heard, now)

    def _tell(self, *parts: bytes) -> None:
        for rank in range(1, self._ranks.size):
            try:
                self._socket.send_multipart([name_of(rank), *parts], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankLost(f"rank {rank} of {self._ranks.size} does not take frames: {error}") from error

    def _keep_in_touch(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT_SECONDS
        self._tell(BEAT)
        self._hear()
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_SECONDS:
                raise RankLost(f"rank {rank} of {self._ranks.size} was silent for {now - heard:.1f} s")

    def _hear(self) -> None:
        while self._socket.poll(0):
            rank = rank_of(self._socket.recv_multipart()[0])
            if rank is not None and 0 < rank < self._ranks.size:
                self._heard[rank] = time.monotonic()
