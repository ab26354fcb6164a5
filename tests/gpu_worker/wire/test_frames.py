"""Frames: valid ones are parsed as sent; every other one raises a typed error."""

import random
import struct
from typing import Any

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb
from tandem.v1.inference_pb2 import SamplingParams, TokenIds

from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import FrameError, Outcome, TokenLogprobs, parse_frame, read_plan, result_frame
from gpu_worker.wire.started import SETTINGS, read_sampling
from tests.gpu_worker.plans import OFF, RARE, Moves, TinyCore, geometry_of, int32

GEOMETRY = geometry_of(host_pages=8)


def good_plan() -> pb.StepPlan:
    core = TinyCore(GEOMETRY)
    core.add(
        1, [1, 2, 3], temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=2**64 - 1, banned_until=9, banned=[7, 8]
    )
    core.add(2, [4] * 20, seed=5)
    return core.plan(chunks={1: 3, 2: 16})


def featured_plan() -> pb.StepPlan:
    """Two rows, each with some of the optional features."""
    core = TinyCore(GEOMETRY)
    core.add(1, [1, 2, 3], biases={4: 1.5, 9: -np.inf}, presence_penalty=-2.0, num_logprobs=3, num_prompt=2)
    core.add(2, [4] * 20, allowed=[7, 8, 49], frequency_penalty=0.5, repetition_penalty=1.25, prompt_logprobs_from=19)
    return core.plan(chunks={1: 3, 2: 16})


def moving_plan() -> pb.StepPlan:
    """Saves, zeroing, copies and loads beside a row that starts: page 6 is swapped out and reused at once."""
    core = TinyCore(GEOMETRY)
    core.add(1, [1, 2, 3])
    moves = Moves(saves=[(6, 7), (7, 0)], zero=[6, 7], copies=[(9, 10, 1), (9, 11, 16)], loads=[(6, 3), (12, 0)])
    return core.plan(chunks={1: 3}, moves=moves)


def test_a_parsed_plan_equals_the_sent_one() -> None:
    frame = pb.CoreToWorker(plan=good_plan()).SerializeToString()
    plan = read_plan(parse_frame(frame).plan, GEOMETRY)
    assert plan.started is not None
    assert plan.started.rows.tolist() == [1, 2]
    assert [tokens.tolist() for tokens in plan.started.tokens] == [[1, 2, 3], [4] * 20]
    assert [pages.tolist() for pages in plan.started.pages] == [[1], [2, 3]]
    assert [banned.tolist() for banned in plan.started.banned] == [[7, 8], []]
    assert plan.started.sampling[0].settings == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, typical_p=1, seed=2**64 - 1, presence_penalty=0,
        frequency_penalty=0, repetition_penalty=1,
    )  # fmt: skip
    assert plan.started.sampling[1].settings.seed == 5
    assert plan.started.banned_until.tolist() == [9, 0]
    assert plan.chunk_counts.tolist() == [3, 16]
    assert plan.chunk_samples.tolist() == [True, False]


def test_parsed_optional_features_equal_the_sent_ones() -> None:
    frame = pb.CoreToWorker(plan=featured_plan()).SerializeToString()
    started = read_plan(parse_frame(frame).plan, GEOMETRY).started
    assert started is not None
    first, second = started.sampling
    assert started.num_prompt_tokens.tolist() == [2, 20]
    assert first.settings.presence_penalty == -2.0
    assert (second.settings.frequency_penalty, second.settings.repetition_penalty) == (0.5, 1.25)
    assert dict(zip(first.biased.tolist(), first.biases.tolist(), strict=True)) == {4: 1.5, 9: -np.inf}
    assert (first.allowed.tolist(), second.biased.tolist(), second.allowed.tolist()) == ([], [], [7, 8, 49])
    assert started.num_logprobs.tolist() == [3, 0]
    assert started.prompt_logprobs_from.tolist() == [0, 19]


