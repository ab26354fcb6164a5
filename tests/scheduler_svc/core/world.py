"""The real core and a content-checking executor under a virtual clock: what the core's tests drive.

Owns the messages between them, which stay where they are until a test moves them, so every order of events can be made.
After each event every invariant is audited; each stream's tokens are checked for gaps, and its terminal answer for
being the only one.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc import worker_wire
from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core.invariants import audit
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from tests.rigs.executor import Executor, Shape
from tests.rigs.faults import Faults
from tests.rigs.oracle import Completion, complete

FRONTEND = "f-1"


def info_of(shape: Shape) -> ev.WorkerInfo:
    """What a worker of this shape offers; workers of all shapes serve the same model."""
    return ev.WorkerInfo(
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
    )


@dataclass(slots=True)
class Stream:
    """What one caller asked for and has heard."""

    submit: ev.Submit
    admitted: bool = False
    rejected: fx.Rejected | None = None
    tokens: list[int] = field(default_factory=list[int])
    end: fx.End | None = None

    def expected(self, shape: Shape) -> Completion:
        """The oracle's answer, which knows nothing of the world."""
        return complete(
            self.submit.prompt.tolist(),
            max_new_tokens=self.submit.max_new_tokens,
            vocab=shape.sampled_vocab,
            eos_token_ids=shape.eos_token_ids,
            temperature=self.submit.sampling.temperature,
            seed=self.submit.sampling.seed,
            min_new_tokens=self.submit.min_new_tokens,
            stop_token_ids=self.submit.stop_token_ids,
            ignore_eos=self.submit.ignore_eos,
        )


