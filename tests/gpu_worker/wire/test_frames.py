"""Frames: valid ones are parsed as sent; every other one raises a typed error."""

import random
import struct

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import FrameError, Outcome, TokenLogprobs, parse_frame, read_plan, result_frame
from tests.gpu_worker.plans import FEATURES, Moves, TinyCore, int32

GEOMETRY = Geometry(
    page_size=16, num_pages=20, max_rows=4, max_length=100, token_budget=64, chunk_align=16, vocab_size=50, host_pages=8
)


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


def test_a_plan_is_parsed_as_sent() -> None:
    frame = pb.CoreToWorker(plan=good_plan()).SerializeToString()
    plan = read_plan(parse_frame(frame).plan, GEOMETRY)
    assert plan.started is not None
    assert plan.started.rows.tolist() == [1, 2]
    assert [tokens.tolist() for tokens in plan.started.tokens] == [[1, 2, 3], [4] * 20]
    assert [pages.tolist() for pages in plan.started.pages] == [[1], [2, 3]]
    assert [banned.tolist() for banned in plan.started.banned] == [[7, 8], []]
    assert plan.started.seed.tolist() == [2**64 - 1, 5]
    assert plan.chunk_counts.tolist() == [3, 16]
    assert plan.chunk_samples.tolist() == [True, False]


def test_optional_features_are_parsed_as_sent() -> None:
    frame = pb.CoreToWorker(plan=featured_plan()).SerializeToString()
    started = read_plan(parse_frame(frame).plan, GEOMETRY).started
    assert started is not None and started.features is not None
    features = started.features
    assert started.num_prompt_tokens.tolist() == [2, 20]
    assert features.presence_penalty.tolist() == [-2.0, 0.0]
    assert features.frequency_penalty.tolist() == [0.0, 0.5]
    assert features.repetition_penalty.tolist() == [1.0, 1.25]
    assert [tokens.tolist() for tokens in features.biased] == [[4, 9], []]
    assert [biases.tolist() for biases in features.biases] == [[1.5, -np.inf], []]
    assert [tokens.tolist() for tokens in features.allowed] == [[], [7, 8, 49]]
    assert features.num_logprobs.tolist() == [3, 0]
    assert features.prompt_logprobs_from.tolist() == [0, 19]


@pytest.mark.parametrize("field", [name for name, _, _ in FEATURES])
def test_each_feature_may_be_sent_alone(field: str) -> None:
    """Missing features are off, and each feature may be present alone."""
    core = TinyCore(GEOMETRY)
    core.add(1, [1, 2, 3], **{field: 2})
    core.add(2, [1, 2, 3])
    started = read_plan(core.plan(chunks={1: 3, 2: 3}), GEOMETRY).started
    assert started is not None and started.features is not None
    for name, default, _ in FEATURES:
        assert getattr(started.features, name).tolist() == [2 if name == field else default, default]
    assert [part.size for part in (*started.features.biased, *started.features.allowed)] == [0] * 4


def test_rows_without_features_have_none() -> None:
    started = read_plan(good_plan(), GEOMETRY).started
    assert started is not None and started.features is None


def test_a_result_frame_contains_the_outcome() -> None:
    outcome = Outcome(
        generation=3,
        step=9,
        status=pb.STEP_STATUS_OK,
        tokens=np.array([5, 0, 49], np.int32),
        nonfinite=np.array([1], np.int32),
        compute_us=17,
    )
    message = pb.WorkerToCore()
    message.ParseFromString(result_frame(outcome))
    assert np.frombuffer(message.result.tokens, "<i4").tolist() == [5, 0, 49]
    assert np.frombuffer(message.result.nonfinite, "<i4").tolist() == [1]
    assert (message.result.generation, message.result.step, message.result.compute_us) == (3, 9, 17)
    assert not message.result.HasField("logprobs") and not message.result.HasField("prompt_logprobs")


def test_a_result_frame_contains_logprobs() -> None:
    own = TokenLogprobs(
        logprobs=np.array([-0.5, -2.0], np.float32),
        top_token_ids=np.array([[3, 1, 0], [9, 8, 7]], np.int32),
        top_logprobs=np.array([[-0.1, -1.0, -2.0], [-0.2, -3.0, -np.inf]], np.float32),
    )
    none = np.zeros((1, 0))
    prompt = TokenLogprobs(logprobs=np.array([-7.0]), top_token_ids=none, top_logprobs=none)
    outcome = Outcome(generation=1, step=1, status=pb.STEP_STATUS_OK, logprobs=own, prompt_logprobs=prompt)
    message = pb.WorkerToCore()
    message.ParseFromString(result_frame(outcome))
    told = message.result.logprobs
    assert np.frombuffer(told.logprobs, "<f4").tolist() == [-0.5, -2.0]
    assert told.top_k == 3
    assert np.frombuffer(told.top_token_ids, "<i4").tolist() == [3, 1, 0, 9, 8, 7]
    assert np.frombuffer(told.top_logprobs, "<f4").reshape(2, 3)[1, 2] == -np.inf
    assert message.result.prompt_logprobs == pb.Logprobs(logprobs=struct.pack("<f", -7.0))


FLOAT_NAN = struct.pack("<2f", float("nan"), 1.0)