def test_logprobs_of_a_prompt_begin_inside_it_although_the_row_knows_more_tokens() -> None:
    """Row 1 starts with three tokens, of which two are its prompt."""
    message = featured_plan()
    message.started.prompt_logprobs_from = int32([2, 19])
    with pytest.raises(PlanError, match=r"must lie below started\.num_prompt"):
        read_plan(message, GEOMETRY)


def test_random_bytes_are_a_frame_or_none() -> None:
    draw, num_refused = random.Random(5), 0
    for _ in range(1000):
        try:
            parse_frame(draw.randbytes(draw.randint(0, 60)))
        except FrameError:
            num_refused += 1
    assert num_refused > 500


@pytest.mark.parametrize("field", RARE)
def test_a_field_that_no_row_uses_may_be_empty(field: str) -> None:
    core = TinyCore(GEOMETRY)
    core.add(1, [1, 2, 3], **{field: 2})
    core.add(2, [1, 2, 3])
    started = read_plan(core.plan(chunks={1: 3, 2: 3}), GEOMETRY).started
    assert started is not None
    for name in RARE:
        assert getattr(started, name).tolist() == [2 if name == field else 0, 0]


def test_rows_with_equal_bytes_share_their_sampling() -> None:
    core = TinyCore(GEOMETRY)
    for row in (1, 2):
        core.add(row, [1, 2, 3], seed=7, sample_idx=row, biases={4: 1.5})
    started = read_plan(core.plan(chunks={1: 3, 2: 3}), GEOMETRY).started
    assert started is not None
    assert started.sampling[0] is started.sampling[1]
    assert started.sample_idx.tolist() == [1, 2]


def test_empty_sampling_bytes_mean_greedy_sampling() -> None:
    assert read_sampling(b"", "sampling", 50).settings == OFF


def result_of(**fields: Any) -> pb.StepResult:
    """What a result frame has of an outcome."""
    message = pb.WorkerToCore()
    message.ParseFromString(result_frame(Outcome(generation=3, step=9, status=pb.STEP_STATUS_OK, **fields)))
    return message.result


def test_a_result_frame_contains_the_outcome() -> None:
    tokens, nonfinite = np.array([5, 0, 49], np.int32), np.array([1], np.int32)
    result = result_of(tokens=tokens, nonfinite=nonfinite, compute_us=17)
    assert np.frombuffer(result.tokens, "<i4").tolist() == [5, 0, 49]
    assert np.frombuffer(result.nonfinite, "<i4").tolist() == [1]
    assert (result.generation, result.step, result.compute_us) == (3, 9, 17)
    assert not result.HasField("logprobs") and not result.HasField("prompt_logprobs")


def test_a_result_frame_contains_logprobs() -> None:
    own = TokenLogprobs(
        logprobs=np.array([-0.5, -2.0], np.float32),
        top_token_ids=np.array([[3, 1, 0], [9, 8, 7]], np.int32),
        top_logprobs=np.array([[-0.1, -1.0, -2.0], [-0.2, -3.0, -np.inf]], np.float32),
    )
    none = np.zeros((1, 0))
    prompt = TokenLogprobs(logprobs=np.array([-7.0]), top_token_ids=none, top_logprobs=none)
    result = result_of(logprobs=own, prompt_logprobs=prompt)
    told = result.logprobs
    assert np.frombuffer(told.logprobs, "<f4").tolist() == [-0.5, -2.0]
    assert told.top_k == 3
    assert np.frombuffer(told.top_token_ids, "<i4").tolist() == [3, 1, 0, 9, 8, 7]
    assert np.frombuffer(told.top_logprobs, "<f4").reshape(2, 3)[1, 2] == -np.inf
    assert result.prompt_logprobs == pb.Logprobs(logprobs=struct.pack("<f", -7.0))