class World:
    """`worker` joins at once unless told not to; `plans` wait to be applied, `results` to be delivered."""

    def __init__(self, shape: Shape | None = None, config: CoreConfig | None = None, *, join: bool = True) -> None:
        self.shape = shape or Shape()
        self.core = Scheduler(config or CoreConfig())
        self.now = 0.0
        self.plans: deque[Plan] = deque()
        self.results: deque[pb.StepResult] = deque()
        self.sent: list[Plan] = []
        self.streams: dict[int, Stream] = {}
        self.log: list[tuple[float, ev.Event]] = []
        self.effects: list[fx.Effect] = []
        self.executor = Executor(self.shape)
        self._workers = 0
        self.handle(ev.FrontendJoined(frontend=FRONTEND))
        if join:
            self.join()

    # Events ------------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Hands the event in, audits, and takes the effects in."""
        self.log.append((self.now, event))
        effects = self.core.handle(event, self.now)
        self.effects.extend(effects)
        audit(self.core)
        for effect in effects:
            self._take(effect)
        return effects

    def _take(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPlan():
                self.plans.append(effect.plan)
                self.sent.append(effect.plan)
            case fx.WorkerAccepted():
                self.executor.begin(effect.generation)
            case fx.Admitted():
                self.streams[effect.stream].admitted = True
            case fx.Rejected():
                assert not self.streams[effect.stream].admitted
                self.streams[effect.stream].rejected = effect
            case fx.StepOutput():
                self._take_output(effect)
            case _:
                pass

    def _take_output(self, output: fx.StepOutput) -> None:
        for stream_id, offset, token in zip(
            output.streams.tolist(), output.offsets.tolist(), output.tokens.tolist(), strict=True
        ):
            stream = self.streams[stream_id]
            assert stream.end is None, f"stream {stream_id}: a token after its end"
            assert offset == len(stream.tokens), f"stream {stream_id}: offset {offset}, {len(stream.tokens)} had come"
            stream.tokens.append(token)
        for end in output.ends:
            stream = self.streams[end.stream]
            assert stream.admitted
            assert stream.end is None, f"stream {end.stream} ended twice"
            stream.end = end

    @property
    def worker(self) -> str:
        """The worker that joined last."""
        return f"w-{self._workers}"

    def info(self) -> ev.WorkerInfo:
        """What the executor can do."""
        return info_of(self.shape)

    def join(self, faults: Faults | None = None) -> None:
        """A new worker, its pool empty, joins."""
        self._workers += 1
        self.plans.clear()
        self.results.clear()
        self.executor = Executor(self.shape, faults=faults)
        self.handle(ev.WorkerJoined(worker=self.worker, info=self.info()))

    def kill(self) -> None:
        """The worker dies with whatever it had not answered."""
        self.plans.clear()
        self.results.clear()
        self.handle(ev.WorkerLost(worker=self.worker, reason="killed"))

    def submit(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int = 4,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        max_time_seconds: float = 0.0,
        deadline_seconds: float = 0.0,
        request_id: str | None = None,
    ) -> int:
        """A request of a new stream; returns the stream."""
        stream = len(self.streams) + 1
        event = ev.Submit(
            frontend=FRONTEND,
            stream=stream,
            request_id=request_id or f"r{stream}",
            prompt=np.array(prompt, np.int32),
            sampling=ev.Sampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, seed=seed),
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            priority=priority,
            max_time_seconds=max_time_seconds,
            deadline_seconds=deadline_seconds,
        )
        self.streams[stream] = Stream(event)
        self.handle(event)
        return stream

    def cancel(self, stream: int) -> None:
        """The caller goes away."""
        self.handle(ev.Cancel(frontend=FRONTEND, stream=stream))

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes; the core plans."""
        self.now += seconds
        self.handle(ev.Tick())

    def step(self, seconds: float = 0.0) -> None:
        """A tick, then the worker answers its oldest plan and the core hears it."""
        self.tick(seconds)
        self.apply()
        self.deliver()

    # The worker's side -------------------------------------------------------------------------------------------

    def apply(self) -> bool:
        """The worker carries out its oldest plan; False where it has none."""
        if not self.plans:
            return False
        message = pb.CoreToWorker.FromString(worker_wire.plan_frame(self.plans.popleft()))
        self.results.append(self.executor.apply(message.plan))
        return True

    def deliver(self) -> bool:
        """The core hears the oldest result; False where there is none."""
        if not self.results:
            return False
        message = pb.WorkerToCore(result=self.results.popleft())
        self.handle(worker_wire.event_of(worker_wire.parse(message.SerializeToString()), self.worker))
        return True

    def run(self, max_steps: int = 10_000) -> None:
        """Ticks, applies and delivers until nothing is left to do. Raises AssertionError where it does not end."""
        for _ in range(max_steps):
            self.tick(0.001)
            if not (self.apply() | self.deliver()):
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    # Verdicts ----------------------------------------------------------------------------------------------------

    def end(self, stream: int) -> fx.End:
        """The stream's terminal answer, which must have come."""
        end = self.streams[stream].end
        assert end is not None, f"stream {stream} has not ended"
        return end

    def check_content(self) -> None:
        """Every token heard so far is the oracle's; every good end is the oracle's end; the worker saw no violation."""
        assert self.executor.violations == []
        for number, stream in self.streams.items():
            expected = stream.expected(self.shape)
            assert stream.tokens == list(expected.tokens[: len(stream.tokens)]), f"stream {number}: another token"
            end = stream.end
            if end is None or end.reason is None:
                continue
            if end.reason in (fx.EndReason.EOS, fx.EndReason.STOP_TOKEN, fx.EndReason.LENGTH):
                assert stream.tokens == list(expected.tokens), f"stream {number} ended early"
                assert end.reason.name == expected.reason.name
                assert end.stop_token_id == expected.stop_token_id
            assert end.stats.output_tokens <= len(stream.tokens)

    def check_all_ended(self) -> None:
        """Nobody is forgotten and nothing is held."""
        for number, stream in self.streams.items():
            assert stream.rejected or stream.end, f"stream {number} got no terminal answer"
        self.check_content()
        self.check_empty()

    def check_empty(self) -> None:
        """No request, row or page is in use."""
        assert len(self.core.book) == 0
        assert self.core.book.num_waiting == 0
        if self.core.lane is not None:
            assert self.core.lane.pool.num_used == 0
            assert self.core.lane.rows.num_seated == 0
