"""The checking worker's process speaks the protocol: driven here by a bare ROUTER in the core's place."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import zmq
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs import byte_tokenizer
from tests.rigs.oracle import complete
from tests.rigs.plan_builder import PlanBuilder
from tests.rigs.processes import Child, Rig

PROMPT = [1, 2, 3]


class BareCore:
    """Binds the worker's socket and does what the test says."""

    def __init__(self, rig: Rig) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.RCVTIMEO, 20_000)
        self._router.bind(f"ipc://{rig.runtime_dir}/worker.sock")
        self.peer = b""

    def close(self) -> None:
        self._router.close()
        self._context.term()

    def receive(self, kind: str) -> pb.WorkerToCore:
        """The next message that is of this kind; heartbeats in between are passed over."""
        while True:
            self.peer, data = self._router.recv_multipart()
            message = pb.WorkerToCore.FromString(data)
            if message.WhichOneof("message") == kind:
                return message
            assert message.WhichOneof("message") == "heartbeat", message

    def send(self, **message: object) -> None:
        self._router.send_multipart([self.peer, pb.CoreToWorker(**message).SerializeToString()])

    def join(self, generation: int) -> pb.Join:
        join = self.receive("join").join
        self.send(joined=pb.Joined(generation=generation))
        return join


@contextmanager
def meeting(*flags: str) -> Iterator[tuple[BareCore, Child, Rig]]:
    with Rig() as rig:
        worker = rig.worker(*flags)
        core = BareCore(rig)
        try:
            yield core, worker, rig
        finally:
            core.close()


def expected(num: int) -> list[int]:
    return list(complete(PROMPT, max_new_tokens=num, vocab=byte_tokenizer.NUM_DRAWN).tokens)


def prefill(plans: PlanBuilder) -> pb.StepPlan:
    return plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 3, samples=True).build()


def tokens_of(result: pb.StepResult) -> list[int]:
    assert result.status == pb.STEP_STATUS_OK, result.detail
    return np.frombuffer(result.tokens, dtype="<i4").tolist()


def test_the_worker_joins_answers_plans_in_order_and_leaves() -> None:
    with meeting("--page-size", "8", "--num-pages", "5", "--max-rows", "2") as (core, worker, rig):
        join = core.join(generation=7)
        assert (join.protocol, join.page_size, join.num_pages, join.max_rows) == (9, 8, 5, 2)
        assert join.pid == worker.pid
        assert list(join.eos_token_ids) == [byte_tokenizer.EOS_ID]
        assert core.peer.startswith(f"w-{worker.pid}-".encode())
        plans = PlanBuilder(generation=7)
        core.send(plan=prefill(plans))
        core.send(plan=plans.decode(1).build())
        results = [core.receive("result").result for _ in range(2)]
        assert [(result.generation, result.step) for result in results] == [(7, 1), (7, 2)]
        assert tokens_of(results[0]) + tokens_of(results[1]) == expected(2)
        worker.signal(signal.SIGTERM)
        core.receive("leave")
        assert worker.wait() == 0
        assert rig.violations() == []


def test_the_worker_joins_again_after_rejoin_and_after_a_restart_of_the_core() -> None:
    with meeting("--heartbeat-seconds", "0.05") as (core, worker, rig):
        first = core.join(generation=1)
        core.send(plan=prefill(PlanBuilder()))
        core.receive("result")
        core.send(rejoin=pb.Rejoin())
        assert core.join(generation=2) == first
        # Rows are gone with the generation, pages are not.
        plans = PlanBuilder(generation=2)
        core.send(plan=prefill(plans))
        assert tokens_of(core.receive("result").result) == expected(1)
        peer = core.peer
        core.close()
        core.__init__(rig)
        # The new core knows no worker: it answers the first sign of life, unless that is a Join already.
        core.peer, data = core._router.recv_multipart()
        if pb.WorkerToCore.FromString(data).WhichOneof("message") == "heartbeat":
            core.send(rejoin=pb.Rejoin())
            core.join(generation=1)
        else:
            core.send(joined=pb.Joined(generation=1))
        assert core.peer == peer
        core.send(plan=prefill(PlanBuilder()))
        assert tokens_of(core.receive("result").result) == expected(1)
        assert worker.exit_code is None


def test_the_worker_joins_again_if_it_may_retry_and_exits_if_it_may_not() -> None:
    with meeting("--retry-seconds", "0.01") as (core, worker, _):
        core.receive("join")
        core.send(refused=pb.Refused(reason="another serves", retry=True))
        core.receive("join")
        core.send(refused=pb.Refused(reason="another model", retry=False))
        assert worker.wait() == 3
        assert any("another model" in line for line in worker.lines)


def test_a_wrong_plan_fails_and_later_plans_are_skipped_until_a_newer_generation() -> None:
    with meeting() as (core, _, rig):
        core.join(generation=1)
        plans = PlanBuilder()
        core.send(plan=plans.start(1, PROMPT, [0]).chunk(1, 0, 3, samples=True).build())
        core.send(plan=plans.decode(1).build())
        assert core.receive("result").result.status == pb.STEP_STATUS_FAILED
        assert core.receive("result").result.status == pb.STEP_STATUS_SKIPPED
        [line] = rig.violations()
        assert "page 0, which is reserved" in line
        core.send(plan=prefill(PlanBuilder(generation=2)))
        assert tokens_of(core.receive("result").result) == expected(1)
        rig.violations_file.unlink()


def test_a_plan_beyond_the_limit_of_plans_in_flight_is_a_violation() -> None:
    with meeting("--step-ms", "200") as (core, _, rig):
        core.join(generation=1)
        plans = PlanBuilder()
        core.send(plan=prefill(plans))
        for _ in range(2):
            core.send(plan=plans.decode(1).build())
        for _ in range(3):
            core.receive("result")
        assert ["is number 3 in flight" in line for line in rig.violations()] == [True]
        rig.violations_file.unlink()


def test_the_worker_exits_or_hangs_at_the_configured_step() -> None:
    with meeting("--exit-step", "2") as (core, worker, _):
        core.join(generation=1)
        plans = PlanBuilder()
        core.send(plan=prefill(plans))
        core.send(plan=plans.decode(1).build())
        assert worker.wait() == -signal.SIGKILL
        worker.killed = True
    with meeting("--hang-step", "1") as (core, worker, _):
        core.join(generation=1)
        core.send(plan=prefill(PlanBuilder()))
        worker.wait_line("^hung step=1")