@pytest.mark.parametrize(
    ("field", "data", "problem"),
    [
        ("decode_rows", int32([0]), "decode_rows contains 0; it must be 1 to 4"),
        ("decode_rows", int32([5]), "decode_rows contains 5; it must be 1 to 4"),
        ("decode_rows", b"abc", "decode_rows has 3 bytes"),
        ("decode_rows", int32([3, 3]), "a row occurs twice"),
        ("decode_rows", int32([1]), "a row occurs twice"),
        ("appends.rows", int32([1]), "appends.pages has 0 bytes; 1 entry needs 4"),
        ("chunks.counts", int32([3, 65]), "chunks.counts contains 65; it must be 1 to 64"),
        ("chunks.counts", int32([3, 64]), "the plan costs 80 tokens; token_budget is 64"),
        ("chunks.counts", int32([3, -1]), "chunks.counts contains -1"),
        ("chunks.starts", int32([0, 100]), "chunks.starts contains 100; it must be 0 to 99"),
        ("chunks.samples", b"\x01\x02", "chunks.samples must be 2 bytes of 0 or 1"),
        ("chunks.samples", b"\x01", "chunks.samples must be 2 bytes of 0 or 1"),
        ("started.rows", int32([2, 2]), "a row occurs twice in started.rows"),
        ("started.num_tokens", int32([0, 20]), "started.num_tokens contains 0; it must be 1 to 100"),
        ("started.num_tokens", int32([3, 101]), "started.num_tokens contains 101"),
        ("started.num_tokens", int32([3, 21]), "started.tokens has 92 bytes; 24 entries need 96"),
        ("started.tokens", int32([50] * 23), "started.tokens contains 50; it must be 0 to 49"),
        ("started.pages", int32([0, 1, 2]), "started.pages contains 0; it must be 1 to 19"),
        ("started.pages", int32([1, 2, 20]), "started.pages contains 20"),
        ("started.first_position", int32([3, 0]), "started.first_position must lie below started.num_tokens"),
        ("started.sampling", b"1234567", "started.sampling has 7 bytes; num_sampling_bytes makes"),
        ("started.num_sampling_bytes", int32([9]), "started.num_sampling_bytes has 4 bytes; 2 entries need 8"),
        ("started.num_sampling_bytes", int32([-1, 9]), "started.num_sampling_bytes contains -1; it must be 0 to 98304"),
        ("started.num_sampling_bytes", int32([98305, 0]), "started.num_sampling_bytes contains 98305"),
        ("started.num_banned", int32([2, 1]), "started.banned has 8 bytes; 3 entries need 12"),
        ("started.num_prompt_tokens", b"", "started.num_prompt_tokens has 0 bytes; 2 entries need 8"),
        ("started.num_prompt_tokens", int32([0, 1]), "started.num_prompt_tokens contains 0; it must be 1 to 100"),
        ("started.num_prompt_tokens", int32([4, 1]), "started.num_prompt_tokens must not exceed started.num_tokens"),
        ("started.num_logprobs", int32([52, 0]), "started.num_logprobs contains 52; it must be 0 to 51"),
        (
            "started.prompt_logprobs_from",
            int32([3, 0]),
            "started.prompt_logprobs_from must lie below started.num_prompt",
        ),
        ("started.prompt_logprobs_from", int32([-1, 0]), "started.prompt_logprobs_from contains -1"),
    ],
)
def test_a_refusal_names_a_value_out_of_range(field: str, data: bytes, problem: str) -> None:
    message = good_plan()
    *path, name = field.split(".")
    setattr(getattr(message, path[0]) if path else message, name, data)
    with pytest.raises(PlanError, match=problem.replace(".", r"\.")):
        read_plan(message, GEOMETRY)


def changed(**fields: Any) -> bytes:
    """A complete SamplingParams with these fields changed; those that are None are left out."""
    params = SamplingParams()
    params.CopyFrom(OFF)
    for name in [name for name, value in fields.items() if value is None]:
        params.ClearField(name)
    params.MergeFrom(SamplingParams(**{name: value for name, value in fields.items() if value is not None}))
    return params.SerializeToString()


