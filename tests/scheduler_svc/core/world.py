"""The real core and one worker's executor, which checks its content, under a virtual clock.

Messages between the two stay in queues until the test moves them, so a test can produce any order of events. After each
event the world audits all invariants, checks that each stream's tokens have no gaps, and that each stream gets one
terminal answer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.core import Organ
from scheduler_svc.core.invariants import audit
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import Admission, Policy
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.scheduler import ORGANS, CoreConfig, Scheduler
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.core_events import submit
from tests.rigs.executor import Executor, Shape
from tests.rigs.faults import Faults
from tests.rigs.resources import WithAdapters, are_known, resources_of
from tests.rigs.sampling import Settings
from tests.scheduler_svc.core.stream import Stream, streams_in

Kind = TypeVar("Kind")
FRONTEND = "f-1"
# The ends that follow from the tokens alone.
OWN_ENDS = (
    fx.EndReason.EOS, fx.EndReason.STOP_TOKEN, fx.EndReason.LENGTH, fx.EndReason.CONSTRAINT_COMPLETE
)  # fmt: skip
# Of the requests that linger.
SECRET, DESCRIPTION = bytes(range(100, 132)), b"how to build the stream"
# A service draws this at random when it starts.
CACHE_ROOT = bytes(range(32))


def text(length: int, first: int = 0) -> list[int]:
    """Returns a prompt that shares no beginning with those of another `first`."""
    return [(first + i) % 250 for i in range(length)]


def prompt(length: int, salt: int = 0) -> list[int]:
    """Returns a prompt in which tokens far from each other differ, too."""
    return [(7 * i + 13 * salt) % 250 for i in range(length)]


def greedy(**settings: Any) -> CoreConfig:
    """Returns a config without headroom, so that small pools overflow and requests are preempted."""
    return CoreConfig(policy=Policy(admission=Admission.KNOWN), **settings)


def info_of(shape: Shape) -> WorkerInfo:
    """Returns the info of a worker with this shape. Workers of all shapes serve the same model."""
    info = WorkerInfo(
        identity="identity",
        model="model",
        vocab_size=shape.vocab_size,
        page_size=shape.page_size,
        num_pages=shape.num_pages,
        max_rows=shape.max_rows,
        max_length=shape.max_length,
        token_budget=shape.token_budget,
        chunk_align=shape.chunk_align,
        logit_rows=shape.logit_rows,
        eos_token_ids=shape.eos_token_ids,
        pid=1,
        window=shape.window,
        sink_tokens=shape.sink_tokens,
        host_pages=shape.host_pages,
        page_copy_us=shape.page_copy_us,
        token_us=shape.token_us,
    )
    return WithAdapters.of(info) if are_known() else info


def received(worker: str, **content: Any) -> ev.Event:
    """Returns the event of a worker's message, encoded and parsed."""
    message = pb.WorkerToCore(**content)
    return worker_wire.event_of(pb.WorkerToCore.FromString(message.SerializeToString()), worker)


def hashes_of(prompt: list[int], page_size: int, *, salt: str | None = "", tenant: str = "") -> dict[str, bytes]:
    """Returns the fields of a Submit about the prompt's pages. Without a salt (None) the request shares no pages."""
    if salt is None:
        return {}
    root = prefix_root(CACHE_ROOT, salt, tenant)
    return {"prefix_root": root, "page_hashes": hash_pages(root, np.array(prompt, np.int32), page_size)}


