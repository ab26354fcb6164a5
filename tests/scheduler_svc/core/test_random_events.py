"""A hypothesis state machine over tiny pools and vocabularies: any order of events keeps invariants and content.

The world audits the core after each event. At the end it runs until idle, and every stream must have been answered.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.rigs.sampling import MINUS_INFINITY
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

_POISON = 272
# Token 3 is always allowed and never banned, and it ends no request.
_ASKED = [
    {},
    {},
    {"num_logprobs": 1},
    {"num_logprobs": 4, "presence_penalty": 1.5},
    {"frequency_penalty": -0.5, "repetition_penalty": 1.2, "biases": ((1, MINUS_INFINITY), (2, 3.0))},
    {"allowed": frozenset({0, 2, 3}), "num_logprobs": 2},
]


class CoreMachine(RuleBasedStateMachine):
    """Requests come and go. The worker applies plans late, fails, dies and rejoins."""

    world: World

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(2, 9),
        max_rows=st.integers(1, 4),
        chunk_align=st.sampled_from([1, 2, 4]),
        spare_budget=st.integers(0, 6),
        spare_logit_rows=st.integers(0, 6),
        plans_in_flight=st.integers(1, 3),
        faults=st.sets(st.integers(1, 30), max_size=3),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_rows: int,
        chunk_align: int,
        spare_budget: int,
        spare_logit_rows: int,
        plans_in_flight: int,
        faults: set[int],
    ) -> None:
        shape = Shape(
            page_size=page_size,
            num_pages=num_pages,
            max_rows=max_rows,
            max_length=24,
            chunk_align=chunk_align,
            token_budget=max_rows + chunk_align + spare_budget,
            spare_logit_rows=spare_logit_rows,
            vocab_size=280,
            sampled_vocab=4,
            eos_token_ids=(0,),
        )
        self.world = World(shape, greedy(plans_in_flight=plans_in_flight, max_waiting=6), join=False)
        self.world.join(Faults(fail_steps=frozenset(faults), nonfinite_token=_POISON))

    @rule(
        length=st.integers(1, 12),
        first=st.integers(0, 3),
        max_new_tokens=st.integers(1, 8),
        min_new_tokens=st.integers(0, 3),
        priority=st.integers(-1, 1),
        temperature=st.sampled_from([0.0, 1.0]),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), (1,), (1, 2)]),
        seconds=st.sampled_from([0.0, 0.0, 0.0, 3.0]),
        poison=st.sampled_from([False] * 7 + [True]),
        num_samples=st.sampled_from([1, 1, 1, 2, 3]),
        asked=st.sampled_from(_ASKED),
        prompt_logprobs_from=st.sampled_from([0, 0, 1, 3, 9]),
    )
    def submit(
        self,
        length: int,
        first: int,
        max_new_tokens: int,
        min_new_tokens: int,
        priority: int,
        temperature: float,
        ignore_eos: bool,
        stop: tuple[int, ...],
        seconds: float,
        poison: bool,
        num_samples: int,
        asked: dict[str, Any],
        prompt_logprobs_from: int,
    ) -> None:
        prompt = [(first + i * i) % 4 for i in range(length)]
        if poison:
            prompt[-1] = _POISON
        self.world.submit(
            prompt,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(min_new_tokens, max_new_tokens),
            priority=priority,
            temperature=temperature,
            seed=first,
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
            max_time_seconds=seconds,
            num_samples=num_samples,
            **asked,
            prompt_logprobs_from=prompt_logprobs_from,
        )

    @rule(count=st.integers(1, 3))
    def tick(self, count: int) -> None:
        self.world.tick(0.1 * count)

    @rule(count=st.integers(1, 6))
    def apply(self, count: int) -> None:
        for _ in range(count):
            self.world.apply()

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.world.deliver()

    @rule(count=st.integers(1, 8))
    def progress(self, count: int) -> None:
        for _ in range(count):
            self.world.tick(0.01)
            self.world.apply()
            self.world.deliver()

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "abort", "finish"]))
    def end_from_outside(self, data: st.DataObject, how: str) -> None:
        stream = data.draw(st.sampled_from(sorted(self.world.streams)))
        match how:
            case "cancel":
                self.world.cancel(stream)
            case "abort":
                request_id = self.world.streams[stream].submit.request_id
                self.world.handle(ev.Abort(frontend=FRONTEND, query=1, request_ids=(request_id,)))
            case _:
                output_tokens = data.draw(st.integers(0, len(self.world.streams[stream].tokens)))
                self.world.handle(ev.Finish(frontend=FRONTEND, stream=stream, output_tokens=output_tokens))

    @rule(faults=st.sets(st.integers(1, 20), max_size=2))
    def worker_dies_and_another_joins(self, faults: set[int]) -> None:
        self.check_content()
        if not self.world.is_lost:
            self.world.kill()
        self.world.join(Faults(fail_steps=frozenset(faults), nonfinite_token=_POISON))

    @rule()
    def the_same_worker_joins_again(self) -> None:
        self.world.plans.clear()
        self.world.results.clear()
        self.world.handle(ev.WorkerJoined(worker=self.world.worker, info=self.world.info()))

    def check_content(self) -> None:
        self.world.check_content()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run()
        if world.is_lost:
            # The clock ran on without the worker, and the core gave it up.
            world.join()
            world.run()
        world.check_content()
        world.check_empty()
        cancelled = {event.stream for _, event in world.log if isinstance(event, ev.Cancel)}
        for number, stream in world.streams.items():
            assert stream.rejected or stream.end or number in cancelled, f"stream {number} was forgotten"


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
