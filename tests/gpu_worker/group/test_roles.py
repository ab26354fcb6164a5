"""A leader and a follower in two threads: the follower carries out the scheduler's frames in order, until the end."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.group import roles
from gpu_worker.group.pulse import Pulse
from gpu_worker.group.roles import Leader, follow
from gpu_worker.group.wires import Wires
from gpu_worker.process.ranks import Ranks
from gpu_worker.wire.frames import Outcome
from tests.rigs.waiting import TIMEOUT_SECONDS

RANKS = [Ranks(rank=rank, size=2, local_rank=rank, local_size=2) for rank in (0, 1)]


class Notes:
    """Notes what it is given; at most one plan is in flight."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.weights = self
        self.num_in_flight = 0

    def load(self, order: pb.LoadWeights) -> pb.WeightsLoaded:
        self.done.append(order.version)
        return pb.WeightsLoaded(version=order.version, ok=True)

    def join(self, message: pb.Joined) -> None:
        self.done.append(("joined", message.generation))

    def submit(self, message: pb.StepPlan) -> None:
        assert self.num_in_flight < 1
        self.num_in_flight += 1
        self.done.append(message.step)

    def collect(self, *, wait: bool = True) -> Outcome | None:
        if not self.num_in_flight:
            return None
        self.num_in_flight -= 1
        return Outcome(generation=1, step=1, status=pb.STEP_STATUS_OK)


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Thread, Notes]]:
    """Serves until its leader, at the same folder, ends."""
    runner = Notes()

    def serve() -> None:
        wires = Wires(RANKS[1], None, tmp_path, "g")  # type: ignore[arg-type]
        pulse = Pulse(RANKS[1], wires.signs)
        monkeypatch.setattr(roles, "Pulse", lambda *_: pulse)
        follow(runner, RANKS[1], wires, max_in_flight=1)  # type: ignore[arg-type]
        # A process ends here.
        pulse.stop()
        wires.frames.close(0)
        wires.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield thread, runner
    thread.join(TIMEOUT_SECONDS)


def test_a_follower_does_what_its_leader_passes_on_in_order(
    follower: tuple[threading.Thread, Notes], tmp_path: Path
) -> None:
    thread, runner = follower
    leader = Leader(RANKS[0], Wires(RANKS[0], None, tmp_path, "g"))  # type: ignore[arg-type]
    frames = [pb.CoreToWorker(joined=pb.Joined(generation=7))]
    frames += [pb.CoreToWorker(plan=pb.StepPlan(generation=7, step=step)) for step in (1, 2, 3)]
    frames += [pb.CoreToWorker(load_weights=pb.LoadWeights(version="v2"))]
    for frame in frames:
        leader.turn()
        with leader.step():
            leader.forward(frame.SerializeToString())
    leader.close()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()
    assert runner.done == [("joined", 7), 1, 2, 3, "v2"]
    assert not list(tmp_path.glob("*.sock"))