class World:
    """One worker, with `faults`, joins at once unless `join` is False.

    `plans` wait to be applied and `results` to be delivered.
    """

    # Where many requests or pages are live, an audit costs more than the events between two.
    audit_every = 1

    def __init__(
        self,
        shape: Shape | None = None,
        config: CoreConfig | None = None,
        *,
        join: bool = True,
        faults: Faults | None = None,
        organs: Sequence[type[Organ]] = ORGANS,
    ) -> None:
        self.shape = shape or Shape()
        self.core = Scheduler(config or greedy(), organs)
        self.now = 0.0
        self.plans: deque[Plan] = deque()
        self.results: deque[pb.StepResult] = deque()
        # Orders that the worker has not answered. `run` and `step` answer them, unless `holds_answers`.
        self.preparing: deque[pb.PrepareConstraint] = deque()
        self.holds_answers = False
        self.sent: list[Plan] = []
        self.streams: dict[int, Stream] = {}
        self.log: list[tuple[float, ev.Event]] = []
        self.effects: list[fx.Effect] = []
        self.executor = Executor(self.shape)
        self._workers = self._num_events = 0
        self.handle(ev.FrontendJoined(frontend=FRONTEND))
        if join:
            self.join(faults)

    # Events ------------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Passes the event to the core, audits the core, and applies the effects to the world."""
        self.log.append((self.now, event))
        effects = self.core.handle(event, self.now)
        self.effects.extend(effects)
        self._audit()
        for effect in effects:
            self._take(effect)
        return effects

    def _audit(self) -> None:
        self._num_events += 1
        if self._num_events % self.audit_every == 0:
            audit(self.core)

    def _take(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPlan():
                self.plans.append(effect.plan)
                self.sent.append(effect.plan)
            case fx.PrepareResource() | fx.DropResource():
                message = pb.CoreToWorker.FromString(worker_wire.frame_of(effect))
                if isinstance(effect, fx.DropResource):
                    self.executor.drop(message.drop_constraint)
                else:
                    self.executor.prepare(message.prepare_constraint)
                    self.preparing.append(message.prepare_constraint)
            case fx.WorkerAccepted():
                self.executor.joined(pb.CoreToWorker.FromString(worker_wire.frame_of(effect)).joined)
            case fx.Admitted():
                for number in self.streams[effect.stream].submit.streams:
                    self.streams[number].admitted = True
            case fx.Rejected():
                for number in self.streams[effect.stream].submit.streams:
                    assert not self.streams[number].admitted
                    self.streams[number].rejected = effect
            case fx.StepOutput(frontend=""):
                pass
            case fx.StepOutput():
                self._take_output(effect)
            case fx.Resumed():
                self._take_resumed(effect)
            case fx.Replaced():
                for number in self.streams[effect.stream].submit.streams:
                    self.streams[number].replaced = True
            case _:
                pass

    def _take_resumed(self, resumed: fx.Resumed) -> None:
        assert resumed.description == DESCRIPTION
        streams = self.streams[resumed.stream].submit.streams
        for number, tokens, end in zip(streams, resumed.outputs, resumed.ends, strict=True):
            stream = self.streams[number]
            stream.admitted, stream.tokens, stream.end = True, tokens.tolist(), end
            assert end is None or end.stream == number

    def _take_output(self, output: fx.StepOutput) -> None:
        for number in streams_in(output):
            self.streams[number].take(output, number)
        for end in output.ends:
            stream = self.streams[end.stream]
            assert stream.admitted
            assert stream.end is None, f"stream {end.stream} ended twice"
            stream.end = end

    @property
    def lane(self) -> Lane:
        """The lane of the newest worker, which is present."""
        return self.core.lanes[self.worker]

    @property
    def is_lost(self) -> bool:
        """Whether the newest worker is not present."""
        return self.worker not in self.core.lanes

    def told(self, kind: type[Kind]) -> list[Kind]:
        """Returns the effects of this kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def worker(self) -> str:
        """The worker that joined last."""
        return f"w-{self._workers}"

    def info(self) -> WorkerInfo:
        """Returns the info of the world's worker."""
        return info_of(self.shape)

    def join(self, faults: Faults | None = None) -> None:
        """Lets a new worker with an empty pool join."""
        self._workers += 1
        self._clear()
        self.executor = Executor(self.shape, faults=faults)
        self.handle(ev.WorkerJoined(worker=self.worker, info=self.info()))

    def leave(self) -> None:
        """Removes the worker, which has announced its stop, with its plans and undelivered results."""
        self._clear()
        self.handle(ev.WorkerLost(worker=self.worker, reason="it stops", is_orderly=True))

    def kill(self) -> None:
        """Removes the worker, as if it had died, with its plans and undelivered results."""
        self._clear()
        self.handle(ev.WorkerLost(worker=self.worker, reason="killed"))

    def _clear(self) -> None:
        self.plans.clear()
        self.results.clear()
        self.preparing.clear()

    def restart(self) -> None:
        """Kills the worker and lets another one join."""
        self.kill()
        self.join()

    def submit(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int | None = 4,
        salt: str | None = "",
        tenant: str = "",
        linger_seconds: float = 0.0,
        constraint: bytes = b"",
        adapter: bytes = b"",
        **options: Any,
    ) -> int:
        """Submits a request and returns its first stream. `options` are other fields of the Submit, or of `Settings`.

        Without `max_new_tokens` (None) the maximum is unset. The page hashes are the prompt's own by default.
        """
        stream = len(self.streams) + 1
        fields = {name: options.pop(name) for name in list(options) if name in ev.Submit.__slots__}
        hashes = hashes_of(prompt, self.shape.page_size, salt=salt, tenant=tenant)
        lingering = {"linger_seconds": linger_seconds, "secret_hash": SECRET, "description": DESCRIPTION}
        event = submit(
            stream,
            prompt,
            sampling=Settings(**options).encoded(),
            max_new_tokens=self.room(prompt) if max_new_tokens is None else max_new_tokens,
            is_max_unset=max_new_tokens is None,
            tenant=tenant,
            resources=resources_of(constraint, adapter),
            **{"ignore_eos": False, **hashes, **(lingering if linger_seconds else {}), **fields},
        )
        for sample_idx, number in enumerate(event.streams):
            self.streams[number] = Stream(event, sample_idx)
        self.handle(event)
        return stream

    def room(self, prompt: list[int]) -> int:
        """Returns the output tokens that a front end allows if the maximum is unset."""
        info = self.core.info
        return 1 if info is None else max(1, info.longest_sequence - len(prompt))

    def cancel(self, stream: int, *, detach: bool = False) -> None:
        """Cancels a stream, or reports that the connection of the request's caller broke."""
        self.handle(ev.Cancel(frontend=self.streams[stream].submit.frontend, stream=stream, detach=detach))

    def resume(self, stream: int, *, frontend: str = FRONTEND, secret_hash: bytes = SECRET) -> int:
        """Resumes the request of a first stream. Returns its new first stream."""
        submit = self.streams[stream].submit
        first = len(self.streams) + 1
        resumed = replace(submit, frontend=frontend, stream=first)
        for sample_idx, number in enumerate(resumed.streams):
            self.streams[number] = Stream(resumed, sample_idx)
        request_id = submit.request_id
        self.handle(ev.Resume(frontend=frontend, stream=first, request_id=request_id, secret_hash=secret_hash))
        return first

    def restore(self, stream: int, core_of: "World", **fields: Any) -> None:
        """Restores a request of another world's core, as a journal would, with the tokens that its streams got."""
        submit = core_of.streams[stream].submit
        streams = [core_of.streams[number] for number in submit.streams]
        self.streams |= dict(zip(submit.streams, streams, strict=True))
        self.handle(
            ev.Restored(
                submit=replace(submit, frontend="", stream=0),
                outputs=tuple(np.array(one.tokens, np.int32) for one in streams),
                ends=tuple(one.end for one in streams),
                **{"linger_seconds": submit.linger_seconds, **fields},
            )
        )

    def tick(self, seconds: float = 0.0) -> list[fx.Effect]:
        """Advances the clock, then lets the core plan."""
        self.now += seconds
        return self.handle(ev.Tick())

    def step(self, seconds: float = 0.0) -> None:
        """Ticks, then applies the oldest plan and delivers the oldest result."""
        self.tick(seconds)
        self.work()
        if not self.holds_answers:
            self.answer()

    def steps(self, count: int, *seconds: float) -> None:
        """Steps so often."""
        for _ in range(count):
            self.step(*seconds)

    # The worker's side -------------------------------------------------------------------------------------------

    def apply(self) -> bool:
        """Lets the worker apply its oldest plan. Returns False if it has none."""
        if not self.plans:
            return False
        message = pb.CoreToWorker.FromString(worker_wire.plan_frame(self.plans.popleft()))
        self.results.append(self.executor.apply(message.plan))
        return True

    def deliver(self) -> bool:
        """Delivers the oldest result to the core. Returns False without one."""
        if not self.results:
            return False
        self.handle(received(self.worker, result=self.results.popleft()))
        return True

    def work(self) -> bool:
        """Applies the oldest plan, then delivers the oldest result. Returns False if there was neither."""
        return self.apply() | self.deliver()

    def answer(self) -> bool:
        """Delivers the answer for the oldest resource that was not answered. Returns False if all were."""
        if not self.preparing:
            return False
        self.handle(received(self.worker, constraint_ready=self.executor.constraint_ready(self.preparing.popleft())))
        return True

    def run(self, max_steps: int = 10_000) -> None:
        """Ticks, applies and delivers until nothing is left to do. Raises AssertionError after `max_steps`."""
        for _ in range(max_steps):
            self.tick(0.001)
            if not (self.work() | (not self.holds_answers and self.answer())):
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    # Checks ------------------------------------------------------------------------------------------------------

    def end(self, stream: int) -> fx.End:
        """Returns the stream's terminal answer. Raises AssertionError if it has not come."""
        end = self.streams[stream].end
        assert end is not None, f"stream {stream} has not ended"
        return end

    def failure(self, stream: int) -> fx.Failure:
        """Returns why the stream failed. Raises AssertionError if it did not."""
        failure = self.end(stream).failure
        assert failure is not None, f"stream {stream} has not failed"
        return failure

    def fault(self, stream: int) -> str:
        """Returns the words with which the stream failed by a fault of its own, its worker's or the service's."""
        failure = self.failure(stream)
        assert failure.code is fx.FailureCode.INTERNAL, failure
        return failure.message

    def refusal(self, stream: int) -> fx.Rejected:
        """Returns why the stream's request was refused. Raises AssertionError if it was not."""
        rejected = self.streams[stream].rejected
        assert rejected is not None, f"stream {stream} was not refused"
        return rejected

    def end_of(self, stream: int) -> fx.End | None:
        """Returns the stream's terminal answer, None if it has not ended."""
        return self.streams[stream].end

    def check_content(self) -> None:
        """Checks all tokens and normal ends against the oracle, and that the executor found no violation."""
        assert self.executor.violations == []
        for number, stream in self.streams.items():
            expected = stream.expected(self.shape)
            assert stream.tokens == list(expected.tokens[: len(stream.tokens)]), f"stream {number}: another token"
            stream.check_logprobs(self.shape)
            end = stream.end
            if end is None or end.reason is None:
                continue
            if end.reason in OWN_ENDS:
                assert stream.tokens == list(expected.tokens), f"stream {number} ended early"
                assert end.reason.name == expected.reason.name
                assert end.stop_token_id == expected.stop_token_id
            assert end.stats.output_tokens <= len(stream.tokens)

    def check_all_ended(self) -> None:
        """Checks that every stream has ended and no request, row or page is in use."""
        for number, stream in self.streams.items():
            assert stream.rejected or stream.end, f"stream {number} got no terminal answer"
        self.check_content()
        self.check_empty()

    def finish(self) -> None:
        """Runs until nothing is left to do; then every stream has ended, as the oracle says, and nothing is in use."""
        self.run()
        self.check_all_ended()

    def settle(self) -> None:
        """As `finish`, if callers have cancelled some streams, which get no answer."""
        self.run()
        self.check_content()
        self.check_empty()

    def check_empty(self) -> None:
        """Checks that no request, row or page is in use."""
        assert len(self.core.queue) == 0
        assert self.core.queue.num_waiting == 0
        for lane in self.core.lanes.values():
            assert (lane.pool.num_used, lane.rows.num_seated) == (0, 0)
