"""Constraints through the service, with the checking worker's toy matcher: equal text over kills, and failures."""

import random
from dataclasses import replace

import grpc
import pytest
from tandem.v1 import inference_pb2 as pb
from tandem.v1.constraint_pb2 import Constraint

from tests.rigs.processes import Rig
from tests.rigs.streams import code_of, details_of
from tests.system.asks import Ask, random_asks, send

SHAPE = ("--num-pages", "2048", "--max-rows", "32", "--max-length", "1024", "--token-budget", "256")


def lark(words: str) -> str:
    """A grammar of any text, with words for the toy matcher."""
    return f"start: /(.|\\n)*/ // {words}"


def constrained(count: int, *, seed: int, complete: tuple[int, int]) -> list[Ask]:
    """Requests, three of four with one of a few constraints."""
    rng = random.Random(seed)
    asks = random_asks(count, seed=seed, prompts=(1, 600), outputs=(200, 240))
    return [
        replace(ask, ignore_eos=False, lark=lark(f"{rng.randrange(3)} toy_complete={rng.randint(*complete)}"))
        if rng.random() < 0.75
        else ask
        for ask in asks
    ]


@pytest.mark.parametrize("num_kills", [5, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_kills_change_no_constrained_stream(rig: Rig, num_kills: int) -> None:
    rng = random.Random(num_kills)
    workers = [rig.worker(*SHAPE), rig.worker(*SHAPE)]
    caller = rig.ready_caller(rig.scheduler())
    asks = constrained(8 + 4 * num_kills, seed=num_kills, complete=(80, 180))
    streams = send(caller, asks[:8])
    for _ in range(num_kills):
        streams.wait_more(rng.randrange(1, 100))
        num_missing = max(0, 6 - sum(not stream.ended for stream in streams))
        streams.send(asks[len(streams) : len(streams) + num_missing])
        assert len(streams) < len(asks), "too few requests were prepared"
        rig.kill_serving(caller, workers)
        workers.append(rig.worker(*SHAPE))
    streams.check()
    assert caller.wait_idle().lane_resets >= num_kills


def _ask(constraint: Constraint) -> pb.GenerateRequest:
    request = Ask(prompt=(97,), max_new_tokens=20, ignore_eos=False).request()
    request.constraint.CopyFrom(constraint)
    return request


def test_each_kind_is_served_and_a_refusal_names_the_field(rig: Rig) -> None:
    _, _, caller = rig.serve(*SHAPE)
    info = caller.model_info()
    assert (info.constraint_refusal, info.limits.max_constraint_bytes) == ("", 65_536)
    schema = '{"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": true}}}'
    for constraint, sentence in (
        (Constraint(json_schema='{"type": "object"}'), ""),
        (Constraint(json_object={}), ""),
        (Constraint(regex="[a-z]{1,20}"), ""),
        (Constraint(choices={"choices": ["yes", "no"]}), ""),
        (Constraint(lark='start: "a"+'), ""),
        (Constraint(json_schema=schema), "properties.tags: llguidance does not support uniqueItems; leave it out"),
        (Constraint(regex="(?=a)b"), "in regex): look-around, including look-ahead and look-behind, is not supported"),
        (Constraint(regex="((x{1000}){1000}){1000}"), "nested repetitions make 1000000; the limit is 10000"),
        (Constraint(lark="start: x"), "constraint.lark: llguidance: "),
    ):  # pyright: ignore[reportUnknownVariableType]
        stream = caller.generate(_ask(constraint))
        if not sentence:
            assert stream.result().samples[0].reason in ("CONSTRAINT_COMPLETE", "EOS", "LENGTH")
            continue
        error = stream.failed()
        assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in str(details_of(error)), details_of(error)
    caller.wait_idle()


def test_a_failing_constraint_ends_its_stream_alone(rig: Rig) -> None:
    _, _, caller = rig.serve(*SHAPE)
    asks = constrained(6, seed=3, complete=(60, 90))
    streams = send(caller, asks)
    late = caller.generate(_ask(Constraint(lark=lark("toy_fail=7 toy_complete=30"))))
    refused = caller.generate(_ask(Constraint(lark=lark("toy_refuse"))))
    slow = Ask(prompt=(98, 97), max_new_tokens=30, ignore_eos=False, lark=lark("toy_prepare_ms=700 toy_complete=9"))
    slow_stream = caller.generate(slow.request())
    for stream, sentence in (
        (late, "the constraint took longer than 250 ms at output token 7"),
        (refused, "the constraint cannot be used: the toy matcher was told to refuse it"),
    ):
        error = stream.failed()
        assert code_of(error) is grpc.StatusCode.INTERNAL and sentence in str(error.details())  # pyright: ignore[reportAttributeAccessIssue]
    for ask, stream in zip([*asks, slow], [*streams, slow_stream], strict=True):
        ask.check(stream.result())
    assert caller.wait_idle().lane_resets == 0


def test_without_a_tokenizer_constraints_are_refused_with_the_reason(rig: Rig) -> None:
    _, _, caller = rig.serve(*SHAPE, "--no-tokenizer")
    why = "constraints need a tokenizer, and the served model has none"
    assert caller.model_info().constraint_refusal == why
    request = _ask(Constraint(regex="a"))
    request.output.want_text = False
    assert why in str(details_of(caller.generate(request).failed()))