@pytest.mark.parametrize(
    ("field", "data", "problem"),
    [
        ("decode_rows", int32([0]), "decode_rows contains 0; it must be 1 to 4"),
        ("decode_rows", int32([5]), "decode_rows contains 5; it must be 1 to 4"),
        ("decode_rows", b"abc", "decode_rows has 3 bytes"),
        ("decode_rows", int32([3, 3]), "contain a row twice"),
        ("decode_rows", int32([1]), "contain a row twice"),
        ("appends.rows", int32([1]), "appends.pages has 0 bytes; 1 entries need 4"),
        ("chunks.counts", int32([3, 65]), "chunks.counts contains 65; it must be 1 to 64"),
        ("chunks.counts", int32([3, 64]), "the plan costs 80 tokens; token_budget is 64"),
        ("chunks.counts", int32([3, -1]), "chunks.counts contains -1"),
        ("chunks.starts", int32([0, 100]), "chunks.starts contains 100; it must be 0 to 99"),
        ("chunks.samples", b"\x01\x02", "chunks.samples must be 2 bytes of 0 or 1"),
        ("chunks.samples", b"\x01", "chunks.samples must be 2 bytes of 0 or 1"),
        ("started.rows", int32([2, 2]), "a row stands twice in started.rows"),
        ("started.num_tokens", int32([0, 20]), "started.num_tokens contains 0; it must be 1 to 100"),
        ("started.num_tokens", int32([3, 101]), "started.num_tokens contains 101"),
        ("started.num_tokens", int32([3, 21]), "started.tokens has 92 bytes; 24 entries need 96"),
        ("started.tokens", int32([50] * 23), "started.tokens contains 50; it must be 0 to 49"),
        ("started.pages", int32([0, 1, 2]), "started.pages contains 0; it must be 1 to 19"),
        ("started.pages", int32([1, 2, 20]), "started.pages contains 20"),
        ("started.first_position", int32([3, 0]), "started.first_position must lie below started.num_tokens"),
        ("started.temperature", FLOAT_NAN, "started.temperature contains nan"),
        ("started.top_p", struct.pack("<2f", 1.5, 1.0), "started.top_p contains 1.5; it must be 0.0 to 1.0"),
        ("started.min_p", struct.pack("<2f", -0.1, 1.0), "started.min_p contains -0.1"),
        ("started.top_k", int32([-1, 0]), "started.top_k contains -1"),
        ("started.seed", b"1234567", "started.seed has 7 bytes; 2 rows need 16"),
        ("started.num_banned", int32([2, 1]), "started.banned has 8 bytes; 3 entries need 12"),
    ],
)
def test_values_out_of_range_are_named(field: str, data: bytes, problem: str) -> None:
    message = good_plan()
    *path, name = field.split(".")
    setattr(getattr(message, path[0]) if path else message, name, data)
    with pytest.raises(PlanError, match=problem.replace(".", r"\.")):
        read_plan(message, GEOMETRY)


@pytest.mark.parametrize(
    ("field", "data", "problem"),
    [
        ("num_prompt_tokens", b"", "started.num_prompt_tokens has 0 bytes; 2 entries need 8"),
        ("num_prompt_tokens", int32([0, 1]), "started.num_prompt_tokens contains 0; it must be 1 to 100"),
        ("num_prompt_tokens", int32([4, 1]), "started.num_prompt_tokens must not exceed started.num_tokens"),
        ("presence_penalty", FLOAT_NAN, "started.presence_penalty contains nan; it must be -1000000.0 to 1000000.0"),
        ("frequency_penalty", FLOAT_NAN[:4], "started.frequency_penalty has 4 bytes; 2 entries need 8"),
        ("repetition_penalty", struct.pack("<2f", 1, 0), "started.repetition_penalty contains 0.0; it must be 1e-06"),
        ("repetition_penalty", struct.pack("<2f", 1, np.inf), "started.repetition_penalty contains inf"),
        ("num_biased", int32([51, 0]), "started.num_biased contains 51; it must be 0 to 50"),
        ("num_biased", b"", "started.biased has 8 bytes; 0 entries need 0"),
        ("biased", int32([4, 50]), "started.biased contains 50; it must be 0 to 49"),
        ("biases", FLOAT_NAN, "started.biases contains nan; it must be -1000000.0 to 1000000.0, or -inf"),
        ("biases", struct.pack("<2f", 1, np.inf), "started.biases contains inf"),
        ("biases", struct.pack("<2f", 1, -2e6), "started.biases contains -2000000.0"),
        ("biases", struct.pack("<f", 1), "started.biases has 4 bytes; 2 entries need 8"),
        ("num_allowed", int32([1, 3]), "started.allowed has 12 bytes; 4 entries need 16"),
        ("allowed", int32([1, 2, -1]), "started.allowed contains -1; it must be 0 to 49"),
        ("num_logprobs", int32([52, 0]), "started.num_logprobs contains 52; it must be 0 to 51"),
        ("prompt_logprobs_from", int32([2, 0]), "started.prompt_logprobs_from must lie below started.num_prompt"),
        ("prompt_logprobs_from", int32([-1, 0]), "started.prompt_logprobs_from contains -1"),
    ],
)
def test_features_out_of_range_are_named(field: str, data: bytes, problem: str) -> None:
    message = featured_plan()
    setattr(message.started, field, data)
    with pytest.raises(PlanError, match=problem.replace(".", r"\.").replace("+", r"\+")):
        read_plan(message, GEOMETRY)


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
    for _ in range(6000):
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


def test_random_bytes_are_not_a_frame() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        data = draw.randbytes(draw.randint(0, 60))
        try:
            parse_frame(data)
        except FrameError:
            continue