def test_what_is_absent_is_as_in_a_greedy_row() -> None:
    for name, setting in SETTINGS.items():
        assert getattr(read_sampling(changed(**{name: None}), "s", 50).settings, name) == setting.greedy, name


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xff", "s is not a SamplingParams: "),
        (changed() + b"\xf8\x07\x01", "s has a field that this worker does not know"),
        (changed(temperature=np.nan), "s.temperature is nan; it must be 0 to 100"),
        (changed(temperature=-1), "s.temperature is -1.0"),
        (changed(top_p=1.5), "s.top_p is 1.5; it must be 0 to 1"),
        (changed(min_p=-0.5), "s.min_p is -0.5"),
        (changed(typical_p=1.5), "s.typical_p is 1.5; it must be 0 to 1"),
        (changed(presence_penalty=np.nan), "s.presence_penalty is nan; it must be -2 to 2"),
        (changed(frequency_penalty=np.inf), "s.frequency_penalty is inf"),
        (changed(repetition_penalty=0), "s.repetition_penalty is 0.0; it must be 0.01"),
        (changed(logit_bias={50: 1}), "s.logit_bias contains 50; it must be 0 to 49"),
        (changed(logit_bias={4: np.nan}), "s.logit_bias contains nan; it must be -100 to 100"),
        (changed(logit_bias={4: -np.inf}), "s.logit_bias contains -inf"),
        (changed(logit_bias=dict.fromkeys(range(4097), 1)), "s.logit_bias has 4097 tokens; the limit is 4096"),
        (changed(banned_token_ids=[1, 2**32 - 1]), "s.banned_token_ids contains 4294967295"),
        (changed(banned_token_ids=[1] * 4097), "s.banned_token_ids has 4097 tokens"),
        (changed(allowed_token_ids=TokenIds(ids=[50])), "s.allowed_token_ids contains 50"),
        (changed(allowed_token_ids=TokenIds()), "s.allowed_token_ids is empty"),
        (changed(allowed_token_ids=TokenIds(ids=[1] * 4097)), "s.allowed_token_ids has 4097 tokens"),
    ],
)
def test_invalid_sampling_parameters_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_sampling(data, "s", 50)
    assert str(caught.value).startswith(problem)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Bytes changed, cut, inserted or repeated."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out) + 1)
        kind = draw.randrange(4)
        if kind == 0 and at < len(out):
            out[at] = draw.randrange(256)
        elif kind == 1:
            del out[at : at + draw.randint(1, 8)]
        elif kind == 2:
            out[at:at] = draw.randbytes(draw.randint(1, 8))
        else:
            out[at:at] = out[at : at + draw.randint(1, 16)]
    return bytes(out)


def test_mutated_frames_raise_only_typed_errors() -> None:
    """Mutated as a whole, or in one field of a frame that stays a message: refused by a typed error, or valid."""
    draw = random.Random(4)
    every = (good_plan, featured_plan, moving_plan)
    frames = [pb.CoreToWorker(plan=plan()).SerializeToString() for plan in every]
    counts = {"frame": 0, "plan": 0, "valid": 0}
    for _ in range(3000):
        if draw.random() < 0.5:
            data = mutated(draw.choice(frames), draw)
        else:
            plan = draw.choice(every)()
            part = draw.choice([plan, plan.started, plan.appends, plan.chunks, plan.saves, plan.copies, plan.loads])
            fields = [f.name for f in part.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]
            name = draw.choice(fields)
            setattr(part, name, mutated(getattr(part, name), draw))
            data = pb.CoreToWorker(plan=plan).SerializeToString()
        try:
            message = parse_frame(data)
            if message.WhichOneof("message") == "plan":
                read_plan(message.plan, GEOMETRY)
            counts["valid"] += 1
        except FrameError:
            counts["frame"] += 1
        except PlanError:
            counts["plan"] += 1
    assert min(counts.values()) > 100, counts
