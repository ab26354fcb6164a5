"""Frames: what is well formed arrives as it was sent; anything else is one typed error."""

import random
import struct

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.wire import FrameError, Outcome, PlanError, parse_frame, read_plan, result_frame
from tests.gpu_worker.plans import TinyCore, int32

GEOMETRY = Geometry(
    page_size=16, num_pages=20, max_rows=4, max_length=100, token_budget=64, chunk_align=16, vocab_size=50
)


def good_plan() -> pb.StepPlan:
    core = TinyCore(GEOMETRY)
    core.add(
        1, [1, 2, 3], temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=2**64 - 1, banned_until=9, banned=[7, 8]
    )
    core.add(2, [4] * 20, seed=5)
    return core.plan(chunks={1: 3, 2: 16})


def test_a_plan_arrives_as_it_was_sent() -> None:
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


def test_a_result_frame_holds_the_outcome() -> None:
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


FLOAT_NAN = struct.pack("<2f", float("nan"), 1.0)


@pytest.mark.parametrize(
    ("field", "data", "problem"),
    [
        ("decode_rows", int32([0]), "decode_rows holds 0; it must be 1 to 4"),
        ("decode_rows", int32([5]), "decode_rows holds 5; it must be 1 to 4"),
        ("decode_rows", b"abc", "decode_rows has 3 bytes"),
        ("decode_rows", int32([3, 3]), "a row stands twice"),
        ("decode_rows", int32([1]), "a row stands twice"),
        ("appends.rows", int32([1]), "appends.pages has 0 bytes; 1 entries need 4"),
        ("chunks.counts", int32([3, 65]), "chunks.counts holds 65; it must be 1 to 64"),
        ("chunks.counts", int32([3, 64]), "the plan costs 80 tokens; token_budget is 64"),
        ("chunks.counts", int32([3, -1]), "chunks.counts holds -1"),
        ("chunks.starts", int32([0, 100]), "chunks.starts holds 100; it must be 0 to 99"),
        ("chunks.samples", b"\x01\x02", "chunks.samples must be 2 bytes of 0 or 1"),
        ("chunks.samples", b"\x01", "chunks.samples must be 2 bytes of 0 or 1"),
        ("started.rows", int32([2, 2]), "a row stands twice in started.rows"),
        ("started.num_tokens", int32([0, 20]), "started.num_tokens holds 0; it must be 1 to 100"),
        ("started.num_tokens", int32([3, 101]), "started.num_tokens holds 101"),
        ("started.num_tokens", int32([3, 21]), "started.tokens has 92 bytes; 24 entries need 96"),
        ("started.tokens", int32([50] * 23), "started.tokens holds 50; it must be 0 to 49"),
        ("started.pages", int32([0, 1, 2]), "started.pages holds 0; it must be 1 to 19"),
        ("started.pages", int32([1, 2, 20]), "started.pages holds 20"),
        ("started.first_position", int32([3, 0]), "started.first_position must lie below started.num_tokens"),
        ("started.temperature", FLOAT_NAN, "started.temperature holds nan"),
        ("started.top_p", struct.pack("<2f", 1.5, 1.0), "started.top_p holds 1.5; it must be 0.0 to 1.0"),
        ("started.min_p", struct.pack("<2f", -0.1, 1.0), "started.min_p holds -0.1"),
        ("started.top_k", int32([-1, 0]), "started.top_k holds -1"),
        ("started.seed", b"1234567", "started.seed has 7 bytes; 2 rows need 16"),
        ("started.num_banned", int32([2, 1]), "started.banned has 8 bytes; 3 entries need 12"),
    ],
)
def test_what_is_out_of_range_is_named(field: str, data: bytes, problem: str) -> None:
    message = good_plan()
    *path, name = field.split(".")
    setattr(getattr(message, path[0]) if path else message, name, data)
    with pytest.raises(PlanError, match=problem.replace(".", r"\.")):
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


def test_mutated_frames_raise_nothing_else() -> None:
    """Mutated as a whole, or in one field of a frame that stays a message: refused by a typed error, or valid."""
    draw = random.Random(4)
    frame = pb.CoreToWorker(plan=good_plan()).SerializeToString()
    counts = {"frame": 0, "plan": 0, "valid": 0}
    for _ in range(6000):
        if draw.random() < 0.5:
            data = mutated(frame, draw)
        else:
            plan = good_plan()
            part = draw.choice([plan, plan.started, plan.appends, plan.chunks])
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


def test_random_bytes_are_no_frame() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        data = draw.randbytes(draw.randint(0, 60))
        try:
            parse_frame(data)
        except FrameError:
            continue
